"""``ifsl-bench table``, ``compare``, ``show``, ``check``, ``reproduce``: what is done with stored results."""

from __future__ import annotations

from pathlib import Path

import click

from ifsl_bench.cli.options import (
    device_option,
    folders_of,
    home_option,
    names,
    quiet_option,
    reporter_for,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.common.torchrun import check_alone


@click.command()
@click.argument("tasks", nargs=-1, metavar="TASK...")
@click.option("--rank", is_flag=True, help="The ranks that each measured row can have; variants of a task apart.")
@click.option("--setting", metavar="NAME", help="Only methods as published (paper, what --rank ranks), or tuned ones "
              "(tuned-12 for the best of 12 trials).")  # fmt: skip
@click.option("--full", is_flag=True, help="The joint and alone accuracies too.")
@click.option("--beside", is_flag=True, help="Measured rows beside the printed ones, and whether within the band.")
@click.option(
    "--method",
    "labels",
    multiple=True,
    callback=names,
    metavar="LABEL",
    help="Only rows with these labels, comma-separated or repeated.",
)
@home_option
@results_option
@style_option
def table(
    tasks: tuple[str, ...],
    rank: bool,
    setting: str | None,
    full: bool,
    beside: bool,
    labels: tuple[str, ...],
    home: str | None,
    results_dir: str | None,
    style: str,
) -> None:
    """Print the stored and published rows of tasks (of every task that has any, where none is named)."""
    from ifsl_bench.board.boards import load_board
    from ifsl_bench.protocol.task_files import find, own, packaged

    folders = folders_of(home, results_dir)
    chosen = [task for name in tasks for task in find(name, home=folders)]
    boards = [load_board(task, folders.results) for task in chosen or [*packaged().values(), *own(folders).values()]]
    if labels:
        known = {label for board in boards for label in board.labels}
        for label in labels:
            if label.lower() not in {other.lower() for other in known}:
                raise unknown("row", label, known, where=f"of {', '.join(tasks) or 'any task'}")
        boards = [board.only(labels) for board in boards]
    if not tasks:
        boards = [board for board in boards if not board.empty]
    if beside:
        from ifsl_bench.board.beside import beside_tables
        from ifsl_bench.board.render import render

        if rank or full:
            raise UserError("--beside is a table of its own: leave out --rank and --full")
        if not (found := beside_tables(boards)):
            raise UserError("nothing was measured here that a paper prints too; docs/paper.md has the command")
        click.echo(render(found, style))
        return
    if rank or setting:
        from ifsl_bench.board.measured import EVERY, PAPER

        settings = {PAPER, *(row.setting for board in boards for row in board.compared)} - {EVERY}
        if setting and setting not in settings:
            raise unknown("setting", setting, settings)
        boards = [board.in_setting(setting or PAPER) for board in boards]
    if rank:
        from ifsl_bench.board.leaderboard import leaderboard

        click.echo(leaderboard(boards, folders.results, style, full, labels))
    else:
        from ifsl_bench.board.leaderboard import task_table
        from ifsl_bench.board.render import render

        click.echo(render([task_table(board, full) for board in boards], style))


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--task", "task", help="The task, where A and B are labels of stored rows.")
@home_option
@results_option
@style_option
def compare(a: str, b: str, task: str | None, home: str | None, results_dir: str | None, style: str) -> None:
    """Paired difference A - B: two labels of a task, or two result files."""
    from ifsl_bench.board.boards import load_board
    from ifsl_bench.board.comparison import compare as compare_rows
    from ifsl_bench.board.measured import Row
    from ifsl_bench.board.render import render
    from ifsl_bench.board.result_file import read
    from ifsl_bench.board.show import comparison_table

    rows: list[Row] = []
    among: tuple[Row, ...] = ()
    if task:
        from ifsl_bench.protocol.task_files import find

        folders = folders_of(home, results_dir)
        (found, *more) = find(task, home=folders)
        if more:
            raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
        board = load_board(found, folders.results)
        for name in (a, b):
            row = board.row(name)
            if row is None:
                labels = {row.label for row in (*board.rows, *board.others)}
                raise unknown("row", name, labels, where=f"of task {found.name}")
            rows.append(row)
        among = board.compared if all(any(row is other for other in board.compared) for row in rows) else ()
    else:
        for name in (a, b):
            path = Path(name)
            if not path.exists():
                raise UserError(f"there is no result file {name}; to compare labels of a task, add --task TASK")
            result = read(path)
            rows.append(Row(f"{result.label}.seed-{result.seed}", "file", (result,)))
    click.echo(render([comparison_table(compare_rows(rows[0], rows[1], among))], style))


@click.command()
@click.argument("file", type=click.Path())
@style_option
def show(file: str, style: str) -> None:
    """Print one result file in full."""
    from ifsl_bench.board.render import prose, render
    from ifsl_bench.board.result_file import read
    from ifsl_bench.board.show import result_facts, result_table

    result = read(Path(file))
    click.echo(render([result_table(result)], style))
    if style in ("text", "markdown"):
        click.echo("\n" + "\n".join(prose(line, style) for line in result_facts(result).split("\n")))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="RESULT.json...")
@click.option("--task", "task_files", multiple=True, metavar="FILE.toml", help="Tasks of your own, for their results.")
@home_option
def check(files: tuple[str, ...], task_files: tuple[str, ...], home: str | None) -> None:
    """Verify result files before they are contributed: a line each, status 2 if one of them fails."""
    from ifsl_bench.protocol.task_files import find
    from ifsl_bench.running.check import check_file

    folders = folders_of(home)
    own = {task.name: task for name in task_files for task in find(name, home=folders)}
    bad = 0
    for name in files:
        found = check_file(Path(name), own, folders)
        if not found.failures:
            click.echo(f"{name}: {found.line}")
        for failure in found.failures:
            click.echo(f"{name}: {failure}", err=True)
        bad += bool(found.failures)
    if bad:
        raise UserError(f"{bad} of {len(files)} result files fail" if len(files) > 1 else "the result file fails")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="RESULT.json...")
@click.option("--method", metavar="FILE.py:CLASS", help="Where the method is, if it is not installed.")
@click.option("--task", metavar="FILE.toml", help="Where the task is, if it is your own.")
@click.option(
    "--within", default=0.0, metavar="POINTS", help="Let the accuracy differ by so much [0: all counts equal]."
)
@device_option
@click.option("--home", metavar="DIR", help="Use what is stored there [an empty home, with your data sets].")
@quiet_option
@verbose_option
def reproduce(
    files: tuple[str, ...],
    method: str | None,
    task: str | None,
    within: float,
    device: str,
    home: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Run the jobs of stored results again: a line each, status 1 if one comes out otherwise.

    Without --home all is made anew, the pretraining too unless its weights come with the package; data sets that you
    have prepared, and weights of backbones from elsewhere, are used as they are.
    """
    import tempfile

    check_alone("ifsl-bench reproduce")
    if not 0 <= within <= 100:  # False for NaN too
        raise UserError(f"--within takes percentage points, 0 to 100, not {within:g}")
    from ifsl_bench.board.result_file import read
    from ifsl_bench.campaigns import api
    from ifsl_bench.running.reproduce import job_of, lend_data
    from ifsl_bench.running.reproduce import reproduce as run_again

    found = []
    stored = {name: read(Path(name)) for name in files}
    with tempfile.TemporaryDirectory(prefix="ifsl-bench-") as scratch:
        work = api.workspace(home or scratch, Path(scratch) / "results", device, reporter_for(quiet, verbose))
        for name, result in stored.items():
            if home is None:
                usual = folders_of(None)
                lend_data(job_of(result, usual, task, method).task, usual, work.home)
            found.append(run_again(Path(name), work, task, method))
            click.echo(f"{name}: {found[-1].line}")
    if not all(one.identical or one.close(within) for one in found):
        click.get_current_context().exit(1)
