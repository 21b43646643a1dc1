"""Commands on stored results: ``table``, ``leaderboard``, ``compare``, ``variance``, ``show``, ``check`` and others."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.completion import complete_rows, complete_rows_and_tasks, complete_tasks
from ifsl_bench.cli.options import (
    IntegerRange,
    add_folders_options,
    device_option,
    format_examples,
    home_option,
    label_option,
    locate_folders,
    make_reporter,
    parse_names,
    quiet_option,
    recipe_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.output import TEXT_FORMAT, print_lines, print_tables_in_format, print_warnings
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.text_format import format_seeds

if TYPE_CHECKING:
    from ifsl_bench.analysis.task_results import TaskResults
    from ifsl_bench.utils.files import Paths

FULL_OPTION_HELP = "The joint and alone accuracies too; in sessions the accuracy after each, and every metric."


def _print_task_tables(
    results_of_tasks: Sequence[TaskResults],
    folders: Paths,
    style: str,
    full: bool,
    labels: Sequence[str],
    ranked: bool = True,
) -> None:
    """Print the tables of tasks; ranked ones with the tables of their variants."""
    from ifsl_bench.analysis.task_results import make_no_results_error
    from ifsl_bench.reporting.leaderboard import add_variants, make_leaderboard_tables, make_task_tables

    if style == "latex":
        from ifsl_bench.reporting.latex import make_latex_tables

        shown = add_variants(results_of_tasks, folders.results, labels) if ranked else results_of_tasks
        if empty := [task_results for task_results in shown if task_results.is_empty]:
            raise make_no_results_error(empty[0])
        click.echo(make_latex_tables(shown, full, rank=ranked))
    elif ranked:
        tables, closing = make_leaderboard_tables(results_of_tasks, folders.results, full, labels)
        print_tables_in_format(tables, style, closing)
    else:
        print_tables_in_format(
            [table for task_results in results_of_tasks for table in make_task_tables(task_results, full)], style
        )


@click.command(
    epilog=format_examples(
        "table glyphs-1shot glyphs-5shot",
        "table glyphs-5shot --method lr,lr+a --full",
        "table tiered-5shot --rank --format latex > table.tex",
    )
)
@click.argument("tasks", nargs=-1, metavar="[TASK...]", shell_complete=complete_tasks)
@click.option(
    "--rank", is_flag=True, help="Show the ranks that each measured row can have; variants are ranked separately."
)
@click.option(
    "--setting",
    metavar="NAME",
    help="Only rows that are not tuned (paper, what --rank ranks), or tuned ones (tuned-12 for the best of 12 trials).",
)
@click.option("--full", is_flag=True, help=FULL_OPTION_HELP)
@click.option(
    "--beside", is_flag=True, help="Show measured rows beside printed ones, and whether they are within the band."
)
@label_option
@recipe_option
@add_folders_options
@style_option
def table(
    tasks: tuple[str, ...],
    rank: bool,
    setting: str | None,
    full: bool,
    beside: bool,
    labels: tuple[str, ...],
    recipes: tuple[str, ...],
    folders: Paths,
    style: str,
) -> None:
    """Print the stored and published rows of tasks.

    By default, of every task that has rows. 'ifsl-bench leaderboard --help' says what the columns are.
    """
    from ifsl_bench.analysis.task_results import load_results_of_tasks, select_setting

    results_of_tasks = load_results_of_tasks(tasks, labels, folders, recipes)
    if beside:
        from ifsl_bench.reporting.comparison_tables import published_comparison_tables

        if rank or full or setting:
            raise UserError("--beside is a table of its own: leave out --rank, --full and --setting")
        if not (tables_beside := published_comparison_tables(results_of_tasks)):
            from ifsl_bench.protocols.registry import protocol_of_task

            if results_of_tasks and all(
                protocol_of_task(task_results.task).has_separate_published_table for task_results in results_of_tasks
            ):
                raise UserError(
                    "--beside is for tasks in episodes; printed rows in sessions are of other backbones: "
                    "'ifsl-bench leaderboard' shows them"
                )
            raise UserError("no row measured here is printed in a paper too; docs/paper.md has the command")
        print_tables_in_format(tables_beside, style)
        return
    if rank or setting:
        results_of_tasks = select_setting(results_of_tasks, setting)
    _print_task_tables(results_of_tasks, folders, style, full, labels, ranked=rank)


@click.command(
    epilog=format_examples(
        "leaderboard", "leaderboard glyphs-5shot", "leaderboard glyphs-5shot --setting tuned-12 --format csv"
    )
)
@click.argument("tasks", nargs=-1, metavar="[TASK...]", shell_complete=complete_tasks)
@click.option(
    "--setting", metavar="NAME", help="Rows that are not tuned (paper, the default), or tuned ones (tuned-12)."
)
@click.option("--full", is_flag=True, help=FULL_OPTION_HELP)
@label_option
@recipe_option
@add_folders_options
@style_option
def leaderboard(
    tasks: tuple[str, ...],
    setting: str | None,
    full: bool,
    labels: tuple[str, ...],
    recipes: tuple[str, ...],
    folders: Paths,
    style: str,
) -> None:
    """Print the ranked rows of tasks, yours among the stored ones.

    \b
    Acc.        of all queries, among all classes
    cal. Acc.   the same with one bias on all novel logits
    Delta       joint minus alone: base queries (_a), novel ones (_b), the mean
    rank        the places that a row can have, with 95% confidence

    \b
    In sessions:
    Avg.         mean of the accuracies after each session, base session included
    A_0, A_T     accuracy after the base session, after the last
    PD           A_0 minus A_T
    gain         Avg. minus that of the lazy row: a model with the same A_0
                 that never answers with a novel class
    base, novel  accuracy on base, on novel classes after the last session
    harmonic     harmonic mean of base and novel
    gAcc         like Avg., averaged over weights of the base session
    bytes/class  bytes that the method carries on for each novel class

    Without a task: the best rows of each task on which something is measured, and yours.
    """
    from ifsl_bench.analysis.task_results import load_measured_tasks, select_setting

    results_of_tasks = select_setting(load_measured_tasks(tasks, labels, folders, recipes), setting)
    if style == TEXT_FORMAT and not (tasks or labels or setting or full or recipes):
        from ifsl_bench.reporting.leaderboard import make_short_task_tables

        tables, closing = make_short_task_tables(results_of_tasks)
        print_tables_in_format(tables, style, closing)
        return
    _print_task_tables(results_of_tasks, folders, style, full, labels)


@click.command(
    epilog=format_examples("compare lr+a lr --task glyphs-5shot", "compare first.seed-0.json second.seed-0.json")
)
@click.argument("a", shell_complete=complete_rows)
@click.argument("b", shell_complete=complete_rows)
@click.option(
    "--task", "task", shell_complete=complete_tasks, help="The task, where A and B are labels of stored rows."
)
@click.option("--recipe", metavar="NAME", help="The recipe of rows whose labels name none [the task's own].")
@add_folders_options
@style_option
def compare(a: str, b: str, task: str | None, recipe: str | None, folders: Paths, style: str) -> None:
    """Paired difference A - B of two rows of a task, or two files.

    Your own row comes before the stored one of the same label, which "LABEL (stored)" names. In sessions, 'lazy' is the
    lazy model of the other row, and 'lazy (ROW)' that of any row.
    """
    from ifsl_bench.analysis.comparison import compare_rows as compare_rows
    from ifsl_bench.analysis.task_results import find_rows_to_compare
    from ifsl_bench.reporting.comparison_tables import comparison_table
    from ifsl_bench.reporting.table import RECORD_FORMATTERS

    comparison = compare_rows(*find_rows_to_compare(a, b, task, folders, recipe))
    print_tables_in_format([comparison_table(comparison)], style)
    if style in RECORD_FORMATTERS:  # which get no notes
        print_warnings(comparison.same_label_notes)


@click.command(
    epilog=format_examples(
        "variance tiny-features-sessions", "variance tiny-features-sessions --method ncm,teen --metric gacc"
    )
)
@click.argument("task", shell_complete=complete_tasks)
@click.option("--metric", default="acc", metavar="NAME", help="Of those in --format json [acc, the average].")
@label_option
@recipe_option
@add_folders_options
@style_option
def variance(
    task: str, metric: str, labels: tuple[str, ...], recipes: tuple[str, ...], folders: Paths, style: str
) -> None:
    """Split how rows in sessions vary: order, supports, seed.

    Also of the differences of every two rows, with how likely one order, one support set and one seed, as most papers
    have, give the wrong sign.
    """
    from ifsl_bench.analysis.task_results import load_results_of_tasks
    from ifsl_bench.reporting.comparison_tables import variance_tables

    results_of_tasks = load_results_of_tasks([task], labels, folders, recipes)
    print_tables_in_format(
        [table for task_results in results_of_tasks for table in variance_tables(task_results, metric)], style
    )


@click.command(epilog=format_examples("grid glyphs-sessions", "grid glyphs-sessions --recipe ce,closer --format csv"))
@click.argument("task", shell_complete=complete_tasks)
@click.option("--metric", default="acc", metavar="NAME", help="Of those in --format json [acc; in sessions, Avg.].")
@label_option
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    callback=parse_names,
    metavar="NAME",
    help="Only these recipes, with their options as closer.beta=1; comma-separated or repeated [all].",
)
@add_folders_options
@style_option
def grid(task: str, metric: str, labels: tuple[str, ...], recipes: tuple[str, ...], folders: Paths, style: str) -> None:
    """Compare recipes and classifiers, each with each.

    A classifier is a method with its options, whatever recipe trained the backbone. Shows the grid of both, where the
    errors of each cell are, the order of recipes under each classifier and back with what is not told apart, and how
    much of the variance is of the recipe, the classifier, both, and of what is drawn.
    """
    from ifsl_bench.analysis.task_results import ALL_RECIPES, load_results_of_tasks
    from ifsl_bench.reporting.recipe_tables import make_grid_tables

    (task_results,) = load_results_of_tasks([task], labels, folders, recipes or [ALL_RECIPES])
    print_tables_in_format(make_grid_tables(task_results, metric), style)


@click.command(epilog=format_examples("show lr+a glyphs-5shot", "show results/glyphs-5shot/lr+a.seed-0.json"))
@click.argument("what", metavar="LABEL TASK|FILE.json", nargs=-1, required=True, shell_complete=complete_rows_and_tasks)
@add_folders_options
@style_option
def show(what: tuple[str, ...], folders: Paths, style: str) -> None:
    """Print a row with all its seeds in full; or one result file."""
    from ifsl_bench.analysis.aggregate import FILE, STORED, SeedAggregate
    from ifsl_bench.analysis.task_results import find_row_or_raise, load_results_by_name
    from ifsl_bench.plugin.registry import is_installed_method
    from ifsl_bench.protocols.tasks.task_files import is_task_name, load_task
    from ifsl_bench.reporting.detail_tables import describe_facts, describe_validation_pools, seed_table, session_tables
    from ifsl_bench.reporting.table import TABLE_FORMATTERS
    from ifsl_bench.store.schema import read_result

    more: list[str] = []
    if len(what) == 1 and (what[0].endswith(".json") or os.path.isfile(what[0])):
        result = read_result(Path(what[0]))
        row = SeedAggregate(result.label, FILE, (result,))
        again, task = f"ifsl-bench reproduce {shlex.quote(what[0])}", None
        with suppress(UserError):
            task = load_task(result.task, folders) if is_task_name(result.task) else None
    elif len(what) == 2:
        label, name = what
        task_results = load_results_by_name(name, folders)
        task = task_results.task
        row = find_row_or_raise(task_results, label)
        if row.results_origin != STORED and task_results.find_row(f"{row.label} ({STORED})"):
            more = [f"The stored row: ifsl-bench show '{row.label} ({STORED})' {name}"]
        twice = sum(other_row.label == row.label for other_row in task_results.measured_rows) > 1
        named = f"{row.label} ({row.results_origin})" if twice else row.label
        again = f"ifsl-bench reproduce {shlex.quote(named)} {shlex.quote(row.results[0].task)}"
    else:
        raise _no_file_or_row_error("show", what)
    if not is_installed_method(row.results[0].method):
        again += f" --method FILE.py:{shlex.quote(row.results[0].method)}"
    whole = seed_table(row)
    print_tables_in_format([replace(whole, notes=[*whole.notes, *more]), *session_tables(row)], style)
    if style in TABLE_FORMATTERS:
        validated = describe_validation_pools(task) if task and task.hash == row.results[0].task_hash else ""
        print_lines("\n" + describe_facts(row.results, {"validated on": validated, "again": again}), style)


@click.command(epilog=format_examples("check results/glyphs-5shot/*.json", "check mine.seed-0.json --task mine.toml"))
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="RESULT.json...")
@click.option("--task", "task_files", multiple=True, metavar="FILE.toml", help="Tasks of your own, for their results.")
@home_option
def check(files: tuple[str, ...], task_files: tuple[str, ...], home: str | None) -> None:
    """Verify result files before they are contributed.

    Prints a line for each file; the exit status is 2 if any fails.
    """
    from ifsl_bench.experiments.check_method import check_file
    from ifsl_bench.protocols.tasks.task_files import load_tasks

    folders = locate_folders(home)
    own = {task.name: task for name in task_files for task in load_tasks(name, home=folders)}
    bad = 0
    for name in files:
        checked = check_file(Path(name), own, folders)
        if not checked.failures:
            click.echo(f"{escape_controls(name)}: {checked.summary_line}")
        for failure in checked.failures:
            click.echo(f"{escape_controls(name)}: {failure}", err=True)
        bad += bool(checked.failures)
    if bad:
        which = f"{bad} of {len(files)} result files" if len(files) > 1 else "the result file"
        raise UserError(f"{which} failed the checks")


@click.command(
    epilog=format_examples(
        "reproduce lr+a glyphs-5shot",
        "reproduce imprint glyphs-5shot --seed 0",
        "reproduce mine.seed-0.json --method my.py:Mine --within 0.1",
    )
)
@click.argument(
    "what", nargs=-1, required=True, metavar="LABEL TASK|RESULT.json...", shell_complete=complete_rows_and_tasks
)
@click.option("--seed", type=IntegerRange(0, LARGEST_SEED), help="Of a row: only the result of this training seed.")
@click.option("--method", metavar="FILE.py:CLASS", help="Where the method is, if it is not installed.")
@click.option("--task", metavar="FILE.toml", help="Where the task is, if it is your own.")
@click.option(
    "--within", default=0.0, metavar="POINTS", help="Let the accuracy differ by up to POINTS, whatever the reason [0]."
)
@device_option
@click.option("--home", metavar="DIR", help="Use what is stored there [an empty home, with your data sets].")
@quiet_option
@verbose_option
def reproduce(
    what: tuple[str, ...],
    seed: int | None,
    method: str | None,
    task: str | None,
    within: float,
    device: str,
    home: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Run the jobs of stored results again, and compare.

    Takes a row, with all its seeds, or files. Exit status 1 if any differs: on the processor that is
    stored at all, on another one by more than a point of accuracy.

    Without --home all is made anew, the pretraining too unless its weights come with the package; data sets that you
    have prepared, and weights of backbones from elsewhere, are used as they are.
    """
    import tempfile

    if not 0 <= within <= 100:  # False for NaN too
        raise UserError(f"--within takes percentage points, 0 to 100, not {within:g}")
    from ifsl_bench import api
    from ifsl_bench.experiments.reproduce import job_from_result, link_prepared_data
    from ifsl_bench.experiments.reproduce import reproduce as run_again
    from ifsl_bench.store.schema import read_result

    outcomes = []
    stored = {name: read_result(Path(name)) for name in _find_result_files(what, seed)}
    with tempfile.TemporaryDirectory(prefix="ifsl-bench-") as scratch:
        work = api.workspace(home or scratch, Path(scratch) / "results", device, make_reporter(quiet, verbose))
        for name, result in stored.items():
            if home is None:
                usual = locate_folders(None)
                link_prepared_data(job_from_result(result, usual, task, method).task, usual, work.home)
            outcomes.append(run_again(Path(name), work, task, method))
            click.echo(f"{escape_controls(name)}: {outcomes[-1].summary_line}")
            if devices := outcomes[-1].device_difference:
                click.echo(f"  {escape_controls(devices)}")
    if not all(
        outcome.is_identical or outcome.is_explained_by_platform or outcome.is_accuracy_close(within)
        for outcome in outcomes
    ):
        click.get_current_context().exit(1)


def _find_result_files(what: Sequence[str], seed: int | None = None) -> list[str]:
    """Return the named files; or the files of a row, named by its label and task, perhaps of one seed alone."""
    from ifsl_bench.analysis.aggregate import STORED
    from ifsl_bench.analysis.task_results import find_row_or_raise, load_results_by_name
    from ifsl_bench.store.result_folder import packaged_results_folder
    from ifsl_bench.store.schema import result_path

    if len(what) != 2 or any(name.endswith(".json") or os.path.isfile(name) for name in what):
        if len(what) == 1 and not (what[0].endswith(".json") or os.path.isfile(what[0])):
            raise _no_file_or_row_error("reproduce", what)
        if seed is not None:
            raise UserError("a result file is of one seed; --seed is for a row, named by its label and task")
        return list(what)
    folders, (label, task) = locate_folders(None), what
    task_results = load_results_by_name(task, folders)
    row = task_results.find_row(f"{label} ({STORED})") or find_row_or_raise(task_results, label)
    root = packaged_results_folder() if row.results_origin == STORED else folders.results
    if seed is not None and seed not in row.seeds:
        raise UserError(f"{row.label} on {task} has {format_seeds(row.seeds)}, not {seed}")
    return [str(result_path(root, result)) for result in row.results if seed in (None, result.seed)]


def _no_file_or_row_error(command: str, what: Sequence[str]) -> UserError:
    """Make the error for words that are no file, and no label with a task."""
    from ifsl_bench.protocols.tasks.task_files import packaged_tasks

    beginning, label = (f"{what[0]!r} is not a file; ", what[0]) if len(what) == 1 else ("", "lr+a")
    task = "glyphs-5shot"
    if label in packaged_tasks():
        label, task = "LABEL", label
    return UserError(
        f"{beginning}{command} takes a result file, or a row's label and its task: ifsl-bench {command} {label} {task}"
    )
