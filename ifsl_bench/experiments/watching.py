"""The progress of a run: what its stages say, and with several workers one live line in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ifsl_bench.experiments.graph import Graph, Node
from ifsl_bench.experiments.logs import BEGUN, DONE, FAILED, LOST, Event
from ifsl_bench.experiments.rates import roughly, seconds_together
from ifsl_bench.utils.progress import Reporter, RichReporter
from ifsl_bench.utils.threads import cores

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

TOLD = 0.05  # part of a piece of work from which its pace says how long it takes


class Watch:
    """The progress of a run and the time that is left, in a line; what several workers warn of is said once.

    Args:
        lines: whether every piece of work has a line too, for a reporter that cannot redraw.
        alone: whether one job is run, of which the end says why it failed.
    """

    def __init__(self, reporter: Reporter, lines: bool = False, alone: bool = False) -> None:
        self.reporter, self.lines, self.alone = reporter, lines, alone
        self.start, self.workers = time.monotonic(), 1
        self.graph = Graph((), {})
        self.to_do: dict[str, Node] = {}
        self.paces: dict[str, tuple[float, float, float]] = {}  # since when; share done then, and now
        self.failed: set[int] = set()
        self.finished = 0  # jobs with a result
        self.warned: set[str] = set()

    def begin(self, graph: Graph, workers: int) -> None:
        """Hears what there is to do before anything begins."""
        self.graph, self.to_do, self.workers = graph, dict(graph.nodes), workers
        self.failed, self.finished = set(graph.refused), len(graph.stored)

    def __str__(self) -> str:
        """ "3 of 18 jobs done, 1 failed, about 4 min left"."""
        if not self.graph.jobs:
            return "looking for what is done already"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        seconds = self.seconds() if self.to_do else None
        remaining = f", {roughly(seconds)} left" if seconds is not None else ""
        return f"{self.finished} of {len(self.graph.jobs)} jobs done{failed}{remaining}"

    def hear(self, node: Node, event: Event) -> None:
        """Hears an event of a node, as :class:`ifsl_bench.experiments.loop.Loop` tells it."""
        if event.kind in (BEGUN, "stage"):
            self.paces[node.key] = time.monotonic(), event.share, event.share
        elif event.total:
            self.paces[node.key] = *self.paces[node.key][:2], event.share
        if event.kind in (DONE, FAILED, LOST):
            self._ended(node, event)
        elif event.kind == "say":
            self.reporter.say(event.text)
        elif event.kind == "warn" and event.text not in self.warned:
            self.warned.add(event.text)
            self.reporter.warn(event.text)
        elif event.kind == "stage" and self.lines:
            resumed = f" (resumed at {event.done} of {event.total})" if event.done else ""
            self.reporter.say(f"{node if event.text.startswith('meta-training') else event.text}{resumed} ...")
        elif event.kind == "end" and self.lines:
            self.reporter.say(str(event))

    def _ended(self, node: Node, event: Event) -> None:
        self.paces.pop(node.key, None)
        if event.kind == LOST:
            self.reporter.warn(f"{node}: {event.text}; it is run again, from its last checkpoint")
            return
        self.to_do.pop(node.key, None)
        if event.kind == FAILED:
            self.failed |= set(node.results)
            self.to_do = {key: node for key, node in self.to_do.items() if not self.failed.issuperset(node.results)}
            if not self.alone:
                self.reporter.say(f"{node} failed: {event.text}")  # and once more in the list at the end
            return
        self.finished += node.last
        if node.last and self.lines:
            self.reporter.say(str(self))

    def seconds(self) -> float | None:
        """Until all is done; None while nobody can say.

        Another thread may call it, to draw what it says.
        """
        remaining = [(self._seconds_of(key, node), node.wants.threads) for key, node in list(self.to_do.items())]
        timed = [(seconds, threads) for seconds, threads in remaining if seconds is not None]
        return seconds_together(timed, self.workers, cores()) if len(timed) == len(remaining) else None

    def _seconds_of(self, key: str, node: Node) -> float | None:
        """The time that a node still takes: by its own pace, once there is one; else what the plan says."""
        since, first, share = self.paces.get(key, (0.0, 0.0, 0.0))
        if share - first >= TOLD:
            return (time.monotonic() - since) * (1 - share) / (share - first)
        return node.seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        passed = int(time.monotonic() - self.start)
        clock = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}"
        yield Text(f"{self}  {clock}", style="bold", no_wrap=True, overflow="ellipsis")


@contextmanager
def watching(reporter: Reporter, alone: bool, elsewhere: bool) -> Iterator[Watch]:
    """Yields the watch of a run; where stages run elsewhere, a live line is redrawn inside the block."""
    if not elsewhere or not isinstance(reporter, RichReporter):
        yield Watch(reporter, lines=elsewhere, alone=alone and not elsewhere)
        return
    from rich.live import Live

    watch = Watch(reporter)
    with Live(watch, console=reporter.console, refresh_per_second=1, transient=True, redirect_stdout=False):
        yield watch
    reporter.say(str(watch))
