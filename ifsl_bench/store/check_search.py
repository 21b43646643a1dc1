"""Checks a result file's options against the search that it records."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from ifsl_bench.board.result_file import Result
from ifsl_bench.common.wording import short, spelled
from ifsl_bench.jobs.job import Job
from ifsl_bench.plugin import settings
from ifsl_bench.plugin.space import RATE
from ifsl_bench.protocol.limits import MOST_TRIALS


def odd_search(result: Result, job: Job | None) -> Iterator[str]:
    """Yields a line for each value that no search gives.

    Args:
        job: what the result is of; None where it is unknown, and the file is held against itself alone.
    """
    if job and result.transductive != job.method.transductive:
        yield f"transductive: {str(result.transductive).lower()}, method {job.name} says otherwise"
    if job and job.training.changes() and not job.trains:
        yield f"train: {next(iter(job.training.changes()))}, and method {job.name} with these options trains nothing"
    names = next(iter(result.tuned), "")
    expected = ", ".join(job.searched) if job else names
    if list(result.tuned) != [expected] * bool(expected):
        tuned = " and ".join(result.tuned) or "nothing"
        choice = expected or "one thing"
        yield f"tuned: {tuned}, in setting {result.setting!r} {choice} is chosen on validation episodes"
    elif not names and result.trials:
        yield f"setting: {result.setting!r}, and nothing was tuned"
    elif result.setting == "every" and (names or (result.training and not job)):
        yield "setting: 'every', which is of what neither trains nor chooses"
    elif names:
        yield from _odd_choice(result, names, job)
    else:
        yield from _odd_settings(result, job, {}, "")


def _odd_choice(result: Result, names: str, job: Job | None) -> Iterator[str]:
    """Checks that the settings to try were tried, and the best of them chosen."""
    tried = result.tuned[names]
    if result.trials > MOST_TRIALS:  # said already, and not to be made again
        return
    if result.trials and len(tried) > result.trials:
        yield f"tuned: {len(tried)} settings were tried, {result.setting!r} allows {result.trials}"
        return
    if result.earlier_search:  # its settings cannot be made again: it is held against itself
        job = None
    rounds = job.rounds(lambda candidate: result.accuracy(candidate.name)) if job else []
    candidates = {candidate.name: candidate for candidate in itertools.chain.from_iterable(rounds)}
    if job and (tried.keys() != candidates.keys() or result.rounds != [len(one) for one in rounds]):
        strange = [one for one in tried if one not in candidates]
        missing = [one for one in candidates if one not in tried]
        reasons = [f"{one} is none of the settings to try" for one in strange[:1]]
        reasons += [f"{one} was not tried" for one in missing[:1]]
        reasons += [f"rounds are {result.rounds}"] if not reasons else []
        sizes = ", ".join(str(len(candidates_of)) for candidates_of in rounds)
        yield f"tuned: {', '.join(reasons)}; {result.setting!r} has rounds of {sizes}"
        return
    sound = {one: tried[one] for one in candidates or tried if one not in result.passed_over}
    if not sound:
        yield "passed_over: all that was tried, so that nothing can have been chosen"
        return
    best = max(sound, key=sound.__getitem__)
    if job:
        point, one = candidates[best].point, candidates[best].job
        offered = [candidate.point for candidate in candidates.values()]
        yield from _odd_settings(result, one, point, best, settings.at_edge(job.method, one.options, point, offered))
    elif not re.fullmatch(", ".join(_pattern(result, key) for key in names.split(", ")), best):
        yield f"options: another setting than {best}, the best of those tried"


def _pattern(result: Result, key: str) -> str:
    """Makes the pattern of a chosen value; any matches the schedule's learning rate, which only the method knows."""
    if key == RATE and "rate" not in result.train:
        return re.escape(f"{key}=") + "[^, ]+"
    value = result.train["rate"] if key == RATE else result.options.get(key)
    return re.escape(spelled({key: value}))


def _odd_settings(
    result: Result, job: Job | None, point: dict[str, Any], best: str, edge: list[str] | tuple[()] = ()
) -> Iterator[str]:
    """Options, training and edge, against those of the job that was chosen, at this point."""
    if job:
        options = {**job.options, **{key: value for key, value in point.items() if key != RATE}}
        why = f"the best of those tried, {best}, has" if best else "method and task make it"
        for name, found, expected in (("options", result.options, options),
                                      ("train", result.train, job.training.changes())):  # fmt: skip
            for key in sorted(found.keys() | expected.keys()):
                one, other = (short(of[key]) if key in of else "none" for of in (found, expected))
                if one != other and found.get(key) != expected.get(key):
                    yield f"{name}.{key}: {one}, {why} {other}"
    if (job or not point) and sorted(result.edge) != sorted(edge):
        yield f"edge: {', '.join(result.edge) or 'nothing'}, what was chosen has {', '.join(edge) or 'nothing'} there"
    if not best and result.passed_over:
        yield f"passed_over: {result.passed_over[0]}, and nothing was tuned"
