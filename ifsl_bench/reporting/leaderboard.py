"""The tables of tasks: measured and published rows by accuracy, or ranked and with variants. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from ifsl_bench.analysis.aggregate import COMPUTED_ORIGIN, STORED, list_notes_on_solve_failures
from ifsl_bench.analysis.task_results import (
    TaskResults,
    append_remarks_of_hidden_tasks,
    load_variant_results,
    make_no_results_error,
)
from ifsl_bench.plugin.display_names import display_name_of_label
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.columns import TableRow, list_table_rows, round_unless_nan, task_columns
from ifsl_bench.reporting.notes import explain_calibration, rank_notes, recipe_notes, table_notes
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.store.published import SOURCE_KINDS, PublishedRow, PublishedSequence, published_task_names
from ifsl_bench.utils.text_format import format_count, join_or

SESSION_COLUMN_HEADINGS = ("Avg.", "gain", "base", "novel", "harmonic", "gAcc")
OVERVIEW_COLUMN_HEADINGS = (
    "rank",
    "method",
    "Acc.",
    "cal. Acc.",
    "Delta",
    *SESSION_COLUMN_HEADINGS,
    "seeds",
    "source",
)  # headings
COMMON_SEEDS_NOTE = (
    "Rows of other seeds stand where their difference to the best row, on the seeds that both have, puts them."
)
RANK_NOTE_TEMPLATE = (
    "Rank: the places by {} that a row can have, for all rows at once with 95% confidence: from 1 plus the number of "
    "rows that are significantly better, to the number of rows minus those that are significantly worse. Differences "
    "vary over {} and over training seeds, and over test images where results record these; novel classes are held "
    "fixed. A row with fewer than three seeds, with options of its own, or trained mostly with another gradient than "
    "it names, is provisional: shown in its place, without a rank. Rows are ordered by their difference from the best "
    "row, on the seeds that both have. Rows that are not tuned are ranked apart from tuned ones (--setting). Each of "
    "your rows, and each row of fewer seeds than three in four others have, is ranked with the others, "
    "without its like."
)
PUBLISHED_METRICS = ("acc", "first", "last", "pd", "gain", "base", "novel")  # metrics of published rows in sessions
DROP_PRIORITY_OF_PUBLISHED_METRIC = {"pd": 2, "first": 3, "base": 5, "novel": 4}
DIFFERENT_BACKBONES_NOTE = (
    "Published rows use other backbones than measured ones, or do not say which: do not compare their accuracies, and "
    "compare gains with care."
)
PUBLISHED_NOTES = [
    "Published: as printed, without intervals; means of several runs where a note says so. Ranked nowhere, in no "
    "significance test. Sources that contradict each other stand side by side.",
    DIFFERENT_BACKBONES_NOTE,
    "gain: how far Avg. is above that of a model with the same A_0 which never answers with a novel class.",
    "kind: who prints the numbers; cited: another paper repeats them; rerun: another paper ran the method itself.",
]


def make_task_tables(
    task_results: TaskResults, full: bool = False, ranked: bool = False
) -> list[Table[TableRow] | Table[PublishedRow]]:
    """Return the table of a task, and for one in sessions the rows that papers print, in a table of their own.

    Args:
        task_results: the results of a task.
        full: see :func:`make_task_table`.
        ranked: see :func:`make_task_table`.
    """
    printed = make_published_tables(task_results, full)
    if printed and not (task_results.rows or task_results.incomparable_rows):
        return [*printed]
    return [make_task_table(task_results, full, ranked), *printed]


def make_task_table(task_results: TaskResults, full: bool = False, ranked: bool = False) -> Table[TableRow]:
    """Return the table of one task: measured and published rows by accuracy, then rows that are not comparable.

    Measured rows are placed as :meth:`ifsl_bench.analysis.ranking.Ranking.adjusted_mean` has it, by what they differ in
    on the seeds that they share.

    Args:
        task_results: the results of the task.
        full: with all columns that :func:`ifsl_bench.reporting.columns.task_columns` has.
        ranked: with the ranks of measured rows; rows of other protocols come last.

    Raises:
        UserError: there is no row, and none to rank in another setting.
    """
    if task_results.is_empty and not ranked:
        raise make_no_results_error(task_results)

    def order(entry: TableRow) -> tuple[int, float]:
        row, place = entry.measured_row, entry.ranked_row
        if not entry.is_comparable and (row or ranked):
            return 1 if row else 2, 0.0
        return 0, -(
            place.adjusted_mean
            if place
            else task_results.ranking.adjusted_mean(row)
            if row
            else entry.metric_estimates["acc"].mean
        )

    entries = sorted(list_table_rows(task_results, ranked), key=order)
    metrics = {name for entry in entries for name in entry.metric_estimates}
    shared = [entry for entry in entries if entry.row_kind == COMPUTED_ORIGIN and "," in entry.published_note]
    notes = [
        *table_notes(task_results),
        *(f"{display_name_of_label(entry.label)}: {entry.published_note}." for entry in shared),
    ]
    notes += [explain_calibration(task_results.task)] if "calibrated_acc" in metrics else []
    means = [
        entry.metric_estimates["acc"].mean
        for entry in entries
        if entry.is_comparable and entry.row_kind != COMPUTED_ORIGIN
    ]
    title = task_results.task_name
    if ranked:
        title += (
            f", a variant of {task_results.task.variant_of}: not comparable with it"
            if task_results.task.variant_of
            else ""
        )
        notes += rank_notes(task_results)
    elif any(above < below for above, below in itertools.pairwise(means)):
        notes.append(COMMON_SEEDS_NOTE)
    recipes = any(row.has_other_recipe for row in task_results.measured_rows)
    columns = task_columns(task_results.task, full, ranked, metrics, recipes)
    return Table(columns, entries, title, notes, is_own_row=_is_own_row, keeps_all_columns=full)


def make_leaderboard_tables(
    results_of_tasks: Iterable[TaskResults], results: Path, full: bool = False, labels: Collection[str] = ()
) -> tuple[list[Table[TableRow] | Table[PublishedRow]], str]:
    """Return the ranked tables of tasks and of their variants, and the notes below all of them.

    Args:
        results_of_tasks: see :func:`add_variants`.
        results: see :func:`add_variants`.
        full: see :func:`make_task_table`.
        labels: see :func:`add_variants`.
    """
    shown = add_variants(results_of_tasks, results, labels)
    ranked = [task_results.task for task_results in shown if len(task_results.comparable_rows) > 1]
    names = join_or(protocol_of_task(task).metric_column("acc").title for task in ranked)
    closing = (
        RANK_NOTE_TEMPLATE.format(names, join_or(protocol_of_task(task).interval_units_noun for task in ranked))
        if ranked
        else ""
    )
    return [table for task_results in shown for table in make_task_tables(task_results, full, ranked=True)], closing


def make_short_task_tables(results_of_tasks: Iterable[TaskResults]) -> tuple[list[Table[TableRow]], str]:
    """Return a table of the best three ranked rows and the user's own for each task, and a closing text.

    The tables have few columns, and the text tells where others are. Lazy rows of these are shown too.
    """
    tables, results_of_tasks = [], list(results_of_tasks)
    for task_results in results_of_tasks:
        whole = make_task_table(task_results, ranked=True)
        best = {
            place.row
            for place in (
                [place for place in task_results.ranked_rows if place.rank_interval] or task_results.ranked_rows
            )[:3]
        }
        own = [entry for entry in whole.rows if entry.ranked_row and (entry.measured_row in best or _is_own_row(entry))]
        firsts = {f"{entry.accuracy_after_sessions[0].mean:.2f}" for entry in own if entry.accuracy_after_sessions}
        shown = [
            e
            for e in whole.rows
            if e in own or (e.row_kind == COMPUTED_ORIGIN and f"{e.accuracy_after_sessions[0].mean:.2f}" in firsts)
        ]
        columns = [column for column in whole.columns if column.heading in OVERVIEW_COLUMN_HEADINGS]
        count = len(whole.rows) - len(shown)
        notes = [f"{format_count(count, 'more row')}: ifsl-bench leaderboard {task_results.task_name}"] if count else []
        notes += list_notes_on_solve_failures(
            {row.name_with_origin: row.solve_failures for entry in own if (row := entry.measured_row)}
        )
        notes += [*recipe_notes(task_results), *(f"{remark}." for remark in task_results.remarks_on_left_out_rows)]
        tables.append(replace(whole, columns=columns, rows=shown, notes=notes))
    units = join_or(protocol_of_task(task_results.task).interval_units_noun for task_results in results_of_tasks)
    closing = (
        f"Measured: mean ± 95% interval over {units}, averaged over seeds, in percent; rows that are not tuned. "
        "`ifsl-bench leaderboard TASK` has all rows and columns, and says what ranks are; `ifsl-bench leaderboard "
        "--full` has them of all tasks."
    )
    here = {task_results.task_name for task_results in results_of_tasks}
    if printed := [name for name in published_task_names() if name not in here]:
        more = ", ".join(printed[:-1])
        closing += f" Tasks with published numbers only: `ifsl-bench leaderboard {printed[-1]}`, and {more}."
    return tables, closing


def _is_own_row(entry: TableRow) -> bool:
    return entry.measured_row is not None and entry.measured_row.results_origin != STORED


def make_published_tables(task_results: TaskResults, full: bool = False) -> list[Table[PublishedRow]]:
    """Return the table of what papers and authors print of a task in sessions, by method; none where there is nothing.

    Args:
        task_results: the results of the task.
        full: with the accuracy after each session.
    """
    rows = sorted(
        (paper for paper in task_results.published_rows if paper.sequence), key=lambda paper: paper.label.lower()
    )
    if not rows:
        return []
    notes = [*PUBLISHED_NOTES]
    if rows[0].protocol:
        notes.append("They are of one order of the classes and one support set.")
    labels: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        labels.setdefault((row.source, row.note), []).append(row.label)
    notes += [f"{', '.join(of_note)} ({source}): {note}." for (source, note), of_note in labels.items() if note]
    return [
        Table(
            _published_columns(task_results, full),
            rows,
            f"{task_results.task_name}: published numbers",
            notes,
            keeps_all_columns=full,
        )
    ]


def _published_columns(task_results: TaskResults, full: bool) -> list[Column[PublishedRow]]:
    def sequence(row: PublishedRow) -> PublishedSequence:
        assert row.sequence is not None
        return row.sequence

    def metric(name: str) -> Column[PublishedRow]:
        return Column(
            protocol_of_task(task_results.task).metric_column(name).title,
            lambda row: f"{row.values[name]:.2f}" if name in row.values else "",
            lambda row: {name: round_unless_nan(row.values[name]) if name in row.values else None},
            drop_priority=DROP_PRIORITY_OF_PUBLISHED_METRIC.get(name, 0),
        )

    def after(t: int) -> Column[PublishedRow]:
        return Column(
            f"A_{t}" if full else None,
            lambda row: f"{sequence(row).after[t]:.2f}",
            lambda row: {f"a_{t}": sequence(row).after[t]},
        )

    def flags(row: PublishedRow) -> dict[str, bool | str | None]:
        """Return the flags for programs; None where no source states one."""
        of_row = sequence(row)
        return {
            "chosen_on_test": of_row.chosen_on_test,
            "keeps_images": of_row.images or None,
            "knows_classes": of_row.knows_classes,
            "novel_seen": of_row.novel_seen,
        }

    def source(row: PublishedRow) -> dict[str, str | int | None]:
        return {"source": f"published: {row.source}", "seeds": sequence(row).seeds, "note": row.note or None}

    fixed = {"task": task_results.task_name, "kind": "published", "comparable": False}
    first, *others = (metric(name) for name in PUBLISHED_METRICS if not (full and name in ("first", "last")))
    return [
        Column(make_record_fields=lambda row: fixed),
        Column("method", lambda row: row.label, lambda row: {"method": row.label}, min_fold_width=14),
        first,
        *map(after, protocol_of_task(task_results.task).sessions_in_tables(task_results.task)),
        *others,
        Column(
            "kind",
            lambda row: SOURCE_KINDS[sequence(row).kind],
            lambda row: {"published_as": sequence(row).kind},
            min_fold_width=10,
        ),
        Column(
            "backbone",
            lambda row: sequence(row).backbone or "not said",
            lambda row: {"backbone": sequence(row).backbone or None},
            min_fold_width=10,
            drop_priority=1,
        ),
        Column("flags", lambda row: sequence(row).flags_in_words, flags, min_fold_width=20),
        Column("source", lambda row: row.source, source, min_fold_width=11),
    ]


def add_variants(results_of_tasks: Iterable[TaskResults], results: Path, labels: Collection[str]) -> list[TaskResults]:
    """Return each task that has rows, followed by its variants that are not among the tasks themselves.

    Variants of which nothing but stored rows is known are named below the task that they are of, where it has rows.

    Args:
        results_of_tasks: of the tasks to show.
        results: the folder in which variants are looked for.
        labels: of the only rows to show of the variants, as ``results_of_tasks`` may be of some rows alone; all if
            empty.

    Raises:
        UserError: nothing is stored of a task, nor of a variant of it.
    """
    named = {task_results.task_name: task_results for task_results in results_of_tasks}
    shown: dict[str, TaskResults] = {}
    every: list[TaskResults] = []
    for task_results in named.values():
        variants = [
            variant for variant in load_variant_results(task_results.task, results) if variant.task_name not in named
        ]
        variants = [
            variant.select_recipes(task_results.recipes).select_setting(task_results.ranking_setting)
            for variant in variants
        ]
        if labels:
            variants = [variant.select_labels(labels) for variant in variants]
        every += (task_results, *variants)
        if all(task_results.is_empty for task_results in (task_results, *variants)):
            if labels and not all(other.is_empty for other in named.values()):
                continue
            raise make_no_results_error(task_results)
        if not task_results.is_empty:
            stored = [v for v in variants if all(row.results_origin == STORED for row in v.measured_rows)]
            variants = [variant for variant in variants if variant not in stored]
            if names := [variant.task_name for variant in stored if not variant.is_empty]:
                short = ", ".join(name.removeprefix(task_results.task_name) for name in names)
                remark = f"Stored as well: {short} (`ifsl-bench leaderboard {names[0]}`)"
                task_results = replace(task_results, remarks=(*task_results.remarks, remark))
        shown |= {b.task_name: b for b in (task_results, *variants) if not b.is_empty}
    return append_remarks_of_hidden_tasks(list(shown.values()), [variant for variant in every if variant.is_empty])
