"""The plan of a run: what is missing for each job, and what its stored row took. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.backbones.pretrained import is_offered
from ifsl_bench.data.datasets import is_made_here, is_prepared, not_prepared
from ifsl_bench.data.preparing.metadata import DatasetMetadata, cached_fingerprints, data_of
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.runner import check_job, stages_of, training_stage
from ifsl_bench.experiments.stages import Pretrain, Stage
from ifsl_bench.experiments.stored_results import find_cached
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.store.result_folder import packaged_root
from ifsl_bench.store.schema import file_name
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import seeds_in_words

STORED, TO_DO, OUTDATED, LACKS_DATA, REFUSED = "stored", "to do", "out of date", "data missing", "cannot be run"
LONG = 50  # rows, from which the tasks of a plan share rows
PARTS = {"pretraining": "pretraining", "meta-training": "training", "evaluation": "evaluation"}  # place -> cost


@dataclass(frozen=True)
class JobPlan:
    """A job, and what a run would do for it.

    Attributes:
        state: "stored", "to do", "out of date", "data missing" (which have to be obtained first) or "cannot be run".
        why: it is out of date, lacks data, or cannot be run.
        missing: the stages that are not cached.
        took: part -> the seconds that it took for the stored row, and the device.
    """

    job: Job
    state: str
    why: str = ""
    missing: Sequence[Stage] = ()
    took: Mapping[str, tuple[float, str]] = field(default_factory=dict)


class _Stored(msgspec.Struct):
    """The part of a stored result about its cost."""

    cost: dict[str, float]
    provenance: dict[str, Any]
    pretraining: dict[str, Any]
    training: dict[str, Any]
    places: dict[str, str] = {}


def plan_of(
    jobs: Sequence[Job],
    work: Workspace,
    rerun: bool = False,
    retrain: bool = False,
    lacking: bool = False,
    data: Mapping[str, Path] | None = None,
) -> list[JobPlan]:
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
    outlines: dict[str, DatasetMetadata] = {}
    cached: dict[tuple[str, str], bool] = {}
    with cached_fingerprints():
        plans = [_plan(job, work.home, rerun, retrain, lacking, data or {}, outlines, cached) for job in jobs]
    if plans and len({(plan.state, plan.why) for plan in plans}) == 1 and plans[0].state == REFUSED:
        raise UserError(plans[0].why)
    return plans


def _plan(
    job: Job, home: Paths, rerun: bool, retrain: bool, lacking: bool, data: Mapping[str, Path],
    outlines: dict[str, DatasetMetadata], cached: dict[tuple[str, str], bool],
) -> JobPlan:  # fmt: skip
    kept = find_cached(job, home)
    if kept.result is not None and not (rerun or retrain):
        return JobPlan(job, STORED)
    try:
        check_job(job, home, outlines, lacking)
    except UserError as error:
        return JobPlan(job, REFUSED, str(error))
    missing = []
    for stage in stages_of(job):
        key = stage.kind, stage.key(home)
        cached[key] = cached[key] if key in cached else stage.cached(home)
        offered = isinstance(stage, Pretrain) and is_offered(home, stage.key(home))  # with the package
        if not (cached[key] or offered) or (retrain and stage == training_stage(job)):
            missing.append(stage)
    state, why = (OUTDATED, f"out of date: {kept.outdated}") if kept.outdated and not rerun else (TO_DO, "")
    for spec in data_of(job.task, home):
        if spec.name in data and not is_prepared(home, spec.name):
            why = f"data set {spec.name}: made from {data[spec.name]} first"
        elif not is_prepared(home, spec.name) and not is_made_here(spec.name):
            state, why = LACKS_DATA, not_prepared(home, spec)
    return JobPlan(job, state, why, missing, _took(job, home))


def _took(job: Job, home: Paths) -> dict[str, tuple[float, str]]:
    """The cost of the stored row, the user's own or the package's; empty where there is none."""
    packaged = packaged_root() / job.task.name / file_name(job.label, 0)
    for path in (job.result_path(home), packaged):
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        except (OSError, ValueError, ModuleNotFoundError):
            continue
        processor = str(stored.provenance.get("device", ""))
        took = {}
        for place, part in PARTS.items():
            device = stored.places.get(place, processor)
            device = processor if device.startswith("cpu") else str(device)
            if seconds := stored.cost.get(f"{part}_seconds"):
                took[place] = seconds, device
        return took
    return {}


def rows_of(plans: Sequence[JobPlan], full: bool = True) -> list[dict[str, str]]:
    """Make a row of jobs that differ in their seed alone.

    Args:
        plans: of jobs.
        full: whether tasks have rows of their own in a long plan, too.
    """
    groups = _grouped(plans, False)
    if not full and len(groups) > LONG:
        groups = _grouped(plans, True)
    rows = []
    for members in groups:
        first = members[0]
        tasks = list(dict.fromkeys(plan.job.task.name for plan in members))
        where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
        row = f"{first.job.label} on {where}, {seeds_in_words({plan.job.seed for plan in members})}"
        spent = {} if len(tasks) > 1 else first.took
        devices = list(dict.fromkeys(device for _, device in spent.values()))
        rows.append(
            {
                "job": row,
                "state": first.state,
                "missing": ", ".join(dict.fromkeys(stage.kind for stage in first.missing)),
                "stored row took": ", ".join(f"{part} {seconds:.1f} s" for part, (seconds, _) in spent.items()),
                "on": "; ".join(devices),
            }
        )
    return rows


def _grouped(plans: Sequence[JobPlan], over_tasks: bool) -> list[list[JobPlan]]:
    groups: dict[tuple[str, ...], list[JobPlan]] = {}
    for plan in plans:
        missing = ",".join(dict.fromkeys(stage.kind for stage in plan.missing))
        task = "" if over_tasks else plan.job.task.name
        groups.setdefault((plan.job.label, task, plan.state, plan.why, missing), []).append(plan)
    return list(groups.values())


def _distinct(plans: Sequence[JobPlan], home: Paths) -> dict[str, int]:
    """Kind of stage -> how many of it are missing, those that jobs share once."""
    stages = {(stage.kind, stage.key(home)) for plan in plans for stage in plan.missing}
    counts = Counter(kind for kind, _ in stages)
    order = list(dict.fromkeys(stage.kind for plan in plans for stage in plan.missing))
    return {kind: counts[kind] for kind in order}


def notes_of(plans: Sequence[JobPlan], home: Paths, full: bool = True) -> list[str]:
    """Write the totals below :func:`rows_of`.

    Args:
        plans: of jobs.
        home: where artefacts are.
        full: as of the rows.
    """
    states = Counter(plan.state for plan in plans)
    refused, todo = states[REFUSED], len(plans) - states[STORED] - states[REFUSED]
    notes = (
        ["Tasks share lines here; --full has a line for each."]
        if not full and len(_grouped(plans, False)) > LONG
        else []
    )
    notes.append(f"{len(plans):,} job{'s' * (len(plans) != 1)}: {states[STORED]:,} stored, {todo:,} to do"
                 + (f", {refused:,} that cannot be run" if refused else ""))  # fmt: skip
    reasons: dict[str, list[JobPlan]] = {}
    for plan in plans:
        if plan.why:
            reasons.setdefault(plan.why, []).append(plan)
    for why, (first, *others) in reasons.items():
        more = f" and {len(others):,} more" if others else ""
        notes.append(why if why.startswith("data set ") else f"{first.job}{more}: {why}")
    if missing := _distinct(plans, home):
        counted = ", ".join(f"{count:,} {kind}" for kind, count in missing.items())
        notes.append(f"stages that are missing, those that jobs share once: {counted}")
    return notes


def document(plans: Sequence[JobPlan], home: Paths) -> dict[str, Any]:
    """List the jobs for programs, as JSON takes them.

    Args:
        plans: of jobs.
        home: where artefacts are.
    """
    return {
        "jobs": [
            {
                "method": plan.job.name,
                "label": plan.job.label,
                "task": plan.job.task.name,
                "seed": plan.job.seed,
                "state": plan.state,
                "why": plan.why or None,
                "missing": [
                    {"kind": stage.kind, "stage": str(stage), "key": stage.key(home)} for stage in plan.missing
                ],
                "took": {part: {"seconds": seconds, "on": on} for part, (seconds, on) in plan.took.items()},
            }
            for plan in plans
        ],
        "missing": _distinct(plans, home),
    }
