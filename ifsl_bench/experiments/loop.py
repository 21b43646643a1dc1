"""The one loop that hands out the nodes of a graph, to whatever executor there is.

One node has one owner at a time because the loop says so. A node whose worker died is handed out again, and goes on
from its last checkpoint; one that failed takes with it what waits for it, and nothing else.
"""

from __future__ import annotations

import math
import queue
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ifsl_bench.experiments.executors import Executor
from ifsl_bench.experiments.graph import Graph, Node
from ifsl_bench.experiments.logs import BEGUN, DONE, FAILED, LOST, Event, Tail, event_now, log_path
from ifsl_bench.utils.files import Paths

TRIES = 3  # of a node whose worker dies, without coming further
FURTHER = 0.01  # of a piece of work: what an attempt has to come beyond those before it to begin the count anew
LOOK = 1.0  # seconds between two looks at the places and the logs
Hear = Callable[[Node, Event], None]


@dataclass(frozen=True)
class Failure:
    """The reason why a job has no result, in one line."""

    job: int  # its index in the graph
    node: Node | None  # that failed; None where the job was refused before anything ran
    why: str


@dataclass
class _Attempts:
    """A node that has been handed out, with the tail of its log."""

    tail: Tail
    count: int = 0  # how often, since an attempt came further than those before it
    reached: dict[str, float] = field(default_factory=dict)  # piece of work -> the share of it that was reached
    counted: float = 0.0  # the sum of these when an attempt last came further

    def has_another(self) -> bool:
        """Counts anew if the last attempt came further than those before it: a job of a queueing system that ends by
        its time limit, again and again, goes on from a later checkpoint each time."""
        if (reached := sum(self.reached.values())) >= self.counted + FURTHER:
            self.count, self.counted = 1, reached
        return self.count < TRIES


class Loop:
    """The nodes of a graph on their way through an executor.

    Args:
        home: with the logs of the nodes, which tell of their progress.
        hear: is told that a node begins, before it is handed out, and each time it is; what the log of one that runs
            elsewhere says meanwhile; and that it is done, has failed, or is lost and will be handed out again.
    """

    def __init__(self, graph: Graph, executor: Executor, home: Paths, hear: Hear) -> None:
        self.nodes, self.executor, self.home, self.hear = graph.nodes, executor, home, hear
        self.failures = {job: Failure(job, None, str(error)) for job, error in graph.refused.items()}
        self.missing = {key: set(node.needs) for key, node in self.nodes.items()}  # needs that are not done
        self.waiting: dict[str, list[str]] = {}  # key -> nodes that need it
        for key, node in self.nodes.items():
            for needed in node.needs:
                self.waiting.setdefault(needed, []).append(key)
        self.order = {key: order for order, key in enumerate(self.nodes)}
        self.ready = sorted((key for key, needs in self.missing.items() if not needs), key=self._rank)
        self.running: set[str] = set()
        self.attempts: dict[str, _Attempts] = {}
        self.ends: queue.SimpleQueue[Node] = queue.SimpleQueue()

    def run(self) -> list[Failure]:
        """Runs all nodes; returns the jobs without a result, in their order."""
        looked = -math.inf
        while self.running or self.ready:  # places may have to be waited for
            if time.monotonic() - looked >= LOOK:
                self.executor.look()
                for key in self.running:
                    self._listen(key)
                looked = time.monotonic()
            self._hand_out()
            if self.running or self.ready:
                with suppress(queue.Empty):
                    self._ended(self.ends.get(timeout=LOOK))
        return [self.failures[job] for job in sorted(self.failures)]

    def _rank(self, key: str) -> tuple[float, ...]:
        """Lower ones go first: what many results wait for; then what ends a job; then what wants the whole machine,
        which later would wait until a training leaves it, and others with it; then what takes longest, as far as others
        like it have shown here, so that no worker is left alone with it in the end."""
        if self.executor.in_order:
            return (self.order[key],)
        node = self.nodes[key]
        seconds = math.inf if node.seconds is None else node.seconds
        return -len(node.results), not node.last, -node.wants.threads, -seconds, self.order[key]

    def _hand_out(self) -> None:
        """Begins what there is room for. Nothing passes a node for which there is none yet, but from one to the other
        side of those that want an accelerator: what wants the whole machine would never begin."""
        full: set[bool] = set()
        for key in list(self.ready):
            node = self.nodes[key]
            if node.wants.accelerator in full:
                continue
            if all(job in self.failures for job in node.results):
                self.ready.remove(key)
            elif self.executor.fits(node):
                self.ready.remove(key)
                self._begin(node)
            else:
                full.add(node.wants.accelerator)

    def _begin(self, node: Node) -> None:
        self.running.add(node.key)
        self.attempts.setdefault(node.key, _Attempts(Tail(log_path(self.home, node.key)))).count += 1
        self.hear(node, event_now(BEGUN))
        self.executor.submit(node).add_done_callback(lambda _: self.ends.put(node))

    def _listen(self, key: str) -> None:
        """Passes on what is new in a node's log; stages in this process report for themselves."""
        for event in () if self.executor.in_order else self.attempts[key].tail.events():
            if event.total:
                reached = self.attempts[key].reached
                reached[event.text] = max(reached.get(event.text, 0.0), event.share)
            if event.kind not in (BEGUN, DONE, FAILED):  # of which the loop tells
                self.hear(self.nodes[key], event)

    def _ended(self, node: Node) -> None:
        end = self.executor.end(node)
        self._listen(node.key)
        self.running.discard(node.key)
        if end.kind == LOST and not self.attempts[node.key].has_another():
            end = event_now(FAILED, f"{end.text}, {TRIES} times")
        self.hear(node, end)
        if end.kind == DONE:
            for key in self.waiting.get(node.key, ()):
                self.missing[key].discard(node.key)
                if not self.missing[key]:
                    insort(self.ready, key, key=self._rank)
        elif end.kind == LOST:
            insort(self.ready, node.key, key=self._rank)
        else:
            for job in node.results:
                self.failures.setdefault(job, Failure(job, node, end.text))
