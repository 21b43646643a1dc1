"""Runs cases in a process of their own, which may hang or die, and says what came of them."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.formats import Format, case

BYTES = 10**9  # that a case may take
PATIENCE = 10  # seconds after its time is up, until a process is killed that does not hear
_CHUNK = 200  # cases a process does before another takes over
_ROUND = 5  # cases of a share of 1 in a round


ENDS = ("good", "refused", "failed")


class Verdict(NamedTuple):
    """The end of a case, one of ``ENDS``; and what was said of it, or what is wrong with how it ended."""

    how: str
    told: str


@dataclass(frozen=True)
class Failure:
    """A case that ended otherwise than it may."""

    format: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        return f"--only {self.format} --seed {self.seed} --first {self.number} --cases 1: {self.what}"


@dataclass
class Outcome:
    """How many cases of each format there were, and how many of each (format, end); and those that failed."""

    cases: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


class _TooLong(BaseException):
    """The time is up; no ``except Exception`` holds it."""


def _stop(*_: object) -> None:
    raise _TooLong


def judged(form: Format, path: Path) -> Verdict:
    """Reads a file, in this process."""
    from ifsl_bench.utils.errors import UserError

    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, form.seconds)
    try:
        end = form.read(path)
        return Verdict("good", end if isinstance(end, str) else "")
    except _TooLong:
        return Verdict("failed", f"it took more than {form.seconds:g} s")
    except UserError as error:
        message = str(error)
        plain = message.strip() and not {unicodedata.category(letter) for letter in message} & {"Cc", "Cs", "Zl", "Zp"}
        return Verdict("refused", message) if plain else Verdict("failed", f"it is told badly: {message!r:.300}")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        way = " < ".join(frame.name for frame in frames[:-6:-1])
        most = 2000 if isinstance(error, AssertionError) else 150  # what one of the harness itself says
        return Verdict("failed", f"{type(error).__name__}: {str(error)[:most]!r} at {place} ({way})")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # what the system's call says may be the parent's
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(form: Format, make: Callable[[int], bytes], numbers: range, folder: str, line: Connection) -> None:
    """Cases one after the other; (number, how it ended) is sent for each, and the number before it."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries in C say things
    resource.setrlimit(resource.RLIMIT_AS, (16 * BYTES,) * 2)  # so that the machine lives
    base = peak()  # of what the parent has had, which a fork begins with
    for number in numbers:
        line.send((number, None))
        path = Path(folder) / "case"
        path.write_bytes(make(number))
        before = peak()
        ended = judged(form, path)
        if before < peak() > base + BYTES:
            ended = Verdict("failed", f"it took {(peak() - base) / 1e9:.1f} GB")
        line.send((number, ended))
        if peak() > base + BYTES:
            return  # the next one needs a process without this peak
    line.send((numbers.stop, None))


def tried(
    form: Format, make: Callable[[int], bytes], numbers: range, until: float = float("inf")
) -> Iterator[tuple[int, Verdict]]:
    """(number, how it ended) of cases of a format, in other processes.

    Args:
        make: what is in the file of a number.
        until: ``time.monotonic()`` at which no other process begins.
    """
    form.prepare()
    form.seeds()  # made here once, for all processes
    context = multiprocessing.get_context("fork")
    next_one = numbers.start
    while next_one < numbers.stop and time.monotonic() < until:
        theirs, ours = context.Pipe(duplex=False)
        stop = min(numbers.stop, next_one + _CHUNK)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            child = context.Process(target=_work, args=(form, make, range(next_one, stop), folder, ours))
            child.start()
            ours.close()
            last = next_one
            for number, ended in _heard(theirs, form.seconds + PATIENCE):
                last = number
                if ended is not None:
                    yield number, ended
                    last = number + 1
            if last < stop and child.exitcode is None:
                child.join(0.2)
                if child.exitcode is None:
                    child.kill()
                    child.join()
                    yield last, Verdict("failed", f"it did not even hear the signal after {form.seconds:g} s")
                    last += 1
            child.join()
            if last < stop and child.exitcode not in (0, -signal.SIGKILL):
                yield last, Verdict("failed", f"the process died ({child.exitcode})")
                last += 1
            next_one = last
        theirs.close()


def _heard(line: Connection, patience: float) -> Iterator[tuple[int, Verdict | None]]:
    """Yields a process's messages, until its end or a long silence."""
    while True:
        if not line.poll(patience):
            return
        try:
            yield line.recv()
        except EOFError:
            return


def run(form: Format, seed: int, numbers: range, until: float = float("inf"), into: Outcome | None = None) -> Outcome:
    """Tries cases of a format, and counts what came of them."""
    into = into or Outcome()
    for number, (how, message) in tried(form, partial(case, form, form.seeds(), seed), numbers, until):
        into.cases[form.name] += 1
        into.ends[form.name, how] += 1
        if how == "failed":
            into.failures.append(failure := Failure(form.name, seed, number, message))
            print(f"FAILED {failure}", file=sys.stderr, flush=True)
    return into


def rounds(chosen: Sequence[Format], seed: int, until: float, first: int = 0, cases: int | None = None) -> Outcome:
    """Tries all formats by turns, each as often as its share says.

    Args:
        until: ``time.monotonic()`` at which to end.
        first: number of the first case of each format.
        cases: how many of each format at the most.
    """
    outcome = Outcome()
    for turn in itertools.count():
        ranges = [_turn(form, turn, first, cases) for form in chosen]
        if not any(ranges) or time.monotonic() >= until:
            return outcome
        for form, numbers in zip(chosen, ranges, strict=True):
            if numbers and time.monotonic() < until:
                run(form, seed, numbers, until, outcome)


def _turn(form: Format, turn: int, first: int, cases: int | None) -> range:
    start, stop = (math.ceil((turn + i) * _ROUND * form.share) for i in range(2))
    return range(first + start, first + (stop if cases is None else min(stop, cases)))
