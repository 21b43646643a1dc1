"""Whether the episodes that a result has counts of are those that its task and its digest say. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ifsl_bench.board.result_file import Result
from ifsl_bench.protocol.limits import most_of
from ifsl_bench.protocol.task import CENTRED, Task


def unfit(task: Task, results: Sequence[Result]) -> dict[int, str]:
    """The results that cannot be of the episodes that they name, by id, with the reason in words.

    A digest is of so many episodes: those that the task has where the task pins it, or where one of the results has as
    many; else as many as most results with that digest have, and the first of them where there are as many of each.

    Args:
        results: of this very definition of the task, the most trustworthy first.
    """
    reasons = {id(r): reason for r in results if (reason := _odd_episodes(task, r) or _odd_features(task, r))}
    counts: dict[str, list[int]] = {}
    for result in results:
        if id(result) not in reasons:
            counts.setdefault(result.digest, []).append(_count(result))
    expected = {digest: _expected(task, digest, counts_here) for digest, counts_here in counts.items()}
    for result in results:
        if id(result) not in reasons and _count(result) != expected[result.digest]:
            reasons[id(result)] = (
                f"it has {_count(result):,} episodes, those of its digest {result.digest[:12]} are "
                f"{expected[result.digest]:,}"
            )
    return reasons


def _odd_features(task: Task, result: Result) -> str:
    """Why the features of a backbone from elsewhere are not those of the task: version 0.2.0 centred none."""
    asked, made = task.pretraining.centre or CENTRED, result.pretraining.get("centre", "none")
    if "weights" in result.pretraining and made != asked:
        return f"its features were made with centre {made}, the task has {asked}"
    return ""


def _count(result: Result) -> int:
    return len(result.episodes)


def _expected(task: Task, digest: str, counts: Sequence[int]) -> int:
    whole = task.evaluation.episodes
    return whole if digest == task.digest or whole in counts else Counter(counts).most_common(1)[0][0]


def _odd_episodes(task: Task, result: Result) -> str:
    """Why no episodes of the task are like those of a result; "" where they may be."""
    episodes, shape, count = result.episodes, task.episode, _count(result)
    if count > (most := most_of(task)):
        return f"it has {count:,} episodes; this task allows at most {most:,}"
    of_task = {"base_queries": shape.base_queries, "novel_queries": shape.ways * shape.novel_queries}
    if spec := task.sessions:
        of_task = {"sessions": spec.count, "ways": spec.ways, "supports": spec.supports}
    drawn, ways = (-(-count // spec.supports), spec.classes) if spec else (count, shape.ways)
    for name, expected in of_task.items():
        if (number := getattr(episodes, name, None)) != expected:
            return f"episodes.{name} is {number}, episodes of the task have {expected}"
    used, half = result.calibration and result.calibration.validation_episodes, len(task.evaluation.halves[0])
    if used not in (None, half):
        return f"calibration.validation_episodes is {used}, the task has {half} for it"
    if (named := episodes.length("classes")) and named != drawn * ways:
        return f"episodes.classes has {named:,} entries, {count:,} episodes have {drawn * ways:,}"
    return ""
