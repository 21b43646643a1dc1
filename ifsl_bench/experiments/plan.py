"""The plan of a campaign: its graph, what is done, what is out of date, and about how long it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ifsl_bench.backbones.networks import feature_count
from ifsl_bench.data.datasets import not_prepared, rough_seconds
from ifsl_bench.data.datasets import prepared as prepared_data
from ifsl_bench.data.preparing.metadata import DatasetMetadata, cached_fingerprints, data_of
from ifsl_bench.experiments.evaluate_stage import Evaluate, stages_of
from ifsl_bench.experiments.graph import Graph, Node, graph_of, key_of
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.rates import roughly, seconds_together
from ifsl_bench.experiments.stages import CheckEpisodes, Features, PrepareData, Pretrain, Stage
from ifsl_bench.experiments.stored_results import kept_of
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.protocols.tasks.task import NO_BACKBONE
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter
from ifsl_bench.utils.text_format import numbers_in_words
from ifsl_bench.utils.threads import cores

CACHED, TO_DO, MISSING, REFUSED = "cached", "to do", "missing", "cannot be run"
LONG = 50  # lines, from which the tasks of a plan are together


@dataclass(frozen=True)
class Step:
    """A stage; that of a job's result stands for a job that is done, or cannot be."""

    key: str  # of its node in the graph; "" for such a job
    stage: Stage
    state: str  # "cached", "to do", "missing" (data that have to be obtained first) or "cannot be run"
    why: str = ""  # the result that is there is out of date, the data are missing, or the job cannot be run
    node: Node | None = None  # of the graph; None where nothing is to be done
    size: int = 0  # bytes of what it leaves on the disk, as far as they count
    row: str = ""  # the method's name in tables, without options

    @property
    def seconds(self) -> float | None:
        """About how long it takes; None where nobody knows."""
        return self.node.seconds if self.node else None


@dataclass(frozen=True)
class Plan:
    """See :func:`plan_of`."""

    graph: Graph
    steps: tuple[Step, ...]  # in the order of a run, each once
    workers: int = 1  # that the time is for

    @property
    def to_do(self) -> list[Node]:
        """The nodes of its steps."""
        return [step.node for step in self.steps if step.node]

    @property
    def unknown(self) -> int:
        """The number of nodes whose time is unknown."""
        return sum(node.seconds is None for node in self.to_do)

    @property
    def seconds(self) -> float:
        """About how long all takes whose time is known, with so many workers on the machine's cores."""
        times = [(node.seconds or 0.0, node.wants.threads) for node in self.to_do]
        return seconds_together(times, self.workers, cores())

    @property
    def size(self) -> int:
        """Bytes that the home folder grows by, roughly."""
        return sum(step.size for step in self.steps)


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
    with cached_fingerprints():
        graph = graph_of(jobs, replace(work, reporter=NullReporter()), rerun, retrain, lacking=lacking)
        if len(graph.refused) == len(jobs) and len({str(error) for error in graph.refused.values()}) == 1:
            raise graph.refused[0]
        ended = {index: Step("", Evaluate(jobs[index]), CACHED) for index in graph.stored}
        ended |= {index: Step("", Evaluate(jobs[index]), REFUSED, str(why)) for index, why in graph.refused.items()}
        steps: dict[str, Step] = {}
        for index, job in enumerate(jobs):
            if index in ended:
                steps[str(job)] = ended[index]
                continue
            for stage in stages_of(job):
                if (key := key_of(stage, work.home)) not in steps:
                    steps[key] = _step(key, stage, graph, job, work.home, data or {})
            if not (rerun or retrain) and (outdated := kept_of(job, work.home).outdated):
                steps[key] = replace(steps[key], why=f"out of date: {outdated}")
        for node in graph.nodes.values():  # a second each: part of the time, and nothing to read
            if isinstance(node.stage, CheckEpisodes):
                steps[node.key] = Step(node.key, node.stage, TO_DO, node=node)
    return Plan(graph, tuple(steps.values()), workers)


def _step(key: str, stage: Stage, graph: Graph, job: Job, home: Paths, paths: Mapping[str, Path]) -> Step:
    if (node := graph.nodes.get(key)) is None:
        return Step(key, stage, CACHED)
    state, why = TO_DO, ""
    if isinstance(stage, PrepareData):
        missing = [spec for spec in data_of(job.task, home)
                   if prepared_data(home, spec.name) is None and not rough_seconds(spec.name)]  # fmt: skip
        if missing and missing[0].name in paths:
            why = f"made from {paths[missing[0].name]} first"
        elif missing:
            state, why = MISSING, not_prepared(home, missing[0])
    elif isinstance(stage, Pretrain) and stage.perhaps_shipped(home):
        why = f"no time if {job.task.dataset.name} is the data set of the package's weights; known once it is prepared"
    return Step(key, stage, state, why, node, _size(stage, graph.outlines[job.task.hash]), job.row.name)


def _size(stage: Stage, data: DatasetMetadata) -> int:
    """Bytes of what a stage leaves, of data sets and features; the rest is small."""
    if not data.shape:
        return 0
    if isinstance(stage, PrepareData):
        return math.prod(data.shape) * sum(data.images(pool) for pool in data.starts)
    if isinstance(stage, Features) and stage.backbone.task.pretraining.backbone != NO_BACKBONE:
        width = feature_count(stage.backbone.task.pretraining.backbone, data.shape)
        return 4 * width * stage.views * data.images(stage.pool)
    return 0


def rows_of(plan: Plan, full: bool = True) -> list[dict[str, str]]:
    """Makes a row for each family of steps; unless it is ``full``, a long plan has its tasks together."""
    rows = []
    groups, together = _grouped(plan, full)
    for steps in groups:
        nodes, states = [step.node for step in steps if step.node], Counter(step.state for step in steps)
        state = steps[0].state if len(steps) == 1 else ", ".join(f"{count:,} {s}" for s, count in states.items())
        times = [node.seconds for node in nodes if node.seconds is not None]
        time = roughly(sum(times)) if times else "unknown" if nodes else ""
        title = _work_title(plan, steps) if together else _title(steps)
        rows.append({"stage": title, "state": state, "rough time": time, "device": nodes[0].place if nodes else ""})
    return rows


def _grouped(plan: Plan, full: bool) -> tuple[list[list[Step]], bool]:
    """Groups steps, in the order of the first of each group, those with a remark apart; tells if tasks are together."""

    def grouped(by: Callable[[Step], Hashable]) -> list[list[Step]]:
        groups: dict[Hashable, list[Step]] = {}
        for step in plan.steps:
            if not isinstance(step.stage, CheckEpisodes):
                groups.setdefault((by(step), step.state if step.why else ""), []).append(step)
        return list(groups.values())

    families = grouped(lambda step: step.stage.family)
    return (families, False) if full or len(families) <= LONG else (grouped(_work), True)


def _work(step: Step) -> Hashable:
    """Equal for steps that differ in task, seed and options alone."""
    kind = step.stage.kind
    if kind in ("meta-training", "trial"):
        return f"{'trials of' if kind == 'trial' else kind} {step.row}"
    return {"evaluation": "evaluating", "features": "features"}.get(kind, step.stage.family)


def _work_title(plan: Plan, steps: Sequence[Step]) -> str:
    tasks = {plan.graph.jobs[index].task.name for step in steps if step.node for index in step.node.results}
    work = _work(steps[0])
    if steps[0].why or not isinstance(work, str) or work == steps[0].stage.family:
        return _title(steps)
    return work + (f" on {len(tasks)} tasks" if len(tasks) > 1 else "")


def _title(steps: Sequence[Step]) -> str:
    """The stage of a family, with all its seeds; trials are counted."""
    stage = steps[0].stage
    if len(steps) > 1 and stage.kind == "trial":
        return str(stage.family)
    seeds = {step.stage.shown_seed for step in steps if step.stage.shown_seed is not None}
    return stage.told(f", seeds {numbers_in_words(seeds, 2)}") if len(seeds) > 1 else str(stage)


def notes_of(plan: Plan, full: bool = True) -> list[str]:
    """Writes the totals, and what is not in them, for readers of :func:`rows_of`."""
    refused, stored, total = len(plan.graph.refused), len(plan.graph.stored), len(plan.graph.jobs)
    todo = total - stored - refused
    notes = ["Tasks share lines here; --full has a line for each."] if _grouped(plan, full)[1] else []
    notes.append(f"{total:,} job{'s' * (total != 1)}: {stored:,} stored, {todo:,} to do"
                 + (f", {refused:,} that cannot be run" if refused else ""))  # fmt: skip
    stages: dict[str, list[Stage]] = {}
    for step in plan.steps:
        if step.why:
            stages.setdefault(step.why, []).append(step.stage)
    for why, (first, *others) in stages.items():
        more = f" and {len(others):,} more" if others else ""
        notes.append(why if why.startswith("data set ") else f"{first}{more}: {why}")
    if not todo:
        return notes
    with_workers = "" if plan.workers == 1 else f" with {plan.workers} workers"
    size = f"; the home folder grows by about {plan.size / 1e9:.1f} GB" if plan.size > 5e7 else ""
    notes.append(f"total: {'at least ' if plan.unknown else ''}{roughly(plan.seconds)}{with_workers}, on this machine "
                 f"with nothing else to do{size}")  # fmt: skip
    if guesses := sum(not node.measured and bool(node.seconds) for node in plan.to_do):
        notes.append(f"{guesses:,} of the times are coarse guesses, until stages like these have run on this machine")
    if plan.unknown:
        notes.append("data sets that are made from files have no time: it is that of reading and decoding the files")
    return notes


def document(plan: Plan) -> dict[str, Any]:
    """Lists jobs, nodes and totals for programs, as JSON takes them."""
    states: dict[int, tuple[str, str]] = dict.fromkeys(plan.graph.stored, (CACHED, ""))
    states |= {index: (REFUSED, str(error)) for index, error in plan.graph.refused.items()}
    states |= {step.node.results[0]: (TO_DO, step.why) for step in plan.steps
               if step.node and step.why and step.stage.kind == "evaluation"}  # fmt: skip
    jobs = [(job, *states.get(index, (TO_DO, ""))) for index, job in enumerate(plan.graph.jobs)]
    return {
        "jobs": [
            {"method": job.name, "label": job.label, "task": job.task.name, "seed": job.seed, "state": state,
             "why": why or None}
            for job, state, why in jobs
        ],
        "nodes": [
            {
                "key": step.key,
                "stage": str(step.stage),
                "kind": step.stage.kind,
                "state": step.state,
                "why": step.why or None,
                "seconds": None if step.seconds is None else round(step.seconds, 3),
                "device": node.place if node else None,
                "threads": node.wants.threads if node else None,
                "bytes": step.size or None,
                "needs": list(node.needs) if node else [],
                "jobs": list(node.results) if node else [],
            }
            for step in plan.steps
            if step.key
            for node in [step.node]
        ],
        "workers": plan.workers,
        "seconds": round(plan.seconds, 3),
        "nodes_without_time": plan.unknown,
        "bytes": plan.size,
    }  # fmt: skip
