"""Tables and text laid out for the width of a terminal; :func:`ifsl_bench.reporting.render.render` writes for a pipe.

Texts are folded at spaces and, in a method's label, before an option; a number stays on its line, with its +- and its
unit. Where folding is not enough, columns are left out, those first that say the least (:attr:`Column.drop`), and a
line says which; a table that is to be whole has its columns in several blocks instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ifsl_bench.reporting.table import Cell, Table
from ifsl_bench.utils.errors import one_line

LEAST = 80  # columns of a terminal; a narrower one gets lines of this width
GAP = 2  # spaces between columns
TELLING = 6  # the highest `drop` of columns for whose sake long words of others, as labels have, are broken
LONG = 24  # columns of a word that makes a column wider; longer ones are broken
MINE = "bold cyan"  # the look of a row of the user's own
# Between these two a line never ends: a number and its unit, +- or sign of comparison.
GLUED = re.compile(r"(?<=\d) (?=[±%(]|points?\b|h\b|s\b|min\b|days?\b|[MGk]B\b)|(?<=[±<>=]) (?=[\d+-])")
# Where a long word may end: before an option, behind a stroke or a hyphen, at a space that is glued.
PIECES = re.compile(r"(?<=[\w)])(?=[.+@][A-Za-z_])|(?<=[/:,;|])(?=\S)|(?<=[A-Za-z]-)(?=[A-Za-z])|(?=\xa0)")
VALUE = re.compile(r"(?<=\w)(?==)")  # where an option may end that is too long: before its value
JOINED = "\xa0"  # stands for a space at which no line ends where there is room


@dataclass(frozen=True)
class _Shown:
    """A column with its heading and cells, and how wide it is."""

    heading: str
    cells: list[Cell]
    fold: int
    drop: int
    natural: int
    least: int

    @property
    def texts(self) -> list[str]:
        return [self.heading, *(cell.text for cell in self.cells)]


def fold(text: str, width: int, hanging: int = 0) -> list[str]:
    """Return a text as lines of at most ``width`` columns, all but the first indented.

    Its own indentation is kept. A word that is too long ends before an option or behind a slash, and only where it has
    none of these before a value or anywhere else. (The standard library's textwrap counts characters, not columns.)

    Args:
        text: the text.
        width: columns of a line.
        hanging: columns that all lines but the first are indented by.
    """
    start = len(text) - len(text.lstrip(" "))
    lines: list[str] = []
    line, empty = " " * start, True
    for word in GLUED.sub(JOINED, text.strip(" ")).split(" "):
        gap = "" if empty else " "
        if cell_len(line + gap + word) <= width:
            line, empty = line + gap + word, False
            continue
        if not empty and cell_len(line + gap) <= start + hanging:  # the name alone, which a long word follows
            line += gap
        elif not empty:
            lines.append(line)
            line = " " * (start + hanging)
        *full, rest = _broken(word, width - cell_len(line))
        for part in full:
            lines.append(line + part)
            line = " " * (start + hanging)
        line, empty = line + rest, False
    return [folded.replace(JOINED, " ").rstrip() for folded in [*lines, line]]


def _broken(word: str, width: int) -> list[str]:
    """Return a word in parts of at most ``width`` columns."""
    if cell_len(word) <= width:
        return [word]
    parts, part = [], ""
    pieces = [p for piece in PIECES.split(word) for p in (VALUE.split(piece) if cell_len(piece) > width else [piece])]
    for piece in pieces:
        if part and cell_len(part + piece) > width:
            parts.append(part)
            part = ""
        part = part + piece if part else piece.lstrip(JOINED)
        while cell_len(part) > width:
            cut = next(i for i in range(len(part), 0, -1) if cell_len(part[:i]) <= width or i == 1)
            parts.append(part[:cut])
            part = part[cut:]
    return [*parts, part] if part else parts


def _widest(texts: Iterable[str], pieces: bool = False) -> int:
    """Return the widest of what a line never ends in; with ``pieces``, of what folding keeps whole."""
    words = (word for text in texts for word in GLUED.sub(JOINED, text).split(" "))
    return max((cell_len(part) for word in words for part in (PIECES.split(word) if pieces else [word])), default=0)


def _columns(table: Table[Any]) -> list[_Shown]:
    rows = table.cells()
    shown = []
    for place, column in enumerate(column for column in table.columns if column.heading is not None):
        heading = one_line(str(column.heading))
        cells = [Cell(one_line(row[place].text), row[place].bold) for row in rows]
        texts = [cell.text for cell in cells]
        natural, least = max(map(cell_len, (heading, *texts))), max(_widest([heading]), *map(cell_len, ("", *texts)))
        if column.fold:
            least = min(natural, max(column.fold, min(LONG, _widest(texts, pieces=True)), _widest([heading])))
        if not rows or any(texts):  # not what is empty throughout
            shown.append(_Shown(heading, cells, column.fold, column.drop, natural, least))
    return shown


def _needed(columns: Sequence[_Shown]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def _fitting(columns: list[_Shown], width: int) -> tuple[list[_Shown], list[str]]:
    """Return the columns that there is room for, and the headings of the others."""
    shown = list(columns)
    while _needed(shown) > width and (candidates := [c for c in shown if c.drop]):
        first = max(column.drop for column in candidates)
        tight = [replace(c, least=min(c.least, c.fold, _widest(c.texts, True))) if c.fold else c for c in shown]
        if first <= TELLING and tight != shown:
            shown = tight
            continue
        shown = [column for column in shown if column.drop != first]
    there = {column.heading for column in shown}
    return shown, [column.heading for column in columns if column.heading not in there]


def _widths(columns: Sequence[_Shown], width: int) -> list[int]:
    """Return the width of each column: its cells' width, or folded where there is no room for that."""
    room = width - GAP * (len(columns) - 1)
    widths = [column.least for column in columns]
    while sum(widths) < room:
        short = [i for i, column in enumerate(columns) if widths[i] < column.natural]
        if not short:
            break
        place = max(short, key=lambda i: columns[i].natural - widths[i])
        widths[place] += 1
    while sum(widths) > room:  # nothing more can go: texts are folded further
        place = max((i for i, c in enumerate(columns) if c.fold), key=lambda i: widths[i], default=-1)
        if place < 0 or widths[place] <= 8:
            break
        widths[place] -= 1
    return widths


def _blocks(columns: list[_Shown], width: int) -> list[list[_Shown]]:
    """Return all columns, in as many blocks as they need, the ones that name a row first in each."""
    names = [column for column in columns if not column.drop and column.fold][:1]
    rest = [column for column in columns if column not in names]
    blocks: list[list[_Shown]] = []
    for column in rest:
        if not blocks or _needed([*blocks[-1], column]) > width:
            blocks.append(list(names))
        blocks[-1].append(column)
    return blocks or [list(names)]


def print_tables(tables: Iterable[Table[Any]], console: Console, closing: str = "") -> None:
    """Print tables for readers at a terminal, each with its title above and its notes below.

    Args:
        tables: the tables.
        console: the terminal.
        closing: a line below all tables.
    """
    width = max(LEAST, console.width)
    gone: dict[str, None] = {}
    blank = Text()
    for number, table in enumerate(tables):
        above = [(table.title, "bold"), (table.lead, "")]
        lines = [Text(line, look) for text, look in above if text for line in fold(one_line(text), width)]
        lines = [*([blank] if number else []), *lines, *([blank] if lines else [])]
        columns = _columns(table)
        if table.whole and _needed(columns) > width:
            blocks = _blocks(columns, width)
        else:
            shown, left_out = _fitting(columns, width)
            blocks = [shown]
            gone |= dict.fromkeys(left_out)
        for place, block in enumerate(blocks):
            lines += [*([blank] if place else []), *_grid(block, table, _widths(block, width))]
        for line in (*lines, *([blank] if table.notes else [])):
            _line(console, line)
        for note in table.notes:
            print_text(note, console)
    no_room = f"No room for: {', '.join(gone)}. A wider terminal, a pipe and --format json have every column."
    for text, look in ((no_room if gone else "", "dim"), (closing, "")):
        if text:
            _line(console, blank)
            print_text(text, console, look)


def _grid(columns: Sequence[_Shown], table: Table[Any], widths: Sequence[int]) -> Iterable[Text]:
    heads = [fold(column.heading, width) for column, width in zip(columns, widths, strict=True)]
    yield from _lines(heads, widths, ["bold"] * len(columns))
    yield Text((" " * GAP).join("-" * width for width in widths))
    for place, row in enumerate(table.rows):
        mine = MINE if table.mine(row) else ""
        cells = [column.cells[place] for column in columns]
        folded = [fold(cell.text, width, 0) for cell, width in zip(cells, widths, strict=True)]
        yield from _lines(folded, widths, ["bold" if cell.bold else mine for cell in cells], mine)


def _lines(
    cells: Sequence[Sequence[str]], widths: Sequence[int], styles: Sequence[str], row: str = ""
) -> Iterable[Text]:
    for number in range(max(map(len, cells), default=0)):
        text = Text(style=row)
        for place, (cell, width, style) in enumerate(zip(cells, widths, styles, strict=True)):
            piece = cell[number] if number < len(cell) else ""
            text.append(piece, style)
            text.append(" " * (width - cell_len(piece) + GAP) if place < len(cells) - 1 else "")
        text.rstrip()
        yield text


def print_text(text: str, console: Console, style: str = "") -> None:
    """Print a paragraph, folded at the width of the terminal; what would steer it is written out.

    Args:
        text: the paragraph.
        console: the terminal.
        style: of rich.
    """
    hanging = len(match[0]) if (match := re.match(r" *\S+  +(?=\S)", text)) else 0  # a name, then its text
    start = len(text) - len(text.lstrip(" "))
    for line in fold(one_line(text), max(LEAST, console.width), max(0, hanging - start)):
        _line(console, Text(line, style))


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
