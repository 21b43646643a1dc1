"""The graph of the stages of many jobs: each that is not done already is there once, for all results that need it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ifsl_bench.backbones.device import HOST
from ifsl_bench.data.preparing.metadata import DatasetMetadata, cached_fingerprints, metadata_of
from ifsl_bench.experiments.evaluate_stage import Evaluate
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.rates import Amount, Rates
from ifsl_bench.experiments.stages import Stage
from ifsl_bench.experiments.stored_results import stored_result
from ifsl_bench.experiments.training_stage import data_stage_of
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths

PROCESS = 700 << 20  # bytes that an interpreter with PyTorch takes before it has done anything


@dataclass(frozen=True)
class Wants:
    """The needs of a node of the machine."""

    threads: int = 1  # that it keeps busy; ifsl_bench.utils.threads.cores of them mean the whole machine
    memory: int = PROCESS  # bytes, roughly
    accelerator: bool = False


@dataclass(frozen=True)
class Node:
    """A stage to run; a description that can be pickled."""

    key: str  # its kind and what its artefact is called; no two nodes of a graph have the same
    stage: Stage
    needs: tuple[str, ...]  # keys of the nodes it waits for
    wants: Wants
    results: tuple[int, ...]  # the jobs that wait for it, as indices of the graph's
    anew: bool = False  # what was there is set aside before it starts
    last: bool = False  # it makes a job's result, and stores it
    amount: Amount | None = None  # of work; None where nobody knows
    seconds: float | None = None  # that it takes about; None where nobody knows
    measured: bool = False  # that is by stages like it that have run here
    place: str = ""  # where it runs, in words

    def __str__(self) -> str:
        return str(self.stage)


@dataclass(frozen=True)
class Graph:
    """The stages to run for some jobs."""

    jobs: tuple[Job, ...]
    nodes: Mapping[str, Node]  # by key, each after those it waits for; what is done already has none
    stored: tuple[int, ...] = ()  # indices of the jobs whose results are stored and current
    refused: Mapping[int, UserError] = field(default_factory=dict)  # job that cannot be run -> why; it has no nodes
    outlines: Mapping[str, DatasetMetadata] = field(default_factory=dict)  # hash of a task with nodes -> its data


def key_of(stage: Stage, home: Paths) -> str:
    """Makes the key of the stage's node."""
    if isinstance(stage, Evaluate):
        return f"result/{stage.job.task.name}-{stage.job.task.hash[:12]}/{stage.job.result_path(home).stem}"
    return f"{stage.kind}/{stage.key(home)}"


def graph_of(
    jobs: Sequence[Job],
    work: Workspace,
    rerun: bool = False,
    retrain: bool = False,
    command: str = "",
    lacking: bool = False,
) -> Graph:
    """The graph of some jobs.

    Args:
        lacking: as if data were there that have to be obtained first, as far as it is known how many they are.
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored; rerun follows.
        command: what the user typed, recorded with results.
    """
    expansion = _Expansion(work, retrain, lacking)
    stored, refused = [], {}
    with cached_fingerprints():
        for index, job in enumerate(jobs):
            try:
                if not (rerun or retrain) and stored_result(job, work) is not None:
                    work.reporter.say(f"{job}: done already (--rerun repeats it)")
                    stored.append(index)
                else:
                    expansion.add(index, job, command)
            except UserError as error:
                refused[index] = error
    return Graph(tuple(jobs), expansion.with_results(), tuple(stored), refused, expansion.outlines)


class _Expansion:
    def __init__(self, work: Workspace, retrain: bool, lacking: bool) -> None:
        self.work, self.retrain, self.lacking = work, retrain, lacking
        self.rates = Rates(work.home)
        self.nodes: dict[str, Node] = {}  # without their results
        self.results: defaultdict[str, set[int]] = defaultdict(set)
        self.done: set[str] = set()
        self.outlines: dict[str, DatasetMetadata] = {}

    def add(self, index: int, job: Job, command: str) -> None:
        """Adds the nodes of a job; raises :class:`UserError` where its episodes cannot be drawn from its data."""
        if job.task.hash not in self.outlines:
            self.outlines[job.task.hash] = metadata_of(job.task, self.work.home, self.lacking)
        outline = self.outlines[job.task.hash]
        data_stage_of(job).check(outline)
        if key := self._visit(Evaluate(job, command=command), outline):
            self.results[key].add(index)

    def with_results(self) -> dict[str, Node]:
        """The nodes with the jobs that wait for them, which wait for all that these need, too."""
        for key, node in reversed(self.nodes.items()):
            for needed in node.needs:
                self.results[needed] |= self.results[key]
        return {key: replace(node, results=tuple(sorted(self.results[key])))
                for key, node in self.nodes.items() if self.results[key]}  # fmt: skip

    def _visit(self, stage: Stage, outline: DatasetMetadata) -> str | None:
        """The key of the stage's node, which is made if it is missing; None where the stage is done."""
        key, anew = key_of(stage, self.work.home), self.retrain and stage.trains
        if key in self.nodes or key in self.done:
            return key if key in self.nodes else None
        if not anew and stage.cached(self.work.home):
            self.done.add(key)
            return None
        keys = [self._visit(needed, outline) for needed in stage.inputs()]
        amount = stage.amount(outline, self.work)
        self.nodes[key] = Node(
            key, stage, tuple(dict.fromkeys(filter(None, keys))), wants_of(stage, outline, self.work), (), anew,
            isinstance(stage, Evaluate), amount, self.rates.seconds(amount), self.rates.knows(amount),
            str(stage.place(self.work)),
        )  # fmt: skip
        return key


def wants_of(stage: Stage, data: DatasetMetadata, work: Workspace) -> Wants:
    """Estimates what a stage needs of the machine."""
    device = stage.place(work).device
    return Wants(stage.threads() if device == HOST else 1, stage.memory(data, device) + PROCESS, device != HOST)
