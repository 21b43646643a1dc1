"""One worker: this process. Nodes run job by job, as they are handed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ifsl_bench.campaigns.graph import Node
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.work import Outcome, attempt
from ifsl_bench.common.progress import Relay
from ifsl_bench.episodic.prepared import Workspace


class Here:
    """This process.

    Attributes:
        errors: of the nodes that failed, by key.
    """

    in_order = True

    def __init__(self, work: Workspace) -> None:
        self.relay, self.reporter = Relay(work.reporter), work.reporter
        self.work = replace(work, reporter=self.relay)
        self.next: Node | None = None
        self.errors: dict[str, Exception] = {}

    def fits(self, node: Node) -> bool:
        return self.next is None

    def submit(self, node: Node, priority: int) -> None:
        self.next = node

    def wait(self) -> Iterable[Event | Outcome]:
        if self.next is None:
            return []
        outcome, error = attempt(self.next, self.work, self.relay, self.reporter)
        self.next = None
        if error is not None:
            self.errors[outcome.key] = error
        else:
            self.errors.pop(outcome.key, None)  # it went better the second time
        return [outcome]

    def close(self, at_once: bool = False) -> None:
        pass
