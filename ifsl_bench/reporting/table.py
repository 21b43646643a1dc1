"""A table: rows, the cells and fields that its columns make of each, and its text in five formats.

:func:`render_tables` turns tables into text, Markdown, LaTeX, CSV and JSON; :mod:`ifsl_bench.reporting.terminal` lays
them out for a terminal, :mod:`ifsl_bench.reporting.latex` puts tasks side by side as papers do, and
:class:`ifsl_bench.reporting.frames.Frame` shows them in a notebook.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ifsl_bench.utils.errors import CONTROL_CHARACTERS, escape_controls, unknown_name_error

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A column of a table, by what it makes of a row.

    Attributes:
        heading: what readers see above it; None where the column is for programs alone.
        format_text: the cell that readers see, of a row.
        make_record_fields: names and plain values that programs get, of a row: a mean and its interval are two. A row
            may lack names that others have. Empty where the column is for readers alone.
        is_bold: whether the cell of a row stands out, where the format has a way to say so.
        min_fold_width: the least width at which a terminal folds the cells' texts; 0 for what stays on one line, as
            numbers do.
        drop_priority: where a terminal has no room, the column with the highest number goes first; 0 for one that
            stays.
        name: of a metric, its name; of others, what notes know the column by.
        latex_heading: the heading in the layout of papers, in LaTeX.
        format_latex: the cell there, of a row and whether it is bold.
    """

    heading: str | None = None
    format_text: Callable[[RowT], str] = str
    make_record_fields: Callable[[RowT], Mapping[str, Any]] = lambda _: {}
    is_bold: Callable[[RowT], bool] = lambda _: False
    min_fold_width: int = 0
    drop_priority: int = 0
    name: str = ""
    latex_heading: str = ""
    format_latex: Callable[[RowT, bool], str] = lambda row, _: str(row)


@dataclass(frozen=True)
class Cell:
    """A cell that readers see."""

    text: str
    is_bold: bool = False


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Rows and columns, with what stands above and below.

    Attributes:
        columns: from the left to the right.
        rows: the objects that the columns describe, in order.
        title: for readers, as ``notes`` are; "" where the table needs none.
        notes: lines below the table.
        is_own_row: whether a row is the user's own, which terminals show.
        keeps_all_columns: whether a terminal that is too narrow gets the columns in several blocks, and not some of
            them only.
        sentence_above_rows: a sentence below the title, for readers who read no further.
    """

    columns: Sequence[Column[RowT]]
    rows: Sequence[RowT]
    title: str = ""
    notes: Sequence[str] = ()
    is_own_row: Callable[[RowT], bool] = lambda _: False
    keeps_all_columns: bool = False
    sentence_above_rows: str = ""

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each row, for programs; none of a table whose columns are for readers alone."""
        records = (
            {k: v for column in self.columns for k, v in column.make_record_fields(row).items()} for row in self.rows
        )
        return [record for record in records if record]

    def headings(self) -> list[str]:
        """Return the headings that readers see."""
        return [column.heading for column in self.columns if column.heading is not None]

    def cells(self) -> list[list[Cell]]:
        """Return the rows that readers see, a cell for each of :meth:`headings`."""
        shown = [column for column in self.columns if column.heading is not None]
        return [[Cell(column.format_text(row), column.is_bold(row)) for column in shown] for row in self.rows]


def table_from_dicts(
    rows: Sequence[Mapping[str, Any]],
    title: str = "",
    min_fold_widths: Mapping[str, int] | None = None,
    dropped_first: Sequence[str] = (),
    is_own_row: Callable[[Mapping[str, Any]], bool] = lambda _: False,
) -> Table[Mapping[str, Any]]:
    """Return a table whose columns are the keys of its rows.

    Args:
        rows: the rows.
        title: programs get it too, in a first column ``table``, since they get several tables as one.
        min_fold_widths: columns of text, each with the least width at which a terminal folds it.
        dropped_first: columns that a terminal without room leaves out, the first one first.
        is_own_row: whether a row is the user's own.
    """

    def column(name: str) -> Column[Mapping[str, Any]]:
        return Column(
            name,
            lambda row: "" if row.get(name) is None else str(row[name]),
            lambda row: {name: row.get(name)},
            min_fold_width=(min_fold_widths or {}).get(name, 0),
            drop_priority=len(dropped_first) - dropped_first.index(name) if name in dropped_first else 0,
        )

    columns = [column(name) for name in dict.fromkeys(name for row in rows for name in row)]
    if title:
        columns.insert(0, Column(make_record_fields=lambda row: {"table": title}))
    return Table(columns, rows, title, is_own_row=is_own_row)


# -- its text

Records = list[dict[str, Any]]
FORMULA_START_CHARACTERS = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets take for the beginning of a formula
# In a comment, where titles and notes stand, "95%" and "Delta_a" are left as they are.
LATEX_OF_BACKSLASH_AND_CARET = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}"}
# LaTeX's usual encoding of fonts, OT1, prints the last three as other characters.
LATEX_OF_OTHER_SIGNS = {
    "~": r"\textasciitilde{}",
    "±": r"$\pm$",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
LATEX_OF_SPECIAL_CHARACTER = (
    LATEX_OF_BACKSLASH_AND_CARET | LATEX_OF_OTHER_SIGNS | {character: f"\\{character}" for character in "&%$#_{}"}
)


def render_tables(tables: Iterable[Table[Any]], style: str = "text", closing: str = "") -> str:
    """Return tables in one of :data:`OUTPUT_FORMATS`.

    For readers each has its title above and its notes below. Programs get one document with the rows of all tables,
    plain numbers, and neither titles nor notes; where a row lacks a field of others it is empty (CSV) or null (JSON).
    Texts may come from files of unknown origin: what would steer a terminal is written out, and so is what the
    format takes for more than text.

    Args:
        tables: the tables.
        style: the format.
        closing: a line for readers below all tables.
    """
    if style in TABLE_FORMATTERS:
        pages = [_render_tables(table, TABLE_FORMATTERS[style](table), style) for table in tables]
        closing = format_prose(closing, style) if style == "latex" else closing
        return "\n\n".join([*pages, closing] if closing else pages)
    if style in RECORD_FORMATTERS:
        records = [record for table in tables for record in table.records()]
        names = list(dict.fromkeys(name for record in records for name in record))
        return RECORD_FORMATTERS[style](names, [{name: record.get(name) for name in names} for record in records])
    raise unknown_name_error("format", style, OUTPUT_FORMATS)


def format_prose(text: str, style: str) -> str:
    """Return a line of text above or below a table, in a format for readers.

    Args:
        text: the line.
        style: the format.
    """
    line = escape_controls(text)
    if style == "markdown":
        return _escape_links(_escape_html_tags(line))
    if style == "latex" and line:
        return "% " + "".join(LATEX_OF_BACKSLASH_AND_CARET.get(character, character) for character in line)
    return line


def _render_tables(table: Table[Any], grid: str, style: str) -> str:
    above = [format_prose(line, style) for line in (table.title, table.sentence_above_rows) if line]
    above = [*above, ""] if above else []
    below = ["", *(format_prose(note, style) for note in table.notes)] if table.notes else []
    return "\n".join([*above, grid, *below])


_CODE_OR_MARKUP_PATTERN = re.compile(
    r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)|[`\\\[\]]"
)  # a span of code, or what may begin something else


def _escape_html_tags(text: str) -> str:
    """Return text in which Markdown sees no HTML; "< 1e-15", with a space, is none."""
    return re.sub(r"<(?! |$)", "&lt;", re.sub(r"(?<! )>", "&gt;", text.replace("&", "&amp;")))


def _escape_links(text: str) -> str:
    """Return text in which Markdown sees no link and no image; spans of code stay as they are."""
    return _CODE_OR_MARKUP_PATTERN.sub(lambda match: match[0] if match[1] else f"\\{match[0]}", text)


def _escape_markdown_cell(text: str) -> str:
    """Return text that neither ends a cell of a Markdown table nor becomes code, a link or HTML."""
    return _escape_html_tags(re.sub(r"[\\|`\[\]]", lambda match: f"\\{match[0]}", text))


def _text_table(table: Table[Any]) -> str:
    return _format_grid(table, "simple", lambda cell: escape_controls(cell.text))


def _markdown_table(table: Table[Any]) -> str:
    def write(cell: Cell) -> str:
        text = _escape_markdown_cell(escape_controls(cell.text))
        return f"**{text}**" if cell.is_bold else text

    return _format_grid(table, "github", write)


_NUMBER_CELL_PATTERN = re.compile(r"(?=.*\d)[\d.+\-± *()]+")  # one or several, with their intervals
_LATEX_OF_DELTA_HEADING = {"Delta": r"$\Delta$", "Delta_a": r"$\Delta_a$", "Delta_b": r"$\Delta_b$"}


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it is."""
    return "".join(LATEX_OF_SPECIAL_CHARACTER.get(character, character) for character in escape_controls(text))


def _latex_tabular(table: Table[Any]) -> str:
    """Return a plain ``tabular``; :mod:`ifsl_bench.reporting.latex` has the layout of papers."""
    rows = [table.headings(), *([cell.text for cell in row] for row in table.cells())]
    head, *body = (" & ".join(map(_latex_cell, row)) + r" \\" for row in rows)
    begin = ["% needs booktabs", rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}"]
    return "\n".join([*begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


def _latex_cell(text: str) -> str:
    if _NUMBER_CELL_PATTERN.fullmatch(text):
        return re.sub(r"(?<![^\s(])-(?=\d)", "$-$", escape_latex(text))  # not that of ranks, 2-7
    if (match := re.fullmatch(r"(cal\. |)(Delta(?:_[ab])?)( \(printed\)|)", text)) is not None:
        return match[1] + _LATEX_OF_DELTA_HEADING[match[2]] + match[3]
    brace = "{}" * text.startswith(("[", "*"))  # at the beginning of a line it would be an argument of the \\ before
    return brace + escape_latex(text)


def _format_grid(table: Table[Any], layout: str, write: Callable[[Cell], str]) -> str:
    from tabulate import tabulate

    cells = [[write(cell) for cell in row] for row in table.cells()]
    return tabulate(cells, headers=table.headings(), tablefmt=layout, disable_numparse=True)


def _format_csv(names: Sequence[str], records: Records) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: _csv_cell(value) for name, value in record.items()})
    return out.getvalue().rstrip("\n")


def _csv_cell(value: Any) -> Any:
    """Return a value as spreadsheets show it: text that they would take for a formula gets an apostrophe."""
    if isinstance(value, list):
        text = " ".join(map(str, value))
        return _csv_cell(text) if any(isinstance(entry, str) for entry in value) else text
    if not isinstance(value, str):
        return value
    return ("'" if value.startswith(FORMULA_START_CHARACTERS) else "") + escape_controls(value)


def _format_json(_: Sequence[str], records: Records) -> str:
    lines = json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False).split("\n")  # texts have none of these
    return "\n".join(CONTROL_CHARACTERS.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in lines)


TABLE_FORMATTERS = {"text": _text_table, "markdown": _markdown_table, "latex": _latex_tabular}
RECORD_FORMATTERS = {"csv": _format_csv, "json": _format_json}
OUTPUT_FORMATS = (*TABLE_FORMATTERS, *RECORD_FORMATTERS)
