"""All formats by turns, each as often as its share says, in one process or several."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from tests.fuzz.formats import Format, formats
from tests.fuzz.runner import Outcome, run

_ROUND = 5  # cases of a share of 1 in a round; in a long run with a number of cases, where a fork should be worth it:
_LONG_ROUND = 40


def divided(chosen: Sequence[Format], cases: int) -> dict[str, int]:
    """How many of so many cases each format has: one, if there are enough, and of the others as its share says."""
    once = int(cases >= len(chosen))
    left, whole = cases - once * len(chosen), sum(form.share for form in chosen)
    exact = {form.name: once + left * form.share / whole for form in chosen}
    counts = {name: math.floor(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: cases - sum(counts.values())]:
        counts[name] += 1
    return counts


def batches(chosen: Sequence[Format], first: int, counts: dict[str, int] | None) -> Iterator[tuple[Format, range]]:
    """What is tried, in order: every round has cases of every format, until there are none left.

    Args:
        first: number of the first case of each format.
        counts: how many of each format; None for ever more.
    """
    size = _ROUND if counts is None else _LONG_ROUND
    for turn in itertools.count():
        some = False
        for form in chosen:
            most = math.inf if counts is None else counts[form.name]
            start, stop = (math.ceil((turn + i) * size * form.share) for i in range(2))
            numbers = range(first + start, first + int(min(stop, most)))
            if numbers:
                some = True
                yield form, numbers
        if not some:
            return


def outcomes(
    chosen: Sequence[Format], seed: int, until: float, first: int = 0, cases: int | None = None, processes: int = 1
) -> Iterator[Outcome]:
    """What came of each batch of cases, as soon as it is known.

    Args:
        until: ``time.monotonic()`` at which to end.
        first: number of the first case of each format.
        cases: how many in all; None for as many as there is time for.
        processes: how many run at a time; the cases are the same in any number of them.
    """
    counts = None if cases is None else divided(chosen, cases)
    for form in chosen:
        form.prepare()
    todo = batches(chosen, first, counts)
    if processes == 1:
        for form, numbers in todo:
            if time.monotonic() >= until:
                return
            yield run(form, seed, numbers, until)
        return
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        waiting: set[Future[Outcome]] = set()
        while True:
            more = itertools.islice(todo, 2 * processes - len(waiting)) if time.monotonic() < until else ()
            waiting |= {pool.submit(_run_named, form.name, seed, numbers, until) for form, numbers in more}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                yield one.result()


def _run_named(name: str, seed: int, numbers: range, until: float) -> Outcome:
    return run(formats()[name], seed, numbers, until)


def rounds(chosen: Sequence[Format], seed: int, until: float, first: int = 0, cases: int | None = None) -> Outcome:
    """All of :func:`outcomes`, in this process, in one."""
    whole = Outcome()
    for one in outcomes(chosen, seed, until, first, cases):
        whole.add(one)
    return whole
