"""Accuracy against the number of base classes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults, load_task_results, load_variant_results, lower_case_row_names
from ifsl_bench.data.preparing.metadata import load_task_metadata
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, Task
from ifsl_bench.protocols.tasks.variants import split_task_name
from ifsl_bench.reporting.figures.style import (
    draw_grid,
    draw_legend_below,
    make_figure,
    names_and_styles,
    select_rows_to_draw,
    sort_rows_by_accuracy,
    with_figure_style,
)
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths


def load_results_by_base_class_count(task: Task, home: Paths, recipes: Sequence[str] = ()) -> dict[int, TaskResults]:
    """Return the results of the task by the number of base classes; the task itself has all of them.

    Args:
        task: the task with all base classes.
        home: the folders.
        recipes: only rows of these, see :meth:`TaskResults.select_recipes`.

    Raises:
        UserError: nothing is stored of the task with fewer, or the number that it has is not known.
    """
    few = {
        change["base-classes"]: task_results
        for task_results in load_variant_results(task, home.results)
        if task_results.select_recipes(recipes).rows
        and set(change := split_task_name(task_results.task_name)[1].changes_by_key()) == {"base-classes"}
    }
    results_of_tasks = {int(count): task_results.select_recipes(recipes) for count, task_results in few.items()}
    if not results_of_tasks:
        fewer = min(20, (load_task_metadata(task, home).n_base_classes or 21) - 1)
        command = f"ifsl-bench run --method imprint --task {task.name} --base-classes {fewer}"
        included = task.pretraining.backbone == INCLUDED_BACKBONE
        hint = "its features allow of none" if included else f"make some with {command}"
        raise UserError(f"no results of {task.name} with fewer base classes are stored; {hint}")
    whole = load_task_results(task, home.results).select_recipes(recipes)
    if whole.rows:
        if not (every := load_task_metadata(task, home).n_base_classes):
            raise UserError(
                f"the number of base classes of {task.name} is unknown until data set "
                f"{task.dataset.name} is prepared: ifsl-bench data list"
            )
        results_of_tasks[every] = whole
    return dict(sorted(results_of_tasks.items()))


@with_figure_style()
def draw_base_classes(
    results_of_tasks: dict[int, TaskResults], labels: Sequence[str] = (), setting: str | None = None, wide: bool = False
) -> tuple[Figure, list[str]]:
    """Draw a line for each row, with the 95% interval over episodes that its table has (Ren et al. 2019).

    Each number of base classes has its own backbone. Rows known for one number alone are left out.

    Args:
        results_of_tasks: number of base classes -> the results of the task with as many.
        labels: of the only rows to draw.
        setting: see :func:`ifsl_bench.reporting.figures.style.select_rows_to_draw`.
        wide: two columns of a paper wide.

    Raises:
        UserError: no row is stored for two numbers of base classes.
    """
    chosen = {
        count: sort_rows_by_accuracy(select_rows_to_draw(task_results, _list_shown_rows(task_results, labels), setting))
        for count, task_results in results_of_tasks.items()
        if not labels or _list_shown_rows(task_results, labels)
    }
    lines: dict[tuple[str, str], dict[int, SeedAggregate]] = {}  # a stored row and your own of its label are two
    for count in sorted(chosen, reverse=True):  # the legend has the order of the most classes
        for row in chosen[count]:
            lines.setdefault((row.label, row.results_origin), {})[count] = row
    shared = [line for line in lines.values() if len(line) > 1]
    if not shared:
        raise UserError(
            "no row of these is stored for two numbers of base classes; those that there are: "
            f"{', '.join(map(str, results_of_tasks))}"
        )
    firsts = [next(iter(line.values())) for line in shared]
    names, looks = names_and_styles(firsts)
    figure = make_figure(2.0, wide)
    axes = figure.add_subplot(xlabel="base classes", ylabel="Acc. (%)")
    for name, line, look in zip(names, shared, looks, strict=True):
        counts = sorted(line)
        values = [line[count].summarise_metrics()["acc"] for count in counts]
        axes.errorbar(
            counts,
            [v.mean for v in values],
            [v.interval for v in values],
            **look,
            elinewidth=0.8,
            capsize=1.5,
            label=name,
            gid=name,
        )
    axes.set_xticks(sorted(results_of_tasks))
    draw_grid(axes, "y")
    draw_legend_below(figure, [Line2D([], [], **look) for look in looks], names)
    alone = [row.name_with_origin for line in lines.values() if len(line) < 2 for row in line.values()]
    notes = [f"known for only one number of base classes: {', '.join(alone)}"] if labels and alone else []
    return figure, [*notes, *_note_uneven_seeds(names, shared)]


def _note_uneven_seeds(names: Sequence[str], lines: Sequence[dict[int, SeedAggregate]]) -> list[str]:
    """Return a note on lines whose points are means over different numbers of seeds."""
    names_by_seeds: dict[str, list[str]] = {}
    for name, line in zip(names, lines, strict=True):
        seeds = {count: len(line[count].seeds) for count in sorted(line)}
        if len(set(seeds.values())) > 1:
            seeds_text = ", ".join(f"{n} at {count}" for count, n in seeds.items())
            names_by_seeds.setdefault(seeds_text, []).append(name)
    return [
        f"training seeds differ by the number of base classes ({seeds_text}): {', '.join(of_seeds)}"
        for seeds_text, of_seeds in names_by_seeds.items()
    ]


def _list_shown_rows(task_results: TaskResults, labels: Sequence[str]) -> list[str]:
    names = {
        name for row in (*task_results.rows, *task_results.other_recipe_rows) for name in lower_case_row_names(row)
    }
    names.update(row.label_without_recipe.lower() for row in task_results.rows)
    return [label for label in labels if label.lower() in names]
