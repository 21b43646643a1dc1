"""The boards and rows that commands and notebooks name, by task, label and file. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ifsl_bench.analysis.aggregate import EVERY, FILE, PAPER, SeedAggregate, lazy_of
from ifsl_bench.analysis.task_results import TaskResults, load_board, nothing_stored, telling
from ifsl_bench.plugin.display_names import LAZY
from ifsl_bench.plugin.registry import names_file
from ifsl_bench.protocols.tasks.task_files import find, find_one, own, packaged
from ifsl_bench.reporting.plot_styles import method_of
from ifsl_bench.store.result_folder import LEFT_OUT
from ifsl_bench.store.schema import read
from ifsl_bench.utils.errors import UserError, unknown
from ifsl_bench.utils.files import Paths


def boards_of(tasks: Sequence[str], labels: Sequence[str], folders: Paths) -> list[TaskResults]:
    """The boards of the named tasks, or of all that have any row; with the rows of these labels alone, if any.

    Raises:
        UserError: an unknown task or label.
    """
    if odd := [name for name in tasks if not isinstance(name, str)]:
        raise UserError(f"tasks are names, one after the other, not {type(odd[0]).__name__}: {odd[0]!r:.60}")
    if files := [name for name in tasks if name.endswith(".json")]:
        raise UserError(f"{files[0]} is no task; a result file is shown by: ifsl-bench show {files[0]}")
    chosen = [task for name in tasks for task in find(name, home=folders)]
    boards = [load_board(task, folders.results) for task in chosen or [*packaged().values(), *own(folders).values()]]
    if labels:
        boards = only(boards, labels, f"of {', '.join(tasks) or 'any task'}", f"ifsl-bench table {' '.join(tasks)}")
    if tasks and not labels:
        return boards
    return telling([board for board in boards if not board.empty], boards)


def only(boards: Sequence[TaskResults], labels: Sequence[str], where: str, see: str) -> list[TaskResults]:
    """The boards with the rows of these labels alone.

    Raises:
        UserError: a label that no board has.
    """
    labels_here = {label for board in boards for label in board.labels}
    for label in labels:
        if not any(board.knows(label) for board in boards):
            raise unknown("row", label, labels_here, where=where, see=see.strip())
    return [board.only(labels) for board in boards]


def in_setting(boards: Sequence[TaskResults], setting: str | None) -> list[TaskResults]:
    """The boards with the rows of a setting, by default of methods as published.

    Raises:
        UserError: no row has that setting.
    """
    settings = {PAPER, *(row.setting for board in boards for row in board.compared)} - {EVERY}
    if setting and setting not in settings:
        raise unknown("setting", setting, settings)
    return [board.in_setting(setting or PAPER) for board in boards]


def measured_boards(tasks: Sequence[str], labels: Sequence[str], folders: Paths) -> list[TaskResults]:
    """The boards of the named tasks, see :func:`boards_of`, or of all on which something is measured.

    Raises:
        UserError: an unknown task or label, or nothing is measured.
    """
    boards = boards_of(tasks, labels, folders)
    if not tasks:
        boards = telling([board for board in boards if board.rows], boards)
        if not boards:
            raise UserError("nothing is measured yet; make a row with: ifsl-bench run --method NAME --task TASK")
    return boards


def board_of(task: str, folders: Paths) -> TaskResults:
    """The board of the one task of that name; raises :class:`UserError` where there is none, or a file with several."""
    return load_board(find_one(task, folders), folders.results)


def row_of(board: TaskResults, label: str) -> SeedAggregate:
    """The measured row of that label; raises :class:`UserError` where there is none."""
    row = board.row(label)
    if row is not None:
        return row
    labels = {row.label for row in (*board.rows, *board.others)}
    about = (f"{LEFT_OUT}{label}, seed ", f"/{label}.seed-")
    if remarks := [remark for remark in board.left_out if any(part in remark for part in about)]:
        raise UserError(f"there is no row {label} of task {board.name}; {remarks[0]}")
    if not labels:
        raise nothing_stored(board, label)
    method = label.rpartition(":")[2]
    if names_file(label) and (mine := [row_label for row_label in labels if method_of(row_label) == method]):
        raise UserError(f"{label} is a method; its rows on {board.name} are called {', '.join(sorted(mine))}")
    raise unknown("row", label, labels, where=f"of task {board.name}", see=f"ifsl-bench table {board.name}")


def rival_of(board: TaskResults, label: str, other: str) -> SeedAggregate:
    """The row of that label to compare the row ``other`` with; in sessions also ``lazy``, the lazy model of ``other``,
    and ``lazy (ROW)``, that of any row.

    Raises:
        UserError: there is no such row.
    """
    lazy = board.task.sessions and re.fullmatch(rf"{LAZY}(?: \((.+)\))?", label)
    return replace(lazy_of(row_of(board, lazy[1] or other)), label=label) if lazy else row_of(board, label)


def pair_of(
    a: str, b: str, task: str | None, folders: Paths
) -> tuple[SeedAggregate, SeedAggregate, tuple[SeedAggregate, ...]]:
    """Two rows to compare, by label and task or by file, and all rows that they are comparable with.

    Raises:
        UserError: there is no such row or file.
    """
    if task:
        board = board_of(task, folders)
        first, second = rival_of(board, a, b), rival_of(board, b, a)
        ranked = {id(row.results) for row in board.compared}  # a lazy model has the results of its row
        return first, second, board.compared if {id(first.results), id(second.results)} <= ranked else ()
    for name in (a, b):
        if not os.path.exists(name):
            raise UserError(f"there is no result file {name}; to compare labels of a task, add --task TASK")
    results = [read(Path(name)) for name in (a, b)]
    names = [f"{result.label}.seed-{result.seed}" for result in results]
    names = [a, b] if names[0] == names[1] else names
    first, second = (SeedAggregate(name, FILE, (result,)) for name, result in zip(names, results, strict=True))
    return first, second, ()
