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
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.calibration import RESAMPLES
from ifsl_bench.protocols.metrics import Counts, summarise
from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS
from ifsl_bench.protocols.tasks.task_limits import most_of

if TYPE_CHECKING:
    from ifsl_bench.protocols.session_metrics import SessionCounts
    from ifsl_bench.protocols.tasks.task import Task
    from ifsl_bench.store.schema import Calibration, Choice, Result

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
        counts, classes = result.counts(), result.episodes.column("classes")
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
    if not isinstance(counts, Counts):
        yield from _odd_sequences(counts)
        yield from _odd_classes(classes, counts.orders)
        if (result.calibration is None) != (counts.calibrated_hits is None):
            yield "calibration and episodes.calibrated_hits are not both there"
        if result.calibration:
            yield from (f"calibration {reason}" for reason in _odd_bias_of_sessions(result.calibration, counts))
    else:
        yield from _odd_counts(counts)
        yield from _odd_classes(classes, len(counts))
        yield from (f"calibration {reason}" for reason in _odd_calibration(result.calibration, counts))
        if result.choice:
            settings = sum(map(len, result.tuned.values()))
            reasons = _odd_choice(result.choice, settings, counts, result.calibrated)
            yield from (f"choice {reason}" for reason in reasons)
    yield from _odd_summary(result, counts)


def _odd_summary(result: Result, counts: Counts | SessionCounts) -> Iterator[str]:
    summary = {name: asdict(value) for name, value in summarise(counts.per_episode(), counts.quantile).items()}
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


def _odd_counts(counts: Counts) -> Iterator[str]:
    """Yield why no method has these counts."""
    n, base, novel = len(counts), counts.base_queries, counts.novel_queries
    if novel < 1:
        yield "an episode has no novel queries"
    for name in COUNTS:
        values, limit = getattr(counts, name), base if name.startswith("base") else novel
        if len(values) != n or n < 2:
            yield f"episodes.{name} has {len(values)} entries, episodes.base_joint has {n}; at least 2 are needed"
        if values.min() < 0 or values.max() > limit:
            yield f"episodes.{name} has hits outside 0..{limit}"
    if (counts.base_joint > counts.base_alone).any() or (counts.novel_joint > counts.novel_alone).any():
        yield "more joint hits than hits alone in some episode, which cannot be"
    if not base and (counts.novel_joint != counts.novel_alone).any():
        yield "joint hits differ from hits alone though the episodes have no base classes"
    limits = (2 * counts.base_alone * counts.novel_alone, counts.base_alone, counts.novel_alone)
    for name, most in zip(MORE_COUNTS, limits, strict=True):
        if (values := getattr(counts, name)) is None:
            continue
        if not base:
            yield f"episodes.{name} is there though the episodes have no base classes"
        if len(values) != n:
            yield f"episodes.{name} has {len(values)} entries, episodes.base_joint has {n}"
        if (values < 0).any() or (values > most).any():
            yield f"episodes.{name} has an episode with less than 0, or more than its hits alone allow"
    if (counts.calibrated_base is None) != (counts.calibrated_novel is None):
        yield "episodes.calibrated_base and episodes.calibrated_novel are not both there"
    if counts.pairs is None:
        if base:
            yield "episodes.pairs is missing"
        return
    # Queries that are right with one and the same bias are pairs in the right order.
    least = counts.base_joint * counts.novel_joint
    if counts.calibrated_base is not None and counts.calibrated_novel is not None:
        least = np.maximum(least, counts.calibrated_base * counts.calibrated_novel)
    if (counts.pairs < 2 * least).any():
        yield "episodes.pairs has fewer than the joint hits of an episode make"


def _odd_sequences(counts: SessionCounts) -> Iterator[str]:
    """Yield why no method has these counts."""
    sessions, n = counts.sessions, len(counts)
    widths = {"hits": (sessions + 1) * (sessions + 2) // 2, "queries": sessions + 1}
    for name, values in counts.columns().items():
        width = widths.get(name.removeprefix("calibrated_"), sessions)
        if sessions < 1 or n < 1 or values.shape != (n, width):
            yield f"episodes.{name} has {values.size} entries, {n} sequences of {sessions} sessions need {n * width}"
    if min(counts.base_classes, counts.ways, counts.supports) < 1 or (counts.queries < 1).any():
        yield "the sequences have no classes, no support sets, or a session without queries"
    queries = counts.queries.astype(np.int64)
    limits = {
        "hits": queries[:, counts.groups],
        "novel_as_base": queries[:, 1:].cumsum(1),
        "base_as_novel": queries[:, :1],
    }
    for part in (counts, *([counts.calibrated()] if counts.calibrated_hits is not None else [])):
        for name, most in limits.items():
            if ((values := getattr(part, name)) < 0).any() or (values > most).any():
                yield f"episodes.{name} has more than there are queries, or a negative number"


def _odd_classes(classes: np.ndarray, episodes: int) -> Iterator[str]:
    """Yield why these are not the novel classes of this number of episodes."""
    ways, rest = divmod(len(classes), episodes)
    if rest or not ways:
        yield f"episodes.classes has {len(classes)} entries, not equally many for each of {episodes} episodes"
    ordered = np.sort(classes.reshape(episodes, ways), axis=1)
    if ordered[:, 0].min() < 0:
        yield "episodes.classes has classes below 0"
    if (np.diff(ordered) == 0).any():
        yield "episodes.classes has an episode with a class twice"


def _odd_choice(choice: Choice, settings: int, counts: Counts, calibrated: bool) -> Iterator[str]:
    """Yield why one of this number of settings was not chosen like this, for a result with these counts."""
    if max(choice.chosen, *choice.winners, *choice.rivals) >= settings:
        yield f"has a place that none of {settings} settings has"
    for hits, count in ((choice.hits, settings), (choice.test_hits, 1 + len(choice.rivals))):
        if hits.keys() - {*COUNTS, *MORE_COUNTS} or any(len(each) != count for each in hits.values()):
            yield f"has hits of something else, or of other than {count} settings"
    if not bool(choice.rivals) <= choice.test_episodes <= len(counts):
        yield f"has {choice.test_episodes:,} test episodes, the result {len(counts):,}"
    for name in choice.test_hits.keys() - ({"base_joint", "novel_joint"} if calibrated else set()):
        hits = counts.columns().get(name, np.zeros(0, int))[: choice.test_episodes].sum()
        if choice.test_hits[name][0] != hits:
            yield f"has {choice.test_hits[name][0]:,} test hits {name} of the chosen setting, its counts give {hits:,}"


def _odd_calibration(calibration: Calibration | None, counts: Counts) -> Iterator[str]:
    """Yield why no method has these hits at these biases on the novel logits."""
    base, novel = counts.calibrated_base, counts.calibrated_novel
    if calibration is None or base is None or novel is None:
        if bool(calibration) != (base is not None):
            yield "and episodes.calibrated_base are not both there"
        return
    curve, resampled = calibration.curve, (calibration.resampled_base, calibration.resampled_novel)
    if len({len(curve.bias), len(curve.base_joint), len(curve.novel_joint)}) > 1:
        yield "has a curve whose parts differ in length"
    if {*map(len, resampled)} not in ({0}, {RESAMPLES}):
        yield f"has other than {RESAMPLES} resamples"
    joint = counts.base_joint, counts.novel_joint
    if calibration.applied and not all(map(np.array_equal, joint, (base, novel))):
        yield "is applied, and yet joint hits and calibrated ones differ"
    if (np.diff(curve.bias) <= 0).any():
        yield "has a curve whose biases do not ascend"
    of_counts = [
        (calibration.bias, base.sum(), novel.sum()),
        (calibration.bias if calibration.applied else 0.0, joint[0].sum(), joint[1].sum()),
    ]
    on_curve = np.array([curve.bias, curve.base_joint, curve.novel_joint], dtype=np.float64).T
    points = np.concatenate([on_curve, of_counts])
    points = points[np.lexsort((-points[:, 1], points[:, 0]))]
    if (np.diff(points[:, 1]) > 0).any() or (np.diff(points[:, 2]) < 0).any():
        yield "has base hits that rise, or novel hits that fall, as the bias grows"
    hits = np.concatenate([points[:, 1:], np.array(resampled).T.reshape(-1, 2)])
    if (hits > [counts.base_alone.sum(), counts.novel_alone.sum()]).any():
        yield "has more hits than there are alone"


def _odd_bias_of_sessions(calibration: Calibration, counts: SessionCounts) -> Iterator[str]:
    """Yield why no method has these hits with biases on the novel logits after each session."""
    for name, most in (("base", counts.queries[:, 0]), ("novel", counts.queries[:, 1:])):
        hits = getattr(calibration, f"resampled_{name}")
        if len(hits) not in (0, RESAMPLES * counts.sessions):
            yield f"has other than {RESAMPLES} resamples of {counts.sessions} sessions"
        elif max(hits, default=0) > most.sum(dtype=np.int64):
            yield f"has more {name} hits than there are {name} queries"


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
    episodes, shape, count = result.episodes, task.episode, len(result.episodes)
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
