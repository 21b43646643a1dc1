"""Measured numbers next to printed ones, and whether they are within the stated band. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from ifsl_bench.analysis.aggregate import STORED, SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.store.published import PublishedRow, published_rows

WITHIN, OUTSIDE = "within", "outside"


@dataclass(frozen=True, eq=False)
class PublishedPair:
    """A measured row and the printed one of the same label.

    Attributes:
        incompatibility: why the two are not of the same task, rules of episodes and data; None where they are.
    """

    board: TaskResults
    row: SeedAggregate
    paper: PublishedRow
    incompatibility: str | None = None

    @property
    def difference(self) -> float:
        """The difference in accuracy, measured minus printed, in points."""
        return self.row.summary()["acc"].mean - self.paper.values["acc"]

    @property
    def verdict(self) -> str | None:
        """One of "within" and "outside" of the band; None where there is none, or the two are not comparable."""
        if self.paper.band is None or self.incompatibility:
            return None
        return WITHIN if abs(self.difference) <= self.paper.band else OUTSIDE


def pairs_of(board: TaskResults) -> list[PublishedPair]:
    """Return the measured rows of a task that a paper has too, in the paper's order.

    Rows of a variant are paired with rows of the task that it departs from, and rows with other options with those
    without, as not comparable.
    """
    variant = board.task.variant_of
    papers = [
        paper
        for paper in (published_rows(variant) if variant else board.papers)
        if not (paper.protocol or paper.sequence)
    ]
    pairs = []
    for paper in papers:
        # Else one of yours that differs in options alone, as a rehearsal does.
        mine = (r for r in board.measured if r.origin != STORED and r.label.startswith(f"{paper.label}."))
        if (row := board.row(paper.label) or next(mine, None)) is None:
            continue
        reasons = [f"a variant of {variant}"] if variant else []
        if row.label != paper.label:
            reasons.append("with other options or episodes")
        if row not in board.compared:
            reasons.append(board.incompatibility(row) or "not on all episodes of the task")
        pairs.append(PublishedPair(board, row, paper, "; ".join(reasons) or None))
    return pairs


@dataclass(frozen=True)
class OrderAgreement:
    """How pairs of ranked rows are ordered in print and here, over episodes and seeds, familywise error 5%."""

    pairs: int
    agreements: int
    reversals: int


def order_agreement(board: TaskResults, pairs: list[PublishedPair]) -> OrderAgreement:
    """Count the pairs of ranked rows that are measured in the printed order, and in the opposite one.

    Args:
        board: the rows of a task.
        pairs: its rows that are printed too.
    """
    ranked = sorted(pairs, key=lambda pair: -pair.paper.values["acc"])
    ranked = [pair for pair in ranked if pair.row in board.ranking.family]
    couples = [(a.row, b.row) for a, b in combinations(ranked, 2) if a.paper.values["acc"] > b.paper.values["acc"]]
    better = board.ranking.better() if couples else set()
    agreements = sum(couple in better for couple in couples)
    return OrderAgreement(len(couples), agreements, sum(couple[::-1] in better for couple in couples))
