"""Consistency of results: whether a file contradicts itself or its task, and whether two files belong together.

Checks of one file yield reasons, of which the first one counts: later checks rely on earlier ones. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ifsl_bench.protocols.registry import protocol_of
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_limits import most_of
from ifsl_bench.store.schema import Result


def unfit(task: Task, results: Sequence[Result]) -> dict[int, str]:
    """Return the results whose episodes cannot belong to their task and digest: id of a result -> reason.

    A digest is of one number of episodes: that of the task where the task pins it, or where one of the results has as
    many; else that of most results with this digest, and of the first of them where it is a tie.

    Args:
        task: that the results are of.
        results: of this very definition of the task, the most trustworthy first.
    """
    reasons = {id(r): reason for r in results if (reason := _odd_episodes(task, r))}
    counts: dict[str, list[int]] = {}
    for result in results:
        if id(result) not in reasons:
            counts.setdefault(result.digest, []).append(len(result.episodes))
    whole = task.evaluation.episodes
    for result in results:
        count, digest = len(result.episodes), result.digest
        if id(result) not in reasons:
            most = Counter(counts[digest]).most_common(1)[0][0]
            expected = whole if digest == task.digest or whole in counts[digest] else most
            if count != expected:
                reasons[id(result)] = f"it has {count:,} episodes, those of its digest {digest[:12]} are {expected:,}"
    return reasons


def _odd_episodes(task: Task, result: Result) -> str | None:
    """Return why no episodes of the task are like a result's; None where they may be."""
    episodes, count = result.episodes, len(result.episodes)
    if count > (most := most_of(task)):
        return f"it has {count:,} episodes; this task allows at most {most:,}"
    shape, listed = protocol_of(task).shape_of(task, count)
    for name, expected in shape.items():
        if (number := getattr(episodes, name, None)) != expected:
            return f"episodes.{name} is {number}, episodes of the task have {expected}"
    used, half = result.calibration and result.calibration.validation_episodes, len(task.evaluation.halves[0])
    if used not in (None, half):
        return f"calibration.validation_episodes is {used}, the task has {half} for it"
    if (named := episodes.length("classes")) and named != listed:
        return f"episodes.classes has {named:,} entries, {count:,} episodes have {listed:,}"
    return None


def mismatch(a: Result, b: Result) -> str | None:
    """Return why two results cannot be compared episode by episode; None where they can.

    Args:
        a: one result.
        b: another one.
    """
    if a.task != b.task:
        return f"the tasks differ ({a.task} and {b.task})"
    if a.task_hash != b.task_hash:
        return f"the task's definition differs (hash {a.task_hash} and {b.task_hash})"
    if a.fingerprint != b.fingerprint:
        return f"the data differ (fingerprint {a.fingerprint[:12]} and {b.fingerprint[:12]})"
    if a.novel_fingerprint != b.novel_fingerprint:
        sides = f"{a.novel_fingerprint[:12] or 'none'} and {b.novel_fingerprint[:12] or 'none'}"
        return f"the data of novel classes differ (fingerprint {sides})"
    n, m = len(a.episodes), len(b.episodes)
    if a.digest != b.digest:
        count = f", {n} and {m} of them" if n != m else ""
        return f"the episodes differ (digest {a.digest[:12]} and {b.digest[:12]}{count})"
    if n != m:
        return f"both say that their episodes are those of digest {a.digest[:12]}, and have {n} and {m} of them"
    for name, value in a.episodes.shape.items():
        if value != getattr(b.episodes, name):
            return f"the episodes differ ({name} {value} and {getattr(b.episodes, name)})"
    if not a.episodes.same(b.episodes, a.episodes.DRAWN):
        return "the novel classes of their episodes differ"
    return None
