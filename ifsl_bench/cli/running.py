"""``ifsl-bench run``."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.options import (
    Machine,
    Whole,
    data_option,
    device_option,
    examples,
    gathered,
    home_option,
    job_options,
    log_dir_option,
    log_option,
    machine_options,
    quiet_option,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.output import print_missing, prints_aside, say, show_tables
from ifsl_bench.protocols.tasks.task_limits import MOST_WORKERS
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.experiments.cluster import ClusterSpec
    from ifsl_bench.experiments.job import Job
    from ifsl_bench.experiments.request import Request
    from ifsl_bench.experiments.runner import Backend, RunSummary
    from ifsl_bench.experiments.workspace import Workspace
    from ifsl_bench.protocols.tasks.task import Task

FOLDERS = ("--home", "--results", "--data", "--cluster", "--log-dir")  # options that name what is on this machine


@dataclass(frozen=True)
class How:
    """The options of ``run`` that say how, not what.

    Attributes:
        data: data set -> the path that it is made from.
        own_weights: whether backbones are trained here even if their weights come with the package.
        jobs, devices, cluster: the workers.
    """

    data: Mapping[str, str]
    checkpoint: str | None
    dry_run: bool
    rerun: bool
    retrain: bool
    own_weights: bool
    full: bool
    jobs: int | None
    devices: str | None
    cluster: str | None
    style: str

    def read_cluster(self) -> ClusterSpec | None:
        """Returns the cluster that is asked for, if any; raises :class:`UserError` where it is wrong."""
        if not self.cluster or self.checkpoint:
            return None
        if self.jobs or self.devices:
            raise UserError("--cluster brings its own workers: leave out --jobs and --devices")
        from ifsl_bench.experiments.cluster import read_cluster

        return read_cluster(self.cluster)

    def check_checkpoint(self, campaign: str | None, request: Request) -> None:
        """Raises :class:`UserError` for what does not go with ``--checkpoint``."""
        if campaign or self.dry_run or self.rerun or self.retrain or self.own_weights or self.data:
            raise UserError("--checkpoint evaluates a model and stores nothing: leave out a campaign, --dry-run, "
                            "--rerun, --retrain, --pretrain and --data")  # fmt: skip
        plain = dataclasses.replace(request, tasks=(), episodes=None, train={}, change=type(request)().change)
        if len(request.tasks) != 1 or plain != type(request)() or request.train.keys() - {"select"}:
            raise UserError("--checkpoint takes one --task, and method, options and seed from the model itself "
                            "(of --train it takes select=best)")  # fmt: skip
        if self.jobs or self.devices or self.cluster:
            raise UserError("--checkpoint evaluates one model, in this process: leave out --jobs, --devices, --cluster")


@click.command(
    epilog=examples(
        "run --method imprint --task glyphs-5shot",
        "run --method lr,lr+a --task 'glyphs-*shot' --seeds 3 --dry-run",
        "run --method my.py:Mine --task glyphs-5shot --set width=2",
    )
)
@job_options
@data_option
@click.option("--checkpoint", metavar="DIR", help="Evaluate this meta-trained model; nothing is trained or stored.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, what is cached, and a rough time.")
@click.option("--rerun", is_flag=True, help="Evaluate again even if the result is stored.")
@click.option("--retrain", is_flag=True, help="Train again too; the old model is kept under another name.")
@click.option("--pretrain", "own_weights", is_flag=True,
              help="Train the backbone here even if its weights come with the package.")  # fmt: skip
@click.option(
    "--full", is_flag=True, help="Tables with all columns, as of table --full; with --dry-run, a line for each task."
)
@click.option("--jobs", type=Whole(1, MOST_WORKERS),
              help="Worker processes that share the stages [1, or one for each of --devices].")  # fmt: skip
@click.option("--devices", metavar="LIST", help="Accelerators for the workers: 0-7 or 0,2.")
@click.option("--cluster", metavar="WHERE", help="Hand the stages to Dask: tcp://HOST:PORT, or a TOML file.")
@style_option
@machine_options(log_option, log_dir_option, device_option, home_option, results_option, quiet_option, verbose_option)
@partial(gathered, name="how", kind=How)
def run(campaign: str | None, request: Request, machine: Machine, how: How) -> int:
    """Train and evaluate methods on tasks, and show the rows.

    New rows are shown among the stored ones. CAMPAIGN is a TOML file, or the name of one that comes with the package;
    with it, --method and --task choose among its jobs. A run that was stopped continues where it left off.
    """
    if campaign is None and (not request.tasks or (not request.methods and not how.checkpoint)):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    cluster = how.read_cluster()
    from ifsl_bench.experiments.expansion import asked, jobs_of, with_tasks

    # A wrong name is told before torch is imported.
    narrowed, tasks = with_tasks(asked(campaign, request), machine.folders)
    work = machine.workspace(narrowed.results, "cpu" if how.cluster else "")
    if how.checkpoint:
        how.check_checkpoint(campaign, request)
        return _evaluate(Path(how.checkpoint), request, work, how.style)
    jobs, lacking = jobs_of(narrowed, work.home, work.reporter.warn, work.reporter.say)
    files = {**narrowed.data, **{name: Path(path) for name, path in how.data.items()}}
    from ifsl_bench.experiments.runner import check_data

    check_data(files, tasks, work.home)
    if how.dry_run and how.own_weights:
        raise UserError("--dry-run changes nothing, and --pretrain replaces weights: leave one of them out")
    backend: Backend | None = None
    if cluster or how.jobs or how.devices:
        from ifsl_bench.experiments.backends import backend_for

        backend = backend_for(jobs, work, machine.device, how.jobs, how.devices, cluster)
    if how.dry_run:
        _plan(jobs, lacking, files, work, how)
        return 0
    first = not any(work.home.results.glob("*/*.json"))
    ended = _run(jobs, files, work, how, backend)
    _show_rows(tasks, ended, work, how)
    if first and ended.stored and how.style == "text":
        task = ended.stored[0].task.name
        say(f"\nNext: 'ifsl-bench compare A B --task {task}' for a difference, --seeds 3 for a rank, "
            "--method FILE.py:CLASS for a method of your own")  # fmt: skip
    return tell(ended, len(jobs), lacking)


def _evaluate(checkpoint: Path, request: Request, work: Workspace, style: str) -> int:
    from ifsl_bench.analysis.aggregate import FILE, SeedAggregate
    from ifsl_bench.experiments.api import evaluate_checkpoint
    from ifsl_bench.reporting.detail_tables import row_table

    result = evaluate_checkpoint(
        checkpoint, request.tasks[0], select=request.train.get("select"), episodes=request.episodes,
        change=request.change.parts(), work=work, command=_typed(sys.argv[1:]),
    )  # fmt: skip
    show_tables([row_table(SeedAggregate(result.label, FILE, (result,)))], style)
    return 0


def _plan(
    jobs: Sequence[Job], lacking: Mapping[str, int], files: Mapping[str, Path], work: Workspace, how: How
) -> None:
    from ifsl_bench.cli.campaigns import show_plan
    from ifsl_bench.experiments.plan import plan_of

    plans = plan_of(jobs, work, how.rerun, how.retrain, lacking=bool(files), data=files)
    print_missing(lacking)
    show_plan(plans, work, how.style, how.full)


def _run(
    jobs: Sequence[Job], files: Mapping[str, Path], work: Workspace, how: How, backend: Backend | None
) -> RunSummary:
    from ifsl_bench.experiments.runner import prepare_from, run_jobs

    prepare_from(files, work)
    if how.own_weights:
        from ifsl_bench.experiments.pretraining import train_backbones

        train_backbones(jobs, work)
    with prints_aside(how.style):
        return run_jobs(jobs, work, backend, rerun=how.rerun, retrain=how.retrain, command=_typed(sys.argv[1:]))


def _show_rows(tasks: Sequence[Task], ended: RunSummary, work: Workspace, how: How) -> None:
    """Prints the rows of the tasks: for readers the new ones among those of usual settings, and where they stand."""
    from ifsl_bench.analysis.task_results import load_board
    from ifsl_bench.reporting.leaderboard import task_table
    from ifsl_bench.reporting.render import PROGRAMS

    boards = [load_board(task, work.home.results) for task in tasks]
    if how.style in PROGRAMS:
        show_tables([task_table(board, how.full) for board in boards if not board.empty], how.style)
        return
    from ifsl_bench.analysis.aggregate import EVERY, PAPER
    from ifsl_bench.reporting.comparison_tables import published_comparison_tables
    from ifsl_bench.reporting.notes import standings

    labels_of = {board.name: list(dict.fromkeys(job.label for job in ended.stored if job.task.name == board.name))
            for board in boards}  # fmt: skip
    boards = [board.default_view(labels_of[board.name]) for board in boards if labels_of[board.name]]
    if how.style == "latex" and boards:
        from ifsl_bench.reporting.latex import paper_tables

        click.echo(paper_tables(boards, how.full))
    for board in boards:
        if how.style != "latex":
            click.echo()
            show_tables([task_table(board, how.full)], how.style)
        by_setting: dict[str, list[str]] = {}
        for label in labels_of[board.name]:
            row = board.row(label)
            by_setting.setdefault(row.setting if row and row.setting != EVERY else PAPER, []).append(label)
        for setting, of_setting in by_setting.items():
            for lines in standings(board.in_setting(setting), of_setting):
                say("\n" + "\n".join(lines), how.style)
    if beside := published_comparison_tables(boards):
        click.echo()
        show_tables(beside, how.style)


def tell(ended: RunSummary, jobs: int, lacking: Mapping[str, int]) -> int:
    """Says which jobs failed or could not be run here, and why; returns the exit status."""
    print_missing(lacking)
    if ended.failed:
        click.echo(f"ifsl-bench: {len(ended.failed)} of {jobs} jobs failed:", err=True)
    for line in ended.causes:
        click.echo(f"  {line}", err=True)
    return 1 if ended.failed or lacking else 0


def _typed(arguments: list[str]) -> str:
    """The command as results record it: without the folders of this machine."""
    words: list[str] = []
    skip = False
    for word in arguments:
        folder = word.partition("=")[0] in FOLDERS
        if not skip and not folder:
            whole = Path(word).name if Path(word).is_absolute() and "," not in word else word.rstrip("/")
            words.append(re.sub(r"(^|[=,]\s*)[~/][^,]*/(?=[^,/])", r"\1", whole))
        skip = word in FOLDERS
    return shlex.join(["ifsl-bench", *words])
