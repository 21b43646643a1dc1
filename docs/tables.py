"""Writes tables of results, and numbers of claims, into the Markdown files that show them: ``python docs/tables.py``.

With ``--check`` it writes nothing and says which files are not current. A table stands between two comments, and the
first has the commands whose output it is. Either the tables of tasks, without the notes below them:

    <!-- tables: ifsl-bench table glyphs-5shot --format markdown -->
    <!-- end -->

(with " # without trials, lazy" behind the command, without the columns of these headings and the rows whose first
word is one of them, and without tables that have one of them between the colons and commas of the title;)

or what a Python script of ours makes of the stored results:

    <!-- script: docs/simulations/quantised.py results -->
    <!-- end -->

or all that a command prints:

    <!-- prints: ifsl-bench tasks reference -->
    <!-- end -->

or paired differences, a command for each row; commands that differ in the task alone stand in one line:

    <!-- differences: points of Acc.
    ifsl-bench compare lr+s lr --task glyphs-1shot,glyphs-5shot
    ifsl-bench compare lr+a lr --task glyphs-5shot
    -->
    <!-- end -->

A sentence that compares rows is one of results/claims.toml, and is followed by a comment with its name. Its words stay
as they are; only its numbers are written:

    LR+A is 0.7 points ahead of LR. <!-- claim: attractors -->

Numbers are those of the results that come with the package; a user's own are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from claims import evaluate_all
from click import ClickException

from ifsl_bench.analysis import task_results as asked
from ifsl_bench.cli.main import cli
from ifsl_bench.utils.errors import UserError, unknown_name_error

ROOT = Path(__file__).parents[1]
END = "<!-- end -->"
CLAIM = re.compile(r"<!-- claim: (\S+) -->")
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
START = re.compile(r"<!-- (?P<kind>tables|script|prints|differences): (?P<told>.*?)-->\n", re.S)
BLOCK = re.compile(rf"(?P<start>{START.pattern})(?P<body>.*?){END}", re.S)
GRID = re.compile(r"^(\S.*)\n\n((?:\|.*\n)+)", re.M)  # a title, an empty line, a table


def printed(command: str, *more: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    _, *arguments = shlex.split(command)
    with contextlib.redirect_stdout(out):
        cli([*arguments, *more], standalone_mode=False)
    return out.getvalue()


def tables(told: str) -> str:
    """The tables that ``ifsl-bench table ... --format markdown`` prints, their titles in bold."""
    command, _, without = told.strip().partition(" # without ")
    names = {name.strip() for name in without.split(",")}
    grids = [grid for grid in GRID.findall(printed(command)) if not names.intersection(re.split("[:;,] ", grid[0]))]
    return "\n\n".join(f"**{title}**\n\n{narrowed(grid.rstrip(), names)}" for title, grid in grids)


def script(told: str) -> str:
    """The Markdown table that a Python script prints."""
    command = f"{shlex.quote(sys.executable)} {told}"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(line for line in ended.stdout.splitlines() if line.startswith("|"))


def narrowed(grid: str, without: Collection[str]) -> str:
    """A Markdown table without the columns of these headings, and without the rows whose first word is one of them."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in grid.splitlines()]
    places = [at for at, heading in enumerate(lines[0]) if heading.strip() not in without]
    kept = [line for line in lines if line[0].split()[0] not in without]
    return "\n".join(f"|{'|'.join(line[at] for at in places)}|" for line in kept)


def differences(told: str) -> str:
    """A row for each ``ifsl-bench compare A B --task T``, of the metric that the heading's last words name."""
    heading, *commands = told.strip().splitlines()
    metric = heading.rpartition("points of ")[2]
    lines = [f"| {heading} | overall | over episodes | over classes | each seed |", "|---|---|---|---|---|"]
    for line in commands:
        command, _, tasks = line.rpartition(" ")
        _, _, a, b, _ = shlex.split(command)
        for task in tasks.split(","):
            grid = [row for row in printed(f"{command} {task}", "--format", "markdown").splitlines() if row[:1] == "|"]
            headings, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in grid)
            cells = next(cells for row in rows if (cells := dict(zip(headings, row, strict=True)))["metric"] == metric)
            values = [cells[over] for over in ("A - B overall", "over episodes", "over classes")]
            seeds = ", ".join(cells["each seed"].split())
            lines.append(f"| {task}: `{a}` minus `{b}` | {' | '.join(values)} | {seeds} |")
    return "\n".join(lines)


@functools.cache
def sentences() -> dict[str, str]:
    """The sentences of all claims with the numbers of today's results, by the claims' names."""
    return {claim.name: claim.text for claim in evaluate_all()}


def marked(name: str, sentence: str) -> re.Pattern[str]:
    """Finds a claim's words, with any numbers and line ends among them, before the comment that names the claim."""
    words = (NUMBER.pattern.join(map(re.escape, NUMBER.split(word))) for word in sentence.split())
    return re.compile(r"\s+".join(words) + rf"(?=[.,;:]?\s*<!-- claim: {re.escape(name)} -->)")


def claimed(text: str) -> str:
    """A Markdown text with the numbers of its claims written anew.

    Raises:
        UserError: a comment names a claim that is not there, or does not follow its sentence.
    """
    for name in dict.fromkeys(CLAIM.findall(text)):
        if name not in sentences():
            raise unknown_name_error("claim", name, sentences(), where="of results/claims.toml")
        text, count = marked(name, sentences()[name]).subn(functools.partial(_renumbered, sentences()[name]), text)
        if count < len(re.findall(f"<!-- claim: {re.escape(name)} -->", text)):
            raise UserError(f"the words before the comment of claim {name} are not: {sentences()[name]}")
    return text


def _renumbered(sentence: str, match: re.Match[str]) -> str:
    numbers = iter(NUMBER.findall(sentence))
    return NUMBER.sub(lambda _: next(numbers), match[0])


def current(text: str) -> str:
    """A Markdown text with all its tables made anew, and the numbers of its claims."""

    if len(START.findall(text)) != len(BLOCK.findall(text)):
        raise UserError(f"a table has a start and no end; put a line {END} below it")

    def block(match: re.Match[str]) -> str:
        kinds = {"tables": tables, "script": script, "prints": printed, "differences": differences}
        body = kinds[match["kind"]](match["told"]).strip()
        return f"{match['start']}\n{body}\n\n{END}"

    return BLOCK.sub(block, claimed(text))


def main() -> int:
    """The exit status: with ``--check`` 1 where a file is not current; 2 where one cannot be made."""
    asked.load_task_results = functools.cache(asked.load_task_results)  # hundreds of commands read the same results
    parser = argparse.ArgumentParser(description="Write tables of results, and numbers of claims, into Markdown files.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a table is not current")
    shown = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    parser.add_argument("files", nargs="*", type=Path, default=shown, help="[README.md and docs/*.md]")
    options = parser.parse_args()
    old = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["IFSL_BENCH_HOME"] = home
        for path in options.files:
            text = path.read_text(encoding="utf-8")
            try:
                new_text = current(text)
            except (UserError, ClickException) as error:
                print(f"{path}: {error}", file=sys.stderr)
                return 2
            if new_text != text:
                old.append(path)
                print(f"{path}: {'not current; write it with: python docs/tables.py' if options.check else 'written'}")
                if not options.check:
                    path.write_text(new_text, encoding="utf-8")
    return 1 if options.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
