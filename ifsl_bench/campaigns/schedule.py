"""The one loop that hands out the nodes of a graph, to whatever workers there are.

One node has one owner at a time because the loop says so. A node whose worker died is handed out again, and goes on
from its last checkpoint; one that failed takes with it what waits for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.work import Outcome

TRIES = 3  # of a node whose worker dies


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

    def cancel(self, key: str) -> None:
        """Forgets a node that was submitted, if it has not begun; it still has an outcome."""

    def close(self, at_once: bool = False) -> None:
        """Ends all workers; within five seconds, where it is ``at_once``."""


class Watch(Protocol):
    """Who is told of a run's progress."""

    def begun(self, node: Node) -> None:
        """A node was handed out."""

    def heard(self, event: Event) -> None: ...

    def ended(self, node: Node, outcome: Outcome) -> None:
        """A node ended; if its worker died and it is handed out again, more than once."""
