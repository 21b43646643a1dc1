"""The progress of many workers: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from ifsl_bench.common.processor import cores
from ifsl_bench.common.progress import Reporter, RichReporter, Stage
from ifsl_bench.jobs.rates import seconds_together
from ifsl_bench.jobs.training import JobStage
from ifsl_bench.scheduler.graph import Graph, Node
from ifsl_bench.scheduler.logs import Event
from ifsl_bench.scheduler.loop import Watch
from ifsl_bench.scheduler.work import Outcome

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


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
    """The progress of a run and the time that is left, from its events."""

    def __init__(self, graph: Graph, workers: int) -> None:
        self.graph, self.workers = graph, workers
        self.running: dict[str, Running] = {}
        self.left = dict(graph.nodes)
        self.failed: set[int] = set(graph.refused)
        self.finished = len(graph.stored)  # jobs with a result
        self._took: dict[type, list[float]] = {}

    def __str__(self) -> str:
        """ "3 of 18 jobs done, 1 failed, about 4 min left"."""
        if not self.graph.jobs:
            return "looking for what is done already"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        seconds = self.seconds() if self.left else None
        remaining = f", about {in_words(seconds)} left" if seconds is not None else ""
        return f"{self.finished} of {len(self.graph.jobs)} jobs done{failed}{remaining}"

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
            self._took.setdefault(type(node.stage), []).append(outcome.seconds)
            self.finished += node.last
            return
        self.failed |= set(node.results)
        self.left = {key: node for key, node in self.left.items() if not self.failed.issuperset(node.results)}

    def seconds(self) -> float | None:
        """Until all is done; None while nobody can say.

        Another thread may call it, to draw what it says.
        """
        remaining = [(self._seconds_of(key, node), node.wants.threads) for key, node in list(self.left.items())]
        timed = [(seconds, threads) for seconds, threads in remaining if seconds is not None]
        return seconds_together(timed, self.workers, cores()) if len(timed) == len(remaining) else None

    def _seconds_of(self, key: str, node: Node) -> float | None:
        """The time that a node still takes: by its own pace; else as stages like it took, on this machine or in this
        run; else by the pace of those."""
        now, running, kind = time.monotonic(), self.running.get(key), type(node.stage)
        if running is not None and (remaining := running.left(now)) is not None:
            return remaining
        if node.measured:
            return node.seconds
        paces = [neighbour.whole(now) for key, neighbour in list(self.running.items())
                 if type(self.graph.nodes[key].stage) is kind]  # fmt: skip
        durations = self._took.get(kind) or [seconds for seconds in paces if seconds is not None]
        return fmean(durations) if durations else None


def in_words(seconds: float) -> str:
    """A time that is left."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Live(Watch):
    """One line for the whole run, redrawn; what several workers warn of is said once."""

    def __init__(self, reporter: Reporter, workers: int) -> None:
        super().__init__(reporter)
        self.start, self.workers = time.monotonic(), workers
        self.forecast = Forecast(Graph((), {}), workers)
        self.warned: set[str] = set()

    def planned(self, graph: Graph) -> None:
        self.forecast = Forecast(graph, self.workers)

    def begun(self, node: Node) -> None:
        self.forecast.begun(node)

    def heard(self, node: Node, event: Event) -> None:
        self.forecast.heard(node, event)
        if event.kind == "say":
            self.reporter.say(event.text)
        elif event.kind == "warn" and event.text not in self.warned:
            self.warned.add(event.text)
            self.reporter.warn(event.text)

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        self.forecast.ended(node, outcome, again)
        super().ended(node, outcome, again)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        passed = int(time.monotonic() - self.start)
        clock = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}"
        yield Text(f"{self.forecast}  {clock}", style="bold", no_wrap=True, overflow="ellipsis")


class Lines(Live):
    """The same, and every piece of work, for a reporter that writes lines."""

    def __init__(self, reporter: Reporter, workers: int) -> None:
        super().__init__(reporter, workers)
        self.shown: dict[str, tuple[AbstractContextManager[Stage], Stage, int]] = {}  # with the units that are told

    def heard(self, node: Node, event: Event) -> None:
        super().heard(node, event)
        if event.kind == "stage":
            shown: AbstractContextManager[Stage] = self.reporter.stage(
                _title(node, event.text), event.total, event.done
            )
            self.shown[node.key] = shown, shown.__enter__(), event.done
        elif event.kind in ("advance", "end") and node.key in self.shown:
            shown, stage, done = self.shown[node.key]
            stage.advance(event.done - done, **event.figures)
            self.shown[node.key] = shown, stage, event.done
            if event.kind == "end":
                del self.shown[node.key]
                shown.__exit__(None, None, None)

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        self.shown.pop(node.key, None)  # of one that failed nobody says that it is done
        super().ended(node, outcome, again)
        if outcome.how == "done" and node.last:
            self.reporter.say(str(self.forecast))


def _title(node: Node, text: str) -> str:
    """Names what a node is doing, so that several at once can be told apart."""
    if isinstance(node.stage, JobStage) and text.startswith("meta-training"):
        return f"meta-training {node.stage.job}"
    return text


@contextmanager
def watching(reporter: Reporter, workers: int) -> Iterator[Watch]:
    """Yields who is told of the progress of a run by so many workers; a live line is redrawn inside the block."""
    if not isinstance(reporter, RichReporter):
        yield Lines(reporter, workers)
        return
    from rich.live import Live as Redrawn

    live = Live(reporter, workers)
    with Redrawn(live, console=reporter.console, refresh_per_second=1, transient=True, redirect_stdout=False):
        yield live
    reporter.say(str(live.forecast))
