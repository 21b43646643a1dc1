"""Measured numbers beside what papers print, and whether they are within the stated band. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from ifsl_bench.analysis.aggregate import STORED, SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.columns import plus_minus, rounded
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.store.published import PublishedRow, published

WITHIN, OUTSIDE = "within", "outside"


@dataclass(frozen=True, eq=False)
class PublishedPair:
    """A measured row and the printed one of the same label."""

    board: TaskResults
    row: SeedAggregate
    paper: PublishedRow
    apart: str = ""  # why the two are not of the same task, episodes' rules and data; "" where they are

    @property
    def difference(self) -> float:
        """The difference in accuracy, measured minus printed, in points."""
        return self.row.summary()["acc"].mean - self.paper.values["acc"]

    @property
    def verdict(self) -> str:
        """ "within" or "outside" of the band; "" where there is none, or nothing that it could be held against."""
        if self.paper.band is None or self.apart:
            return ""
        return WITHIN if abs(self.difference) <= self.paper.band else OUTSIDE


def pairs_of(board: TaskResults) -> list[PublishedPair]:
    """The measured rows of a task that a paper has too, in the paper's order.

    A variant's are held against the rows of the task that it departs from, and rows with other options against those
    without, as what they are: not comparable.
    """
    variant = board.task.variant_of
    papers = [
        paper for paper in (published(variant) if variant else board.papers) if not (paper.protocol or paper.sequence)
    ]
    pairs = []
    for paper in papers:
        # Else one of yours that differs in options alone, as a rehearsal does.
        mine = (r for r in (*board.rows, *board.others) if r.origin != STORED and r.label.startswith(f"{paper.label}."))
        if (row := board.row(paper.label) or next(mine, None)) is None:
            continue
        reasons = [f"a variant of {variant}"] if variant else []
        reasons += [] if row.label == paper.label else ["with other options or episodes"]
        reasons += [board.apart(row) or "not on all episodes of the task"] if row not in board.compared else []
        pairs.append(PublishedPair(board, row, paper, "; ".join(reasons)))
    return pairs


def beside_tables(boards: Iterable[TaskResults]) -> list[Table[PublishedPair]]:
    """A table for each task of which something was measured that a paper prints too."""
    return [_table(board, pairs) for board in boards if (pairs := pairs_of(board))]


def _table(board: TaskResults, pairs: list[PublishedPair]) -> Table[PublishedPair]:
    judged = [pair for pair in pairs if pair.verdict]
    notes = []
    if judged:
        outside = [pair.row.label for pair in judged if pair.verdict == OUTSIDE]
        notes.append(
            f"{len(judged) - len(outside)} of {len(judged)} rows are within the band around the printed accuracy"
            + (f"; outside: {', '.join(outside)}" if outside else "")
            + ". docs/paper.md says where the band comes from, and what may explain a difference."
        )
    if few := [pair.row.label for pair in judged if len(pair.row.results) < 3]:
        notes.append(f"The band is for the mean of three training seeds; with fewer: {', '.join(few)}.")
    notes += _order(board, pairs)
    reasons = {pair.apart: None for pair in pairs if pair.apart}
    notes += [f"Not comparable with the printed rows: {reason}." for reason in reasons]
    papers = [pair.paper for pair in pairs if pair.paper.remark]
    notes += [f"{paper.label} ({paper.source}): {paper.remark}." for paper in papers]
    return Table(COLUMNS, pairs, f"{board.name}, measured here beside what is printed", notes,
                 mine=lambda pair: pair.row.origin != STORED)  # fmt: skip


def _order(board: TaskResults, pairs: list[PublishedPair]) -> list[str]:
    """A note on how many pairs of the ranked rows are in the printed order; none where no two rows are ranked."""
    ranked = sorted(pairs, key=lambda pair: -pair.paper.values["acc"])
    ranked = [pair for pair in ranked if pair.row in board.ranking.family]
    couples = [(a.row, b.row) for a, b in combinations(ranked, 2) if a.paper.values["acc"] > b.paper.values["acc"]]
    if not couples:
        return []
    better = board.ranking.better()
    agreements = sum(couple in better for couple in couples)
    reversals = sum(couple[::-1] in better for couple in couples)
    return [
        f"Pairs of rows: {len(couples)}; in the printed order {agreements}, in the opposite order {reversals}, "
        f"not told apart here {len(couples) - agreements - reversals} (over episodes and seeds, familywise error 5%)."
    ]


def _delta(pair: PublishedPair) -> str:
    printed = pair.paper.values.get("delta")
    measured = plus_minus(pair.row.summary()["delta"])
    return measured if printed is None else f"{measured} ({printed:.2f})"


def _printed(pair: PublishedPair) -> str:
    value, plus = pair.paper.values["acc"], pair.paper.values.get("plus_minus_as_printed")
    return f"{value:.2f}" + (f" ({plus:.2f})" if plus is not None else "")


def _fields(pair: PublishedPair) -> dict[str, float | str | int | None]:
    values, printed = pair.row.summary(), pair.paper.values
    return {
        "acc": rounded(values["acc"].mean),
        "acc_interval": rounded(values["acc"].interval),
        "printed": printed["acc"],
        "plus_minus_as_printed": printed.get("plus_minus_as_printed"),
        "difference": rounded(pair.difference),
        "band": pair.paper.band,
        "verdict": pair.verdict or None,
        "apart": pair.apart or None,
        "delta": rounded(values["delta"].mean),
        "printed_delta": printed.get("delta"),
        "seeds": len(pair.row.results),
        "source": pair.row.origin,
        "paper": pair.paper.source,
    }


COLUMNS: tuple[Column[PublishedPair], ...] = (
    Column(fields=lambda pair: {"task": pair.board.name}),
    Column("method", lambda pair: pair.row.label, lambda pair: {"method": pair.row.label}, fold=16),
    Column("Acc.", lambda pair: plus_minus(pair.row.summary()["acc"])),
    Column("printed", _printed),
    Column("difference", lambda pair: f"{pair.difference:+.2f}"),
    Column("band", lambda pair: "" if pair.paper.band is None else f"± {pair.paper.band:g}"),
    Column("verdict", lambda pair: pair.verdict or "not comparable", fold=10),
    Column("Delta (printed)", _delta, drop=3),
    Column("seeds", lambda pair: str(len(pair.row.results)), drop=1),
    Column("source", lambda pair: f"{pair.row.origin}; {pair.paper.source}", _fields, fold=8, drop=2),
)
