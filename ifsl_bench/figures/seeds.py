"""The accuracy of each training seed, a dot, and of each row, a line."""

from __future__ import annotations

from matplotlib.figure import Figure

from ifsl_bench.board.boards import Board
from ifsl_bench.figures.rows import names_of
from ifsl_bench.figures.style import DARK, dots, grid, heights, new_figure, styled, text_of


@styled
def draw(board: Board, wide: bool = False) -> tuple[Figure, list[str]]:
    """Dots are the seeds' means over episodes; the upright line is their mean, Acc. of ``table``, with the 95% interval
    over episodes that stands there, as a bar. The trained models are held fixed in it; how they vary is what the dots
    show.
    """
    rows = sorted(board.rows, key=lambda row: -row.summary()["acc"].mean)
    names = names_of(rows)
    figure = new_figure(heights(len(rows)), wide)
    axes = figure.add_subplot(xlabel="Acc. (%)", ylim=(len(rows) - 0.4, -0.6))
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        look, acc = dots(row.label), row.summary()["acc"]
        axes.barh(at, 2 * acc.interval, left=acc.mean - acc.interval, height=0.5, color=look["color"], alpha=0.3,
                  linewidth=0, gid=f"interval of {name}")  # fmt: skip
        axes.plot([acc.mean] * 2, [at - 0.32, at + 0.32], color=look["color"], linewidth=1.2, gid=f"mean of {name}")
        means = [result.summary["acc"]["mean"] for result in row.results]
        shown = look | {"markersize": 3.5, "markeredgecolor": "white", "markeredgewidth": 0.4}
        axes.plot(means, [at] * len(means), **shown, gid=f"seeds of {name}")
    axes.set_yticks(range(len(rows)), [text_of(name) for name in names])
    axes.tick_params(axis="y", length=0, labelcolor=DARK)
    axes.spines["left"].set_visible(False)
    grid(axes)
    return figure, []
