"""``ifsl-bench run``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.options import (
    IntegerRange,
    add_config_options,
    data_option,
    device_option,
    find_configs,
    format_examples,
    home_option,
    log_dir_option,
    log_option,
    make_reporter,
    quiet_option,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.output import (
    StandardStreams,
    print_lines,
    print_missing,
    print_tables_in_format,
    redirect_prints_to_stderr,
)
from ifsl_bench.protocols.tasks.task_limits import MOST_WORKERS
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.experiments.cluster import ClusterSpec
    from ifsl_bench.experiments.job import Job
    from ifsl_bench.experiments.run_config import RunConfig
    from ifsl_bench.experiments.runner import Backend, RunSummary
    from ifsl_bench.experiments.workspace import Workspace
    from ifsl_bench.protocols.tasks.task import Task

MACHINE_SPECIFIC_OPTIONS = (
    "--home",
    "--results",
    "--data",
    "--cluster",
    "--log-dir",
)  # options that name what is on this machine


def parse_cluster(config: RunConfig) -> ClusterSpec | None:
    """Return the cluster that is asked for, if any; raises :class:`UserError` where it is wrong."""
    if not config.cluster:
        return None
    if config.jobs or config.devices:
        raise UserError("--cluster brings its own workers: leave out --jobs and --devices")
    from ifsl_bench.experiments.cluster import parse_cluster

    return parse_cluster(config.cluster)


def check_checkpoint_options(campaign: str | None, config: RunConfig, dry_run: bool) -> None:
    """Raise :class:`UserError` for what does not go with ``--checkpoint``.

    Args:
        campaign: that is named.
        config: of the command line.
        dry_run: whether nothing shall be run.
    """
    if campaign or dry_run or config.rerun or config.retrain or config.own_weights or config.data:
        raise UserError(
            "--checkpoint evaluates a model and stores nothing: leave out a campaign, --dry-run, "
            "--rerun, --retrain, --pretrain and --data"
        )
    named = config.methods or config.options or config.seed is not None or config.seeds is not None
    if (
        len(config.tasks) != 1
        or named
        or config.calibrate
        or config.trials is not None
        or config.train.keys() - {"select"}
    ):
        raise UserError(
            "--checkpoint takes one --task, and method, options and seed from the model itself "
            "(of --train it takes select=best)"
        )
    if config.jobs or config.devices or config.cluster:
        raise UserError("--checkpoint evaluates one model, in this process: leave out --jobs, --devices, --cluster")


@click.command(
    epilog=format_examples(
        "run --method imprint --task glyphs-5shot",
        "run --method lr,lr+a --task 'glyphs-*shot' --seeds 3 --dry-run",
        "run --method my.py:Mine --task glyphs-5shot --set width=2",
    )
)
@add_config_options(
    data_option,
    click.option("--rerun", is_flag=True, help="Evaluate again even if the result is stored."),
    click.option("--retrain", is_flag=True, help="Train again too; the old model is kept under another name."),
    click.option(
        "--pretrain",
        "own_weights",
        is_flag=True,
        help="Train the backbone here even if its weights come with the package.",
    ),
    click.option(
        "--jobs",
        type=IntegerRange(1, MOST_WORKERS),
        help="Worker processes that share the jobs [1, or one for each of --devices].",
    ),
    click.option("--devices", metavar="LIST", help="Accelerators for the workers: 0-7 or 0,2."),
    click.option("--cluster", metavar="WHERE", help="Hand the jobs to Dask: tcp://HOST:PORT, or a TOML file."),
    log_option,
    log_dir_option,
    device_option,
    home_option,
    results_option,
)
@click.option("--checkpoint", metavar="DIR", help="Evaluate this meta-trained model; nothing is trained or stored.")
@click.option("--dry-run", is_flag=True, help="List what is cached and what is missing, and run nothing.")
@click.option("--full", is_flag=True, help="Tables with all columns, as of table --full.")
@style_option
@quiet_option
@verbose_option
def run(
    campaign: str | None,
    config: RunConfig,
    checkpoint: str | None,
    dry_run: bool,
    full: bool,
    style: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Train and evaluate methods on tasks, and show the rows.

    New rows are shown among the stored ones. CAMPAIGN is a TOML file, or the name of one that comes with the package;
    with it, --method and --task choose among its jobs. A run that was stopped continues where it left off.
    """
    if campaign is None and (not config.tasks or (not config.methods and not checkpoint)):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    streams = StandardStreams()
    cluster = None if checkpoint else parse_cluster(config)
    configs, tasks, methods = find_configs(campaign, config)  # a wrong name is an error before torch is imported
    work = configs[0].workspace(make_reporter(quiet, verbose))
    if checkpoint:
        check_checkpoint_options(campaign, config, dry_run)
        return _evaluate_checkpoint(Path(checkpoint), config, work, style)
    from ifsl_bench.experiments.job import expand_configs
    from ifsl_bench.experiments.runner import check_data_paths

    jobs, lacking = expand_configs(configs, work.reporter, methods)
    files = configs[0].data_path_by_dataset
    check_data_paths(files, tasks, work.home, forms=dry_run)
    if dry_run and config.own_weights:
        raise UserError("--dry-run changes nothing, and --pretrain replaces weights: leave one of them out")
    backend: Backend | None = None
    if cluster:
        from ifsl_bench.experiments.dask_pool import DaskPool  # Dask is an extra

        backend = DaskPool(cluster, work, config.device, jobs)
    elif config.jobs or config.devices:
        from ifsl_bench.experiments.backends import local_backend

        backend = local_backend(jobs, work, config.device, config.jobs, config.devices)
    if dry_run:
        from ifsl_bench.cli.campaigns import print_plan
        from ifsl_bench.experiments.plan import LACKS_DATA, REFUSED, plan_jobs

        plans = plan_jobs(jobs, work, config.rerun, config.retrain, lacking=True, data=files)
        print_missing(lacking)
        print_plan(plans, work, style)
        return 2 if all(plan.state in (LACKS_DATA, REFUSED) for plan in plans) else 0  # as the run would end
    first = not any(work.home.results.glob("*/*.json"))
    summary = _run_jobs(jobs, config, files, work, backend, style)
    streams.put_back(work.reporter)
    _print_new_rows(tasks, summary, work, style, full)
    if first and summary.jobs_stored and style == "text":
        task = summary.jobs_stored[0].task.name
        print_lines(
            f"\nNext: 'ifsl-bench compare A B --task {task}' for a difference, --seeds 3 for a rank, "
            "--method FILE.py:CLASS for a method of your own"
        )
    return print_failures(summary, len(jobs), lacking)


def _evaluate_checkpoint(checkpoint: Path, config: RunConfig, work: Workspace, style: str) -> int:
    from ifsl_bench.analysis.aggregate import FILE, SeedAggregate
    from ifsl_bench.api import evaluate_checkpoint
    from ifsl_bench.reporting.detail_tables import seed_table

    result = evaluate_checkpoint(
        checkpoint,
        config.tasks[0],
        select=config.train.get("select"),
        episodes=config.episodes,
        change=config.change.changes_by_key(),
        work=work,
        command=_command_line_to_record(sys.argv[1:]),
    )
    print_tables_in_format([seed_table(SeedAggregate(result.label, FILE, (result,)))], style)
    return 0


def _run_jobs(
    jobs: Sequence[Job],
    config: RunConfig,
    files: Mapping[str, Path],
    work: Workspace,
    backend: Backend | None,
    style: str,
) -> RunSummary:
    from ifsl_bench.experiments.runner import prepare_from_paths, run_jobs

    prepare_from_paths(files, work)
    if config.own_weights:
        from ifsl_bench.experiments.pretraining import mark_for_training

        mark_for_training(jobs, work)
    with redirect_prints_to_stderr(style):
        return run_jobs(
            jobs,
            work,
            backend,
            rerun=config.rerun,
            retrain=config.retrain,
            command=_command_line_to_record(sys.argv[1:]),
        )


def _print_new_rows(tasks: Sequence[Task], summary: RunSummary, work: Workspace, style: str, full: bool) -> None:
    """Print the rows of the tasks: for readers the new ones among the rows of usual settings, and where they stand."""
    from ifsl_bench.analysis.task_results import load_task_results
    from ifsl_bench.reporting.leaderboard import make_task_table
    from ifsl_bench.reporting.table import RECORD_FORMATTERS

    results_of_tasks, labels_of = [], dict[str, list[str]]()
    for task in tasks:
        task_results = load_task_results(task, work.home.results)
        labels = list(dict.fromkeys(job.label for job in summary.jobs_stored if job.task.name == task.name))
        new = [row for label in labels if (row := task_results.find_row(label))]
        if any(row.has_other_recipe for row in new):
            task_results = task_results.select_recipes([row.recipe for row in new if row.recipe])
        labels_of[task_results.task_name] = labels
        results_of_tasks.append(task_results)
    if style in RECORD_FORMATTERS:
        print_tables_in_format(
            [make_task_table(task_results, full) for task_results in results_of_tasks if not task_results.is_empty],
            style,
        )
        return
    from ifsl_bench.analysis.aggregate import EVERY, PAPER
    from ifsl_bench.reporting.notes import describe_standings

    results_of_tasks = [
        task_results.select_default_view(labels_of[task_results.task_name])
        for task_results in results_of_tasks
        if labels_of[task_results.task_name]
    ]
    if style == "latex" and results_of_tasks:
        from ifsl_bench.reporting.latex import make_latex_tables

        click.echo(make_latex_tables(results_of_tasks, full))
    for task_results in results_of_tasks:
        if style != "latex":
            click.echo()
            print_tables_in_format([make_task_table(task_results, full)], style)
        by_setting: dict[str, list[str]] = {}
        for label in labels_of[task_results.task_name]:
            row = task_results.find_row(label)
            setting = row.ranking_setting if row and row.ranking_setting != EVERY else PAPER
            by_setting.setdefault(setting, []).append(label)
        for setting, of_setting in by_setting.items():
            for lines in describe_standings(task_results.select_setting(setting), of_setting):
                print_lines("\n" + "\n".join(lines), style)
    if printed := [
        task_results for task_results in results_of_tasks if task_results.published_rows or task_results.task.variant_of
    ]:
        from ifsl_bench.reporting.comparison_tables import published_comparison_tables

        if beside := published_comparison_tables(printed):
            click.echo()
            print_tables_in_format(beside, style)


def print_failures(summary: RunSummary, n_jobs: int, missing_requirements: Mapping[str, int]) -> int:
    """Print which jobs failed or could not be run here, and why; return the exit status.

    Args:
        summary: of the run.
        n_jobs: how many there were.
        missing_requirements: why others cannot be run here -> how many.
    """
    print_missing(missing_requirements)
    if summary.jobs_failed:
        click.echo(f"ifsl-bench: {len(summary.jobs_failed)} of {n_jobs} jobs failed:", err=True)
    for line in summary.failure_messages:
        click.echo(f"  {line}", err=True)
    return 1 if summary.jobs_failed or missing_requirements else 0


def _command_line_to_record(arguments: list[str]) -> str:
    """Return the command as results record it: without the folders of this machine."""
    words: list[str] = []
    skip = False
    for word in arguments:
        folder = word.partition("=")[0] in MACHINE_SPECIFIC_OPTIONS
        if not skip and not folder:
            whole = Path(word).name if Path(word).is_absolute() and "," not in word else word.rstrip("/")
            words.append(re.sub(r"(^|[=,]\s*)[~/][^,]*/(?=[^,/])", r"\1", whole))
        skip = word in MACHINE_SPECIFIC_OPTIONS
    return shlex.join(["ifsl-bench", *words])
