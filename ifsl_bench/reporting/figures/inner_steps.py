"""Accuracy against the number of inner steps, of models that were trained by RBP and by T-BPTT."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.experiments.evaluate_stage import EvaluationContext
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.stages import copy_for_evaluation, make_untrained_method
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.attractor_method import OPTIONS_OF_GRADIENT, AttractorMethod
from ifsl_bench.plugin.find_method import find_method, format_label
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.metrics import Estimate, mean_with_interval
from ifsl_bench.reporting.figures.models import check_trained, make_figure_jobs, open_trained_model
from ifsl_bench.reporting.figures.style import (
    FAINT,
    draw_grid,
    draw_legend_below,
    line_style,
    make_panels,
    with_figure_style,
)
from ifsl_bench.reporting.plot_styles import MATPLOTLIB_DASHES
from ifsl_bench.utils.errors import UserError

CONVERGED_STEP = 0  # stands for a search to its end
SOLVER_OPTION_NAMES = {
    name for names in OPTIONS_OF_GRADIENT.values() for name in names
}  # options that say how a problem is solved
DEFAULT_EPISODES = 500
DEFAULT_UNROLLED_STEPS = inspect.signature(AttractorMethod.__init__).parameters["steps"].default


@dataclass(frozen=True)
class StepCurve:
    """The accuracy of a row of models against the number of inner steps."""

    label: str  # of the method
    n_unrolled_steps: int  # the steps of T-BPTT that it was trained with; 0 for RBP
    accuracy_by_step: Mapping[
        int, Estimate
    ]  # steps -> accuracy in percent, the mean over seeds with the 95% interval over episodes
    converged_accuracy: Estimate  # the same where the search goes to its end

    @property
    def name(self) -> str:
        return (
            f"{self.label}, T-BPTT ({self.n_unrolled_steps} steps)" if self.n_unrolled_steps else f"{self.label}, RBP"
        )


def measure_step_curves(
    methods: Sequence[str],
    task: str,
    work: Workspace,
    *,
    steps: Sequence[int],
    unrolled: Sequence[int],
    seeds: Sequence[int] = (0,),
    episodes: int | None = None,
    options: Mapping[str, Any] | None = None,
    train: bool = False,
) -> list[StepCurve]:
    """Return accuracies on the first test episodes of a task by the number of inner steps.

    All of them search alike here, whatever they were trained with: gradient steps from the fixed start, as T-BPTT takes
    them (``Unrolled`` in :mod:`ifsl_bench.solvers.episode_problems`); "converged" is each model's own evaluation.

    Args:
        methods: with an option ``gradient``; a line each for RBP and each of ``unrolled``, T-BPTT's steps in training.
        task: the name of the task.
        work: the workspace.
        steps: after which gradient steps to stop.
        unrolled: how many steps T-BPTT is trained with.
        seeds: the training seeds to average over.
        episodes: how many test episodes, from the first; :data:`EPISODES` by default, or all where these are fewer.
        options: options of the methods.
        train: train what is not there yet, as ``run`` does.

    Raises:
        UserError: a method without that option, impossible numbers, a model that is not trained.
    """
    rows = [row for method in methods for row in _jobs_by_curve(method, task, work, unrolled, seeds, options or {})]
    most = rows[0][0].task.evaluation.episodes
    episodes = min(DEFAULT_EPISODES, most) if episodes is None else episodes
    if not steps or min(*steps, *unrolled, 1) < 1:
        raise UserError("--steps and --unrolled take numbers of steps from 1")
    if not 2 <= episodes <= most:
        raise UserError(f"--episodes must be 2 to {most:,} for task {rows[0][0].task.name}, not {episodes}")
    if not train:  # what is missing is an error before anything is computed
        check_trained([job for jobs in rows for job in jobs], work.home)
    finished = []
    for jobs, number in zip(rows, (0, *unrolled) * len(methods), strict=True):
        of_seeds = [dict(_accuracy_by_step(open_trained_model(job, work), steps, episodes, work)) for job in jobs]
        means = {n: mean_with_interval(np.mean([accuracies[n] for accuracies in of_seeds], 0)) for n in of_seeds[0]}
        finished.append(StepCurve(_method_label(jobs[0]), number, {n: means[n] for n in steps}, means[CONVERGED_STEP]))
    return finished


def _jobs_by_curve(
    method: str, task: str, work: Workspace, unrolled: Sequence[int], seeds: Sequence[int], options: Mapping[str, Any]
) -> list[list[Job]]:
    """Return the jobs of each row of models, by seed: RBP's, then T-BPTT's."""
    if clash := sorted({"gradient", "steps", "converge"} & {*options}):
        raise UserError(f"--set {clash[0]}: inner-steps sets this itself; see --unrolled and --steps")
    if not issubclass(find_method(method)[0].method, AttractorMethod):
        raise UserError(
            f"{method} has no option gradient, so no inner steps that RBP and T-BPTT tell apart; lr+a and mlp+a have it"
        )
    ways: list[dict[str, Any]] = [{}]  # RBP is the default
    ways += [{"gradient": "t-bptt", **({} if n == DEFAULT_UNROLLED_STEPS else {"steps": n})} for n in unrolled]
    return [make_figure_jobs([method], task, work.home, seeds, {**options, **way}) for way in ways]


def _method_label(job: Job) -> str:
    """Return a label of the method with the options that a user set."""
    shown = {
        key: value for key, value in job.set_options.items() if key != "gradient" and key not in SOLVER_OPTION_NAMES
    }
    return ".".join(format_label(job.method, job.method_name, shown, job.task))


def _accuracy_by_step(
    ready: EvaluationContext, steps: Sequence[int], episodes: int, work: Workspace
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a number of steps, and the accuracy of each episode [n], in percent."""
    loader, job = ready.loader("test"), ready.job
    for n in (*steps, CONVERGED_STEP):
        method = ready.method if n == CONVERGED_STEP else stop_search_early(ready, n, work)
        title = f"{job.label}: {'converged' if n == CONVERGED_STEP else f'{n:,} inner steps'}"
        evaluation = evaluate_method(
            method, job.method_name, loader, range(episodes), work.reporter, title, job.n_episodes
        )
        yield n, evaluation.counts.metric_by_unit("acc")


def stop_search_early(ready: EvaluationContext, steps: int, work: Workspace) -> Method:
    """Return the method with the parameters that were trained, whose search ends after a number of gradient steps.

    Args:
        ready: the trained model.
        steps: the number of gradient steps.
        work: the workspace.
    """
    own = ready.job.set_options
    options = {key: value for key, value in own.items() if key not in SOLVER_OPTION_NAMES}
    if own.get("gradient") == "t-bptt" and "rate" in own:  # RBP's rate is of its series
        options["rate"] = own["rate"]
    job = replace(ready.job, set_options={**options, "gradient": "t-bptt", "steps": steps, "converge": False})
    method = make_untrained_method(job, work)
    method.load_state_dict(ready.method.state_dict())
    return copy_for_evaluation(job, work, method.eval())


@with_figure_style()
def draw_inner_steps(by_task: Mapping[str, Sequence[StepCurve]], wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw a panel a task, a line a row of models; at the right end the search has converged.

    Follows the figure on truncated BPTT and RBP of Ren et al. (2019), who do not say how long a step is. A dotted line
    marks the steps that T-BPTT was trained with. Bars are 95% intervals over episodes.

    Args:
        by_task: task -> the accuracies of its models.
        wide: two columns of a paper wide.
    """
    rows = list(next(iter(by_task.values())))
    names = [course.name for course in rows]
    across = min(len(by_task), 2) if wide else 1
    figure, panels = make_panels(len(by_task), across, 1.75, wide)
    for i, (axes, (task, of_task)) in enumerate(zip(panels, by_task.items(), strict=True)):
        axes.set_title(task)
        axes.set(
            xlabel="inner steps" if i >= len(by_task) - across else "", ylabel="Acc. (%)" if i % across == 0 else ""
        )
        _draw_panel(axes, of_task)
    handles = [Line2D([], [], **_line_style(course, i)) for i, course in enumerate(rows)]
    draw_legend_below(figure, handles, names)
    return figure, []


def _line_style(course: StepCurve, row: int) -> dict[str, Any]:
    """Return the method's own look for RBP; hollow and broken in its colour for T-BPTT."""
    look = line_style(course.label)
    if not course.n_unrolled_steps:
        return look
    dashes = [style for style in MATPLOTLIB_DASHES if style != look["linestyle"]]
    hollow = {"markerfacecolor": "white", "markeredgecolor": look["color"], "markeredgewidth": 0.8}
    return look | hollow | {"linestyle": dashes[(row - 1) % len(dashes)]}


def _draw_panel(axes: Axes, curves: Sequence[StepCurve]) -> None:
    last = max(n for course in curves for n in course.accuracy_by_step)
    end = 3.0 * last  # where the converged ones stand
    for row, course in enumerate(curves):
        steps, look = sorted(course.accuracy_by_step), _line_style(course, row)
        values = [course.accuracy_by_step[n] for n in steps]
        axes.errorbar(
            steps,
            [v.mean for v in values],
            [v.interval for v in values],
            **look,
            elinewidth=0.7,
            label=course.name,
            gid=course.name,
        )
        axes.errorbar(
            [end],
            [course.converged_accuracy.mean],
            [course.converged_accuracy.interval],
            **look | {"linestyle": "none"},
            elinewidth=0.7,
            gid=f"{course.name}, converged",
        )
        axes.plot(
            [steps[-1], end],
            [values[-1].mean, course.converged_accuracy.mean],
            color=look["color"],
            linewidth=0.5,
            linestyle=(0, (1, 2)),
            zorder=1,
        )
    for n in {course.n_unrolled_steps for course in curves} - {0}:
        axes.axvline(n, color=FAINT, linestyle="dotted", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    steps_shown = sorted({n for course in curves for n in course.accuracy_by_step})
    shown = [n for n in steps_shown if n in (1, 5, 20) or str(n).strip("0") == "1"]  # whose numbers have room
    axes.set_xticks([*shown, end], [f"{n:,}" for n in shown] + ["conv."])
    axes.set_xticks([], minor=True)
    draw_grid(axes, "y")
