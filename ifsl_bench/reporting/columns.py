"""The rows of a task's table as numbers, and the columns that tables of every format choose from. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ifsl_bench.analysis.aggregate import COMPUTED_ORIGIN, SeedAggregate, group_by_base_only
from ifsl_bench.analysis.ranking import RankedRow, RowDifference
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.display_names import LAZY_ROW_LABEL, display_name_of_label
from ifsl_bench.protocols.metrics import EPISODE_METRIC_NAMES, Estimate, PairedDifference
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.contamination import ROW_NOTE_OF_SEEN_LEVEL
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.table import Column


@dataclass(frozen=True, eq=False)
class TableRow:
    """One row of a task's table.

    Attributes:
        is_comparable: whether it is of the task's own protocol, episodes and data.
        metric_estimates: metric -> mean and half-width of its 95% interval, in percent, unrounded; the interval of
            published numbers is NaN.
        accuracy_after_sessions: in sessions, mean and interval of the accuracy after each session.
        label_marks: of a published row in sessions, letters of :data:`~ifsl_bench.store.published.FLAG_LETTERS`.
        source_text: "stored" or "yours" for measured rows, "computed" for lazy ones, the key of the paper for published
            ones.
        printed_interval: the +- that a paper prints next to its accuracy, of unknown kind.
        n_seeds: how many training seeds.
        sd_of_seeds: standard deviation between the seeds' accuracies; NaN for fewer than two.
        is_partial: whether it was measured on a part of the data; None for published rows.
        ranked_row: ranks and distance from the best, where rows were ranked and this one is comparable with them.
        published_note: what a reader should know of a published row.
        measured_row: the row that it was made from; None for published rows.
    """

    task: Task
    is_comparable: bool
    label: str
    metric_estimates: Mapping[str, Estimate]
    source_text: str
    printed_interval: float | None = None
    n_seeds: int | None = None
    sd_of_seeds: float = math.nan
    is_partial: bool | None = None
    ranked_row: RankedRow | None = None
    published_note: str = ""
    measured_row: SeedAggregate | None = None
    accuracy_after_sessions: Sequence[Estimate] = ()
    label_marks: str = ""

    @property
    def row_kind(self) -> str:
        """Return "measured", "computed" or "published"."""
        return (
            "measured" if self.measured_row else COMPUTED_ORIGIN if self.source_text == COMPUTED_ORIGIN else "published"
        )


def list_table_rows(task_results: TaskResults, in_rank_order: bool = False) -> list[TableRow]:
    """Return comparable measured rows, lazy rows, other measured ones and published ones.

    Published rows in sessions have a table of their own, see
    :func:`ifsl_bench.reporting.leaderboard.make_published_tables`.

    Args:
        task_results: the results of a task.
        in_rank_order: put comparable rows in the order of their ranks, which are among all of the task's comparable
            rows, whichever are shown.
    """
    if in_rank_order:
        comparable = [_measured_table_row(task_results, place.row, True, place) for place in task_results.ranked_rows]
    else:
        comparable = [_measured_table_row(task_results, row, True) for row in task_results.rows]
    others = [_measured_table_row(task_results, row, False) for row in task_results.incomparable_rows]
    papers = (
        [] if protocol_of_task(task_results.task).has_separate_published_table else published_table_rows(task_results)
    )
    return [*comparable, *_base_only_table_rows(task_results), *others, *papers]


def _measured_table_row(
    task_results: TaskResults, row: SeedAggregate, comparable: bool, place: RankedRow | None = None
) -> TableRow:
    return TableRow(
        task_results.task,
        comparable,
        row.label,
        row.summarise_metrics(),
        row.results_origin,
        n_seeds=len(row.results),
        sd_of_seeds=row.sd_of_seeds(),
        is_partial=row.is_partial,
        ranked_row=place,
        measured_row=row,
        accuracy_after_sessions=row.metric_after_sessions(),
    )


def _base_only_table_rows(task_results: TaskResults) -> list[TableRow]:
    """Return the rows, in sessions, of models that never answer with a novel class, each named after a row of its A_0.

    There is none in episodes.
    """
    rows = [
        (lazy, alike)
        for lazy, alike in group_by_base_only(task_results.rows)
        if LAZY_ROW_LABEL not in {row.label for row in alike}
    ]
    entries = []
    for lazy, alike in rows:
        labels = list(dict.fromkeys(row.label for row in alike))
        plainest = min(labels, key=lambda label: "." in label)
        name = LAZY_ROW_LABEL if len(rows) == 1 else f"{LAZY_ROW_LABEL} ({plainest})"
        note, after = f"the A_0 of {', '.join(map(display_name_of_label, labels))}", lazy.metric_after_sessions()
        entry = TableRow(
            task_results.task,
            True,
            name,
            lazy.summarise_metrics(),
            COMPUTED_ORIGIN,
            n_seeds=len(lazy.seeds),
            published_note=note,
            accuracy_after_sessions=after,
        )
        entries.append(entry)
    return entries


def published_table_rows(task_results: TaskResults) -> list[TableRow]:
    """Return the published rows of a task, whose numbers have no intervals."""
    entries = []
    for paper in task_results.published_rows:
        values = {name: Estimate(value, math.nan) for name, value in paper.values.items()}
        entry = TableRow(
            task_results.task,
            not paper.protocol,
            paper.label,
            values,
            paper.source,
            printed_interval=paper.values.get("plus_minus_as_printed"),
            published_note=paper.joined_notes,
            accuracy_after_sessions=[Estimate(value, math.nan) for value in paper.sequence.after]
            if paper.sequence
            else (),
            label_marks=paper.sequence.flag_letters if paper.sequence else "",
        )
        entries.append(entry)
    return entries


FIRST_AND_LAST_METRICS = (
    "first",
    "last",
)  # A_0 and A_T, which tables with the accuracy after each session need not have
FEW_SEEDS_MARK = " *"
UNKNOWN_ESTIMATE = Estimate(math.nan, math.nan)


def task_columns(
    task: Task,
    full: bool = False,
    ranked: bool = False,
    row_metrics: Collection[str] = EPISODE_METRIC_NAMES,
    recipes: bool = False,
) -> list[Column[TableRow]]:
    """Return the columns of a task's table.

    Args:
        task: the task.
        full: add the joint and alone accuracies of base and novel classes, and what weighs one against the other; in
            sessions, the accuracy after each, and every metric.
        ranked: add the rank, and how far each row is from the best.
        row_metrics: the metrics that some row has. Readers are not shown what no row has; programs get it always.
        recipes: whether some row is of another recipe than the task's own, so that costs of training differ.
    """
    protocol = protocol_of_task(task)
    shown = (
        protocol.full_table_metrics
        if full
        else [column.name for column in protocol.metric_columns if column.is_in_short_tables]
    )
    hidden = [name for name in protocol.data_only_metrics if name not in shown]
    if full:
        hidden += [name for name in shown if name in FIRST_AND_LAST_METRICS]
    metrics = [
        _metric_column(name, task, protocol.shows_metric(name, row_metrics), ranked)
        for name in shown
        if not (full and name in FIRST_AND_LAST_METRICS)
    ]
    metrics[2:2] = [_session_accuracy_column(t, full) for t in protocol.sessions_in_tables(task)]
    metrics += [_metric_column(name, task, False) for name in hidden]
    return [
        Column(make_record_fields=lambda entry: {"task": entry.task.name}),
        *([Column(make_record_fields=_comparable_fields), rank_column] if ranked else []),
        Column(
            "method",
            lambda entry: display_name_of_label(entry.label),
            lambda entry: {"method": entry.label},
            min_fold_width=14,
        ),
        *metrics,
        *([Column("to the best", _format_difference_to_best, drop_priority=5)] if ranked else []),
        *fact_columns(task, full, recipes),
        _source_column(ranked),
        Column(make_record_fields=_data_fields),
        *([Column(make_record_fields=_difference_to_best_fields)] if ranked else []),
    ]


def fact_columns(task: Task, full: bool, recipes: bool = False) -> list[Column[TableRow]]:
    """Return the columns of facts of a row beside its metrics, in their order: a further one is an entry here.

    Every format has it: papers' LaTeX, with ``--full``, where it has a ``latex_heading``.

    Args:
        task: the task.
        full: add what only full tables show.
        recipes: whether some row is of another recipe than the task's own.
    """
    return [
        *([state_size_column] if protocol_of_task(task).learns_sessions else []),
        Column("seeds", lambda entry: str(entry.n_seeds or ""), lambda entry: {"seeds": entry.n_seeds}),
        Column(
            "sd of seeds",
            _format_sd_of_seeds,
            lambda entry: {"sd_of_seeds": round_unless_nan(entry.sd_of_seeds)},
            drop_priority=7,
        ),
        Column("trials" if full else None, _format_trials, _trials_fields, min_fold_width=8),
        *([training_cost_column] if full and recipes else []),
    ]


def paper_columns(
    task: Task,
    full: bool = False,
    ranked: bool = False,
    row_metrics: Collection[str] = EPISODE_METRIC_NAMES,
    recipes: bool = False,
) -> list[Column[TableRow]]:
    """Return the columns of a task's table in the layout of papers; arguments as :func:`task_columns`.

    Args:
        task: the task.
        full: add the columns that papers have in further tables, such as Delta_a and Delta_b.
        ranked: add the ranks that each measured row can have.
        row_metrics: the metrics that some row has.
        recipes: whether some row is of another recipe than the task's own.
    """
    protocol = protocol_of_task(task)
    names = [
        column.name
        for column in protocol.metric_columns
        if column.latex_title
        and (full or column.is_in_short_latex_tables)
        and protocol.shows_metric(column.name, row_metrics)
    ]
    curve = protocol.sessions_in_tables(task)
    columns = [_metric_column(name, task, True) for name in names if not (curve and name in FIRST_AND_LAST_METRICS)]
    if curve:
        columns.sort(key=lambda column: column.name == "calibrated_acc")
        between = [_session_accuracy_column(t, True) for t in curve[1:-1]]
        columns = [_metric_column("first", task, True), *between, _metric_column("last", task, True), *columns]
    facts = [column for column in fact_columns(task, full, recipes) if full and column.latex_heading]
    return [*columns, *facts, *([rank_column] if ranked else [])]


def metric_name_column(protocol: Protocol) -> Column[str]:
    """Return the column with the name of a metric."""
    return Column("metric", lambda name: protocol.metric_column(name).title, lambda name: {"metric": name})


def format_plus_minus(value: Estimate | PairedDifference | RowDifference, sign: str = "") -> str:
    """Return mean ± interval with two digits, or the mean alone where there is no interval.

    Args:
        value: the mean and its interval.
        sign: "+" to show the sign of a positive mean too.
    """
    mean = f"{value.mean:{sign}.2f}"
    return mean if math.isnan(value.interval) else f"{mean} ± {value.interval:.2f}"


def round_unless_nan(value: float, digits: int = 4) -> float | None:
    """Return a number for programs, None for NaN.

    Args:
        value: a number; NaN where there is none.
        digits: after the decimal point.
    """
    return None if math.isnan(value) else round(value, digits)


def _metric_column(name: str, task: Task, shown: bool, ranked: bool = False) -> Column[TableRow]:
    """Return the column of a metric in percent; for programs alone unless ``shown``."""
    column = protocol_of_task(task).metric_column(name)

    def text(entry: TableRow) -> str:
        if name not in entry.metric_estimates:
            return ""
        printed = f" ({entry.printed_interval:.2f})" if name == "acc" and entry.printed_interval is not None else ""
        return format_plus_minus(entry.metric_estimates[name]) + printed

    def fields(entry: TableRow) -> dict[str, float | None]:
        value = entry.metric_estimates.get(name, UNKNOWN_ESTIMATE)
        return {name: round_unless_nan(value.mean), f"{name}_interval": round_unless_nan(value.interval)}

    def bold(entry: TableRow) -> bool:
        return ranked and name == "acc" and entry.ranked_row is not None and entry.ranked_row.may_be_best_row

    def latex(entry: TableRow, is_bold: bool) -> str:
        """Return a number as papers print it: with its ± next to an accuracy only."""
        if name not in entry.metric_estimates:
            return ""
        value = entry.metric_estimates[name]
        number = f"{value.mean:.2f}".replace("-", "$-$")  # not a hyphen
        number = rf"\textbf{{{number}}}" if is_bold else number
        interval = value.interval if entry.printed_interval is None else entry.printed_interval
        has_interval = name in ("acc", "calibrated_acc") and not math.isnan(interval)
        return rf"{number} $\pm$ {interval:.2f}" if has_interval else number

    return Column(
        column.title if shown else None,
        text,
        fields,
        bold,
        drop_priority=column.drop_priority,
        name=name,
        latex_heading=column.latex_title,
        format_latex=latex,
    )


def _session_accuracy_column(t: int, shown: bool) -> Column[TableRow]:
    """Return the column of the accuracy after session t; for programs alone unless ``shown``."""

    def fields(entry: TableRow) -> dict[str, float | None]:
        value = entry.accuracy_after_sessions[t] if entry.accuracy_after_sessions else UNKNOWN_ESTIMATE
        return {f"a_{t}": round_unless_nan(value.mean), f"a_{t}_interval": round_unless_nan(value.interval)}

    return Column(
        f"A_{t}" if shown else None,
        lambda entry: format_plus_minus(entry.accuracy_after_sessions[t]) if entry.accuracy_after_sessions else "",
        fields,
        latex_heading=str(t),
        format_latex=lambda entry, _: (
            f"{entry.accuracy_after_sessions[t].mean:.2f}" if entry.accuracy_after_sessions else ""
        ),
    )


def _comparable_fields(entry: TableRow) -> dict[str, str | bool | None]:
    return {"variant_of": entry.task.variant_of or None, "kind": entry.row_kind, "comparable": entry.is_comparable}


def _format_ranks(entry: TableRow) -> str:
    """Return the ranks that a row can have, "-" where it is provisional."""
    if entry.ranked_row is None:
        return ""
    return "-" if entry.ranked_row.rank_interval is None else str(entry.ranked_row.rank_interval)


def _rank_fields(entry: TableRow) -> dict[str, int | bool | None]:
    ranks = entry.ranked_row.rank_interval if entry.ranked_row else None
    return {
        "rank_first": ranks.best_rank if ranks else None,
        "rank_last": ranks.worst_rank if ranks else None,
        "provisional": entry.ranked_row.is_provisional if entry.ranked_row else None,
    }


def _state_bytes(entry: TableRow) -> float:
    """Return the bytes that a row carries on for each novel class; NaN where that is not known."""
    if entry.measured_row is None:
        return 0.0 if entry.row_kind == COMPUTED_ORIGIN else math.nan
    size = entry.measured_row.state_bytes_per_class
    return math.nan if size is None else size


def _format_state_bytes(entry: TableRow) -> str:
    return "" if math.isnan(_state_bytes(entry)) else f"{_state_bytes(entry):,.0f}"


rank_column = Column[TableRow](
    "rank",
    _format_ranks,
    _rank_fields,
    latex_heading="rank",
    format_latex=lambda entry, _: _format_ranks(entry).replace("-", "--"),  # an en dash
)
state_size_column = Column[TableRow](
    "bytes/class",
    _format_state_bytes,
    lambda entry: {"state_bytes_per_class": round_unless_nan(_state_bytes(entry))},
    drop_priority=8,
    name="state",
    latex_heading="bytes/class",
    format_latex=lambda entry, _: _format_state_bytes(entry),
)


def _format_training(entry: TableRow) -> str:
    """Return the steps of the backbone's training, and the passes of the backbone that each takes for an image."""
    facts = recipe_facts(entry.measured_row, entry.task)
    return f"{facts['pretraining_steps']:,} x {facts['passes']:g}" if facts["recipe"] else ""


def recipe_facts(row: SeedAggregate | None, task: Task) -> dict[str, Any]:
    """Return the recipe of a row, its steps of training, passes in a step, and whether it knows the number of classes.

    Args:
        row: a measured row; all is None without one, or where its backbone was not trained on the task's images.
        task: the row's.
    """
    if row is None or row.recipe is None:
        return dict.fromkeys(("recipe", "pretraining_steps", "passes", "knows_classes"))
    facts = row.results[0].pretraining
    return {
        "recipe": row.recipe,
        "pretraining_steps": facts.get("steps", task.pretraining.steps),
        "passes": facts.get("passes", 1.0),
        "knows_classes": row.knows_number_of_classes,
    }


training_cost_column = Column[TableRow](
    "steps x passes",
    _format_training,
    drop_priority=6,
    latex_heading=r"steps $\times$ passes",
    format_latex=lambda entry, _: _format_training(entry).replace("x", r"$\times$"),
)


def _format_sd_of_seeds(entry: TableRow) -> str:
    return "" if math.isnan(entry.sd_of_seeds) else f"{entry.sd_of_seeds:.2f}"


def _format_trials(entry: TableRow) -> str:
    """Return how many settings the options were chosen from, and which of them are at an end of what was tried."""
    row = entry.measured_row
    if row is None:
        return ""
    return f"{row.n_trials}, edge: {', '.join(row.options_at_edge)}" if row.options_at_edge else f"{row.n_trials}"


def _trials_fields(entry: TableRow) -> dict[str, str | int | None]:
    row = entry.measured_row
    if row is None:
        return {"setting": None, "trials": None, "edge": None}
    return {"setting": row.ranking_setting, "trials": row.n_trials, "edge": ", ".join(row.options_at_edge)}


def list_remarks(row: SeedAggregate) -> list[str]:
    """Return the remarks on a measured row: what its method sees and keeps, and what its backbone saw and knows."""
    remarks = (
        "transductive" if row.is_transductive else "",
        *row.method_flags,
        f"keeps {row.images_kept_by_method}" if row.images_kept_by_method else "",
        ROW_NOTE_OF_SEEN_LEVEL[row.novel_classes_seen],
        "knows the number of classes" if row.knows_number_of_classes else "",
    )
    return [remark for remark in remarks if remark]


def _source_column(ranked: bool) -> Column[TableRow]:
    """Return the column of a row's source, with remarks; ranked tables have ``comparable`` for programs instead."""

    def plain(entry: TableRow) -> str:
        marks = f" ({', '.join(entry.label_marks)})" if entry.label_marks else ""
        return f"published: {entry.source_text}{marks}" if entry.row_kind == "published" else entry.source_text

    def text(entry: TableRow) -> str:
        parts = [plain(entry), *(list_remarks(entry.measured_row) if entry.measured_row else [])]
        if not entry.is_comparable and (entry.measured_row or ranked):
            parts.append("not comparable" if entry.measured_row else "other protocol")
        return ", ".join(parts)

    return Column("source", text, lambda entry: {"source": plain(entry) if ranked else text(entry)}, min_fold_width=11)


def _data_fields(entry: TableRow) -> dict[str, bool | str | float | None]:
    novel_seen = entry.measured_row.novel_classes_seen if entry.measured_row else None
    return {"partial_data": entry.is_partial, "novel_seen": novel_seen, **recipe_facts(entry.measured_row, entry.task)}


def _format_difference_to_best(entry: TableRow) -> str:
    """Return the difference to the best row, with a mark where it is over episodes alone.

    :func:`ifsl_bench.reporting.notes.rank_notes` explains the mark.
    """
    if not (entry.ranked_row and entry.ranked_row.difference_to_best):
        return ""
    few = entry.ranked_row.n_common_seeds < 2 and not entry.ranked_row.row.has_single_interval_unit
    return format_plus_minus(entry.ranked_row.difference_to_best, "+") + (FEW_SEEDS_MARK if few else "")


def _difference_to_best_fields(entry: TableRow) -> dict[str, float | str | None]:
    """Return the difference to the best row, and what papers print with their numbers."""
    gap = entry.ranked_row.difference_to_best if entry.ranked_row else None
    return {
        "to_best": round_unless_nan(gap.mean) if gap else None,
        "to_best_interval": round_unless_nan(gap.interval) if gap else None,
        "common_seeds": entry.ranked_row.n_common_seeds if entry.ranked_row else None,
        "plus_minus_as_printed": entry.printed_interval,
        "note": entry.published_note or None,
    }
