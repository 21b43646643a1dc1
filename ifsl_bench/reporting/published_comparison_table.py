"""Table of measured numbers next to printed ones, and whether they are within the stated band. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from ifsl_bench.analysis.aggregate import STORED
from ifsl_bench.analysis.published_comparison import OUTSIDE, PublishedPair, order_agreement, pairs_of
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.columns import plus_minus, rounded
from ifsl_bench.reporting.table import Column, Table


def beside_tables(boards: Iterable[TaskResults]) -> list[Table[PublishedPair]]:
    """Return a table for each task of which something was measured that a paper prints too."""
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
    return Table(
        COLUMNS,
        pairs,
        f"{board.name}, measured here beside what is printed",
        notes,
        mine=lambda pair: pair.row.origin != STORED,
    )


def _order(board: TaskResults, pairs: list[PublishedPair]) -> list[str]:
    """Return a note on the order of the ranked rows; none where no two rows are ranked."""
    order = order_agreement(board, pairs)
    if not order.pairs:
        return []
    return [
        f"Pairs of rows: {order.pairs}; in the printed order {order.agreements}, in the opposite order "
        f"{order.reversals}, not told apart here {order.pairs - order.agreements - order.reversals} (over episodes and "
        "seeds, familywise error 5%)."
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
