"""Counts what a cached run executes: ``python tests/count_run.py --home HOME`` after two runs in that home.

Prints the files and functions of ifsl_bench that ``run --rerun --method imprint --task glyphs-5shot`` executes, and the
modules that it loads. ``--list`` prints each function with a caller, and the modules, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

ROOT = str(Path(__file__).resolve().parents[1])
COMMAND = ["run", "--rerun", "--method", "imprint", "--task", "glyphs-5shot", "-q"]


def is_own(code: CodeType) -> bool:
    """Whether this is a function of the product; lambdas, comprehensions, bodies of modules and classes are none."""
    own = code.co_filename.startswith(ROOT) and "/tests/" not in code.co_filename
    return own and not code.co_name.startswith("<") and bool(code.co_flags & 0x2)


def main() -> None:
    """Run the command under a profile function, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    callers: dict[CodeType, str] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in callers and is_own(frame.f_code):
            caller = frame.f_back
            while caller and not is_own(caller.f_code):
                caller = caller.f_back
            callers[frame.f_code] = caller.f_code.co_qualname if caller else ""

    from ifsl_bench.cli.main import cli

    sys.argv = ["ifsl-bench", *COMMAND, "--home", options.home]
    sys.setprofile(profile)
    threading.setprofile(profile)
    with contextlib.redirect_stdout(io.StringIO()):
        cli(sys.argv[1:], standalone_mode=False)
    sys.setprofile(None)
    by_file = defaultdict(list)
    for code in sorted(callers, key=lambda code: (code.co_filename, code.co_firstlineno)):
        by_file[code.co_filename.removeprefix(ROOT + "/")].append(code)
    loaded = [name for name in sys.modules if name.split(".")[0] == "ifsl_bench"]
    print(f"{len(by_file)} files and {len(callers)} functions are executed, {len(loaded)} modules loaded")
    if options.list:
        for file, codes in by_file.items():
            print(f"{len(codes):4} {file}")
            print("".join(f"       {code.co_qualname} <- {callers[code]}\n" for code in codes), end="")
        print("\n".join(sorted(loaded)))


if __name__ == "__main__":
    main()
