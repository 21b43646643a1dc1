"""Check of contributed result files against their schema, and the task, the episodes and the data that they name."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ifsl_bench._version import __version__
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.sampling.draws import ClassDraws
from ifsl_bench.protocols.tasks.task import Side, Task
from ifsl_bench.protocols.tasks.task_files import is_task_name, load_tasks
from ifsl_bench.protocols.tasks.task_limits import MOST_TRIALS, check_task, max_episodes_of_task
from ifsl_bench.protocols.tasks.variants import apply_task_changes, split_task_name
from ifsl_bench.store.data_frames import format_metric
from ifsl_bench.store.result_folder import find_results_of_other_episodes
from ifsl_bench.store.schema import (
    PATTERNS_IN_WORDS,
    Result,
    WrittenResultFields,
    find_first_contradiction,
    parse_result,
    read_raw_result,
    result_file_name,
)
from ifsl_bench.utils.errors import UserError, escape_controls, is_printable
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:
    from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
    from ifsl_bench.protocols.sampling.sequences import SequenceSampler

MAX_FAULTS, MAX_FAULT_LENGTH = 50, 500  # that are printed of a file; one line is enough to refuse it
ALLOWED_CLOCK_LEAD = datetime.timedelta(days=1)  # of a clock that is wrong, or set to local time


class UnverifiedError(Exception):
    """Something that cannot be checked here; the message names what is missing."""


ResultCheck = Callable[[Result, Task, Paths], Iterator[str]]  # yields failures; raises Unverified


@dataclass(frozen=True)
class FileCheckResult:
    """The findings on a file.

    Attributes:
        result: None where the file does not hold one.
        failures: what is wrong, a line each; empty for a good file.
        unverified_notes: what could not be checked here.
    """

    result: Result | None
    failures: tuple[str, ...]
    unverified_notes: tuple[str, ...] = ()

    @property
    def summary_line(self) -> str:
        """A good file in one line."""
        r = self.result
        assert r is not None
        accuracy = format_metric(r.summary["acc"])
        text = f"ok: {r.label} on {r.task}, seed {r.seed}, {len(r.episodes):,} episodes, Acc. {accuracy}"
        return f"{text} (not verified: {'; '.join(self.unverified_notes)})" if self.unverified_notes else text


def check_result(
    path: Path, tasks: Mapping[str, Task] | None = None, home: Paths | None = None, checks: Sequence[ResultCheck] = ()
) -> FileCheckResult:
    """Verify a result file.

    Compared with each other are its schema and every name in it, all of which must be texts that can be printed; its
    summary and the counts of its episodes; its task's definition, data and episodes, and the ones it was measured on;
    its name and label, and the method, options and seed in it; where it came from. The episodes of a task without a
    pinned digest, and some but not all of a task's, are drawn again where the data are prepared here.

    Args:
        path: of the file.
        tasks: further tasks, by name, next to the packaged ones.
        home: the folders with data sets and own tasks.
        checks: further checks, of the method; see :mod:`ifsl_bench.experiments.check_method`.
    """
    home, tasks = home or Paths.locate(), tasks or {}
    try:
        raw = read_raw_result(path)
        if reason := _published_row_fault(path, raw):
            return FileCheckResult(None, (reason,))
        result = parse_result(path, raw)
    except UserError as error:
        message = str(error).replace(escape_controls(f"{path} "), "it ", 1).removeprefix(escape_controls(f"{path}: "))
        message = message.replace(escape_controls(f"cannot read the result {path}"), "it cannot be read", 1)
        return FileCheckResult(None, _shorten_faults([message]))
    failures = [*_unprintable_text_faults(raw)]
    failures += [reason] if (reason := find_first_contradiction(result)) else []
    failures += _file_path_faults(path, result, tasks, home)
    failures += _field_value_faults(result)
    unverified: list[str] = []
    try:
        task = _find_task(result.task, tasks, home)
    except UserError as error:
        failures.append(f"task: {error}")
    else:
        failures += [*_task_definition_faults(result, task), *find_results_of_other_episodes(task, [result]).values()]
        for check in (_episode_digest_faults, _novel_class_faults, _partial_mark_faults, _calibration_faults, *checks):
            try:
                failures += check(result, task, home)
            except UnverifiedError as error:
                unverified.append(str(error))
    return FileCheckResult(result, _shorten_faults(failures), tuple(map(escape_controls, unverified)))


@contextlib.contextmanager
def unverified_on_error(subject: str) -> Iterator[None]:
    """Raise whatever keeps a check from looking at a subject as :class:`UnverifiedError`, with the reason."""
    try:
        yield
    except (UserError, UnverifiedError) as error:
        raise UnverifiedError(f"{subject}, since {error}") from error


def _shorten_faults(failures: Sequence[str]) -> tuple[str, ...]:
    """Shorten each failure to one line, and their number to ``MAX_FAULTS``."""
    texts = [
        escape_controls(failure[:MAX_FAULT_LENGTH]) + "..." * (len(failure) > MAX_FAULT_LENGTH) for failure in failures
    ]
    rest = [f"and {len(texts) - MAX_FAULTS:,} more"] if len(texts) > MAX_FAULTS else []
    return tuple(texts[:MAX_FAULTS] + rest)


def _find_task(name: str, tasks: Mapping[str, Task], home: Paths) -> Task:
    if name in tasks:
        return tasks[name]
    if not is_task_name(name):  # a path would be opened, and it is not the user who named it
        raise UserError(f"{name!r} is no task's name, with or without changes such as +ways=10")
    plain, change = split_task_name(name)
    if plain not in tasks:
        (task,) = load_tasks(name, home=home)
    else:
        task = apply_task_changes(tasks[plain], change)
        check_task(task, "with these changes")
    if task.name != name:
        raise UserError(f"{name!r} is called {task.name!r}")
    return task


def _published_row_fault(path: Path, raw: Mapping[str, Any]) -> str | None:
    """Return why a file is, or lies among, published rows, which are never mixed with measured ones; None elsewhere."""
    if raw.keys() & {"rows", "columns"}:
        return "it is a table of published rows, not the result of a run"
    if _containing_folder_name(path) == "published":
        return "it lies among the published rows, where no measured result belongs"
    return None


def _containing_folder_name(path: Path) -> str:
    """Return the name of the folder that a file lies in; as for tables, a link lies where it is, not where it leads."""
    return Path(os.path.abspath(path)).parent.name


def _file_path_faults(path: Path, result: Result, tasks: Mapping[str, Task], home: Paths) -> Iterator[str]:
    if path.name != result_file_name(result.label, result.seed):
        yield f"file name: label and seed make it {result_file_name(result.label, result.seed)}"
    folder = _containing_folder_name(path)
    if folder != result.task:  # a copy in a folder that is no task's is as good
        with contextlib.suppress(UserError):
            _find_task(folder, tasks, home)
            yield f"folder: it lies with the results of {folder}, and is of {result.task}"


def _task_definition_faults(result: Result, task: Task) -> Iterator[str]:
    if result.task_hash != task.hash:
        yield f"task_hash: {result.task_hash}, today's definition of {task.name} has {task.hash}"
    pinned = task.dataset.fingerprint
    if pinned and result.fingerprint != pinned:
        yield f"fingerprint: {result.fingerprint[:16]}, task {task.name} is pinned to {pinned[:16]}: other data"
    novel, source = result.novel_fingerprint[:16], task.novel_from or "its own data set"
    if bool(novel) != bool(task.novel_from):
        yield f"novel_fingerprint: {novel!r}, the novel classes of {task.name} are of {source}"


def _episode_digest_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Compare the digest with the pinned one, or with the digest of the episodes drawn again from the data."""
    count = len(result.episodes)
    if count > max_episodes_of_task(task):  # which does not fit, and may be millions to draw
        return
    expected = task.digest if count == task.evaluation.episodes else None
    if expected is None:
        with unverified_on_error("digest"):
            expected = _make_sampler_of_result(result, task, home).digest(count)
    if result.digest != expected:
        yield f"digest: {result.digest[:16]}, the {count:,} episodes of {task.name} have {expected[:16]}"


def _novel_class_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Compare the novel classes of each episode with the episodes drawn again from the data."""
    count = len(result.episodes)
    if find_results_of_other_episodes(task, [result]):
        return
    with unverified_on_error("classes"):
        draws = _make_sampler_of_result(result, task, home).describe_novel_class_draws(count)
        drawn = draws.to_array() if isinstance(draws, ClassDraws) else draws
    if not np.array_equal(result.episodes.read_column("classes"), drawn.reshape(-1)):
        yield f"episodes.classes: others than those of the {count:,} episodes of {task.name}"


def _make_sampler_of_result(
    result: Result, task: Task, home: Paths, side: Side = "test"
) -> EpisodeSampler | SequenceSampler:
    """Return the episodes of a side, drawn from the very data that a result was measured on."""
    from ifsl_bench.data.preparing.metadata import open_data
    from ifsl_bench.utils.progress import Reporter

    _has_partial_data(result, task, home)
    dataset = open_data(task, home, Reporter())
    protocol = protocol_of_task(task)

    def starts(pool: str) -> np.ndarray:
        return dataset.pool(pool).class_starts

    def classes(pool: str) -> Sequence[str]:
        return dataset.pool(pool).class_names

    order = protocol.published_class_order(task, classes)
    return protocol.make_sampler(task, side, result.seed, starts, classes=classes, order=order)


def _has_partial_data(result: Result, task: Task, home: Paths) -> bool:
    """Return whether the data that a result was measured on are partial; exactly these have to be here."""
    from ifsl_bench.data.datasets import is_prepared
    from ifsl_bench.data.pools import open_dataset
    from ifsl_bench.data.preparing.metadata import data_specs_of_task

    partial = False
    for spec, fingerprint in zip(
        data_specs_of_task(task, home), (result.fingerprint, result.novel_fingerprint), strict=False
    ):
        if not is_prepared(home, spec.name):
            raise UnverifiedError(f"data set {spec.name} is not prepared here")
        dataset = open_dataset(home.data / spec.name)
        if dataset.fingerprint != fingerprint:
            raise UnverifiedError(f"data set {spec.name} here has fingerprint {dataset.fingerprint[:16]}")
        partial = partial or dataset.is_partial
    return partial


def _partial_mark_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Check the mark "partial", which is part of the fingerprint, against the pinned or the prepared data."""
    data = task.dataset
    crossed = task.novel_from is not None  # then either may be
    expected = data.partial if data.fingerprint == result.fingerprint and not crossed else None
    if expected is None and not crossed and data.name in registry.registered_entry_points(registry.DATASET_GROUP):
        plugin = registry.load_plugin(registry.DATASET_GROUP, data.name)
        expected = (
            None if plugin.load_problem or plugin.loaded_object.needs_source else False
        )  # what is made here is whole
    if expected is None:
        with unverified_on_error("partial"):
            expected = _has_partial_data(result, task, home)
    if result.partial != expected:
        extent = "a part" if expected else "the whole"
        yield f"partial: {str(result.partial).lower()}, data set {data.name} with this fingerprint is {extent}"


def _calibration_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Check that a calibration is there where the task allows one."""
    if not task.has_base or result.calibration:
        return
    if not (result.tuned or result.training):  # these have had validation episodes
        with unverified_on_error("calibration"):
            _make_sampler_of_result(result, task, home, "val")
    yield f"calibration: missing; task {task.name} has base classes, and validation episodes to find the bias on"


def _field_value_faults(result: Result) -> Iterator[str]:
    """Yield a line for each value that no run writes; of each field of :class:`WrittenResultFields` the first."""
    for field in msgspec.structs.fields(WrittenResultFields):
        try:
            msgspec.convert(getattr(result, field.name), field.type, strict=True)
        except (msgspec.ValidationError, UnicodeError) as error:  # the latter for names with half a character
            expected, _, at = str(error).partition(" - at `")  # "$.place", or "key` in `$.place"
            for pattern, words in PATTERNS_IN_WORDS.items():
                expected = expected.replace(f"`str` matching regex {pattern!r}", words)
            yield f"{field.name}{at.rpartition('$')[2].strip('`')}: {expected}"
    if result.n_trials > MOST_TRIALS:
        yield f"setting: {result.setting!r}, a run tries at most {MOST_TRIALS:,}"
    values = {value for tried in result.tuned.values() for value in tried}
    if strange := [*(set(result.passed_over) - values), *(set(result.edge) - result.chosen_option_names)]:
        yield f"passed_over, edge: {strange[0]!r} is nothing that was tuned"
    if result.rounds and (sum(result.rounds) != sum(map(len, result.tuned.values())) or min(result.rounds) < 1):
        yield f"rounds: {result.rounds}, and {sum(map(len, result.tuned.values()))} settings were tried"
    commit, version, time = (str(result.provenance.get(key, "")) for key in ("commit", "version", "time"))
    if "+changes" in commit:
        yield f"provenance: measured with files changed since commit {commit[:12]}; run it again"
    yield from _version_faults(version)
    yield from _measurement_time_faults(time)


def _version_faults(value: str) -> Iterator[str]:
    """Yield whether a version is newer than this one, which cannot check what that may have measured."""
    numbers, own = (re.match(r"(?:\d{1,9}\.)*\d{1,9}", version) for version in (value, __version__))
    if numbers is None or own is None:
        yield f"provenance.version: {reprlib.repr(value)} is no version"
    elif [int(part) for part in numbers[0].split(".")] > [int(part) for part in own[0].split(".")]:
        yield f"provenance.version: {reprlib.repr(value)} is newer than the one that checks, {__version__}"


def _measurement_time_faults(value: str) -> Iterator[str]:
    try:
        ahead = datetime.datetime.fromisoformat(value) - datetime.datetime.now(datetime.UTC)
    except (ValueError, TypeError):  # the latter for a time of no zone
        yield f"provenance.time: {reprlib.repr(value)} is no time as a run writes it, such as 2026-01-31T12:00:00+00:00"
        return
    if ahead > ALLOWED_CLOCK_LEAD:
        yield f"provenance.time: {value} is in the future"


def _unprintable_text_faults(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each text that no terminal may be sent; names and values alike, at any depth."""
    rest: list[tuple[str, Any]] = [("", raw)]
    while rest:
        where, value = rest.pop()
        if isinstance(value, str) and not is_printable(value):
            yield f"{where}: {reprlib.repr(value)} cannot be printed as it is"
        elif isinstance(value, dict):
            for name in value:
                if not is_printable(name):
                    yield f"{where or 'the file'}: the name {reprlib.repr(name)} cannot be printed as it is"
            rest += [(f"{where}.{name}" if where else name, part) for name, part in value.items()]
        elif isinstance(value, list):
            rest += [(where, part) for part in value if isinstance(part, (str, dict, list))]
