"""The figures of ``ifsl-bench plot`` as functions, one for each kind: ``ifsl_bench.plot`` in a notebook.

Figures from results take ``methods``, labels of the only rows to draw (by default those without options of their own);
``setting``, "paper" by default or "tuned-12"; ``recipe``, those of the backbones as :func:`ifsl_bench.table` takes
them; and ``home`` and ``results`` as :func:`ifsl_bench.table` does. Figures
from trained models take ``methods`` and ``options`` as :func:`ifsl_bench.run` does; ``train``, to train what is not
trained yet; and ``work``, see :func:`ifsl_bench.workspace`. ``wide`` is two columns of a paper instead of one.

All raise :class:`ifsl_bench.UserError` for unknown names, nothing stored, or models that are not trained.

Example:
    >>> figure = ifsl_bench.plot.ranks("glyphs-5shot")
    >>> figure.save("ranks.pdf")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.task_results import ALL_RECIPES, TaskResults, load_task_results, select_recipes
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.reporting.figures import base_classes as _base_classes
from ifsl_bench.reporting.figures import pairs as _pairs
from ifsl_bench.reporting.figures import ranks as _ranks
from ifsl_bench.reporting.figures import recipes as _recipes
from ifsl_bench.reporting.figures import seeds as _seeds
from ifsl_bench.reporting.figures import sessions as _sessions
from ifsl_bench.reporting.figures import tradeoff as _tradeoff
from ifsl_bench.reporting.figures.style import limit_rows, render_figure, save_figure, select_rows_to_draw
from ifsl_bench.reporting.notebook import NameOrNames, OptionalFolder, as_name_tuple
from ifsl_bench.reporting.notes import note_hidden_rows
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:  # what needs torch is imported for figures with trained models alone
    from ifsl_bench.experiments.evaluate_stage import EvaluationContext
    from ifsl_bench.experiments.job import Job
    from ifsl_bench.experiments.workspace import Workspace

__all__ = [
    "Drawing",
    "attractors",
    "base_classes",
    "confusions",
    "episode_pca",
    "forgetting",
    "inner_steps",
    "pairs",
    "ranks",
    "recipes",
    "seeds",
    "sessions",
    "tradeoff",
    "validation",
    "variance",
]

DEFAULT_METHOD = "lr+a"  # of figures that explain the attention attractor
DEFAULT_GRADIENT_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
DEFAULT_UNROLLED_STEPS = (20,)
NOTEBOOK_DOTS_PER_INCH = 144  # of a notebook's screen for an inch


@dataclass(frozen=True)
class Drawing:
    """A figure that a notebook shows.

    Attributes:
        figure: of Matplotlib, in the size that a paper prints.
        notes: sentences on the figure, such as which rows are not drawn.
    """

    figure: Figure
    notes: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the figure in the format of the name's ending, .pdf, .svg or .png.

        Raises UserError where that cannot be done.
        """
        save_figure(self.figure, Path(path).expanduser())

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return "\n".join([f"a figure of {width:.1f} x {height:.1f} inches; save('x.pdf') writes it", *self.notes])

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the PNG, and its size on a screen in pixels, at which text of 7 points is legible."""
        width, height = (round(NOTEBOOK_DOTS_PER_INCH * side) for side in self.figure.get_size_inches())
        return render_figure(self.figure, "png"), {"width": width, "height": height}


def _make_results_plot_function(
    name: str,
    draw: Callable[..., tuple[Figure, Sequence[str]]],
    docstring: str,
    *,
    limits_rows: bool = False,
    is_drawn: Callable[[SeedAggregate], bool] = lambda row: True,
    passes_named: bool = False,
    with_published: bool = False,
    every_recipe: bool = False,
) -> Callable[..., Drawing]:
    """Return the function that draws the results of a task.

    Args:
        name: of the function.
        draw: draws the rows of a task.
        docstring: of the function.
        limits_rows: draw no more rows than can be told apart, unless the user names them.
        is_drawn: whether the figure has a place for a row, where rows are limited.
        passes_named: pass on to ``draw`` whether the user named the rows.
        with_published: draw published rows too.
        every_recipe: draw the rows of all recipes, unless the user names some.
    """

    def figure(
        task: str,
        *,
        methods: NameOrNames = (),
        setting: str | None = None,
        recipe: NameOrNames = (),
        wide: bool = False,
        home: OptionalFolder = None,
        results: OptionalFolder = None,
    ) -> Drawing:
        recipe = as_name_tuple(recipe) or ((ALL_RECIPES,) if every_recipe else ())
        task_results = _load_results_to_draw(task, methods, setting, recipe, home, results, with_published)
        shown, left_out = limit_rows(task_results, is_drawn) if limits_rows and not methods else (task_results, [])
        drawn, notes = draw(shown, wide, **({"named": bool(methods)} if passes_named else {}))
        return _make_drawing((drawn, [*notes, *left_out]), task_results)

    figure.__name__, figure.__doc__ = name, docstring
    return figure


def _make_episode_plot_function(name: str, view_function: str, docstring: str) -> Callable[..., Drawing]:
    """Return the function that draws, by the module of that name, what trained models make of a test episode."""

    def figure(
        task: str,
        *,
        index: int = 0,
        methods: NameOrNames = DEFAULT_METHOD,
        options: Mapping[str, Any] | None = None,
        train: bool = False,
        wide: bool = False,
        work: Workspace | None = None,
    ) -> Drawing:
        module = importlib.import_module(f"ifsl_bench.reporting.figures.{name}")
        jobs, work = _episode_jobs(task, index, methods, options, work)
        views = [
            getattr(module, view_function)(ready, index, label) for label, ready in _open_models(jobs, work, train)
        ]
        return _make_drawing(getattr(module, f"draw_{name}")(views, wide))

    figure.__name__, figure.__doc__ = name, docstring
    return figure


tradeoff = _make_results_plot_function(
    "tradeoff",
    _tradeoff.draw_tradeoff,
    "Base against novel accuracy, with the curves that one bias on all novel logits traces.",
    limits_rows=True,
)
seeds = _make_results_plot_function("seeds", _seeds.draw_seeds, "The accuracy of each training seed.")
validation = _make_results_plot_function(
    "validation",
    _seeds.draw_validation,
    "Validation accuracy over the course of meta-training.",
    limits_rows=True,
    is_drawn=_seeds.is_validated,
)
recipes = _make_results_plot_function(
    "recipes", _recipes.draw_recipes, "Recipes and classifiers, each with each.", every_recipe=True
)
pairs = _make_results_plot_function(
    "pairs", _pairs.draw_pairs, "Paired differences of all rows, a heat map.", passes_named=True
)
sessions = _make_results_plot_function(
    "sessions",
    _sessions.draw_sessions,
    "The accuracy after each session, beside lazy models and published rows.",
    limits_rows=True,
    passes_named=True,
    with_published=True,
)
forgetting = _make_results_plot_function(
    "forgetting",
    _sessions.draw_forgetting,
    "The accuracy on each session's classes after each later session, a triangle for each row.",
    limits_rows=True,
)
variance = _make_results_plot_function(
    "variance",
    _sessions.draw_variance,
    "What rows in sessions, and the difference of each to the next, owe to orders, supports and seeds.",
    limits_rows=True,
)
episode_pca = _make_episode_plot_function(
    "episode_pca",
    "project_episode",
    "Test episode ``index`` in the plane of its first two principal components, before and after the fast weights.",
)
attractors = _make_episode_plot_function(
    "attractors",
    "collect_attractor_weights",
    "Base weights and the attractors that they produce, of test episode ``index``.",
)


def ranks(
    *tasks: str,
    methods: NameOrNames = (),
    setting: str | None = None,
    recipe: NameOrNames = (),
    wide: bool = False,
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Drawing:
    """Draw the ranks that each row can have, a panel for each task.

    Args:
        tasks: their names.
        methods: see the module.
        setting: see the module.
        recipe: see the module.
        wide: see the module.
        home: see the module.
        results: see the module.
    """
    if not tasks:
        raise UserError("ranks takes the name of a task, or several")
    results_of_tasks = [_load_results_to_draw(task, methods, setting, recipe, home, results) for task in tasks]
    return _make_drawing(_ranks.draw_ranks(results_of_tasks, wide), *results_of_tasks)


def base_classes(
    task: str,
    *,
    methods: NameOrNames = (),
    setting: str | None = None,
    recipe: NameOrNames = (),
    wide: bool = False,
    home: OptionalFolder = None,
    results: OptionalFolder = None,
) -> Drawing:
    """Draw accuracy against the number of base classes, from results of ``task+base-classes=N`` and of ``task``.

    Args:
        task: its name.
        methods: see the module.
        setting: see the module.
        recipe: see the module.
        wide: see the module.
        home: see the module.
        results: see the module.
    """
    folders = Paths.locate(home, results)
    results_of_tasks = _base_classes.load_results_by_base_class_count(
        load_task(task, folders), folders, as_name_tuple(recipe)
    )
    return _make_drawing(
        _base_classes.draw_base_classes(results_of_tasks, as_name_tuple(methods), setting, wide),
        *results_of_tasks.values(),
    )


def inner_steps(
    *tasks: str,
    methods: NameOrNames = DEFAULT_METHOD,
    options: Mapping[str, Any] | None = None,
    steps: Sequence[int] = DEFAULT_GRADIENT_STEPS,
    unrolled: Sequence[int] = DEFAULT_UNROLLED_STEPS,
    seeds: int = 1,
    episodes: int | None = None,
    train: bool = False,
    wide: bool = False,
    work: Workspace | None = None,
) -> Drawing:
    """Draw accuracy against the number of gradient steps on the inner problem, for models trained by RBP and by T-BPTT.

    Args:
        tasks: their names.
        methods: see the module; those with attractors.
        options: see the module.
        steps: after which gradient steps to stop.
        unrolled: how many steps T-BPTT is trained with; a line each.
        seeds: how many training seeds to average over.
        episodes: how many test episodes, from the first, 500 by default.
        train: see the module.
        wide: see the module.
        work: see the module.
    """
    from ifsl_bench.experiments.workspace import workspace
    from ifsl_bench.reporting.figures.inner_steps import draw_inner_steps, measure_step_curves

    if not tasks:
        raise UserError("inner_steps takes the name of a task, or several")
    work = work or workspace()
    by_task = {
        task: measure_step_curves(
            as_name_tuple(methods),
            task,
            work,
            steps=steps,
            unrolled=unrolled,
            seeds=range(seeds),
            episodes=episodes,
            options=options or {},
            train=train,
        )
        for task in tasks
    }
    return _make_drawing(draw_inner_steps(by_task, wide))


def confusions(
    task: str,
    *,
    methods: NameOrNames,
    options: Mapping[str, Any] | None = None,
    episodes: int | None = None,
    train: bool = False,
    wide: bool = False,
    work: Workspace | None = None,
) -> Drawing:
    """Draw the base classes that take most of novel classes' queries; in sessions, after the last one.

    Args:
        task: its name.
        methods: see the module.
        options: see the module.
        episodes: how many test episodes, from the first, 500 by default, or sequences, 100 by default.
        train: see the module.
        wide: see the module.
        work: see the module.
    """
    from ifsl_bench.experiments.workspace import workspace
    from ifsl_bench.reporting.figures.confusions import count_confusions, draw_confusions

    of_methods = count_confusions(
        as_name_tuple(methods), task, work or workspace(), episodes=episodes, options=options, train=train
    )
    return _make_drawing(draw_confusions(of_methods, wide))


def _make_drawing(drawn: tuple[Figure, Sequence[str]], *results_of_tasks: TaskResults) -> Drawing:
    """Return a figure with its notes, and with the remarks on files and rows that its tasks leave out."""
    figure, notes = drawn
    left_out = dict.fromkeys(
        remark
        for task_results in results_of_tasks
        for remark in (*task_results.remarks_on_left_out_rows, *note_hidden_rows(task_results))
    )
    return Drawing(figure, (*notes, *left_out))


def _load_results_to_draw(
    name: str,
    methods: NameOrNames,
    setting: str | None,
    recipe: NameOrNames,
    home: OptionalFolder,
    results: OptionalFolder,
    papers: bool = False,
) -> TaskResults:
    """Return the rows of a task that are to be drawn."""
    folders = Paths.locate(home, results)
    (task_results,) = select_recipes(
        [load_task_results(load_task(name, folders), folders.results)], as_name_tuple(recipe)
    )
    return select_rows_to_draw(task_results, as_name_tuple(methods), setting, papers)


def _episode_jobs(
    task: str, index: int, methods: NameOrNames, options: Mapping[str, Any] | None, work: Workspace | None
) -> tuple[list[Job], Workspace]:
    """Return the jobs of methods on a task, of which one test episode is drawn, and the workspace."""
    from ifsl_bench.experiments.workspace import workspace
    from ifsl_bench.reporting.figures.models import check_index, make_figure_jobs

    work = work or workspace()
    jobs = make_figure_jobs(as_name_tuple(methods), task, work.home, [0], options or {})
    check_index(jobs[0].task, index)
    return jobs, work


def _open_models(jobs: Sequence[Job], work: Workspace, train: bool) -> Iterator[tuple[str, EvaluationContext]]:
    """Yield labels and models; where one is not trained and is not to be, raise an error before any."""
    from ifsl_bench.reporting.figures.models import check_trained, open_trained_model

    if not train:
        check_trained(jobs, work.home)
    yield from ((job.label, open_trained_model(job, work)) for job in jobs)


def __dir__() -> list[str]:
    return sorted(__all__)  # what a notebook completes
