"""What a person sees of many workers: one live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ifsl_bench.campaigns.forecast import Forecast, Running, in_words
from ifsl_bench.campaigns.graph import Graph, Node
from ifsl_bench.campaigns.schedule import Event, Watch
from ifsl_bench.campaigns.work import Outcome
from ifsl_bench.common.errors import one_line
from ifsl_bench.common.progress import Reporter, RichReporter, Stage

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

NARROW = 72  # columns of a terminal below which bars are left out
SUMMED = 1.0  # seconds from one look at the whole run to the next, which may have thousands of nodes


class Told(Watch):
    """Says what fails, where nothing else has to be said, since stages speak for themselves."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        if again:
            self.reporter.warn(f"{node}: {outcome.said}; it is run again, from its last checkpoint")
        elif outcome.how != "done":
            self.reporter.say(f"{node} failed: {outcome.said}")  # and once more in the list at the end


class Lines(Told):
    """Says it all to a reporter that writes lines; what several workers warn of, once."""

    def __init__(self, reporter: Reporter, workers: int) -> None:
        super().__init__(reporter)
        self.workers = workers
        self.forecast = Forecast(Graph((), {}), workers)
        self.warned: set[str] = set()
        self.shown: dict[str, tuple[AbstractContextManager[Stage], Stage, int]] = {}

    def planned(self, graph: Graph) -> None:
        self.forecast = Forecast(graph, self.workers)

    def begun(self, node: Node) -> None:
        self.forecast.begun(node)

    def heard(self, event: Event) -> None:
        one = self.forecast.heard(event)
        if event.kind == "say":
            self.reporter.say(event.text)
        elif event.kind == "warn":
            if event.text not in self.warned:
                self.warned.add(event.text)
                self.reporter.warn(event.text)
        elif one is not None:
            self.progress(event, one)

    def progress(self, event: Event, one: Running) -> None:
        """A stage goes on."""
        if event.kind == "stage":
            held: AbstractContextManager[Stage] = self.reporter.stage(one.title, event.total, event.done)
            self.shown[event.key] = held, held.__enter__(), event.done
        elif event.key in self.shown:
            held, stage, done = self.shown[event.key]
            stage.advance(event.done - done, **event.figures)
            self.shown[event.key] = held, stage, event.done
            if event.kind == "end":
                del self.shown[event.key]
                held.__exit__(None, None, None)

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        self.shown.pop(node.key, None)  # of one that failed nobody says that it is done
        self.forecast.ended(node, outcome, again)
        super().ended(node, outcome, again)
        if outcome.how == "done" and node.last:
            self.reporter.say(self.summary())

    def summary(self) -> str:
        """Where the whole run is."""
        if not self.forecast.graph.jobs:
            return "looking for what is done already"
        left = self.forecast.seconds() if self.forecast.left else None
        return self.forecast.jobs + (f", about {in_words(left)} left" if left is not None else "")


class Live(Lines):
    """A line for the whole run, and one for each worker, redrawn."""

    def __init__(self, reporter: RichReporter, workers: int) -> None:
        super().__init__(reporter, workers)
        self.start = self.summed = time.monotonic()
        self.sum = ""

    def progress(self, event: Event, one: Running) -> None:
        pass  # drawn from the forecast

    def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
        self.forecast.ended(node, outcome, again)
        Told.ended(self, node, outcome, again)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, wide = time.monotonic(), options.max_width >= NARROW
        passed = int(now - self.start)
        if not self.sum or now - self.summed > SUMMED:
            self.sum, self.summed = self.summary(), now
        yield Text(f"{self.sum}  {passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}",
                   style="bold", no_wrap=True, overflow="ellipsis")  # fmt: skip
        running = list(self.forecast.running.values())
        rows = max(1, console.size.height - 3)
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        if wide:
            table.add_column(width=12)
        table.add_column(justify="right", no_wrap=True)
        if wide:
            table.add_column(no_wrap=True, overflow="ellipsis", max_width=28)
        for one in running[:rows]:
            left = one.left(now)
            state = f"{100 * one.done // one.total}%" if one.total > 0 else ""
            state += f" {in_words(left)}" if left is not None else ""
            figures = " ".join(f"{key} {value:.4g}" for key, value in one.figures.items())
            bar = ProgressBar(one.total, one.done) if one.total > 0 else ""
            cells = [
                Text(one_line(one.title)),
                *([bar] if wide else []),
                Text(state),
                *([Text(figures)] if wide else []),
            ]
            table.add_row(*cells)
        yield table
        if len(running) > rows:
            yield Text(f"and {len(running) - rows} more")


@contextmanager
def watching(reporter: Reporter, workers: int) -> Iterator[Watch]:
    """Who is told of a run's progress, by so many workers: what redraws itself does so inside."""
    if not isinstance(reporter, RichReporter):
        yield Lines(reporter, workers)
        return
    from rich.live import Live as Redrawn

    live = Live(reporter, workers)
    with Redrawn(live, console=reporter.console, refresh_per_second=4, transient=True, redirect_stdout=False):
        yield live
    reporter.say(live.summary())
