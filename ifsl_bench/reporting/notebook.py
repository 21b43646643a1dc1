"""Functions that ask about results in a notebook, as the commands of these names do. Imports no torch.

Functions take tasks, labels and files by the names that commands take, and return what shows itself in a notebook and
has ``to_pandas()``; docs/python.md has every column.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from ifsl_bench.analysis.comparison import compare_rows as compare_rows
from ifsl_bench.analysis.task_results import (
    ALL_RECIPES,
    find_row_or_raise,
    find_rows_to_compare,
    load_measured_tasks,
    load_results_by_name,
    load_results_of_tasks,
    select_setting,
)
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.comparison_tables import comparison_table, variance_tables
from ifsl_bench.reporting.frames import Frame, Results
from ifsl_bench.reporting.leaderboard import make_leaderboard_tables, make_task_tables
from ifsl_bench.reporting.recipe_tables import make_grid_tables
from ifsl_bench.store.result_folder import packaged_results_folder, read_results
from ifsl_bench.store.schema import Result, read_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths

NameOrNames = str | Sequence[str]
OptionalFolder = str | Path | None


def table(
    *tasks: str,
    methods: NameOrNames = (),
    setting: str | None = None,
    recipe: NameOrNames = (),
    full: bool = False,
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Frame:
    """Return the stored and published rows of tasks, of all that have any where none is named.

    Args:
        *tasks: their names.
        methods: labels of the only rows to show.
        setting: "paper" for methods as published alone, "tuned-12" for the best of 12 trials; all rows by default.
        recipe: show rows on backbones of these recipes, as "closer.beta=1", or of "all"; by default, the task's own.
        full: show more columns, as ``table --full``; data frames have all columns that ``--format json`` has.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: an unknown task, row or setting, or nothing stored.

    Example:
        >>> frame = ifsl_bench.table("glyphs-5shot", methods=["imprint", "protonet"])
        >>> [record["method"] for record in frame.records()]
        ['imprint', 'protonet']
    """
    results_of_tasks = load_results_of_tasks(
        tasks, as_name_tuple(methods), Paths.locate(home, results), as_name_tuple(recipe)
    )
    results_of_tasks = select_setting(results_of_tasks, setting) if setting else results_of_tasks
    return Frame([table for task_results in results_of_tasks for table in make_task_tables(task_results, full)])


def leaderboard(
    *tasks: str,
    methods: NameOrNames = (),
    setting: str | None = None,
    recipe: NameOrNames = (),
    full: bool = False,
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Frame:
    """Return the ranked rows of tasks, of all on which something is measured where none is named.

    Args:
        *tasks: their names.
        methods: labels of the only rows to show.
        setting: "paper" by default, "tuned-12" for the best of 12 trials.
        recipe: show rows on backbones of these recipes, as "closer.beta=1", or of "all"; by default, the task's own.
        full: show more columns, as ``leaderboard --full``.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: an unknown task, row or setting, or nothing measured.

    Example:
        >>> frame = ifsl_bench.leaderboard("glyphs-5shot", methods=["protonet", "imprint"])
        >>> [record["method"] for record in frame.records()]
        ['imprint', 'protonet']
    """
    folders, labels = Paths.locate(home, results), as_name_tuple(methods)
    results_of_tasks = select_setting(load_measured_tasks(tasks, labels, folders, as_name_tuple(recipe)), setting)
    return Frame(*make_leaderboard_tables(results_of_tasks, folders.results, full, labels))


def compare(
    a: str | Path,
    b: str | Path,
    task: str | None = None,
    *,
    recipe: str | None = None,
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Frame:
    """Return paired differences A - B in percentage points, a row for each metric.

    Args:
        a: a row's label, or a result file; of two rows of a label it is yours, and "lr (stored)" is the stored one.
        b: another one.
        task: the task of the rows, where they are given by label.
        recipe: of rows whose labels name none; by default, the task's own.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: no such row or file, or two that were not measured on the same episodes.

    Example:
        >>> frame = ifsl_bench.compare("imprint", "protonet", "glyphs-5shot")
        >>> print(str(frame).splitlines()[0])
        A = imprint (stored), B = protonet (stored), task glyphs-5shot, 2,000 episodes, seeds 0 to 4
    """
    rows = find_rows_to_compare(str(a), str(b), task, Paths.locate(home, results), recipe)
    return Frame([comparison_table(compare_rows(*rows))])


def variance(
    task: str,
    *,
    methods: NameOrNames = (),
    metric: str = "acc",
    recipe: NameOrNames = (),
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Frame:
    """Return tables of how rows of a task in sessions, and their differences, vary over orders, supports and seeds.

    Args:
        task: its name.
        methods: labels of the only rows to split.
        metric: one that the rows have, as :func:`table` names it.
        recipe: split rows on backbones of these recipes, see :func:`table`.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: an unknown task or row, a task in episodes, or no row with the metric.

    Example:
        >>> print(str(ifsl_bench.variance("glyphs-sessions", methods=["imprint"])).splitlines()[0])
        glyphs-sessions, Avg.
    """
    (task_results,) = load_results_of_tasks(
        [task], as_name_tuple(methods), Paths.locate(home, results), as_name_tuple(recipe)
    )
    return Frame(variance_tables(task_results, metric))


def grid(
    task: str,
    *,
    methods: NameOrNames = (),
    metric: str = "acc",
    recipe: NameOrNames = (),
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Frame:
    """Return tables of a task's recipes and classifiers, each with each; ``table`` in their records tells them apart.

    Args:
        task: its name.
        methods: labels of the only classifiers, or rows, to compare.
        metric: one that the rows have, as :func:`table` names it.
        recipe: the only recipes to compare, see :func:`table`; by default all.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: an unknown task or row, or no method that was measured under two recipes.

    Example:
        >>> frame = ifsl_bench.grid("glyphs-sessions").to_pandas()  # doctest: +SKIP
        >>> frame[frame.table == "shares"].set_index("source").percent  # doctest: +SKIP
    """
    recipes = as_name_tuple(recipe) or (ALL_RECIPES,)
    (task_results,) = load_results_of_tasks([task], as_name_tuple(methods), Paths.locate(home, results), recipes)
    return Frame(make_grid_tables(task_results, metric))


def load(
    what: str | Path, task: str | None = None, *, home: OptionalFolder = None, results: OptionalFolder = None
) -> Result | Results:
    """Return a result file; or all seeds of a row, by its label and task.

    Args:
        what: the file, or the label; of two rows of a label it is yours, and "lr (stored)" is the stored one.
        task: of the row.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: no such file or row, or a file that is damaged.

    Example:
        >>> [result.seed for result in ifsl_bench.load("imprint", "glyphs-5shot")]
        [0, 1, 2, 3, 4]
    """
    if task is not None:
        return Results(find_row_or_raise(load_results_by_name(task, Paths.locate(home, results)), str(what)).results)
    path = Path(what).expanduser()
    if not os.path.isfile(path):
        raise UserError(
            f"there is no result file {path}; a row is loaded by its label and task, as in load('lr+a', 'glyphs-5shot')"
        )
    return read_result(path)


def load_all(*tasks: str, home: OptionalFolder = None, results: OptionalFolder = None) -> Results:
    """Return all results of tasks, of all tasks where none is named: those that come with the package, and yours.

    Files that cannot be read are left out, each with a Python warning.

    Args:
        *tasks: their names.
        home: the home folder, as ``--home``.
        results: the folder of results, as ``--results``.

    Raises:
        UserError: there are none, of an unknown task.

    Example:
        >>> results = ifsl_bench.load_all("glyphs-5shot")
        >>> "imprint" in {result.label for result in results}
        True
    """
    results_here: list[Result] = []
    folders = Paths.locate(home, results)
    for root in dict.fromkeys([packaged_results_folder().resolve(), folders.results.resolve()]):
        some, remarks = read_results(root, tasks or None)
        results_here += some
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)
    for task in tasks:
        if not any(result.task == task for result in results_here):
            load_tasks(task, home=folders)  # raises for an unknown one
    return Results(results_here)


def as_name_tuple(names: NameOrNames) -> tuple[str, ...]:
    """Return names as a tuple: of one name, of several with commas between them, or of a list of either."""
    texts = (names,) if isinstance(names, str) else tuple(names)
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())
