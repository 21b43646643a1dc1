"""What a person sees of many workers: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ifsl_bench.campaigns.forecast import Forecast
from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.logs import Event
from ifsl_bench.campaigns.scheduler import Watch
from ifsl_bench.campaigns.work import Outcome
from ifsl_bench.common.progress import Reporter, RichReporter, Stage
from ifsl_bench.running.stages import OfJob

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Told(Watch):
    """Says what fails, where nothing else has to be said, since stages speak for themselves."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        if again:
            self.reporter.warn(f"{node}: {outcome.why}; it is run again, from its last checkpoint")
        elif outcome.how != "done":
            self.reporter.say(f"{node} failed: {outcome.why}")  # and once more in the list at the end


class Live(Told):
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
    """What a node is at, so that several at once can be told apart."""
    if isinstance(node.stage, OfJob) and text.startswith("meta-training"):
        return f"meta-training {node.stage.job}"
    return text


@contextmanager
def watching(reporter: Reporter, workers: int) -> Iterator[Watch]:
    """Who is told of a run's progress, by so many workers: what redraws itself does so inside."""
    if not isinstance(reporter, RichReporter):
        yield Lines(reporter, workers)
        return
    from rich.live import Live as Redrawn

    live = Live(reporter, workers)
    with Redrawn(live, console=reporter.console, refresh_per_second=1, transient=True, redirect_stdout=False):
        yield live
    reporter.say(str(live.forecast))
