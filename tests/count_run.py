"""Counts what a cached run executes: ``python tests/count_run.py --home HOME`` after one run in that home.

Prints the files and functions of ifsl_bench that ``run --rerun --method imprint --task glyphs-5shot`` executes, and the
modules that it loads. ``--list`` prints the files with their functions, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).resolve().parents[1])
COMMAND = ["run", "--rerun", "--method", "imprint", "--task", "glyphs-5shot", "-q"]


def main() -> None:
    """Run the command under a profile function, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    executed: set[tuple[str, int, str]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        own = code.co_filename.startswith(ROOT) and "/tests/" not in code.co_filename
        # Bodies of modules and classes, lambdas and comprehensions are no functions of their own.
        if event == "call" and own and not code.co_name.startswith("<") and code.co_flags & 0x2:
            executed.add((code.co_filename, code.co_firstlineno, code.co_name))

    from ifsl_bench.cli.main import cli

    sys.argv = ["ifsl-bench", *COMMAND, "--home", options.home]
    sys.setprofile(profile)
    threading.setprofile(profile)
    with contextlib.redirect_stdout(io.StringIO()):
        cli(sys.argv[1:], standalone_mode=False)
    sys.setprofile(None)
    by_file = Counter(file for file, _, _ in executed)
    loaded = [name for name in sys.modules if name.split(".")[0] == "ifsl_bench"]
    print(f"{len(by_file)} files and {len(executed)} functions are executed, {len(loaded)} modules loaded")
    if options.list:
        for file, count in by_file.most_common():
            print(f"{count:4} {file.removeprefix(ROOT)}")
        print("\n".join(sorted(loaded)))


if __name__ == "__main__":
    main()
