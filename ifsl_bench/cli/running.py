"""``ifsl-bench run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.campaigns import show_plan, tell_lacking
from ifsl_bench.cli.options import (
    Whole,
    data_option,
    device_option,
    examples,
    folders_of,
    home_option,
    job_options,
    log_dir_option,
    log_option,
    quiet_option,
    reporter_for,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.output import prints_aside, say, show_tables
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.torchrun import check_alone
from ifsl_bench.protocol.limits import MOST_WORKERS

FOLDERS = ("--home", "--results", "--data", "--cluster", "--log-dir")  # options that name what is on this machine

if TYPE_CHECKING:
    from ifsl_bench.campaigns.campaign_file import Said
    from ifsl_bench.campaigns.executors import Executor
    from ifsl_bench.campaigns.run import Ended


@click.command(
    epilog=examples(
        "ifsl-bench run --method imprint --task glyphs-5shot",
        "ifsl-bench run --method lr,lr+a --task 'glyphs-*shot' --seeds 3 --dry-run",
        "ifsl-bench run --method my.py:Mine --task glyphs-5shot --set width=2",
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
    "--full", is_flag=True, help="Tables with the joint and alone accuracies too; with --dry-run, a line for each task."
)
@click.option("--jobs", type=Whole(1, MOST_WORKERS),
              help="Worker processes that share the stages [1, or one for each of --devices].")  # fmt: skip
@click.option("--devices", metavar="LIST", help="Accelerators for the workers: 0-7 or 0,2.")
@click.option("--cluster", metavar="WHERE", help="Hand the stages to Dask: tcp://HOST:PORT, or a TOML file.")
@log_option
@log_dir_option
@device_option
@home_option
@results_option
@style_option
@quiet_option
@verbose_option
def run(
    campaign: str | None,
    said: Said,
    data: dict[str, str],
    checkpoint: str | None,
    dry_run: bool,
    rerun: bool,
    retrain: bool,
    own_weights: bool,
    full: bool,
    jobs: int | None,
    devices: str | None,
    cluster: str | None,
    log: str | None,
    log_dir: str | None,
    device: str,
    home: str | None,
    results_dir: str | None,
    style: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Train and evaluate methods on tasks, and show the rows.

    New rows are shown among the stored ones. CAMPAIGN is a TOML file, or the name of one that comes with the package;
    with it, --method and --task choose among its jobs. A run that was stopped continues where it left off.
    """
    check_alone("ifsl-bench run")
    if campaign is None and (not said.tasks or (not said.methods and not checkpoint)):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    if cluster and not checkpoint:
        if jobs or devices:
            raise UserError("--cluster brings its own workers: leave out --jobs and --devices")
        from ifsl_bench.campaigns.cluster_file import read_cluster

        read_cluster(cluster)
    from ifsl_bench.campaigns.campaign_file import asked
    from ifsl_bench.campaigns.jobs import jobs_of, with_tasks

    # A wrong name is told before torch is imported.
    wanted, tasks = with_tasks(asked(campaign, said), folders_of(home))
    from ifsl_bench.backbone.device import keep_freed_memory
    from ifsl_bench.board.beside import beside_tables
    from ifsl_bench.board.boards import load_board
    from ifsl_bench.board.latex import paper_tables
    from ifsl_bench.board.leaderboard import task_table
    from ifsl_bench.board.measured import EVERY, PAPER
    from ifsl_bench.board.notes import standings
    from ifsl_bench.board.render import PROGRAMS
    from ifsl_bench.board.show import result_table
    from ifsl_bench.campaigns import api
    from ifsl_bench.campaigns.data import check_data, prepare_from
    from ifsl_bench.campaigns.plan import plan_of
    from ifsl_bench.campaigns.run import run_campaign, workers_for
    from ifsl_bench.campaigns.watching import watching
    from ifsl_bench.common.curves import curves_folder
    from ifsl_bench.running.preparation import train_backbones

    keep_freed_memory()
    reporter = reporter_for(quiet, verbose)
    work = api.workspace(home, results_dir or wanted.results, "cpu" if cluster else device, reporter)
    work = replace(work, curves=curves_folder(log, log_dir, work.home))
    command = _typed(sys.argv[1:])
    if checkpoint:
        if campaign or dry_run or rerun or retrain or own_weights or data:
            raise UserError("--checkpoint evaluates a model and stores nothing: leave out a campaign, --dry-run, "
                            "--rerun, --retrain, --pretrain and --data")  # fmt: skip
        if len(said.tasks) != 1 or said.of_jobs() or said.train.keys() - {"select"}:
            raise UserError("--checkpoint takes one --task, and method, options and seed from the model itself "
                            "(of --train it takes select=best)")  # fmt: skip
        if jobs or devices or cluster:
            raise UserError("--checkpoint evaluates one model, in this process: leave out --jobs, --devices, --cluster")
        result = api.evaluate_checkpoint(
            Path(checkpoint), said.tasks[0], select=said.train.get("select"), episodes=said.episodes,
            change=said.change.said(), work=work, command=command,
        )  # fmt: skip
        title = f"{result.label} on {result.task}, seed {result.seed}"
        show_tables([result_table(result, title)], style)
        return 0
    asked_for = jobs_of(wanted, work.home, reporter.warn, reporter.say)
    made = asked_for.jobs
    files = {**wanted.data, **{name: Path(path) for name, path in data.items()}}
    check_data(files, tasks, work.home)
    executor: Executor | None
    if cluster:
        from ifsl_bench.campaigns.dask_workers import check_cluster, cluster_workers

        check_cluster(cluster, made, device)
        executor = None  # before there are data it is not connected to
    else:
        executor = workers_for(made, work, device, jobs, devices)  # which start with their first stage
    if dry_run:
        if own_weights:
            raise UserError("--dry-run changes nothing, and --pretrain replaces weights: leave one of them out")
        count = executor.count if executor else 1
        found = plan_of(made, work, rerun, retrain, lacking=bool(files), workers=count, data=files)
        if cluster:
            reporter.say(f"devices and times are those of one process on this machine's processor; the workers of "
                         f"{cluster} are not asked what they have")  # fmt: skip
        tell_lacking(asked_for.lacking)
        show_plan(found, style, full)
        return 0
    prepare_from(files, work)
    if own_weights:
        train_backbones(made, work)
    if cluster:
        executor, work = cluster_workers(cluster, made, work, device)
    with prints_aside(style), watching(reporter, executor.count) if executor else nullcontext() as watch:
        ended = run_campaign(
            made, work, rerun=rerun, retrain=retrain, command=command, executor=executor, watch=watch
        )  # fmt: skip
    boards = [load_board(task, work.home.results) for task in tasks]
    if style in PROGRAMS:
        show_tables([task_table(board, full) for board in boards if not board.empty], style)
        return tell(ended, len(made), asked_for.lacking)
    made_of = {
        board.name: dict.fromkeys(one.label for one in ended.made if one.task.name == board.name) for board in boards
    }
    boards = [board.usual(labels) for board in boards if (labels := made_of[board.name])]
    if style == "latex" and boards:
        click.echo(paper_tables(boards, full))
    for board in boards:
        if style != "latex":
            click.echo()
            show_tables([task_table(board, full)], style)
        by_setting: dict[str, list[str]] = {}
        for label in made_of[board.name]:
            row = board.row(label)
            by_setting.setdefault(row.setting if row and row.setting != EVERY else PAPER, []).append(label)
        for setting, of_setting in by_setting.items():
            for lines in standings(board.in_setting(setting), of_setting):
                say("\n" + "\n".join(lines), style)
    if beside := beside_tables(boards):
        click.echo()
        show_tables(beside, style)
    return tell(ended, len(made), asked_for.lacking)


def tell(ended: Ended, jobs: int, lacking: Mapping[str, int]) -> int:
    """Says which jobs failed or could not be run here, and why; returns the exit status."""
    tell_lacking(lacking)
    if ended.failed:
        click.echo(f"ifsl-bench: {len(ended.failed)} of {jobs} jobs failed:", err=True)
    for line in ended.said:
        click.echo(f"  {line}", err=True)
    return 1 if ended.failed or lacking else 0


def _typed(arguments: list[str]) -> str:
    """The command as results record it: without the folders of this machine."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        folder = word.partition("=")[0] in FOLDERS
        if not skip and not folder:
            kept.append(word)
        skip = word in FOLDERS
    return shlex.join(["ifsl-bench", *kept])
