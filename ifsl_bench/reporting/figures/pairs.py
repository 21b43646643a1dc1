"""Paired differences of accuracy, of every two methods of a task, as a heat map."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ifsl_bench.analysis.aggregate import SeedAggregate, unique_row_names
from ifsl_bench.analysis.ranking import MIN_SEEDS_FOR_RANK, Ranking, common_setting, signs_of_significant_differences
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.figures.style import (
    COLUMN,
    PAGE,
    make_figure,
    sort_rows_by_accuracy,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.utils.errors import UserError

# From orange, worse, over white to blue, better, as on the page: told apart with each colour vision deficiency.
DIFFERENCE_COLOUR_MAP = LinearSegmentedColormap.from_list("worse_better", ["#D55E00", "#FFFFFF", "#0072B2"])
# Of the differences are no larger than those that have the full colour: one bad row shall not fade the rest
FULL_COLOUR_QUANTILE = 0.8
LUMINANCE_WEIGHTS_RGB = (0.2126, 0.7152, 0.0722)  # of red, green and blue
MIN_CELL_INCHES_FOR_NUMBER = 0.3  # inches that a cell needs for a number of MIN_FONT_SIZE_POINTS


@with_figure_style()
def draw_pairs(task_results: TaskResults, wide: bool = False, named: bool = False) -> tuple[Figure, list[str]]:
    """Draw row minus column, in points of accuracy: the differences over episodes and seeds of ``compare``.

    A cell has colour where the difference is significant, all pairs of the figure at once (Holm, 5% for any mistake, as
    for ranks); the others are hatched. Numbers stand where there is room for them.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.
        named: whether the user named these very rows. Else those with fewer than three seeds are left out where two
            others are: they are compared over episodes alone, which is another question.

    Raises:
        UserError: fewer than two rows.
    """
    rows = sort_rows_by_accuracy(task_results)
    if len(rows) < 2:
        raise UserError(f"{task_results.task_name}: pairs need at least two rows, there is {len(rows)}")
    few = [row for row in rows if len(row.seeds) < MIN_SEEDS_FOR_RANK and not row.is_seed_independent]
    out = few if not named and len(rows) - len(few) >= 2 else []
    rows = [row for row in rows if row not in out]
    names, count = [strip_markup(name) for name in unique_row_names(rows)], len(rows)
    values, differs = pairwise_differences(task_results, rows)
    side = (PAGE if wide else COLUMN) - 0.3 - 0.06 * max(map(len, names))
    cell = min(side / count, 0.45)
    figure = make_figure(cell * count + 0.85 + 0.06 * max(map(len, names)) * 0.75, wide)
    axes = figure.add_subplot(aspect="equal")
    sizes = np.abs(values[~np.eye(count, dtype=bool)])
    most = max(1.2 * float(np.quantile(sizes, FULL_COLOUR_QUANTILE)), 1e-6)
    mesh = axes.pcolormesh(values, cmap=DIFFERENCE_COLOUR_MAP, vmin=-most, vmax=most, edgecolors="white", linewidth=0.5)
    for i, j in np.ndindex(values.shape):
        if not differs[i, j]:
            hatch = "" if i == j else "//////"
            axes.add_patch(
                Rectangle(
                    (j, i),
                    1,
                    1,
                    facecolor="white",
                    edgecolor="#A0A0A0",
                    hatch=hatch,
                    linewidth=0,
                    gid=f"not significant {i} {j}",
                )
            )
        if i != j and cell >= MIN_CELL_INCHES_FOR_NUMBER:
            dark = differs[i, j] and np.dot(mesh.to_rgba(values[i, j])[:3], LUMINANCE_WEIGHTS_RGB) < 0.5
            box = None if differs[i, j] else {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            number = f"{values[i, j]:+.1f}".replace("-", "\N{MINUS SIGN}")
            axes.text(
                j + 0.5,
                i + 0.5,
                "0.0" if number[1:] == "0.0" else number,
                ha="center",
                va="center",
                bbox=box,
                color="white" if dark else "black",
            )
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.set_yticks(np.arange(count) + 0.5, names)
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(np.arange(count) + 0.5, names, **slant if cell >= 0.2 else {"rotation": 90})  # or they would touch
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    extend: Any = "both" if most < sizes.max() else "neither"
    bar = figure.colorbar(mesh, ax=axes, location="top", fraction=0.05, pad=0.02, aspect=30, extend=extend)
    bar.set_label("row minus column, points of Acc.\n(hatched: not significant)")
    bar.ax.spines[:].set_visible(False)
    named_few = [name for name, row in zip(names, rows, strict=True) if row in few]
    notes = {
        f"with fewer than {MIN_SEEDS_FOR_RANK} seeds, so that a difference says little about the method": named_few,
        f"left out, having fewer than {MIN_SEEDS_FOR_RANK} seeds (--method names them)": [
            row.name_with_origin for row in out
        ],
    }
    return figure, [f"{note}: {', '.join(which)}" for note, which in notes.items() if which]


def pairwise_differences(task_results: TaskResults, rows: list[SeedAggregate]) -> tuple[np.ndarray, np.ndarray]:
    """Return row minus column [n, n], as ``compare`` has it, and which differ from 0.

    By Holm's procedure over all one-sided hypotheses.

    Args:
        task_results: the results of the task.
        rows: the rows, in the order of the figure.
    """
    ranking_in = functools.cache(lambda setting: Ranking(task_results.comparable_rows, setting=setting))
    pairs = list(itertools.combinations(range(len(rows)), 2))
    gaps = []
    for i, j in pairs:
        a, b = rows[i], rows[j]
        ranking = ranking_in(common_setting(a, b, default=task_results.ranking_setting)).find_ranking_containing(a, b)
        gaps.append(ranking.estimate_row_difference(a, b, [seed for seed in a.seeds if seed in b.seeds]))
    values, differs = np.zeros((len(rows),) * 2), np.zeros((len(rows),) * 2, dtype=bool)
    for (i, j), gap, either_way in zip(pairs, gaps, signs_of_significant_differences(gaps), strict=True):
        values[i, j], values[j, i] = gap.mean, -gap.mean
        differs[i, j] = differs[j, i] = either_way.any()
    return values, differs
