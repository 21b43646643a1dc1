"""What a task must be, beyond the types of its fields. Imports no torch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ifsl_bench.common.errors import UserError, is_printable
from ifsl_bench.common.limits import RESULT_FILE
from ifsl_bench.common.packed import width

if TYPE_CHECKING:
    from ifsl_bench.protocol.task import EpisodeSpec, Task

NAME = r"[a-z0-9][a-z0-9._-]*"  # of a task or data set: it names folders
BACKBONE = r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*){0,2}"  # it is part of names of files
WEIGHTS = r"[0-9a-f]{16}"
WEIGHTS_RULE = "16 hexadecimal digits, the first of a file's SHA-256; --weights FILE finds them"
MOST_SEEDS = 1000  # of a command: each is a training, and all are listed before the first begins
MOST_WORKERS = 1_000  # processes on one machine
MOST_TRIALS = 10_000  # of a method: the settings are drawn before the first is tried
LARGEST_SEED = 2**53  # the largest integer up to which every reader of JSON tells one from the next
DRAWN = 1000  # classes, or images of one kind, in an episode; drawing them without repetition takes quadratic time
EPISODES = 10**6
CLASS_BYTES = 3  # of the label of a novel class in a packed result
OTHERS = 1 << 20  # bytes of a result file beside its episodes
STEPS = 10**9  # a year of a fast machine
AT_ONCE = 10_000  # episodes of a step, or views of an image, which are in memory, or on the disk, at once
NUMBER = 2**63 - 1  # as large as files and libraries keep a whole number
LONG = 10_000  # entries of a list
RULE = "a name is lower-case letters, digits, '.', '_', '-'"


def most_episodes(shape: EpisodeSpec) -> int:
    """How many test episodes there may be: as many as a result file holds, packed, and a million at most."""
    base, novel = shape.base_queries, shape.ways * shape.novel_queries
    hits = 3 * width(base) + 3 * width(novel) + width(2 * base * novel)  # joint, alone and calibrated; pairs
    each = (CLASS_BYTES * shape.ways + hits) * 4 / 3  # base64
    return min(EPISODES, int((RESULT_FILE.most - OTHERS) / each))


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

    def within(least: int, value: int | None, most: int, field: str) -> None:
        if value is not None:
            need(value >= least, f"{field} must be at least {least}" if least else f"{field} must not be negative")
            need(value <= most, f"{field} must be at most {most:,}")

    need(is_printable(task.title), "title must be one line of text that can be printed")
    within(2, task.base_classes, NUMBER, "base_classes")
    within(1, task.shots, DRAWN, "shots")
    within(1, task.episode.ways, DRAWN, "episode.ways")
    within(1, task.episode.novel_queries, DRAWN, "episode.novel_queries")
    within(0, task.episode.base_queries, 5 * DRAWN, "episode.base_queries")
    within(2, task.evaluation.episodes, EPISODES, "evaluation.episodes")
    most = most_episodes(task.episode)
    need(
        task.evaluation.episodes <= most,
        f"evaluation.episodes is {task.evaluation.episodes:,}; of {task.episode.ways:,} classes a result file holds "
        f"{most:,} episodes at most",
    )
    within(2, task.evaluation.validation_episodes, EPISODES, "evaluation.validation_episodes")
    within(0, task.evaluation.seed, NUMBER, "evaluation.seed")
    backbone, weights = task.pretraining.backbone, task.pretraining.weights
    need(bool(re.fullmatch(BACKBONE, backbone)), f"pretraining.backbone {backbone!r:.80} is no name of a backbone")
    sound = weights is None or bool(re.fullmatch(WEIGHTS, weights))
    need(sound, f"pretraining.weights {weights!r:.80}: {WEIGHTS_RULE}")
    within(0, task.pretraining.seed, NUMBER, "pretraining.seed")
    within(0, task.pretraining.steps, STEPS, "pretraining.steps")
    within(2, task.pretraining.batch, EPISODES, "pretraining.batch")
    need(0 <= task.pretraining.momentum < 1, "pretraining.momentum must be in [0, 1)")
    need(0 <= task.pretraining.weight_decay < math.inf, "pretraining.weight_decay must not be negative")
    need(0 < task.pretraining.norm_momentum <= 1, "pretraining.norm_momentum must be in (0, 1]")
    within(0, task.pretraining.crop_padding, DRAWN, "pretraining.crop_padding")
    within(1, task.meta_training.steps, STEPS, "meta_training.steps")
    within(1, task.meta_training.validate_every, STEPS, "meta_training.validate_every")
    need(len(task.dataset.mean) == len(task.dataset.std), "dataset.mean and dataset.std must have equal lengths")
    need(len(task.dataset.mean) <= LONG, f"dataset.mean must have at most {LONG:,} entries")
    need(all(map(math.isfinite, task.dataset.mean)), "dataset.mean must be finite")
    need(all(0 < s < math.inf for s in task.dataset.std), "dataset.std must be positive")
    for label, schedule in (("pretraining", task.pretraining.schedule), ("meta_training", task.meta_training.schedule)):
        need(0 < schedule.rate < math.inf, f"{label}.schedule.rate must be positive")
        within(0, schedule.warmup, STEPS, f"{label}.schedule.warmup")
        need(len(schedule.drops) <= LONG, f"{label}.schedule.drops must have at most {LONG:,} entries")
        within(0, max(schedule.drops, default=0), STEPS, f"{label}.schedule.drops")
        need(
            list(schedule.drops) == sorted({d for d in schedule.drops if d > 0}), f"{label}.schedule.drops must ascend"
        )
        need(not (schedule.drops and schedule.shape == "cosine"), f"{label}.schedule.drops have no place in a cosine")
