"""Write, or compare with, golden copies of every table that the stored results make.

    python tests/golden.py write FOLDER     # before a change
    python tests/golden.py check FOLDER     # after it: exit status 1 and a line for each output that differs

The outputs are those of `table`, `leaderboard`, `compare` and `variance` in CSV and JSON on all tasks with stored
results. They are compared character by character, but for fields that the copies do not have.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands() -> list[list[str]]:
    """Return the arguments of every command whose output is kept."""
    tasks = sorted(path.name for path in (ROOT / "results").iterdir() if any(path.glob("*.seed-*.json")))
    listed: list[list[str]] = [["leaderboard"], ["leaderboard", "--full"], ["leaderboard", "--rank"]]
    for task in tasks:
        listed += [["table", task], ["table", task, "--full"], ["table", task, "--rank"]]
        labels = sorted({path.name.split(".seed-")[0] for path in (ROOT / "results" / task).glob("*.seed-*.json")})
        listed += [["compare", label, labels[0], "--task", task] for label in labels[1:]]
        listed += [["variance", task]]
    return [[*arguments, "--format", form] for arguments in listed for form in ("csv", "json")]


def output(arguments: list[str]) -> str:
    """Return what a command prints, or its error in a line."""
    from ifsl_bench.cli.main import cli
    from ifsl_bench.utils.errors import UserError

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli(arguments, prog_name="ifsl-bench", standalone_mode=False)
        except (UserError, SystemExit) as error:
            text.write(f"{type(error).__name__}: {error}\n")
        except Exception as error:  # a usage error of click, whose class depends on the option
            text.write(f"{type(error).__name__}: {error}\n")
    return text.getvalue()


def same(before: str, now: str) -> bool:
    """Return whether an output has the values of its copy; it may have further fields, in which nothing was lost.

    Args:
        before: the copy.
        now: the output.
    """
    if before == now:
        return True
    try:
        is_json = before.startswith("[")
        old, new = (json.loads(text) if is_json else list(csv.DictReader(io.StringIO(text))) for text in (before, now))
    except ValueError:
        return False
    fields = old[0].keys() if old else ()
    return bool(fields) and [{name: row[name] for name in fields if name in row} for row in new] == old


def main() -> int:
    """Write or check the copies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "check"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    differing = 0
    for arguments in commands():
        path = options.folder / ("_".join(arguments).replace("/", "%") + ".txt")
        text = output(arguments)
        if options.what == "write":
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or not same(path.read_text(encoding="utf-8"), text):
            differing += 1
            print(f"differs: ifsl-bench {' '.join(arguments)} ({path})")
    print(f"{len(commands())} outputs, {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
