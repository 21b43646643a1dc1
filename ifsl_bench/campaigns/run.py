"""Runs jobs: makes their graph, finds workers for it, and says what became of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.common.files import Home, check_writable
from ifsl_bench.data.preparing.outline import data_of
from ifsl_bench.data.preparing.prepare import is_prepared, prepare
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.jobs.job import Job
from ifsl_bench.protocol.task import Task
from ifsl_bench.scheduler.executors import Executor, Here, check_sendable
from ifsl_bench.scheduler.graph import Graph, Node, graph_of
from ifsl_bench.scheduler.logs import log_path
from ifsl_bench.scheduler.loop import Failure, Watch, schedule
from ifsl_bench.scheduler.work import Setting
from ifsl_bench.store.stored import put_aside

if TYPE_CHECKING:
    from ifsl_bench.scheduler.local_workers import LocalWorkers

MOST_SAID = 3  # jobs that are named where one cause has stopped many


@dataclass(frozen=True)
class Ended:
    """The jobs of a run that were done, those that failed, and why.

    Attributes:
        made: those whose result is stored, in their order.
        failed: the others.
        said: why, a line for each cause.
    """

    made: list[Job]
    failed: list[Job]
    said: list[str]


def run_campaign(
    jobs: Sequence[Job],
    work: Workspace,
    *,
    rerun: bool = False,
    retrain: bool = False,
    command: str = "",
    executor: Executor | None = None,
) -> Ended:
    """Runs jobs, skipping what is done already; one that fails does not stop the others.

    Args:
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored, which is kept under another name; rerun follows.
        command: what the user typed, recorded with results.
        executor: that runs the stages; this process by default. It is closed at the end.

    Raises:
        UserError: the only job cannot be run, or all of them for one and the same reason; or results cannot be written,
            which is told before anything is computed.
    """
    with _watch(jobs, work, executor) as watch:
        graph = graph_of(jobs, work, rerun, retrain, command)
        if graph.nodes:  # else no result is written
            check_writable(work.home.results)
        _tell_refused(graph, work)
        executor = executor or Here(work)
        try:
            failures = schedule(graph, executor, work.home, watch, _aside(work))
        finally:
            executor.close()
    if len(jobs) == 1 and isinstance(executor, Here) and executor.errors:
        raise next(iter(executor.errors.values()))
    if failures and len(failures) == len(jobs) and len({failure.why for failure in failures}) == 1:
        raise UserError(failures[0].why)
    failed = {failure.job for failure in failures}
    made = [job for index, job in enumerate(graph.jobs) if index not in failed]
    return Ended(made, [graph.jobs[index] for index in sorted(failed)], _lines(failures, graph, work))


def _watch(jobs: Sequence[Job], work: Workspace, executor: Executor | None) -> AbstractContextManager[Watch]:
    if executor is None:
        return nullcontext(Watch(work.reporter, alone=len(jobs) == 1))
    from ifsl_bench.campaigns.watching import watching

    return watching(work.reporter, executor.count)


def _tell_refused(graph: Graph, work: Workspace) -> None:
    """Says which jobs cannot be run, unless that are all, which the end says."""
    reasons: dict[str, list[str]] = {}
    for index, error in graph.refused.items():
        reasons.setdefault(str(error), []).append(str(graph.jobs[index]))
    for reason, names in reasons.items() if len(graph.refused) < len(graph.jobs) else ():
        work.reporter.say(f"{_some(names)} cannot be run: {reason}")


def _aside(work: Workspace) -> Callable[[Node], None]:
    """Returns a function that sets aside, before a node begins, what the node shall make anew."""
    renewed: set[Path] = set()
    return lambda node: put_aside(node.stage, work, renewed) if node.anew else None


def workers_for(
    jobs: Sequence[Job], work: Workspace, device: str, count: int | None, devices: str | None
) -> LocalWorkers | None:
    """Worker processes of this machine; None where this process alone is asked for.

    Args:
        device: what the user said of it.
        count: of processes; one for each device by default.
        devices: numbers of accelerators, ``0-7`` or ``0,2``.

    Raises:
        UserError: no such devices, or more of them than workers; a method that other processes cannot load.
    """
    numbers = numbers_in(devices) if devices else None
    if numbers and device not in ("auto", "cuda"):
        raise UserError(f"--devices says which accelerators there are, and --device {device} which one to use: "
                        f"leave one of them out")  # fmt: skip
    if numbers and count and count < len(numbers):
        raise UserError(f"--jobs {count} leaves some of --devices {devices} without a worker: leave --jobs out, for "
                        "one worker each, or name fewer devices")  # fmt: skip
    if (count or 1) == 1 and not numbers:
        return None
    from ifsl_bench.scheduler.local_workers import LocalWorkers

    check_sendable(jobs)
    if numbers is None and work.device.type == "cuda" and work.device.index is None and count:
        numbers = list(range(min(count, torch.cuda.device_count())))
    return LocalWorkers(Setting.of(work, device), count or len(numbers or ()), numbers)


def numbers_in(listed: str) -> list[int]:
    """``0-2,5`` as [0, 1, 2, 5]; raises :class:`UserError` for what is no such list."""
    numbers: list[int] = []
    for part in listed.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        last = last if dash else first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or len(first + last) > 8:
            raise UserError(f"--devices takes numbers, as in 0-7 or 0,2, not {listed!r}")
        numbers += range(int(first), int(last) + 1)
    if not numbers or len(set(numbers)) != len(numbers):
        raise UserError(f"--devices takes numbers, each once, as in 0-7 or 0,2, not {listed!r}")
    return numbers


def _lines(failures: Sequence[Failure], graph: Graph, work: Workspace) -> list[str]:
    """Which jobs have no result, in which stage they failed, and why; what failed for many is said once."""
    causes: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        causes.setdefault((failure.node.key if failure.node else "", failure.why), []).append(failure)
    return [_line(same, graph, work) for same in causes.values()]


def _line(same: Sequence[Failure], graph: Graph, work: Workspace) -> str:
    node, why = same[0].node, same[0].why
    shown = _some([str(graph.jobs[failure.job]) for failure in same])
    if node is None:
        return f"{shown}: {why}"
    log = log_path(work.home, node.key)
    return f"{shown}, in {node.stage.kind}: {why}" + (f" (log: {log})" if log.exists() else "")


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    if len(names) <= MOST_SAID:
        return "; ".join(names)
    return "; ".join(names[: MOST_SAID - 1]) + f"; and {len(names) - MOST_SAID + 1} more"


def check_data(data: Mapping[str, Path], tasks: Iterable[Task], home: Home) -> None:
    """Raises :class:`UserError` for a data set that no task has, and for a path that is needed and not there."""
    used = {spec.name for task in tasks for spec in data_of(task, home)}
    for name, path in data.items():
        if name not in used:
            raise unknown("data set", name, used, where="of these tasks")
        if not os.path.exists(path.expanduser()) and not is_prepared(home, name):
            raise UserError(f"data set {name}: there is no {path}")


def prepare_from(data: Mapping[str, Path], work: Workspace) -> None:
    """Makes the data sets that are not prepared yet, each from its path.

    Raises:
        UserError: unusable files, or a data set that was made from other files.
    """
    for name, path in data.items():
        if is_prepared(work.home, name) and not os.path.exists(path.expanduser()):
            continue  # somebody needed the space
        prepare(work.home, name, path.expanduser(), False, work.reporter)
