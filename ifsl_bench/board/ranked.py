"""Published and measured rows of tasks in one view: measured ones ranked, other protocols apart. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ifsl_bench.board.latex import paper_tables
from ifsl_bench.board.ranking import Ranked, ranked
from ifsl_bench.board.rows import Board, load_variants
from ifsl_bench.board.text import (
    DATA,
    TITLES,
    columns_of,
    measured_cells,
    notes_of,
    nothing_stored,
    published_cells,
    render,
)

RULE = (
    "Rank 1: the row with the highest Acc. and all that cannot be told from it at 95%, the paired difference over "
    "episodes and over common seeds taken together; other ranks count the rows with a higher mean. Each row is held "
    "against the best by itself, without correction for the number of rows."
)


def leaderboard(
    boards: Iterable[Board], results: Path, style: str = "text", full: bool = False, labels: Collection[str] = ()
) -> str:
    """The ranked view of tasks, each followed by the tasks whose protocol departs from its own, ranked by themselves.

    Args:
        boards: of the tasks to show, see :func:`ifsl_bench.board.rows.load_board`.
        results: the folder of results, where variants are looked for.
        style: one of :data:`ifsl_bench.board.text.FORMATS`. LaTeX has the layout of the tables of Ren et al. (2019):
            tasks that differ in shots alone side by side, the numbers that share the top in bold.
        full: more columns.
        labels: of the only rows to show of the variants, as ``boards`` may be of some rows alone; all if empty.

    Raises:
        UserError: nothing is stored of a task, nor of a variant of it.
    """
    named = {board.name: board for board in boards}
    sections: dict[str, Board] = {}
    for board in named.values():
        variants = [other for other in load_variants(board.task, results) if other.name not in named]
        if labels:
            variants = [other.only(labels) for other in variants]
        if board.empty and not variants:
            raise nothing_stored(board)
        sections |= {b.name: b for b in (board, *variants) if not b.empty}
    if style == "latex":
        return paper_tables(list(sections.values()), full)
    if style in DATA:
        return render([row for board in sections.values() for row in _numbers(board, style, full)], style)
    texts = [_section(board, style, full) for board in sections.values()]
    if any(len(board.rows) > 1 for board in sections.values()):
        texts.append(RULE)
    return "\n\n".join(texts)


def _section(board: Board, style: str, full: bool) -> str:
    """Title, table and remarks of one task."""
    columns = columns_of(board, style, full)
    places = ranked(board.rows)
    entries = [(place.row.summary()["acc"].mean, _ranked_cells(place, columns, style)) for place in places]
    exact = [paper for paper in board.papers if not paper.protocol]
    entries += [(paper.values["acc"], _unranked(published_cells(paper, columns, style))) for paper in exact]
    entries.sort(key=lambda entry: -entry[0])
    cells = [entry for _, entry in entries]
    for row in board.others:
        apart = measured_cells(row, columns, style) | {"source": f"{row.origin}, not comparable"}
        cells.append(_unranked(apart))
    for paper in board.papers:
        if paper.protocol:
            apart = published_cells(paper, columns, style)
            cells.append(_unranked(apart | {"source": f"{apart['source']}, other protocol"}))
    title = board.name
    if board.task.variant_of:
        title += f", a variant of {board.task.variant_of}: not comparable with it"
    notes = [*notes_of(board), *_few_seeds(places)]
    return "\n".join([title, "", render(cells, style), *([""] if notes else []), *notes])


def _ranked_cells(place: Ranked, columns: Sequence[str], style: str) -> dict[str, str]:
    """A measured row with its rank and its distance from the best."""
    cells = measured_cells(place.row, columns, style)
    if style == "markdown" and place.top:
        cells[TITLES["acc"]] = f"**{cells[TITLES['acc']]}**"
    gap = "" if place.gap is None else f"{place.gap.mean:+.2f} ± {place.gap.interval:.2f}"
    return _arranged({"rank": str(place.rank), **cells, "to the best": gap})


def _unranked(cells: dict[str, str]) -> dict[str, str]:
    return _arranged({"rank": "", **cells, "to the best": ""})


def _arranged(cells: dict[str, str]) -> dict[str, str]:
    """The same cells, what was measured before how and where."""
    last = ("to the best", "seeds", "sd of seeds", "source")
    return {name: text for name, text in cells.items() if name not in last} | {name: cells[name] for name in last}


def _few_seeds(places: Sequence[Ranked]) -> list[str]:
    """A line on the rows whose comparison with the best says nothing of other training seeds."""
    few = [f"{p.row.label} ({p.row.origin})" for p in places if p.gap is not None and p.common_seeds < 2]
    if not few:
        return []
    return [f"Fewer than two training seeds in common with the best row: {', '.join(few)}. There the comparison is of "
            f"these trained models, not of the methods."]  # fmt: skip


def _numbers(board: Board, style: str, full: bool) -> list[dict[str, Any]]:
    """The rows of a task for a program; ``kind`` and ``comparable`` keep apart what must not be mixed."""
    columns = columns_of(board, style, full)

    def entry(kind: str, comparable: bool, cells: dict[str, Any], place: Ranked | None = None) -> dict[str, Any]:
        gap = place.gap if place else None
        return {
            "task": board.name,
            "variant_of": board.task.variant_of or None,
            "kind": kind,
            "comparable": comparable,
            "rank": place.rank if place else None,
            **cells,
            "to_best": round(gap.mean, 4) if gap else None,
            "to_best_interval": round(gap.interval, 4) if gap else None,
            "common_seeds": place.common_seeds if place else None,
        }

    places = ranked(board.rows)
    entries = [entry("measured", True, measured_cells(place.row, columns, style), place) for place in places]
    entries += [entry("measured", False, measured_cells(row, columns, style)) for row in board.others]
    for paper in board.papers:
        note = "; ".join(part for part in (paper.protocol, paper.note) if part)
        printed = {"plus_minus_as_printed": paper.values.get("plus_minus_as_printed"), "note": note or None}
        entries.append(entry("published", not paper.protocol, published_cells(paper, columns, style)) | printed)
    return entries
