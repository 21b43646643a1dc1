"""Notes in words under a task's table. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from ifsl_bench.analysis.aggregate import (
    PAPER,
    PARTIAL,
    SeedAggregate,
    fixed_in_intervals,
    names_of,
    solve_notes,
    unrecorded_choices,
)
from ifsl_bench.analysis.ranking import Difference, Ranking
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.registry import owning_entry_points
from ifsl_bench.protocols.registry import protocol_of
from ifsl_bench.protocols.tasks.task import INCLUDED, NO_BACKBONE, Task
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import one_line
from ifsl_bench.utils.text_format import format_count, format_numbers, format_p_value, format_seeds

BACKBONES = "ifsl_bench.backbones"  # the group of entry points
OF_SESSIONS = {  # column -> its meaning
    "acc": "Avg.: the mean accuracy after each session, A_0 to A_T",
    "pd": "PD: A_0 minus A_T",
    "base": "base, novel and their harmonic mean: after the last",
    "gacc": "gAcc: like Avg., of accuracies averaged over weights of the base session",
    "gain": "lazy: the same base classifier (A_0), which never answers with a novel class; gain: how far Avg. is above "
    "that",
    "state": "bytes/class: what is carried on for each novel class",
}
HIDDEN = "validation sequences have hidden base classes in place of novel ones"


def of_calibration(task: Task) -> str:
    """Return what explains calibrated numbers."""
    return f"cal.: with one bias on all novel logits, found on validation {protocol_of(task).drawn}."


def _what_is_measured(result: Result) -> str:
    if "sessions" in result.protocol.features:
        orders, sequences = result.counts().unit_count, len(result.episodes)
        if orders == 1:
            return "one order of the novel classes, so there are no intervals"
        return f"mean ± 95% interval over {orders:,} orders of the novel classes ({sequences:,} sequences)"
    return f"mean ± 95% interval over {len(result.episodes):,} episodes"


def notes_of(
    board: TaskResults, plus_minus: str = "in parentheses their ±", shown: Collection[str] = OF_SESSIONS.keys()
) -> list[str]:
    """Return the notes that a reader of the task's table needs, a line each.

    Args:
        board: the results of the task.
        plus_minus: where the table has the ± that papers print.
        shown: of the columns that :data:`OF_SESSIONS` explains, those that the table has.
    """
    notes = [
        *_measurement_notes(board, shown),
        *_choice_notes(board),
        *_group_notes(board),
        *recipe_notes(board),
        *_anomaly_notes(board),
        *_incomparable_notes(board),
    ]
    if board.papers and not protocol_of(board.task).published_apart:
        notes.append(f"Published: as printed, {plus_minus}, whose kind is unknown; not used in any significance test.")
        notes += [f"{paper.label} ({paper.source}): {paper.remark}." for paper in board.papers if paper.remark]
    return notes + [f"{remark}." for remark in board.remarks]


def _measurement_notes(board: TaskResults, shown: Collection[str]) -> list[str]:
    """Return what is measured, over how many episodes, and what intervals hold fixed."""
    notes, protocol = [], protocol_of(board.task)
    measured = board.measured
    single = bool(board.rows) and board.rows[0].single
    if board.rows:
        first = board.rows[0].results[0]
        notes.append(f"Measured: {_what_is_measured(first)}, averaged over seeds, in percent.")
        if "sessions" in first.protocol.features:
            notes.append(f"{'; '.join(text for name, text in OF_SESSIONS.items() if name in shown)}.")
        if not single:
            fixed = "the trained models, the test images and the novel classes"
            if "sessions" in first.protocol.features:
                fixed = fixed_in_intervals(board.rows, "the trained models", "the test images")
            notes.append(f"Intervals hold fixed {fixed}.")
        if board.task.hides_base_classes("val"):
            notes.append(f"{HIDDEN.capitalize()}.")
    usual = board.task.evaluation.episodes
    labels = zip(measured, names_of(measured), strict=True)
    if many := [label for row, label in labels if len(row.results[0].episodes) > usual]:
        notes.append(
            f"Over more {protocol.drawn} than the task's {usual:,}: {', '.join(many)}. More of them make the interval "
            f"over {protocol.units} narrower, not the one over classes that `ifsl-bench compare` shows: the novel "
            "classes are the same."
        )
    if any(row.one_pretraining for row in board.rows) and not single:
        notes.append("Seeds are of meta-training alone, on one pretraining: every interval holds the backbone fixed.")
    return notes


def _choice_notes(board: TaskResults) -> list[str]:
    """Return how the options of rows were chosen."""
    measured = board.measured
    labels = dict(zip(measured, names_of(measured), strict=True))
    tried_on = f"validation {protocol_of(board.task).drawn}"
    tuned = {row.setting: row.results[0].trials for row in board.rows if row.results[0].trials}
    notes = [
        f"@{setting}: the options that did best on {tried_on}, at most {trials} settings tried with one seed."
        for setting, trials in sorted(tuned.items())
    ]
    if many := [f"{labels[row]} {row.trials}" for row in board.rows if row.trials > 1 and row.setting not in tuned]:
        notes.append(f"Settings of our grid tried on the {tried_on} of each seed, by row: {', '.join(many)}.")
    if edges := [f"{labels[row]}: {', '.join(row.edge)}" for row in board.rows if row.edge]:
        notes.append(f"Chosen at an end of what was tried, so better values may lie beyond. {'; '.join(edges)}.")
    return notes + [f"{remark[0].upper()}{remark[1:]}." for remark in unrecorded_choices(board.rows)]


def _group_notes(board: TaskResults) -> list[str]:
    """Return which rows are ranked apart, and what their data and backbones have seen."""
    notes, measured = [], board.measured
    if any(row.partial for row in board.rows):
        notes.append(f"{PARTIAL.capitalize()}.")
    if looking := [row.full_name for row in measured if row.transductive]:
        notes.append(f"Transductive, seeing an episode's queries all at once, and ranked apart: {', '.join(looking)}.")
    for state, what in (("yes", "has seen"), ("may", "may have seen")):
        if rows := [row.full_name for row in measured if row.novel_seen == state]:
            notes.append(
                f"On a backbone that {what} images of the novel classes when it was pretrained elsewhere, and ranked "
                f"apart: {', '.join(rows)}."
            )
    if measured and (corpora := board.task.pretraining.pretrained_on):
        notes.append(f"That the backbone has seen {corpora} and nothing else is the word of whoever gave its weights.")
    return notes


def recipe_notes(board: TaskResults) -> list[str]:
    """Return what trained the backbones of rows whose names do not say it, what recipes know, and where others are."""
    notes = []
    if any(row.of_other_recipe for row in board.measured):
        plain = {row.recipe for row in board.measured if row.recipe and not row.of_other_recipe}
        of_others = f"; of the other rows, {', '.join(plain)}" if plain else ""
        notes.append(f"Behind a bar is the recipe that trained the backbone{of_others}.")
    if knowing := [row.full_name for row in board.measured if row.knows_classes]:
        notes.append(f"On a backbone whose recipe is given the number of novel classes to come: {', '.join(knowing)}.")
    return [*notes, *(f"{remark}." for remark in hidden_rows(board))]


def hidden_rows(board: TaskResults) -> list[str]:
    """Return a remark on rows on backbones of other recipes than those shown, if there are any."""
    if not board.hidden:
        return []
    recipes = ", ".join(sorted({row.recipe for row in board.hidden if row.recipe}))
    more = f"{format_count(len(board.hidden), 'more row')} on backbones of other recipes ({recipes})"
    return [f"`ifsl-bench table {board.name} --recipe all` has {more}"]


def _anomaly_notes(board: TaskResults) -> list[str]:
    """Return what went wrong in solves, on novel logits, and what is not installed here."""
    measured = board.measured
    notes = [
        *solve_notes({row.full_name: row.solves for row in measured}),
        *(
            f"{row.full_name} takes nearly every base query for one of a novel class: its novel logits are larger "
            "throughout, as where features are not centred (docs/data.md)."
            for row in board.rows
            if _overrun(row)
        ),
    ]
    backbone = board.task.pretraining.backbone
    installed = any(owning_entry_points(BACKBONES, name) for name in (backbone, backbone.partition(":")[0]))
    if measured and backbone not in (NO_BACKBONE, INCLUDED) and not installed:
        notes.append(f"No backbone {backbone!r} is installed here: these rows cannot be made again on this machine.")
    return notes


def _incomparable_notes(board: TaskResults) -> list[str]:
    """Return which rows are not comparable with the others, and why."""
    notes = []
    above = "the rows above" if board.rows or board.papers else "results on the whole"
    apart: dict[str, list[str]] = {}
    for row in board.others:
        if reason := board.incompatibility(row):
            apart.setdefault(reason, []).append(row.full_name)
    for reason, names in _merged_reasons(apart).items():
        are = "is" if len(names) == 1 else "are"
        notes.append(f"{', '.join(names)} {are} not comparable with {above}: {reason}.")
    return notes


def _merged_reasons(apart: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return reasons for standing apart with their rows; reasons that differ in their brackets alone are one."""
    merged: dict[str, list[str]] = {}
    kinds = Counter(reason.partition(" (")[0] for reason in apart)
    for reason, names in apart.items():
        kind = reason.partition(" (")[0]
        merged.setdefault(kind if kinds[kind] > 1 else reason, []).extend(names)
    return merged


def _overrun(row: SeedAggregate) -> bool:
    """Return whether joint prediction loses nine tenths of the base queries that are right among the base classes."""
    if "delta_a" not in row.metrics:
        return False
    joint, alone = (float(row.by_seed(metric).mean()) for metric in ("base_joint", "base_alone"))
    return alone >= 20 and joint < 0.1 * alone  # percent


def notes_of_ranks(board: TaskResults, to_best: bool = True) -> list[str]:
    """Return the further notes that a reader of the ranked table needs.

    Args:
        board: the results of the task.
        to_best: whether the table has the column "to the best".
    """
    ranking, places = board.ranking, board.places
    notes = []
    if ranking.family:
        seeds = format_numbers(ranking.seeds)
        notes.append(f"Ranks are among {len(ranking.family)} rows on seeds {seeds}, whichever rows are shown.")
    reasons: dict[str, list[str]] = {}
    for place in places:
        if place.reason:
            reasons.setdefault(place.reason, []).append(place.row.full_name)

    def which(rows: list[str]) -> str:
        if len(rows) > 1 and len(rows) >= len(places) - 1:
            return "all rows" if len(rows) == len(places) else "all others"
        return ", ".join(rows)

    if reasons:
        reasons_text = "; ".join(f"{reason}: {which(rows)}" for reason, rows in reasons.items())
        notes.append(f"Provisional, without a rank. {reasons_text[0].upper()}{reasons_text[1:]}.")
    held = [place.row.full_name for place in places if place.gap and place.gap.images_fixed and not place.row.single]
    if len(places) > 1:
        of_images = f"hold the test images fixed for {which(held)}" if held else "include other test images"
        notes.append(f"Ranks{' and differences to the best' * to_best} {of_images}.")
    few = [place.row.full_name for place in places if place.gap and place.common_seeds < 2 and not place.row.single]
    if few and to_best:
        notes.append(
            f"* Fewer than two training seeds in common with the best row: {which(few)}. There the comparison is "
            f"over {protocol_of(board.task).units} alone, of these trained models and not of the methods."
        )
    return notes


def standings(board: TaskResults, labels: Sequence[str]) -> list[list[str]]:
    """Return the :func:`standing` of each row; one line for several rows that nothing is ranked with.

    Args:
        board: the results of the task.
        labels: of the rows.
    """
    reasons = {place.reason for place in board.ranking.places}
    if len(labels) > 1 and not board.ranking.family and len(reasons) == 1:
        reason = str(reasons.pop())
        needs = "; ranks need three seeds" if reason.endswith(("seed", "seeds")) else ""
        return [
            [
                one_line(
                    f"All rows are provisional ({reason}){needs}. A difference: "
                    f"ifsl-bench compare {labels[0]} {labels[1]} --task {board.name}"
                )
            ]
        ]
    return [standing(board, label) for label in labels]


def standing(board: TaskResults, label: str) -> list[str]:
    """Return a row's rank, and its paired differences to the best row, to the nearest, and to its stored namesake.

    Args:
        board: the results of the task.
        label: of the row.
    """
    mine, ranking = board.row(label), board.ranking
    if mine is None or mine not in board.rows:
        return [f"{label} is not comparable with the stored rows."] if mine else []
    (place,) = (place for place in board.places if place.row is mine)
    places = [place for place in board.places if place.row is not mine]
    if not places:
        return [f"{label} is the only measured row on these {protocol_of(board.task).drawn}."]
    rank = f"provisional ({place.reason})" if place.provisional else f"rank {place.ranks} of {place.among}"
    best = next((place.row for place in places if not place.provisional), places[0].row)
    away = [place.row for place in places if place.row.label != label]
    nearest = min(away, key=lambda row: abs(ranking.of(mine, row).difference(mine, row).mean), default=best)
    kin = "" if board.setting == PAPER else f" of those ranked with it ({board.setting})"
    targets = (
        [(f"best other row{kin}, the nearest", best)]
        if nearest is best
        else [(f"best other row{kin}", best), (f"nearest row{kin}", nearest)]
    )
    lines = [f"{mine.shown}: {rank}"]
    lines += [f"  against the {what}, {_difference(ranking, mine, row)}" for what, row in targets]
    lines += [_again(ranking, mine, p.row) for p in places if p.row.label == label and p.row is not best]
    return [one_line(line) for line in lines]


def _again(ranking: Ranking, mine: SeedAggregate, row: SeedAggregate) -> str:
    """Return the difference of a row to its namesake in words."""
    gap, common = _paired(ranking, mine, row)
    if common and gap.mean == gap.interval == 0:
        return f"  {row.full_name} has the same accuracy in every {mine.units[:-1]} ({format_seeds(common)})"
    return f"  against the row of the same name, {_difference(ranking, mine, row)}"


def _paired(ranking: Ranking, mine: SeedAggregate, row: SeedAggregate) -> tuple[Difference, tuple[int, ...]]:
    """Return the difference of two rows and the seeds that it is over, in the ranking that they are in."""
    part = ranking.of(mine, row)
    return part.difference(mine, row), part.common(mine, row)


def _difference(ranking: Ranking, mine: SeedAggregate, row: SeedAggregate) -> str:
    """Return the difference of two rows in words, with their numbers on its seeds where a table has other numbers."""
    gap, common = _paired(ranking, mine, row)
    ours, theirs = ranking.of(mine, row).means(mine, row)
    level = f"{theirs:.2f} on {format_seeds(common or row.seeds)}"
    if common and set(common) != set(mine.seeds):
        level += f", where {mine.shown} has {ours:.2f}"
    units = mine.units if gap.images_fixed else f"{mine.units}, test images"
    over = f"over {mine.units} alone, of these trained models" if gap.models_fixed else f"over {units} and seeds"
    if gap.models_fixed and not gap.images_fixed:
        over = f"over {mine.units} and test images, of these trained models"
    if not common:
        over += "; the two have no seed in common"
    if math.isnan(gap.interval):
        return f"{row.full_name} with {level}: {gap.mean:+.2f} points on one {mine.units.removesuffix('s')}"
    return (
        f"{row.full_name} with {level}: {gap.mean:+.2f} ± {gap.interval:.2f} points, p {format_p_value(gap.p)}, {over}"
    )
