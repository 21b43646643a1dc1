"""Checks a result file's options against the search that it records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ifsl_bench.board.result_file import Result
from ifsl_bench.common.wording import short
from ifsl_bench.jobs.candidates import rounds_of
from ifsl_bench.jobs.job import Job
from ifsl_bench.plugin import settings
from ifsl_bench.plugin.space import RATE
from ifsl_bench.protocol.task_limits import MOST_TRIALS


def odd_search(result: Result, job: Job) -> Iterator[str]:
    """Yields a line for each value that no search of the job that a result is of gives."""
    if result.transductive != job.method.transductive:
        yield f"transductive: {str(result.transductive).lower()}, method {job.name} says otherwise"
    if job.training.changes() and not job.trains:
        yield f"train: {next(iter(job.training.changes()))}, and method {job.name} with these options trains nothing"
    names = ", ".join(job.searched)
    if list(result.tuned) != [names] * bool(names):
        tuned = " and ".join(result.tuned) or "nothing"
        yield f"tuned: {tuned}, in setting {result.setting!r} {names or 'one thing'} is chosen on validation episodes"
    elif names:
        yield from _odd_choice(result, names, job)
    elif result.trials:
        yield f"setting: {result.setting!r}, and nothing was tuned"
    else:
        yield from _odd_settings(result, job, {}, "")


def _odd_choice(result: Result, names: str, job: Job) -> Iterator[str]:
    """Checks that the settings to try were tried, and the best of them chosen."""
    tried = result.tuned[names]
    if result.trials > MOST_TRIALS or result.earlier_search:  # said already; or settings that cannot be made again
        return
    if result.trials and len(tried) > result.trials:
        yield f"tuned: {len(tried)} settings were tried, {result.setting!r} allows {result.trials}"
        return
    rounds = rounds_of(job, lambda candidate: result.accuracy(candidate.name))
    candidates = {candidate.name: candidate for candidate in itertools.chain.from_iterable(rounds)}
    sizes = [len(candidates_of) for candidates_of in rounds]
    if tried.keys() != candidates.keys() or result.rounds != sizes:
        reasons = [f"{setting} is none of the settings to try" for setting in tried if setting not in candidates][:1]
        reasons += [f"{setting} was not tried" for setting in candidates if setting not in tried][:1]
        reasons = reasons or [f"rounds are {result.rounds}"]
        yield f"tuned: {', '.join(reasons)}; {result.setting!r} has rounds of {', '.join(map(str, sizes))}"
        return
    sound = {setting: tried[setting] for setting in candidates if setting not in result.passed_over}
    if not sound:
        yield "passed_over: all that was tried, so that nothing can have been chosen"
        return
    best = max(sound, key=sound.__getitem__)
    point, chosen = candidates[best].point, candidates[best].job
    offered = [candidate.point for candidate in candidates.values()]
    edge = settings.at_edge(job.method, chosen.options, point, offered)
    yield from _odd_settings(result, chosen, point, best, edge)


def _odd_settings(
    result: Result, job: Job, point: Mapping[str, Any], best: str, edge: Sequence[str] = ()
) -> Iterator[str]:
    """Options, training and edge, against those of the job that was chosen, at this point."""
    options = {**job.options, **{key: value for key, value in point.items() if key != RATE}}
    why = f"the best of those tried, {best}, has" if best else "method and task make it"
    for name, recorded, expected in (
        ("options", result.options, options),
        ("train", result.train, job.training.changes()),
    ):
        for key in sorted(recorded.keys() | expected.keys()):
            recorded_text, expected_text = (short(of[key]) if key in of else "none" for of in (recorded, expected))
            if recorded_text != expected_text and recorded.get(key) != expected.get(key):
                yield f"{name}.{key}: {recorded_text}, {why} {expected_text}"
    if sorted(result.edge) != sorted(edge):
        yield f"edge: {', '.join(result.edge) or 'nothing'}, what was chosen has {', '.join(edge) or 'nothing'} there"
    if not best and result.passed_over:
        yield f"passed_over: {result.passed_over[0]}, and nothing was tuned"
