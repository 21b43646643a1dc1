"""``ifsl-bench plan`` and ``status``: what a campaign would do, and how far it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import (
    Machine,
    data_option,
    device_option,
    examples,
    home_option,
    job_options,
    machine_options,
    results_option,
    style_option,
)
from ifsl_bench.cli.output import print_missing, say, show_tables
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.experiments.job import Job
    from ifsl_bench.experiments.plan import JobPlan
    from ifsl_bench.experiments.request import Request
    from ifsl_bench.experiments.workspace import Workspace


def _wanted(
    campaign: str | None, request: Request, machine: Machine, device: str = ""
) -> tuple[list[Job], Workspace, dict[str, Path]]:
    """The jobs that are asked for, as ``run`` would make them, and the files that a campaign names for its data."""
    if campaign is None and not (request.tasks and request.methods):
        command = click.get_current_context().command_path
        raise UserError(f"say which campaign, e.g.: {command} campaign.toml, or which rows: --method and --task")
    from ifsl_bench.experiments.expansion import asked, jobs_of, with_tasks

    narrowed, _ = with_tasks(asked(campaign, request), machine.folders)
    work = machine.workspace(narrowed.results, device)
    jobs, lacking = jobs_of(narrowed, work.home, work.reporter.warn, work.reporter.say)
    print_missing(lacking)
    return jobs, work, dict(narrowed.data)


@click.command(
    epilog=examples(
        "plan leaderboard",
        "plan --method paper --task glyphs-5shot --seeds 3",
        "plan campaign.toml --format json",
    )
)
@job_options
@data_option
@click.option("--rerun", is_flag=True, help="As if no result were stored.")
@click.option("--retrain", is_flag=True, help="As if nothing were meta-trained either.")
@click.option("--full", is_flag=True, help="A line for each task, however many there are.")
@style_option
@machine_options(device_option, home_option, results_option)
def plan(
    campaign: str | None, request: Request, data: dict[str, str], rerun: bool, retrain: bool, full: bool,
    machine: Machine, style: str,
) -> None:  # fmt: skip
    """Say what a campaign would do, and what the stored rows took.

    CAMPAIGN is a TOML file, or the name of one that comes with the package; without one, the options say what to plan.
    """
    planned_jobs, work, files = _wanted(campaign, request, replace(machine, quiet=True))
    from ifsl_bench.experiments.plan import plan_of
    from ifsl_bench.experiments.runner import check_data

    files |= {name: Path(path) for name, path in data.items()}
    check_data(files, [job.task for job in planned_jobs], work.home)
    show_plan(plan_of(planned_jobs, work, rerun, retrain, lacking=True, data=files), work, style, full)


def show_plan(plans: Sequence[JobPlan], work: Workspace, style: str, full: bool = False) -> None:
    """Print a plan.

    Args:
        plans: of jobs.
        work: folders.
        style: of output.
        full: whether tasks have lines of their own in a long plan, too.
    """
    from ifsl_bench.experiments.plan import document, notes_of, rows_of

    whole = document(plans, work.home) if style == "json" else {}
    _show(rows_of(plans, full), notes_of(plans, work.home, full), whole, style)


@click.command(epilog=examples("status leaderboard", "status campaign.toml --task glyphs-5shot"))
@job_options
@style_option
@machine_options(home_option, results_option)
def status(campaign: str | None, request: Request, machine: Machine, style: str) -> None:
    """Say how far a campaign has got: done, running, failed, missing.

    Also says where it runs, since when, what failed and why, and which results are out of date.
    """
    jobs, work, _ = _wanted(campaign, request, replace(machine, quiet=True), "cpu")
    from ifsl_bench.experiments.status import document, rows_of, status_of, summary_of

    states = status_of(jobs, work)
    _show(rows_of(states), [summary_of(states)], document(states) if style == "json" else {}, style)


def _show(rows: Sequence[Mapping[str, str]], notes: Sequence[str], whole: Mapping[str, Any], style: str) -> None:
    from ifsl_bench.reporting.render import READERS
    from ifsl_bench.reporting.table import plain_table

    if style == "json":
        click.echo(json.dumps(whole, indent=1))
        return
    fold = {"job": 32, "missing": 20, "stored row took": 20, "on": 12, "what": 24, "where": 8, "how far": 16}
    show_tables([plain_table(rows, fold=fold, drop=("on", "since", "where"))], style)
    if style in READERS:
        say("\n" + "\n".join(notes), style)
