"""What running a campaign would do: its graph, what of it is done, what is out of date, and about how long it takes."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.rough_times import features_of
from ifsl_bench.board.looks import method_of
from ifsl_bench.campaigns.graph import Graph, Node, graph_of, key_of
from ifsl_bench.common.processor import cores
from ifsl_bench.common.progress import Mute
from ifsl_bench.common.timing import crowd, roughly
from ifsl_bench.common.wording import numbers_in_words
from ifsl_bench.data.preparing.of_task import data_of
from ifsl_bench.data.preparing.outline import Outline, outline_of, remembered
from ifsl_bench.data.preparing.prepare import not_prepared, rough_seconds
from ifsl_bench.data.preparing.prepare import prepared as prepared_data
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.episodic.rough_times import compiling, forget_uncompiled
from ifsl_bench.kernels import store
from ifsl_bench.plugin import settings
from ifsl_bench.protocol.task import NO_BACKBONE
from ifsl_bench.running.evaluating import stages_of
from ifsl_bench.running.job import Job
from ifsl_bench.running.preparation import CheckEpisodes, Features, PrepareData, Stage
from ifsl_bench.running.searching import LaterTrial
from ifsl_bench.running.stages import Trial
from ifsl_bench.running.stored import kept_of

CACHED, TO_DO, MISSING, REFUSED = "cached", "to do", "missing", "cannot be run"
LONG = 50  # lines, from which the tasks of a plan are together
CROWDED = 1.25  # times as long as alone, from which a plan says that other programs have the cores


@dataclass(frozen=True)
class Step:
    """One stage, or a result that is stored already.

    Attributes:
        key: of its node in the graph.
        state: "cached", "to do", "missing" (data that have to be obtained first) or "cannot be run".
        why: the result that is there is out of date, the data are missing, or the job cannot be run.
        seconds: about how long it takes on a machine that has nothing else to do; None where nobody knows.
        size: bytes of what it leaves on the disk, as far as they count.
        family: the same for steps that are one line for readers.
        row: the method's name in tables, without options.
    """

    key: str
    what: str
    kind: str
    state: str
    why: str = ""
    seconds: float | None = None
    place: str = ""
    threads: int = 0
    needs: tuple[str, ...] = ()
    jobs: tuple[int, ...] = ()
    size: int = 0
    family: Hashable = ""
    row: str = ""


@dataclass(frozen=True)
class Plan:
    """See :func:`plan_of`.

    Attributes:
        steps: in the order of a run, each once.
        workers: that the time is for.
        crowded: how many times as long as alone everything took while it was timed.
    """

    jobs: tuple[Job, ...]
    graph: Graph
    steps: tuple[Step, ...]
    workers: int = 1
    crowded: float = 1.0

    @property
    def to_do(self) -> list[Step]:
        return [step for step in self.steps if step.state in (TO_DO, MISSING)]

    @property
    def unknown(self) -> int:
        """Of how many steps nobody knows how long they take."""
        return sum(step.seconds is None for step in self.to_do)

    @property
    def seconds(self) -> float:
        """About how long all takes whose time is known, with so many workers on the machine's cores."""
        if self.workers == 1:
            return sum(step.seconds or 0.0 for step in self.to_do)
        return _makespan(self.to_do, self.workers, cores())

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
    timed: bool = True,
    data: Mapping[str, Path] | None = None,
    compiled: bool = False,
) -> Plan:
    """What a run would do. Changes nothing on disk; only what a method computes is kept there, to be compared with.

    Args:
        rerun, retrain: as of the run.
        lacking: as if data were there that have to be obtained first, where it is known how many they are.
        workers: of the run.
        timed: whether to estimate times, on random numbers, which takes seconds.
        data: data set -> the path that the run makes it from first.
        compiled: compile the kernels that times need first, and keep them; without it, what is not compiled has none.

    Raises:
        UserError: no job can be run, all for one reason.
    """
    quiet = replace(work, reporter=Mute())
    store.keep_in(work.home.cache / "compiled", work.reporter.say)  # a compilation is told all the same
    with remembered(), compiling() if compiled else nullcontext():
        return _plan_of(jobs, quiet, rerun, retrain, lacking, workers, timed, data or {})


def _plan_of(
    jobs: Sequence[Job], quiet: Workspace, rerun: bool, retrain: bool, lacking: bool, workers: int, timed: bool,
    data: Mapping[str, Path],
) -> Plan:  # fmt: skip
    forget_uncompiled()
    graph = graph_of(jobs, quiet, rerun, retrain, lacking=lacking)
    if len(graph.refused) == len(jobs) and len({str(error) for error in graph.refused.values()}) == 1:
        raise graph.refused[0]
    steps: dict[str, Step] = {}
    outlines: dict[str, Outline] = {}
    for index, job in enumerate(jobs):
        if index in graph.stored:
            steps[f"stored {job}"] = Step(
                f"stored {job}", f"result {job}", "result", CACHED, family=("result", job.label)
            )
            continue
        if (error := graph.refused.get(index)) is not None:
            why, family = str(error), (job.task.name, str(error))
            key = f"refused {job}"
            steps[key] = Step(key, f"result {job}", "result", REFUSED, why, jobs=(index,), family=family)
            continue
        if job.task.hash not in outlines:
            outlines[job.task.hash] = outline_of(job.task, quiet.home, lacking)
        outdated = "" if rerun or retrain else kept_of(job, quiet.home).outdated
        for stage in stages_of(job):
            if (key := key_of(stage, quiet.home)) not in steps:
                node = graph.nodes.get(key)
                steps[key] = _step(stage, key, node, job, outlines[job.task.hash], quiet, timed, data)
        if outdated:
            steps[key] = replace(steps[key], why=f"out of date: {outdated}")
    checks = [node for node in graph.nodes.values() if isinstance(node.stage, CheckEpisodes)]
    for node in checks:  # a second each: part of the time, and nothing to read
        seconds = 1.0 if timed else None
        kind, needs, jobs_of_it = node.stage.kind, node.needs, node.results
        steps[node.key] = Step(
            node.key, str(node), kind, TO_DO, "", seconds, "", 1, needs, jobs_of_it, family="checks"
        )  # fmt: skip
    return Plan(tuple(jobs), graph, tuple(steps.values()), workers, crowd.factor)


def _step(
    stage: Stage,
    key: str,
    node: Node | None,
    job: Job,
    data: Outline,
    work: Workspace,
    timed: bool,
    made_from: Mapping[str, Path],
) -> Step:
    family = _family(stage)
    if node is None:
        return Step(key, str(stage), stage.kind, CACHED, family=family)
    seconds = stage.estimate(data, work) if timed else None
    state, why = TO_DO, ""
    if isinstance(stage, PrepareData) and seconds is None:
        for spec in data_of(job.task, work.home):
            lacking = prepared_data(work.home, spec.name) is None and not (timed and rough_seconds(spec.name))
            if lacking and state == TO_DO:
                state, why = MISSING, not_prepared(work.home, spec)
                if (path := made_from.get(spec.name)) is not None:
                    state, why = TO_DO, f"made from {path} first"
    place, wants = str(stage.place(work)), node.wants
    return Step(
        key, str(stage), stage.kind, state, why, seconds, place, wants.threads, node.needs, node.results,
        _size(stage, data), family, method_of(job.label),
    )  # fmt: skip


def _family(stage: Stage) -> Hashable:
    """What differs from each other in seed, or in what is tried, alone: one line for readers."""
    if isinstance(stage, (Trial, LaterTrial)):
        return _trials_of(stage)
    return re.sub(r", seed \d+", "", str(stage))


def _trials_of(stage: Trial | LaterTrial) -> str:
    """Of what is tried, with what is not."""
    job = stage.job
    given = {key: value for key, value in job.given.items() if key not in job.method.space}
    return f"trials of {'.'.join(settings.label(job.method, job.name, given, job.task))} on {job.task.name}"


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


def _makespan(steps: Sequence[Step], workers: int, cores: int) -> float:
    """Seconds until all are done, where each is begun as soon as what it needs is there, a worker and its threads."""
    left = {step.key: step for step in steps}
    running: list[tuple[float, int, Step]] = []
    now, free, number = 0.0, cores, itertools.count()
    while left or running:
        for step in list(left.values()):
            threads = max(1, min(step.threads, cores))
            waits = any(needed in left or any(needed == r.key for _, _, r in running) for needed in step.needs)
            if len(running) < workers and threads <= free and not waits:
                del left[step.key]
                free -= threads
                heapq.heappush(running, (now + (step.seconds or 0.0), next(number), step))
        if not running:
            break  # what is left waits for what has failed
        now, _, ended = heapq.heappop(running)
        free += max(1, min(ended.threads, cores))
    return now


def rows_of(plan: Plan, full: bool = True) -> list[dict[str, str]]:
    """For readers: a row for each family of steps; unless it is ``full``, a long plan has its tasks together."""
    families, title = _families(plan), _title
    if not full and len(families) > LONG:
        families, title = _grouped(_shown(plan), _work), partial(_work_title, plan)
    rows = []
    for steps in families:
        first, todo = steps[0], [step for step in steps if step.state != CACHED]
        state = first.state if len(steps) == 1 else _counted(steps)
        known = [step.seconds for step in todo if step.seconds is not None]
        time = roughly(sum(known)) if known else ("unknown" if todo and first.state != REFUSED else "")
        rows.append({"stage": title(steps), "state": state, "rough time": time, "device": (todo or [first])[0].place})
    return rows


def is_long(plan: Plan) -> bool:
    """Whether readers are shown it without a line for each task, unless they ask for all."""
    return len(_families(plan)) > LONG


def _families(plan: Plan) -> list[list[Step]]:
    return _grouped(_shown(plan), lambda step: step.family)


def _shown(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if step.family != "checks"]


def _grouped(steps: Sequence[Step], by: Callable[[Step], Hashable]) -> list[list[Step]]:
    """In the order of the first of each; what is not as usual is apart."""
    groups: dict[Hashable, list[Step]] = {}
    for step in steps:
        groups.setdefault((by(step), step.state if step.why else ""), []).append(step)
    return list(groups.values())


def _work(step: Step) -> Hashable:
    """What a step is whatever the task, the seed and the options."""
    if step.kind in ("meta-training", "trial"):
        return f"{'trials of' if step.kind == 'trial' else step.kind} {step.row}"
    return {"evaluation": "evaluating", "features": "features", "result": "results"}.get(step.kind, step.family)


def _work_title(plan: Plan, steps: Sequence[Step]) -> str:
    tasks = {plan.jobs[index].task.name for step in steps for index in step.jobs}
    what = _work(steps[0])
    if steps[0].why or not isinstance(what, str) or what == steps[0].family:
        return _title(steps)
    return what + (f" on {len(tasks)} tasks" if len(tasks) > 1 else "")


def _counted(steps: Sequence[Step]) -> str:
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.state] = counts.get(step.state, 0) + 1
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _title(steps: Sequence[Step]) -> str:
    """Of a family: its stage, with all its seeds; trials are counted."""
    what = steps[0].what
    if len(steps) == 1:
        return what
    if steps[0].kind == "trial":
        return str(steps[0].family)
    seeds = sorted({int(found[1]) for step in steps if (found := re.search(r", seed (\d+)", step.what))})
    if len(seeds) < 2:
        return what
    return re.sub(r", seed \d+", f", seeds {numbers_in_words(seeds, 2)}", what)


def whys_of(plan: Plan) -> dict[str, str]:
    """Why something is out of date, missing or cannot be run -> what, and how much more of the kind."""
    found: dict[str, list[str]] = {}
    for step in plan.steps:
        if step.why:
            found.setdefault(step.why, []).append(step.what)
    return {why: what[0] + (f" and {len(what) - 1:,} more" if len(what) > 1 else "") for why, what in found.items()}


def notes_of(plan: Plan) -> list[str]:
    """For readers: totals, and what is not in them."""
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
    if uncompiled := [step for step in plan.to_do if step.seconds is None and step.kind not in ("data", "result")]:
        notes.append(
            f"{len(uncompiled):,} stages have no time, because their solvers are not compiled on this machine yet: "
            "`plan --compile` compiles them now, in half a minute, and so does the first run"
        )
    if any(step.seconds is None and step.kind == "data" for step in plan.to_do):
        notes.append("data sets that are made from files have no time: it is that of reading and decoding the files")
    if plan.crowded > CROWDED:
        notes.append(
            f"other programs use the processor: while they do, all takes about {plan.crowded:.1f} times as long"
        )
    return notes


def document(plan: Plan) -> dict[str, Any]:
    """For programs: jobs, nodes and totals, as JSON takes them."""
    outdated = {step.jobs[0]: step.why for step in plan.steps if step.kind == "evaluation" and step.why}
    stored = set(plan.graph.stored)

    def job(index: int, one: Job) -> Mapping[str, Any]:
        refused = plan.graph.refused.get(index)
        state = CACHED if index in stored else REFUSED if refused else TO_DO
        why = str(refused) if refused else outdated.get(index, "")
        return {"method": one.name, "label": one.label, "task": one.task.name, "seed": one.seed, "state": state,
                "why": why or None}  # fmt: skip

    return {
        "jobs": [job(index, one) for index, one in enumerate(plan.jobs)],
        "nodes": [
            {
                "key": step.key,
                "stage": step.what,
                "kind": step.kind,
                "state": step.state,
                "why": step.why or None,
                "seconds": None if step.seconds is None else round(step.seconds, 3),
                "device": step.place or None,
                "threads": step.threads or None,
                "bytes": step.size or None,
                "needs": list(step.needs),
                "jobs": list(step.jobs),
            }
            for step in plan.steps
            if step.kind != "result"
        ],
        "workers": plan.workers,
        "seconds": round(plan.seconds, 3),
        "nodes_without_time": plan.unknown,
        "times_as_long_now": round(plan.crowded, 2),
        "bytes": plan.size,
    }
