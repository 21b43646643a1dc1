"""One log file a node, under ``logs`` in the home: plain lines with the time, loss and accuracy.

Its first line says who runs it and since when, its last one how it ended; a node that is run again appends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ifsl_bench.common.errors import one_line
from ifsl_bench.common.files import Home
from ifsl_bench.common.owners import writer
from ifsl_bench.common.progress import LogReporter, Reporter, Stage, Unheard

EVERY = 10.0  # seconds from one line of progress to the next


def log_path(home: Home, key: str) -> Path:
    """The log of the node of that key."""
    return home.logs / f"{key}.log"


class _Lines(LogReporter):
    def line(self, text: str) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with contextlib.suppress(OSError):  # a full disk is told by the stage's own writes
            self.out.write(f"{now} {text}\n")
            self.out.flush()


class Log(Reporter):
    """The log of a node that is run, and a reporter that hears the same.

    Where it cannot be written, as in a home on a read-only disk, there is none.
    """

    def __init__(self, home: Home, key: str, title: str, to: Reporter) -> None:
        self.path, self.title, self.to = log_path(home, key), title, to
        self.lines: _Lines | None = None

    def __enter__(self) -> Log:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file: IO[str] = open(self.path, "a", encoding="utf-8", errors="backslashreplace")
            self.lines = _Lines(file, EVERY)
            by = f"process {os.getpid()} on {platform.node()} ({writer()})"
            self.lines.line(f"begun by {by}: {one_line(self.title)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.lines:
            if kind is not None:
                plain = {KeyboardInterrupt: "interrupted", Unheard: f"interrupted: {error}"}
                self.lines.line(plain.get(kind, f"stopped: {kind.__name__}: {error}"))
            with contextlib.suppress(OSError):
                self.lines.out.close()
            self.lines = None

    def write(self, text: str) -> None:
        """Lines for the log alone."""
        if self.lines:
            for line in text.rstrip().splitlines():
                self.lines.line(line)

    def say(self, text: str) -> None:
        self.write(one_line(text))
        with _listened_to():
            self.to.say(text)

    def warn(self, text: str) -> None:
        self.write(f"warning: {one_line(text)}")
        with _listened_to():
            self.to.warn(text)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Stage]:
        with contextlib.ExitStack() as held:
            with _listened_to():
                told = [held.enter_context(to.stage(title, total, done)) for to in (self.lines, self.to) if to]

            class Both(Stage):
                def advance(self, amount: int = 1, **figures: float) -> None:
                    with _listened_to():
                        for stage in told:
                            stage.advance(amount, **figures)

            yield Both()  # what goes wrong here is the stage's own
            with _listened_to():
                held.close()


@contextmanager
def _listened_to() -> Iterator[None]:
    """Turns the loss of the connection to who listens, and nothing else, into :class:`Unheard`."""
    try:
        yield
    except ConnectionError as error:
        raise Unheard("nobody listens") from error
