"""How far a run is, and how long it still takes: from what its own stages have taken so far."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import fmean

from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.logs import Event
from ifsl_bench.campaigns.work import Outcome
from ifsl_bench.common.processor import cores

TOLD = 0.05  # part of a node from which its pace says how long it takes


@dataclass
class Running:
    """A node at work.

    Attributes:
        since: when its piece of work began.
        done, total: units of that; 0 where nobody counts.
        first: of the units, those of an earlier run.
    """

    since: float
    done: int = 0
    total: int = 0
    first: int = 0

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

    def __str__(self) -> str:
        """ "3 of 18 jobs done, 1 failed, about 4 min left"."""
        if not self.graph.jobs:
            return "looking for what is done already"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        seconds = self.seconds() if self.left else None
        left = f", about {in_words(seconds)} left" if seconds is not None else ""
        return f"{self.finished} of {len(self.graph.jobs)} jobs done{failed}{left}"

    def begun(self, node: Node) -> None:
        self.running[node.key] = Running(time.monotonic())

    def heard(self, node: Node, event: Event) -> None:
        """Brings the node that the event is of up to date."""
        if event.kind == "stage":
            self.running[node.key] = Running(time.monotonic(), first=event.done)
        if event.total:
            self.running[node.key].done, self.running[node.key].total = event.done, event.total

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        """A node ended; ``again`` where it will be handed out once more."""
        self.running.pop(node.key, None)
        if again:
            return
        self.left.pop(node.key, None)
        if outcome.how == "done":
            self._took.setdefault(node.like, []).append(outcome.seconds)
            self._took.setdefault(type(node.stage), []).append(outcome.seconds)
            self.finished += node.last
            return
        self.failed |= set(node.results)
        self.left = {key: node for key, node in self.left.items() if not self.failed.issuperset(node.results)}

    def seconds(self) -> float | None:
        """Until all is done; None while nobody can say.

        Another thread may call it, to draw what it says.
        """
        alone = part = longest = 0.0
        for key, node in list(self.left.items()):
            if (took := self._seconds_of(key, node)) is None:
                return None
            if node.wants.threads >= max(2, cores()):
                alone += took
            else:
                part, longest = part + took, max(longest, took)
        return alone + max(part / self.workers, longest)

    def _seconds_of(self, key: str, node: Node) -> float | None:
        """What is left of a node, by its own pace; else what others like it took; else the pace of those."""
        now, running = time.monotonic(), self.running.get(key)
        if running is not None and (left := running.left(now)) is not None:
            return left
        if took := self._took.get(node.like) or self._took.get(type(node.stage)):
            return fmean(took)
        kind = type(node.stage)
        paces = [now_at.whole(now) for key, now_at in list(self.running.items())
                 if type(self.graph.nodes[key].stage) is kind]  # fmt: skip
        known = [seconds for seconds in paces if seconds is not None]
        return fmean(known) if known else None


def in_words(seconds: float) -> str:
    """A time that is left."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
