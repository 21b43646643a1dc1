"""Progress of long jobs: stages with the time that is left, remarks, warnings."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from ifsl_bench.utils.errors import escape_controls

LEARNING_RATE = "learning rate"  # comes from the schedule: shown in logs, not beside the bar
METRICS_TEXT_WIDTH = len("loss 0.1234  accuracy 100.00%")  # the most that most stages show beside their bar
MIN_BAR_WIDTH = 6  # columns of the shortest bar


class ConsumerDisconnected(BaseException):
    """Raised where the reader of the progress is gone, so that the work ends, as at Ctrl-C."""


def format_metrics(figures: Mapping[str, float]) -> list[str]:
    """Format figures for people; an accuracy is in percent."""
    return [
        f"{key} {value:.2f}%" if key.endswith("accuracy") else f"{key} {value:.4g}"
        for key, value in figures.items()
        if key != LEARNING_RATE
    ]


class ProgressTask:
    """A running stage; ``advance`` it as work gets done.

    Attributes:
        done: units of ``total``, with the units of an earlier run.
        figures: the last loss, accuracy in percent, ...

    Args:
        on_advance: called at each advance with the number of units and its figures.
    """

    def __init__(
        self,
        title: str = "",
        total: int = 0,
        done: int = 0,
        on_advance: Callable[[int, Mapping[str, float]], None] = lambda amount, figures: None,
    ) -> None:
        self.title, self.total, self.done, self._on_advance = title, total, done, on_advance
        self.figures: dict[str, float] = {}

    def advance(self, amount: int = 1, **figures: float) -> None:
        """Record that ``amount`` units are done; ``figures`` are shown next to the bar."""
        self.done += amount
        self.figures |= figures
        self._on_advance(amount, figures)


class Reporter:
    """The default of the library, and the interface of the others: silent, but warnings become Python's."""

    def say(self, text: str) -> None:
        """Report a remark on the work."""

    def warn(self, text: str) -> None:
        """Report what the user should know even in a quiet run."""
        warnings.warn(text, stacklevel=2)

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Report a stage of work.

        Args:
            title: of the stage.
            total: number of its units.
            done: how many of these an earlier run has finished.
        """
        yield ProgressTask()


class NullReporter(Reporter):
    """A reporter without any output, for a process whose parent reports."""

    def warn(self, text: str) -> None:
        pass


class LogReporter(Reporter):
    """Plain lines, for logs and terminals that cannot redraw: one a stage, and one every ``every`` seconds."""

    def __init__(self, out: IO[str] | None = None, every: float = 10.0, verbose: bool = True) -> None:
        self.out, self.every, self.verbose = out or sys.stderr, every, verbose

    def write_line(self, text: str) -> None:
        """Write a line; raise :class:`ConsumerDisconnected` if its reader is gone."""
        try:
            print(text, file=self.out, flush=True)
        except ConnectionError as error:
            raise ConsumerDisconnected("its reader is gone") from error

    def say(self, text: str) -> None:
        if self.verbose:
            self.write_line(escape_controls(text))

    def warn(self, text: str) -> None:
        self.write_line(f"warning: {escape_controls(text)}")

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        if not self.verbose:
            yield ProgressTask()
            return
        start = last = time.monotonic()
        since, then = 0.0, done  # when the first units were done, and how many: what compiles comes before them

        def on_advance(amount: int, figures: Mapping[str, float]) -> None:
            nonlocal last, since, then
            now = time.monotonic()
            if not since:
                since, then = now, stage.done
            if now - last >= self.every:
                last, pace = now, (now - since) / max(1, stage.done - then)
                left = f", {pace * (total - stage.done):.0f} s left" if stage.done > then else ""
                self.write_line(f"  {stage.title}: {stage.done}/{total}{left}{_format_metrics_suffix(stage)}")

        stage = ProgressTask(escape_controls(title), total, done, on_advance)
        self.write_line(f"{stage.title} ..." if not done else f"{stage.title} (resumed at {done} of {total}) ...")
        yield stage
        self.write_line(f"{stage.title}: done in {time.monotonic() - start:.1f} s{_format_metrics_suffix(stage)}")


def _format_metrics_suffix(stage: ProgressTask) -> str:
    return "".join(f"  {figure}" for figure in format_metrics(stage.figures))


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def default_reporter() -> Reporter:
    """Return the reporter for this process: bars in a terminal or a notebook that can draw them, lines elsewhere."""
    from importlib.util import find_spec

    from rich.console import Console

    draws = Console().is_jupyter and find_spec("ipywidgets") is not None
    return RichReporter() if draws or sys.stderr.isatty() else LogReporter()


class RichReporter(Reporter):
    """Redrawn progress bars with elapsed and remaining time, for a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(escape_controls(text), markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {escape_controls(text)}", markup=False, style="yellow")

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        title = escape_controls(title)
        if done:
            self.console.print(f"{title}: resumed at {done:,} of {total:,}", markup=False)
        room = self.console.width - (2 * len(str(total)) + 1) - len("1:23:45") - METRICS_TEXT_WIDTH - 3
        if apart := len(title) + 1 + MIN_BAR_WIDTH > room:  # on a line above
            self.console.print(title, markup=False)
        bar_width = max(MIN_BAR_WIDTH, min(24, room if apart else room - len(title) - 1))
        bar = Progress(
            *([] if apart else [TextColumn("{task.description}", markup=False)]),
            BarColumn(bar_width=bar_width),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self.console,
            refresh_per_second=4,
        )
        with bar:
            task = bar.add_task(title, total=total, completed=done, figures="")

            def on_advance(amount: int, figures: Mapping[str, float]) -> None:
                bar.update(task, advance=amount)
                if words := "  ".join(format_metrics(figures)):
                    bar.update(task, figures=words)

            yield ProgressTask(title, total, done, on_advance)
