"""What a task must be, beyond the types of its fields. Imports no torch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ifsl_bench.common.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.protocol.task import Task

NAME = r"[a-z0-9][a-z0-9._-]*"  # of a task or data set: it names folders
MOST_SEEDS = 1000  # of a command: each is a training, and all are listed before the first begins
MOST_TRIALS = 10_000  # of a method: the settings are drawn before the first is tried
LARGEST_SEED = 2**53  # the largest integer up to which every reader of JSON tells one from the next
RULE = "a name is lower-case letters, digits, '.', '_', '-'"


def check_name(name: str, where: str) -> None:
    """Raises :class:`UserError` for what no task file may call a task; a ``+`` is for changes of a task."""
    if not re.fullmatch(NAME, name):
        raise UserError(f"{where}: task {name!r}: {RULE}")


def check_task(task: Task, where: str) -> None:
    """Raises :class:`UserError` for an impossible value; it names the field, the task and ``where``."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(f"{where}: task {task.name!r}: {message}")

    need(bool(re.fullmatch(NAME, task.dataset.name)), f"dataset.name {task.dataset.name!r}: {RULE}")
    need(task.base_classes is None or task.base_classes >= 2, "base_classes must be at least 2")
    need(task.shots >= 1, "shots must be at least 1")
    need(task.episode.ways >= 1, "episode.ways must be at least 1")
    need(task.episode.novel_queries >= 1, "episode.novel_queries must be at least 1")
    need(task.episode.base_queries >= 0, "episode.base_queries must not be negative")
    need(task.evaluation.episodes >= 2, "evaluation.episodes must be at least 2")
    need(task.evaluation.validation_episodes >= 2, "evaluation.validation_episodes must be at least 2")
    need(task.pretraining.seed is None or task.pretraining.seed >= 0, "pretraining.seed must not be negative")
    need(task.pretraining.steps >= 0, "pretraining.steps must not be negative")
    need(task.pretraining.batch >= 2, "pretraining.batch must be at least 2")
    need(0 <= task.pretraining.momentum < 1, "pretraining.momentum must be in [0, 1)")
    need(0 <= task.pretraining.weight_decay < math.inf, "pretraining.weight_decay must not be negative")
    need(0 < task.pretraining.norm_momentum <= 1, "pretraining.norm_momentum must be in (0, 1]")
    need(task.pretraining.crop_padding >= 0, "pretraining.crop_padding must not be negative")
    need(task.meta_training.steps >= 1, "meta_training.steps must be at least 1")
    need(task.meta_training.validate_every >= 1, "meta_training.validate_every must be at least 1")
    need(len(task.dataset.mean) == len(task.dataset.std), "dataset.mean and dataset.std must have equal lengths")
    need(all(s > 0 for s in task.dataset.std), "dataset.std must be positive")
    for label, schedule in (("pretraining", task.pretraining.schedule), ("meta_training", task.meta_training.schedule)):
        need(0 < schedule.rate < math.inf, f"{label}.schedule.rate must be positive")
        need(schedule.warmup >= 0, f"{label}.schedule.warmup must not be negative")
        need(
            list(schedule.drops) == sorted({d for d in schedule.drops if d > 0}), f"{label}.schedule.drops must ascend"
        )
        need(not (schedule.drops and schedule.shape == "cosine"), f"{label}.schedule.drops have no place in a cosine")
