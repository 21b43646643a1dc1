"""Reads tasks from TOML, strictly, and finds them by name.

One file holds one data set and the tasks on it; packaged files are in ``ifsl_bench.tasks`` and a user's own file works
as ``path/to/my.toml`` (all of its tasks) or ``path/to/my.toml:name`` (one of them). A name may go on with changes, as
in ``glyphs-5shot+ways=10``; see :mod:`ifsl_bench.protocols.tasks.variants`. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from ifsl_bench.protocols.tasks.task import (
    DataSpec,
    EpisodeSpec,
    Evaluation,
    MetaTraining,
    Pretraining,
    SessionSpec,
    StrictStruct,
    Task,
)
from ifsl_bench.protocols.tasks.task_limits import NAME_PATTERN, check_name, check_task
from ifsl_bench.protocols.tasks.variants import (
    TaskChanges,
    TaskVariantEntry,
    apply_task_changes,
    derive_variant,
    merge_task_changes,
    with_sessions,
)
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.toml import convert_tables, parse_toml, read_user_file

LIST_COMMAND = "ifsl-bench tasks"  # where all tasks are listed


class _TaskEntry(StrictStruct, frozen=True):
    shots: int
    protocol: Literal["separate", "shared"] = "separate"
    digest: str | None = None
    title: str = ""
    variant_of: str = ""
    sessions: SessionSpec | None = None


class _VariantFile(StrictStruct, frozen=True):
    variants: dict[str, TaskVariantEntry]


class TaskFile(StrictStruct, frozen=True):
    """The content of a file with tasks."""

    dataset: DataSpec
    pretraining: Pretraining
    tasks: dict[str, _TaskEntry]
    episode: EpisodeSpec = EpisodeSpec()
    meta_training: MetaTraining = MetaTraining()
    evaluation: Evaluation = Evaluation()
    variants: dict[str, TaskVariantEntry] = msgspec.field(default_factory=dict)


_STRUCT_TYPES: tuple[type[msgspec.Struct], ...] = (TaskVariantEntry, *StrictStruct.__subclasses__())
ALL_KEYS = {field.name for kind in _STRUCT_TYPES for field in msgspec.structs.fields(kind)}  # that a file may have


def _parse_file(text: str, where: str) -> TaskFile | _VariantFile:
    """Parse the content of a file, and check it against the schema."""
    raw = parse_toml(text, where)
    kind: type[TaskFile | _VariantFile] = _VariantFile if raw.keys() == {"variants"} else TaskFile
    file = convert_tables(raw, kind, where, ALL_KEYS)
    if not file.variants and not getattr(file, "tasks", None):
        raise UserError(f"{where}: it defines no task; add a table such as [tasks.my-5shot] with shots = 5")
    return file


def _file_tasks(file: TaskFile | _VariantFile, where: str) -> dict[str, Task]:
    """Return the tasks that a file defines on its own data set."""
    if isinstance(file, _VariantFile):
        return {}
    shared = {f.name: getattr(file, f.name) for f in msgspec.structs.fields(TaskFile)}
    del shared["tasks"], shared["variants"]
    tasks = {name: Task(name=name, **msgspec.structs.asdict(entry), **shared) for name, entry in file.tasks.items()}
    tasks = {name: with_sessions(task, task.sessions) if task.sessions else task for name, task in tasks.items()}
    for name, task in tasks.items():
        check_name(name, where)
        check_task(task, where)
    return tasks


def _variant_tasks(file: TaskFile | _VariantFile, where: str, others: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks that a file derives from others."""
    tasks = {}
    for name, entry in file.variants.items():
        check_name(name, where)
        if entry.of not in others:
            raise unknown_name_error(
                "task", entry.of, others, where=f"that {name!r} of {where} is a variant of", see=LIST_COMMAND
            )
        try:
            tasks[name] = derive_variant(others[entry.of], name, entry)
        except UserError as error:
            raise UserError(f"{where}: task {name!r}: {error}") from error
        check_task(tasks[name], where)
    return tasks


def parse_tasks(text: str, where: str) -> list[Task]:
    """Read the tasks of one TOML file.

    Args:
        text: the file's content.
        where: how errors name the file.

    Raises:
        UserError: not TOML, an unknown or missing key, a wrong type or an impossible value; the message names it.
    """
    file = _parse_file(text, where)
    tasks = _file_tasks(file, where)
    if file.variants:
        variants = _variant_tasks(file, where, {**packaged_tasks(), **tasks})
        if twice := sorted(variants.keys() & tasks.keys()):
            raise UserError(f"{where}: task {twice[0]!r} is defined twice")
        tasks |= variants
    return list(tasks.values())


@lru_cache(maxsize=1)
def _packaged_files() -> dict[str, TaskFile | _VariantFile]:
    paths = [path for path in resources.files("ifsl_bench.tasks").iterdir() if path.name.endswith(".toml")]
    texts = {f"tasks/{path.name}": path.read_text(encoding="utf-8") for path in sorted(paths, key=lambda p: p.name)}
    return {where: _parse_file(text, where) for where, text in texts.items()}


def packaged_task(name: str) -> Task | None:
    """Return the task of that name that comes with the package; None where there is none."""
    for where, file in _packaged_files().items():
        if isinstance(file, TaskFile) and name in file.tasks:
            return _file_tasks(file, where)[name]
    return packaged_tasks().get(name)  # which makes the variants


@lru_cache(maxsize=1)
def packaged_tasks() -> dict[str, Task]:
    """Return the tasks that come with the package, by name."""
    tasks: dict[str, Task] = {}
    for derive in (False, True):  # variants once all other tasks are known
        for where, file in _packaged_files().items():
            new_tasks = _variant_tasks(file, where, tasks) if derive else _file_tasks(file, where)
            if twice := sorted(new_tasks.keys() & tasks.keys()):
                raise UserError(f"{where}: task {twice[0]!r} is defined twice")
            tasks |= new_tasks
    return tasks


def own_tasks(home: Paths) -> dict[str, Task]:
    """Return the tasks on data sets that the user prepared from images of their own, by name.

    Raises:
        UserError: a task file of theirs is wrong; it is named.
    """
    tasks: dict[str, Task] = {}
    for path in sorted(home.tasks.glob("*.toml")) if home.tasks.is_dir() else ():
        for task in parse_tasks(read_user_file(path, "task file"), str(path)):
            if task.name in tasks:
                raise UserError(f"{path}: there is another task {task.name!r}; call this one something else")
            _check_name_free(task, str(path))
            tasks[task.name] = task
    return tasks


def _check_name_free(task: Task, where: str) -> None:
    """Raise :class:`UserError` for a task of one's own with the name of another one that comes with the package."""
    namesake = packaged_task(task.name)
    if namesake is not None and namesake != task:
        raise UserError(
            f"{where}: task {task.name!r} is also one that comes with ifsl_bench (data set {namesake.dataset.name}); "
            f"call this one something else"
        )


def load_tasks(name: str, change: TaskChanges | None = None, home: Paths | None = None) -> list[Task]:
    """Return the task of a name, or the tasks of a TOML file ``path.toml`` or ``path.toml:name``; each with a change.

    Args:
        name: may have changes itself, as ``glyphs-5shot+ways=10``.
        change: further ones.
        home: where the user's own tasks are, which are found as the packaged ones are; the usual place where None.

    Raises:
        UserError: no such task or file, and a name like it is suggested; or an impossible change.
    """
    plain, whole = merge_task_changes(name, change or TaskChanges())
    tasks = _tasks_named(plain, home)
    if not whole.changes_by_key():
        return tasks
    tasks = [apply_task_changes(task, whole) for task in tasks]
    for task in tasks:
        check_task(task, "with these changes")
    return tasks


def load_task(name: str, home: Paths | None = None, change: TaskChanges | None = None) -> Task:
    """Return the one task of a name.

    Args:
        name: may have changes itself, as ``glyphs-5shot+ways=10``.
        home: where the user's own tasks are; the usual place where None.
        change: further changes.

    Raises:
        UserError: as :func:`load_tasks`, and for a file that defines several tasks.
    """
    task, *more = load_tasks(name, change, home)
    if more:
        raise UserError(f"{name} defines several tasks; choose one as {name}:NAME")
    return task


def is_task_name(name: str) -> bool:
    """Return whether this names a task, perhaps with changes: :func:`load_tasks` opens no path for it."""
    plain = name.partition("+")[0]
    return bool(re.fullmatch(NAME_PATTERN, plain)) and not re.search(r"[/\\]", name) and not is_task_file_name(name)


def is_task_file_name(name: str) -> bool:
    """Return whether a name is of a file, ``path.toml`` or ``path.toml:name``, perhaps with changes."""
    return bool(re.search(r"\.toml($|[:+])", name))


def _tasks_named(name: str, home: Paths | None) -> list[Task]:
    path, _, chosen = name.partition(".toml:")
    if chosen:
        path += ".toml"
    if path.endswith(".toml"):
        tasks = {task.name: task for task in parse_tasks(read_user_file(Path(path), "task file"), path)}
        for task in tasks.values():
            _check_name_free(task, path)
        if chosen and chosen not in tasks:
            raise unknown_name_error("task", chosen, tasks, where=f"in {path}")
        return [tasks[chosen]] if chosen else list(tasks.values())
    if with_package := packaged_task(name):
        return [with_package]
    by_name = {**packaged_tasks(), **own_tasks(home or Paths.locate())}
    if name not in by_name:
        raise unknown_name_error("task", name, by_name, see=LIST_COMMAND)
    return [by_name[name]]
