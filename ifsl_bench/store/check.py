"""Contributed result files, held against the task, the episodes, the data and the method that they name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ifsl_bench.analysis.task_results import unfit
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.class_draws import ClassDraws
from ifsl_bench.protocols.tasks.task import Side, Task
from ifsl_bench.protocols.tasks.task_files import find, is_plain
from ifsl_bench.protocols.tasks.task_limits import check_task, most_of
from ifsl_bench.protocols.tasks.variants import changed, split
from ifsl_bench.reporting.data_frames import with_interval
from ifsl_bench.store.check_form import Unverified, odd_values, unprintable, verifying
from ifsl_bench.store.schema import Result, file_name, inconsistency, parse, read_raw
from ifsl_bench.utils.errors import UserError, one_line
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:
    from ifsl_bench.protocols.episodes import Sampler
    from ifsl_bench.protocols.sequences import SequenceSampler

MOST_LINES, MOST_LETTERS = 50, 500  # that are said of a file; one line is enough to refuse it


@dataclass(frozen=True)
class Checked:
    """The findings on a file."""

    result: Result | None  # None where the file does not hold one
    failures: tuple[str, ...]  # what is wrong, a line each; empty for a good file
    unverified: tuple[str, ...] = ()  # what could not be looked at here

    @property
    def line(self) -> str:
        """A good file in one line."""
        r = self.result
        assert r is not None
        accuracy = with_interval(r.summary["acc"])
        text = f"ok: {r.label} on {r.task}, seed {r.seed}, {len(r.episodes):,} episodes, Acc. {accuracy}"
        return f"{text} (not verified: {'; '.join(self.unverified)})" if self.unverified else text


def check_file(path: Path, tasks: Mapping[str, Task] | None = None, home: Paths | None = None) -> Checked:
    """Verifies a result file.

    Held against each other are its schema and every name in it, all of which must be texts that can be printed; its
    summary and the counts of its episodes; its task's definition, data and episodes, and the ones it was measured on;
    its name and label, and the method, options and seed in it; where it came from. The episodes of a task without a
    pinned digest, and some but not all of a task's, are drawn again where the data are prepared here; where the method
    is installed, label and choice of options are made again, and its code is compared.

    Args:
        tasks: tasks of one's own, by name, beside the packaged ones.
        home: where data sets are looked for.
    """
    home, tasks = home or Paths.locate(), tasks or {}
    try:
        raw = read_raw(path)
        if mixed := _published(path, raw):
            return Checked(None, (mixed,))
        result = parse(path, raw)
    except UserError as error:
        message = str(error).replace(one_line(f"{path} "), "it ", 1).removeprefix(one_line(f"{path}: "))
        return Checked(
            None, _lines([message.replace(one_line(f"cannot read the result {path}"), "it cannot be read", 1)])
        )
    failures = [*unprintable(raw)]
    failures += [reason] if (reason := inconsistency(result)) else []
    failures += _place(path, result, tasks, home)
    failures += odd_values(result)
    unverified: list[str] = []
    try:
        task = _task(result.task, tasks, home)
    except UserError as error:
        failures.append(f"task: {error}")
    else:
        from ifsl_bench.experiments.check_method import CHECKS

        failures += [*_definition(result, task), *unfit(task, [result]).values()]
        for check in (_digest, _classes, _partial, _calibration, *CHECKS):
            try:
                failures += check(result, task, home)
            except Unverified as error:
                unverified.append(str(error))
    return Checked(result, _lines(failures), tuple(map(one_line, unverified)))


def _lines(failures: Sequence[str]) -> tuple[str, ...]:
    """Shortens each failure to one line, and their number to as many as anybody reads."""
    texts = [one_line(failure[:MOST_LETTERS]) + "..." * (len(failure) > MOST_LETTERS) for failure in failures]
    rest = [f"and {len(texts) - MOST_LINES:,} more"] if len(texts) > MOST_LINES else []
    return tuple(texts[:MOST_LINES] + rest)


def _task(name: str, tasks: Mapping[str, Task], home: Paths) -> Task:
    if name in tasks:
        return tasks[name]
    if not is_plain(name):  # a path would be opened, and it is not the user who named it
        raise UserError(f"{name!r} is no task's name, with or without changes such as +ways=10")
    plain, change = split(name)
    if plain not in tasks:
        (task,) = find(name, home=home)
    else:
        task = changed(tasks[plain], change)
        check_task(task, "with these changes")
    if task.name != name:
        raise UserError(f"{name!r} is called {task.name!r}")
    return task


def _published(path: Path, raw: Mapping[str, Any]) -> str:
    """Says why a file is, or lies among, published rows; "" elsewhere. They are never mixed with measured ones."""
    if raw.keys() & {"rows", "columns"}:
        return "it is a table of published rows, not the result of a run"
    if _folder(path) == "published":
        return "it lies among the published rows, where no measured result belongs"
    return ""


def _folder(path: Path) -> str:
    """The name of the folder that a file lies in; as for tables, a link lies where it is, not where it leads."""
    return Path(os.path.abspath(path)).parent.name


def _place(path: Path, result: Result, tasks: Mapping[str, Task], home: Paths) -> Iterator[str]:
    if path.name != file_name(result.label, result.seed):
        yield f"file name: label and seed make it {file_name(result.label, result.seed)}"
    folder = _folder(path)
    if folder != result.task:  # a copy in a folder that is no task's is as good
        with contextlib.suppress(UserError):
            _task(folder, tasks, home)
            yield f"folder: it lies with the results of {folder}, and is of {result.task}"


def _definition(result: Result, task: Task) -> Iterator[str]:
    if result.task_hash != task.hash:
        yield f"task_hash: {result.task_hash}, today's definition of {task.name} has {task.hash}"
    pinned = task.dataset.fingerprint
    if pinned and result.fingerprint != pinned:
        yield f"fingerprint: {result.fingerprint[:16]}, task {task.name} is pinned to {pinned[:16]}: other data"
    novel, source = result.novel_fingerprint[:16], task.novel_from or "its own data set"
    if bool(novel) != bool(task.novel_from):
        yield f"novel_fingerprint: {novel!r}, the novel classes of {task.name} are of {source}"


def _digest(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """The digest, against the pinned one or against the episodes drawn again from the data."""
    count = len(result.episodes)
    if count > most_of(task):  # which does not fit, and may be millions to draw
        return
    expected = task.digest if count == task.evaluation.episodes else None
    if expected is None:
        with verifying("digest"):
            expected = _sampler(result, task, home).digest(count)
    if result.digest != expected:
        yield f"digest: {result.digest[:16]}, the {count:,} episodes of {task.name} have {expected[:16]}"


def _classes(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """The novel classes of each episode, against the episodes drawn again from the data."""
    count = len(result.episodes)
    if unfit(task, [result]):
        return
    with verifying("classes"):
        draws = _sampler(result, task, home).class_draws(count)
        drawn = draws.array() if isinstance(draws, ClassDraws) else draws
    if not np.array_equal(result.episodes.column("classes"), drawn.reshape(-1)):
        yield f"episodes.classes: others than those of the {count:,} episodes of {task.name}"


def _sampler(result: Result, task: Task, home: Paths, side: Side = "test") -> Sampler | SequenceSampler:
    """A side's episodes of the very data that a result was measured on."""
    _prepared(result, task, home)
    from ifsl_bench.experiments.workspace import Workspace

    return Workspace(home).prepared(task, "linear", result.seed).sampler(side)


def _prepared(result: Result, task: Task, home: Paths) -> bool:
    """Tells whether the data that a result was measured on are partial; exactly these have to be here."""
    from ifsl_bench.data.datasets import is_prepared
    from ifsl_bench.data.pools import open_dataset
    from ifsl_bench.data.preparing.metadata import data_of

    partial = False
    for spec, fingerprint in zip(data_of(task, home), (result.fingerprint, result.novel_fingerprint), strict=False):
        if not is_prepared(home, spec.name):
            raise Unverified(f"data set {spec.name} is not prepared here")
        dataset = open_dataset(home.data / spec.name)
        if dataset.fingerprint != fingerprint:
            raise Unverified(f"data set {spec.name} here has fingerprint {dataset.fingerprint[:16]}")
        partial = partial or dataset.partial
    return partial


def _partial(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Checks the mark "partial", which is part of the fingerprint, against the pinned or the prepared data."""
    data = task.dataset
    crossed = task.novel_from is not None  # then either may be
    expected = data.partial if data.fingerprint == result.fingerprint and not crossed else None
    if expected is None and not crossed and data.name in registry.names(registry.DATASETS):
        plugin = registry.load(registry.DATASETS, data.name)
        expected = None if plugin.problem or plugin.value.needs_source else False  # what is made here is whole
    if expected is None:
        with verifying("partial"):
            expected = _prepared(result, task, home)
    if result.partial != expected:
        extent = "a part" if expected else "the whole"
        yield f"partial: {str(result.partial).lower()}, data set {data.name} with this fingerprint is {extent}"


def _calibration(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Checks that a calibration is there where the task allows one."""
    if not task.kind.has_base or result.calibration:
        return
    if not (result.tuned or result.training):  # these have had validation episodes
        with verifying("calibration"):
            _sampler(result, task, home, "val")
    yield f"calibration: missing; task {task.name} has base classes, and validation episodes to find the bias on"
