"""Tasks: what is measured, on which data, after which training. Read from TOML, strictly.

One file holds one data set and the tasks on it; packaged files are in ``ifsl_bench.tasks`` and a user's own file works
as ``path/to/my.toml`` (all of its tasks) or ``path/to/my.toml:name`` (one of them). This module imports no torch.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ifsl_bench.errors import UserError, unknown
from ifsl_bench.store import sha256_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Side = Literal["train", "val", "test"]
NAME = r"[a-z0-9][a-z0-9._-]*"  # of a task or data set: it names folders
NO_BACKBONE = "none"  # the backbone of data that are features already


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An unknown key, a missing one or one of the wrong type is an error that names it."""


class DataSpec(_Strict, frozen=True):
    """The data set of a task and how its images enter a network: ``(x / 255 - mean) / std`` for each channel."""

    name: str
    fingerprint: str | None = None  # the content that the digests in this file belong to
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    obtain: str = ""  # what to tell someone who does not have the data


class Schedule(_Strict, frozen=True):
    """Learning rate ``rate``, times 0.1 at every step in ``drops``; or cosine from ``rate`` to zero after a warm-up."""

    rate: float
    drops: tuple[int, ...] = ()
    shape: Literal["drops", "cosine"] = "drops"
    warmup: int = 0

    def at(self, step: int, steps: int) -> float:
        """The learning rate of a step counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if self.shape == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, steps - self.warmup)))
        return self.rate * 0.1 ** sum(step >= drop for drop in self.drops)


class Pretraining(_Strict, frozen=True):
    """Stage 1: backbone and base classifier on base/train by cross-entropy, SGD with momentum."""

    backbone: str
    steps: int
    schedule: Schedule
    batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 5e-4
    crop_padding: int = 0  # pixels of zero padding before a random crop of the original size
    flip: bool = False  # horizontal, with probability one half
    norm_momentum: float = 0.1  # PyTorch's convention: the weight of the new batch


class EpisodeSpec(_Strict, frozen=True):
    """The shape of an episode: ``ways`` novel classes, queries for each of them, base queries in all."""

    ways: int = 5
    novel_queries: int = 5
    base_queries: int = 25


class MetaTraining(_Strict, frozen=True):
    """Stage 2: Adam on episodes."""

    steps: int = 8000
    schedule: Schedule = Schedule(rate=1e-3, drops=(4000,))
    validate_every: int = 1000


class Evaluation(_Strict, frozen=True):
    """Stage 3. ``seed`` fixes the episodes; every method and every training seed sees the same ones."""

    episodes: int = 2000
    validation_episodes: int = 600
    seed: int = 0


class _TaskEntry(_Strict, frozen=True):
    shots: int
    protocol: Literal["separate", "shared"] = "separate"
    digest: str | None = None
    title: str = ""


class _TaskFile(_Strict, frozen=True):
    dataset: DataSpec
    pretraining: Pretraining
    tasks: dict[str, _TaskEntry]
    episode: EpisodeSpec = EpisodeSpec()
    meta_training: MetaTraining = MetaTraining()
    evaluation: Evaluation = Evaluation()


class Task(_Strict, frozen=True):
    """One line of the leaderboard: data, pretraining, episodes, meta-training and evaluation.

    ``protocol`` is "separate" where novel/train is a pool of its own (tiered-ImageNet), and "shared" where novel/train
    *is* base/train and an episode's classes are hidden from the base classifier (mini-ImageNet).
    """

    name: str
    title: str
    shots: int
    protocol: Literal["separate", "shared"]
    dataset: DataSpec
    pretraining: Pretraining
    episode: EpisodeSpec
    meta_training: MetaTraining
    evaluation: Evaluation
    digest: str | None = None

    def definition(self) -> dict[str, Any]:
        """Everything that changes a number, and nothing else."""
        value = msgspec.to_builtins(self)
        del value["title"], value["digest"], value["dataset"]["obtain"], value["dataset"]["fingerprint"]
        return value

    @property
    def hash(self) -> str:
        """16 hex digits that change whenever the definition does: a changed task is a new task."""
        return sha256_json(self.definition())[:16]

    def pool(self, side: Side, part: Literal["base", "novel"]) -> str:
        """The pool that a side's base queries or novel classes come from (protocol of Ren et al. 2019, appendix)."""
        if side == "train" and self.protocol == "shared":
            return "base/train"
        if side == "train":
            return "base/val" if part == "base" else "novel/train"
        return f"{part}/{side}"

    def base_parity(self, side: Side) -> Literal["even", "odd"] | None:
        """Which images of each class, by index, a side's base queries may use.

        Where meta-training and validation both draw on base/val, the former takes even and the latter odd indices, so
        that no image both trains and selects a model.
        """
        if self.protocol == "shared" or side == "test":
            return None
        return "even" if side == "train" else "odd"


def _check(task: Task, where: str) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(f"{where}: task {task.name!r}: {message}")

    rule = "a name is lower-case letters, digits, '.', '_', '-'"
    need(bool(re.fullmatch(NAME, task.name)), rule)
    need(bool(re.fullmatch(NAME, task.dataset.name)), f"dataset.name {task.dataset.name!r}: {rule}")
    need(task.shots >= 1, "shots must be at least 1")
    need(task.episode.ways >= 1, "episode.ways must be at least 1")
    need(task.episode.novel_queries >= 1, "episode.novel_queries must be at least 1")
    need(task.episode.base_queries >= 1, "episode.base_queries must be at least 1")
    need(task.evaluation.episodes >= 2, "evaluation.episodes must be at least 2")
    need(task.evaluation.validation_episodes >= 2, "evaluation.validation_episodes must be at least 2")
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


def _keys() -> set[str]:
    """Every key that a task file may have, for suggestions."""
    kinds = (_TaskFile, _TaskEntry, DataSpec, Pretraining, Schedule, EpisodeSpec, MetaTraining, Evaluation)
    return {field.name for kind in kinds for field in msgspec.structs.fields(kind)}


def parse(text: str, where: str) -> list[Task]:
    """Reads the tasks of one TOML file.

    Args:
        text: the file's content.
        where: how errors name the file.

    Raises:
        UserError: not TOML, an unknown or missing key, a wrong type or an impossible value; the message names it.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error
    try:
        file = msgspec.convert(raw, _TaskFile, strict=True)
    except msgspec.ValidationError as error:
        message = str(error).replace("Object contains", "it contains").replace("$.", "").replace("`$`", "its top level")
        if field := re.search(r"unknown field `(.*?)`", message):
            near = difflib.get_close_matches(field[1], _keys(), n=2, cutoff=0.6)
            message += f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        raise UserError(f"{where}: {message}") from error
    if not file.tasks:
        raise UserError(f"{where}: it defines no task; add a table such as [tasks.my-5shot] with shots = 5")
    tasks = [
        Task(
            name=name,
            title=entry.title,
            shots=entry.shots,
            protocol=entry.protocol,
            dataset=file.dataset,
            pretraining=file.pretraining,
            episode=file.episode,
            meta_training=file.meta_training,
            evaluation=file.evaluation,
            digest=entry.digest,
        )
        for name, entry in file.tasks.items()
    ]
    for task in tasks:
        _check(task, where)
    return tasks


@lru_cache(maxsize=1)
def packaged() -> dict[str, Task]:
    """The tasks that come with the package, by name."""
    tasks: dict[str, Task] = {}
    for file in sorted(resources.files("ifsl_bench.tasks").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            for task in parse(file.read_text(encoding="utf-8"), f"tasks/{file.name}"):
                if task.name in tasks:
                    raise UserError(f"tasks/{file.name}: task {task.name!r} is defined twice")
                tasks[task.name] = task
    return tasks


def find(name: str) -> list[Task]:
    """The task of that name, or the tasks of a TOML file ``path.toml`` or ``path.toml:name``.

    Raises:
        UserError: no such task or file; a name like it is suggested.
    """
    path, _, chosen = name.partition(".toml:")
    if chosen:
        path += ".toml"
    if path.endswith(".toml"):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"cannot read the task file {path}: {reason}") from error
        tasks = {task.name: task for task in parse(text, path)}
        if chosen and chosen not in tasks:
            raise unknown("task", chosen, tasks, where=f"in {path}")
        return [tasks[chosen]] if chosen else list(tasks.values())
    if name not in packaged():
        raise unknown("task", name, packaged())
    return [packaged()[name]]
