"""Tables of differences: of two rows, of measured and printed rows, and the variance of rows in sessions. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ifsl_bench.analysis.aggregate import STORED, SeedAggregate, unique_row_names
from ifsl_bench.analysis.comparison import MANY_EPISODES_THRESHOLD, UNKNOWN_ESTIMATE, Comparison, describe_verdict
from ifsl_bench.analysis.published_comparison import (
    OUTSIDE,
    PublishedPair,
    count_order_agreements,
    pair_with_published_rows,
)
from ifsl_bench.analysis.ranking import RowDifference
from ifsl_bench.analysis.session_variance import (
    DESIGN_VARIANCE_SOURCES,
    IMAGE_SOURCE_NAME,
    SINGLE_VALUE_VARIANCE_KEY,
    VarianceEstimate,
    VarianceSplit,
    WrongSignChance,
    split_variance_of_differences,
    split_variance_of_rows,
)
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.display_names import display_name_of_label
from ifsl_bench.protocols.metrics import Estimate, PairedDifference
from ifsl_bench.protocols.registry import protocol_of_task, title_by_metric
from ifsl_bench.reporting.columns import format_plus_minus, metric_name_column, round_unless_nan
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.utils.text_format import format_p_value, format_seeds


def comparison_table(comparison: Comparison) -> Table[str]:
    """Return a row for each metric: A - B, first with the interval that claims about methods need."""
    several, units, images = len(comparison.seeds) > 1, comparison.interval_units_noun, bool(comparison.image_intervals)

    def record(name: str) -> dict[str, Any]:
        over, seeds, both = (
            comparison.episode_differences[name],
            comparison.mean_seed_differences[name],
            comparison.overall_differences[name],
        )
        classes = comparison.class_intervals.get(name, UNKNOWN_ESTIMATE).interval
        return {
            "difference": round_unless_nan(over.mean, 6),
            "interval": round_unless_nan(over.interval, 6),
            "p": None if math.isnan(over.p_value) else over.p_value,
            "difference_of_seeds": round_unless_nan(seeds.mean, 6),
            "interval_of_seeds": round_unless_nan(seeds.interval, 6),
            "interval_overall": round_unless_nan(both.interval, 6) if several or images else None,
            "p_overall": both.p_value if (several or images) and not math.isnan(both.p_value) else None,
            "interval_of_images": round_unless_nan(comparison.image_intervals.get(name, UNKNOWN_ESTIMATE).interval, 6),
            "images_fixed": both.images_fixed,
            "interval_of_classes": round_unless_nan(classes, 6),
            "sd_of_classes": round_unless_nan(comparison.class_effect_sds.get(name, math.nan), 6),
            "classes": comparison.n_classes or None,
            "each_seed": [round(float(value), 6) for value in comparison.seed_differences[name]],
            "seeds": list(comparison.seeds),
            "partial_data": comparison.is_partial,
            "a": comparison.label_a,
            "b": comparison.label_b,
        }

    def main(name: str) -> RowDifference | PairedDifference:
        return comparison.overall_differences[name] if several or images else comparison.episode_differences[name]

    def half(values: Mapping[str, PairedDifference | Estimate], name: str) -> str:
        interval = values.get(name, UNKNOWN_ESTIMATE).interval
        return "" if math.isnan(interval) else f"± {interval:.2f}"

    columns: list[Column[str]] = [
        metric_name_column(comparison.protocol),
        Column(
            "A - B overall" if several or images else f"A - B over {units}",
            lambda name: format_plus_minus(main(name), "+"),
        ),
        Column("p", lambda name: format_p_value(main(name).p_value).removeprefix("= ")),
        Column(
            f"over {units}" if several or images else None,
            lambda name: half(comparison.episode_differences, name),
            drop_priority=2,
        ),
        Column(
            "over seeds" if several else None,
            lambda name: half(comparison.mean_seed_differences, name),
            drop_priority=3,
        ),
        Column(
            "over images" if comparison.image_intervals else None, lambda name: half(comparison.image_intervals, name)
        ),
        Column("over classes" if comparison.n_classes else None, lambda name: half(comparison.class_intervals, name)),
        Column(
            "each seed" if several else None,
            lambda name: "  ".join(f"{value:+.2f}" for value in comparison.seed_differences[name]),
            drop_priority=4,
        ),
        Column(make_record_fields=record),
    ]
    title = (
        f"A = {display_name_of_label(comparison.label_a)}, B = {display_name_of_label(comparison.label_b)}, "
        f"task {comparison.task}, "
        f"{comparison.n_interval_units:,} {units if comparison.n_interval_units > 1 else units[:-1]}, "
        f"{format_seeds(comparison.seeds)}"
    )
    drawn = f"{units}, seeds and test images" if images else f"{units} and seeds"
    overall = [
        f"A - B overall: percentage points, with 95% interval and p-value over {drawn}, as in ranks, "
        "for claims about methods. The other columns have 95% intervals of the same difference:",
        f"over {units}: trained models held fixed (paired t-test); over seeds: {units} held fixed (Student's, paired).",
    ]
    alone = [
        f"A - B overall: percentage points, with 95% interval and p-value over {units} and test images; trained models "
        "held fixed. The other columns have 95% intervals of the same difference.",
        f"over {units}: trained models and test images held fixed.",
    ]
    if not images:
        alone = [f"A - B over {units}: percentage points, 95% interval and paired t-test; trained models held fixed."]
    notes = [
        *(overall if several else alone),
        *_explain_image_interval(comparison),
        *_explain_class_interval(comparison),
        *(f"Note: {note}." for note in (*comparison.same_label_notes, *comparison.notes)),
    ]
    return Table(
        columns, list(comparison.episode_differences), title, notes, sentence_above_rows=describe_verdict(comparison)
    )


def _explain_image_interval(comparison: Comparison) -> list[str]:
    """Return what explains the interval over images, and in which numbers test images are held fixed."""
    inside = [name for name in comparison.episode_differences if name in comparison.image_intervals]
    outside = ", ".join(title_by_metric()[name] for name in comparison.episode_differences if name not in inside)
    if not inside:
        return ["Test images are held fixed: not both results record the hits of single images."]
    note = "over images: over other test images of the same classes; trained models held fixed."
    return [f"{note} Test images are held fixed in {outside}." if outside else note]


def _explain_class_interval(comparison: Comparison) -> list[str]:
    """Return what explains the interval over classes, where there is one."""
    if not comparison.n_classes:
        return []
    note = (
        f"over classes: over {comparison.interval_units_noun} and the {comparison.n_classes} novel classes that they "
        "draw from; "
        "trained models held fixed; for claims about other classes."
    )
    none = [
        name
        for name, over in comparison.class_intervals.items()
        if over.interval and not comparison.class_effect_sds[name]
    ]
    if none:
        metrics = ", ".join(title_by_metric()[name] for name in none)
        note += f" The variance of class effects is estimated below 0, and counts as 0, for {metrics}."
    if comparison.n_interval_units > MANY_EPISODES_THRESHOLD:
        note += " More episodes narrow the interval over episodes, but the number of classes limits this one."
    return [note]


def published_comparison_tables(results_of_tasks: Iterable[TaskResults]) -> list[Table[PublishedPair]]:
    """Return a table for each task of which something was measured that a paper prints too."""
    return [
        _published_comparison_table(task_results, pairs)
        for task_results in results_of_tasks
        if (pairs := pair_with_published_rows(task_results))
    ]


def _published_comparison_table(task_results: TaskResults, pairs: list[PublishedPair]) -> Table[PublishedPair]:
    judged = [pair for pair in pairs if pair.tolerance_verdict]
    notes = []
    if judged:
        outside = [pair.measured_row.display_name for pair in judged if pair.tolerance_verdict == OUTSIDE]
        notes.append(
            f"{len(judged) - len(outside)} of {len(judged)} rows are within the band around the printed accuracy"
            + (f"; outside: {', '.join(outside)}" if outside else "")
            + ". docs/paper.md says where the band comes from, and what may explain a difference."
        )
    if few := [pair.measured_row.display_name for pair in judged if len(pair.measured_row.results) < 3]:
        notes.append(f"The band is for the mean of three training seeds; with fewer: {', '.join(few)}.")
    notes += _note_order_agreement(task_results, pairs)
    reasons = {pair.incompatibility_reason: None for pair in pairs if pair.incompatibility_reason}
    notes += [f"Not comparable with the printed rows: {reason}." for reason in reasons]
    papers = [pair.published_row for pair in pairs if pair.published_row.joined_notes]
    notes += [f"{paper.label} ({paper.source}): {paper.joined_notes}." for paper in papers]
    return Table(
        PUBLISHED_COLUMNS,
        pairs,
        f"{task_results.task_name}, measured here beside what is printed",
        notes,
        is_own_row=lambda pair: pair.measured_row.results_origin != STORED,
    )


def _note_order_agreement(task_results: TaskResults, pairs: list[PublishedPair]) -> list[str]:
    """Return a note on the order of the ranked rows; none where no two rows are ranked."""
    order = count_order_agreements(task_results, pairs)
    if not order.n_pairs:
        return []
    undecided = order.n_pairs - order.n_agreements - order.n_reversals
    return [
        f"Pairs of rows: {order.n_pairs}; in the printed order {order.n_agreements}, in the opposite order "
        f"{order.n_reversals}, not told apart here {undecided} (over episodes and seeds, familywise error 5%)."
    ]


def _format_delta_with_printed(pair: PublishedPair) -> str:
    printed = pair.published_row.values.get("delta")
    measured = format_plus_minus(pair.measured_row.summarise_metrics()["delta"])
    return measured if printed is None else f"{measured} ({printed:.2f})"


def _format_printed_accuracy(pair: PublishedPair) -> str:
    value, plus = pair.published_row.values["acc"], pair.published_row.values.get("plus_minus_as_printed")
    return f"{value:.2f}" + (f" ({plus:.2f})" if plus is not None else "")


def _published_comparison_fields(pair: PublishedPair) -> dict[str, float | str | int | None]:
    values, printed = pair.measured_row.summarise_metrics(), pair.published_row.values
    return {
        "acc": round_unless_nan(values["acc"].mean),
        "acc_interval": round_unless_nan(values["acc"].interval),
        "printed": printed["acc"],
        "plus_minus_as_printed": printed.get("plus_minus_as_printed"),
        "difference": round_unless_nan(pair.difference),
        "band": pair.published_row.tolerance_band,
        "verdict": pair.tolerance_verdict,
        "apart": pair.incompatibility_reason,
        "delta": round_unless_nan(values["delta"].mean),
        "printed_delta": printed.get("delta"),
        "seeds": len(pair.measured_row.results),
        "source": pair.measured_row.results_origin,
        "paper": pair.published_row.source,
    }


PUBLISHED_COLUMNS: tuple[Column[PublishedPair], ...] = (
    Column(make_record_fields=lambda pair: {"task": pair.task_results.task_name}),
    Column(
        "method",
        lambda pair: pair.measured_row.display_name,
        lambda pair: {"method": pair.measured_row.label},
        min_fold_width=16,
    ),
    Column("Acc.", lambda pair: format_plus_minus(pair.measured_row.summarise_metrics()["acc"])),
    Column("printed", _format_printed_accuracy),
    Column("difference", lambda pair: f"{pair.difference:+.2f}"),
    Column(
        "band",
        lambda pair: "" if pair.published_row.tolerance_band is None else f"± {pair.published_row.tolerance_band:g}",
    ),
    Column("verdict", lambda pair: pair.tolerance_verdict or "not comparable", min_fold_width=10),
    Column("Delta (printed)", _format_delta_with_printed, drop_priority=3),
    Column("seeds", lambda pair: str(len(pair.measured_row.results)), drop_priority=1),
    Column(
        "source",
        lambda pair: f"{pair.measured_row.results_origin}; {pair.published_row.source}",
        _published_comparison_fields,
        min_fold_width=8,
        drop_priority=2,
    ),
)


VARIANCE_NOTES = [
    "Standard deviations in points, with 95% intervals: of a single value (one order of the classes, one support set, "
    "one seed), and of what it is made of. docs/statistics.md has the model."
]
WRONG_SIGN_NOTE = (
    "wrong sign: how likely a comparison on one order, one support set and one seed has another sign than the mean of "
    "A - B, with its 95% interval; made here: the share of such comparisons among these results whose sign differs."
)
EMPTY_CELLS_NOTE = (
    "Empty: not known, or nothing varies over seeds. With one seed, a single one leaves out how much seeds vary; with "
    "one support set an order, that of supports is counted in that of orders."
)
MISSING_SIGN_NOTE = "No wrong sign is given where the mean of A - B is 0, as of equal rows: it has no sign."


def variance_tables(task_results: TaskResults, metric: str = "acc") -> list[Table[VarianceSplit]]:
    """Return tables of how rows vary, the best first; and of how their differences do, the better one first.

    Args:
        task_results: the results of the task.
        metric: the metric that is split.

    Raises:
        UserError: the task is in episodes, has one order, or no row has the metric.
    """
    rows = split_variance_of_rows(task_results, metric)
    heading = protocol_of_task(task_results.task).metric_column(metric).title
    names = dict(zip((row.row for row in rows), unique_row_names([row.row for row in rows]), strict=True))
    notes = [*VARIANCE_NOTES]
    if any(row.row.has_one_pretraining for row in rows):
        notes.append("Seeds are of meta-training alone: the backbone is held fixed.")
    if fixed := [row.row.display_name for row in rows if row.row.is_seed_independent]:
        notes.append(f"The same for every seed, of which one counts: {', '.join(fixed)}.")
    columns = [*_name_columns(names, "method", "a"), *_variance_columns(task_results, heading, rows)]
    tables = [Table(columns, rows, f"{task_results.task_name}, {heading}", [*notes, *_explain_empty_cells(rows)])]
    if differences := split_variance_of_differences(task_results, metric):
        columns = [*_name_columns(names, "A", "a"), *_name_columns(names, "B", "b")]
        columns += [*_variance_columns(task_results, f"A - B, {heading}", differences), *_wrong_sign_columns()]
        signs = [
            WRONG_SIGN_NOTE,
            *_explain_empty_cells(differences),
            *([MISSING_SIGN_NOTE] if any(entry.wrong_sign_chance is None for entry in differences) else []),
        ]
        tables.append(Table(columns, differences, f"{task_results.task_name}, differences of two rows", signs))
    return tables


def _explain_empty_cells(splits: Sequence[VarianceSplit]) -> list[str]:
    empty = (
        [EMPTY_CELLS_NOTE]
        if any(part not in entry.variances for entry in splits for part in DESIGN_VARIANCE_SOURCES)
        else []
    )
    if any(IMAGE_SOURCE_NAME not in entry.variances for entry in splits):
        which = (
            "all"
            if all(IMAGE_SOURCE_NAME not in entry.variances for entry in splits)
            else "those without a number for them"
        )
        return [*empty, f"Test images are held fixed in {which}: not all results record the hits of single images."]
    return empty


def _name_columns(names: Mapping[SeedAggregate, str], heading: str, which: str) -> list[Column[VarianceSplit]]:
    def name(entry: VarianceSplit) -> str:
        row = entry.row if which == "a" else entry.subtracted_row
        return names[row] if row else ""

    def label(entry: VarianceSplit) -> str:
        row = entry.row if which == "a" else entry.subtracted_row
        return "" if row is None else row.label if names[row] == row.display_name else row.label_with_origin

    return [Column(heading, name, lambda entry: {heading.lower(): label(entry)}, min_fold_width=14)]


def _variance_columns(
    task_results: TaskResults, heading: str, splits: Sequence[VarianceSplit]
) -> list[Column[VarianceSplit]]:
    with_images = any(IMAGE_SOURCE_NAME in entry.variances for entry in splits)
    sources = (*DESIGN_VARIANCE_SOURCES, *((IMAGE_SOURCE_NAME,) if with_images else ()), SINGLE_VALUE_VARIANCE_KEY)

    def deviation(part: str) -> Column[VarianceSplit]:
        def text(entry: VarianceSplit) -> str:
            if part not in entry.variances:
                return ""
            value, low, high = _standard_deviations(entry.variances[part])
            return f"{value:.2f} ({low:.2f}-{high:.2f})"

        def fields(entry: VarianceSplit) -> dict[str, float | None]:
            name = f"sd_{'single' if part == SINGLE_VALUE_VARIANCE_KEY else part.replace(' ', '_')}"
            values = _standard_deviations(entry.variances[part]) if part in entry.variances else (math.nan,) * 3
            return {name + end: round_unless_nan(v) for end, v in zip(("", "_low", "_high"), values, strict=True)}

        return Column(
            "a single one" if part == SINGLE_VALUE_VARIANCE_KEY else part,
            text,
            fields,
            drop_priority=sources[::-1].index(part),
        )

    def mean(entry: VarianceSplit) -> dict[str, float | int | str | None]:
        return {
            "task": task_results.task_name,
            "mean": round_unless_nan(entry.mean_with_interval.mean),
            "interval": round_unless_nan(entry.mean_with_interval.interval),
            "seeds": entry.n_seeds,
        }

    sign = "+" if " - " in heading else ""
    return [
        Column(heading, lambda entry: format_plus_minus(entry.mean_with_interval, sign), mean),
        *map(deviation, (SINGLE_VALUE_VARIANCE_KEY, *sources[:-1])),
        Column("seeds", lambda entry: str(entry.n_seeds)),
    ]


def _standard_deviations(variance: VarianceEstimate) -> tuple[float, float, float]:
    return math.sqrt(variance.estimated_value), math.sqrt(variance.lower_limit), math.sqrt(variance.upper_limit)


def _wrong_sign_columns() -> list[Column[VarianceSplit]]:
    def text(entry: VarianceSplit) -> str:
        if entry.wrong_sign_chance is None:
            return ""
        chance, low, high = (
            100 * value
            for value in (
                entry.wrong_sign_chance.chance,
                entry.wrong_sign_chance.lower_limit,
                entry.wrong_sign_chance.upper_limit,
            )
        )
        return f"{chance:.0f}% ({low:.0f}-{high:.0f}%)"

    def fields(entry: VarianceSplit) -> dict[str, float | None]:
        sign = entry.wrong_sign_chance or WrongSignChance(math.nan, math.nan, math.nan, math.nan)
        return {
            "wrong_sign": round_unless_nan(sign.chance),
            "wrong_sign_low": round_unless_nan(sign.lower_limit),
            "wrong_sign_high": round_unless_nan(sign.upper_limit),
            "wrong_sign_made": round_unless_nan(sign.observed_share),
        }

    return [
        Column("wrong sign", text, fields),
        Column(
            "made here",
            lambda entry: f"{100 * entry.wrong_sign_chance.observed_share:.0f}%" if entry.wrong_sign_chance else "",
        ),
    ]
