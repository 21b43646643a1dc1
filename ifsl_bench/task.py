"""Tasks: what is measured, on which data, after which training. Read from TOML, strictly.

One file holds one data set and the tasks on it; packaged files are in ``ifsl_bench.tasks`` and a user's own file works
as ``path/to/my.toml`` (all of its tasks) or ``path/to/my.toml:name`` (one of them). A name may go on with changes, as
in ``glyphs-5shot+ways=10``; see :mod:`ifsl_bench.variants`. This module imports no torch.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ifsl_bench.errors import UserError, unknown
from ifsl_bench.store import Home, sha256_json
from ifsl_bench.task_check import NAME as NAME
from ifsl_bench.task_check import check_name, check_task
from ifsl_bench.variants import Change, Variant, changed, derived, merged

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Side = Literal["train", "val", "test"]
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
    """The shape of an episode: ``ways`` novel classes, queries for each of them, base queries in all.

    No base queries means regular few-shot learning: no base class is in the softmax, of support or query.
    """

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
    variant_of: str = ""


class _VariantFile(_Strict, frozen=True):
    variants: dict[str, Variant]


class _TaskFile(_Strict, frozen=True):
    dataset: DataSpec
    pretraining: Pretraining
    tasks: dict[str, _TaskEntry]
    episode: EpisodeSpec = EpisodeSpec()
    meta_training: MetaTraining = MetaTraining()
    evaluation: Evaluation = Evaluation()
    variants: dict[str, Variant] = {}


class Task(_Strict, frozen=True):
    """One line of the leaderboard: data, pretraining, episodes, meta-training and evaluation.

    ``protocol`` is "separate" where novel/train is a pool of its own (tiered-ImageNet), and "shared" where novel/train
    *is* base/train and an episode's classes are hidden from the base classifier (mini-ImageNet). ``base_classes`` is
    None for all of the data set's. ``variant_of`` names the task whose protocol this one departs from: tables keep the
    two apart.
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
    base_classes: int | None = None
    digest: str | None = None
    variant_of: str = ""

    @property
    def regular(self) -> bool:
        """Whether this is regular few-shot learning, with no base class in the softmax and none in the query."""
        return self.episode.base_queries == 0

    def definition(self) -> dict[str, Any]:
        """Everything that changes a number, and nothing else."""
        value = msgspec.to_builtins(self)
        del value["title"], value["digest"], value["variant_of"]
        del value["dataset"]["obtain"], value["dataset"]["fingerprint"]
        if self.base_classes is None:  # younger than the first stored results: absent where it changes nothing
            del value["base_classes"]
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

    def pools(self, side: Side) -> tuple[str, ...]:
        """The pools whose images are in a side's episodes."""
        parts: tuple[Literal["base", "novel"], ...] = ("novel",) if self.regular else ("novel", "base")
        return tuple(dict.fromkeys(self.pool(side, part) for part in parts))

    def base_parity(self, side: Side) -> Literal["even", "odd"] | None:
        """Which images of each class, by index, a side's base queries may use.

        Where meta-training and validation both draw on base/val, the former takes even and the latter odd indices, so
        that no image both trains and selects a model.
        """
        if self.protocol == "shared" or side == "test":
            return None
        return "even" if side == "train" else "odd"


def _keys() -> set[str]:
    """Every key that a task file may have, for suggestions."""
    kinds: tuple[type[msgspec.Struct], ...] = (Variant, *_Strict.__subclasses__())
    return {field.name for kind in kinds for field in msgspec.structs.fields(kind)}


def _read(text: str, where: str) -> _TaskFile | _VariantFile:
    """A file's content, held against the schema."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error
    try:
        kind: type[_TaskFile | _VariantFile] = _VariantFile if raw.keys() == {"variants"} else _TaskFile
        file = msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error).replace("Object contains", "it contains").replace("$.", "").replace("`$`", "its top level")
        if field := re.search(r"unknown field `(.*?)`", message):
            near = difflib.get_close_matches(field[1], _keys(), n=2, cutoff=0.6)
            message += f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        raise UserError(f"{where}: {message}") from error
    if not file.variants and not getattr(file, "tasks", None):
        raise UserError(f"{where}: it defines no task; add a table such as [tasks.my-5shot] with shots = 5")
    return file


def _tasks(file: _TaskFile | _VariantFile, where: str) -> dict[str, Task]:
    """The tasks that a file defines on its own data set."""
    if isinstance(file, _VariantFile):
        return {}
    shared = {f.name: getattr(file, f.name) for f in msgspec.structs.fields(_TaskFile)}
    del shared["tasks"], shared["variants"]
    tasks = {name: Task(name=name, **msgspec.structs.asdict(entry), **shared) for name, entry in file.tasks.items()}
    for name, task in tasks.items():
        check_name(name, where)
        check_task(task, where)
    return tasks


def _variants(file: _TaskFile | _VariantFile, where: str, known: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks that a file derives from others."""
    tasks = {}
    for name, entry in file.variants.items():
        check_name(name, where)
        if entry.of not in known:
            raise unknown("task", entry.of, known, where=f"that {name!r} of {where} is a variant of")
        try:
            tasks[name] = derived(known[entry.of], name, entry)
        except UserError as error:
            raise UserError(f"{where}: task {name!r}: {error}") from error
        check_task(tasks[name], where)
    return tasks


def parse(text: str, where: str) -> list[Task]:
    """Reads the tasks of one TOML file.

    Args:
        text: the file's content.
        where: how errors name the file.

    Raises:
        UserError: not TOML, an unknown or missing key, a wrong type or an impossible value; the message names it.
    """
    file = _read(text, where)
    tasks = _tasks(file, where)
    if file.variants:
        variants = _variants(file, where, {**packaged(), **tasks})
        if twice := sorted(variants.keys() & tasks.keys()):
            raise UserError(f"{where}: task {twice[0]!r} is defined twice")
        tasks |= variants
    return list(tasks.values())


@lru_cache(maxsize=1)
def packaged() -> dict[str, Task]:
    """The tasks that come with the package, by name."""
    texts = {f.name: f.read_text(encoding="utf-8") for f in resources.files("ifsl_bench.tasks").iterdir()
             if f.name.endswith(".toml")}  # fmt: skip
    files = {f"tasks/{name}": _read(texts[name], f"tasks/{name}") for name in sorted(texts)}
    tasks: dict[str, Task] = {}
    for derive in (False, True):  # variants once all other tasks are known
        for where, file in files.items():
            found = _variants(file, where, tasks) if derive else _tasks(file, where)
            if twice := sorted(found.keys() & tasks.keys()):
                raise UserError(f"{where}: task {twice[0]!r} is defined twice")
            tasks |= found
    return tasks


def own(home: Home) -> dict[str, Task]:
    """The tasks on data sets that the user prepared from images of their own, by name.

    Raises:
        UserError: a task file of theirs is wrong; it is named.
    """
    tasks: dict[str, Task] = {}
    for path in sorted(home.tasks.glob("*.toml")) if home.tasks.is_dir() else ():
        for task in parse(path.read_text(encoding="utf-8"), str(path)):
            if task.name in tasks or task.name in packaged():
                raise UserError(f"{path}: there is another task {task.name!r}; call this one something else")
            tasks[task.name] = task
    return tasks


def find(name: str, change: Change | None = None, home: Home | None = None) -> list[Task]:
    """The task of that name, or the tasks of a TOML file ``path.toml`` or ``path.toml:name``; each with a change.

    Args:
        name: may say changes itself, as ``glyphs-5shot+ways=10``.
        change: further ones.
        home: where the user's own tasks are, beside the packaged ones; the usual place where None.

    Raises:
        UserError: no such task or file, and a name like it is suggested; or an impossible change.
    """
    plain, whole = merged(name, change or Change())
    tasks = [changed(task, whole) for task in _named(plain, home)]
    for task in tasks:
        check_task(task, "with these changes" if whole.said() else "packaged")
    return tasks


def _named(name: str, home: Home | None) -> list[Task]:
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
    if name in packaged():
        return [packaged()[name]]
    known = {**packaged(), **own(home or Home.locate())}
    if name not in known:
        raise unknown("task", name, known)
    return [known[name]]
