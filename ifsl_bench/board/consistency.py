"""Whether the counts of a result can be those of one method on some episodes. Imports no torch."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.session_metrics import SessionCounts, triangle_rows
from ifsl_bench.protocol.task_kind import COUNTS, MORE_COUNTS


def odd_counts(counts: Counts) -> str:
    """Why no method has these counts; "" where one may."""
    n = len(counts)
    if counts.base_queries < 0 or counts.novel_queries < 1:
        return "an episode has no novel queries, or a negative number of base queries"
    for name in COUNTS:
        values = getattr(counts, name)
        limit = counts.base_queries if name.startswith("base") else counts.novel_queries
        if len(values) != n or n < 2:
            return f"episodes.{name} has {len(values)} entries, episodes.base_joint has {n}; at least 2 are needed"
        if values.min() < 0 or values.max() > limit:
            return f"episodes.{name} has hits outside 0..{limit}"
    if (counts.base_joint > counts.base_alone).any() or (counts.novel_joint > counts.novel_alone).any():
        return "more joint hits than hits alone in some episode, which cannot be"
    if not counts.base_queries and (counts.novel_joint != counts.novel_alone).any():
        return "joint hits differ from hits alone though the episodes have no base classes"
    return _odd_more_counts(counts)


def _odd_more_counts(counts: Counts) -> str:
    """The same of the counts that weigh base against novel queries."""
    limits = (2 * counts.base_alone * counts.novel_alone, counts.base_alone, counts.novel_alone)
    for name, limit in zip(MORE_COUNTS, limits, strict=True):
        values = getattr(counts, name)
        if values is None:
            continue
        if not counts.base_queries:
            return f"episodes.{name} is there though the episodes have no base classes"
        if len(values) != len(counts):
            return f"episodes.{name} has {len(values)} entries, episodes.base_joint has {len(counts)}"
        if (values < 0).any() or (values > limit).any():
            return f"episodes.{name} has an episode with less than 0, or more than its hits alone allow"
    if (counts.calibrated_base is None) != (counts.calibrated_novel is None):
        return "episodes.calibrated_base and episodes.calibrated_novel are not both there"
    if counts.pairs is None:
        return "episodes.pairs is missing" if counts.base_queries else ""
    # Queries that are right with one and the same bias are pairs in the right order.
    least = counts.base_joint * counts.novel_joint
    if counts.calibrated_base is not None and counts.calibrated_novel is not None:
        least = np.maximum(least, counts.calibrated_base * counts.calibrated_novel)
    return "episodes.pairs has fewer than the joint hits of an episode make" if (counts.pairs < 2 * least).any() else ""


def odd_sequences(counts: SessionCounts) -> str:
    """Why no method has these counts; "" where one may."""
    sessions, n = counts.sessions, len(counts)
    widths = {"hits": (sessions + 1) * (sessions + 2) // 2, "queries": sessions + 1}
    for name, values in counts.columns().items():
        width = widths.get(name.removeprefix("calibrated_"), sessions)
        if sessions < 1 or n < 1 or values.shape != (n, width):
            return f"episodes.{name} has {values.size} entries, {n} sequences of {sessions} sessions need {n * width}"
    if min(counts.base_classes, counts.ways, counts.supports) < 1 or (counts.queries < 1).any():
        return "the sequences have no classes, no support sets, or a session without queries"
    novel, base = counts.queries[:, 1:].astype(np.int64).cumsum(1), counts.queries[:, :1]
    for one in (counts, counts.calibrated()) if counts.calibrated_hits is not None else (counts,):
        if (one.hits < 0).any() or (one.hits > counts.queries[:, triangle_rows(sessions)[1]]).any():
            return "episodes.hits has more hits than there are queries, or a negative number"
        if (one.novel_as_base < 0).any() or (one.novel_as_base > novel).any():
            return "episodes.novel_as_base has more queries than there are, or a negative number"
        if (one.base_as_novel < 0).any() or (one.base_as_novel > base).any():
            return "episodes.base_as_novel has more queries than there are, or a negative number"
    return ""


def odd_classes(classes: np.ndarray, episodes: int) -> str:
    """Why these are not the novel classes of so many episodes; "" where they may be."""
    ways, rest = divmod(len(classes), episodes)
    if rest or not ways:
        return f"has {len(classes)} entries, not equally many for each of {episodes} episodes"
    ordered = np.sort(classes.reshape(episodes, ways), axis=1)
    if ordered[:, 0].min() < 0:
        return "has classes below 0"
    return "has an episode with a class twice" if (np.diff(ordered) == 0).any() else ""


def odd_calibration(counts: Counts, bias: float, curve: np.ndarray, resampled: np.ndarray, applied: bool) -> str:
    """Why no method has these hits at these biases on the novel logits; "" where one may.

    Args:
        curve: [m, 3] a bias, and the base and novel hits with it.
        resampled: [r, 2] base and novel hits with biases that are not said.
        applied: whether the joint hits are those with ``bias``; else they are those with 0.
    """
    if counts.calibrated_base is None or counts.calibrated_novel is None:
        return "is there, episodes.calibrated_base is not"
    joint, calibrated = (counts.base_joint, counts.novel_joint), (counts.calibrated_base, counts.calibrated_novel)
    if applied and not all(map(np.array_equal, joint, calibrated)):
        return "is applied, and yet joint hits and calibrated ones differ"
    if (np.diff(curve[:, 0]) <= 0).any():
        return "has a curve whose biases do not ascend"
    stored = [(bias, *calibrated), (bias if applied else 0.0, *joint)]
    points = np.concatenate([curve, [(b, base.sum(), novel.sum()) for b, base, novel in stored]])
    points = points[np.lexsort((-points[:, 1], points[:, 0]))]
    if (np.diff(points[:, 1]) > 0).any() or (np.diff(points[:, 2]) < 0).any():
        return "has base hits that rise, or novel hits that fall, as the bias grows"
    hits = np.concatenate([points[:, 1:], resampled])
    if (hits < 0).any() or (hits > [counts.base_alone.sum(), counts.novel_alone.sum()]).any():
        return "has more hits than there are alone, or a negative number"
    hits = hits[np.lexsort((-hits[:, 0], hits[:, 1]))]
    if (np.diff(hits[:, 0]) > 0).any():
        return "has a resample with more base and more novel hits than a bias on the curve has"
    return ""


EVALUATION = "evaluation"
# What is counted, of which episodes, and what happened in them. All but the last are under training.solves.
KINDS = {
    "adjoint_diverged": ("adjoint_episodes", "the series for the gradient grew, and what it tends to took its place"),
    "adjoint_indefinite": ("adjoint_episodes", "the solve stopped at a saddle, where the gradient is no minimum's"),
    "adjoint_failed": ("adjoint_episodes", "the linear solve for the gradient missed its tolerance"),
    "unconverged": ("episodes", "the inner solve did not converge"),
    EVALUATION: ("", "the inner solve did not converge"),
}
Counted = Mapping[str, tuple[int, int]]  # kind -> in how many episodes, of how many


def odd_solves(solves: Any) -> str:
    """Why tables cannot say how the solves of meta-training went; "" where they can, or where nothing is said."""
    if not isinstance(solves, dict):
        return "is not an object"
    for kind, (total, _) in KINDS.items():
        if kind in solves:
            for name in (kind, total):
                if type(solves.get(name)) is not int:
                    return f"has no whole number {name}"
            if not 0 <= solves[kind] <= solves[total] < 1 << 63:
                return f"has {kind} in other episodes than the {total}"
    return ""


def odd_validation(training: dict[str, Any]) -> str:
    """Why nobody can draw the course of meta-training; "" where one can, or where nothing is said of it."""
    validation, step_kept = training.get("validation", {}), training.get("kept_step", 0)
    if not isinstance(validation, dict):
        return "validation is not an object"
    for step, value in validation.items():
        if not re.fullmatch("[0-9]{1,18}", step):
            return f"validation: {reprlib.repr(step)} is no number of a step"
        if type(value) not in (int, float) or not 0 <= value <= 100:
            return f"validation.{step} is {reprlib.repr(value)}, no accuracy in percent"
    if type(step_kept) is not int:
        return f"kept_step is {reprlib.repr(step_kept)}, no whole number"
    return "kept_step is missing" if validation and "kept_step" not in training else ""


def counted(solves: Mapping[str, int], statistics: Mapping[str, Mapping[str, float]], episodes: int) -> Counted:
    """Of one seed: what meta-training says of its solves, and the statistics of so many test episodes."""
    counts = {kind: (solves[kind], solves[total]) for kind, (total, _) in KINDS.items() if kind in solves}
    if statistic := statistics.get("solver_unconverged"):
        failed = statistic.get("total", 0.0) + statistic.get("not_finite", 0.0)
        counts[EVALUATION] = int(min(max(failed, 0), episodes)), episodes
    return counts


def over_seeds(seeds: Iterable[Counted]) -> Counted:
    """Of all seeds; of a kind that not all say, of those that do."""
    each = [*seeds]
    return {
        kind: (sum(seed[kind][0] for seed in each if kind in seed), sum(seed[kind][1] for seed in each if kind in seed))
        for kind in KINDS
        if any(kind in seed for seed in each)
    }


def solve_notes(rows: Mapping[str, Counted]) -> list[str]:
    """What a reader of these rows should know of their solves, a line for each kind of thing that happened.

    Args:
        rows: what rows are called -> counts over their seeds.
    """
    notes = []
    for kind, (_, happened) in KINDS.items():
        counts = [(name, *solves[kind]) for name, solves in rows.items() if solves.get(kind, (0, 0))[0]]
        if counts:
            which = ", ".join(f"{name} in {count:,} of {total:,}" for name, count, total in counts)
            stage = "test episodes" if kind == EVALUATION else "episodes of meta-training, over all seeds"
            notes.append(f"{happened[0].upper()}{happened[1:]}: {which} {stage}.")
    return notes
