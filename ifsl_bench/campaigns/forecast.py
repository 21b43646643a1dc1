"""How far a run is, and how long it still takes: from what its own stages have taken so far."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import fmean

from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.work import Outcome
from ifsl_bench.common.processor import cores
from ifsl_bench.running.preparation import Stage
from ifsl_bench.running.ranges import OfEvaluation
from ifsl_bench.running.searching import LaterTrial, TrainChosen
from ifsl_bench.running.stages import MetaTrain, Trial

TOLD = 0.05  # part of a node from which its pace says how long it takes


@dataclass
class Running:
    """A node at work.

    Attributes:
        title: what it is at.
        done, total: units of that; 0 where nobody counts.
        first: of the units, those of an earlier run.
        figures: loss, accuracy, ...
    """

    node: Node
    title: str
    since: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    first: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def left(self, now: float) -> float | None:
        """Seconds, by its pace; None while nobody can say."""
        whole = self.whole(now)
        return whole * (self.total - self.done) / (self.total - self.first) if whole is not None else None

    def whole(self, now: float) -> float | None:
        """Seconds from its first unit to its last."""
        units, done = self.total - self.first, self.done - self.first
        return (now - self.since) / done * units if units > 0 and done >= TOLD * units and done else None


class Forecast:
    """The state of a run, as its events tell it."""

    def __init__(self, graph: Graph, workers: int) -> None:
        self.graph, self.workers = graph, workers
        self.running: dict[str, Running] = {}
        self.left = dict(graph.nodes)
        self.failed: set[int] = set(graph.refused)
        self.finished = len(graph.stored)  # jobs with a result
        self._took: dict[Hashable, list[float]] = {}
        self._alike = {key: _like(node.stage) for key, node in graph.nodes.items()}

    @property
    def jobs(self) -> str:
        """ "3 of 18 jobs done, 1 failed"."""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.finished} of {len(self.graph.jobs)} jobs done{failed}"

    def begun(self, node: Node) -> None:
        self.running[node.key] = Running(node, str(node))

    def heard(self, event: Event) -> Running | None:
        """The node that the event is of, brought up to date."""
        if (one := self.running.get(event.key)) is None or event.kind in ("say", "warn"):
            return one
        if event.kind == "stage":
            one.title, one.first, one.figures = titled(one.node, event.text), event.done, {}
            one.since = time.monotonic()
        one.done, one.total, one.figures = event.done, event.total, one.figures | event.figures
        return one

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        """A node ended; ``again`` where it will be handed out once more."""
        self.running.pop(node.key, None)
        if again:
            return
        self.left.pop(node.key, None)
        if outcome.how == "done":
            self._took.setdefault(self._alike[node.key], []).append(outcome.seconds)
            self._took.setdefault(type(node.stage), []).append(outcome.seconds)
            self.finished += node.last
            return
        self.failed |= set(node.results)
        self.left = {key: one for key, one in self.left.items() if not self.failed.issuperset(one.results)}

    def seconds(self) -> float | None:
        """Until all is done; None while nobody can say.

        Another thread may call it, to draw what it says.
        """
        now, running = time.monotonic(), list(self.running.values())
        alone = part = longest = 0.0
        for key, node in list(self.left.items()):
            one = self.running.get(key)
            took = one.left(now) if one else None
            if took is None:
                known = self._took.get(self._alike[key]) or self._took.get(type(node.stage))
                if known is None:
                    like = [other for other in running if type(other.node.stage) is type(node.stage)]
                    known = [whole for other in like if (whole := other.whole(now)) is not None]
                if not known:
                    return None
                took = fmean(known)
            if node.wants.threads >= max(2, cores()):
                alone += took
            else:
                part, longest = part + took, max(longest, took)
        return alone + max(part / self.workers, longest)


def _like(stage: Stage) -> Hashable:
    """Stages of which one takes about as long as another."""
    if isinstance(stage, (MetaTrain, Trial, LaterTrial, TrainChosen, OfEvaluation)):
        job = stage.job
        return type(stage), job.name, repr(job.given), job.schedule.steps, job.task.episode.ways, job.task.shots
    return type(stage)


def titled(node: Node, text: str) -> str:
    """What a node is at, so that several at once can be told apart."""
    if isinstance(node.stage, (MetaTrain, Trial, LaterTrial, TrainChosen)) and text.startswith("meta-training"):
        return f"meta-training {node.stage.job}"
    return text


def in_words(seconds: float) -> str:
    """A time that is left."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
