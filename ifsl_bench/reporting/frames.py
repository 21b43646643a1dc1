"""Tables and results that a notebook shows: a short text, HTML, and pandas where it is installed. Imports no torch.

Labels, titles and notes may come from a file of unknown origin: HTML has them escaped.
"""

from __future__ import annotations

import re
from collections import UserList
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ifsl_bench.protocols.registry import title_by_metric
from ifsl_bench.reporting.table import Table, render_tables, table_from_dicts
from ifsl_bench.store.data_frames import (
    EPISODE_COLUMNS,
    format_metric,
    format_result_line,
    import_pandas_or_explain,
    make_data_frame,
    make_episodes_frame,
    result_column_names,
    result_to_row,
)
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import escape_controls
from ifsl_bench.utils.text_format import format_count

if TYPE_CHECKING:
    import pandas

NO_WRAP_HTML_ATTRIBUTE = ' style="white-space: nowrap"'  # a number and its interval
OWN_ROW_HTML_ATTRIBUTE = ' style="font-weight: bold"'  # a row of the user's own
MAX_TEXT_ROWS = 30  # rows that a notebook shows as text
MAX_HTML_ROWS = 200  # and as HTML: a page of all tasks, not all results of a user


class Frame:
    """Tables in a notebook, as ``ifsl-bench table``, ``leaderboard`` or ``compare`` print them.

    Iterating gives a dict for each row, with the names and plain numbers of ``--format json``: percent, and half-widths
    of 95% intervals under the same name with ``_interval``.
    """

    def __init__(self, tables: Sequence[Table[Any]], closing: str = "") -> None:
        self._tables, self._closing = tuple(tables), closing

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each row of all tables."""
        return [record for table in self._tables for record in table.records()]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each of :meth:`records`; raise an error without pandas."""
        return make_data_frame(self.records())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records())

    def __len__(self) -> int:
        return sum(len(table.rows) for table in self._tables)

    def _note_hidden_rows(self, most: int) -> list[str]:
        return [f"... and {len(self) - most} more rows; to_pandas() has them all"] if len(self) > most else []

    def __repr__(self) -> str:
        lines: list[str] = []
        room = MAX_TEXT_ROWS
        for table in self._tables:
            if room <= 0:
                break
            grid = render_tables([Table(table.columns, table.rows)]).split("\n")
            above = [escape_controls(text) for text in (table.title, table.sentence_above_rows) if text]
            lines += ["", *above, *([""] if above else []), *grid[: 2 + room]]
            room -= len(table.rows)
        return "\n".join([*lines[1:], *self._note_hidden_rows(MAX_TEXT_ROWS)])

    def _repr_html_(self) -> str:
        shown, room = list[str](), MAX_HTML_ROWS
        for table in self._tables:
            if room > 0:
                shown.append(_html_table(table, room))
            room -= len(table.rows)
        closing = [*self._note_hidden_rows(MAX_HTML_ROWS), *([self._closing] if self._closing else [])]
        return "".join([*shown, *(f"<p>{escape(escape_controls(text))}</p>" for text in closing)])


def _html_table(table: Table[Any], most: int) -> str:
    from tabulate import tabulate

    cells = [[escape_controls(cell.text) for cell in row] for row in table.cells()[:most]]  # tabulate escapes them
    grid = tabulate(cells, table.headings(), "html", disable_numparse=True)
    mine = iter([table.is_own_row(row) for row in table.rows])
    grid = re.sub("<tr><td>", lambda _: f"<tr{OWN_ROW_HTML_ATTRIBUTE if next(mine) else ''}><td>", grid)
    grid = grid.replace("<td>", f"<td{NO_WRAP_HTML_ATTRIBUTE}>")
    notes = "<br>".join(escape(escape_controls(note)) for note in table.notes)
    lead = f"<p>{escape(escape_controls(table.sentence_above_rows))}</p>" if table.sentence_above_rows else ""
    title = f"<p><b>{escape(escape_controls(table.title))}</b></p>" if table.title else ""
    below = f"<p><small>{notes}</small></p>" if notes else ""
    return f"{title}{lead}{grid}{below}"


class Results(UserList[Result]):
    """Results in a notebook.

    Example:
        >>> results = ifsl_bench.load("imprint", "glyphs-5shot")
        >>> len(results), results[0].seed
        (5, 0)
    """

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each result, see :func:`facts`; raise an error without pandas."""
        return make_data_frame([result_to_row(result) for result in self], result_column_names())

    def episodes_to_pandas(self) -> pandas.DataFrame:
        """Return a row for each episode of each result, see :func:`episodes`; raise an error without pandas."""
        frames = [make_episodes_frame(result) for result in self]
        return (
            import_pandas_or_explain().concat(frames, ignore_index=True)
            if frames
            else make_data_frame([], EPISODE_COLUMNS)
        )

    def __repr__(self) -> str:
        shown = [f"  {format_result_line(result)}" for result in self[:MAX_TEXT_ROWS]]
        more = [f"  ... and {len(self) - MAX_TEXT_ROWS} more"] if len(self) > MAX_TEXT_ROWS else []
        return "\n".join([format_count(len(self), "result"), *shown, *more])

    def _repr_html_(self) -> str:
        if not len(self):
            return "<p>no results</p>"
        rows = []
        for result in self:
            names = [name for name in ("acc", "calibrated_acc", "delta") if name in result.summary]
            row = {"task": result.task, "method": result.label, "seed": str(result.seed)}
            row |= {title_by_metric()[name]: format_metric(result.summary[name]) for name in names}
            rows.append(row | {"episodes": f"{len(result.episodes):,}"})
        more = (
            f"<p>... and {len(self) - MAX_HTML_ROWS} more; to_pandas() has them all</p>"
            if len(self) > MAX_HTML_ROWS
            else ""
        )
        return _html_table(table_from_dicts(rows), MAX_HTML_ROWS) + more
