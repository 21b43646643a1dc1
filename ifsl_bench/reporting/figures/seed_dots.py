"""The accuracy of each training seed, a dot, and of each row, a line."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.figures.rows import named_looks
from ifsl_bench.reporting.figures.style import DARK, heights, legend_below, lines_of_rows, new_figure, styled, text_of

KEY = ("a seed", "mean", "95% over episodes")
SPREAD = 0.22  # of a line's height, that the first and the last seed are above and below its middle


@styled()
def draw(board: TaskResults, wide: bool = False) -> tuple[Figure, list[str]]:
    """Dots are the seeds' means over episodes; the upright line is their mean, Acc. of ``table``, with the 95% interval
    over episodes that stands there, as a bar. The trained models are held fixed in it; how they vary is what the dots
    show. Seeds stand one below the other, so that none hides another.
    """
    rows = sorted(board.rows, key=lambda row: -row.summary()["acc"].mean)
    names, looks = named_looks(rows)
    figure = new_figure(heights(len(rows), each=0.2), wide)
    axes = figure.add_subplot(xlabel="Acc. (%)", ylim=(len(rows) - 0.4, -0.6))
    for at, (row, name, look) in enumerate(zip(rows, names, looks, strict=True)):
        acc = row.summary()["acc"]
        axes.barh(at, 2 * acc.interval, left=acc.mean - acc.interval, height=0.5, color=look["color"], alpha=0.3,
                  linewidth=0, gid=f"interval of {name}")  # fmt: skip
        axes.plot([acc.mean] * 2, [at - 0.32, at + 0.32], color=look["color"], linewidth=1.2, gid=f"mean of {name}")
        means = [result.summary["acc"]["mean"] for result in row.results]
        places = at + np.linspace(-SPREAD, SPREAD, len(means)) if len(means) > 1 else [at]
        axes.plot(means, places, **look | {"markersize": 3, "linestyle": "none"}, gid=f"seeds of {name}")
    lines_of_rows(axes, [text_of(name) for name in names])
    keys = [
        Line2D([], [], color=DARK, marker="o", markersize=3, linestyle="none"),
        Line2D([], [], color=DARK, marker="|", markersize=7, markeredgewidth=1.2, linestyle="none"),
        Rectangle((0, 0), 1, 1, color=DARK, alpha=0.3, linewidth=0),
    ]
    legend_below(figure, keys, KEY)
    return figure, []
