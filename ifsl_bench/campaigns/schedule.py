"""The one loop that hands out the nodes of a graph, to whatever workers there are.

One node has one owner at a time because the loop says so. A node whose worker died is handed out again, and goes on
from its last checkpoint; one that failed takes with it what waits for it, and nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.work import Outcome

Rank = tuple[float, ...]
TRIES = 3  # of a node whose worker dies, without coming further
FURTHER = 0.01  # of a piece of work: what an attempt has to come beyond those before it to begin the count anew


@dataclass(frozen=True)
class Event:
    """What a worker tells while it runs a node.

    Attributes:
        key: of the node.
        kind: "say" and "warn" with ``text``; "stage", a piece of work of ``total`` units with ``done`` of them, called
            ``text``; "advance", which brings it to ``done``, with ``figures`` (loss, accuracy, ...); "end" of a stage.
    """

    key: str
    kind: str
    text: str = ""
    done: int = 0
    total: int = 0
    figures: dict[str, float] = field(default_factory=dict)


class Workers(Protocol):
    """What runs nodes: this process, processes beside it, or a cluster."""

    in_order: bool
    """Whether nodes are handed out job by job, not by how many results wait for them: so that one worker ends one job
    before it begins the next."""

    def fits(self, node: Node) -> bool:
        """Whether it can take a node now; one that queues by itself always can."""

    def submit(self, node: Node, priority: int) -> None:
        """Starts a node, or queues it: higher priorities first."""

    def wait(self) -> Iterable[Event | Outcome]:
        """What has happened since the last call, after up to half a second; each node that was submitted ends with one
        :class:`Outcome`."""

    def close(self, at_once: bool = False) -> None:
        """Ends all workers; within five seconds, where it is ``at_once``."""


class Watch:
    """Who is told of a run's progress; this one ignores it."""

    def planned(self, graph: Graph) -> None:
        """What there is to do, before anything is."""

    def begun(self, node: Node) -> None:
        """A node was handed out; more than once, if its worker died."""

    def heard(self, event: Event) -> None:
        """A worker says something of its node."""

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        """A node ended, or will be handed out ``again``."""


@dataclass(frozen=True)
class Failure:
    """Why a job has no result.

    Attributes:
        job: its index in the graph.
        node: that failed; None where the job was refused before anything ran.
        said: one line.
    """

    job: int
    node: Node | None
    said: str


def schedule(
    graph: Graph, workers: Workers, watch: Watch | None = None, before: Callable[[Node], None] | None = None
) -> list[Failure]:
    """Runs all nodes of a graph; returns the jobs without a result, in their order.

    Args:
        before: is called with each node once, before it is first handed out.
    """
    return _Run(graph, workers, watch or Watch(), before or (lambda node: None)).to_the_end()


class _Run:
    def __init__(self, graph: Graph, workers: Workers, watch: Watch, before: Callable[[Node], None]) -> None:
        self.graph, self.nodes, self.workers, self.watch, self.before = graph, graph.nodes, workers, watch, before
        self.failures = {job: Failure(job, None, str(error)) for job, error in graph.refused.items()}
        self.missing = {key: len(node.needs) for key, node in graph.nodes.items()}  # needs that are not done
        self.waiting: dict[str, list[str]] = {}  # key -> nodes that need it
        for key, node in graph.nodes.items():
            for needed in node.needs:
                self.waiting.setdefault(needed, []).append(key)
        self.order = {key: order for order, key in enumerate(graph.nodes)}
        self.took: dict[Hashable, float] = {}  # seconds of the last node of a kind
        # Heaps: of nodes without and with an accelerator.
        self.ready: dict[bool, list[tuple[Rank, str]]] = {False: [], True: []}
        for key, count in self.missing.items():
            if not count:
                self._is_ready(key)
        self.running: set[str] = set()
        self.tries: dict[str, int] = {}
        self.working_at: dict[str, Event] = {}  # the piece of work that a node is at
        self.came: dict[str, dict[str, float]] = {}  # node -> piece of work -> the share of it that was reached
        self.came_before: dict[str, dict[str, float]] = {}  # the same when its worker died last

    def _is_ready(self, key: str) -> None:
        heapq.heappush(self.ready[self.nodes[key].wants.accelerator], (self._rank(key), key))

    def _rank(self, key: str) -> Rank:
        """Lower ones go first: what many results wait for; then what ends a job; then what takes longest, as far as
        others like it have shown, so that no worker is left alone with it in the end."""
        if self.workers.in_order:
            return (self.order[key],)
        node = self.nodes[key]
        return -len(node.results), not node.ends, -self.took.get(node.like, math.inf), self.order[key]

    def to_the_end(self) -> list[Failure]:
        self.watch.planned(self.graph)
        self._hand_out()
        while self.running or any(self.ready.values()):  # workers may have to be waited for
            for one in self.workers.wait():
                if isinstance(one, Event):
                    self._heard(one)
                    self.watch.heard(one)
                else:
                    self._ended(one)
            self._hand_out()
        return [self.failures[job] for job in sorted(self.failures)]

    def _hand_out(self) -> None:
        full: set[bool] = set()  # where no more fit: among accelerators, among the others
        while heads := [(heap[0], kind) for kind, heap in self.ready.items() if heap and kind not in full]:
            (_, key), kind = min(heads)
            node = self.nodes[key]
            if all(job in self.failures for job in node.results):
                heapq.heappop(self.ready[kind])
            # Nothing passes a node for which there is no room yet: one that wants the whole machine would never begin.
            elif not self.workers.fits(node):
                full.add(kind)
            else:
                heapq.heappop(self.ready[kind])
                self.running.add(key)
                if key not in self.tries:
                    self.before(node)
                self.tries[key] = self.tries.get(key, 0) + 1
                self.workers.submit(node, len(node.results))
                self.watch.begun(node)

    def _heard(self, event: Event) -> None:
        if event.kind == "stage":
            self.working_at[event.key] = event
        stage = self.working_at.get(event.key)
        if stage and stage.total and event.kind in ("stage", "advance"):
            came = self.came.setdefault(event.key, {})
            came[stage.text] = max(came.get(stage.text, 0.0), event.done / stage.total)

    def _lost(self, key: str) -> None:
        """Counts the tries of a node anew if the last one came further than those before it: a job of a queueing system
        that ends by its time limit, again and again, goes on from a later checkpoint each time."""
        came, before = self.came.get(key, {}), self.came_before.get(key)
        if before is not None and any(share >= before.get(what, 0.0) + FURTHER for what, share in came.items()):
            self.tries[key] = 1
        self.came_before[key] = dict(came)

    def _ended(self, outcome: Outcome) -> None:
        key, node = outcome.key, self.nodes[outcome.key]
        self.running.discard(key)
        if outcome.how == "lost":
            self._lost(key)
        again = outcome.how == "lost" and self.tries[key] < TRIES
        if outcome.how == "lost" and not again:
            outcome = replace(outcome, said=f"{outcome.said}, {TRIES} times")
        self.watch.ended(node, outcome, again)
        if outcome.how == "done":
            self.took[node.like] = outcome.seconds
            for heap in self.ready.values():
                heap[:] = [(self._rank(other), other) for _, other in heap]
                heapq.heapify(heap)
            for other in self.waiting.get(key, ()):
                self.missing[other] -= 1
                if not self.missing[other]:
                    self._is_ready(other)
        elif again:
            self._is_ready(key)
        else:
            for job in node.results:
                self.failures.setdefault(job, Failure(job, node, outcome.said))
