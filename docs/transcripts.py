"""Runs the commands that a page shows and writes what they print: ``python docs/transcripts.py docs/tutorial.md``.

A block ``console`` has commands, which begin with "$ ", each followed by its output. They are run in order by bash, in
an empty folder with an empty home. A block ``python`` whose first line is a comment with a file's name is written to
that file. What is printed to standard error (progress, mostly) is left out. With ``--check`` nothing is written: every
command has to end well.

A number of a sentence is followed by a comment with a regular expression, whose group is that number in the outputs
above it, the last one where there are several; it is written with them:

    Your row is 2.79<!-- output: ^Acc\\. +-(\\S+) --> points below `acastle`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?P<kind>console|python)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.py)\n")
NUMBER = re.compile(r"(?P<number>\d[\d,]*(\.\d+)?)(?P<mark><!-- output: (?P<pattern>.+?) -->)")


class Failed(Exception):
    """A command that did not end well."""


def commands(body: str) -> list[str]:
    return [line[2:] for line in body.splitlines() if line.startswith("$ ")]


def environment(folder: Path) -> dict[str, str]:
    """That of the commands: this checkout, this Python, a home of their own."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    return {**os.environ, **paths, **here, "IFSL_BENCH_HOME": str(folder / "ifsl"), "COLUMNS": "100"}


def printed(command: str, folder: Path) -> str:
    """What a command prints to standard output, without spaces at the ends of lines.

    Raises:
        Failed: it ended with another status than 0, or with a message of ifsl-bench's or a traceback.
    """
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600
    )
    error_line = re.search(r"^(ifsl-bench: |Traceback )", done.stderr, re.MULTILINE)  # its status is lost in a pipe
    if done.returncode or error_line:
        raise Failed(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return re.sub(r"[ \t]+$", "", done.stdout.replace(str(folder), "~"), flags=re.MULTILINE).rstrip("\n")


def transcribed(text: str, folder: Path) -> str:
    """A page with the output of its commands as they are run now, in ``folder``."""

    def block(match: re.Match[str]) -> str:
        if match["kind"] == "python":
            if named := FILE.match(match["body"]):
                (folder / named[1]).write_text(match["body"], encoding="utf-8")
            return match[0]
        parts = (f"$ {command}\n{printed(command, folder)}".rstrip() + "\n" for command in commands(match["body"]))
        return f"```console\n{''.join(parts)}```"

    return numbered(BLOCK.sub(block, text))


def numbered(text: str) -> str:
    """Return a page whose marked numbers are those of the outputs above them.

    Raises:
        Failed: no output above has such a number.
    """

    def number(match: re.Match[str]) -> str:
        above = "".join(part["body"] for part in BLOCK.finditer(text, 0, match.start()) if part["kind"] == "console")
        if not (found := re.findall(match["pattern"], above, re.MULTILINE)):
            raise Failed(f"no output above has the number of {match['mark']}")
        return f"{found[-1]}{match['mark']}"

    return NUMBER.sub(number, text)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="run the commands and write nothing")
    told = parser.parse_args(None if arguments is None else list(arguments))
    for page in told.pages:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                text = transcribed(page.read_text(encoding="utf-8"), Path(scratch).resolve())
            except Failed as error:
                print(f"{page}: {error}", file=sys.stderr)
                return 1
        if not told.check:
            page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
