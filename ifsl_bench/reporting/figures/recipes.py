"""Recipes and classifiers, each with each: a line a recipe, a mark a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ifsl_bench.analysis.recipe_grid import make_recipe_grid
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.display_names import format_recipe_for_print
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.figures.style import (
    DARK,
    draw_legend_below,
    estimate_text_height,
    label_rows,
    make_figure,
    marker_styles,
    marker_without_line,
    strip_markup,
    with_figure_style,
)

# Of a line's height, that its first and last classifier are above and below its middle
CLASSIFIER_SPREAD = 0.36
RANGE_BAND_COLOUR = "#EFEFEF"


@with_figure_style()
def draw_recipes(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the mean of each recipe and classifier as a mark, with its interval over episodes or orders.

    Recipes and classifiers are in the order of their means, classifiers of a recipe one below the other so that none
    hides another. Grey is from the lowest to the highest classifier of a recipe; faint dots are seeds.

    Args:
        task_results: the results of the task, with the rows of the recipes to draw.
        wide: two columns of a paper wide.

    Raises:
        UserError: no classifier is measured under two recipes.
    """
    grid = make_recipe_grid(task_results)
    protocol = protocol_of_task(task_results.task)
    looks = dict(zip(grid.classifiers, marker_styles(grid.classifiers), strict=True))
    count = len(grid.classifiers)
    offsets = np.linspace(-CLASSIFIER_SPREAD, CLASSIFIER_SPREAD, count) if count > 1 else np.zeros(1)
    figure = make_figure(estimate_text_height(len(grid.recipes), each=max(0.2, 0.055 * count)), wide)
    title = protocol.metric_column("acc").title
    axes = figure.add_subplot(xlabel=f"{title} (%)", ylim=(len(grid.recipes) - 0.5, -0.5))
    for at, recipe in enumerate(grid.recipes):
        means = [float(grid.cells[recipe, name].summarise_metrics()["acc"].mean) for name in grid.classifiers
                 if (recipe, name) in grid.cells]  # fmt: skip
        low, high = min(means), max(means)
        axes.barh(
            at,
            high - low,
            left=low,
            height=0.92,
            color=RANGE_BAND_COLOUR,
            linewidth=0,
            zorder=0,
            gid=f"range of {recipe}",
        )
    seeds_shown = False
    for (recipe, classifier), row in grid.cells.items():
        y = grid.recipes.index(recipe) + offsets[grid.classifiers.index(classifier)]
        acc, look, name = row.summarise_metrics()["acc"], looks[classifier], f"{classifier} | {recipe}"
        axes.plot([acc.mean - acc.interval, acc.mean + acc.interval], [y, y], color=look["color"], linewidth=1.0,
                  gid=f"interval of {name}")  # fmt: skip
        if len(row.seeds) > 1:
            seeds_shown = True
            dots = marker_without_line("o", 1.4, look["color"]) | {"alpha": 0.4, "gid": f"seeds of {name}"}
            axes.plot(row.metric_by_seed("acc").mean(1), [y] * len(row.seeds), **dots)
        axes.plot(acc.mean, y, **look | {"markersize": 3.4}, gid=f"mean of {name}")
    label_rows(axes, [strip_markup(format_recipe_for_print(recipe)) for recipe in grid.recipes])
    keys: list[Any] = [Line2D([], [], **look | {"markersize": 4}) for look in looks.values()]
    marks: list[tuple[Any, str]] = [
        (Rectangle((0, 0), 1, 1, color=RANGE_BAND_COLOUR, linewidth=0), "all classifiers of a recipe")
    ]
    if seeds_shown:
        marks.append((Line2D([], [], **marker_without_line("o", 2, DARK), alpha=0.4), "a seed"))
    marks.append((Line2D([], [], color=DARK, linewidth=1.0), f"95% over {protocol.interval_units_noun}"))
    draw_legend_below(figure, keys, list(grid.classifiers), marks)
    missing = [f"{classifier} | {format_recipe_for_print(recipe)}" for recipe, classifier in grid.missing_cells]
    notes = [f"not measured: {', '.join(missing)}"] if missing else []
    if grid.classifiers_with_one_recipe:
        notes.append(f"measured under one recipe alone, and left out: {', '.join(grid.classifiers_with_one_recipe)}")
    return figure, notes
