"""Limits of a task, beyond the types of its fields. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from ifsl_bench.utils.errors import UserError, is_printable
from ifsl_bench.utils.limits import RESULT_FILE_BYTES

if TYPE_CHECKING:
    from ifsl_bench.protocols.tasks.task import EpisodeSpec, Task

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]*"  # of a task or data set: it names folders
BACKBONE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*){0,2}"  # it is part of names of files
WEIGHTS_PATTERN = r"[0-9a-f]{16}"
WEIGHTS_RULE = "16 hexadecimal digits, the first of a file's SHA-256; --weights FILE finds them"
CORPORA_PATTERN = rf"{NAME_PATTERN}(:{NAME_PATTERN})*"
CORPORA_RULE = "base, a set such as imagenet-1k, or several joined by ':'"
MOST_SEEDS = 1000  # of a command: each is a training, and all are listed before the first begins
MOST_WORKERS = 1_000  # processes on one machine
MOST_TRIALS = 10_000  # of a method: the settings are drawn before the first is tried
LARGEST_SEED = 2**53  # the largest integer up to which every reader of JSON tells one from the next
# Classes, or images of one kind, in an episode; drawing them without repetition takes quadratic time
MOST_DRAWN_PER_CLASS = 1000
MOST_EPISODES = 10**6
MOST_SEQUENCES = 10_000  # of sessions
LABEL_BYTES_IN_RESULT = 3  # of the label of a novel class in a packed result
RESULT_BYTES_BESIDE_EPISODES = 1 << 20  # bytes of a result file beside its episodes
MOST_STEPS = 10**9  # a year of a fast machine
MAX_ITEMS_AT_ONCE = 10_000  # episodes of a step, or views of an image, which are in memory, or on the disk, at once
LARGEST_INTEGER = 2**63 - 1  # as large as files and libraries keep a whole number
MOST_LIST_ENTRIES = 10_000  # entries of a list
NAME_RULE = "a name is lower-case letters, digits, '.', '_', '-'"


# Whole numbers of a task, by field: the least and the most. None, where a field may be that, is always allowed.
INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "base_classes": (2, LARGEST_INTEGER),
    "base_order": (1, LARGEST_INTEGER),
    "shots": (1, MOST_DRAWN_PER_CLASS),
    "episode.ways": (1, MOST_DRAWN_PER_CLASS),
    "episode.novel_queries": (1, MOST_DRAWN_PER_CLASS),
    "episode.base_queries": (0, 5 * MOST_DRAWN_PER_CLASS),
    "evaluation.episodes": (2, MOST_EPISODES),
    "evaluation.validation_episodes": (2, MOST_EPISODES),
    "evaluation.seed": (0, LARGEST_INTEGER),
    "pretraining.seed": (0, LARGEST_INTEGER),
    "pretraining.steps": (0, MOST_STEPS),
    "pretraining.batch": (2, MOST_EPISODES),
    "pretraining.crop_padding": (0, MOST_DRAWN_PER_CLASS),
    "pretraining.schedule.warmup": (0, MOST_STEPS),
    "meta_training.steps": (1, MOST_STEPS),
    "meta_training.validate_every": (1, MOST_STEPS),
    "meta_training.schedule.warmup": (0, MOST_STEPS),
}
# The same of the sessions of a task that has some.
SESSION_INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "sessions.count": (1, 100),
    "sessions.ways": (1, 100),
    "sessions.orders": (1, 1_000),
    "sessions.supports": (1, 100),
    "sessions.queries": (1, MOST_DRAWN_PER_CLASS),
    "evaluation.episodes": (1, MOST_SEQUENCES),  # a published list is one
}
# And its other numbers: whether one is possible, and the rule in words.
_POSITIVE: tuple[Callable[[float], bool], str] = (lambda value: 0 < value < math.inf, "must be positive")
NUMBER_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "pretraining.momentum": (lambda value: 0 <= value < 1, "must be in [0, 1)"),
    "pretraining.weight_decay": (lambda value: 0 <= value < math.inf, "must not be negative"),
    "pretraining.norm_momentum": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "pretraining.schedule.rate": _POSITIVE,
    "meta_training.schedule.rate": _POSITIVE,
}
# Its texts: what each must look like, and the rule in words.
TEXT_PATTERNS = {
    "dataset.name": (NAME_PATTERN, NAME_RULE),
    "novel_from": (NAME_PATTERN, NAME_RULE),
    "pretraining.weights": (WEIGHTS_PATTERN, WEIGHTS_RULE),
    "pretraining.pretrained_on": (CORPORA_PATTERN, CORPORA_RULE),
}
# And its lists.
LIST_RULES = {
    "dataset.mean": "as many as the images have channels, or one for all",
    "dataset.std": "the same, positive",
    "pretraining.schedule.drops": "ascending",
    "meta_training.schedule.drops": "ascending",
}


def max_episodes_for_shape(shape: EpisodeSpec) -> int:
    """Return the most test episodes there may be: as many as fit into a result file, packed, and a million at most."""
    from ifsl_bench.utils.serialization import bytes_per_count  # NumPy, which --help does without

    base, novel = shape.base_queries, shape.ways * shape.novel_queries  # joint, alone and calibrated hits, and pairs
    hits = (
        3 * bytes_per_count(base) + 3 * bytes_per_count(novel) + bytes_per_count(2 * base * novel)
    )  # joint, alone and calibrated; pairs
    each = (LABEL_BYTES_IN_RESULT * shape.ways + hits) * 4 / 3  # base64
    return min(MOST_EPISODES, int((RESULT_FILE_BYTES.maximum - RESULT_BYTES_BESIDE_EPISODES) / each))


def max_episodes_of_task(task: Task) -> int:
    """Return the most test episodes, or sequences of sessions, that a result of the task may have."""
    return MOST_SEQUENCES if task.sessions else max_episodes_for_shape(task.episode)


def check_name(name: str, where: str) -> None:
    """Check that a task file may call a task by a name; a ``+`` is for changes of a task.

    Args:
        name: of the task.
        where: how errors name the file.

    Raises:
        UserError: the name is not allowed.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{where}: task {name!r}: {NAME_RULE}")


def check_task(task: Task, where: str) -> None:
    """Check that all values of a task are possible.

    Args:
        task: that is checked.
        where: how errors name its file.

    Raises:
        UserError: an impossible value; it names the field, the task and ``where``.
    """

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(f"{where}: task {task.name!r}: {message}")

    for field, (pattern, rule) in TEXT_PATTERNS.items():
        text = attrgetter(field)(task)
        need(text is None or bool(re.fullmatch(pattern, text)), f"{field} {text!r:.80}: {rule}")
    need(is_printable(task.title), "title must be one line of text that can be printed")
    # Sessions come first, since the number of sequences follows from them.
    for field, (least, most) in (
        SESSION_INTEGER_RANGES | INTEGER_RANGES | SESSION_INTEGER_RANGES if task.sessions else INTEGER_RANGES
    ).items():
        if (value := attrgetter(field)(task)) is not None:
            need(value >= least, f"{field} must be at least {least}" if least else f"{field} must not be negative")
            need(value <= most, f"{field} must be at most {most:,}")
    for field, (possible, rule) in NUMBER_RULES.items():
        need(possible(attrgetter(field)(task)), f"{field} {rule}")
    most = max_episodes_of_task(task)
    need(
        task.evaluation.episodes <= most,
        f"evaluation.episodes is {task.evaluation.episodes:,}; of {task.episode.ways:,} classes a result file holds "
        f"{most:,} episodes at most",
    )
    backbone = task.pretraining.backbone
    need(
        bool(re.fullmatch(BACKBONE_PATTERN, backbone)),
        f"pretraining.backbone {backbone!r:.80} is no name of a backbone",
    )
    need(len(task.dataset.mean) == len(task.dataset.std), "dataset.mean and dataset.std must have equal lengths")
    need(len(task.dataset.mean) <= MOST_LIST_ENTRIES, f"dataset.mean must have at most {MOST_LIST_ENTRIES:,} entries")
    need(all(map(math.isfinite, task.dataset.mean)), "dataset.mean must be finite")
    need(all(0 < s < math.inf for s in task.dataset.std), "dataset.std must be positive")
    for label, schedule in (("pretraining", task.pretraining.schedule), ("meta_training", task.meta_training.schedule)):
        drops = schedule.drops
        need(len(drops) <= MOST_LIST_ENTRIES, f"{label}.schedule.drops must have at most {MOST_LIST_ENTRIES:,} entries")
        need(max(drops, default=0) <= MOST_STEPS, f"{label}.schedule.drops must be at most {MOST_STEPS:,}")
        need(list(drops) == sorted({d for d in drops if d > 0}), f"{label}.schedule.drops must ascend")
        need(not (drops and schedule.shape == "cosine"), f"{label}.schedule.drops have no place in a cosine")
