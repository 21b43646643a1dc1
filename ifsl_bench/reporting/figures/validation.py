"""Accuracy on validation episodes in the course of meta-training."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.figures.rows import by_accuracy, named_looks
from ifsl_bench.reporting.figures.style import DARK, grid, legend_below, new_figure, styled
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError

RING: dict[str, Any] = {"marker": "o", "markersize": 6.5, "markerfacecolor": "none", "markeredgewidth": 0.7,
                        "linestyle": "none"}  # fmt: skip


@styled()
def draw(board: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """A line is the mean over a row's seeds, with those as faint lines; a ring is where most seeds' model was taken.

    These are the validation episodes that checkpoints are watched on, not those that options are chosen on. Rows that
    are not meta-trained are left out.

    Raises:
        UserError: no row is meta-trained.
    """
    rows = [row for row in by_accuracy(board) if all(result.training.get("validation") for result in row.results)]
    if not rows:
        raise UserError(f"{board.name}: no row of these is meta-trained, so that there is no validation to draw")
    names, looks = named_looks(rows)
    keys: dict[str, dict[str, Any]] = {"step kept": RING | {"markeredgecolor": DARK}}
    if any(len(row.seeds) > 1 for row in rows):
        keys = {"a seed": {"color": DARK, "linewidth": 0.5, "alpha": 0.5}, **keys}
    legend = [*names, *keys]
    figure = new_figure(2.0, wide)
    axes = figure.add_subplot(xlabel="steps of meta-training", ylabel="validation Acc. (%)")
    for row, name, look in zip(rows, names, looks, strict=True):
        seeds = {result.seed: _history(result) for result in row.results}
        for seed, history in seeds.items() if len(seeds) > 1 else ():
            axes.plot([*history], [*history.values()], color=look["color"], linewidth=0.5, alpha=0.35, zorder=1,
                      gid=f"seed {seed} of {name}")  # fmt: skip
        steps = sorted(set.intersection(*map(set, seeds.values())))
        means = [np.mean([history[step] for history in seeds.values()]) for step in steps]
        axes.plot(steps, means, **look | {"markersize": 3.5}, zorder=2, gid=f"mean of {name}")
        kept_steps = [int(result.training.get("kept_step", 0)) for result in row.results]
        if (usual := max(sorted(set(kept_steps)), key=kept_steps.count)) in steps:
            axes.plot(usual, means[steps.index(usual)], **RING | {"markeredgecolor": look["color"]}, zorder=3,
                      gid=f"kept of {name}")  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    grid(axes, "y")
    legend_below(figure, [Line2D([], [], **look) for look in (*looks, *keys.values())], legend)
    return figure, []


def _history(result: Result) -> dict[int, float]:
    """Accuracies in percent by step."""
    return dict(sorted((int(step), float(value)) for step, value in result.training["validation"].items()))
