"""Consistency of results: whether a file contradicts itself or its task, and whether two files belong together.

Checks of one file yield reasons, of which the first one counts: later checks rely on earlier ones. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from ifsl_bench.protocols.metrics import HitCounts
from ifsl_bench.protocols.registry import protocol_of
from ifsl_bench.protocols.tasks.task_limits import most_of

if TYPE_CHECKING:
    from ifsl_bench.protocols.tasks.task import Task
    from ifsl_bench.store.schema import Result

SOLVES_OF = {  # failures of inner solves -> the solves that they are among, under training.solves
    "adjoint_diverged": "adjoint_episodes",
    "adjoint_indefinite": "adjoint_episodes",
    "adjoint_failed": "adjoint_episodes",
    "unconverged": "episodes",
}


class _ReadableTraining(msgspec.Struct):
    """The part of ``training`` that tables and figures read."""

    validation: dict[Annotated[str, Meta(pattern="^[0-9]{1,18}$")], Annotated[float, Meta(ge=0, le=100)]] = {}
    kept_step: int = 0
    solves: dict[str, Annotated[int, Meta(ge=0, lt=1 << 31)]] = {}


def contradiction(result: Result) -> str | None:
    """Return why a result contradicts itself; None where it does not."""
    try:
        return next(_contradictions(result), None)
    except OverflowError:
        return "a count is beyond all bounds"


def _contradictions(result: Result) -> Iterator[str]:
    try:
        counts = result.counts()
        result.episodes.column("classes")
    except ValueError:
        yield "columns differ in length"
        return
    try:
        parts = {name: result.training[name] for name in _ReadableTraining.__struct_fields__ if name in result.training}
        solves = msgspec.convert(parts, _ReadableTraining, strict=True).solves
    except (msgspec.ValidationError, UnicodeError) as error:
        yield f"training: {error}"
        return
    for kind, total in SOLVES_OF.items():
        if solves.get(kind, 0) > solves.get(total, 0):
            yield f"training.solves has {kind} in more episodes than the {total}"
    yield from result.protocol.contradictions(counts, result)
    yield from _odd_summary(result, counts)


def _odd_summary(result: Result, counts: HitCounts) -> Iterator[str]:
    summary = {name: asdict(value) for name, value in counts.summary().items()}
    expected = {
        name: {part: round(value, 6) for part, value in parts.items() if math.isfinite(value)}
        for name, parts in summary.items()
    }
    for name in dict.fromkeys((*expected, *result.summary)):
        of_counts, of_file = expected.get(name, {}), result.summary.get(name, {})
        for part in dict.fromkeys((*of_counts, *of_file)):
            stored = of_file.get(part, math.nan)
            if part not in of_counts:
                yield f"summary.{name}.{part} does not follow from the counts"
            elif not math.isclose(stored, of_counts[part], rel_tol=0, abs_tol=2e-6):
                yield f"summary.{name}.{part} is {stored}, the counts give {of_counts[part]}"


def unfit(task: Task, results: Sequence[Result]) -> dict[int, str]:
    """Return the results whose episodes cannot be those of their task and digest: id of a result -> reason.

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
    """Return why no episodes of the task are like those of a result; None where they may be."""
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
