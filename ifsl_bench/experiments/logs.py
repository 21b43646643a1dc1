"""The log of a piece of work, under ``logs`` in the home folder: a JSON object a line for each event.

The process that does the work writes it; ``status`` reads it.
"""

from __future__ import annotations

import math
import platform
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from ifsl_bench.utils.errors import UserError, format_error, one_line
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import process_id
from ifsl_bench.utils.progress import ProgressTask, Reporter, figures_in_words

EVERY = 2.0  # seconds from one line of progress to the next
BEGUN, DONE, FAILED, INTERRUPTED = "begun", "done", "failed", "interrupted"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a log.

    Attributes:
        time: by the clock of the machine that did the work.
        kind: "begun", and "done", "failed" or "interrupted"; "say" and "warn"; "trace", a line of a traceback; "stage",
            a piece of ``total`` units, "advance" in it and its "end".
        text: one line: the title, the error, the remark.
        done: units, including the units of an earlier run.
        figures: loss, accuracy in percent, ...
        seconds: that the work took.
        host, writer: the machine and the process, see :func:`ifsl_bench.utils.locks.process_id`.
    """

    time: datetime
    kind: str
    text: str = ""
    done: int = 0
    total: int = 0
    figures: dict[str, float] = {}
    seconds: float = 0.0
    host: str = ""
    writer: str = ""

    def __str__(self) -> str:
        if self.kind in ("stage", "advance", "end"):
            return "  ".join([f"{self.text}: {self.done}/{self.total}", *figures_in_words(self.figures)])
        if self.kind == DONE:
            return f"done in {self.seconds:.1f} s"
        prefix = {"warn": "warning: ", FAILED: "failed: ", INTERRUPTED: "interrupted: "}.get(self.kind, "")
        return prefix + self.text


_decode = msgspec.json.Decoder(Event).decode


def log_path(home: Paths, key: str) -> Path:
    """Return the path of a log.

    Args:
        home: with the folder of logs.
        key: of the work.
    """
    return home.logs / f"{key}.log"


def read_events(path: Path, begin: int = 0) -> list[Event]:
    """Read a log, without lines that a process has died in the middle of; empty where there is none.

    Args:
        path: of the log.
        begin: the first byte to read.
    """
    try:
        lines = path.read_bytes()[begin:].splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            events.append(_decode(line))
    return events


def progress(path: Path, begin: int = 0) -> float:
    """Return how far work has come: the sum of the shares of its stages that are done.

    Args:
        path: of the log.
        begin: the first byte to read.
    """
    shares: dict[str, float] = {}
    for event in read_events(path, begin):
        if event.total:
            shares[event.text] = max(shares.get(event.text, 0.0), event.done / event.total)
    return sum(shares.values())


class Log(Reporter):
    """Writes reports to the log of the work that is done, and hands them on.

    Where it cannot be written, as in a home on a read-only disk, there is none.

    Attributes:
        to: the reporter that receives them, too.
        warnings: of the work.
    """

    def __init__(self, home: Paths, to: Reporter) -> None:
        self.home, self.to, self.start = home, to, 0.0
        self.file: IO[bytes] | None = None
        self.warnings: list[str] = []

    @contextmanager
    def of(self, key: str, title: str) -> Iterator[None]:
        """Open the log of a key while the work is done; an interruption is an event of it.

        Args:
            key: of the work.
            title: of the work, for people.
        """
        path, self.start, self.warnings = log_path(self.home, key), time.monotonic(), []
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab")  # noqa: SIM115
            if self.file.tell():  # perhaps in the middle of a line
                self.file.write(b"\n")
        self.write(BEGUN, title, host=platform.node(), writer=process_id())
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.write(INTERRUPTED, "Ctrl-C or a signal" if interrupted else f"{error or type(error).__name__}")
            raise
        finally:
            if self.file:
                with suppress(OSError):
                    self.file.close()
                self.file = None

    def write(self, kind: str, text: str = "", **facts: Any) -> None:
        """Write an event to the log alone.

        Args:
            kind: of event.
            text: becomes one line.
            facts: other attributes of the event.
        """
        event = Event(datetime.now(UTC).replace(microsecond=0), kind, one_line(text), **facts)
        if self.file is not None:
            with suppress(OSError):  # a full disk is told by the work's own writes
                self.file.write(msgspec.json.encode(event) + b"\n")
                self.file.flush()

    def end(self, error: Exception | None = None) -> None:
        """Write how the work ended, with the traceback of an error where a person cannot do without it."""
        if error and not isinstance(error, (UserError, OSError, MemoryError)):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.write("trace", line)
        kind, text = (FAILED, format_error(error)) if error else (DONE, "")
        self.write(kind, text, seconds=self.seconds)

    @property
    def seconds(self) -> float:
        """The time since the work began."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        self.write("say", text)
        self.to.say(text)

    def warn(self, text: str) -> None:
        self.write("warn", text)
        self.warnings.append(one_line(text))
        self.to.warn(text)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        last = 0.0  # time of the last line

        def advance(amount: int, figures: Mapping[str, float]) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= EVERY:
                last = now
                self._write_stage("advance", stage)
            shown.advance(amount, **figures)

        with self.to.stage(title, total, done) as shown:
            stage = ProgressTask(title, total, done, advance)
            self._write_stage("stage", stage)
            yield stage
            self._write_stage("end", stage)

    def _write_stage(self, kind: str, stage: ProgressTask) -> None:
        figures = {name: float(value) for name, value in stage.figures.items() if math.isfinite(value)}
        self.write(kind, stage.title, done=stage.done, total=stage.total, figures=figures)
