"""The state of jobs, from their results and the logs of a run. Changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ifsl_bench.data.preparing.metadata import DatasetMetadata, cached_fingerprints
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import BEGUN, DONE, FAILED, INTERRUPTED, Event, log_path, read_events
from ifsl_bench.experiments.runner import check_job, work_items
from ifsl_bench.experiments.stored_results import find_cached
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils.errors import UserError, one_line
from ifsl_bench.utils.locks import is_alive
from ifsl_bench.utils.text_format import seeds_in_words

RUNNING, OUTDATED, MISSING = "running", "out of date", "missing"
ORDER = (RUNNING, FAILED, OUTDATED, MISSING, DONE)  # of the rows
SILENT = 120.0  # seconds without a line, after which what runs on another machine may have been killed


@dataclass(frozen=True)
class LogState:
    """The last run of a work item, read from its log.

    Attributes:
        state: "running", "failed", "done" or "interrupted", also by a signal that left no line.
        begun: its first event.
        last: its last event, in words.
        silent: seconds since that.
        file: the log.
    """

    state: str
    begun: Event
    last: str
    silent: float
    file: Path


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Attributes:
        state: one of ORDER.
        why: it failed (the last line of the log), is out of date, or cannot be run.
        log: of the item that runs or failed.
    """

    job: Job
    state: str
    why: str = ""
    log: LogState | None = None


def status_of(jobs: Sequence[Job], work: Workspace) -> list[JobState]:
    """Return the state of each job; an item that several jobs wait for is part of each of them.

    Args:
        jobs: each once.
        work: folders.
    """
    states: dict[int, JobState] = {}
    todo: dict[int, Job] = {}
    outlines: dict[str, DatasetMetadata] = {}
    with cached_fingerprints():
        for index, job in enumerate(jobs):
            kept = find_cached(job, work.home)
            try:
                if kept.result is None:
                    check_job(job, work.home, outlines, lacking=True)
                    todo[index] = job
                state = DONE if kept.result else OUTDATED if kept.outdated else MISSING
                states[index] = JobState(job, state, kept.outdated)
            except UserError as error:
                states[index] = JobState(job, MISSING, str(error))
        for phase in work_items(todo, work):
            for item in phase:
                if (log := read_log(log_path(work.home, item.key))) is None or log.state == DONE:
                    continue
                for index in item.jobs:
                    if log.state in (RUNNING, FAILED) and states[index].state != RUNNING:
                        why = log.last if log.state == FAILED else ""
                        states[index] = JobState(jobs[index], log.state, why, log)
                    elif log.state == INTERRUPTED and states[index].state == MISSING:
                        why = f"interrupted: {log.last.removeprefix('interrupted: ')}"
                        states[index] = replace(states[index], why=why, log=log)
    return [states[index] for index in range(len(jobs))]


def read_log(path: Path) -> LogState | None:
    """Read the last run from a log; None where there is no log, or no beginning in it."""
    events = read_events(path)
    begun = next((event for event in reversed(events) if event.kind == BEGUN), None)
    if begun is None:
        return None
    last = events[-1]
    state = last.kind if last.kind in (DONE, FAILED, INTERRUPTED) else RUNNING
    if state == RUNNING and is_alive(begun.writer) is False:
        state = INTERRUPTED
    silent = max(0.0, time.time() - path.stat().st_mtime)
    return LogState(state, begun, one_line(str(last)) if last is not begun else "", silent, path)


def rows_of(states: Sequence[JobState]) -> list[dict[str, str]]:
    """Make a row of jobs that differ in their seed alone, or wait for one item."""
    families: dict[tuple[str, str, str], list[JobState]] = {}
    for member in states:
        of_item = member.log if member.state in (RUNNING, FAILED) else None
        what = of_item.begun.text if of_item else f"{member.job.label} on {member.job.task.name}"
        families.setdefault((member.state, what, member.why), []).append(member)
    rows = []
    for (state, what, why), members in sorted(families.items(), key=lambda family: ORDER.index(family[0][0])):
        log, seeds = members[0].log, sorted({member.job.seed for member in members})
        if state not in (RUNNING, FAILED):
            what += f", {seeds_in_words(seeds)}"
        row = {"state": state, "what": what, "jobs": str(len(members)), "where": "", "since": "", "how far": why}
        if state == RUNNING and log:
            quiet = f" (no word for {log.silent / 60:.0f} min: it may have been killed)" if log.silent > SILENT else ""
            since = f"{log.begun.time:%Y-%m-%d %H:%M:%S} UTC"
            row |= {"where": log.begun.host, "since": since, "how far": log.last + quiet}
        elif log:
            row["how far"] = f"{why} (log: {log.file})"
        rows.append(row)
    return rows


def summary_of(states: Sequence[JobState]) -> str:
    """Count the states in a line: "3 of 18 jobs done, 2 running, 13 missing"."""
    counts = Counter(job_state.state for job_state in states)
    more = [f"{counts[state]:,} {state}" for state in ORDER if counts[state] and state != DONE]
    return ", ".join([f"{counts[DONE]:,} of {len(states):,} jobs done", *more])


def document(states: Sequence[JobState]) -> dict[str, Any]:
    """List the states for programs, as JSON takes them."""
    jobs = []
    for state in states:
        log = state.log
        running = log if state.state == RUNNING else None
        jobs.append(
            {
                "method": state.job.name,
                "label": state.job.label,
                "task": state.job.task.name,
                "seed": state.job.seed,
                "state": state.state,
                "why": state.why or None,
                "stage": log.begun.text if log else None,
                "where": running.begun.host if running else None,
                "since": f"{running.begun.time:%Y-%m-%dT%H:%M:%SZ}" if running else None,
                "last": running.last if running else None,
                "silent_seconds": round(running.silent, 1) if running else None,
                "log": str(log.file) if log else None,
            }
        )
    return {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "summary": summary_of(states), "jobs": jobs}
