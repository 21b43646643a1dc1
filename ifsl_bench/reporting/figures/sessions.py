"""Figures of tasks in sessions: accuracy by session, what is forgotten of each session, and what rows depend on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ifsl_bench.analysis.aggregate import SeedAggregate, group_by_base_only, unique_row_names
from ifsl_bench.analysis.session_variance import (
    ALL_VARIANCE_SOURCES,
    IMAGE_SOURCE_NAME,
    SINGLE_VALUE_VARIANCE_KEY,
    split_variance_of_differences,
    split_variance_of_rows,
)
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.figures.style import (
    COLUMN,
    DARK,
    FAINT,
    PAGE,
    draw_grid,
    draw_legend_below,
    estimate_text_height,
    label_rows,
    line_styles,
    make_figure,
    make_panels,
    names_and_styles,
    sort_rows_by_accuracy,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.reporting.plot_styles import METHOD_COLOURS

ORDER_BAND_PERCENTILES = (2.5, 97.5)  # percent of the orders that are below its ends
FORGETTING_COLOUR_MAP = LinearSegmentedColormap.from_list("accuracy", ["#FFFFFF", "#56B4E9", "#0072B2", "#00304F"])
VARIANCE_FIGURE_NOTE = (
    "sd: of a single value, in points; wrong: how likely one comparison on one order, one support set and one seed has "
    "the wrong sign"
)
IMAGES_HELD_FIXED_NOTE = "test images are held fixed in shares and sd: not all rows record the hits of single images"
COLOUR_OF_VARIANCE_SOURCE = dict(zip(ALL_VARIANCE_SOURCES, METHOD_COLOURS, strict=False))


def require_sessions(task_results: TaskResults) -> None:
    """Raise :class:`UserError` for a task in episodes."""
    protocol_of_task(task_results.task).require_feature(
        "sessions", task_results.task_name, "this figure is of tasks in sessions"
    )


@with_figure_style()
def draw_sessions(task_results: TaskResults, wide: bool = False, named: bool = False) -> tuple[Figure, list[str]]:
    """Draw the accuracy after each session, mean over orders and seeds, in a band that holds 95% of the orders.

    Dotted lines are the models with the rows' A_0 that never answer with a novel class; of more than two the highest,
    unless rows were asked for by name. Published rows that were asked for by name are dashed with hollow marks; else
    all are drawn, faint and dashed.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.
        named: whether rows were asked for by name.
    """
    require_sessions(task_results)
    rows, papers = (
        sort_rows_by_accuracy(task_results),
        [paper for paper in task_results.published_rows if paper.sequence],
    )
    names, looks = names_and_styles(rows)
    of_papers = line_styles([paper.label for paper in papers]) if named else []
    lazy: list[SeedAggregate] = [row for row, _ in group_by_base_only(rows)]
    notes = []
    if len(lazy) > 2 and not named:  # more of them lie on top of each other
        lazy = [max(lazy, key=lambda row: row.metric_after_sessions()[0].mean)]
        notes = ["lazy: the model with the highest A_0 of these rows (--method draws that of each row)"]
    keys: dict[str, dict[str, Any]] = dict(zip(names, looks, strict=True))
    keys |= {
        f"{paper.label}, published": look | {"linestyle": "dashed", "fillstyle": "none", "markeredgewidth": 0.6}
        for paper, look in zip(papers, of_papers, strict=False)
    }
    keys |= {"lazy": {"color": DARK, "linestyle": "dotted"}} if lazy else {}
    if papers and not named:
        keys["published"] = {"color": FAINT, "linestyle": "dashed", "linewidth": 0.6}
    figure = make_figure(2.3, wide)
    axes = figure.add_subplot(xlabel="session", ylabel="Acc. over all classes so far (%)")
    for paper in papers:
        look = keys[f"{paper.label}, published" if named else "published"]
        axes.plot(
            paper.sequence.after if paper.sequence else [],
            **look | {"markersize": 2.5},
            zorder=1,
            gid=f"published {paper.label}",
        )
    for lazy_row in lazy:
        axes.plot([value.mean for value in lazy_row.metric_after_sessions()], **keys["lazy"], zorder=1.5, gid="lazy")
    for row, name, look in zip(rows, names, looks, strict=True):
        low, high = np.percentile(row.metric_after_sessions_by_order(), ORDER_BAND_PERCENTILES, axis=0)
        sessions = np.arange(len(low))
        axes.fill_between(
            sessions, low, high, color=look["color"], alpha=0.2, linewidth=0, zorder=2, gid=f"orders of {name}"
        )
        means = [value.mean for value in row.metric_after_sessions()]
        axes.plot(sessions, means, **look | {"markersize": 2.5}, zorder=3, gid=f"mean of {name}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    draw_grid(axes, "y")
    draw_legend_below(figure, [Line2D([], [], **look) for look in keys.values()], list(keys))
    return figure, notes


@with_figure_style()
def draw_forgetting(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw a triangle for each row: its accuracy on the classes of each session, after that session and each later one.

    Followed down a column, one session's classes are forgotten; the first column has the base classes. One scale for
    all rows.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.
    """
    require_sessions(task_results)
    rows = sort_rows_by_accuracy(task_results)
    # As many next to each other as fill the last line best: no panel stands alone where that can be helped.
    across = max((3, 4, 2) if wide else (2, 3), key=lambda n: (len(rows) - 1) % n / n)
    across = min(len(rows), across)
    triangles = [row.accuracy_triangle() for row in rows]
    count, most = len(triangles[0]), max(float(np.nanmax(triangle)) for triangle in triangles)
    each = 0.25 + 0.85 * (PAGE if wide else COLUMN) / across
    figure, panels = make_panels(len(rows), across, each, wide, more=0.5)
    for place, (axes, triangle, name) in enumerate(zip(panels, triangles, unique_row_names(rows), strict=True)):
        mesh = axes.pcolormesh(
            triangle, cmap=FORGETTING_COLOUR_MAP, vmin=0, vmax=most, edgecolors="white", linewidth=0.4
        )
        axes.set(title=strip_markup(name), xlim=(0, count), ylim=(count, 0), aspect="equal")
        every = list(range(0, count, 1 + count // 8))
        axes.set_xticks([n + 0.5 for n in every], [str(n) for n in every])
        axes.set_yticks([n + 0.5 for n in every], [str(n) for n in every])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if place % across == 0:
            axes.set_ylabel("after session")
        if place + across >= len(rows):
            axes.set_xlabel("classes of session")
    bar = figure.colorbar(mesh, ax=panels, location="top", fraction=0.05, pad=0.02, aspect=40)
    bar.set_label("Acc. on the classes of one session (%)")
    bar.ax.spines[:].set_visible(False)
    return figure, []


@with_figure_style()
def draw_variance(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the shares of the variance of a single value that its order, support set, seed and test images have.

    Above are rows, the best first, below the difference of each to the next. At the right is the standard deviation of
    a single value, and for a difference how likely a single one has the wrong sign.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.
    """
    rows = split_variance_of_rows(task_results, "acc")
    names: dict[SeedAggregate, str] = dict(
        zip([row.row for row in rows], unique_row_names([row.row for row in rows]), strict=True)
    )
    neighbours = [(row.row, after.row) for row, after in itertools.pairwise(rows)]
    differences = [
        split
        for split in split_variance_of_differences(task_results, "acc")
        if (split.row, split.subtracted_row) in neighbours
    ]
    splits = [*rows, *differences]
    labels = [names[row.row] for row in rows]
    labels += [
        f"{names[split.row]} \N{MINUS SIGN} {names[split.subtracted_row]}"
        for split in differences
        if split.subtracted_row
    ]
    of_images = all(
        IMAGE_SOURCE_NAME in split.variances for split in splits
    )  # or bars would not be of the same variance
    parts = [part for part in ALL_VARIANCE_SOURCES if of_images or part != IMAGE_SOURCE_NAME]
    parts = [part for part in parts if any(part in split.variances for split in splits)]
    figure = make_figure(estimate_text_height(len(splits) + bool(differences), each=0.17), wide)
    axes = figure.add_subplot(xlabel="share of the variance of a single value (%)", xlim=(0, 100))
    places = [at + (at >= len(rows)) for at in range(len(splits))]
    for at, split in zip(places, splits, strict=True):
        left, total = 0.0, sum(split.variances[part].estimated_value for part in parts if part in split.variances)
        for part in parts if total else ():
            width = 100 * split.variances[part].estimated_value / total if part in split.variances else 0.0
            axes.barh(
                at, width, left=left, height=0.7, color=COLOUR_OF_VARIANCE_SOURCE[part], linewidth=0, gid=f"{part} {at}"
            )
            left += width
        wrong = f", wrong {100 * split.wrong_sign_chance.chance:.0f}%" if split.wrong_sign_chance else ""
        one = split.variances[SINGLE_VALUE_VARIANCE_KEY].estimated_value
        if IMAGE_SOURCE_NAME in split.variances and not of_images:
            one = max(0.0, one - split.variances[IMAGE_SOURCE_NAME].estimated_value)
        text = f"sd {one**0.5:.2f}{wrong}"
        axes.text(102, at, text, va="center", color=DARK, gid=f"said {at}")
    label_rows(axes, [strip_markup(label) for label in labels])
    axes.set_yticks(places, [strip_markup(label) for label in labels])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    draw_legend_below(figure, [Rectangle((0, 0), 1, 1, color=COLOUR_OF_VARIANCE_SOURCE[part]) for part in parts], parts)
    return figure, [VARIANCE_FIGURE_NOTE] if of_images else [VARIANCE_FIGURE_NOTE, IMAGES_HELD_FIXED_NOTE]
