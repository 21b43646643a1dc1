"""The table of what papers and authors print of a task in sessions; ranked nowhere. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.columns import HEADINGS, rounded
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.store.published import KINDS, PublishedRow, PublishedSequence

SHOWN = ("acc", "first", "last", "pd", "gain", "base", "novel")
DROP = {"pd": 2, "first": 3, "base": 5, "novel": 4}
WARNING = (
    "Published rows use other backbones than measured ones, or do not say which: do not compare their accuracies, and "
    "compare gains with care."
)
NOTES = [
    "Published: as printed, without intervals; means of several runs where a note says so. Ranked nowhere, in no "
    "significance test. Sources that contradict each other stand side by side.",
    WARNING,
    "gain: how far Avg. is above that of a model with the same A_0 which never answers with a novel class.",
    "kind: who prints the numbers; cited: another paper repeats them; rerun: another paper ran the method itself.",
]


def published_tables(board: TaskResults, full: bool = False) -> list[Table[PublishedRow]]:
    """The table of the published rows of a task in sessions, by method; none where there are none.

    Args:
        full: with the accuracy after each session.
    """
    rows = sorted((paper for paper in board.papers if paper.sequence), key=lambda paper: paper.label.lower())
    if not rows:
        return []
    notes = [*NOTES, *(["They are of one order of the classes and one support set."] if rows[0].protocol else [])]
    labels: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        labels.setdefault((row.source, row.note), []).append(row.label)
    notes += [f"{', '.join(of_note)} ({source}): {note}." for (source, note), of_note in labels.items() if note]
    return [Table(_columns(board, full), rows, f"{board.name}: published numbers", notes, whole=full)]


def _columns(board: TaskResults, full: bool) -> Sequence[Column[PublishedRow]]:
    sessions = range(board.task.sessions.count + 1) if board.task.sessions else range(0)
    fixed = {"task": board.name, "kind": "published", "comparable": False}
    return (
        Column(fields=lambda row: fixed),
        Column("method", lambda row: row.label, lambda row: {"method": row.label}, fold=14),
        *(_metric(name) for name in SHOWN[:1]),
        *(_after(t, full) for t in sessions),
        *(_metric(name) for name in SHOWN[1:] if not (full and name in ("first", "last"))),
        Column("kind", lambda row: KINDS[_sequence(row).kind], lambda row: {"published_as": _sequence(row).kind},
               fold=10),
        Column("backbone", lambda row: _sequence(row).backbone or "not said",
               lambda row: {"backbone": _sequence(row).backbone or None}, fold=10, drop=1),
        Column("flags", lambda row: _sequence(row).flags, _flags, fold=20),
        Column("source", lambda row: row.source,
               lambda row: {"source": f"published: {row.source}", "seeds": _sequence(row).seeds,
                            "note": row.note or None}, fold=11),
    )  # fmt: skip


def _sequence(row: PublishedRow) -> PublishedSequence:
    assert row.sequence is not None
    return row.sequence


def _metric(name: str) -> Column[PublishedRow]:
    heading = "Avg." if name == "acc" else HEADINGS[name].text
    return Column(
        heading,
        lambda row: f"{row.values[name]:.2f}" if name in row.values else "",
        lambda row: {name: rounded(row.values[name]) if name in row.values else None},
        drop=DROP.get(name, 0),
    )


def _after(t: int, shown: bool) -> Column[PublishedRow]:
    return Column(
        f"A_{t}" if shown else None,
        lambda row: f"{_sequence(row).after[t]:.2f}",
        lambda row: {f"a_{t}": _sequence(row).after[t]},
    )


def _flags(row: PublishedRow) -> dict[str, bool | str | None]:
    """The flags for programs; None where no source says so."""
    sequence = _sequence(row)
    return {
        "chosen_on_test": sequence.chosen_on_test,
        "keeps_images": sequence.images or None,
        "knows_classes": sequence.knows_classes,
        "novel_seen": sequence.novel_seen,
    }
