"""The plan and the status of jobs: what is missing, what runs, and what stored rows took. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.backbones.pretrained import is_package_used
from ifsl_bench.data.datasets import is_generated, is_prepared, not_prepared_message
from ifsl_bench.data.preparing.metadata import DatasetMetadata, cache_fingerprints, data_specs_of_task
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import DONE, FAILED, INTERRUPTED, RUNNING, LogState, log_path, read_log
from ifsl_bench.experiments.runner import (
    check_job_is_runnable,
    divide_into_work_items,
    list_stages,
    make_training_stage,
)
from ifsl_bench.experiments.search import candidates_by_round
from ifsl_bench.experiments.stages import PretrainStage, Stage
from ifsl_bench.experiments.stored_results import find_cached_result
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.adapting import Adapting
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import result_file_name
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import format_seeds

STORED, TO_DO, OUTDATED, LACKS_DATA, REFUSED = "stored", "to do", "out of date", "data missing", "cannot be run"
STATE_ORDER = (RUNNING, FAILED, OUTDATED, LACKS_DATA, REFUSED, TO_DO, STORED)  # of the rows of a status
COST_OF_STAGE = {"pretraining": "pretraining", "meta-training": "training", "evaluation": "evaluation"}  # place -> cost


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Attributes:
        state: one of ORDER; "data missing" where they have to be obtained first.
        reason_for_state: the reason for its state, or the last line of a log; "" where there is none.
        missing_stages: in a plan, the stages that are not cached.
        log_of_item: in a status, of the item that runs, failed or was interrupted.
    """

    job: Job
    state: str
    reason_for_state: str = ""
    missing_stages: Sequence[Stage] = ()
    log_of_item: LogState | None = None


def _job_states(jobs: Iterable[Job], home: Paths, anyway: bool, lacking: bool) -> list[JobState]:
    """Return the states of jobs from results and data alone; ``anyway`` as if no result were stored."""
    metadata: dict[str, DatasetMetadata] = {}
    states = []
    for job in jobs:
        cached = find_cached_result(job, home)
        state = JobState(job, TO_DO)
        if cached.stored_result is not None and not anyway:
            state = JobState(job, STORED)
        else:
            try:
                check_job_is_runnable(job, home, metadata, lacking)
                if cached.outdated_reason and not anyway:
                    state = JobState(job, OUTDATED, f"out of date: {cached.outdated_reason}")
            except UserError as error:
                state = JobState(job, REFUSED, str(error))
        states.append(state)
    return states


def plan_jobs(
    jobs: Sequence[Job],
    work: Workspace,
    rerun: bool = False,
    retrain: bool = False,
    lacking: bool = False,
    data: Mapping[str, Path] | None = None,
) -> list[JobState]:
    """Plan a run.

    Args:
        jobs: each once.
        work: folders and device.
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored.
        lacking: whether jobs may lack data that have to be obtained first; else these cannot be run.
        data: data set -> the path that the run makes it from first.

    Raises:
        UserError: no job can be run, all for one reason.
    """
    home, paths = work.home, data or {}
    cached: dict[tuple[str, str], bool] = {}
    with cache_fingerprints():
        plans = _job_states(jobs, home, rerun or retrain, lacking)
        for index, plan in enumerate(plans):
            if plan.state in (STORED, REFUSED):
                continue
            missing = []
            for stage in list_stages(plan.job):
                key = stage.stage_name, stage.key(home)
                if key not in cached:
                    packaged = isinstance(stage, PretrainStage) and is_package_used(home, stage.key(home))
                    cached[key] = packaged or stage.is_cached(home)
                if not cached[key] or (retrain and stage == make_training_stage(plan.job)):
                    missing.append(stage)
            state, why = plan.state, plan.reason_for_state
            for spec in data_specs_of_task(plan.job.task, home):
                if spec.name in paths and not is_prepared(home, spec.name):
                    why = f"data set {spec.name}: made from {paths[spec.name]} first"
                elif not is_prepared(home, spec.name) and not is_generated(spec.name):
                    state, why = LACKS_DATA, not_prepared_message(home, spec)
            plans[index] = JobState(plan.job, state, why, missing)
    if plans and len({(plan.state, plan.reason_for_state) for plan in plans}) == 1 and plans[0].state == REFUSED:
        raise UserError(plans[0].reason_for_state)
    return plans


def job_states(jobs: Sequence[Job], work: Workspace) -> list[JobState]:
    """Return the states of jobs, also from the logs of a run; an item that several jobs wait for counts for each.

    Args:
        jobs: each once.
        work: folders.
    """
    with cache_fingerprints():
        states = _job_states(jobs, work.home, anyway=False, lacking=True)
        todo = {index: state.job for index, state in enumerate(states) if state.state not in (STORED, REFUSED)}
        for item in chain(*divide_into_work_items(todo, work)):
            if (log := read_log(log_path(work.home, item.log_key))) is None or log.state_name == DONE:
                continue
            for index in item.job_indices:
                state = states[index]
                if log.state_name == INTERRUPTED and state.state == TO_DO:
                    states[index] = replace(state, reason_for_state=log.last_line, log_of_item=log)
                elif log.state_name != INTERRUPTED and state.state != RUNNING:
                    states[index] = replace(
                        state, state=log.state_name, reason_for_state=log.last_line, log_of_item=log
                    )
    return states


class _StoredCost(msgspec.Struct):
    """The part of a stored result about its cost."""

    cost: dict[str, float]
    provenance: dict[str, Any]
    device_by_stage: dict[str, str] = msgspec.field(name="places", default_factory=dict)


def _stored_seconds(job: Job, home: Paths) -> dict[str, tuple[float, str]]:
    """Return part -> seconds and device for the stored row, the user's own or the package's; empty without one."""
    packaged = packaged_results_folder() / job.task.name / result_file_name(job.label, 0)
    for path in (job.result_path(home), packaged):
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_StoredCost)
        except (OSError, ValueError, ModuleNotFoundError):
            continue
        processor = str(stored.provenance.get("device", ""))
        took = {}
        for place, part in COST_OF_STAGE.items():
            device = stored.device_by_stage.get(place, processor)
            device = processor if device.startswith("cpu") else device
            if seconds := stored.cost.get(f"{part}_seconds"):
                took[place] = seconds, device
        return took
    return {}


def plan_rows(plans: Sequence[JobState], home: Paths) -> list[dict[str, str]]:
    """Make a row of jobs that differ in their seed alone.

    Args:
        plans: of jobs.
        home: where results are.
    """
    families: dict[Hashable, list[JobState]] = {}
    for plan in plans:
        families.setdefault(
            (_format_row_name(plan), plan.state, plan.reason_for_state, _missing_kinds(plan)), []
        ).append(plan)
    rows = []
    for members in families.values():
        plan, seeds = members[0], {member.job.seed for member in members}
        took = _stored_seconds(plan.job, home)
        rows.append(
            {
                "job": f"{_format_row_name(plan)}, {format_seeds(seeds)}",
                "state": plan.state,
                "missing": ", ".join(_missing_kinds(plan)),
                "stored row took": ", ".join(f"{part} {seconds:.1f} s" for part, (seconds, _) in took.items()),
                "on": "; ".join(dict.fromkeys(device for _, device in took.values())),
            }
        )
    return rows


def status_rows(states: Sequence[JobState]) -> list[dict[str, str]]:
    """Make a row of jobs that differ in their seed alone; the running ones first, the stored ones last."""
    families: dict[Hashable, list[JobState]] = {}
    for state in sorted(states, key=lambda state: STATE_ORDER.index(state.state)):
        families.setdefault((_format_row_name(state), state.state, state.reason_for_state), []).append(state)
    rows = []
    for members in families.values():
        state, seeds, log = members[0], {member.job.seed for member in members}, members[0].log_of_item
        running = log if state.state == RUNNING else None
        rows.append(
            {
                "job": f"{_format_row_name(state)}, {format_seeds(seeds)}",
                "state": state.state,
                "where": running.host_name if running else "",
                "since": running.start_time if running else "",
                "how far": f"{state.reason_for_state} (log: {log.log_path})"
                if log and not running
                else state.reason_for_state,
            }
        )
    return rows


def _format_row_name(state: JobState) -> str:
    return f"{state.job.label} on {state.job.task.name}"


def _missing_kinds(plan: JobState) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stage.stage_name for stage in plan.missing_stages))


def _count_missing_stages(plans: Sequence[JobState], home: Paths) -> Counter[str]:
    """Count the missing stages by kind, a shared one once, in the order of a run."""
    stages = dict.fromkeys((stage.stage_name, stage.key(home)) for plan in plans for stage in plan.missing_stages)
    return Counter(kind for kind, _ in stages)


def format_summary(states: Sequence[JobState]) -> str:
    """Count the states in a line: "18 jobs: 3 stored, 2 running, 13 to do"."""
    counts = Counter(state.state for state in states)
    listed = [f"{counts[state]:,} {state}" for state in (STORED, *STATE_ORDER[:-1]) if counts[state] or state == STORED]
    return f"{len(states):,} job{'s' * (len(states) != 1)}: {', '.join(listed)}"


def plan_notes(plans: Sequence[JobState], home: Paths) -> list[str]:
    """Write the totals below :func:`plan_rows`.

    Args:
        plans: of jobs.
        home: where artefacts are.
    """
    notes = [format_summary(plans)]
    reasons: dict[str, list[JobState]] = {}
    for plan in plans:
        if plan.reason_for_state:
            reasons.setdefault(plan.reason_for_state, []).append(plan)
    for why, (first, *others) in reasons.items():
        more = f" and {len(others):,} more" if others else ""
        notes.append(why if why.startswith("data set ") else f"{first.job}{more}: {why}")
    changing = [
        plan.job for plan in plans if issubclass(plan.job.method, Adapting) and plan.state not in (STORED, REFUSED)
    ]
    notes += dict.fromkeys(f"{job.label} on {job.task.name}: {_describe_sessions_to_learn(job)}" for job in changing)
    if missing := _count_missing_stages(plans, home):
        counted = ", ".join(f"{count:,} {kind}" for kind, count in missing.items())
        notes.append(f"missing stages, a shared one counted once: {counted}")
    return notes


def _describe_sessions_to_learn(job: Job) -> str:
    """Count the sessions that a method which sees images learns, one at a time: what its run mostly takes."""
    task, settings = job.task, len(candidates_by_round(job)[0]) if job.searched_names else 0
    validation = len(task.evaluation.validation_halves[0])
    calibrations = 1 if protocol_of_task(task).has_calibration(task, job.method) else 0
    sessions = task.sessions.count if task.sessions else 1
    count = job.n_episodes + validation * (settings + calibrations)
    tried = f", {settings} settings tried on these" if settings else ""
    return (
        f"learns {count * sessions:,} sessions one at a time, of {job.n_episodes:,} test and {validation:,} validation "
        f"{protocol_of_task(task).drawn_items_noun}{tried}"
    )


def to_json_document(states: Sequence[JobState], home: Paths) -> dict[str, Any]:
    """List the jobs of a plan or a status for programs, as JSON takes them.

    Args:
        states: of jobs.
        home: where artefacts are.
    """
    jobs = []
    for state in states:
        log = state.log_of_item
        running = log if state.state == RUNNING else None
        jobs.append(
            {
                "method": state.job.method_name,
                "label": state.job.label,
                "task": state.job.task.name,
                "seed": state.job.seed,
                "state": state.state,
                "why": state.reason_for_state or None,
                "missing": [
                    {"kind": stage.stage_name, "stage": str(stage), "key": stage.key(home)}
                    for stage in state.missing_stages
                ],
                "took": {
                    part: {"seconds": time, "on": on} for part, (time, on) in _stored_seconds(state.job, home).items()
                },
                "where": running.host_name if running else None,
                "since": running.start_time if running else None,
                "log": str(log.log_path) if log else None,
            }
        )
    time = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {
        "time": time,
        "summary": format_summary(states),
        "jobs": jobs,
        "missing": dict(_count_missing_stages(states, home)),
    }
