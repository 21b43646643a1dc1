"""Measured rows ranked, with what can and what cannot be told apart. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ifsl_bench.board.comparison import compare
from ifsl_bench.board.measured import Row
from ifsl_bench.protocol.metrics import Estimate


@dataclass(frozen=True)
class Ranked:
    """A row in its place.

    Attributes:
        rank: 1 for every row that shares the top, else one more than the number of rows with a higher mean.
        gap: this row minus the best one, in percentage points, with the interval of
            :meth:`ifsl_bench.board.comparison.Comparison.overall`; None for the best.
        common_seeds: training seeds that this row and the best one both have.
    """

    row: Row
    rank: int
    gap: Estimate | None
    common_seeds: int

    @property
    def top(self) -> bool:
        return self.rank == 1


def ranked(rows: Sequence[Row], metric: str = "acc") -> list[Ranked]:
    """Measured rows of one task by their mean, the best first; published rows have no part in this.

    *Not distinguishable* from the best, and so sharing the top, is a row whose paired difference to the row with the
    highest mean has a 95% interval that reaches zero. The difference is paired episode by episode, since all rows have
    seen the same ones, and seed by seed where both have at least two seeds in common; the interval accounts for both,
    see :meth:`ifsl_bench.board.comparison.Comparison.overall`. So a row leaves the top only if it is behind on the
    episodes *and* from one training to the next. With fewer common seeds the claim is on these trained models alone,
    and intervals are narrower for that, not surer.

    Each row is held against the best by itself, at 95%: nothing is corrected for their number. Sharing the top does not
    say that rows are equal, it says that these episodes and seeds do not tell which is better; and of many rows that
    are in truth as good as the best, more than one in twenty may be ranked below it by chance.

    Args:
        rows: comparable rows, see :class:`ifsl_bench.board.boards.Board`.
        metric: where more is better, as it is for every metric here (Delta is negative where joint prediction hurts).
    """
    if not rows:
        return []
    means = {id(row): row.summary()[metric].mean for row in rows}
    order = sorted(rows, key=lambda row: -means[id(row)])
    best = order[0]
    found = [Ranked(best, 1, None, len(best.seeds))]
    for row in order[1:]:
        comparison = compare(row, best)
        gap = comparison.overall(metric)
        higher = sum(mean > means[id(row)] for mean in means.values())
        rank = 1 if gap.mean + gap.interval >= 0 else 1 + higher
        found.append(Ranked(row, rank, gap, len(comparison.seeds)))
    return found
