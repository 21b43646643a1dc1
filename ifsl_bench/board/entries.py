"""The rows of a task's table as numbers, measured and published alike. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ifsl_bench.board.boards import Board
from ifsl_bench.board.measured import COMPUTED, LAZY, Row, lazy_rows
from ifsl_bench.board.published import PublishedRow
from ifsl_bench.board.ranking import Ranked
from ifsl_bench.protocol.metrics import Estimate
from ifsl_bench.protocol.task import Task


@dataclass(frozen=True, eq=False)
class Entry:
    """One row of a task's table.

    Attributes:
        comparable: whether it is of the task's own protocol, episodes and data.
        values: metric -> mean and half-width of its 95% interval, in percent, unrounded; the interval of published
            numbers is NaN.
        after: in sessions, mean and interval of the accuracy after each session.
        marks: of a published row in sessions, letters of :data:`~ifsl_bench.board.published.LETTERS`.
        source: "stored" or "yours" for measured rows, "computed" for lazy ones, the key of the paper for published
            ones.
        printed: the +- that a paper prints beside its accuracy, of unknown kind.
        seeds: how many training seeds.
        spread: standard deviation between the seeds' accuracies; NaN for fewer than two.
        partial: whether it was measured on a part of the data; None for published rows.
        place: ranks and distance from the best, where rows were ranked and this one is comparable with them.
        note: what a reader should know of a published row.
        measured: the row that it was made from; None for published rows.
    """

    task: Task
    comparable: bool
    label: str
    values: Mapping[str, Estimate]
    source: str
    printed: float | None = None
    seeds: int | None = None
    spread: float = math.nan
    partial: bool | None = None
    place: Ranked | None = None
    note: str = ""
    measured: Row | None = None
    after: Sequence[Estimate] = ()
    marks: str = ""

    @property
    def kind(self) -> str:
        """ "measured", "computed" or "published"."""
        return "measured" if self.measured else COMPUTED if self.source == COMPUTED else "published"


def entries_of(board: Board, rank: bool = False) -> list[Entry]:
    """Comparable measured rows (the best first, where they are ranked), lazy rows, other measured ones, published ones.

    Published rows in sessions have a table of their own, :mod:`ifsl_bench.board.published_table`. Ranks are among all
    of the task's comparable rows, whichever are shown.
    """
    if rank:
        comparable = [_measured(board, place.row, True, place) for place in board.places]
    else:
        comparable = [_measured(board, row, True) for row in board.rows]
    others = [_measured(board, row, False) for row in board.others]
    papers = [] if board.task.sessions else published_entries(board)
    return [*comparable, *_lazy(board), *others, *papers]


def _measured(board: Board, row: Row, comparable: bool, place: Ranked | None = None) -> Entry:
    return Entry(
        board.task,
        comparable,
        row.label,
        row.summary(),
        row.origin,
        seeds=len(row.results),
        spread=row.spread(),
        partial=row.partial,
        place=place,
        measured=row,
        after=row.after(),
    )


def _lazy(board: Board) -> list[Entry]:
    """In sessions, the rows of models that never answer with a novel class; each is named after a row of its A_0."""
    rows = [(lazy, alike) for lazy, alike in lazy_rows(board.rows) if LAZY not in {row.label for row in alike}]
    entries = []
    for lazy, alike in rows:
        labels = list(dict.fromkeys(row.label for row in alike))
        name, note = LAZY if len(rows) == 1 else f"{LAZY} ({labels[0]})", f"the A_0 of {', '.join(labels)}"
        entries.append(
            Entry(board.task, True, name, lazy.summary(), COMPUTED, seeds=len(lazy.seeds), note=note,
                  after=lazy.after())
        )  # fmt: skip
    return entries


def published_entries(board: Board) -> list[Entry]:
    """The published rows."""
    return [_published(board, paper) for paper in board.papers]


def _published(board: Board, paper: PublishedRow) -> Entry:
    after = [Estimate(value, math.nan) for value in paper.sequence.after] if paper.sequence else ()
    values = {name: Estimate(value, math.nan) for name, value in paper.values.items()}
    printed = paper.values.get("plus_minus_as_printed")
    return Entry(board.task, not paper.protocol, paper.label, values, paper.source, printed=printed, note=paper.said,
                 after=after, marks=paper.sequence.marks if paper.sequence else "")  # fmt: skip
