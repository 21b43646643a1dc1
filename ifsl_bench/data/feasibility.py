"""Finds the tasks for which the images of a data set do not suffice, and the change of a task that would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.task import Side, Task
from ifsl_bench.protocols.tasks.variants import Change, changed
from ifsl_bench.utils.errors import UserError

SIDES: tuple[Side, ...] = ("train", "val", "test")


def infeasible_tasks(dataset: Dataset, tasks: Iterable[Task]) -> list[str]:
    """A line for each task whose episodes cannot be drawn: why, and the options of ``run`` with which they can."""
    return [f"{task.name} is out of reach: {reason}{_within(dataset, task)}"
            for task in tasks if (reason := _reason(dataset, task))]  # fmt: skip


def _reason(dataset: Dataset, task: Task) -> str:
    """Says why a task's episodes cannot be drawn from a data set; "" where they can."""
    from ifsl_bench.protocols.sampling.episodes import task_stream  # with torch

    try:
        for side in SIDES:
            task_stream(task, side, 0, lambda pool: dataset.pool(pool).starts,
                         classes=lambda pool: dataset.pool(pool).classes)  # fmt: skip
    except UserError as error:
        return str(error).partition("; --")[0]  # the remedy of one side, which others may not do with
    return ""


def _within(dataset: Dataset, task: Task) -> str:
    """The nearest task within reach: with as many ways as can be, and then as many queries."""
    shape = task.episode
    for ways, queries in itertools.product(range(shape.ways, 1, -1), range(shape.novel_queries, 0, -1)):
        if not _reason(dataset, changed(task, Change(ways=ways, queries=queries))):
            flags = [f"--ways {ways}"] * (ways != shape.ways) + [f"--queries {queries}"] * (
                queries != shape.novel_queries
            )
            return f"; within reach with {' '.join(flags)}"
    return "; no number of --ways or --queries would do"
