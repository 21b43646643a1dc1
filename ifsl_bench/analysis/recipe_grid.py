"""The grid of a task's recipes and classifiers: its cells, their order, and what explains their variance. No torch.

A classifier is a method with its options, whatever recipe trained the backbone: the label of a row without its recipe.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.grid_variance import SourceShare, split_grid
from ifsl_bench.analysis.image_variance import estimate_image_effects
from ifsl_bench.analysis.ranking import (
    Ranking,
    RankInterval,
    RowDifference,
    common_setting,
    signs_of_significant_differences,
)
from ifsl_bench.analysis.task_results import TaskResults, make_no_results_error
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE
from ifsl_bench.utils.errors import UserError, unknown_name_error

RECIPES, CLASSIFIERS = "recipes", "classifiers"
_CompletePart = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]  # recipes, classifiers, common seeds


@dataclass(frozen=True, eq=False)
class CellOrder:
    """The recipes under one classifier, or the classifiers under one recipe, from the highest mean to the lowest.

    Attributes:
        ordered_factor: :data:`RECIPES` or :data:`CLASSIFIERS`.
        fixed_name: the classifier, or the recipe.
        ordered_names: of the recipes or classifiers.
        ordered_rows: their rows.
        rank_intervals: the places that each can have, for all at once with a confidence of 95%.
        indistinguishable_groups: the largest sets of names of which no two are told apart, in the order of the names.
        models_fixed: whether some differences are of trained models alone, with fewer than two seeds in common.
    """

    ordered_factor: str
    fixed_name: str
    ordered_names: tuple[str, ...]
    ordered_rows: tuple[SeedAggregate, ...]
    rank_intervals: tuple[RankInterval, ...]
    indistinguishable_groups: tuple[tuple[str, ...], ...]
    models_fixed: bool


@dataclass(frozen=True, eq=False)
class GridVariance:
    """What explains the variance of the cells of a complete part of the grid.

    Attributes:
        recipes: of the part.
        classifiers: of the part.
        seeds: that all of its cells have; one where all seeds are the same by construction.
        share_by_source: source -> its share, see :func:`ifsl_bench.analysis.grid_variance.split_grid`.
        total_variance: the variance of a single value, in squared points.
        protocol: that the rows were measured by.
        has_one_pretraining: whether the seeds are of meta-training alone.
    """

    recipes: tuple[str, ...]
    classifiers: tuple[str, ...]
    seeds: tuple[int, ...]
    share_by_source: Mapping[str, SourceShare]
    total_variance: float
    protocol: Protocol
    has_one_pretraining: bool


@dataclass(frozen=True, eq=False)
class RecipeGrid:
    """The measured rows of a task by recipe and classifier.

    Attributes:
        task_results: the results of the task.
        metric: that recipes and classifiers are in order of, and that is split.
        recipes: those of some row, the one with the highest means first.
        classifiers: those that were measured under two recipes or more, likewise.
        cells: (recipe, classifier) -> the row; your own where there is a stored one too.
        classifiers_with_one_recipe: classifiers with one recipe, which are left out.
    """

    task_results: TaskResults
    metric: str
    recipes: tuple[str, ...]
    classifiers: tuple[str, ...]
    cells: Mapping[tuple[str, str], SeedAggregate]
    classifiers_with_one_recipe: tuple[str, ...]

    @property
    def missing_cells(self) -> list[tuple[str, str]]:
        """The cells without a row, as (recipe, classifier)."""
        return [cell for cell in itertools.product(self.recipes, self.classifiers) if cell not in self.cells]

    @cached_property
    def cell_orders(self) -> list[CellOrder]:
        """The order of recipes under each classifier, then that of classifiers under each recipe."""
        lists = [(RECIPES, n, {r: row for (r, c), row in self.cells.items() if c == n}) for n in self.classifiers]
        lists += [(CLASSIFIERS, n, {c: row for (r, c), row in self.cells.items() if r == n}) for n in self.recipes]
        return [_make_cell_order(of, under, rows, self.metric) for of, under, rows in lists if len(rows) > 1]

    @cached_property
    def variance_splits(self) -> list[GridVariance]:
        """The split of the largest complete part of the grid; and of the largest one with several seeds, if another.

        Complete parts have two recipes at least. Of parts with as many cells, the one with more seeds counts, or else
        with more recipes.
        """
        parts = sorted(self._find_complete_parts())  # of equals the first by name is taken
        whole = max(parts, key=_complete_part_size)
        several = [part for part in parts if len(part[2]) > 1]
        chosen = [whole, max(several, key=_complete_part_size)] if len(whole[2]) < 2 and several else [whole]
        return [self._split_variance(*part) for part in chosen]

    def _find_complete_parts(self) -> list[_CompletePart]:
        """Return recipes, classifiers and common seeds of complete parts, for each set of seeds that cells share."""
        seeds_of = {cell: frozenset(row.seeds) for cell, row in self.cells.items()}
        parts = []
        for seeds in {a & b for a in seeds_of.values() for b in seeds_of.values()} - {frozenset()}:
            there = {cell for cell, of_cell in seeds_of.items() if seeds <= of_cell}
            have = {recipe: frozenset(c for c in self.classifiers if (recipe, c) in there) for recipe in self.recipes}
            for shared in _all_intersections(have.values()):
                recipes = tuple(recipe for recipe in self.recipes if shared <= have[recipe])
                if len(recipes) > 1 and shared:
                    parts.append((recipes, tuple(c for c in self.classifiers if c in shared), tuple(sorted(seeds))))
        return parts

    def _split_variance(
        self, recipes: tuple[str, ...], classifiers: tuple[str, ...], seeds: tuple[int, ...]
    ) -> GridVariance:
        rows = [self.cells[cell] for cell in itertools.product(recipes, classifiers)]
        fixed = all(row.is_seed_independent for row in rows)
        used = seeds[:1] if fixed else seeds
        x = np.stack([row.metric_by_sequence(self.metric, used) for row in rows])
        images = estimate_image_effects(rows, self.metric, used, models_fixed=len(used) < 2)
        shares = split_grid(x.reshape(len(recipes), len(classifiers), *x.shape[1:]), images)
        total = sum(share.variance.estimated_value for share in shares.values())
        one_pretraining = any(row.has_one_pretraining for row in rows)
        return GridVariance(recipes, classifiers, used, shares, total, rows[0].protocol, one_pretraining)


def make_recipe_grid(task_results: TaskResults, metric: str = "acc") -> RecipeGrid:
    """Return the grid of the rows of a task.

    Args:
        task_results: the results of the task, with the rows of the recipes to compare.
        metric: that recipes and classifiers are in order of.

    Raises:
        UserError: there are no rows, none with the metric, or no two of one classifier on backbones of two recipes.
    """
    if not task_results.rows:
        raise make_no_results_error(task_results)
    cells: dict[tuple[str, str], SeedAggregate] = {}
    for row in task_results.rows:
        if row.recipe and metric in row.metric_names:
            cells.setdefault((row.recipe, row.label_without_recipe), row)
    if not cells and any(row.recipe for row in task_results.rows):
        metrics = {name for row in task_results.rows for name in row.metric_names}
        raise unknown_name_error("metric", metric, metrics, where=f"of the measured rows of {task_results.task_name}")
    counts: dict[str, int] = {}
    for _, classifier in cells:
        counts[classifier] = counts.get(classifier, 0) + 1
    shared = [classifier for classifier, count in counts.items() if count > 1]
    if not shared and task_results.task.pretraining.backbone in (NO_BACKBONE, INCLUDED_BACKBONE):
        raise UserError(f"the data of {task_results.task_name} are features, and recipes train on images")
    if not shared:
        there = ", ".join(sorted({recipe for recipe, _ in cells})) or "none that trains here"
        raise UserError(
            f"no classifier of {task_results.task_name} is measured under two recipes (there are: {there}); "
            f"make rows with: ifsl-bench run --method ncm,teen --task {task_results.task_name} --recipe ce,closer"
        )
    kept = {cell: row for cell, row in cells.items() if cell[1] in shared}
    means = {cell: float(row.metric_by_seed(metric).mean()) for cell, row in kept.items()}
    recipes = _order_by_mean_excess(means, 0)
    classifiers = _order_by_mean_excess(means, 1)
    alone = tuple(classifier for classifier, count in counts.items() if count == 1)
    return RecipeGrid(task_results, metric, recipes, classifiers, kept, alone)


def _complete_part_size(part: _CompletePart) -> tuple[int, int, int]:
    """Return the number of cells, of seeds and of recipes of a complete part."""
    recipes, classifiers, seeds = part
    return len(recipes) * len(classifiers), len(seeds), len(recipes)


def _order_by_mean_excess(means: Mapping[tuple[str, str], float], at: int) -> tuple[str, ...]:
    """Return recipes (at 0) or classifiers (1) by how far their cells are above the mean of the other's cells."""

    def level_of(other: str) -> float:
        return float(np.mean([mean for cell, mean in means.items() if cell[1 - at] == other]))

    others = {cell[1 - at]: level_of(cell[1 - at]) for cell in means}
    above: dict[str, list[float]] = {}
    for cell, mean in means.items():
        above.setdefault(cell[at], []).append(mean - others[cell[1 - at]])
    return tuple(sorted(above, key=lambda name: -float(np.mean(above[name]))))


def _make_cell_order(of: str, under: str, rows: Mapping[str, SeedAggregate], metric: str) -> CellOrder:
    """Return the order of rows by name."""
    ranking = Ranking(list(rows.values()), metric, common_setting(*rows.values()))
    names = sorted(rows, key=lambda name: -ranking.adjusted_mean(rows[name]))
    pairs = list(itertools.combinations(range(len(names)), 2))
    differences: list[RowDifference] = []
    for i, j in pairs:
        a, b = rows[names[i]], rows[names[j]]
        differences.append(ranking.find_ranking_containing(a, b).estimate_row_difference(a, b))
    better = np.zeros((len(names), len(names)), dtype=bool)
    for (i, j), (above, below) in zip(pairs, signs_of_significant_differences(differences), strict=True):
        better[i, j], better[j, i] = above, below
    ranks = [RankInterval(1 + int(better[:, i].sum()), len(names) - int(better[i].sum())) for i in range(len(names))]
    groups = _find_maximal_cliques(~(better | better.T))
    return CellOrder(
        of,
        under,
        tuple(names),
        tuple(rows[name] for name in names),
        tuple(ranks),
        tuple(tuple(names[i] for i in group) for group in groups if len(group) > 1),
        any(difference.models_fixed for difference in differences),
    )


def _find_maximal_cliques(alike: np.ndarray) -> list[tuple[int, ...]]:
    """Return the largest sets of indices of which all pairs are alike, [n, n] bool, in order."""
    near = [set(np.flatnonzero(line).tolist()) - {i} for i, line in enumerate(alike)]
    found: list[tuple[int, ...]] = []

    def grow(clique: set[int], candidates: set[int], done: set[int]) -> None:
        """Add the largest sets that hold a clique and otherwise candidates alone (Bron and Kerbosch 1973)."""
        if not candidates and not done:
            found.append(tuple(sorted(clique)))
            return
        pivot = max(candidates | done, key=lambda i: len(candidates & near[i]))
        for i in sorted(candidates - near[pivot]):
            grow(clique | {i}, candidates & near[i], done & near[i])
            candidates, done = candidates - {i}, done | {i}

    grow(set(), set(range(len(alike))), set())
    return sorted(found)


def _all_intersections(sets: Iterable[frozenset[str]]) -> set[frozenset[str]]:
    """Return all intersections of one set or more."""
    closed: set[frozenset[str]] = set()
    for one in set(sets):
        closed |= {one} | {one & other for other in closed}
    return closed
