"""Rank intervals of the methods of one task or several, in the manner of a critical-difference diagram."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.analysis.aggregate import unique_row_names
from ifsl_bench.analysis.ranking import RankedRow
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.reporting.figures.style import (
    DARK,
    draw_legend_below,
    estimate_text_height,
    label_rows,
    make_panels,
    marker_style,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.utils.errors import UserError

RANK_LEGEND_TEXTS = ("place by Acc.", "ranks it can have")


@with_figure_style()
def draw_ranks(results_of_tasks: Sequence[TaskResults], wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw a panel a task: the ranks that each row can have (``table --rank``), and its place by accuracy as a marker.

    Two rows whose bars share no rank are significantly apart, all pairs at once, at a chance of 5% of any mistake. A
    diagram of critical differences (Demsar 2006, JMLR 7:1) joins methods that cannot be told apart; bars say the same
    where that is not transitive. Behind a name is its accuracy. Provisional rows are left out, which a note names.

    Args:
        results_of_tasks: the results of each task.
        wide: two columns of a paper wide.

    Raises:
        UserError: a task without ranked rows.
    """
    placed = [_rows_with_ranks(task_results) for task_results in results_of_tasks]
    across = min(len(results_of_tasks), 2) if wide else 1
    each = estimate_text_height(max(len(ranked) for ranked in placed), more=0.6)
    figure, panels = make_panels(len(results_of_tasks), across, each, wide)
    for axes, task_results, ranked in zip(panels, results_of_tasks, placed, strict=True):
        _draw_panel(axes, task_results, ranked)
    keys = [
        Line2D([], [], color=DARK, marker="o", markersize=5, markeredgewidth=0, linestyle="none"),
        Line2D([], [], color=DARK, linewidth=4, alpha=0.4, solid_capstyle="round"),
    ]
    draw_legend_below(figure, keys, RANK_LEGEND_TEXTS)
    out = {
        task_results.task_name: [place.row.display_name for place in task_results.ranked_rows if place.is_provisional]
        for task_results in results_of_tasks
    }
    return figure, [
        f"{task}: not ranked, being provisional: {', '.join(names)}" for task, names in out.items() if names
    ]


def _rows_with_ranks(task_results: TaskResults) -> list[RankedRow]:
    ranked = [place for place in task_results.ranked_rows if not place.is_provisional]
    if not ranked:
        raise UserError(
            f"{task_results.task_name}: no row of these is ranked, for which it takes three seeds: "
            f"ifsl-bench run --task {task_results.task_name} --method {task_results.rows[0].label} --seeds 3"
        )
    return ranked


def _draw_panel(axes: Axes, task_results: TaskResults, ranked: Sequence[RankedRow]) -> None:
    names = unique_row_names([place.row for place in ranked])
    labels = []
    for at, (place, name) in enumerate(zip(ranked, names, strict=True)):
        assert place.rank_interval is not None
        look = marker_style(place.row.label)
        axes.plot(
            [place.rank_interval.best_rank, place.rank_interval.worst_rank],
            [at, at],
            color=look["color"],
            linewidth=4,
            alpha=0.4,
            solid_capstyle="round",
            gid=f"ranks of {name}",
        )
        axes.plot(_place_by_accuracy(place, task_results), at, **look | {"markersize": 5}, gid=f"place of {name}")
        labels.append(f"{strip_markup(name)}  {place.row.summarise_metrics()['acc'].mean:.1f}")
    last = max(place.n_ranked_together for place in ranked)
    axes.set(title=task_results.task_name, xlabel="rank", xlim=(0.5, last + 0.5), ylim=(len(ranked) - 0.4, -0.6))
    label_rows(axes, labels)
    axes.annotate(
        "Acc. (%)",
        (0, 1),
        (-3.5, 2),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=DARK,
        annotation_clip=False,
    )
    axes.set_xticks([rank for rank in range(1, last + 1) if last < 12 or rank % 2])


def _place_by_accuracy(place: RankedRow, task_results: TaskResults) -> int:
    """Return the place of a row by accuracy, among the rows that it is ranked among."""
    family = task_results.ranking.find_ranking_containing(place.row).family
    before = itertools.takewhile(lambda better: better is not place, task_results.ranking.ranked_rows)
    return 1 + sum(better.row in family for better in before)
