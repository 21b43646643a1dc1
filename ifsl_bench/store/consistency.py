"""A check that the counts of a result can be those of one method on some episodes. Imports no torch.

Checks yield reasons, of which the first one counts: later checks rely on what earlier ones have looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS

if TYPE_CHECKING:
    from ifsl_bench.protocols.session_metrics import SessionCounts


def odd_counts(counts: Counts) -> Iterator[str]:
    """Yields why no method has these counts."""
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


def odd_sequences(counts: SessionCounts) -> Iterator[str]:
    """Yields why no method has these counts."""
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


def odd_classes(classes: np.ndarray, episodes: int) -> Iterator[str]:
    """Yields why these are not the novel classes of so many episodes."""
    ways, rest = divmod(len(classes), episodes)
    if rest or not ways:
        yield f"episodes.classes has {len(classes)} entries, not equally many for each of {episodes} episodes"
    ordered = np.sort(classes.reshape(episodes, ways), axis=1)
    if ordered[:, 0].min() < 0:
        yield "episodes.classes has classes below 0"
    if (np.diff(ordered) == 0).any():
        yield "episodes.classes has an episode with a class twice"


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


def counted(solves: Mapping[str, int], statistics: Mapping[str, Mapping[str, float]], episodes: int) -> Counted:
    """Counts of one seed: what meta-training says of its solves, and the statistics of so many test episodes."""
    counts = {kind: (solves[kind], solves[total]) for kind, (total, _) in KINDS.items() if kind in solves}
    if statistic := statistics.get("solver_unconverged"):
        failed = statistic.get("total", 0.0) + statistic.get("not_finite", 0.0)
        counts[EVALUATION] = int(min(max(failed, 0), episodes)), episodes
    return counts


def over_seeds(seeds: Iterable[Counted]) -> Counted:
    """Sums over seeds; of a kind that not all say, over those that do."""
    sums: dict[str, tuple[int, int]] = {}
    for seed in seeds:
        for kind, (count, total) in seed.items():
            before = sums.get(kind, (0, 0))
            sums[kind] = before[0] + count, before[1] + total
    return sums


def solve_notes(rows: Mapping[str, Counted]) -> list[str]:
    """Tells what a reader of these rows should know of their solves, a line for each kind of thing that happened.

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
