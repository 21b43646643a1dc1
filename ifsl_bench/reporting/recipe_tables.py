"""Tables of a task's recipes and classifiers: the grid, where errors are, orders, and shares of variance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ifsl_bench.analysis.aggregate import STORED, SeedAggregate, describe_fixed_factors
from ifsl_bench.analysis.grid_variance import (
    BOTH,
    CLASSIFIER,
    COMMON_GRID_PART,
    FIXED_EFFECT_SOURCES,
    GRID_VARIANCE_SOURCES,
    RECIPE,
)
from ifsl_bench.analysis.recipe_grid import RECIPES, CellOrder, GridVariance, RecipeGrid, make_recipe_grid
from ifsl_bench.analysis.session_variance import IMAGE_SOURCE_NAME, VarianceEstimate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.display_names import format_recipe_for_print
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.columns import UNKNOWN_ESTIMATE, format_plus_minus, recipe_facts, round_unless_nan
from ifsl_bench.reporting.leaderboard import COMMON_SEEDS_NOTE
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_count, format_seeds

# Where errors are: base queries without and with novel classes, novel ones likewise, and what base classes take.
ERROR_METRICS_BY_PROTOCOL = {
    "sessions": ("first", "base", "novel_alone", "novel", "novel_as_base"),
    "episodes": ("base_alone", "base_joint", "novel_alone", "novel_joint", "delta_b"),
}
ERROR_NOTES_BY_PROTOCOL = {
    "sessions": "A_0: base accuracy before any session; base and novel: among all classes after the last session; "
    "novel alone: novel queries right among the novel classes; novel as base: novel queries that base classes take.",
    "episodes": "Delta_b: novel joint minus novel alone, minus the novel queries that base classes take and that are "
    "right among the novel classes.",
}
GRID_TABLE_NAME = "recipe x classifier"


@dataclass(frozen=True, eq=False)
class GridCell:
    """A cell of the grid that was measured."""

    recipe: str
    classifier: str
    row: SeedAggregate


@dataclass(frozen=True)
class SourceRow:
    """A source in the split of a grid; the last one is of all together."""

    grid_variance: GridVariance
    source: str


def make_grid_tables(task_results: TaskResults, metric: str = "acc") -> list[Table[Any]]:
    """Return tables of the grid of a task's recipes and classifiers.

    The first is for readers alone: a row for each recipe, a column for each classifier. Then come, for programs too, a
    row for each cell with where its errors are and what it costs; the order of recipes under each classifier, and back;
    and what the variance of a single value is made of.

    Args:
        task_results: the results of the task, with the rows of the recipes to compare.
        metric: that recipes and classifiers are compared by.

    Raises:
        UserError: there is nothing to compare; one order of the classes, whose variance cannot be split, is no error.
    """
    grid = make_recipe_grid(task_results, metric)
    return [make_grid_table(grid), make_errors_table(grid), make_order_table(grid), *make_share_tables(grid)]


def make_grid_table(grid: RecipeGrid) -> Table[str]:
    """Return the grid for readers: recipes by classifiers, and what the recipes cost."""
    protocol = protocol_of_task(grid.task_results.task)
    estimates = {cell: row.summarise_metrics()[grid.metric] for cell, row in grid.cells.items()}
    leading = {
        (recipe, order.fixed_name)
        for order in grid.cell_orders
        if order.ordered_factor == RECIPES
        for recipe in _list_leading_names(order)
    }

    def column(classifier: str) -> Column[str]:
        return Column(
            classifier,
            lambda recipe: (
                format_plus_minus(estimates[recipe, classifier]) if (recipe, classifier) in estimates else "-"
            ),
            is_bold=lambda recipe: (recipe, classifier) in leading,
        )

    costs = {
        recipe: _collect_costs_of_row(grid, next(row for (of, _), row in grid.cells.items() if of == recipe))
        for recipe in grid.recipes
    }

    def cost(heading: str, field: str, form: str, drop: int) -> Column[str]:
        return Column(
            heading,
            lambda recipe: "" if costs[recipe][field] is None else format(costs[recipe][field], form),
            drop_priority=drop,
        )

    columns: list[Column[str]] = [
        Column("recipe", format_recipe_for_print, min_fold_width=12),
        *map(column, grid.classifiers),
        cost("steps", "pretraining_steps", ",", 4),
        cost("passes", "passes", "g", 3),
        cost("at test", "passes_at_test", "g", 1),
        cost("seconds", "pretraining_seconds", ",.0f", 2),
    ]
    title = f"{grid.task_results.task_name}, {protocol.metric_column(grid.metric).title}: {GRID_TABLE_NAME}"
    return Table(columns, grid.recipes, title, _grid_notes(grid, protocol), keeps_all_columns=True)


def _grid_notes(grid: RecipeGrid, protocol: Protocol) -> list[str]:
    rows = list(grid.cells.values())
    notes = [
        f"Means ± 95% intervals over {protocol.interval_units_noun}, averaged over seeds; intervals hold the trained "
        "models fixed."
    ]
    if "sessions" in protocol.figures_and_tables:
        notes[0] = (
            f"Means ± 95% intervals over {protocol.interval_units_noun}, averaged over seeds. Intervals hold fixed "
            f"{describe_fixed_factors(rows, 'the trained models', 'the test images')}."
        )
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for row in rows:
        by_seeds.setdefault(row.seeds, []).append(row.display_name)
    common, *others = sorted(by_seeds, key=lambda seeds: -len(by_seeds[seeds]))
    notes.append(f"Cells are of {format_seeds(common)}" + ("." if not others else "; but these of others:"))
    notes += [f"  {format_seeds(seeds)}: {', '.join(by_seeds[seeds])}." for seeds in others]
    notes.append(
        "passes: of the backbone in a step for each image; at test: for each image that is classified; seconds: of the "
        "training, the fastest seed, on the processors of the results."
    )
    if missing := [f"{classifier} | {format_recipe_for_print(recipe)}" for recipe, classifier in grid.missing_cells]:
        notes.append(f"Not measured: {', '.join(missing)}.")
    if grid.classifiers_with_one_recipe:
        notes.append(f"Measured under one recipe alone, and left out: {', '.join(grid.classifiers_with_one_recipe)}.")
    if knowing := sorted(
        {format_recipe_for_print(recipe) for (recipe, _), row in grid.cells.items() if row.knows_number_of_classes}
    ):
        notes.append(f"Given the number of novel classes to come: {', '.join(knowing)}.")
    return [*notes, *(f"{remark}." for remark in grid.task_results.remarks)]


def make_errors_table(grid: RecipeGrid) -> Table[GridCell]:
    """Return a row for each cell: where its errors are, and, for programs, all metrics and what it costs."""
    protocol = protocol_of_task(grid.task_results.task)
    kind = "sessions" if "sessions" in protocol.figures_and_tables else "episodes"
    cells = [GridCell(recipe, name, grid.cells[recipe, name])
             for recipe in grid.recipes for name in grid.classifiers if (recipe, name) in grid.cells]  # fmt: skip
    values: dict[GridCell, Mapping[str, Estimate]] = {cell: cell.row.summarise_metrics() for cell in cells}
    metrics = dict.fromkeys([grid.metric, *ERROR_METRICS_BY_PROTOCOL[kind]])
    shown = [name for name in metrics if any(name in of_cell for of_cell in values.values())]
    others = dict.fromkeys(name for of_cell in values.values() for name in of_cell if name not in shown)

    def column(name: str, heading: str | None) -> Column[GridCell]:
        def fields(cell: GridCell) -> dict[str, float | None]:
            value = values[cell].get(name, UNKNOWN_ESTIMATE)
            return {name: round_unless_nan(value.mean), f"{name}_interval": round_unless_nan(value.interval)}

        return Column(
            heading, lambda cell: format_plus_minus(values[cell][name]) if name in values[cell] else "", fields
        )

    columns: list[Column[GridCell]] = [
        Column(make_record_fields=lambda _: {"task": grid.task_results.task_name, "table": "cells"}),
        Column(
            "recipe",
            lambda cell: format_recipe_for_print(cell.recipe),
            lambda cell: {"recipe": cell.recipe},
            min_fold_width=12,
        ),
        Column(
            "classifier", lambda cell: cell.classifier, lambda cell: {"classifier": cell.classifier}, min_fold_width=10
        ),
        *(column(name, protocol.metric_column(name).title) for name in shown),
        *(column(name, None) for name in others),
        Column(
            "seeds",
            lambda cell: str(len(cell.row.seeds)),
            lambda cell: {"seeds": list(cell.row.seeds)},
            drop_priority=1,
        ),
        Column(
            make_record_fields=lambda cell: {
                "source": cell.row.results_origin,
                "method": cell.row.label,
                **_collect_costs_of_row(grid, cell.row),
            }
        ),
    ]
    notes = [ERROR_NOTES_BY_PROTOCOL[kind]]
    if lacking := [cell.row.display_name for cell in cells if "novel_alone" not in values[cell]]:
        which = "all of them" if len(lacking) == len(cells) else ", ".join(lacking)
        notes.append(f"novel alone is not recorded in results of earlier versions: {which}.")
    title = f"{grid.task_results.task_name}: where errors are"
    return Table(columns, cells, title, notes, is_own_row=lambda cell: cell.row.results_origin != STORED)


def make_order_table(grid: RecipeGrid) -> Table[CellOrder]:
    """Return the order of recipes under each classifier, and of classifiers under each recipe."""
    protocol = protocol_of_task(grid.task_results.task)

    def named(order: CellOrder, name: str) -> str:
        return format_recipe_for_print(name) if order.ordered_factor == RECIPES else name

    def text(order: CellOrder) -> str:
        parts = zip(order.ordered_names, order.rank_intervals, order.ordered_rows, strict=True)
        return ", ".join(
            f"{named(order, name)} {row.summarise_metrics()[grid.metric].mean:.2f} ({rank})"
            for name, rank, row in parts
        )

    def alike(order: CellOrder) -> str:
        return (
            "; ".join(", ".join(named(order, name) for name in group) for group in order.indistinguishable_groups)
            or "none"
        )

    def fields(order: CellOrder) -> dict[str, Any]:
        return {
            "task": grid.task_results.task_name,
            "table": "orders",
            "order_of": order.ordered_factor,
            "recipe" if order.ordered_factor != RECIPES else "classifier": order.fixed_name,
            "order": list(order.ordered_names),
            "rank_first": [rank.best_rank for rank in order.rank_intervals],
            "rank_last": [rank.worst_rank for rank in order.rank_intervals],
            "not_told_apart": [", ".join(group) for group in order.indistinguishable_groups],
            "models_fixed": order.models_fixed,
        }

    def under(order: CellOrder) -> str:
        return order.fixed_name if order.ordered_factor == RECIPES else format_recipe_for_print(order.fixed_name)

    columns: list[Column[CellOrder]] = [
        Column("under", under, fields, min_fold_width=10),
        Column("order", text, min_fold_width=34),
        Column("not told apart", alike, min_fold_width=20),
    ]
    notes = [
        "From the highest mean; in parentheses the places that each can have, for all of a line at once with 95% "
        "confidence (over "
        + f"{protocol.interval_units_noun}, seeds, and test images where results record them). No two of a group "
        "of the last column are told apart.",
    ]
    means = [
        [float(row.metric_by_seed(grid.metric).mean()) for row in order.ordered_rows] for order in grid.cell_orders
    ]
    if any(above < below for of_order in means for above, below in itertools.pairwise(of_order)):
        notes.append(COMMON_SEEDS_NOTE)
    if any(order.models_fixed for order in grid.cell_orders):
        notes.append(
            "Where two rows have fewer than two seeds in common, their difference is that of these trained models: it "
            "says nothing of what another seed of the recipe would give."
        )
    return Table(
        columns, grid.cell_orders, f"{grid.task_results.task_name}: recipes in order, classifiers in order", notes
    )


def make_share_tables(grid: RecipeGrid) -> list[Table[SourceRow]]:
    """Return the sources of the variance of a single value; none where there is one order of the classes."""
    try:
        splits = grid.variance_splits
    except UserError:
        return []
    return [_share_table(grid, split) for split in splits]


def _share_table(grid: RecipeGrid, split: GridVariance) -> Table[SourceRow]:
    protocol = protocol_of_task(grid.task_results.task)
    unit = protocol.interval_units_noun.removesuffix("s")
    total = "a single one"
    rows = [
        SourceRow(split, source)
        for source in (*(s for s in GRID_VARIANCE_SOURCES if s in split.share_by_source), total)
    ]

    def name(source: str) -> str:
        return source.replace("order", unit)

    def deviation(row: SourceRow) -> str:
        if row.source == total:
            return f"{math.sqrt(split.total_variance):.2f}"
        return "{:.2f} ({:.2f}-{:.2f})".format(
            *_standard_deviation_with_limits(split.share_by_source[row.source].variance)
        )

    def percent(row: SourceRow) -> str:
        if row.source == total:
            return "100%"
        share = split.share_by_source[row.source].percent_of_total_variance
        return f"{share.estimated_value:.1f}% ({share.lower_limit:.1f}-{share.upper_limit:.1f}%)"

    def part(heading: str, *parts: str) -> Column[SourceRow]:
        def text(row: SourceRow) -> str:
            if row.source in (*FIXED_EFFECT_SOURCES, total):
                return ""
            return (
                f"{sum(split.share_by_source[row.source].percent_by_grid_part.get(part, 0.0) for part in parts):.1f}%"
            )

        return Column(heading, text)

    def fields(row: SourceRow) -> dict[str, Any]:
        common = {
            "task": grid.task_results.task_name,
            "table": "shares",
            "source": name(row.source),
            "recipes": list(split.recipes),
            "classifiers": list(split.classifiers),
            "seeds": list(split.seeds),
        }
        if row.source == total:
            return common | {"sd": round_unless_nan(math.sqrt(split.total_variance)), "percent": 100.0}
        share = split.share_by_source[row.source]
        names = {COMMON_GRID_PART: "alike", RECIPE: "by_recipe", CLASSIFIER: "by_classifier", BOTH: "by_both"}
        parts = {names[part]: round_unless_nan(value) for part, value in share.percent_by_grid_part.items()}
        deviations = map(round_unless_nan, _standard_deviation_with_limits(share.variance))
        return (
            common
            | dict(zip(("sd", "sd_low", "sd_high"), deviations, strict=True))
            | {f"percent{end}": round_unless_nan(getattr(share.percent_of_total_variance, which))
               for end, which in (("", "estimated_value"), ("_low", "lower_limit"), ("_high", "upper_limit"))}
            | {f"percent_{part}": value for part, value in parts.items()}
        )  # fmt: skip

    columns: list[Column[SourceRow]] = [
        Column("source", lambda row: name(row.source), fields, min_fold_width=14),
        Column("sd", deviation),
        Column("share of variance", percent),
        part("alike in all cells", COMMON_GRID_PART),
        part("by recipe", RECIPE),
        part("by classifier", CLASSIFIER),
        part("by both", BOTH),
    ]
    cells = f"{format_count(len(split.recipes), 'recipe')} x {format_count(len(split.classifiers), 'classifier')}"
    heading = protocol.metric_column(grid.metric).title
    title = f"{grid.task_results.task_name}: what {heading} varies with; {cells}, {format_seeds(split.seeds)}"
    return Table(columns, rows, title, _share_notes(grid, split, protocol))


def _share_notes(grid: RecipeGrid, split: GridVariance, protocol: Protocol) -> list[str]:
    drawn = "one order of the classes, one support set and one seed"
    if "sessions" not in protocol.figures_and_tables:
        drawn = "one episode and one seed, which varies more than a mean over episodes"
    notes = [
        f"Standard deviations in points, and shares of the variance of a single value: of a cell of this grid, each "
        f"equally likely, on {drawn}; with 95% intervals. Recipes and classifiers are held fixed, and so are the base "
        "and novel classes and what was chosen in validation. What is alike in all cells cancels where two cells are "
        "compared on the same draws. docs/statistics.md has the model."
    ]
    left = [format_recipe_for_print(recipe) for recipe in grid.recipes if recipe not in split.recipes]
    left += [name for name in grid.classifiers if name not in split.classifiers]
    if left:
        notes.append(f"Left out, since they lack cells or seeds: {', '.join(left)}.")
    if len(split.seeds) < 2:
        notes.append("One seed: what a seed does to a recipe or classifier is counted as theirs.")
    elif len(split.seeds) < 3:
        notes.append("Two seeds tell little of how much others vary.")
    if split.has_one_pretraining:
        notes.append("Seeds are of meta-training alone: backbones are held fixed.")
    if IMAGE_SOURCE_NAME not in split.share_by_source:
        notes.append("Test images are held fixed: not all results record the hits of single images.")
    return notes


def _standard_deviation_with_limits(variance: VarianceEstimate) -> tuple[float, float, float]:
    return math.sqrt(variance.estimated_value), math.sqrt(variance.lower_limit), math.sqrt(variance.upper_limit)


def _list_leading_names(order: CellOrder) -> list[str]:
    """Return the names that may be first; none where they all may be."""
    leading = [
        name for name, rank in zip(order.ordered_names, order.rank_intervals, strict=True) if rank.best_rank == 1
    ]
    return leading if len(leading) < len(order.ordered_names) else []


def _collect_costs_of_row(grid: RecipeGrid, row: SeedAggregate) -> dict[str, Any]:
    """Return what a row's recipe costs: steps, passes in a step and at test, and seconds of the fastest seed."""
    facts = recipe_facts(row, grid.task_results.task)
    seconds = [result.cost["pretraining_seconds"] for result in row.results if "pretraining_seconds" in result.cost]
    return {
        "pretraining_steps": facts["pretraining_steps"],
        "passes": facts["passes"],
        "passes_at_test": _passes_at_test(str(row.recipe)),
        "pretraining_seconds": min(seconds, default=None),
        "knows_classes": facts["knows_classes"],
    }


@lru_cache(maxsize=64)
def _passes_at_test(recipe: str) -> float | None:
    """Return the passes of the backbone for each image that is classified; None where the recipe is not here."""
    from ifsl_bench.backbones.find_recipe import find_recipe
    from ifsl_bench.backbones.recipe_rules import passes_at_test

    try:
        return passes_at_test(find_recipe(recipe))
    except UserError:
        return None
