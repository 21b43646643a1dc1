"""Runs jobs: makes their graph, finds workers for it, and says what became of each."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ifsl_bench.data.datasets import is_prepared
from ifsl_bench.data.preparing.metadata import data_of
from ifsl_bench.experiments.executors import Executor, Here, Setting, check_sendable
from ifsl_bench.experiments.graph import Graph, Node, graph_of
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import BEGUN, Event, log_path
from ifsl_bench.experiments.loop import Failure, Hear, Loop
from ifsl_bench.experiments.stored_results import put_aside
from ifsl_bench.experiments.watching import Watch, watching
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import UserError, unknown
from ifsl_bench.utils.files import Paths, check_writable
from ifsl_bench.utils.threads import cores

if TYPE_CHECKING:
    from ifsl_bench.experiments.cluster import ClusterSpec

MOST_NAMED = 3  # jobs that are named where one cause has stopped many


@dataclass(frozen=True)
class Ended:
    """The jobs of a run that have a result, those that failed, and why: a line for each cause."""

    stored: list[Job]
    failed: list[Job]
    causes: list[str]


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
    alone = len(jobs) == 1
    with watching(work.reporter, alone, executor is not None) as watch:
        executor = executor or Here(work, alone)
        try:
            work = executor.ready(work)
            graph = graph_of(jobs, work, rerun, retrain, command)
            if graph.nodes:  # else no result is written
                check_writable(work.home.results)
            _tell_refused(graph, work)
            watch.begin(graph, executor.count)
            failures = Loop(graph, executor, work.home, _setting_aside(watch, work)).run()
        finally:
            executor.close()
    if failures and len(failures) == len(jobs) and len({failure.why for failure in failures}) == 1:
        raise UserError(failures[0].why)
    failed = {failure.job for failure in failures}
    stored = [job for index, job in enumerate(jobs) if index not in failed]
    return Ended(stored, [jobs[index] for index in sorted(failed)], _causes(failures, graph, work))


def _setting_aside(watch: Watch, work: Workspace) -> Hear:
    """Tells the watch of events; before a node begins, what it shall make anew is set aside, once."""
    renewed: set[Path] = set()

    def hear(node: Node, event: Event) -> None:
        if event.kind == BEGUN and node.anew:
            put_aside(node.stage, work, renewed)
        watch.hear(node, event)

    return hear


def _tell_refused(graph: Graph, work: Workspace) -> None:
    """Says which jobs cannot be run, unless that are all, which the end says."""
    reasons: dict[str, list[str]] = {}
    for index, error in graph.refused.items():
        reasons.setdefault(str(error), []).append(str(graph.jobs[index]))
    for reason, names in reasons.items() if len(graph.refused) < len(graph.jobs) else ():
        work.reporter.say(f"{_some(names)} cannot be run: {reason}")


def _causes(failures: Sequence[Failure], graph: Graph, work: Workspace) -> list[str]:
    """Says which jobs have no result, in which stage they failed, and why; what failed for many once."""
    names: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        cause = failure.node.key if failure.node else "", failure.why
        names.setdefault(cause, []).append(str(graph.jobs[failure.job]))
    lines = []
    for (key, why), of_cause in names.items():
        where, log = f", in {graph.nodes[key].stage.kind}" if key else "", log_path(work.home, key)
        lines.append(f"{_some(of_cause)}{where}: {why}" + (f" (log: {log})" if key and log.exists() else ""))
    return lines


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    few = names if len(names) <= MOST_NAMED else [*names[: MOST_NAMED - 1], f"and {len(names) - MOST_NAMED + 1} more"]
    return "; ".join(few)


def workers_for(
    jobs: Sequence[Job],
    work: Workspace,
    device: str,
    count: int | None = None,
    devices: str | None = None,
    cluster: ClusterSpec | None = None,
) -> Executor | None:
    """The workers that are asked for, which start with the first stage; None where this process alone is asked for.

    Args:
        device: what the user said of it.
        count: of processes of this machine; one for each device by default.
        devices: numbers of accelerators, ``0-7`` or ``0,2``.
        cluster: in place of these processes.

    Raises:
        UserError: no such devices, or more of them than workers; a method that other processes cannot load.
    """
    setting = Setting(work.home, device, cores(), uuid.uuid4().hex, work.curves)
    if cluster:
        from ifsl_bench.experiments.dask_workers import DaskWorkers

        check_sendable(jobs)
        return DaskWorkers(cluster, setting, jobs, work.reporter)
    if (count or 1) == 1 and not devices:
        return None
    from ifsl_bench.experiments.local_workers import local_workers

    check_sendable(jobs)
    return local_workers(setting, work.device, count, devices)


def check_data(data: Mapping[str, Path], tasks: Iterable[Task], home: Paths) -> None:
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
        from ifsl_bench.data.preparing.prepare import prepare

        prepare(work.home, name, path.expanduser(), False, work.reporter)
