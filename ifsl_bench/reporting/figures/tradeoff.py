"""Base against novel accuracy: a row is a curve that a bias on its novel logits traces, its argmax a point on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.analysis.aggregate import SeedAggregate, calibrated_accuracies, mean_bias_curve
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.figures.style import (
    DARK,
    FAINT,
    draw_legend_below,
    make_figure,
    names_and_styles,
    sort_rows_by_accuracy,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.utils.errors import UserError

LABEL_BACKGROUND_STYLE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
LEVEL_LINE_STYLE: dict[str, Any] = {"color": FAINT, "linewidth": 0.5, "zorder": 1, "scalex": False, "scaley": False}
AXIS_MARGIN_SHARE = 0.35  # of the range of the points, around them; the rest of a curve is cut


@with_figure_style()
def draw_tradeoff(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the rows of a task, the best first in the legend.

    A point is where a row's argmax puts it, a hollow one where the bias that validation episodes chose does. Along a
    curve the bias goes from where all is called base (below, right) to where all is called novel.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.

    Raises:
        UserError: regular few-shot learning, sessions, or no validation episodes to calibrate on.
    """
    if not task_results.task.has_base:
        raise UserError(f"task {task_results.task_name} has no base classes, so there is no trade-off with novel ones")
    why = "which have no base-novel curve; take a task in episodes"
    protocol_of_task(task_results.task).require_feature("tradeoff", task_results.task_name, why, ", ")
    rows = sort_rows_by_accuracy(task_results)
    names, looks = names_and_styles(rows)
    curves = [curve for row in rows if (curve := mean_bias_curve(row)) is not None]
    if len(curves) < len(rows):
        raise UserError(
            f"{task_results.task_name}: its rows have no base-novel curves, since no validation episodes can be drawn"
        )
    summaries = [row.summarise_metrics() for row in rows]
    points = np.array([[values[name].mean for name in ("base_joint", "novel_joint")] for values in summaries])
    calibrated = np.array([calibrated_accuracies(row) for row in rows])
    keys = {
        "with one bias (cal.)": _hollow_style({"color": DARK, "marker": "o", "linestyle": "none"}),
        "equal Acc.": {"color": FAINT, "linewidth": 0.8},
        "equal harmonic mean": {"color": FAINT, "linewidth": 0.8, "linestyle": "dashed"},
    }
    legend = [*names, *keys]
    figure = make_figure(2.9 if wide else 2.4, wide)
    axes = figure.add_subplot(xlabel="base accuracy, joint (%)", ylabel="novel accuracy, joint (%)")
    for look, name, curve in zip(looks, names, curves, strict=True):
        axes.plot(curve[:, 1], curve[:, 2], **look | {"marker": ""}, label=strip_markup(name), zorder=2)
    for row, look, point, biased in zip(rows, looks, points, calibrated, strict=True):
        here = look | {"linestyle": "none", "markersize": 5}
        axes.plot(*point, **here, zorder=4, gid=f"argmax of {row.label}")
        axes.plot(*biased, **_hollow_style(here), zorder=3, gid=f"calibrated of {row.label}")
    _set_axis_limits(axes, np.concatenate([points, calibrated]))
    _draw_equal_accuracy_lines(axes, rows[0])
    _draw_equal_harmonic_mean_lines(axes)
    draw_legend_below(figure, [Line2D([], [], **look) for look in (*looks, *keys.values())], legend)
    return figure, []


def _hollow_style(look: dict[str, Any]) -> dict[str, Any]:
    return look | {"fillstyle": "none", "markeredgewidth": 0.8, "markersize": 4}


def _set_axis_limits(axes: Axes, points: np.ndarray) -> None:
    low, high = points.min(0), points.max(0)
    size = np.maximum(high - low, 4)
    (left, bottom), (right, top) = (
        np.maximum(0, low - AXIS_MARGIN_SHARE * size),
        np.minimum(100, high + AXIS_MARGIN_SHARE * size),
    )
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _round_levels(least: float, most: float) -> np.ndarray:
    """Return at most six round numbers between two."""
    step = next(step for step in (1, 2, 5, 10, 20) if (most - least) / step <= 6)
    return np.arange(np.ceil(least / step) * step, most, step)


def _annotate_point(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **more: Any) -> None:
    """Write a text at a point, shifted by an offset in points of print."""
    axes.annotate(text, at, offset, textcoords="offset points", color=DARK, annotation_clip=False, **more)


def _draw_equal_accuracy_lines(axes: Axes, row: SeedAggregate) -> None:
    """Draw lines of equal Acc., which weighs base and novel accuracy by their queries."""
    shape = row.results[0].episodes.shape_values
    share = shape["base_queries"] / (shape["base_queries"] + shape["novel_queries"])
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for level in _round_levels(share * left + (1 - share) * bottom, share * right + (1 - share) * top):
        x = np.array([left, right])
        axes.plot(x, (level - share * x) / (1 - share), **LEVEL_LINE_STYLE, gid=f"Acc. {level:g}")
        out = (level - share * right) / (1 - share)  # where the line leaves at the right
        if bottom <= out <= top - 0.04 * (top - bottom):
            _annotate_point(axes, f"{level:g}", (right, out), (2, 0), va="center")
        elif out < bottom:  # it leaves below
            at = (level - (1 - share) * bottom) / share
            _annotate_point(
                axes, f"{level:g}", (at, bottom), (0, 2), ha="center", bbox=LABEL_BACKGROUND_STYLE, zorder=1.5
            )
    _annotate_point(axes, "Acc.", (1, 1), (2, 0), xycoords="axes fraction", va="center")


def _draw_equal_harmonic_mean_lines(axes: Axes) -> None:
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    least, most = (2 * x * y / (x + y) if x + y else 0.0 for x, y in ((left, bottom), (right, top)))
    for level in _round_levels(least, most):
        if level <= 0:
            continue
        x = np.linspace(max(left, level / 2 + 1e-6), right, 200)
        dashes = {"linestyle": (0, (4, 3)), "gid": f"harmonic {level:g}"}
        axes.plot(x, level * x / (2 * x - level), **LEVEL_LINE_STYLE | dashes)
        if 2 * top > level and left <= (at := level * top / (2 * top - level)) <= right - 0.04 * (right - left):
            _annotate_point(axes, f"{level:g}", (at, top), (0, 1.5), ha="center", va="bottom")
