"""All rows of a task: measured ones, those that are not comparable with them, published ones. Imports no torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ifsl_bench.analysis.aggregate import (
    EVERY,
    FILE,
    PAPER,
    PARTIAL_DATA_NOTE,
    STORED,
    SeedAggregate,
    aggregate_seeds,
    base_only_aggregate,
)
from ifsl_bench.analysis.ranking import RankedRow, Ranking
from ifsl_bench.plugin.display_names import LAZY_ROW_LABEL, parse_label
from ifsl_bench.plugin.registry import refers_to_file
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import load_task, load_tasks, own_tasks, packaged_tasks
from ifsl_bench.protocols.tasks.variants import apply_task_changes, split_task_name
from ifsl_bench.store.published import PublishedRow, read_published_rows
from ifsl_bench.store.result_folder import (
    LEFT_OUT_PREFIX,
    find_results_of_other_episodes,
    packaged_results_folder,
    read_results,
    reason_not_to_pair,
)
from ifsl_bench.store.schema import Result, read_result
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import format_count

ALL_RECIPES = "all"  # asks for the rows of every recipe


@dataclass(frozen=True)
class TaskResults:
    """All rows of one task.

    Attributes:
        rows: measured rows of today's definition of the task, on all of its episodes; those to be shown.
        comparable_rows: all such rows, shown or not. Ranks are theirs, so that they do not depend on what is shown.
        incomparable_rows: measured rows on other episodes or data, or on a part of the data where the task is not of
            such a part; shown apart and never ranked with ``rows``.
        published_rows: published rows, of the same protocol or of a related one (their ``protocol`` then says so).
        remarks: on files and rows that are left out.
        ranking_setting: that rows are ranked in, see :class:`ifsl_bench.analysis.ranking.Ranking`.
        recipes: those that were asked for; empty for the task's own alone.
        other_recipe_rows: rows on backbones of other recipes than those, which would be of ``rows`` and ``compared``.
        incomparable_other_recipe_rows: rows on backbones of other recipes, which would be of ``others``.
    """

    task: Task
    rows: tuple[SeedAggregate, ...]
    comparable_rows: tuple[SeedAggregate, ...]
    incomparable_rows: tuple[SeedAggregate, ...]
    published_rows: tuple[PublishedRow, ...]
    remarks: tuple[str, ...]
    ranking_setting: str = PAPER
    recipes: tuple[str, ...] = ()
    other_recipe_rows: tuple[SeedAggregate, ...] = ()
    incomparable_other_recipe_rows: tuple[SeedAggregate, ...] = ()

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def measured_rows(self) -> tuple[SeedAggregate, ...]:
        """All measured rows, comparable or not."""
        return (*self.rows, *self.incomparable_rows)

    @property
    def hidden_rows(self) -> tuple[SeedAggregate, ...]:
        """All measured rows on backbones of other recipes, which are neither shown nor ranked."""
        return (*self.other_recipe_rows, *self.incomparable_other_recipe_rows)

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.incomparable_rows or self.published_rows)

    @cached_property
    def ranking(self) -> Ranking:
        """The ranking by accuracy."""
        return Ranking(self.comparable_rows, setting=self.ranking_setting)

    @property
    def ranked_rows(self) -> list[RankedRow]:
        """The shown rows in their places, the best first; ranks are among all rows that are compared."""
        return [place for place in self.ranking.ranked_rows if place.row in self.rows]

    def select_setting(self, setting: str) -> TaskResults:
        """Return the rows of a setting, to be ranked, with a remark on rows of other settings."""
        rows = tuple(row for row in self.rows if row.ranking_setting in (setting, EVERY))
        counts = Counter(row.ranking_setting for row in self.rows if row not in rows)
        remarks = [
            f"`ifsl-bench table --rank --setting {name} {self.task_name}` has {format_count(count, 'more row')}"
            for name, count in sorted(counts.items())
        ]
        hidden = tuple(row for row in self.other_recipe_rows if row.ranking_setting in (setting, EVERY))
        return replace(
            self, ranking_setting=setting, rows=rows, other_recipe_rows=hidden, remarks=(*self.remarks, *remarks)
        )

    def select_recipes(self, recipes: Collection[str]) -> TaskResults:
        """Return the results with the rows of some recipes, which are shown and ranked together.

        Args:
            recipes: with their options, as ``closer.beta=1``; or ``all``. Where it is empty, the task's own.
        """
        lower = {name.lower() for name in recipes}

        def asked(row: SeedAggregate) -> bool:
            if not recipes:
                return not row.has_other_recipe
            return ALL_RECIPES in lower or (row.recipe or "").lower() in lower

        def divided(*rows: SeedAggregate) -> tuple[tuple[SeedAggregate, ...], tuple[SeedAggregate, ...]]:
            return tuple(filter(asked, rows)), tuple(row for row in rows if not asked(row))

        rows, hidden = divided(*self.rows, *self.other_recipe_rows)
        others, apart = divided(*self.incomparable_rows, *self.incomparable_other_recipe_rows)
        return replace(
            self, rows=rows, comparable_rows=rows, incomparable_rows=others, recipes=tuple(recipes),
            other_recipe_rows=hidden, incomparable_other_recipe_rows=apart,
        )  # fmt: skip

    @property
    def remarks_on_left_out_rows(self) -> tuple[str, ...]:
        """The remarks on files and rows that are in no table."""
        return tuple(remark for remark in self.remarks if remark.startswith(LEFT_OUT_PREFIX))

    @property
    def labels(self) -> set[str]:
        """The labels of all rows, measured and published."""
        return {row.label for row in (*self.measured_rows, *self.hidden_rows)} | {
            paper.label for paper in self.published_rows
        }

    def has_row(self, label: str) -> bool:
        """Return whether :meth:`select_labels` finds a row for a label."""
        names = {paper.label.lower() for paper in self.published_rows}
        names.update(*(lower_case_row_names(row) for row in (*self.measured_rows, *self.hidden_rows)))
        return label.lower() in names.union(row.label_without_recipe.lower() for row in self.measured_rows)

    def select_labels(self, labels: Collection[str]) -> TaskResults:
        """Return the rows with these labels, or labels and origins as in "lr (stored)", whatever their case.

        A label that names a recipe brings its row, whichever recipes are shown; one without has those of all that are.
        """
        lower = {label.lower() for label in labels}

        def chosen(shown: Iterable[SeedAggregate], hidden: Iterable[SeedAggregate]) -> tuple[SeedAggregate, ...]:
            named = [row for row in shown if lower & {*lower_case_row_names(row), row.label_without_recipe.lower()}]
            return (*named, *(row for row in hidden if lower & set(lower_case_row_names(row))))

        rows, others = (
            chosen(self.rows, self.other_recipe_rows),
            chosen(self.incomparable_rows, self.incomparable_other_recipe_rows),
        )
        papers = tuple(paper for paper in self.published_rows if paper.label.lower() in lower)
        compared = (*self.comparable_rows, *(row for row in self.other_recipe_rows if row in rows))
        left = [
            row for row in self.hidden_rows if row not in (*rows, *others) and row.label_without_recipe.lower() in lower
        ]
        return replace(
            self, rows=rows, comparable_rows=compared, incomparable_rows=others, published_rows=papers,
            other_recipe_rows=tuple(left), incomparable_other_recipe_rows=(),
        )  # fmt: skip

    def select_default_view(self, kept_labels: Collection[str]) -> TaskResults:
        """Return the rows without stored ones that have other options, or were chosen in another way than these.

        The rows of these labels stay. Where no stored row was tuned as they were, those as published stay too.
        """
        mine = {row.ranking_setting for row in self.rows if row.label in kept_labels} - {EVERY} or {PAPER}
        plain = [row for row in self.rows if row.results_origin == STORED and not row.has_changed_options]
        alike = any(row.ranking_setting in mine for row in plain)
        shown = {*mine, EVERY, *(() if alike else (PAPER,))}

        def stays(row: SeedAggregate) -> bool:
            return (
                row.results_origin != STORED
                or row.label in kept_labels
                or (not row.has_changed_options and row.ranking_setting in shown)
            )

        remarks = []
        if not alike and PAPER in {row.ranking_setting for row in plain}:
            remarks.append(
                f"No stored row was tuned as yours was ({', '.join(sorted(mine))}): those as published are "
                "shown beside it, and ranked apart"
            )
        if out := [row for row in self.rows if not stays(row)]:
            kinds = Counter(
                "with other options"
                if row.has_changed_options
                else "as published"
                if row.ranking_setting == PAPER
                else "tuned"
                for row in out
            )
            kinds_here = [kind for kind in ("as published", "tuned", "with other options") if kinds[kind]]
            kinds_text = ", ".join(f"{kinds[kind]} {kind}" for kind in kinds_here)
            remarks.append(
                f"`ifsl-bench table {self.task_name}` has {format_count(len(out), 'more stored row')} ({kinds_text})"
            )
        rows = tuple(row for row in self.rows if stays(row))
        return replace(self, rows=rows, remarks=(*self.remarks, *remarks))

    def find_row(self, label: str) -> SeedAggregate | None:
        """Return the row of a label: yours if there is one, else the stored one; "lr (stored)" is the stored one."""
        rows = [row for row in (*self.measured_rows, *self.hidden_rows) if label.lower() in lower_case_row_names(row)]
        return min(rows, key=lambda row: row.results_origin == STORED, default=None)

    def incompatibility_reason(self, row: SeedAggregate) -> str | None:
        """Return why a row is one of ``others``; None where there is no row to compare it with."""
        if row.is_partial and not self.task.dataset.partial:
            return PARTIAL_DATA_NOTE
        return reason_not_to_pair(self.rows[0].results[0], row.results[0]) if self.rows else None


def lower_case_row_names(row: SeedAggregate) -> tuple[str, ...]:
    """Return the names of a row, in lower case: its label and its name in tables, each alone and with its origin."""
    return row.label.lower(), row.label_with_origin.lower(), row.display_name.lower(), row.name_with_origin.lower()


def load_task_results(task: Task, results: Path) -> TaskResults:
    """Load the measured rows of a task, yours first, then those that come with the package, and the published ones.

    Those on backbones of other recipes than the task's own are hidden; :meth:`TaskResults.select_recipes` shows them.

    Args:
        task: of the rows.
        results: the folder of your results.
    """
    rows: list[SeedAggregate] = []
    remarks: list[str] = []
    folders = [(origin, *read_results(root, [task.name])) for root, origin in reversed(_list_result_folders(results))]
    reasons = find_results_of_other_episodes(
        task, [r for _, results_here, _ in folders for r in results_here if r.task_hash == task.hash]
    )
    for origin, results_here, damaged in reversed(folders):
        remarks += damaged
        today = []
        for r in results_here:
            if r.task_hash == task.hash and id(r) not in reasons:
                today.append(r)
                continue
            reason = f": {reasons[id(r)]}" if id(r) in reasons else " belongs to another definition of the task"
            remarks.append(f"{LEFT_OUT_PREFIX}{r.label}, seed {r.seed} ({origin}){reason}; run it again")
        grouped, odd = aggregate_seeds(today, origin)
        rows += grouped
        remarks += odd
    # Published rows are of whole data sets, and so is a task unless its file says otherwise.
    admitted = [row for row in rows if task.dataset.partial or not row.is_partial]
    reference = _choose_reference_result(task, admitted)
    comparable = [row for row in admitted if reference is None or not reason_not_to_pair(reference, row.results[0])]
    others = [row for row in rows if row not in comparable]
    shown = tuple(comparable)
    task_results = TaskResults(task, shown, shown, tuple(others), tuple(read_published_rows(task.name)), tuple(remarks))
    return task_results.select_recipes(())


def _list_result_folders(results: Path) -> list[tuple[Path, str]]:
    """Return the folders of results, with the origin of their rows."""
    own = packaged_results_folder()
    return [(own, STORED)] if results.resolve() == own.resolve() else [(results, "yours"), (own, STORED)]


def _choose_reference_result(task: Task, rows: Sequence[SeedAggregate]) -> Result | None:
    """Return a result on all episodes of the task, and on its data, with which others are compared.

    Where the task pins no data, those of the rows that come with the package count, if there are any.
    """
    results = [r for row in sorted(rows, key=lambda row: row.results_origin != STORED) for r in row.results]
    whole = [r for r in results if len(r.episodes) == task.evaluation.episodes]
    pinned = [r for r in whole if r.fingerprint == task.dataset.fingerprint]
    return next(iter(pinned or whole or results), None)


def load_variant_results(task: Task, results: Path) -> list[TaskResults]:
    """Load the rows of the tasks that are variants of a task, where there are any or some are left out.

    These are the packaged tasks that name it, and the task with changes (``glyphs-5shot+ways=10``) as far as results of
    it are stored.

    Args:
        task: the plain one.
        results: the folder of your results.
    """
    variants = {name: variant for name, variant in packaged_tasks().items() if variant.variant_of == task.name}
    folders = {
        path.name for root, _ in _list_result_folders(results) for path in root.glob(f"{task.name}+*") if path.is_dir()
    }
    for folder in sorted(folders):
        try:
            plain, change = split_task_name(folder)
            variant = apply_task_changes(task, change)
        except UserError:
            continue  # a folder that no run has made
        if plain == task.name and variant.name == folder:
            variants[folder] = variant
    results_of_tasks = [load_task_results(variant, results) for variant in variants.values()]
    return [
        task_results
        for task_results in results_of_tasks
        if not task_results.is_empty or task_results.remarks_on_left_out_rows
    ]


def append_remarks_of_hidden_tasks(
    shown: list[TaskResults], results_of_tasks: Iterable[TaskResults]
) -> list[TaskResults]:
    """Return the tasks shown, the last with the remarks on what was left out of the others, which have no table.

    Args:
        shown: those with a table.
        results_of_tasks: all tasks.
    """
    if not shown:
        return shown
    here = {id(task_results) for task_results in shown}
    lost = [
        remark
        for task_results in results_of_tasks
        if id(task_results) not in here
        for remark in task_results.remarks_on_left_out_rows
    ]
    return [*shown[:-1], replace(shown[-1], remarks=(*shown[-1].remarks, *lost))]


def make_no_results_error(task_results: TaskResults, method: str = "NAME") -> UserError:
    """Return the error for a task without any row.

    Args:
        task_results: of the task.
        method: of the command in the message that makes a row.
    """
    if task_results.hidden_rows:
        recipes = ", ".join(sorted({row.recipe for row in task_results.hidden_rows if row.recipe}))
        return UserError(
            f"task {task_results.task_name!r} has rows of other recipes alone ({recipes}): add --recipe all"
        )
    remarks = f" ({'; '.join(task_results.remarks)})" if task_results.remarks else ""
    return UserError(
        f"no results of task {task_results.task_name!r} are stored{remarks}; "
        f"make one with: ifsl-bench run --method {method} --task {task_results.task_name}"
    )


def load_results_of_tasks(
    tasks: Sequence[str], labels: Sequence[str], folders: Paths, recipes: Sequence[str] = ()
) -> list[TaskResults]:
    """Load the rows of some tasks.

    Args:
        tasks: their names; by default all tasks that have any row.
        labels: only rows of these, if any.
        folders: with your results and tasks.
        recipes: only rows of these, see :meth:`TaskResults.select_recipes`.

    Raises:
        UserError: an unknown task, label or recipe.
    """
    if odd := [name for name in tasks if not isinstance(name, str)]:
        raise UserError(f"tasks are names, one after the other, not {type(odd[0]).__name__}: {odd[0]!r:.60}")
    if files := [name for name in tasks if name.endswith(".json")]:
        raise UserError(f"{files[0]} is no task; a result file is shown by: ifsl-bench show {files[0]}")
    chosen = [task for name in tasks for task in load_tasks(name, home=folders)]
    results_of_tasks = [
        load_task_results(task, folders.results)
        for task in chosen or [*packaged_tasks().values(), *own_tasks(folders).values()]
    ]
    results_of_tasks = select_recipes(results_of_tasks, recipes)
    if labels:
        results_of_tasks = select_labels(
            results_of_tasks, labels, f"of {', '.join(tasks) or 'any task'}", f"ifsl-bench table {' '.join(tasks)}"
        )
    if tasks and not labels:
        return results_of_tasks
    return append_remarks_of_hidden_tasks(
        [task_results for task_results in results_of_tasks if not task_results.is_empty], results_of_tasks
    )


def select_recipes(results_of_tasks: Sequence[TaskResults], recipes: Sequence[str]) -> list[TaskResults]:
    """Return the tasks with the rows of some recipes, see :meth:`TaskResults.select_recipes`.

    Args:
        results_of_tasks: of the tasks.
        recipes: with their options.

    Raises:
        UserError: a recipe of which no row is stored.
    """
    known = {
        row.recipe
        for task_results in results_of_tasks
        for row in (*task_results.measured_rows, *task_results.hidden_rows)
        if row.recipe
    }
    for name in recipes:
        if name.lower() not in {ALL_RECIPES, *(recipe.lower() for recipe in known)}:
            tasks = (
                ", ".join(task_results.task_name for task_results in results_of_tasks)
                if len(results_of_tasks) < 4
                else "any task"
            )
            raise unknown_name_error("recipe", name, {ALL_RECIPES, *known}, where=f"in the rows of {tasks}")
    return (
        [task_results.select_recipes(recipes) for task_results in results_of_tasks] if recipes else [*results_of_tasks]
    )


def select_labels(
    results_of_tasks: Sequence[TaskResults], labels: Sequence[str], where: str, see: str
) -> list[TaskResults]:
    """Return the tasks with the rows of some labels alone.

    Args:
        results_of_tasks: of the tasks.
        labels: of the rows.
        where: the end of the message on an unknown label.
        see: the command that lists labels.

    Raises:
        UserError: a label that none of the tasks has.
    """
    labels_here = {label for task_results in results_of_tasks for label in task_results.labels}
    for label in labels:
        if not any(task_results.has_row(label) for task_results in results_of_tasks):
            raise unknown_name_error("row", label, labels_here, where=where, see=see.strip())
    return [task_results.select_labels(labels) for task_results in results_of_tasks]


def select_setting(results_of_tasks: Sequence[TaskResults], setting: str | None) -> list[TaskResults]:
    """Return the tasks with the rows of one setting.

    Args:
        results_of_tasks: of the tasks.
        setting: by default the one of methods as published.

    Raises:
        UserError: no row has that setting.
    """
    settings = {
        PAPER,
        *(row.ranking_setting for task_results in results_of_tasks for row in task_results.comparable_rows),
    } - {EVERY}
    if setting and setting not in settings:
        raise unknown_name_error("setting", setting, settings)
    return [task_results.select_setting(setting or PAPER) for task_results in results_of_tasks]


def load_measured_tasks(
    tasks: Sequence[str], labels: Sequence[str], folders: Paths, recipes: Sequence[str] = ()
) -> list[TaskResults]:
    """Load the rows of some tasks.

    Args:
        tasks: their names; by default all on which something is measured.
        labels: only rows of these, if any.
        folders: with your results and tasks.
        recipes: only rows of these, see :meth:`TaskResults.select_recipes`.

    Raises:
        UserError: an unknown task, label or recipe, or nothing is measured.
    """
    results_of_tasks = load_results_of_tasks(tasks, labels, folders, recipes)
    if not tasks:
        results_of_tasks = append_remarks_of_hidden_tasks(
            [task_results for task_results in results_of_tasks if task_results.rows], results_of_tasks
        )
        if not results_of_tasks:
            raise UserError("nothing is measured yet; make a row with: ifsl-bench run --method NAME --task TASK")
    return results_of_tasks


def load_results_by_name(task: str, folders: Paths) -> TaskResults:
    """Load the rows of a task.

    Args:
        task: its name.
        folders: with your results and tasks.

    Raises:
        UserError: there is no such task, or it is a file with several.
    """
    return load_task_results(load_task(task, folders), folders.results)


def find_row_or_raise(task_results: TaskResults, label: str) -> SeedAggregate:
    """Return a measured row.

    Args:
        task_results: of its task.
        label: of the row.

    Raises:
        UserError: there is none.
    """
    row = task_results.find_row(label)
    if row is not None:
        return row
    labels = {row.label for row in (*task_results.measured_rows, *task_results.hidden_rows)}
    about = (f"{LEFT_OUT_PREFIX}{label}, seed ", f"/{label}.seed-")
    if remarks := [remark for remark in task_results.remarks_on_left_out_rows if any(part in remark for part in about)]:
        raise UserError(f"there is no row {label} of task {task_results.task_name}; {remarks[0]}")
    if not labels:
        raise make_no_results_error(task_results, label)
    method = label.rpartition(":")[2]
    if refers_to_file(label) and (
        mine := [row_label for row_label in labels if parse_label(row_label).method_name == method]
    ):
        raise UserError(
            f"{label} is a method; its rows on {task_results.task_name} are called {', '.join(sorted(mine))}"
        )
    raise unknown_name_error(
        "row",
        label,
        labels,
        where=f"of task {task_results.task_name}",
        see=f"ifsl-bench table {task_results.task_name}",
    )


def find_row_to_compare_with(task_results: TaskResults, label: str, other_label: str) -> SeedAggregate:
    """Return the row that another one is to be compared with.

    Args:
        task_results: of the task.
        label: of the row; in sessions also ``lazy``, the lazy model of ``other_label``, and ``lazy (ROW)``, any row's.
        other_label: the label of the other row.

    Raises:
        UserError: there is no such row.
    """
    lazy = "lazy" in protocol_of_task(task_results.task).figures_and_tables and re.fullmatch(
        rf"{LAZY_ROW_LABEL}(?: \((.+)\))?", label
    )
    return (
        replace(base_only_aggregate(find_row_or_raise(task_results, lazy[1] or other_label)), label=label)
        if lazy
        else find_row_or_raise(task_results, label)
    )


class ComparedRows(NamedTuple):
    """Two rows to compare: the arguments of :func:`ifsl_bench.analysis.comparison.compare_rows`."""

    row_a: SeedAggregate
    row_b: SeedAggregate
    comparable_rows: tuple[SeedAggregate, ...] = ()
    same_label_rows: tuple[SeedAggregate, ...] = ()


def find_rows_to_compare(a: str, b: str, task: str | None, folders: Paths, recipe: str | None = None) -> ComparedRows:
    """Return two rows to compare, all rows that they are comparable with, and further rows of their labels.

    The rows that they are comparable with are those of their recipes.

    Args:
        a: a label, or a file.
        b: another one.
        task: the task of labels; None for files.
        folders: with your results and tasks.
        recipe: of rows whose labels name none; by default the task's own.

    Raises:
        UserError: there is no such row, recipe or file.
    """
    if recipe and (not task or recipe.lower() == ALL_RECIPES):
        raise UserError("--recipe takes one recipe here, of rows of a --task; other rows name theirs in their labels")
    if task:
        task_results = load_results_by_name(task, folders)
        if recipe:
            (of_recipe,) = select_recipes([task_results], [recipe])
            labels_of = {row.label_without_recipe.lower(): row.label for row in of_recipe.measured_rows}
            a, b = (labels_of.get(label.lower(), label) for label in (a, b))
        first, second = find_row_to_compare_with(task_results, a, b), find_row_to_compare_with(task_results, b, a)
        if {id(first.results), id(second.results)} & {id(row.results) for row in task_results.hidden_rows}:
            task_results = task_results.select_recipes([row.recipe for row in (first, second) if row.recipe])
        ranked = {id(row.results) for row in task_results.comparable_rows}  # a lazy model has the results of its row
        among = task_results.comparable_rows if {id(first.results), id(second.results)} <= ranked else ()
        typed = {a.lower(), b.lower()}
        labels = {
            row.label
            for row in (first, second)
            if not typed & {row.label_with_origin.lower(), row.name_with_origin.lower()}
        }
        return ComparedRows(
            first, second, among, tuple(row for row in task_results.measured_rows if row.label in labels)
        )
    for name in (a, b):
        if not os.path.exists(name):
            raise UserError(f"there is no result file {name}; to compare labels of a task, add --task TASK")
    results = [read_result(Path(name)) for name in (a, b)]
    names = [f"{result.label}.seed-{result.seed}" for result in results]
    names = [a, b] if names[0] == names[1] else names
    first, second = (SeedAggregate(name, FILE, (result,)) for name, result in zip(names, results, strict=True))
    return ComparedRows(first, second)
