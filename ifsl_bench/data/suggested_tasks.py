"""Task files for data sets without published tasks, and the tasks that a data set is too small for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.reference import format_task_file
from ifsl_bench.protocols.tasks.task import NO_BACKBONE, Side, Task
from ifsl_bench.protocols.tasks.task_files import parse_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, apply_task_changes
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter

WAYS, SHOTS, QUERIES, BASE_QUERIES = 5, 5, 5, 25  # of the tasks that are written for a data set of one's own
PRETRAINING_EPOCHS, PRETRAINING_BATCH = 30, 128  # of pretraining on images
MAX_SESSIONS = 10  # at most; the common lists have 8 or 10
FEATURE_STEPS, FEATURE_RATE = 2000, 0.1  # of a base classifier on features with a mean square of one
SIDES: tuple[Side, ...] = ("train", "val", "test")


def list_infeasible_tasks(dataset: Dataset, tasks: Iterable[Task]) -> list[str]:
    """Return a line for each task whose episodes cannot be drawn from a data set.

    Args:
        dataset: The data set.
        tasks: Tasks on it.

    Returns:
        Reasons, with the options of ``run`` that would help.
    """
    lines = []
    for task in tasks:
        reason = _infeasible_reason(dataset, task)
        if reason is not None:
            options = _find_sufficient_options(dataset, task)
            remedy = f"within reach with {options}" if options else "no number of --ways or --queries would do"
            lines.append(f"{task.name} is out of reach: {reason}; {remedy}")
    return lines


def check_feasible(
    task: Task,
    starts: Callable[[str], np.ndarray],
    classes: Callable[[str], Sequence[str]] = lambda pool: (),
) -> None:
    """Raise UserError if episodes or sequences of a task cannot be drawn for training, validation or testing.

    Args:
        task: The task.
        starts: Of a pool by name, int64 [C + 1]; images of class c are ``starts[c]:starts[c + 1]``.
        classes: Of a pool by name, the names of its classes.
    """
    from ifsl_bench.protocols.sampling.episodes import make_side_sampler  # with torch

    for side in SIDES:
        make_side_sampler(task, side, 0, starts, classes=classes)


def _infeasible_reason(dataset: Dataset, task: Task) -> str | None:
    """Return why a task is not feasible, or None."""
    try:
        check_feasible(task, lambda pool: dataset.pool(pool).class_starts, lambda pool: dataset.pool(pool).class_names)
    except UserError as error:
        return str(error).partition("; --")[0]  # without the remedy for one side, which may not serve the others
    return None


def _find_sufficient_options(dataset: Dataset, task: Task) -> str:
    """Return options of the nearest feasible task, as many ways as possible, then as many queries; "" for none."""
    if task.sessions is None:
        ways, queries = task.episode.ways, task.episode.novel_queries
    else:  # where sessions name no number of queries, they have as many as a base class has images
        ways, queries = task.sessions.ways, task.sessions.queries or _mean_images_per_class(dataset, "base/test")
    for fewer_ways, fewer_queries in itertools.product(range(ways, 1, -1), range(queries, 0, -1)):
        if (
            _infeasible_reason(dataset, apply_task_changes(task, TaskChanges(ways=fewer_ways, queries=fewer_queries)))
            is None
        ):
            flags = [f"--ways {fewer_ways}"] * (fewer_ways < ways) + [f"--queries {fewer_queries}"]
            return " ".join(flags)
    return ""


def _mean_images_per_class(dataset: Dataset, pool: str) -> int:
    facts = dataset.manifest["pools"][pool]["statistics"]
    return int(facts["images"] // facts["classes"])


def make_suggested_task_tables(dataset: Dataset) -> dict[str, Any]:
    """Return the tables of a task file on a data set, without the tasks."""
    pools = dataset.manifest["pools"]
    train = pools["base/train"]["statistics"]
    data = {"name": dataset.name, "fingerprint": dataset.fingerprint, "partial": dataset.is_partial}
    batch = max(2, min(PRETRAINING_BATCH, train["images"]))
    if len(dataset.shape) != 3:
        square = float(np.mean(np.square(train["mean"]) + np.square(train["std"])))  # of an entry
        pretraining = {"backbone": NO_BACKBONE, "steps": FEATURE_STEPS, "batch": batch}
        rate = float(f"{FEATURE_RATE / max(1.0, square):.1g}")  # with larger features the loss is steeper
        return {
            "dataset": data,
            "pretraining": {**pretraining, "schedule": {"rate": rate, "drops": [FEATURE_STEPS // 2]}},
        }
    steps = max(1, PRETRAINING_EPOCHS * (train["images"] // batch))
    data["mean"] = [round(v / 255, 4) for v in train["mean"]]
    data["std"] = [round(max(v, 1.0) / 255, 4) for v in train["std"]]
    pretraining = {
        "backbone": "resnet10-stempool",
        "steps": steps,
        "batch": batch,
        "crop_padding": dataset.shape[0] // 8,
        "flip": False,
        "schedule": {"rate": FEATURE_RATE, "shape": "cosine", "warmup": steps // PRETRAINING_EPOCHS},
    }
    return {"dataset": data, "pretraining": pretraining}


def make_task_file_text(dataset: Dataset, name: str, content: Mapping[str, Any], head: str, reporter: Reporter) -> str:
    """Return TOML with tasks of 1 and of 5 shots, and one in sessions if classes and images suffice.

    Args:
        dataset: The data set of the tasks.
        name: Beginning of the names of the tasks.
        content: Tables of the file, as :func:`make_suggested_task_tables` returns them.
        head: Comments above them.
        reporter: Takes messages.
    """
    base, novel = (dataset.manifest["pools"][pool]["statistics"]["classes"] for pool in ("base/train", "novel/test"))
    tasks = {
        f"{name}-{shots}shot": {
            "title": f"{name} {base}+{WAYS}, {shots} shot{'s' if shots > 1 else ''}",
            "shots": shots,
            "protocol": "separate" if dataset.has_pool("novel/train") else "shared",
        }
        for shots in (1, SHOTS)
    }
    episodes = {**content, "tasks": tasks}
    if (count := min(novel // WAYS, MAX_SESSIONS)) < 2:
        text = format_task_file(episodes, head)
        line = f"two sessions of {WAYS} need {2 * WAYS} classes in novel/test, which has {novel}"
        if ways := novel // 2:
            (task,) = (task for task in parse_tasks(text, name) if task.name == f"{name}-{SHOTS}shot")
            smaller = apply_task_changes(task, TaskChanges(sessions=2, ways=ways))
            options = f"--ways {ways}"
            if _infeasible_reason(dataset, smaller) is not None:
                found = _find_sufficient_options(dataset, smaller)
                options = found if "--ways" in found or not found else f"{options} {found}"
            if options:
                line += f"; smaller ones: ifsl-bench run --method ncm --task {task.name} --sessions 2 {options}"
        reporter.say(f"{name}-sessions is left out: {line}")
        return text
    sessions = {
        "of": f"{name}-{SHOTS}shot",
        "title": f"{name} {base} + {count} x {WAYS}, sessions of {SHOTS} shots",
        "sessions": {"count": count, "ways": WAYS},
    }
    text = format_task_file({**episodes, "variants": {f"{name}-sessions": sessions}}, head)
    if lines := list_infeasible_tasks(
        dataset, [task for task in parse_tasks(text, name) if task.name == f"{name}-sessions"]
    ):
        reporter.say(
            f"{lines[0]}; it is left out. With options that suffice, --task {name}-{SHOTS}shot --sessions {count} has "
            "its sessions"
        )
        return format_task_file(episodes, head)
    return text
