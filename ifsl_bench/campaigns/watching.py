"""The progress of many workers: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from ifsl_bench.common.processor import cores
from ifsl_bench.common.progress import Reporter, RichReporter
from ifsl_bench.jobs.rates import roughly, seconds_together
from ifsl_bench.scheduler.graph import Graph, Node
from ifsl_bench.scheduler.logs import Event
from ifsl_bench.scheduler.loop import Watch
from ifsl_bench.scheduler.work import Outcome

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

TOLD = 0.05  # part of a piece of work from which its pace says how long it takes


@dataclass
class Running:
    """A node at work.

    Attributes:
        since: when its piece of work began.
        first: the share of it that an earlier run has done.
        share: that is done.
    """

    since: float
    first: float = 0.0
    share: float = 0.0

    def left(self, now: float) -> float | None:
        """Seconds, by its pace; None while nobody can say."""
        done = self.share - self.first
        return (now - self.since) * (1 - self.share) / done if done >= TOLD else None


class Live(Watch):
    """The progress of a run and the time that is left, in a line; what several workers warn of is said once.

    Args:
        lines: whether every piece of work has a line too, for a reporter that cannot redraw.
    """

    def __init__(self, reporter: Reporter, workers: int, lines: bool = False) -> None:
        super().__init__(reporter)
        self.start, self.workers, self.lines = time.monotonic(), workers, lines
        self.graph = Graph((), {})
        self.left: dict[str, Node] = {}  # not done yet
        self.running: dict[str, Running] = {}
        self.failed: set[int] = set()
        self.finished = 0  # jobs with a result
        self.warned: set[str] = set()
        self._took: dict[type, list[float]] = {}

    def __str__(self) -> str:
        """ "3 of 18 jobs done, 1 failed, about 4 min left"."""
        if not self.graph.jobs:
            return "looking for what is done already"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        seconds = self.seconds() if self.left else None
        remaining = f", {roughly(seconds)} left" if seconds is not None else ""
        return f"{self.finished} of {len(self.graph.jobs)} jobs done{failed}{remaining}"

    def planned(self, graph: Graph) -> None:
        self.graph, self.left = graph, dict(graph.nodes)
        self.failed, self.finished = set(graph.refused), len(graph.stored)

    def begun(self, node: Node) -> None:
        self.running[node.key] = Running(time.monotonic())

    def heard(self, node: Node, event: Event) -> None:
        share = event.done / event.total if event.total else 0.0
        if event.kind == "stage":
            self.running[node.key] = Running(time.monotonic(), share, share)
        elif event.total:
            self.running[node.key].share = share
        if event.kind == "say":
            self.reporter.say(event.text)
        elif event.kind == "warn" and event.text not in self.warned:
            self.warned.add(event.text)
            self.reporter.warn(event.text)
        elif event.kind == "stage" and self.lines:
            resumed = f" (resumed at {event.done} of {event.total})" if event.done else ""
            self.reporter.say(f"{node if event.text.startswith('meta-training') else event.text}{resumed} ...")
        elif event.kind == "end" and self.lines:
            self.reporter.say(str(event))

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        super().ended(node, outcome, again)
        self.running.pop(node.key, None)
        if again:
            return
        self.left.pop(node.key, None)
        if outcome.how != "done":
            self.failed |= set(node.results)
            self.left = {key: node for key, node in self.left.items() if not self.failed.issuperset(node.results)}
            return
        self._took.setdefault(type(node.stage), []).append(outcome.seconds)
        self.finished += node.last
        if node.last and self.lines:
            self.reporter.say(str(self))

    def seconds(self) -> float | None:
        """Until all is done; None while nobody can say.

        Another thread may call it, to draw what it says.
        """
        remaining = [(self._seconds_of(key, node), node.wants.threads) for key, node in list(self.left.items())]
        timed = [(seconds, threads) for seconds, threads in remaining if seconds is not None]
        return seconds_together(timed, self.workers, cores()) if len(timed) == len(remaining) else None

    def _seconds_of(self, key: str, node: Node) -> float | None:
        """The time that a node still takes: by its own pace; else as stages like it took, on this machine or in this
        run."""
        running = self.running.get(key)
        if running is not None and (remaining := running.left(time.monotonic())) is not None:
            return remaining
        durations = self._took.get(type(node.stage))
        return node.seconds if node.measured else fmean(durations) if durations else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        passed = int(time.monotonic() - self.start)
        clock = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}"
        yield Text(f"{self}  {clock}", style="bold", no_wrap=True, overflow="ellipsis")


@contextmanager
def watching(reporter: Reporter, workers: int) -> Iterator[Watch]:
    """Yields who is told of the progress of a run by so many workers; a live line is redrawn inside the block."""
    if not isinstance(reporter, RichReporter):
        yield Live(reporter, workers, lines=True)
        return
    from rich.live import Live as Redrawn

    live = Live(reporter, workers)
    with Redrawn(live, console=reporter.console, refresh_per_second=1, transient=True, redirect_stdout=False):
        yield live
    reporter.say(str(live))
