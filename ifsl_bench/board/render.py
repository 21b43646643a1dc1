"""Tables as text, Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ifsl_bench.board.table import Cell, Table
from ifsl_bench.common.errors import unknown

Records = list[dict[str, Any]]


def render(tables: Iterable[Table[Any]], style: str = "text", closing: str = "") -> str:
    """Tables in one of :data:`FORMATS`.

    For readers each has its title above and its notes below. Programs get one document with the rows of all tables,
    plain numbers, and neither titles nor notes; where a row lacks a field of others it is empty (CSV) or null (JSON).

    Args:
        closing: said to readers below all tables.

    Raises:
        UserError: an unknown format.
    """
    if style in READERS:
        pages = [_page(table, READERS[style](table)) for table in tables]
        return "\n\n".join([*pages, closing] if closing else pages)
    if style in PROGRAMS:
        records = [record for table in tables for record in table.records()]
        names = list(dict.fromkeys(name for record in records for name in record))
        return PROGRAMS[style](names, [{name: record.get(name) for name in names} for record in records])
    raise unknown("format", style, FORMATS)


def _page(table: Table[Any], grid: str) -> str:
    above = [table.title, ""] if table.title else []
    below = ["", *table.notes] if table.notes else []
    return "\n".join([*above, grid, *below])


def _text(table: Table[Any]) -> str:
    return _grid(table, "simple", lambda cell: cell.text)


def _markdown(table: Table[Any]) -> str:
    return _grid(table, "github", lambda cell: f"**{cell.text}**" if cell.bold else cell.text)


def _latex(table: Table[Any]) -> str:
    """A plain ``tabular``; :mod:`ifsl_bench.board.latex` has the layout of papers."""
    return _grid(table, "latex_booktabs", lambda cell: cell.text).replace("±", "$\\pm$")


def _grid(table: Table[Any], layout: str, write: Callable[[Cell], str]) -> str:
    from tabulate import tabulate

    cells = [[write(cell) for cell in row] for row in table.cells()]
    return tabulate(cells, headers=table.headings(), tablefmt=layout, disable_numparse=True)


def _csv(names: Sequence[str], records: Records) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in record.items()})
    return out.getvalue().rstrip("\n")


def _json(_: Sequence[str], records: Records) -> str:
    return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False)


READERS = {"text": _text, "markdown": _markdown, "latex": _latex}
PROGRAMS = {"csv": _csv, "json": _json}
FORMATS = (*READERS, *PROGRAMS)
