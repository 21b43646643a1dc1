"""The state of a campaign, from its results and the logs of its stages. Asks no worker, and changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ifsl_bench.data.preparing.metadata import cached_fingerprints
from ifsl_bench.experiments.graph import Node, graph_of
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import BEGUN, DONE, FAILED, INTERRUPTED, Event, Tail, log_path
from ifsl_bench.experiments.stored_results import kept_of
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils.errors import one_line
from ifsl_bench.utils.locks import is_alive
from ifsl_bench.utils.progress import NullReporter
from ifsl_bench.utils.text_format import seeds_in_words

RUNNING, OUTDATED, MISSING = "running", "out of date", "missing"
ORDER = (RUNNING, FAILED, OUTDATED, MISSING, DONE)  # of the rows
SILENT = 120.0  # seconds without a line, after which what runs on another machine may have been killed


@dataclass(frozen=True)
class LogState:
    """The last run of a stage, as its log tells it."""

    state: str  # "running", "failed", "done", or "interrupted", if by a signal that nobody wrote down
    begun: Event  # its first event
    last: str  # the last event, in words
    silent: float  # seconds since that


@dataclass(frozen=True)
class JobState:
    """A job, and what there is of it."""

    job: Job
    state: str  # one of ORDER
    why: str = ""  # it failed (the last line of the log), is out of date, or cannot be run
    stage: str = ""  # that runs or failed
    log: LogState | None = None  # of that stage, and its file
    file: Path | None = None


def status_of(jobs: Sequence[Job], work: Workspace) -> list[JobState]:
    """The state of each job; a stage that several jobs wait for is told of each."""
    with cached_fingerprints():
        graph = graph_of(jobs, replace(work, reporter=NullReporter()), lacking=True)
        states = {index: JobState(jobs[index], DONE) for index in graph.stored}
        states |= {index: JobState(jobs[index], MISSING, str(error)) for index, error in graph.refused.items()}
        logs: dict[int, list[tuple[Node, LogState]]] = {}
        for key, node in graph.nodes.items():
            if (log := read_log(log_path(work.home, key))) is not None:
                for index in node.results:
                    logs.setdefault(index, []).append((node, log))
        return [states.get(index) or _state(job, logs.get(index, ()), work) for index, job in enumerate(jobs)]


def _state(job: Job, logs: Sequence[tuple[Node, LogState]], work: Workspace) -> JobState:
    for state in (RUNNING, FAILED):  # a stage that failed and runs again is running
        for node, log in reversed(logs):
            if log.state == state:
                why = log.last if state == FAILED else ""
                return JobState(job, state, why, str(node), log, log_path(work.home, node.key))
    if outdated := kept_of(job, work.home).outdated:
        return JobState(job, OUTDATED, outdated)
    if logs and logs[-1][1].state == INTERRUPTED:
        node, log = logs[-1]
        why = f"interrupted: {log.last.removeprefix('interrupted: ')}"
        return JobState(job, MISSING, why, str(node), None, log_path(work.home, node.key))
    return JobState(job, MISSING)


def read_log(path: Path) -> LogState | None:
    """Reads the last run from a log; None where there is no log, or no beginning in it."""
    try:
        facts = path.stat()
    except OSError:
        return None
    events = Tail(path, 0).events()
    begun = next((event for event in reversed(events) if event.kind == BEGUN), None)
    if begun is None:
        return None
    last = events[-1]
    state = last.kind if last.kind in (DONE, FAILED, INTERRUPTED) else RUNNING
    if state == RUNNING and is_alive(begun.writer) is False:
        state = INTERRUPTED
    silent = max(0.0, time.time() - facts.st_mtime)
    return LogState(state, begun, one_line(str(last)) if last is not begun else "", silent)


def rows_of(states: Sequence[JobState]) -> list[dict[str, str]]:
    """Makes a row of jobs that differ in seed alone, or wait for one stage."""
    families: dict[tuple[str, str, str], list[JobState]] = {}
    for job_state in states:
        of_stage = job_state.state in (RUNNING, FAILED)
        what = job_state.stage if of_stage else f"{job_state.job.label} on {job_state.job.task.name}"
        families.setdefault((job_state.state, what, job_state.why), []).append(job_state)
    rows = []
    for (state, what, why), members in sorted(families.items(), key=lambda family: ORDER.index(family[0][0])):
        first, seeds = members[0], sorted({member.job.seed for member in members})
        if state not in (RUNNING, FAILED):
            what += f", {seeds_in_words(seeds)}"
        row = {"state": state, "what": what, "jobs": str(len(members)), "where": "", "since": "", "how far": why}
        if state == RUNNING and (log := first.log):
            quiet = f" (no word for {log.silent / 60:.0f} min: it may have been killed)" if log.silent > SILENT else ""
            since = f"{log.begun.time:%Y-%m-%d %H:%M:%S} UTC"
            row |= {"where": log.begun.host, "since": since, "how far": log.last + quiet}
        elif first.file is not None:
            row["how far"] = f"{why} (log: {first.file})"
        rows.append(row)
    return rows


def summary_of(states: Sequence[JobState]) -> str:
    """Counts the states in a line: "3 of 18 jobs done, 2 running, 13 missing"."""
    counts = Counter(job_state.state for job_state in states)
    more = [f"{counts[state]:,} {state}" for state in ORDER if counts[state] and state != DONE]
    return ", ".join([f"{counts[DONE]:,} of {len(states):,} jobs done", *more])


def document(states: Sequence[JobState]) -> dict[str, Any]:
    """Lists the states for programs, as JSON takes them."""
    return {
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "summary": summary_of(states),
        "jobs": [
            {
                "method": job_state.job.name,
                "label": job_state.job.label,
                "task": job_state.job.task.name,
                "seed": job_state.job.seed,
                "state": job_state.state,
                "why": job_state.why or None,
                "stage": job_state.stage or None,
                "where": log.begun.host if log else None,
                "since": f"{log.begun.time:%Y-%m-%dT%H:%M:%SZ}" if log else None,
                "last": log.last if log else None,
                "silent_seconds": round(log.silent, 1) if log else None,
                "log": str(job_state.file) if job_state.file else None,
            }
            for job_state in states
            for log in [job_state.log]
        ],
    }
