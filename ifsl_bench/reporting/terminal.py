"""Tables and paragraphs for the width of a terminal, by rich; :mod:`ifsl_bench.reporting.table` writes for a pipe.

A column of text is folded; a number stays on its line, with its ±. Where folding is not enough, columns are left out in
the order of :attr:`Column.drop_priority`, and a line below lists them; a table that is to be whole has several blocks
instead.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ifsl_bench.reporting.table import Cell, Table
from ifsl_bench.utils.errors import escape_controls

MIN_TERMINAL_WIDTH = 80  # columns of a terminal; a narrower one gets lines of this width
SPACES_BETWEEN_COLUMNS = 2  # spaces between columns
OWN_ROW_STYLE = "bold cyan"  # the style of a row of the user's own
HEADING_RULE_BOX = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)  # a line below the headings
# Between these two a line never ends: a number and its unit, ± or sign of comparison.
UNBREAKABLE_SPACE_PATTERN = re.compile(
    r"(?<=\d) (?=[±%(]|points?\b|h\b|s\b|min\b|days?\b|[MGk]B\b)|(?<=[±<>=]) (?=[\d+-])"
)
UNBREAKABLE_SPACE = "\ue000"  # stands for such a space while lines are folded; of private use, so that no text has it


@dataclass(frozen=True)
class _ShownColumn:
    """A column with its cells, its width where there is room, and the width below which it cannot be."""

    heading: str
    cells: Sequence[Cell]
    min_fold_width: int
    drop_priority: int
    full_width: int
    min_width: int


def print_tables(tables: Iterable[Table[Any]], console: Console, closing: str = "") -> None:
    """Print tables for readers at a terminal, each with its title above and its notes below.

    Args:
        tables: the tables.
        console: the terminal.
        closing: a line below all tables.
    """
    left_out: dict[str, None] = {}
    for number, table in enumerate(tables):
        if number:
            console.print()
        for line, style in ((table.title, "bold"), (table.sentence_above_rows, "")):
            if line:
                print_text(line, console, style)
        if table.title or table.sentence_above_rows:
            console.print()
        columns = _shown_columns(table)
        blocks = [columns]
        if _total_width(columns) > console.width:
            blocks = (
                _split_into_blocks(columns, console.width)
                if table.keeps_all_columns
                else [_shrink_columns_to_width(columns, console.width)]
            )
            shown = {column.heading for block in blocks for column in block}
            left_out |= {column.heading: None for column in columns if column.heading not in shown}
        for place, block in enumerate(blocks):
            if place:
                console.print()
            _print_grid(table, block, console)
        if table.notes:
            console.print()
        for note in table.notes:
            print_text(note, console)
    if left_out:
        line = f"No room for: {', '.join(left_out)}. A wider terminal, a pipe and --format json have every column."
        console.print()
        print_text(line, console, "dim")
    if closing:
        console.print()
        print_text(closing, console)


def print_text(text: str, console: Console, style: str = "") -> None:
    """Print a paragraph, folded at the width of the terminal; what would steer it is written out.

    Lines but the first have the indentation of the text; of a name, two spaces and a text, that of the latter.

    Args:
        text: a paragraph without line breaks, which is wrapped to the width.
        console: the terminal.
        style: of rich.
    """
    line = escape_controls(text)
    match = re.match(r" *(?:\S+  +)?(?=\S)", line)
    start = match.end() if match and match.end() <= console.width // 2 else 0
    folded = Text(UNBREAKABLE_SPACE_PATTERN.sub(UNBREAKABLE_SPACE, line[start:])).wrap(console, console.width - start)
    for place, part in enumerate(folded):
        before = " " * start if place else line[:start]
        console.print(
            Text(before + part.plain.rstrip().replace(UNBREAKABLE_SPACE, " "), style), soft_wrap=True, highlight=False
        )


def _shown_columns(table: Table[Any]) -> list[_ShownColumn]:
    """Return the columns that readers see, without those that are empty throughout."""
    rows = table.cells()
    columns = []
    for place, column in enumerate(column for column in table.columns if column.heading is not None):
        cells = [Cell(escape_controls(row[place].text), row[place].is_bold) for row in rows]
        if rows and not any(cell.text for cell in cells):
            continue
        widest = max((cell_len(cell.text) for cell in cells), default=0)
        heading = escape_controls(str(column.heading))
        least = max(
            [min(widest, column.min_fold_width) if column.min_fold_width else widest, *map(cell_len, heading.split())]
        )
        widest = max(widest, cell_len(heading))
        columns.append(_ShownColumn(heading, cells, column.min_fold_width, column.drop_priority, widest, least))
    return columns


def _total_width(columns: Sequence[_ShownColumn]) -> int:
    return sum(column.min_width for column in columns) + SPACES_BETWEEN_COLUMNS * (len(columns) - 1)


def _shrink_columns_to_width(columns: Sequence[_ShownColumn], width: int) -> list[_ShownColumn]:
    """Return the columns that there is room for; those with the highest ``drop`` go first."""
    shown = list(columns)
    while _total_width(shown) > width and any(column.drop_priority for column in shown):
        first = max(column.drop_priority for column in shown)
        shown = [column for column in shown if column.drop_priority != first]
    return shown


def _split_into_blocks(columns: Sequence[_ShownColumn], width: int) -> list[list[_ShownColumn]]:
    """Return all columns, in as many blocks as they need, the one that names a row first in each."""
    names = [column for column in columns if column.min_fold_width and not column.drop_priority][:1]
    blocks: list[list[_ShownColumn]] = []
    for column in columns:
        if column in names:
            continue
        if not blocks or _total_width([*blocks[-1], column]) > width:
            blocks.append([*names])
        blocks[-1].append(column)
    return blocks or [names]


def _print_grid(table: Table[Any], columns: Sequence[_ShownColumn], console: Console) -> None:
    grid = Grid(
        box=HEADING_RULE_BOX,
        show_edge=False,
        pad_edge=False,
        padding=(0, SPACES_BETWEEN_COLUMNS - 1, 0, 0),
        header_style="bold",
    )
    narrow = (
        sum(column.full_width + SPACES_BETWEEN_COLUMNS for column in columns) - SPACES_BETWEEN_COLUMNS > console.width
    )
    for column in columns:
        heading = textwrap.fill(column.heading, max(1, column.min_width)) if narrow else column.heading
        grid.add_column(Text(heading), no_wrap=not column.min_fold_width, overflow="fold")
    for place, row in enumerate(table.rows):
        cells = [column.cells[place] for column in columns]
        texts = [Text(cell.text, style="bold" if cell.is_bold else "") for cell in cells]
        grid.add_row(*texts, style=OWN_ROW_STYLE if table.is_own_row(row) else None)
    console.print(grid, highlight=False)
