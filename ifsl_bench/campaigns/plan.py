"""The plan of a campaign: its graph, what is done, what is out of date, and about how long it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.networks import features_of
from ifsl_bench.common.processor import cores
from ifsl_bench.common.progress import Mute
from ifsl_bench.common.wording import numbers_in_words
from ifsl_bench.data.preparing.outline import Outline, data_of, outline_of, remembered
from ifsl_bench.data.preparing.prepare import not_prepared, rough_seconds
from ifsl_bench.data.preparing.prepare import prepared as prepared_data
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.jobs.evaluating import Evaluate, stages_of
from ifsl_bench.jobs.job import Job
from ifsl_bench.jobs.preparation import CheckEpisodes, Features, PrepareData, Stage
from ifsl_bench.jobs.rates import roughly, seconds_together
from ifsl_bench.protocol.task import NO_BACKBONE
from ifsl_bench.scheduler.graph import Graph, Node, graph_of, key_of
from ifsl_bench.store.stored import kept_of

CACHED, TO_DO, MISSING, REFUSED = "cached", "to do", "missing", "cannot be run"
LONG = 50  # lines, from which the tasks of a plan are together


@dataclass(frozen=True)
class Step:
    """A stage; that of a job's result stands for a job that is done, or cannot be.

    Attributes:
        key: of its node in the graph; "" for such a job.
        state: "cached", "to do", "missing" (data that have to be obtained first) or "cannot be run".
        why: the result that is there is out of date, the data are missing, or the job cannot be run.
        node: of the graph; None where nothing is to be done.
        place: where it runs.
        size: bytes of what it leaves on the disk, as far as they count.
        row: the method's name in tables, without options.
    """

    key: str
    stage: Stage
    state: str
    why: str = ""
    node: Node | None = None
    place: str = ""
    size: int = 0
    row: str = ""

    @property
    def kind(self) -> str:
        return self.stage.kind

    @property
    def seconds(self) -> float | None:
        """About how long it takes; None where nobody knows."""
        return self.node.seconds if self.node else None

    @property
    def jobs(self) -> tuple[int, ...]:
        return self.node.results if self.node else ()

    def __str__(self) -> str:
        return str(self.stage)


@dataclass(frozen=True)
class Plan:
    """See :func:`plan_of`.

    Attributes:
        steps: in the order of a run, each once.
        workers: that the time is for.
    """

    jobs: tuple[Job, ...]
    graph: Graph
    steps: tuple[Step, ...]
    workers: int = 1

    @property
    def to_do(self) -> list[Step]:
        return [step for step in self.steps if step.state in (TO_DO, MISSING)]

    @property
    def unknown(self) -> int:
        """The number of steps whose time is unknown."""
        return sum(step.seconds is None for step in self.to_do)

    @property
    def seconds(self) -> float:
        """About how long all takes whose time is known, with so many workers on the machine's cores."""
        nodes = [step.node for step in self.to_do if step.node]
        return seconds_together([(node.seconds or 0.0, node.wants.threads) for node in nodes], self.workers, cores())

    @property
    def size(self) -> int:
        """Bytes that the home folder grows by, roughly."""
        return sum(step.size for step in self.to_do)


def plan_of(
    jobs: Sequence[Job],
    work: Workspace,
    rerun: bool = False,
    retrain: bool = False,
    lacking: bool = False,
    workers: int = 1,
    data: Mapping[str, Path] | None = None,
) -> Plan:
    """Plans a run. Changes nothing on disk.

    Args:
        rerun, retrain: as of the run.
        lacking: as if data were there that have to be obtained first, where it is known how many they are.
        workers: of the run.
        data: data set -> the path that the run makes it from first.

    Raises:
        UserError: no job can be run, all for one reason.
    """
    quiet = replace(work, reporter=Mute())
    with remembered():
        graph = graph_of(jobs, quiet, rerun, retrain, lacking=lacking)
        if len(graph.refused) == len(jobs) and len({str(error) for error in graph.refused.values()}) == 1:
            raise graph.refused[0]
        steps: dict[str, Step] = {}
        outlines: dict[str, Outline] = {}
        for index, job in enumerate(jobs):
            if index in graph.stored:
                steps[str(job)] = Step("", Evaluate(job), CACHED)
            elif (error := graph.refused.get(index)) is not None:
                steps[str(job)] = Step("", Evaluate(job), REFUSED, str(error))
            else:
                if job.task.hash not in outlines:
                    outlines[job.task.hash] = outline_of(job.task, quiet.home, lacking)
                outdated = "" if rerun or retrain else kept_of(job, quiet.home).outdated
                _add(steps, job, graph, outlines[job.task.hash], outdated, quiet, data or {})
        for node in graph.nodes.values():  # a second each: part of the time, and nothing to read
            if isinstance(node.stage, CheckEpisodes):
                steps[node.key] = Step(node.key, node.stage, TO_DO, node=node)
    return Plan(tuple(jobs), graph, tuple(steps.values()), workers)


def _add(
    steps: dict[str, Step], job: Job, graph: Graph, outline: Outline, outdated: str, work: Workspace,
    made_from: Mapping[str, Path],
) -> None:  # fmt: skip
    """Adds the steps of a job that are not there yet."""
    for stage in stages_of(job):
        if (key := key_of(stage, work.home)) not in steps:
            steps[key] = _step(stage, key, graph.nodes.get(key), job, outline, work, made_from)
    if outdated:
        steps[key] = replace(steps[key], why=f"out of date: {outdated}")


def _step(
    stage: Stage, key: str, node: Node | None, job: Job, outline: Outline, work: Workspace,
    made_from: Mapping[str, Path],
) -> Step:  # fmt: skip
    if node is None:
        return Step(key, stage, CACHED)
    state, why = TO_DO, ""
    if isinstance(stage, PrepareData):
        lacking = [spec for spec in data_of(job.task, work.home)
                   if prepared_data(work.home, spec.name) is None and not rough_seconds(spec.name)]  # fmt: skip
        if lacking and (path := made_from.get(lacking[0].name)) is not None:
            why = f"made from {path} first"
        elif lacking:
            state, why = MISSING, not_prepared(work.home, lacking[0])
    return Step(key, stage, state, why, node, str(stage.place(work)), _size(stage, outline), job.row.name)


def _size(stage: Stage, data: Outline) -> int:
    """Bytes of what a stage leaves, of data sets and features; the rest is small."""
    if not data.shape:
        return 0
    if isinstance(stage, PrepareData):
        return math.prod(data.shape) * sum(data.images(pool) for pool in data.starts)
    if isinstance(stage, Features) and stage.backbone.task.pretraining.backbone != NO_BACKBONE:
        width = features_of(stage.backbone.task.pretraining.backbone, data.shape)
        return 4 * width * stage.views * data.images(stage.pool)
    return 0


def rows_of(plan: Plan, full: bool = True) -> list[dict[str, str]]:
    """Makes a row for each family of steps; unless it is ``full``, a long plan has its tasks together."""
    families, title = _families(plan), _title
    if not full and len(families) > LONG:
        families, title = _grouped(_shown(plan), _work), partial(_work_title, plan)
    rows = []
    for steps in families:
        first, todo = steps[0], [step for step in steps if step.state != CACHED]
        state = first.state if len(steps) == 1 else _counted(steps)
        times = [step.seconds for step in todo if step.seconds is not None]
        time = roughly(sum(times)) if times else ("unknown" if todo and first.state != REFUSED else "")
        rows.append({"stage": title(steps), "state": state, "rough time": time, "device": (todo or [first])[0].place})
    return rows


def is_long(plan: Plan) -> bool:
    """Tells whether readers see a plan without a line for each task, unless they ask for all."""
    return len(_families(plan)) > LONG


def _families(plan: Plan) -> list[list[Step]]:
    return _grouped(_shown(plan), lambda step: step.stage.family)


def _shown(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if step.kind != CheckEpisodes.kind]


def _grouped(steps: Sequence[Step], by: Callable[[Step], Hashable]) -> list[list[Step]]:
    """Groups steps, in the order of the first of each group; steps with a remark are apart."""
    groups: dict[Hashable, list[Step]] = {}
    for step in steps:
        groups.setdefault((by(step), step.state if step.why else ""), []).append(step)
    return list(groups.values())


def _work(step: Step) -> Hashable:
    """Equal for steps that differ in task, seed and options alone."""
    if step.kind in ("meta-training", "trial"):
        return f"{'trials of' if step.kind == 'trial' else step.kind} {step.row}"
    return {"evaluation": "evaluating", "features": "features"}.get(step.kind, step.stage.family)


def _work_title(plan: Plan, steps: Sequence[Step]) -> str:
    tasks = {plan.jobs[index].task.name for step in steps for index in step.jobs}
    work = _work(steps[0])
    if steps[0].why or not isinstance(work, str) or work == steps[0].stage.family:
        return _title(steps)
    return work + (f" on {len(tasks)} tasks" if len(tasks) > 1 else "")


def _counted(steps: Sequence[Step]) -> str:
    counts = Counter(step.state for step in steps)
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _title(steps: Sequence[Step]) -> str:
    """The stage of a family, with all its seeds; trials are counted."""
    first = steps[0]
    if len(steps) > 1 and first.kind == "trial":
        return str(first.stage.family)
    seeds = {step.stage.shown_seed for step in steps if step.stage.shown_seed is not None}
    return first.stage.told(f", seeds {numbers_in_words(seeds, 2)}") if len(seeds) > 1 else str(first)


def whys_of(plan: Plan) -> dict[str, str]:
    """Maps each reason (out of date, missing, cannot be run) to the first step that it holds for, and how many more."""
    steps_of: dict[str, list[str]] = {}
    for step in plan.steps:
        if step.why:
            steps_of.setdefault(step.why, []).append(str(step))
    return {why: what[0] + (f" and {len(what) - 1:,} more" if len(what) > 1 else "") for why, what in steps_of.items()}


def notes_of(plan: Plan) -> list[str]:
    """Writes the totals, and what is not in them, for readers."""
    refused, stored, total = len(plan.graph.refused), len(plan.graph.stored), len(plan.jobs)
    todo = total - stored - refused
    counts = f"{total:,} job{'s' * (total != 1)}: {stored:,} stored, {todo:,} to do"
    notes = [counts + (f", {refused:,} that cannot be run" if refused else "")]
    notes += [why if why.startswith("data set ") else f"{what}: {why}" for why, what in whys_of(plan).items()]
    if not todo:
        return notes
    with_workers = "" if plan.workers == 1 else f" with {plan.workers} workers"
    size = f"; the home folder grows by about {plan.size / 1e9:.1f} GB" if plan.size > 5e7 else ""
    notes.append(f"total: {'at least ' if plan.unknown else ''}{roughly(plan.seconds)}{with_workers}, on this machine "
                 f"with nothing else to do{size}")  # fmt: skip
    if guesses := sum(step.node is not None and not step.node.measured and bool(step.seconds) for step in plan.to_do):
        notes.append(f"{guesses:,} of the times are coarse guesses, until stages like these have run on this machine")
    if plan.unknown:
        notes.append("data sets that are made from files have no time: it is that of reading and decoding the files")
    return notes


def document(plan: Plan) -> dict[str, Any]:
    """Lists jobs, nodes and totals for programs, as JSON takes them."""
    outdated = {step.jobs[0]: step.why for step in plan.steps if step.kind == "evaluation" and step.jobs and step.why}
    stored = set(plan.graph.stored)

    def job(index: int, planned: Job) -> Mapping[str, Any]:
        refused = plan.graph.refused.get(index)
        state = CACHED if index in stored else REFUSED if refused else TO_DO
        why = str(refused) if refused else outdated.get(index, "")
        return {"method": planned.name, "label": planned.label, "task": planned.task.name, "seed": planned.seed,
                "state": state, "why": why or None}  # fmt: skip

    return {
        "jobs": [job(index, planned) for index, planned in enumerate(plan.jobs)],
        "nodes": [
            {
                "key": step.key,
                "stage": str(step),
                "kind": step.kind,
                "state": step.state,
                "why": step.why or None,
                "seconds": None if step.seconds is None else round(step.seconds, 3),
                "device": step.place or None,
                "threads": step.node.wants.threads if step.node else None,
                "bytes": step.size or None,
                "needs": list(step.node.needs) if step.node else [],
                "jobs": list(step.jobs),
            }
            for step in plan.steps
            if step.key
        ],
        "workers": plan.workers,
        "seconds": round(plan.seconds, 3),
        "nodes_without_time": plan.unknown,
        "bytes": plan.size,
    }
