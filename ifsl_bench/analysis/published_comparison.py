"""Measured numbers next to printed ones, and whether they are within the stated band. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from ifsl_bench.analysis.aggregate import STORED, SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.store.published import PublishedRow, read_published_rows

WITHIN, OUTSIDE = "within", "outside"


@dataclass(frozen=True, eq=False)
class PublishedPair:
    """A measured row and the printed one of the same label.

    Attributes:
        incompatibility_reason: why the two are not of the same task, rules of episodes and data; None where they are.
    """

    task_results: TaskResults
    measured_row: SeedAggregate
    published_row: PublishedRow
    incompatibility_reason: str | None = None

    @property
    def difference(self) -> float:
        """The difference in accuracy, measured minus printed, in points."""
        return self.measured_row.summarise_metrics()["acc"].mean - self.published_row.values["acc"]

    @property
    def tolerance_verdict(self) -> str | None:
        """One of "within" and "outside" of the band; None where there is none, or the two are not comparable."""
        if self.published_row.tolerance_band is None or self.incompatibility_reason:
            return None
        return WITHIN if abs(self.difference) <= self.published_row.tolerance_band else OUTSIDE


def pair_with_published_rows(task_results: TaskResults) -> list[PublishedPair]:
    """Return the measured rows of a task that a paper has too, in the paper's order.

    Rows of a variant are paired with rows of the task that it departs from, and rows with other options with those
    without, as not comparable.
    """
    variant = task_results.task.variant_of
    papers = [
        paper
        for paper in (read_published_rows(variant) if variant else task_results.published_rows)
        if not (paper.protocol or paper.sequence)
    ]
    pairs = []
    for paper in papers:
        # Else one of yours that differs in options alone, as a rehearsal does.
        mine = (
            r
            for r in task_results.measured_rows
            if r.results_origin != STORED and r.label.startswith(f"{paper.label}.")
        )
        if (row := task_results.find_row(paper.label) or next(mine, None)) is None:
            continue
        reasons = [f"a variant of {variant}"] if variant else []
        if row.label != paper.label:
            reasons.append("with other options or episodes")
        if row not in task_results.comparable_rows:
            reasons.append(task_results.incompatibility_reason(row) or "not on all episodes of the task")
        pairs.append(PublishedPair(task_results, row, paper, "; ".join(reasons) or None))
    return pairs


@dataclass(frozen=True)
class OrderAgreement:
    """How pairs of ranked rows are ordered in print and here, over episodes and seeds, familywise error 5%."""

    n_pairs: int
    n_agreements: int
    n_reversals: int


def count_order_agreements(task_results: TaskResults, pairs: list[PublishedPair]) -> OrderAgreement:
    """Count the pairs of ranked rows that are measured in the printed order, and in the opposite one.

    Args:
        task_results: the rows of a task.
        pairs: its rows that are printed too.
    """
    ranked = sorted(pairs, key=lambda pair: -pair.published_row.values["acc"])
    ranked = [pair for pair in ranked if pair.measured_row in task_results.ranking.family]
    couples = [
        (a.measured_row, b.measured_row)
        for a, b in combinations(ranked, 2)
        if a.published_row.values["acc"] > b.published_row.values["acc"]
    ]
    better = task_results.ranking.significant_pairs() if couples else set()
    agreements = sum(couple in better for couple in couples)
    return OrderAgreement(len(couples), agreements, sum(couple[::-1] in better for couple in couples))
