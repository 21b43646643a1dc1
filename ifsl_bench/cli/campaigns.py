"""``ifsl-bench plan`` and ``status``: what a campaign would do, and how far it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.options import (
    add_config_options,
    data_option,
    device_option,
    find_configs,
    format_examples,
    home_option,
    make_reporter,
    results_option,
    style_option,
)
from ifsl_bench.cli.output import print_lines, print_missing, print_tables_in_format
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.experiments.job import Job
    from ifsl_bench.experiments.plan import JobState
    from ifsl_bench.experiments.workspace import Workspace


def _expand_campaign(campaign: str | None, config: RunConfig) -> tuple[list[Job], Workspace, dict[str, Path]]:
    """Make the jobs of a command as ``run`` does; return them, their workspace and the paths of their data sets."""
    if campaign is None and not (config.tasks and config.methods):
        command = click.get_current_context().command_path
        raise UserError(f"say which campaign, e.g.: {command} campaign.toml, or which rows: --method and --task")
    configs, _, methods = find_configs(campaign, config)
    work = configs[0].workspace(make_reporter(quiet=True))
    from ifsl_bench.experiments.job import expand_configs

    jobs, lacking = expand_configs(configs, work.reporter, methods)
    print_missing(lacking)
    return jobs, work, configs[0].data_path_by_dataset


@click.command(
    epilog=format_examples(
        "plan leaderboard", "plan --method paper --task glyphs-5shot --seeds 3", "plan campaign.toml --format json"
    )
)
@add_config_options(
    data_option,
    click.option("--rerun", is_flag=True, help="As if no result were stored."),
    click.option("--retrain", is_flag=True, help="As if nothing were meta-trained either."),
    device_option,
    home_option,
    results_option,
)
@style_option
def plan(campaign: str | None, config: RunConfig, style: str) -> None:
    """List what a campaign would do, and what the stored rows took.

    CAMPAIGN is a TOML file, or the name of one that comes with the package; without one, the options say what to plan.
    """
    jobs, work, files = _expand_campaign(campaign, config)
    from ifsl_bench.experiments.plan import plan_jobs
    from ifsl_bench.experiments.runner import check_data_paths

    check_data_paths(files, [job.task for job in jobs], work.home, forms=True)
    print_plan(plan_jobs(jobs, work, config.rerun, config.retrain, lacking=True, data=files), work, style)


def print_plan(plans: Sequence[JobState], work: Workspace, style: str) -> None:
    """Print a plan.

    Args:
        plans: of jobs.
        work: folders.
        style: of output.
    """
    from ifsl_bench.experiments.plan import plan_notes, plan_rows, to_json_document

    if style == "json":
        click.echo(json.dumps(to_json_document(plans, work.home), indent=1))
    else:
        _print_status(plan_rows(plans, work.home), plan_notes(plans, work.home), style)


@click.command(epilog=format_examples("status leaderboard", "status campaign.toml --task glyphs-5shot"))
@add_config_options(home_option, results_option)
@style_option
def status(campaign: str | None, config: RunConfig, style: str) -> None:
    """List how far a campaign has got: stored, running, failed, to do.

    The list has where and since when jobs run, why others failed, and which results are out of date.
    """
    jobs, work, _ = _expand_campaign(campaign, dataclasses.replace(config, device="cpu"))
    from ifsl_bench.experiments.plan import format_summary, job_states, status_rows, to_json_document

    states = job_states(jobs, work)
    if style == "json":
        click.echo(json.dumps(to_json_document(states, work.home), indent=1))
    else:
        _print_status(status_rows(states), [format_summary(states)], style)


def _print_status(rows: Sequence[Mapping[str, str]], notes: Sequence[str], style: str) -> None:
    from ifsl_bench.reporting.table import TABLE_FORMATTERS, table_from_dicts

    fold = {"job": 32, "missing": 20, "stored row took": 20, "on": 12, "where": 8, "how far": 16}
    print_tables_in_format(
        [table_from_dicts(rows, min_fold_widths=fold, dropped_first=("on", "since", "where"))], style
    )
    if style in TABLE_FORMATTERS:
        print_lines("\n" + "\n".join(notes), style)
