"""Which rows of a task a figure shows, and what it calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ifsl_bench.board.boards import Board
from ifsl_bench.board.measured import EVERY, PAPER, STORED, Row
from ifsl_bench.board.ranking import Ranked
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.figures.style import drawn_beside


def shown(board: Board, labels: Sequence[str] = (), setting: str | None = None) -> Board:
    """The board with the rows to be drawn: those with these labels, or those of a setting without options of their own.

    Args:
        setting: "paper" by default, for methods as published; "tuned-12" for the best of 12 trials.

    Raises:
        UserError: nothing is stored for the task, or no such row or setting.
    """
    if not board.rows:
        first, more = board.left_out[:1], len(board.left_out) - 1
        left_out = f" ({first[0]}{f', and {more} more' if more > 0 else ''})" if first else ""
        raise UserError(f"no comparable result is stored for task {board.name}{left_out}; make one, as with "
                        f"ifsl-bench run --method imprint --task {board.name}")  # fmt: skip
    settings = {PAPER, *(row.setting for row in board.rows)} - {EVERY}
    if setting and setting not in settings:
        raise unknown("setting", setting, settings, where=f"of task {board.name}")
    if not labels:
        found = board.in_setting(setting or PAPER)
        plain = tuple(row for row in found.rows if not row.has_options)
        found = replace(found, rows=plain or found.rows)
    else:
        known = {row.label for row in board.rows}
        for label in labels:
            if not board.knows(label):
                raise unknown("row", label, known, where=f"of task {board.name}")
        found = board.only(labels)
        found = found.in_setting(setting) if setting else found
    if not found.rows:
        raise UserError(f"{board.name}: none of these rows is of setting {found.setting}; there are: "
                        f"{', '.join(sorted(settings))}")  # fmt: skip
    return found


def places(board: Board) -> list[Ranked]:
    """The rows of a board in their places, the best first. Ranks are among all that the task has."""
    here = {id(row) for row in board.rows}
    return [place for place in board.ranking.places if id(place.row) in here]


def by_accuracy(board: Board) -> list[Row]:
    """The rows of a board, the best first, in the order of ``table --rank``."""
    return [place.row for place in places(board)]


def names_of(rows: Sequence[Row]) -> list[str]:
    """What rows are called: by their labels, and where two share one, by their origin too."""
    often = Counter(row.label for row in rows)
    return [row.label if often[row.label] == 1 else f"{row.label} ({row.origin})" for row in rows]


def named_looks(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """Names and looks of rows; a user's own beside the stored one of the same label has another look."""
    stored = {row.label for row in rows if row.origin == STORED}
    second = [row.label in stored and row.origin != STORED for row in rows]
    return names_of(rows), drawn_beside([row.label for row in rows], second)
