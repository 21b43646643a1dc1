"""``ifsl-bench results``: list of your own results, and the removal of some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.completion import complete_rows, complete_tasks
from ifsl_bench.cli.options import (
    IntegerRange,
    SuggestingGroup,
    add_folders_options,
    confirm_removal,
    format_examples,
    label_option,
    style_option,
)
from ifsl_bench.cli.output import print_tables_in_format, print_warnings
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_numbers

if TYPE_CHECKING:
    from ifsl_bench.store.schema import Result
    from ifsl_bench.utils.files import Paths


@click.group(
    cls=SuggestingGroup,
    epilog=format_examples("results list --since 7", "results remove lr.weight_decay=1 glyphs-5shot"),
)
def results() -> None:
    """List and remove your own results."""


@results.command(
    "list",
    epilog=format_examples(
        "results list",
        "results list glyphs-5shot --since 7",
        "results list --method lr,lr+a --since 2026-11-01 --format json",
    ),
)
@click.argument("tasks", nargs=-1, metavar="[TASK...]", shell_complete=complete_tasks)
@label_option
@click.option("--since", metavar="WHEN", help="Only what was measured in the last N days, or since YYYY-MM-DD.")
@add_folders_options
@style_option
def results_list(
    tasks: tuple[str, ...], labels: tuple[str, ...], since: str | None, folders: Paths, style: str
) -> None:
    """List what you have measured, by task and row.

    'ifsl-bench table TASK' shows the same rows among the stored ones.
    """
    from ifsl_bench.reporting.table import table_from_dicts
    from ifsl_bench.store.result_folder import group_results_by_row

    root = folders.results
    rows, remarks = group_results_by_row(root, tasks, labels, _parse_time(since) if since is not None else None)
    print_warnings(remarks)
    if not rows:
        raise UserError(f"there are no such results in {root}; 'ifsl-bench run' makes some")
    print_tables_in_format(
        [table_from_dicts([_summarise_row(row) for row in rows], min_fold_widths={"task": 12, "method": 18})], style
    )


def _summarise_row(results: Sequence[Result]) -> dict[str, str]:
    """Return a line of the list: results of one label on one task, which need not belong to one row of a table."""
    from ifsl_bench.store.result_folder import measurement_time

    return {
        "task": results[0].task,
        "method": results[0].label,
        "Acc.": f"{fmean(result.summary['acc']['mean'] for result in results):.2f}",
        "seeds": format_numbers([result.seed for result in results]),
        "measured": f"{max(map(measurement_time, results)):%Y-%m-%d %H:%M}",
    }


def _parse_time(when: str) -> datetime:
    """Return the time that ``--since`` means; raise :class:`UserError` where it means none."""
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) - timedelta(days=float(when))
    try:
        return datetime.fromisoformat(when).astimezone(UTC)
    except ValueError as error:
        raise UserError(f"--since takes a number of days or a date as in 2026-11-24, not {when!r:.40}") from error


@results.command(
    "remove",
    epilog=format_examples("results remove imprint glyphs-5shot", "results remove mine glyphs-5shot --seed 2 --yes"),
)
@click.argument("label", shell_complete=complete_rows)
@click.argument("task", shell_complete=complete_tasks)
@click.option("--seed", type=IntegerRange(0, LARGEST_SEED), help="Only the result of this training seed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@add_folders_options
def results_remove(label: str, task: str, seed: int | None, yes: bool, folders: Paths) -> None:
    """Remove results of yours: a row with all its seeds, or one of them.

    Lists the files, and asks first. The rows that come with the package stay.
    """
    from ifsl_bench.store.result_folder import find_row_files, packaged_results_folder, remove_files

    root = folders.results
    if root.resolve() == packaged_results_folder().resolve():
        raise UserError("these results come with the package, and stay")
    paths = find_row_files(root, task, label, seed)
    for path in paths:
        click.echo(f"to be removed: {path}")
    if not confirm_removal("Remove these results?", yes):
        return
    remove_files(paths)
    click.echo("removed; 'ifsl-bench run' measures them again")
