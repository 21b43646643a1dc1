"""Paired differences of accuracy, of every two methods of a task, as a heat map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ifsl_bench.board.boards import Board
from ifsl_bench.board.columns import HEADINGS
from ifsl_bench.board.measured import PAPER, Row, having
from ifsl_bench.board.rank_intervals import Difference, holm
from ifsl_bench.board.ranking import SEEDS, Ranking, setting_of
from ifsl_bench.common.errors import UserError
from ifsl_bench.figures.rows import by_accuracy, names_of
from ifsl_bench.figures.style import COLUMN, PAGE, new_figure, styled, text_of

# From orange, worse, over white to blue, better, as on the page: told apart with each colour vision deficiency.
COLOURS = LinearSegmentedColormap.from_list("worse_better", ["#D55E00", "#FFFFFF", "#0072B2"])
FULL = 0.8  # of the differences are no larger than those that have the full colour: one bad row shall not fade the rest
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue
NUMBER = 0.3  # inches that a cell needs for a number of SMALLEST points


@styled
def draw(board: Board, wide: bool = False, metric: str = "acc", named: bool = False) -> tuple[Figure, list[str]]:
    """Row minus column, in points of a metric: the differences over episodes and seeds of ``compare``.

    A cell has colour, and its number is dark, where the difference is significant, all pairs of the figure at once
    (Holm, 5% for any mistake, as for ranks). The others are hatched. Numbers stand where there is room for them.

    Args:
        named: whether somebody has asked for these very rows. Else those with fewer than three seeds are left out where
            two others are: they are compared over episodes alone, which is another question.

    Raises:
        UserError: fewer than two rows.
    """
    rows = having(by_accuracy(board), metric)
    if len(rows) < 2:
        raise UserError(f"{board.name}: pairs need at least two rows, there is {len(rows)}")
    enough = [row for row in rows if len(row.seeds) >= SEEDS or row.fixed]
    out = []
    if not named and len(enough) >= 2:
        out, rows = [row for row in rows if not (len(row.seeds) >= SEEDS or row.fixed)], enough
    names, count = [text_of(name) for name in names_of(rows)], len(rows)
    gaps = differences(board, rows, metric)
    values = np.array([[gaps[i][j].mean for j in range(count)] for i in range(count)])
    differs = significant(gaps)
    side = (PAGE if wide else COLUMN) - 0.3 - 0.06 * max(map(len, names))
    cell = min(side / count, 0.45)
    figure = new_figure(cell * count + 0.85 + 0.06 * max(map(len, names)) * 0.75, wide)
    axes = figure.add_subplot(aspect="equal")
    sizes = np.abs(values[~np.eye(count, dtype=bool)])
    most = max(1.2 * float(np.quantile(sizes, FULL)), 1e-6)
    mesh = axes.pcolormesh(values, cmap=COLOURS, vmin=-most, vmax=most, edgecolors="white", linewidth=0.5)
    for i in range(count):
        for j in range(count):
            if not differs[i, j]:
                hatch = "" if i == j else "//////"
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor="white", edgecolor="#A0A0A0", hatch=hatch, linewidth=0,
                                         gid=f"not significant {i} {j}"))  # fmt: skip
            if i != j and cell >= NUMBER:
                dark = differs[i, j] and np.dot(mesh.to_rgba(values[i, j])[:3], LUMINANCE) < 0.5
                box = None if differs[i, j] else {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(j + 0.5, i + 0.5, _number(values[i, j]), ha="center", va="center", bbox=box,
                          color="white" if dark else "black")  # fmt: skip
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.set_yticks(np.arange(count) + 0.5, names)
    if cell < 0.2:  # slanted names would touch
        axes.set_xticks(np.arange(count) + 0.5, names, rotation=90)
    else:
        axes.set_xticks(np.arange(count) + 0.5, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    extend: Any = "both" if most < sizes.max() else "neither"
    bar = figure.colorbar(mesh, ax=axes, location="top", fraction=0.05, pad=0.02, aspect=30, extend=extend)
    bar.set_label(f"row minus column, points of {HEADINGS[metric].text}\n(hatched: not significant)")
    for spine in bar.ax.spines.values():
        spine.set_visible(False)
    few = [name for name, row in zip(names, rows, strict=True) if len(row.seeds) < SEEDS and not row.fixed]
    notes = []
    if few:
        names_text = ", ".join(few)
        notes.append(f"with fewer than {SEEDS} seeds, so that a difference says little about the method: {names_text}")
    if out:
        names_text = ", ".join(row.full_name for row in out)
        notes.append(f"left out, having fewer than {SEEDS} seeds (--method names them): {names_text}")
    return figure, notes


def _number(value: float) -> str:
    text = f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
    return "0.0" if text[1:] == "0.0" else text


def differences(board: Board, rows: list[Row], metric: str) -> list[list[Difference]]:
    """Row minus column, as ``compare`` has it over episodes and seeds: on all seeds that the two have."""
    able, nothing = having(board.compared, metric), Difference(0.0, 0.0, np.inf)
    rankings = {
        setting: Ranking(able, metric, setting) for setting in {PAPER, board.setting, *(row.setting for row in rows)}
    }
    gaps = [[nothing for _ in rows] for _ in rows]
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[:i]):
            common = tuple(seed for seed in a.seeds if seed in b.seeds)
            ranking = rankings[setting_of(a, b, default=board.setting)].of(a, b)
            gaps[i][j] = ranking.difference(a, b, common)
            gaps[j][i] = replace(gaps[i][j], mean=-gaps[i][j].mean)
    return gaps


def significant(gaps: list[list[Difference]]) -> np.ndarray:
    """The cells [n, n] that differ from 0, either way, by Holm's procedure over all one-sided hypotheses."""
    count = len(gaps)
    at = [(i, j) for i in range(count) for j in range(count) if i != j]
    rejected = holm(np.array([gaps[i][j].p_better() for i, j in at]))
    differs = np.zeros((count, count), dtype=bool)
    for (i, j), is_rejected in zip(at, rejected, strict=True):
        differs[i, j] |= is_rejected
    return differs | differs.T
