"""The log of a stage, under ``logs`` in the home folder: a JSON object a line for each event.

The process that runs the stage writes it. The command that handed the stage out reads it meanwhile, as ``status`` does.
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
BEGUN, DONE, FAILED, INTERRUPTED, LOST = "begun", "done", "failed", "interrupted", "lost"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event in the life of a stage.

    Attributes:
        time: by the clock of the machine that ran it.
        kind: "begun", and "done", "failed" or "interrupted"; "say" and "warn"; "trace", a line of a traceback; "stage",
            a piece of work of ``total`` units, "advance" in it and its "end". "lost", which stands in no log: its
            worker died.
        text: one line: the stage's title, why it failed or was lost, what is said, the piece of work.
        done: units, those of an earlier run among them.
        figures: loss, accuracy in percent, ...
        seconds: that the stage took.
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

    @property
    def share(self) -> float:
        """The part of a piece of work that is done; 0 for other events."""
        return self.done / self.total if self.total else 0.0


def event_now(kind: str, text: str = "", **facts: Any) -> Event:
    """An event that happens here and now; its text becomes one line."""
    return Event(datetime.now(UTC).replace(microsecond=0), kind, one_line(text), **facts)


_decode = msgspec.json.Decoder(Event).decode


def log_path(home: Paths, key: str) -> Path:
    """The log of the node of that key."""
    return home.logs / f"{key}.log"


class Tail:
    """Reads a log from a byte on, by default what is added from now on."""

    def __init__(self, path: Path, read: int | None = None) -> None:
        self.path, self.read = path, read or 0
        with suppress(OSError):
            self.read = path.stat().st_size if read is None else read

    def events(self) -> list[Event]:
        """Returns the events since the last call, without lines that a process has died in the middle of.

        Opens the log anew: network file systems show news only then.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.read)
                content = file.read()
        except OSError:
            return []
        lines = content[: content.rfind(b"\n") + 1]
        self.read += len(lines)
        events = []
        for line in lines.splitlines():
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                events.append(_decode(line))
        return events


class Log(Reporter):
    """Writes what the stage that runs reports to the stage's log, and hands it on.

    Where it cannot be written, as in a home on a read-only disk, there is none.

    Attributes:
        to: whoever is to hear at the time.
    """

    def __init__(self, home: Paths, to: Reporter) -> None:
        self.home, self.to, self.start = home, to, 0.0
        self.file: IO[bytes] | None = None

    @contextmanager
    def of(self, key: str, title: str) -> Iterator[None]:
        """Inside, the node of that key runs; an interruption is an event of its log."""
        path, self.start = log_path(self.home, key), time.monotonic()
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

    def write(self, kind: str, text: str = "", **facts: Any) -> Event:
        """Writes an event to the log alone, and returns it."""
        event = event_now(kind, text, **facts)
        if self.file is not None:
            with suppress(OSError):  # a full disk is told by the stage's own writes
                self.file.write(msgspec.json.encode(event) + b"\n")
                self.file.flush()
        return event

    def end(self, error: Exception | None = None) -> Event:
        """Writes how a stage ended, with the traceback of an error where a person cannot do without it."""
        if error and not isinstance(error, (UserError, OSError, MemoryError)):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.write("trace", line)
        seconds = time.monotonic() - self.start
        return self.write(FAILED, format_error(error), seconds=seconds) if error else self.write(DONE, seconds=seconds)

    def say(self, text: str) -> None:
        self.write("say", text)
        self.to.say(text)

    def warn(self, text: str) -> None:
        self.write("warn", text)
        self.to.warn(text)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        last = 0.0  # time of the last line

        def hear(amount: int, figures: Mapping[str, float]) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= EVERY:
                last = now
                self._write_stage("advance", stage)
            shown.advance(amount, **figures)

        with self.to.stage(title, total, done) as shown:
            stage = ProgressTask(title, total, done, hear)
            self._write_stage("stage", stage)
            yield stage
            self._write_stage("end", stage)

    def _write_stage(self, kind: str, stage: ProgressTask) -> None:
        figures = {name: float(value) for name, value in stage.figures.items() if math.isfinite(value)}
        self.write(kind, stage.title, done=stage.done, total=stage.total, figures=figures)
