"""An episode in the plane of its first two principal components, before and after the novel classes are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ifsl_bench.experiments.evaluate_stage import EvaluationContext
from ifsl_bench.plugin.method import Query, masked_logits, predict_with_method
from ifsl_bench.reporting.figures.models import PredictedEpisode, predict_episode
from ifsl_bench.reporting.figures.style import (
    DARK,
    LegendMark,
    draw_legend_below,
    make_figure,
    marker_without_line,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.reporting.plot_styles import MATPLOTLIB_MARKERS, METHOD_COLOURS
from ifsl_bench.utils.errors import UserError

GRID_POINTS_PER_SIDE = 600  # of the plane, along each side: fewer are stairs in two columns
MAX_POINTS_PER_QUERY_BATCH = 65536  # points that a method is asked for
MIN_REGION_DEPTH_FOR_NAME = 27  # points around the name of a region
REGION_BORDER_WIDTH = 0.7  # points of a paper, of a line between regions
GREY, BASE = "#9A9A9A", "#E6E6E6"

LEGEND_MARKS: list[LegendMark] = [
    (Line2D([], [], **marker_without_line("o", 5.5, "white", "black", 0.4)), "support"),
    (Line2D([], [], **marker_without_line("o", 3, DARK)), "novel query"),
    (Line2D([], [], **marker_without_line("o", 3.5, GREY)), "base query"),
    (Line2D([], [], **marker_without_line("x", 4, "black", edge_width=0.8)), "wrong"),
    (Patch(facecolor=BASE, edgecolor="white"), "base classes (white: borders)"),
]


@dataclass(frozen=True)
class EpisodePlane:
    """An episode in two dimensions, with the answers of a method on a grid of points.

    Attributes:
        episode: with the method's answer.
        support_points, query_points: [S, 2] and [Q, 2].
        variance_shares: shares of the features' variance along the two axes.
        grid_x, grid_y: [P], coordinates of the grid.
        answers_before, answers_after: [P, P], rows along y: the joint label among base classes alone, and among all.
    """

    episode: PredictedEpisode
    support_points: np.ndarray
    query_points: np.ndarray
    variance_shares: tuple[float, float]
    grid_x: np.ndarray
    grid_y: np.ndarray
    answers_before: np.ndarray
    answers_after: np.ndarray


@torch.no_grad()
def project_episode(context: EvaluationContext, index: int, label: str = "") -> EpisodePlane:
    """Return a test episode as a method sees it, in the plane along which its features vary most.

    Points of the plane are answered by the method itself, as queries of the episode.

    Args:
        context: the trained model.
        index: the number of the test episode.
        label: in place of the job's label.

    Raises:
        UserError: a transductive method, whose answer to a point depends on the others; regular few-shot learning.
    """
    job = context.job
    if job.method.transductive:
        raise UserError(
            f"{job.label} is transductive: what it says of a point depends on the others, so that there "
            f"are no decision regions"
        )
    if not job.task.has_base:
        raise UserError(f"task {job.task.name} has no base classes: there is nothing before the novel ones")
    episode = predict_episode(context, index, label)
    parts = [part.features[0].double().cpu().numpy() for part in (episode.batch.support, episode.batch.query)]
    centre, axes, share = fit_principal_plane(*parts)
    support, query = ((part - centre) @ axes.T for part in parts)
    flat = np.concatenate([support, query])
    low, high = flat.min(0), flat.max(0)
    margin = 0.08 * (high - low)
    x, y = np.linspace(low - margin, high + margin, GRID_POINTS_PER_SIDE, axis=1)
    points = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)  # [P * P, 2]
    logits = _answer_points(context, episode, torch.from_numpy(centre + points @ axes).float())
    base_count = len(episode.base_class_names)
    before, after = (
        part.argmax(-1).reshape(GRID_POINTS_PER_SIDE, GRID_POINTS_PER_SIDE).numpy()
        for part in (logits[:, :base_count], logits)
    )
    return EpisodePlane(episode, support, query, (share[0], share[1]), x, y, before, after)


def fit_principal_plane(*clouds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of clouds of points [n, D], two directions [2, D], and the shares of the variance along them."""
    every = np.concatenate(clouds).astype(np.float64)
    centre = every.mean(0)
    _, values, axes = np.linalg.svd(every - centre, full_matrices=False)
    axes = axes[:2]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1)
    return centre, axes * np.sign(largest), (values**2 / (values**2).sum())[:2]


def _answer_points(ready: EvaluationContext, episode: PredictedEpisode, points: torch.Tensor) -> torch.Tensor:
    """Return joint logits of points [P, D] in the space of features, [P, K + N]."""
    base, logits = ready.method.base, []
    for some in points.to(base.weight).split(MAX_POINTS_PER_QUERY_BATCH):
        query = Query(some[None], torch.nn.functional.linear(some, base.weight, base.bias)[None])
        answer = predict_with_method(ready.method.eval(), ready.job.method_name, episode.batch.support, query)
        logits.append(masked_logits(answer, episode.batch.masked_base_classes)[0].float().cpu())
    return torch.cat(logits)


@with_figure_style()
def draw_episode_pca(planes: Sequence[EpisodePlane], wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw one row for each method, before on the left and after on the right.

    Regions are what the method answers on the plane: grey for base classes, coloured for novel ones. Before, it chooses
    among the base classes alone, as it weighs them in this episode; after, among all. Points are projections: what lies
    off the plane counts too, so that a point may stand in the region of another class and be right. Follows the figure
    "Visualization of a 5-shot 64+5-way episode using PCA" of Ren et al. (2019).

    Args:
        planes: the episode as each method sees it.
        wide: two columns of a paper wide.
    """
    episode = planes[0].episode
    names, handles = class_legend(episode.novel_class_names)
    side = 3.1 if wide else 1.45
    figure = make_figure((side + 0.25) * len(planes) + 0.1, wide)
    for row, (before, after) in zip(planes, figure.subplots(len(planes), 2, squeeze=False), strict=True):
        _draw_panel(before, row, side, after=False)
        _draw_panel(after, row, side, after=True)
        before.set_title(f"{strip_markup(row.episode.label)}, before")
        after.set_title(f"after: {int(row.episode.is_right.sum())} of {len(row.query_points)} right")
        for axes in (before, after):
            label_plane_axes(axes, row.variance_shares)
        after.set_ylabel("")
    draw_legend_below(figure, handles, names, LEGEND_MARKS)
    return figure, []


def class_style(way: int) -> dict[str, Any]:
    """Return colour and marker of the points of a novel class, by its place in the episode."""
    return marker_without_line(
        MATPLOTLIB_MARKERS[way % len(MATPLOTLIB_MARKERS)], 5, METHOD_COLOURS[way % len(METHOD_COLOURS)], "black", 0.4
    )


def class_legend(classes: Sequence[str]) -> tuple[list[str], list[Line2D]]:
    """Return legend entries of an episode's novel classes: N1 with its name, and its points."""
    names = [f"N{way + 1} {name}" for way, name in enumerate(classes)]
    return names, [Line2D([], [], **class_style(way)) for way in range(len(classes))]


def label_plane_axes(axes: Axes, share: Sequence[float] | np.ndarray) -> None:
    """Name the two axes of a plane of principal components, with their shares of the variance.

    Args:
        axes: of the panel.
        share: of the variance along both axes, 0 to 1.
    """
    axes.set(xlabel=f"PC 1 ({100 * share[0]:.0f}%)", ylabel=f"PC 2 ({100 * share[1]:.0f}%)", xticks=[], yticks=[])


def _draw_panel(axes: Axes, plane: EpisodePlane, side: float, after: bool) -> None:
    from scipy.ndimage import maximum_filter, minimum_filter

    base_count, episode = len(plane.episode.base_class_names), plane.episode
    labels = plane.answers_after if after else plane.answers_before
    kinds = np.where(labels < base_count, 0, labels - base_count + 1)
    light = [
        (1 - 0.4 * (1 - np.array(to_rgb(METHOD_COLOURS[way % len(METHOD_COLOURS)])))).tolist()
        for way in range(len(episode.novel_class_names))
    ]
    extent = (plane.grid_x[0], plane.grid_x[-1], plane.grid_y[0], plane.grid_y[-1])
    axes.imshow(
        kinds,
        cmap=ListedColormap([BASE, *light]),
        vmin=-0.5,
        vmax=len(light) + 0.5,
        origin="lower",
        extent=extent,
        aspect="auto",
        interpolation="nearest",
        gid="regions",
    )
    thick = max(2, round(REGION_BORDER_WIDTH / (72 * side / len(labels))))
    edges = maximum_filter(labels, thick) != minimum_filter(labels, thick)
    axes.imshow(
        np.where(edges, 1.0, np.nan),
        cmap=ListedColormap(["white"]),
        origin="lower",
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    _name_regions(axes, plane, kinds)
    novel = episode.indices.query_is_novel[0].cpu().numpy()
    axes.plot(
        *plane.query_points[~novel].T, "o", color=GREY, markersize=3, markeredgewidth=0.3, markeredgecolor="white"
    )
    way = episode.true_labels.numpy() - base_count
    shots = len(plane.support_points) // len(episode.novel_class_names)
    for number in range(len(episode.novel_class_names)):
        axes.plot(*plane.query_points[way == number].T, **class_style(number) | {"markersize": 3, "markeredgewidth": 0})
        axes.plot(
            *plane.support_points[number * shots : (number + 1) * shots].T, **class_style(number) | {"markersize": 5.5}
        )
    among_base = episode.logits[:, :base_count].argmax(-1) == episode.true_labels
    right = (episode.is_right if after else among_base).numpy()
    axes.plot(*plane.query_points[~right].T, "x", color="black", markersize=3.5, markeredgewidth=0.7, gid="wrong")
    axes.set(xlim=extent[:2], ylim=extent[2:])


def _name_regions(axes: Axes, plane: EpisodePlane, kinds: np.ndarray) -> None:
    """Write N1, N2 and so on where a region has room: colours may repeat, and not everyone tells them apart."""
    from scipy.ndimage import distance_transform_edt

    points = np.concatenate([plane.support_points, plane.query_points])
    free = np.ones(kinds.shape, dtype=bool)  # of points, and of the frame
    free[np.searchsorted(plane.grid_y, points[:, 1]), np.searchsorted(plane.grid_x, points[:, 0])] = False
    free[[0, -1]] = free[:, [0, -1]] = False
    for way in range(1, len(plane.episode.novel_class_names) + 1):
        depth = distance_transform_edt((kinds == way) & free)
        if depth.max() >= MIN_REGION_DEPTH_FOR_NAME:
            row, column = divmod(int(depth.argmax()), depth.shape[1])
            axes.text(
                float(plane.grid_x[column]),
                float(plane.grid_y[row]),
                f"N{way}",
                ha="center",
                va="center",
                color="#303030",
                gid=f"region {way}",
            )
