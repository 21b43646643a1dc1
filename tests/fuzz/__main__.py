"""``python -m tests.fuzz``: see :mod:`tests.fuzz`."""

from __future__ import annotations

import os

# Every case is a fork, in which threads of OpenMP that had started before are missing: whoever waits for them waits for
# ever. Libraries read this when they are loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.formats import Format, formats
from tests.fuzz.kept import FOLDER, content_of, ended, keep, kind
from tests.fuzz.rounds import outcomes
from tests.fuzz.runner import Failure, Outcome

ABOUT = """\
Damaged and hostile files of every format, damaged caches and killed runs. Each case must end in success or in one line,
within 10 seconds and 1 GB, and a run on a damaged cache or after a kill with the counts of an undisturbed one.

A case that fails is written to tests/fuzz/kept/, where the tests find it; commit it with what mends it.
"""
MORE = """\
examples:
  python -m tests.fuzz --minutes 60 --processes 2        an hour of everything
  python -m tests.fuzz --cases 200000 --processes 2      so many cases, divided by the formats' shares
  python -m tests.fuzz --cases 100000 --seed 1           other cases: a long run can be divided by seeds
  python -m tests.fuzz --only cache --only kills         damaged caches and killed runs
  python -m tests.fuzz --only tar --seed 1 --first 4711 --cases 1     that case again
  python -m tests.fuzz --replay tests/fuzz/kept/tar/x    a kept case again

to add a format: a Format in a module that MODULES in tests/fuzz/formats.py names. It has valid files to begin with, a
function that reads one as the program does, one that spoils it where changing any bytes is not enough, and a share of
the cases: 10 for one of which a thousand take a second or two, less for a slower one.
"""
_SECONDS = 60.0  # between two lines that say how far it has got


def main() -> int:
    known = formats()
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=ABOUT, epilog=MORE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="how long to go on; 1 where no --cases are given")
    parser.add_argument("--cases", type=int, help="how many cases in all, divided by the formats' shares")
    parser.add_argument("--seed", type=int, default=0, help="of what is tried; 0 where not given")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each format")
    parser.add_argument("--only", action="append", choices=sorted(known), help="a format; may be repeated")
    parser.add_argument("--processes", type=int, default=1, help="how many run at a time; the cases are the same")
    parser.add_argument("--keep", type=Path, default=FOLDER, help="a folder for cases that fail")
    parser.add_argument("--replay", type=Path, nargs="+", help="kept cases, and nothing else")
    asked = parser.parse_args()
    if asked.replay:
        return _replay(known, asked.replay)
    chosen = [known[name] for name in asked.only or known]
    start = time.monotonic()
    minutes = asked.minutes or (1.0 if asked.cases is None else float("inf"))
    whole = Outcome()
    seen: set[tuple[str, str]] = set()
    said = start
    for one in outcomes(chosen, asked.seed, start + 60 * minutes, asked.first, asked.cases, asked.processes):
        whole.add(one)
        for failure in one.failures:
            if (key := (failure.format, kind(failure.what))) not in seen:
                seen.add(key)
                _keep(known[failure.format], failure, asked.keep)
        if time.monotonic() - said > _SECONDS:
            said = time.monotonic()
            print(f"{said - start:5.0f} s: {whole.cases.total():,} cases, {len(whole.failures)} failed", flush=True)
    _report(whole, chosen, time.monotonic() - start, f"seed {asked.seed}, from case {asked.first}, commit {commit()}")
    return bool(whole.failures)


def _replay(known: dict[str, Format], paths: list[Path]) -> int:
    failed = 0
    for path in paths:
        form = known[path.parent.name]
        (found,) = ended(form, [content_of(form, path)])
        print(f"{path}: {found.how}{f', {found.told}' if found.told else ''}")
        failed += found.how == "failed"
    return bool(failed)


def _keep(form: Format, failure: Failure, folder: Path) -> None:
    path = keep(form, failure, folder)
    print(f"kept: {path}; again: python -m tests.fuzz --replay {path}", file=sys.stderr, flush=True)


def _report(whole: Outcome, chosen: list[Format], seconds: float, about: str) -> None:
    for form in chosen:
        name = form.name
        cases, spent = whole.cases[name], whole.seconds[name]
        ends = ", ".join(f"{count:,} {end}" for (of, end), count in sorted(whole.ends.items()) if of == name and count)
        failed = sum(failure.format == name for failure in whole.failures)
        print(
            f"{name:8} {cases:8,} cases: {whole.good[name]:,} good{f' ({ends})' if ends else ''}, "
            f"{whole.refused[name]:,} refused, {failed} failed; {cases / max(spent, 1e-9):,.1f} a second"
        )
    failed = len(whole.failures)
    print(
        f"{whole.cases.total():8,} cases in {seconds:.0f} s: {whole.good.total():,} good, "
        f"{whole.refused.total():,} refused, {failed} failed; {about}"
    )


def commit() -> str:
    """The commit of the checkout, and whether it was changed since."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
