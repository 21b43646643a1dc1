"""A table before it is text: rows, and what its columns say of each to readers and to programs.

:func:`ifsl_bench.reporting.render.render` turns tables into text, Markdown, LaTeX, CSV and JSON,
:mod:`ifsl_bench.reporting.terminal` lays them out for a terminal, :mod:`ifsl_bench.reporting.latex` puts tasks side by
side as papers do, and :class:`ifsl_bench.reporting.frames.Frame` shows them in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table, by what it makes of a row.

    Attributes:
        heading: what readers see above it; None where the column is for programs alone.
        text: the cell that readers see, of a row.
        fields: names and plain values that programs get, of a row: a mean and its interval are two. A row may lack
            names that others have. Empty where the column is for readers alone.
        bold: whether the cell of a row stands out, where the format has a way to say so.
        fold: the least width at which a terminal folds the cells' texts; 0 for what stays on one line, as numbers do.
        drop: where a terminal has no room, the column with the highest number goes first; 0 for one that stays.
        name: of a metric, its name; of others, what notes know the column by.
        latex_heading: the heading in the layout of papers, in LaTeX.
        latex: the cell there, of a row and whether it is bold.
    """

    heading: str | None = None
    text: Callable[[R], str] = str
    fields: Callable[[R], Mapping[str, Any]] = lambda _: {}
    bold: Callable[[R], bool] = lambda _: False
    fold: int = 0
    drop: int = 0
    name: str = ""
    latex_heading: str = ""
    latex: Callable[[R, bool], str] = lambda row, _: str(row)


@dataclass(frozen=True)
class Cell:
    """A cell that readers see."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table(Generic[R]):
    """Rows and columns, with what stands above and below.

    Attributes:
        columns: from the left to the right.
        rows: the objects that the columns describe, in order.
        title: for readers, as ``notes`` are; "" where the table needs none.
        notes: lines below the table.
        mine: whether a row is the user's own, which terminals show.
        whole: whether a terminal that is too narrow gets the columns in several blocks, and not some of them only.
        lead: a sentence below the title, for readers who read no further.
    """

    columns: Sequence[Column[R]]
    rows: Sequence[R]
    title: str = ""
    notes: Sequence[str] = ()
    mine: Callable[[R], bool] = lambda _: False
    whole: bool = False
    lead: str = ""

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each row, for programs."""
        return [{k: v for column in self.columns for k, v in column.fields(row).items()} for row in self.rows]

    def headings(self) -> list[str]:
        """Return the headings that readers see."""
        return [column.heading for column in self.columns if column.heading is not None]

    def cells(self) -> list[list[Cell]]:
        """Return the rows that readers see, a cell for each of :meth:`headings`."""
        shown = [column for column in self.columns if column.heading is not None]
        return [[Cell(column.text(row), column.bold(row)) for column in shown] for row in self.rows]


def plain_table(
    rows: Sequence[Mapping[str, Any]],
    title: str = "",
    fold: Mapping[str, int] | None = None,
    drop: Sequence[str] = (),
    mine: Callable[[Mapping[str, Any]], bool] = lambda _: False,
) -> Table[Mapping[str, Any]]:
    """Return a table whose columns are the keys of its rows.

    Args:
        rows: the rows.
        title: programs get it too, in a first column ``table``, since they get several tables as one.
        fold: columns of text, each with the least width at which a terminal folds it.
        drop: columns that a terminal without room leaves out, the first one first.
        mine: whether a row is the user's own.
    """

    def column(name: str) -> Column[Mapping[str, Any]]:
        return Column(
            name,
            lambda row: "" if row.get(name) is None else str(row[name]),
            lambda row: {name: row.get(name)},
            fold=(fold or {}).get(name, 0),
            drop=len(drop) - drop.index(name) if name in drop else 0,
        )

    columns = [column(name) for name in dict.fromkeys(name for row in rows for name in row)]
    if title:
        columns.insert(0, Column(fields=lambda row: {"table": title}))
    return Table(columns, rows, title, mine=mine)
