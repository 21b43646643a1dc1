"""All differences between the ranked rows of a task, and which of them ranks rest on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ifsl_bench.board.measured import Row
from ifsl_bench.board.ranking import Ranking

DIGITS = 9  # of numbers on the page, which shows two: a second rounding would else change the last of some
SMALLEST = 1e-15  # p-value; smaller ones are tails of a distribution that no data have been held against


@dataclass(frozen=True)
class Pair:
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


def pairs_of(ranking: Ranking, numbers: dict[int, int]) -> list[Pair]:
    """Each pair of rows that have ranks once; those of a user's are compared with the family, not with each other.

    Args:
        numbers: id of a row -> its number in the list of all rows. Rows without a number are left out.
    """
    ranked = [place.row for place in ranking.places if place.ranks and id(place.row) in numbers]
    found = []
    part: Ranking | None = ranking
    while part:
        mine = [row for row in ranked if any(row is other for other in part.rows)]
        family = [row for row in mine if any(row is other for other in part.family)]
        found += _pairs(part, family, None, numbers)
        for row in mine:
            if not any(row is other for other in family):
                found += _pairs(part, family, row, numbers)
        part = part.apart
    return found


def _pairs(ranking: Ranking, family: list[Row], guest: Row | None, numbers: dict[int, int]) -> list[Pair]:
    """Of the family, or of one guest and the family."""
    better = ranking.better(guest)
    left = family if guest is None else [guest]
    found = []
    for at, a in enumerate(left):
        for b in family[at + 1 :] if guest is None else family:
            gap = ranking.difference(a, b)
            told = (id(a), id(b)) in better or (id(b), id(a)) in better
            p = float(f"{gap.p:.3g}") if gap.p >= SMALLEST else 0.0
            numbered, rounded = (numbers[id(a)], numbers[id(b)]), (round(gap.mean, DIGITS), round(gap.interval, DIGITS))
            found.append(Pair(*numbered, *rounded, p, told, ranking.common(a, b), gap.models_fixed))
    return found
