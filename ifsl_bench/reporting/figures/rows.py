"""The rows of a task that a figure shows, with their names and looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ifsl_bench.analysis.aggregate import EVERY, STORED, SeedAggregate, names_of
from ifsl_bench.analysis.task_results import TaskResults, in_setting, only
from ifsl_bench.reporting.figures.style import drawn_beside
from ifsl_bench.utils.errors import UserError


def shown(
    board: TaskResults, labels: Sequence[str] = (), setting: str | None = None, papers: bool = False
) -> TaskResults:
    """The board with the rows to be drawn: those with these labels, or those of a setting without options of their own.

    Args:
        setting: "paper" by default, for methods as published; "tuned-12" for the best of 12 trials.
        papers: whether published rows are drawn too, and will do alone.

    Raises:
        UserError: nothing is stored for the task, or no such row or setting.
    """
    if not board.rows and not (papers and board.papers):
        first, more = board.left_out[:1], len(board.left_out) - 1
        left_out = f" ({first[0]}{f', and {more} more' if more > 0 else ''})" if first else ""
        raise UserError(f"no comparable result is stored for task {board.name}{left_out}; make one, as with "
                        f"ifsl-bench run --method imprint --task {board.name}")  # fmt: skip
    if labels:
        (view,) = only([board], labels, f"of task {board.name}", f"ifsl-bench table {board.name}")
        (view,) = in_setting([view], setting) if setting else [view]
    else:
        (view,) = in_setting([board], setting)
        view = replace(view, rows=tuple(row for row in view.rows if not row.has_options) or view.rows)
    if not view.rows and not (papers and view.papers):
        raise UserError(f"{board.name}: none of these rows is of setting {view.setting}; there are: "
                        f"{', '.join(sorted({row.setting for row in board.rows} - {EVERY}))}")  # fmt: skip
    return view


def by_accuracy(board: TaskResults) -> list[SeedAggregate]:
    """The rows of a board, the best first, in the order of ``table --rank``."""
    return [place.row for place in board.places]


def named_looks(rows: Sequence[SeedAggregate]) -> tuple[list[str], list[dict[str, Any]]]:
    """Names and looks of rows; a user's own beside the stored one of the same label has another look."""
    stored = {row.label for row in rows if row.origin == STORED}
    second = [row.label in stored and row.origin != STORED for row in rows]
    return names_of(rows), drawn_beside([row.label for row in rows], second)
