"""Base weights and the attractors that they produce, in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ifsl_bench.experiments.evaluate_stage import EvaluationContext
from ifsl_bench.plugin.attractor_method import AttractorMethod
from ifsl_bench.plugin.method import predict_with_method
from ifsl_bench.protocols.loader import Batch
from ifsl_bench.reporting.figures.episode_pca import class_legend, class_style, fit_principal_plane, label_plane_axes
from ifsl_bench.reporting.figures.models import short_novel_names
from ifsl_bench.reporting.figures.style import (
    FAINT,
    LegendMark,
    draw_legend_below,
    make_figure,
    marker_without_line,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.solvers.attractor_prior import AttractorMLP
from ifsl_bench.solvers.episode_problems import LinearLearner
from ifsl_bench.solvers.outcome import Outcome, Solver
from ifsl_bench.solvers.solve import replace_solvers
from ifsl_bench.solvers.tree import Tree, tensor_leaves
from ifsl_bench.utils.errors import UserError

N_EPISODES_PER_CLASS = 20  # in which a class is looked at, as in the paper
MAX_EPISODES_SEARCHED = 2000  # test episodes that these are sought in
ATTRACTOR_COLOUR = "#707070"
attractor_ring_style = marker_without_line("o", 3, "white", ATTRACTOR_COLOUR, 0.5)
produced_attractor_style = marker_without_line("x", 3, ATTRACTOR_COLOUR, edge_width=0.6)  # a shape that no class has
fast_weights_style: dict[str, Any] = {
    "marker": "P",
    "linestyle": "none",
    "markersize": 5,
    "markeredgecolor": "black",
    "markeredgewidth": 0.4,
}
PANEL_EDGE_SHARE = 0.02  # of a panel: half of the widest symbol in its background
LARGE, SMALL = 5.5, 2.5  # points: an attractor of the episode, one of the same class in another
star_marker_style = marker_without_line("*", 8, "black", "white", 0.5)


@dataclass(frozen=True)
class AttractorWeights:
    """A method's weights in the space of the base weights: D numbers each, biases left out.

    Attributes:
        label: of the method.
        base_weights: [K, D], the base classifier's.
        attention_attractors: [K, D], the attractor of an attention that is on one base class alone; None for a static
            one.
        class_attractors: [N, M, D], the attractors of the N novel classes in up to M episodes that have them, the
            episode first; rows of NaN where there are fewer.
        fast_weights: [N, D], the fast weights of the episode.
        classes: short names of the novel classes.
        episode_index: of the episode.
    """

    label: str
    base_weights: np.ndarray
    attention_attractors: np.ndarray | None
    class_attractors: np.ndarray
    fast_weights: np.ndarray
    classes: tuple[str, ...]
    episode_index: int

    @property
    def is_static(self) -> bool:
        """True if all classes share one attractor in every episode."""
        centres = self.class_attractors[np.isfinite(self.class_attractors).all(-1)]
        return bool(np.allclose(centres, centres[0]))


class _RecordingSolver:
    """A solver that records its minima."""

    def __init__(self, solver: Solver, seen: list[Tree]) -> None:
        self.solver, self.seen = solver, seen

    def run(self, objective: Any, v0: Any, args: Any) -> Outcome:
        outcome = self.solver.run(objective, v0, args)
        self.seen.append(outcome.unknowns)
        return outcome


@torch.no_grad()
def collect_attractor_weights(context: EvaluationContext, index: int, label: str = "") -> AttractorWeights:
    """Return the attractors and fast weights of a test episode, and the attractors of its classes in others.

    LR's fast weights are its scores' weights; MLP's are the weights of its part that is linear in the features, W_3.

    Args:
        context: the trained model.
        index: the number of the test episode.
        label: in place of the job's label.

    Raises:
        UserError: a method without attractors; or T-BPTT's that stops early, which finds no minimum.
    """
    job, method = context.job, context.method.eval()
    if not isinstance(method, AttractorMethod):
        raise UserError(f"{job.label} has no attractors; lr+a, lr+s, mlp+a and mlp+s have")
    part = 0 if isinstance(method.learner, LinearLearner) else 1
    size = method.base.weight.shape[1]

    def centres(batch: Batch) -> Tensor:
        return method.centres(batch.support)[part][..., :size].expand(len(batch), method.ways, size)

    loader, dataset = context.make_episode_loader(), context.prepared_task.dataset
    batch, drawn = loader.load_batch(index, 1), loader.sampler.sample(index, 1)
    seen: list[Tree] = []
    with replace_solvers(lambda solver: _RecordingSolver(solver, seen)):
        predict_with_method(method, job.method_name, batch.support, batch.query)
    if not seen:
        raise UserError(f"{job.label} stops its search early, so there is no minimum to show: leave out converge=false")
    fast = tensor_leaves(seen[-1])[part][0, :, :size]
    ids = drawn.classes[0].tolist()
    by_way = [[row] for row in centres(batch)[0]]
    classes = loader.sampler.describe_novel_class_draws(
        min(MAX_EPISODES_SEARCHED, job.task.evaluation.episodes)
    ).to_array()
    for episode in np.flatnonzero(np.isin(classes, ids).any(1)):
        if int(episode) == index or min(map(len, by_way)) >= N_EPISODES_PER_CLASS:
            continue
        rows = centres(loader.load_batch(int(episode), 1))[0]
        for way, class_id in enumerate(classes[episode].tolist()):
            if class_id in ids and len(by_way[ids.index(class_id)]) < N_EPISODES_PER_CLASS:
                by_way[ids.index(class_id)].append(rows[way])
    full = pad_sequence([torch.stack(rows) for rows in by_way], batch_first=True, padding_value=torch.nan)
    names = short_novel_names(dataset, job.task)
    produced = _attention_attractors(method, part)
    return AttractorWeights(
        label or job.label,
        _to_float_array(method.base.weight),
        None if produced is None else _to_float_array(produced[:, :size]),
        _to_float_array(full),
        _to_float_array(fast),
        tuple(names[i] for i in ids),
        index,
    )


def _to_float_array(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def _attention_attractors(method: AttractorMethod, part: int) -> Tensor | None:
    """Return f_phi of each base weight, and U_0, [K, size]; None where no base weight is attended to."""
    memory = next((module for module in method.children() if isinstance(module, AttractorMLP)), None)
    if memory is None:
        return None
    offset = getattr(method, "offset", None)
    return memory(method.base.weight)[part] + (0 if offset is None else offset[part])


@with_figure_style()
def draw_attractors(methods: Sequence[AttractorWeights], wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw a row for each method that attends to base classes: where base weights lead, and an episode.

    Left: base weights (rings), and the attractor that each produces where all attention is on it (crosses). Right: the
    attractors of the episode's classes (large points) and of the same classes in other episodes (small ones), and lines
    to the fast weights that support images pull from there (plus signs). A black star is the one attractor of a static
    method. A panel is the plane of the first two principal components of what it shows; the t-SNE of Ren et al. (2019)
    keeps no distances.

    Args:
        methods: the weights of each method.
        wide: two columns of a paper wide.

    Raises:
        UserError: methods that start from different base weights.
    """
    base = methods[0].base_weights
    if any(method.base_weights.shape != base.shape or not np.allclose(method.base_weights, base) for method in methods):
        raise UserError(
            "these methods start from different base weights, which have no plane in common: draw them one at a time"
        )
    fixed = [method for method in methods if method.is_static]
    rows = [method for method in methods if not method.is_static] or fixed[:1]
    stars = [method for method in fixed if method is not rows[0]]
    across = 1 if rows[0].attention_attractors is None else 2
    names, handles = class_legend(methods[0].classes)
    marks = _legend_marks(rows, bool(fixed))
    side = 2.9 if wide else 1.5 * (1 if across == 2 else 1.6)
    figure = make_figure((side + 0.35) * len(rows), wide)
    for method, panels in zip(rows, figure.subplots(len(rows), across, squeeze=False), strict=True):
        if method.attention_attractors is not None:
            _draw_base_weights(panels[0], method)
            panels[0].set_title(f"{strip_markup(method.label)}: base classes")
        _draw_episode(
            panels[-1], method, [star.class_attractors[0, 0] for star in stars or (fixed if method.is_static else [])]
        )
        shown = f"episode {method.episode_index}"
        panels[-1].set_title(shown if across == 2 else f"{strip_markup(method.label)}: {shown}")
    draw_legend_below(figure, handles, names, marks)
    return figure, [f"{method.label} is static: all of its attractors are the star" for method in stars]


def _legend_marks(rows: Sequence[AttractorWeights], fixed: bool) -> list[LegendMark]:
    """Return legend entries of symbols that every class has, in white; lines join symbols on either side."""
    line: dict[str, Any] = {"linestyle": "-", "linewidth": 0.8, "color": FAINT}
    marks: list[LegendMark] = []
    if rows[0].attention_attractors is not None:
        produced = produced_attractor_style | line
        marks += [
            (Line2D([], [], **attractor_ring_style), "base weights"),
            (Line2D([], [], **produced), "their attractors (joined)"),
        ]
    marks.append(
        (Line2D([], [], **marker_without_line("s", LARGE, "white", "black", 0.4)), "attractors in this episode")
    )
    marks.append(
        (Line2D([], [], **fast_weights_style | line | {"markerfacecolor": "white"}), "their fast weights (joined)")
    )
    if any(np.isfinite(method.class_attractors[:, 1:]).any() for method in rows):
        marks.append(
            (
                Line2D([], [], **marker_without_line("s", SMALL + 0.4, "white", "black", 0.4)),
                "attractors in other episodes",
            )
        )
    return marks + ([(Line2D([], [], **star_marker_style), "static centre")] if fixed else [])


def _draw_base_weights(axes: Axes, weights: AttractorWeights) -> None:
    assert weights.attention_attractors is not None
    centre, across, share = fit_principal_plane(weights.base_weights, weights.attention_attractors)
    base, produced = ((cloud - centre) @ across.T for cloud in (weights.base_weights, weights.attention_attractors))
    for start, end in zip(base, produced, strict=True):
        axes.plot(*np.stack([start, end]).T, color=FAINT, linewidth=0.3, zorder=1)
    axes.plot(*base.T, **attractor_ring_style, zorder=2, gid="base weights")
    axes.plot(*produced.T, **produced_attractor_style, zorder=3, gid="attractors of base classes")
    for way, rows in enumerate(weights.class_attractors):
        axes.plot(*((rows[0] - centre) @ across.T), **class_style(way) | {"markersize": 4.5}, zorder=4)
    label_plane_axes(axes, share)


def _is_inside_panel(points: np.ndarray, across: tuple[float, float], up: tuple[float, float]) -> np.ndarray:
    """Return the points [n, 2] whose symbols lie wholly within a panel: none is cut by its frame."""
    (low, high), edge = np.transpose([across, up]), PANEL_EDGE_SHARE * np.abs(np.ptp([across, up], axis=1))
    return points[((points > low + edge) & (points < high - edge)).all(1)]


def _draw_episode(axes: Axes, weights: AttractorWeights, stars: Sequence[np.ndarray]) -> None:
    shown = weights.class_attractors[np.isfinite(weights.class_attractors).all(-1)]
    centre, across, share = fit_principal_plane(shown, weights.fast_weights)

    def flat(points: np.ndarray) -> np.ndarray:
        return (points - centre) @ across.T

    for way, rows in enumerate(weights.class_attractors):
        look, rows = class_style(way), rows[np.isfinite(rows).all(-1)]
        ends = flat(np.stack([rows[0], weights.fast_weights[way]]))
        axes.plot(*flat(rows[1:]).T, **look | {"markeredgewidth": 0, "markersize": SMALL}, alpha=0.7, zorder=2)
        axes.plot(*ends.T, color=str(look["color"]), linewidth=0.8, zorder=3)
        axes.plot(*ends[0], **look | {"markersize": LARGE}, zorder=5, gid=f"centre {way}")
        axes.plot(*ends[1], **fast_weights_style, color=str(look["color"]), zorder=4, gid=f"fast weights {way}")
    for star in stars:
        axes.plot(*flat(star), **star_marker_style, zorder=6, gid="static centre")
    axes.margins(0.08)
    x_limits, y_limits = axes.get_xlim(), axes.get_ylim()
    if weights.attention_attractors is not None:
        axes.plot(
            *_is_inside_panel(flat(weights.attention_attractors), x_limits, y_limits).T,
            **produced_attractor_style,
            zorder=1,
            scalex=False,
            scaley=False,
            gid="attractors of base classes near by",
        )
    axes.set(xlim=x_limits, ylim=y_limits)
    label_plane_axes(axes, share)
