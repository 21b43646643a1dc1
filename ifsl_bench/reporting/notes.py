"""Notes in words under a task's table. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from ifsl_bench.analysis.aggregate import (
    PAPER,
    PARTIAL_DATA_NOTE,
    SeedAggregate,
    describe_fixed_factors,
    list_notes_on_solve_failures,
    list_notes_on_unrecorded_choices,
    unique_row_names,
)
from ifsl_bench.analysis.ranking import Ranking, RowDifference
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.registry import find_owning_entry_points
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE, Task
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import escape_controls
from ifsl_bench.utils.text_format import format_count, format_numbers, format_p_value, format_seeds

BACKBONE_ENTRY_POINT_GROUP = "ifsl_bench.backbones"  # the group of entry points
SESSION_COLUMN_MEANINGS = {  # column -> its meaning
    "acc": "Avg.: the mean accuracy after each session, A_0 to A_T",
    "pd": "PD: A_0 minus A_T",
    "base": "base, novel and their harmonic mean: after the last",
    "gacc": "gAcc: like Avg., of accuracies averaged over weights of the base session",
    "gain": "lazy: the same base classifier (A_0), which never answers with a novel class; gain: how far Avg. is above "
    "that",
    "state": "bytes/class: what is carried on for each novel class",
}
HIDDEN_CLASSES_NOTE = "validation sequences have hidden base classes in place of novel ones"


def explain_calibration(task: Task) -> str:
    """Return what explains calibrated numbers."""
    return f"cal.: with one bias on all novel logits, found on validation {protocol_of_task(task).drawn_items_noun}."


def _describe_evaluated_classes(result: Result) -> str:
    if "sessions" in result.protocol.figures_and_tables:
        orders, sequences = result.to_hit_counts().n_interval_units, len(result.episodes)
        if orders == 1:
            return "one order of the novel classes, so there are no intervals"
        return f"mean ± 95% interval over {orders:,} orders of the novel classes ({sequences:,} sequences)"
    return f"mean ± 95% interval over {len(result.episodes):,} episodes"


def table_notes(
    task_results: TaskResults,
    interval_note: str = "in parentheses their ±",
    shown_metrics: Collection[str] = SESSION_COLUMN_MEANINGS.keys(),
) -> list[str]:
    """Return the notes that a reader of the task's table needs, a line each.

    Args:
        task_results: the results of the task.
        interval_note: where the table has the ± that papers print.
        shown_metrics: of the columns that :data:`SESSION_COLUMN_MEANINGS` explains, those that the table has.
    """
    notes = [
        *_measurement_notes(task_results, shown_metrics),
        *_choice_notes(task_results),
        *_group_notes(task_results),
        *recipe_notes(task_results),
        *_anomaly_notes(task_results),
        *_incomparable_notes(task_results),
    ]
    if task_results.published_rows and not protocol_of_task(task_results.task).has_separate_published_table:
        notes.append(
            f"Published: as printed, {interval_note}, whose kind is unknown; not used in any significance test."
        )
        notes += [
            f"{paper.label} ({paper.source}): {paper.joined_notes}."
            for paper in task_results.published_rows
            if paper.joined_notes
        ]
    return notes + [f"{remark}." for remark in task_results.remarks]


def _measurement_notes(task_results: TaskResults, shown: Collection[str]) -> list[str]:
    """Return what is measured, over how many episodes, and what intervals hold fixed."""
    notes, protocol = [], protocol_of_task(task_results.task)
    measured = task_results.measured_rows
    single = bool(task_results.rows) and task_results.rows[0].has_single_interval_unit
    if task_results.rows:
        first = task_results.rows[0].results[0]
        notes.append(f"Measured: {_describe_evaluated_classes(first)}, averaged over seeds, in percent.")
        if "sessions" in first.protocol.figures_and_tables:
            notes.append(f"{'; '.join(text for name, text in SESSION_COLUMN_MEANINGS.items() if name in shown)}.")
        if not single:
            fixed = "the trained models, the test images and the novel classes"
            if "sessions" in first.protocol.figures_and_tables:
                fixed = describe_fixed_factors(task_results.rows, "the trained models", "the test images")
            notes.append(f"Intervals hold fixed {fixed}.")
        if task_results.task.hides_base_classes("val"):
            notes.append(f"{HIDDEN_CLASSES_NOTE.capitalize()}.")
    usual = task_results.task.evaluation.episodes
    labels = zip(measured, unique_row_names(measured), strict=True)
    if many := [label for row, label in labels if len(row.results[0].episodes) > usual]:
        notes.append(
            f"Over more {protocol.drawn_items_noun} than the task's {usual:,}: {', '.join(many)}. More of them make "
            "the interval "
            f"over {protocol.interval_units_noun} narrower, not the one over classes that `ifsl-bench compare` "
            "shows: the novel "
            "classes are the same."
        )
    if any(row.has_one_pretraining for row in task_results.rows) and not single:
        notes.append("Seeds are of meta-training alone, on one pretraining: every interval holds the backbone fixed.")
    return notes


def _choice_notes(task_results: TaskResults) -> list[str]:
    """Return how the options of rows were chosen."""
    measured = task_results.measured_rows
    labels = dict(zip(measured, unique_row_names(measured), strict=True))
    tried_on = f"validation {protocol_of_task(task_results.task).drawn_items_noun}"
    tuned = {row.ranking_setting: row.results[0].n_trials for row in task_results.rows if row.results[0].n_trials}
    notes = [
        f"@{setting}: the options that did best on {tried_on}, at most {trials} settings tried with one seed."
        for setting, trials in sorted(tuned.items())
    ]
    if many := [
        f"{labels[row]} {row.n_trials}"
        for row in task_results.rows
        if row.n_trials > 1 and row.ranking_setting not in tuned
    ]:
        notes.append(f"Settings of our grid tried on the {tried_on} of each seed, by row: {', '.join(many)}.")
    if edges := [
        f"{labels[row]}: {', '.join(row.options_at_edge)}" for row in task_results.rows if row.options_at_edge
    ]:
        notes.append(f"Chosen at an end of what was tried, so better values may lie beyond. {'; '.join(edges)}.")
    return notes + [
        f"{remark[0].upper()}{remark[1:]}." for remark in list_notes_on_unrecorded_choices(task_results.rows)
    ]


def _group_notes(task_results: TaskResults) -> list[str]:
    """Return which rows are ranked apart, and what their data and backbones have seen."""
    notes, measured = [], task_results.measured_rows
    if any(row.is_partial for row in task_results.rows):
        notes.append(f"{PARTIAL_DATA_NOTE.capitalize()}.")
    if looking := [row.name_with_origin for row in measured if row.is_transductive]:
        notes.append(f"Transductive, seeing an episode's queries all at once, and ranked apart: {', '.join(looking)}.")
    for state, what in (("yes", "has seen"), ("may", "may have seen")):
        if rows := [row.name_with_origin for row in measured if row.novel_classes_seen == state]:
            notes.append(
                f"On a backbone that {what} images of the novel classes when it was pretrained elsewhere, and ranked "
                f"apart: {', '.join(rows)}."
            )
    if measured and (corpora := task_results.task.pretraining.pretrained_on):
        notes.append(f"That the backbone has seen {corpora} and nothing else is the word of whoever gave its weights.")
    return notes


def recipe_notes(task_results: TaskResults) -> list[str]:
    """Return notes on the recipes of rows whose names lack them, on recipes that know N, and on rows not shown."""
    notes = []
    if any(row.has_other_recipe for row in task_results.measured_rows):
        plain = {row.recipe for row in task_results.measured_rows if row.recipe and not row.has_other_recipe}
        of_others = f"; of the other rows, {', '.join(plain)}" if plain else ""
        notes.append(f"Behind a bar is the recipe that trained the backbone{of_others}.")
    if knowing := [row.name_with_origin for row in task_results.measured_rows if row.knows_number_of_classes]:
        notes.append(f"On a backbone whose recipe is given the number of novel classes to come: {', '.join(knowing)}.")
    return [*notes, *(f"{remark}." for remark in note_hidden_rows(task_results))]


def note_hidden_rows(task_results: TaskResults) -> list[str]:
    """Return a remark on rows on backbones of other recipes than those shown, if there are any."""
    if not task_results.hidden_rows:
        return []
    recipes = ", ".join(sorted({row.recipe for row in task_results.hidden_rows if row.recipe}))
    more = f"{format_count(len(task_results.hidden_rows), 'more row')} on backbones of other recipes ({recipes})"
    return [f"`ifsl-bench table {task_results.task_name} --recipe all` has {more}"]


def _anomaly_notes(task_results: TaskResults) -> list[str]:
    """Return what went wrong in solves, on novel logits, and what is not installed here."""
    measured = task_results.measured_rows
    notes = [
        *list_notes_on_solve_failures({row.name_with_origin: row.solve_failures for row in measured}),
        *(
            f"{row.name_with_origin} takes nearly every base query for one of a novel class: its novel logits are "
            "larger throughout, as where features are not centred (docs/data.md)."
            for row in task_results.rows
            if _loses_base_queries(row)
        ),
    ]
    backbone = task_results.task.pretraining.backbone
    installed = any(
        find_owning_entry_points(BACKBONE_ENTRY_POINT_GROUP, name) for name in (backbone, backbone.partition(":")[0])
    )
    if measured and backbone not in (NO_BACKBONE, INCLUDED_BACKBONE) and not installed:
        notes.append(f"No backbone {backbone!r} is installed here: these rows cannot be made again on this machine.")
    return notes


def _incomparable_notes(task_results: TaskResults) -> list[str]:
    """Return which rows are not comparable with the others, and why."""
    notes = []
    above = "the rows above" if task_results.rows or task_results.published_rows else "results on the whole"
    apart: dict[str, list[str]] = {}
    for row in task_results.incomparable_rows:
        if reason := task_results.incompatibility_reason(row):
            apart.setdefault(reason, []).append(row.name_with_origin)
    for reason, names in _merge_reasons(apart).items():
        are = "is" if len(names) == 1 else "are"
        notes.append(f"{', '.join(names)} {are} not comparable with {above}: {reason}.")
    return notes


def _merge_reasons(apart: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return reasons for standing apart with their rows; reasons that differ in their brackets alone are one."""
    merged: dict[str, list[str]] = {}
    kinds = Counter(reason.partition(" (")[0] for reason in apart)
    for reason, names in apart.items():
        kind = reason.partition(" (")[0]
        merged.setdefault(kind if kinds[kind] > 1 else reason, []).extend(names)
    return merged


def _loses_base_queries(row: SeedAggregate) -> bool:
    """Return whether joint prediction loses nine tenths of the base queries that are right among the base classes."""
    if "delta_a" not in row.metric_names:
        return False
    joint, alone = (float(row.metric_by_seed(metric).mean()) for metric in ("base_joint", "base_alone"))
    return alone >= 20 and joint < 0.1 * alone  # percent


def rank_notes(task_results: TaskResults, to_best: bool = True) -> list[str]:
    """Return the further notes that a reader of the ranked table needs.

    Args:
        task_results: the results of the task.
        to_best: whether the table has the column "to the best".
    """
    ranking, places = task_results.ranking, task_results.ranked_rows
    notes = []
    if ranking.family:
        seeds = format_numbers(ranking.seeds)
        notes.append(f"Ranks are among {len(ranking.family)} rows on seeds {seeds}, whichever rows are shown.")
    reasons: dict[str, list[str]] = {}
    for place in places:
        if place.reason_for_provisional_rank:
            reasons.setdefault(place.reason_for_provisional_rank, []).append(place.row.name_with_origin)

    def which(rows: list[str]) -> str:
        if len(rows) > 1 and len(rows) >= len(places) - 1:
            return "all rows" if len(rows) == len(places) else "all others"
        return ", ".join(rows)

    if reasons:
        reasons_text = "; ".join(f"{reason}: {which(rows)}" for reason, rows in reasons.items())
        notes.append(f"Provisional, without a rank. {reasons_text[0].upper()}{reasons_text[1:]}.")
    held = [
        place.row.name_with_origin
        for place in places
        if place.difference_to_best and place.difference_to_best.images_fixed and not place.row.has_single_interval_unit
    ]
    if len(places) > 1:
        of_images = f"hold the test images fixed for {which(held)}" if held else "include other test images"
        notes.append(f"Ranks{' and differences to the best' * to_best} {of_images}.")
    few = [
        place.row.name_with_origin
        for place in places
        if place.difference_to_best and place.n_common_seeds < 2 and not place.row.has_single_interval_unit
    ]
    if few and to_best:
        notes.append(
            f"* Fewer than two training seeds in common with the best row: {which(few)}. There the comparison is "
            f"over {protocol_of_task(task_results.task).interval_units_noun} alone, of these trained models and not "
            "of the methods."
        )
    return notes


def describe_standings(task_results: TaskResults, labels: Sequence[str]) -> list[list[str]]:
    """Return the :func:`describe_standing` of each row; one line for several rows that nothing is ranked with.

    Args:
        task_results: the results of the task.
        labels: of the rows.
    """
    reasons = {place.reason_for_provisional_rank for place in task_results.ranking.ranked_rows}
    if len(labels) > 1 and not task_results.ranking.family and len(reasons) == 1:
        reason = str(reasons.pop())
        needs = "; ranks need three seeds" if reason.endswith(("seed", "seeds")) else ""
        return [
            [
                escape_controls(
                    f"All rows are provisional ({reason}){needs}. A difference: "
                    f"ifsl-bench compare {labels[0]} {labels[1]} --task {task_results.task_name}"
                )
            ]
        ]
    return [describe_standing(task_results, label) for label in labels]


def describe_standing(task_results: TaskResults, label: str) -> list[str]:
    """Return a row's rank, and its paired differences to the best row, to the nearest, and to its stored namesake.

    Args:
        task_results: the results of the task.
        label: of the row.
    """
    mine, ranking = task_results.find_row(label), task_results.ranking
    if mine is None or mine not in task_results.rows:
        return [f"{label} is not comparable with the stored rows."] if mine else []
    (place,) = (place for place in task_results.ranked_rows if place.row is mine)
    places = [place for place in task_results.ranked_rows if place.row is not mine]
    if not places:
        return [f"{label} is the only measured row on these {protocol_of_task(task_results.task).drawn_items_noun}."]
    rank = (
        f"provisional ({place.reason_for_provisional_rank})"
        if place.is_provisional
        else f"rank {place.rank_interval} of {place.n_ranked_together}"
    )
    best = next((place.row for place in places if not place.is_provisional), places[0].row)
    away = [place.row for place in places if place.row.label != label]
    nearest = min(
        away,
        key=lambda row: abs(ranking.find_ranking_containing(mine, row).estimate_row_difference(mine, row).mean),
        default=best,
    )
    kin = "" if task_results.ranking_setting == PAPER else f" of those ranked with it ({task_results.ranking_setting})"
    targets = (
        [(f"best other row{kin}, the nearest", best)]
        if nearest is best
        else [(f"best other row{kin}", best), (f"nearest row{kin}", nearest)]
    )
    lines = [f"{mine.display_name}: {rank}"]
    lines += [f"  against the {what}, {_describe_difference(ranking, mine, row)}" for what, row in targets]
    lines += [
        _describe_namesake_difference(ranking, mine, p.row)
        for p in places
        if p.row.label == label and p.row is not best
    ]
    return [escape_controls(line) for line in lines]


def _describe_namesake_difference(ranking: Ranking, mine: SeedAggregate, row: SeedAggregate) -> str:
    """Return the difference of a row to its namesake in words."""
    gap, common = _paired_difference(ranking, mine, row)
    if common and gap.mean == gap.interval == 0:
        unit = mine.interval_units_noun.removesuffix("s")
        return f"  {row.name_with_origin} has the same accuracy in every {unit} ({format_seeds(common)})"
    return f"  against the row of the same name, {_describe_difference(ranking, mine, row)}"


def _paired_difference(
    ranking: Ranking, mine: SeedAggregate, row: SeedAggregate
) -> tuple[RowDifference, tuple[int, ...]]:
    """Return the difference of two rows in their common ranking, and the seeds of the difference."""
    part = ranking.find_ranking_containing(mine, row)
    return part.estimate_row_difference(mine, row), part.common_seeds(mine, row)


def _describe_difference(ranking: Ranking, mine: SeedAggregate, row: SeedAggregate) -> str:
    """Return the difference of two rows in words, with their numbers on its seeds where a table has other numbers."""
    gap, common = _paired_difference(ranking, mine, row)
    ours, theirs = ranking.find_ranking_containing(mine, row).means_on_common_seeds(mine, row)
    level = f"{theirs:.2f} on {format_seeds(common or row.seeds)}"
    if common and set(common) != set(mine.seeds):
        level += f", where {mine.display_name} has {ours:.2f}"
    units = mine.interval_units_noun if gap.images_fixed else f"{mine.interval_units_noun}, test images"
    over = (
        f"over {mine.interval_units_noun} alone, of these trained models"
        if gap.models_fixed
        else f"over {units} and seeds"
    )
    if gap.models_fixed and not gap.images_fixed:
        over = f"over {mine.interval_units_noun} and test images, of these trained models"
    if not common:
        over += "; the two have no seed in common"
    if math.isnan(gap.interval):
        unit = mine.interval_units_noun.removesuffix("s")
        return f"{row.name_with_origin} with {level}: {gap.mean:+.2f} points on one {unit}"
    p_value = format_p_value(gap.p_value)
    return f"{row.name_with_origin} with {level}: {gap.mean:+.2f} ± {gap.interval:.2f} points, p {p_value}, {over}"
