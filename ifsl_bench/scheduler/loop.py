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

from ifsl_bench.common.files import Home
from ifsl_bench.scheduler.executors import Executor
from ifsl_bench.scheduler.graph import Graph, Node
from ifsl_bench.scheduler.logs import BEGUN, DONE, FAILED, LOST, Event, Tail, event_now, log_path

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

    def __init__(self, graph: Graph, executor: Executor, home: Home, hear: Hear) -> None:
        self.nodes, self.executor, self.home, self.hear = graph.nodes, executor, home, hear
        self.failures = {job: Failure(job, None, str(error)) for job, error in graph.refused.items()}
        self.missing = {key: set(node.needs) for key, node in self.nodes.items()}  # needs that are not done
        self.waiting: dict[str, list[str]] = {}  # key -> nodes that need it
        for key, node in self.nodes.items():
            for needed in node.needs:
                self.waiting.setdefault(needed, []).append(key)
        self.order = {key: order for order, key in enumerate(self.nodes)}
        self.ready = sorted((key for key, needs in self.missing.items() if not needs), key=self._rank)
        self.running: dict[str, float] = {}  # key -> when it began
        self.ahead: dict[str, list[str]] = {}  # of a node for which there was no room: what ran then
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
        """Begins what there is room for. A node for which there is none yet is passed by those on the other side, with
        or without a wish for an accelerator, and by those that end before what ran when it was first without room, as
        far as times are known: what wants the whole machine would never begin, or leave the rest of it idle beside a
        long evaluation."""
        full: dict[bool, float] = {}  # side -> the seconds until there is room for what waits there
        for key in list(self.ready):
            node = self.nodes[key]
            side, seconds = node.wants.accelerator, math.inf if node.seconds is None else node.seconds
            if side in full and seconds > full[side]:
                continue
            if all(job in self.failures for job in node.results):
                self.ready.remove(key)
            elif self.executor.fits(node):
                self.ready.remove(key)
                self._begin(node)
            else:
                full.setdefault(side, self._seconds_left(self.ahead.setdefault(key, [*self.running])))

    def _seconds_left(self, keys: list[str]) -> float:
        """Seconds until those of these nodes that run have ended, by their usual time or by how far they have come."""
        left = [0.0]
        for key in self.running.keys() & keys:
            elapsed, shares = time.monotonic() - self.running[key], [*self.attempts[key].reached.values()]
            left.append((self.nodes[key].seconds or 0.0) - elapsed)
            if shares and shares[-1]:
                left.append(elapsed / shares[-1] - elapsed)
        return max(left)

    def _begin(self, node: Node) -> None:
        self.running[node.key] = time.monotonic()
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
        self.running.pop(node.key, None)
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
