"""The command line: parses, calls one function of the library for each command, and prints.

Nothing heavy is imported before a command needs it; ``--help`` and ``tasks`` come without torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ifsl_bench._version import __version__
from ifsl_bench.cli_data import data
from ifsl_bench.cli_options import (
    Group,
    device_option,
    folders_of,
    home_option,
    names,
    pairs,
    quiet_option,
    reporter_for,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.errors import UserError


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ifsl-bench")
def cli() -> None:
    """A benchmark suite for incremental few-shot learning."""


@cli.command()
@click.option("--method", "methods", multiple=True, callback=names, help="Methods, comma-separated or repeated.")
@click.option("--task", "tasks", multiple=True, callback=names, help="Tasks, or TOML files of your own.")
@click.option("--set", "options", multiple=True, callback=pairs, metavar="NAME=VALUE", help="An option of the method.")
@click.option("--train", multiple=True, callback=pairs, metavar="NAME=VALUE",
              help="episodes_per_step, select=best|last, views, steps.")  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of training; the first of --seeds."
)
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="How many training seeds.")
@click.option("--episodes", type=int, help="Only the first so many test episodes.")
@click.option("--checkpoint", metavar="DIR", help="Evaluate this meta-trained model; nothing is trained or stored.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, what is cached, and a rough time.")
@click.option("--rerun", is_flag=True, help="Evaluate again even if the result is stored.")
@click.option("--full", is_flag=True, help="Tables with the joint and alone accuracies too.")
@device_option
@home_option
@results_option
@style_option
@quiet_option
@verbose_option
def run(
    methods: list[str],
    tasks: list[str],
    options: dict[str, str],
    train: dict[str, str],
    seed: int,
    seeds: int,
    episodes: int | None,
    checkpoint: str | None,
    dry_run: bool,
    rerun: bool,
    full: bool,
    device: str,
    home: str | None,
    results_dir: str | None,
    style: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train and evaluate methods on tasks, and show them among the stored rows."""
    if not tasks or (not methods and not checkpoint):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    from ifsl_bench.task import find

    found = [task for name in tasks for task in find(name)]  # a wrong name is told before torch is imported
    from ifsl_bench import api, job, report
    from ifsl_bench.training import Training

    reporter = reporter_for(quiet, verbose)
    work = api.workspace(home, results_dir, device, reporter)
    command = shlex.join(["ifsl-bench", *sys.argv[1:]])
    if checkpoint:
        if len(tasks) != 1 or methods or options or train or seeds != 1:
            raise UserError("--checkpoint takes one --task, and method, options and seed from the model itself")
        result = api.evaluate_checkpoint(Path(checkpoint), tasks[0], episodes=episodes, work=work, command=command)
        click.echo(f"{result.label} on {result.task}, seed {result.seed}\n\n{report.result_table(result, style)}")
        return
    training = Training.parse(train)
    jobs = job.make_jobs(methods, tasks, options, training, range(seed, seed + seeds), episodes)
    if dry_run:
        from ifsl_bench.plan import plan

        click.echo(report.render(plan(jobs, work, rerun), style))
        return
    made = api.run_jobs(jobs, work, rerun=rerun, command=command)
    for task in dict.fromkeys(found):
        board = report.load_board(task, work.home.results)
        click.echo("\n" + report.task_table(board, style, full))
        if style != "csv":
            for label in dict.fromkeys(r.label for r in made if r.task == task.name):
                click.echo("\n" + "\n".join(report.standing(board, label)))


@cli.command()
@style_option
def methods(style: str) -> None:
    """List the methods, with their options and where they come from."""
    from ifsl_bench import registry, report
    from ifsl_bench.method import options_of

    rows = []
    for name in registry.names(registry.METHODS):
        plugin = registry.load(registry.METHODS, name)
        row = {"method": name, "package": plugin.package, "head": "", "options": "", "what": plugin.problem}
        if not plugin.problem:
            try:
                kind = registry.method(name)
            except UserError as error:
                row["what"] = f"broken: {error}"
            else:
                shown = [f"{o.name}={_plain(o.default)} ({o.spelled})" for o in options_of(kind).values()]
                row |= {"head": kind.head, "options": ", ".join(shown)}
                row["what"] = (kind.__doc__ or "").strip().split("\n")[0]
        rows.append(row)
    click.echo(report.render(rows, style))


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


@cli.command()
@home_option
@style_option
def tasks(home: str | None, style: str) -> None:
    """List the tasks, and whether their data are there."""
    from ifsl_bench import registry, report
    from ifsl_bench.task import packaged

    folders = folders_of(home)
    known = registry.names(registry.DATASETS)
    rows = []
    for task in packaged().values():
        prepared = (folders.data / task.dataset.name / "manifest.json").exists()
        embedded = task.dataset.name in known
        rows.append(
            {
                "task": task.name,
                "what": task.title,
                "protocol": task.protocol,
                "shots": str(task.shots),
                "episodes": f"{task.evaluation.episodes:,}",
                "backbone": task.pretraining.backbone,
                "data": f"{task.dataset.name}: "
                + ("prepared" if prepared else "made when first used" if embedded else "to be obtained"),
            }
        )
    click.echo(report.render(rows, style))


@cli.command()
@click.argument("names", nargs=-1, metavar="TASK...")
@click.option("--full", is_flag=True, help="The joint and alone accuracies too.")
@home_option
@results_option
@style_option
def table(names: tuple[str, ...], full: bool, home: str | None, results_dir: str | None, style: str) -> None:
    """Print the stored and published rows of tasks (of every task that has any, where none is named)."""
    from ifsl_bench import report
    from ifsl_bench.task import find, packaged

    folders = folders_of(home, results_dir)
    chosen = [task for name in names for task in find(name)] or list(packaged().values())
    boards = [report.load_board(task, folders.results) for task in chosen]
    if not names:
        boards = [board for board in boards if board.rows or board.others or board.papers]
    texts = [report.task_table(board, style, full) for board in boards]
    if style == "csv":  # one header for all tasks
        texts = [texts[0], *(text.split("\n", 1)[1] for text in texts[1:])] if texts else []
        click.echo("\n".join(texts))
    else:
        click.echo("\n\n".join(texts))


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option("--task", "task", help="The task, where A and B are labels of stored rows.")
@home_option
@results_option
@style_option
def compare(a: str, b: str, task: str | None, home: str | None, results_dir: str | None, style: str) -> None:
    """Paired difference A - B: two labels of a task, or two result files."""
    from ifsl_bench import report
    from ifsl_bench.compare import Row
    from ifsl_bench.compare import compare as compare_rows
    from ifsl_bench.errors import unknown
    from ifsl_bench.result import read

    rows = []
    if task:
        from ifsl_bench.task import find

        (found, *more) = find(task)
        if more:
            raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
        board = report.load_board(found, folders_of(home, results_dir).results)
        for name in (a, b):
            row = board.row(name)
            if row is None:
                labels = {row.label for row in (*board.rows, *board.others)}
                raise unknown("row", name, labels, where=f"of task {found.name}")
            rows.append(row)
    else:
        for name in (a, b):
            path = Path(name)
            if not path.exists():
                raise UserError(f"there is no result file {name}; to compare labels of a task, add --task TASK")
            result = read(path)
            rows.append(Row(f"{result.label}.seed-{result.seed}", "file", (result,)))
    click.echo(report.comparison_table(compare_rows(*rows), style))


@cli.command()
@click.argument("file", type=click.Path())
@style_option
def show(file: str, style: str) -> None:
    """Print one result file in full."""
    from ifsl_bench import report
    from ifsl_bench.result import read

    result = read(Path(file))
    click.echo(report.result_table(result, style))
    if style in ("text", "markdown"):
        click.echo("\n" + report.result_facts(result))


def _guarded(call: Callable[[], Any]) -> int:
    """Runs the program; every mistake of the user's is one line and status 2."""
    try:
        call()
    except UserError as error:
        click.echo(f"ifsl-bench: {error}", err=True)
        return 2
    except click.exceptions.Abort:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except click.ClickException as error:
        click.echo(f"ifsl-bench: {error.format_message()} (ifsl-bench --help lists what there is)", err=True)
        return 2
    except KeyboardInterrupt:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except MemoryError:
        click.echo("ifsl-bench: not enough memory", err=True)
        return 2
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"ifsl-bench: the system refused{where}: {error.strerror or error}", err=True)
        return 2
    return 0


cli.add_command(data)


def main() -> None:
    """The entry point of ``ifsl-bench``."""
    # Threads that spin while they wait slow everything down where another program wants the cores.
    # Read when torch is imported, so it must be set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_guarded(lambda: cli(standalone_mode=False)))
