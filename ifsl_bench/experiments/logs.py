"""The log of a work item, a text file under ``logs`` in the home folder, which ``status`` reads.

Each line has the time, a kind and a text. A run of the item begins with ``begun HOST WRITER TITLE`` and ends with
``done``, ``failed`` or ``interrupted``; in between its reports have the kind ``-``.
"""

from __future__ import annotations

import platform
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from ifsl_bench.utils.errors import UserError, escape_controls, format_error, is_out_of_memory
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import is_process_alive, make_process_name
from ifsl_bench.utils.progress import LogReporter, ProgressTask, Reporter

WRITE_INTERVAL_SECONDS = 2.0  # seconds from one line of progress to the next
SILENT_SECONDS = 120.0  # seconds without a line, after which a process on another machine may have been killed
BEGUN, DONE, FAILED, INTERRUPTED, RUNNING = "begun", "done", "failed", "interrupted", "running"


def log_path(home: Paths, key: str) -> Path:
    """Return the path of a log.

    Args:
        home: with the folder of logs.
        key: of the work item.
    """
    return home.logs / f"{key}.log"


def count_resumed_stages(path: Path, begin: int = 0) -> int:
    """Return from how many different checkpoints the stages of an item have gone on.

    Args:
        path: of the log.
        begin: the first byte to read.
    """
    try:
        return len(set(re.findall(rb" - (.* \(resumed at \d+ of \d+\))", path.read_bytes()[begin:])))
    except OSError:
        return 0


@dataclass(frozen=True)
class LogState:
    """The last run of a work item, read from its log.

    Attributes:
        state_name: "running", "failed", "done" or "interrupted", also by a signal that left no line.
        host_name: the machine that runs it.
        start_time: the time when it began.
        last_line: its last line.
        log_path: the log.
        ended_without_line: whether its process is gone and left no line on the end, as after SIGKILL.
    """

    state_name: str
    host_name: str
    start_time: str
    last_line: str
    log_path: Path
    ended_without_line: bool = False


def read_log(path: Path) -> LogState | None:
    """Read the last run from a log; None where there is no log, or no beginning in it."""
    try:
        text = path.read_bytes().decode(errors="replace")
        silent = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
    lines = [parts for line in text.split("\n") if len(parts := line.split(" ", 2)) == 3]
    begun = next((parts for parts in reversed(lines) if parts[1] == BEGUN and parts[2].count(" ") >= 2), None)
    if begun is None:
        return None
    host, writer, _ = begun[2].split(" ", 2)
    state, line = lines[-1][1], escape_controls(lines[-1][2].strip()) if lines[-1] is not begun else ""
    has_end = state in (DONE, FAILED, INTERRUPTED)
    if not has_end:
        state = INTERRUPTED if is_process_alive(writer) is False else RUNNING
        if state == RUNNING and silent > SILENT_SECONDS:
            line += f" (no line for {silent / 60:.0f} min: it may have been killed)"
    if state in (FAILED, INTERRUPTED):
        line = f"{state}: {line}"
    ended_without_line = state == INTERRUPTED and not has_end
    return LogState(state, escape_controls(host), escape_controls(begun[0]), line, path, ended_without_line)


class LogFile(LogReporter):
    """Lines with time and kind in a file; none where it cannot be written, as on a disk that is full or read-only."""

    def __init__(self, path: Path) -> None:
        super().__init__(every=WRITE_INTERVAL_SECONDS)
        self.file: IO[bytes] | None = None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab")  # noqa: SIM115
            if self.file.tell():  # perhaps in the middle of a line
                self.file.write(b"\n")

    def write_line(self, text: str, kind: str = "-") -> None:
        if self.file:
            with suppress(OSError):  # where the disk is full, the stage's own writes fail too
                now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
                self.file.write(f"{now} {kind} {escape_controls(text)}\n".encode(errors="replace"))
                self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file:
            with suppress(OSError):
                self.file.close()


class Log(Reporter):
    """Writes reports to the log of the item that runs, and hands them on.

    Attributes:
        to: the reporter that receives them, too.
        warnings: of the item.
        resumed: a line for each of its stages that goes on from a checkpoint.
    """

    def __init__(self, home: Paths, to: Reporter) -> None:
        self.home, self.to, self.start = home, to, 0.0
        self.warnings: list[str] = []
        self.resumed: list[str] = []

    @contextmanager
    def open_log_of_item(self, key: str, title: str) -> Iterator[None]:
        """Open the log of an item while it runs; an interruption is a line of it.

        What ends a process at once, as SIGKILL or ``os._exit`` in a method, prints nothing: the next run says so.

        Args:
            key: of the item.
            title: of the item, for people.
        """
        self.start, self.warnings, self.resumed = time.monotonic(), [], []
        last_run = read_log(log_path(self.home, key))
        self.file = LogFile(log_path(self.home, key))
        self.file.write_line(f"{platform.node() or '-'} {make_process_name()} {title}", BEGUN)
        if last_run and last_run.ended_without_line:
            self.say(f"{title}: the last run of it ended without a word: it was killed, or a method ended the process")
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.file.write_line(
                "Ctrl-C or a signal" if interrupted else f"{error or type(error).__name__}", INTERRUPTED
            )
            raise
        finally:
            self.file.close()

    def log_end_of_item(self, error: Exception | None = None) -> None:
        """Write how the item ended, with the traceback of an unexpected error."""
        if error and not (isinstance(error, (UserError, OSError)) or is_out_of_memory(error)):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.file.write_line(line)
        self.file.write_line(
            format_error(error) if error else f"in {self.seconds_since_start:.1f} s", FAILED if error else DONE
        )

    @property
    def seconds_since_start(self) -> float:
        """The time since the item began."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        self.file.say(text)
        self.to.say(text)

    def warn(self, text: str) -> None:
        self.file.warn(text)
        self.warnings.append(escape_controls(text))
        self.to.warn(text)

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        if done:
            self.resumed.append(f"{title}: resumed at {done:,} of {total:,}")

        def advance(amount: int, figures: Mapping[str, float]) -> None:
            written.advance(amount, **figures)
            shown.advance(amount, **figures)

        with self.file.report_stage(title, total, done) as written, self.to.report_stage(title, total, done) as shown:
            yield ProgressTask(title, total, done, advance)
