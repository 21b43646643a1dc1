"""The differences between the ranked rows of a task, and which of them ranks rest on. Imports no torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.ranking import Ranking

SMALLEST = 1e-15  # p-value; smaller ones are tails of a distribution that no data have been held against


@dataclass(frozen=True)
class RowPair:
    """Row a minus row b.

    Attributes:
        a, b: the rows, numbers in the list of all rows.
        mean: points of accuracy.
        interval: half-width of the 95% interval of this difference alone, over episodes and seeds.
        p: two-sided p-value of this difference alone; 0 where it is below :data:`SMALLEST`.
        significant: whether it is one of those that ranks rest on: all comparisons of the ranking at once, by Holm's
            procedure.
        seeds: that both are compared on.
        models_fixed: whether it is over episodes alone.
    """

    a: int
    b: int
    mean: float
    interval: float
    p: float
    significant: bool
    seeds: tuple[int, ...]
    models_fixed: bool


def digits_of(value: float) -> int:
    """Counts the page's digits of a number: more where its two, or fewer, would be those of another number."""
    return 9 if f"{value:.4f}".endswith(("50", "500", "5000")) else 4


def row_pairs(ranking: Ranking, numbers: dict[SeedAggregate, int]) -> list[RowPair]:
    """Each pair of ranked rows once; a user's rows are compared with the family, not with each other.

    Args:
        numbers: row -> its number in the list of all rows. Rows without a number are left out.
    """
    ranked = [place.row for place in ranking.places if place.ranks and place.row in numbers]
    pairs = []
    part: Ranking | None = ranking
    while part:
        here = [row for row in ranked if row in part.rows]
        family = [row for row in here if row in part.family]
        pairs += _pairs(part, family, None, numbers)
        for row in here:
            if row not in family:
                pairs += _pairs(part, family, row, numbers)
        part = part.apart
    return pairs


def _pairs(
    ranking: Ranking, family: list[SeedAggregate], guest: SeedAggregate | None, numbers: dict[SeedAggregate, int]
) -> list[RowPair]:
    """The pairs of the family, or of one guest and the family."""
    better = ranking.better(guest)
    pairs = []
    for a, b in itertools.combinations(family, 2) if guest is None else ((guest, row) for row in family):
        gap = ranking.difference(a, b)
        significant = (a, b) in better or (b, a) in better
        p = float(f"{gap.p:.3g}") if gap.p >= SMALLEST else 0.0
        mean, interval = (round(value, digits_of(value)) for value in (gap.mean, gap.interval))
        seeds = ranking.common(a, b)
        pairs.append(RowPair(numbers[a], numbers[b], mean, interval, p, significant, seeds, gap.models_fixed))
    return pairs
