"""``python -m tests.fuzz``: see :mod:`tests.fuzz`."""

from __future__ import annotations

import os

# Every case is a fork, in which threads of OpenMP that had started before are missing: whoever waits for them waits for
# ever. Libraries read this when they are loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.formats import Format, formats
from tests.fuzz.kept import FOLDER, content_of, ended, keep, kind
from tests.fuzz.runner import ENDS, rounds

ABOUT = """\
Damaged and hostile files of every format, damaged caches and killed runs. Each case must end in success or in one line,
within 10 seconds and 1 GB, and a run on a damaged cache or after a kill with the counts of an undisturbed one.
"""
MORE = """\
  python -m tests.fuzz --minutes 60 --only cache --only kills         an hour of damaged caches and killed runs
  python -m tests.fuzz --only tar --seed 1 --first 4711 --cases 1     that case again
  python -m tests.fuzz --replay tests/fuzz/kept/tar/x                 a kept case again
"""


def main() -> int:
    formats_by_name = formats()
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=ABOUT, epilog=MORE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on; 1 where not given")
    parser.add_argument("--cases", type=int, help="how many of each format at the most")
    parser.add_argument("--seed", type=int, default=0, help="of what is tried; 0 where not given")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each format")
    parser.add_argument("--only", action="append", choices=sorted(formats_by_name), help="a format; may be repeated")
    parser.add_argument("--keep", type=Path, default=FOLDER, help="a folder for cases that fail")
    parser.add_argument("--replay", type=Path, nargs="+", help="kept cases, and nothing else")
    options = parser.parse_args()
    if options.replay:
        return _replay(formats_by_name, options.replay)
    chosen, start = [formats_by_name[name] for name in options.only or formats_by_name], time.monotonic()
    outcome = rounds(chosen, options.seed, start + 60 * options.minutes, options.first, options.cases)
    for failure in {(failure.format, kind(failure.what)): failure for failure in outcome.failures}.values():
        path = keep(formats_by_name[failure.format], failure, options.keep)
        print(f"kept: {path}; again: python -m tests.fuzz --replay {path}", file=sys.stderr)
    for form in chosen:
        print(f"{form.name:11}", ", ".join(f"{outcome.ends[form.name, how]:,} {how}" for how in ENDS))
    print(f"{outcome.cases.total():,} cases in {time.monotonic() - start:.0f} s, {len(outcome.failures)} failed")
    return bool(outcome.failures)


def _replay(formats_by_name: dict[str, Format], paths: list[Path]) -> int:
    failed = 0
    for path in paths:
        verdict = ended(formats_by_name[path.parent.name], content_of(path))
        print(f"{path}: {verdict.how}{f', {verdict.told}' if verdict.told else ''}")
        failed += verdict.how == "failed"
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
