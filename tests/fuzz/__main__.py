"""``python -m tests.fuzz``: see :mod:`tests.fuzz`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.formats import case, formats
from tests.fuzz.runner import rounds


def main() -> int:
    known = formats()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile files, by the thousand.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(known), help="a format; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each format")
    parser.add_argument("--cases", type=int, help="how many of each format, instead of as many as there is time for")
    parser.add_argument("--keep", type=Path, help="a folder for the cases that fail")
    asked = parser.parse_args()
    start = time.monotonic()
    chosen = [known[name] for name in asked.only or known]
    outcome = rounds(chosen, asked.seed, start + 60 * asked.minutes, asked.first, asked.cases)
    for name, count in sorted(outcome.cases.items()):
        print(f"{name:10} {count:8,} cases: {outcome.good[name]:,} good, {outcome.refused[name]:,} refused")
    print(f"{outcome.cases.total():,} cases in {time.monotonic() - start:.0f} s, {len(outcome.failures)} failed")
    if asked.keep and outcome.failures:
        asked.keep.mkdir(parents=True, exist_ok=True)
        for failure in outcome.failures:
            content = case(known[failure.format], known[failure.format].seeds(), failure.seed, failure.number)
            (asked.keep / f"{failure.format}-{failure.seed}-{failure.number}").write_bytes(content)
    return bool(outcome.failures)


if __name__ == "__main__":
    sys.exit(main())
