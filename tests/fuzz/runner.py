"""Runs cases in a process of their own, which may hang or die, and says what came of them."""

from __future__ import annotations

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.formats import Format, case

SECONDS, BYTES = 10, 10**9  # that a case may take
_CHUNK = 200  # cases a process does before it says so


@dataclass(frozen=True)
class Failure:
    """A case that ended otherwise than it may."""

    format: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.format} --seed {self.seed} --first {self.number}: {self.what}"


@dataclass
class Outcome:
    """What came of cases, counted by format: good ones, refused ones, and those that failed."""

    good: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def cases(self) -> Counter[str]:
        return self.good + self.refused + Counter(failure.format for failure in self.failures)


class _TooLong(BaseException):
    """The time is up; no ``except Exception`` holds it."""


def _stop(*_: object) -> None:
    raise _TooLong


def judged(form: Format, path: Path) -> tuple[str, str]:
    """Reads a file: "good", "refused", or "failed"; and what was said of it, or what is wrong with how it ended."""
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return _judged(form, path)
    except _TooLong:
        return "failed", f"it took more than {SECONDS} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _judged(form: Format, path: Path) -> tuple[str, str]:
    from ifsl_bench.common.errors import UserError

    try:
        form.read(path)
        return "good", ""
    except UserError as error:
        told = str(error)
        plain = told.strip() and not {unicodedata.category(letter) for letter in told} & {"Cc", "Cs", "Zl", "Zp"}
        return ("refused", told) if plain else ("failed", f"it is told badly: {told!r:.300}")
    except _TooLong:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        way = " < ".join(frame.name for frame in frames[:-6:-1])
        return "failed", f"{type(error).__name__}: {str(error)[:150]!r} at {place} ({way})"


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # what the system's call says may be the parent's
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(form: Format, seed: int, numbers: range, folder: str, line: Connection) -> None:
    """Cases one after the other; (number, what came of it) is sent for each, and the number before it."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries in C say things
    seeds = form.seeds()
    resource.setrlimit(resource.RLIMIT_AS, (16 * BYTES,) * 2)  # so that the machine lives
    base = peak()  # of what the parent has had, which a fork begins with
    for number in numbers:
        line.send((number, None))
        path = Path(folder) / "case"
        path.write_bytes(case(form, seeds, seed, number))
        before = peak()
        verdict, told = judged(form, path)
        what = told if verdict == "failed" else verdict
        if before < peak() > base + BYTES:
            what = f"it took {(peak() - base) / 1e9:.1f} GB"
        line.send((number, what))
        if peak() > base + BYTES:
            return  # the next one needs a process without this peak
    line.send((numbers.stop, None))


def run(form: Format, seed: int, numbers: range, into: Outcome, until: float = float("inf")) -> None:
    """Tries cases of a format, and counts what came of them.

    Args:
        until: ``time.monotonic()`` at which no other begins.
    """
    form.seeds()  # made here once, for all processes
    context = multiprocessing.get_context("fork")
    next_one = numbers.start
    while next_one < numbers.stop and time.monotonic() < until:
        theirs, ours = context.Pipe(duplex=False)
        stop = min(numbers.stop, next_one + _CHUNK)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            child = context.Process(target=_work, args=(form, seed, range(next_one, stop), folder, ours))
            child.start()
            ours.close()
            last = next_one
            for number, what in _heard(theirs):
                last = number
                if what is not None:
                    _count(form, seed, number, what, into)
                    last = number + 1
            if last < stop and child.exitcode is None:
                child.join(0.2)
                if child.exitcode is None:
                    child.kill()
                    child.join()
                    _count(form, seed, last, f"it did not even hear the signal after {SECONDS} s", into)
                    last += 1
            child.join()
            if last < stop and child.exitcode not in (0, -signal.SIGKILL):
                _count(form, seed, last, f"the process died ({child.exitcode})", into)
                last += 1
            next_one = last
        theirs.close()


def _heard(line: Connection) -> Iterator[tuple[int, str | None]]:
    """What a process says, until it ends or is silent for too long."""
    while True:
        if not line.poll(2 * SECONDS):
            return
        try:
            yield line.recv()
        except EOFError:
            return


def _count(form: Format, seed: int, number: int, what: str, into: Outcome) -> None:
    if what in ("good", "refused"):
        (into.good if what == "good" else into.refused)[form.name] += 1
    else:
        into.failures.append(failure := Failure(form.name, seed, number, what))
        print(f"FAILED {failure}", file=sys.stderr, flush=True)


def rounds(chosen: list[Format], seed: int, until: float, first: int = 0, cases: int | None = None) -> Outcome:
    """All formats by turns, each as often as its share says.

    Args:
        until: ``time.monotonic()`` at which to end.
        first: number of the first case of each format.
        cases: how many of each format; None for as many as there is time for.
    """
    outcome = Outcome()
    if cases is not None:
        for form in chosen:
            run(form, seed, range(first, first + cases), outcome, until)
        return outcome
    turn = 0
    while time.monotonic() < until:
        for form in chosen:
            start = first + turn * 5 * form.share
            run(form, seed, range(start, start + 5 * form.share), outcome, until)
        turn += 1
    return outcome
