"""Figures of training seeds: the accuracy of each, and that on validation episodes while they were meta-trained."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.figures.style import (
    DARK,
    draw_grid,
    draw_legend_below,
    estimate_text_height,
    label_rows,
    make_figure,
    names_and_styles,
    sort_rows_by_accuracy,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError

SEED_LEGEND_TEXTS = ("a seed", "mean", "95% over episodes")
SEED_SPREAD_IN_LINE = 0.22  # of a line's height, that the first and the last seed are above and below its middle


@with_figure_style()
def draw_seeds(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the mean over episodes of each seed as a dot, and the mean of each row as a line with its interval.

    The interval is over episodes, as in ``table``. The trained models are kept fixed in it; how they vary is what
    the dots show. Seeds stand one below the other, so that none hides another.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.
    """
    rows = sorted(task_results.rows, key=lambda row: -row.summarise_metrics()["acc"].mean)
    names, looks = names_and_styles(rows)
    figure = make_figure(estimate_text_height(len(rows), each=0.2), wide)
    axes = figure.add_subplot(xlabel="Acc. (%)", ylim=(len(rows) - 0.4, -0.6))
    for at, (row, name, look) in enumerate(zip(rows, names, looks, strict=True)):
        acc = row.summarise_metrics()["acc"]
        axes.barh(
            at,
            2 * acc.interval,
            left=acc.mean - acc.interval,
            height=0.5,
            color=look["color"],
            alpha=0.3,
            linewidth=0,
            gid=f"interval of {name}",
        )
        axes.plot([acc.mean] * 2, [at - 0.32, at + 0.32], color=look["color"], linewidth=1.2, gid=f"mean of {name}")
        means = [result.summary["acc"]["mean"] for result in row.results]
        places = at + np.linspace(-SEED_SPREAD_IN_LINE, SEED_SPREAD_IN_LINE, len(means)) if len(means) > 1 else [at]
        axes.plot(means, places, **look | {"markersize": 3, "linestyle": "none"}, gid=f"seeds of {name}")
    label_rows(axes, [strip_markup(name) for name in names])
    keys = [
        Line2D([], [], color=DARK, marker="o", markersize=3, linestyle="none"),
        Line2D([], [], color=DARK, marker="|", markersize=7, markeredgewidth=1.2, linestyle="none"),
        Rectangle((0, 0), 1, 1, color=DARK, alpha=0.3, linewidth=0),
    ]
    draw_legend_below(figure, keys, SEED_LEGEND_TEXTS)
    return figure, []


validation_ring_style: dict[str, Any] = {
    "marker": "o",
    "markersize": 6.5,
    "markerfacecolor": "none",
    "markeredgewidth": 0.7,
    "linestyle": "none",
}


def is_validated(row: SeedAggregate) -> bool:
    """Return whether the meta-training of all seeds of a row was watched on validation episodes."""
    return all(result.training.get("validation") for result in row.results)


@with_figure_style()
def draw_validation(task_results: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the mean over a row's seeds as a line, with those as faint lines.

    A ring is where most seeds' model was taken.

    These are the validation episodes that checkpoints are watched on, not those that options are chosen on. Rows that
    are not meta-trained are left out.

    Args:
        task_results: the results of the task.
        wide: two columns of a paper wide.

    Raises:
        UserError: no row is meta-trained.
    """
    rows = [row for row in sort_rows_by_accuracy(task_results) if is_validated(row)]
    if not rows:
        raise UserError(
            f"{task_results.task_name}: no row of these is meta-trained, so that there is no validation to draw"
        )
    names, looks = names_and_styles(rows)
    keys: dict[str, dict[str, Any]] = {"step kept": validation_ring_style | {"markeredgecolor": DARK}}
    if any(len(row.seeds) > 1 for row in rows):
        keys = {"a seed": {"color": DARK, "linewidth": 0.5, "alpha": 0.5}, **keys}
    legend = [*names, *keys]
    figure = make_figure(2.0, wide)
    axes = figure.add_subplot(xlabel="steps of meta-training", ylabel="validation Acc. (%)")
    for row, name, look in zip(rows, names, looks, strict=True):
        seeds = {result.seed: _validation_accuracies(result) for result in row.results}
        for seed, history in seeds.items() if len(seeds) > 1 else ():
            axes.plot(
                [*history],
                [*history.values()],
                color=look["color"],
                linewidth=0.5,
                alpha=0.35,
                zorder=1,
                gid=f"seed {seed} of {name}",
            )
        steps = sorted(set.intersection(*map(set, seeds.values())))
        means = [np.mean([history[step] for history in seeds.values()]) for step in steps]
        axes.plot(steps, means, **look | {"markersize": 3.5}, zorder=2, gid=f"mean of {name}")
        kept_steps = [int(result.training.get("kept_step", 0)) for result in row.results]
        if (usual := max(sorted(set(kept_steps)), key=kept_steps.count)) in steps:
            axes.plot(
                usual,
                means[steps.index(usual)],
                **validation_ring_style | {"markeredgecolor": look["color"]},
                zorder=3,
                gid=f"kept of {name}",
            )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    draw_grid(axes, "y")
    draw_legend_below(figure, [Line2D([], [], **look) for look in (*looks, *keys.values())], legend)
    return figure, []


def _validation_accuracies(result: Result) -> dict[int, float]:
    """Return accuracies in percent by step."""
    return dict(sorted((int(step), float(value)) for step, value in result.training["validation"].items()))
