"""What a worker process of this machine does, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Protocol

import psutil

from ifsl_bench.backbone.device import keep_freed_memory
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.work import Outcome, Setting, plainly, run_node
from ifsl_bench.common.progress import Reporter, Stage, Unheard

LONG = 1 << 20  # bytes of a log that a worker begins anew
EVERY = 0.25  # seconds from one word on a stage's progress to the next


def serve(pipe: Connection, setting: Setting, share: int, number: int) -> None:
    """Runs the nodes that come through a pipe, until it ends or an empty one comes; answers None when ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, whose Ctrl-C the parent hears as well
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    print_to(setting, number)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt, Unheard):
        pipe.send(None)
        lock = threading.Lock()
        while content := pipe.recv_bytes():
            try:
                node = pickle.loads(content)
            except Exception as error:  # a method that is not there, or not as it was
                pipe.send(Outcome("", "failed", f"a worker cannot load it: {plainly(error)}"))
                continue
            outcome = run_node(node, setting, share, Speaker(pipe, node.key, lock))
            with lock:
                pipe.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # stages have closed what they had open; to take libraries apart would cost seconds at Ctrl-C


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What a stage has open is closed on the way out, as at Ctrl-C."""
    raise KeyboardInterrupt


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(1)


def print_to(setting: Setting, number: int) -> None:
    """What methods and libraries print goes to a file: standard output is for tables.

    It goes behind what is there, which may be of another run that is not over, until that is long.
    """
    try:
        path = setting.home.logs / "workers" / f"{number}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(target).st_size > LONG:
            os.ftruncate(target, 0)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


class Line(Protocol):
    """What leads to whoever listens."""

    def send(self, event: Event, /) -> None: ...


class Speaker(Reporter):
    """Tells the parent; progress not more often than every ``EVERY`` seconds."""

    def __init__(self, pipe: Line, key: str, lock: threading.Lock) -> None:
        self.pipe, self.key, self.lock = pipe, key, lock

    def _send(self, event: Event) -> None:
        with self.lock:
            self.pipe.send(event)

    def say(self, text: str) -> None:
        self._send(Event(self.key, "say", text))

    def warn(self, text: str) -> None:
        self._send(Event(self.key, "warn", text))

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Stage]:
        self._send(Event(self.key, "stage", title, done, total))
        stage = _Progress(self, title, total, done)
        yield stage
        self._send(Event(self.key, "end", title, stage.done, total, stage.figures))


class _Progress(Stage):
    def __init__(self, speaker: Speaker, title: str, total: int, done: int) -> None:
        self.speaker, self.title, self.total, self.done = speaker, title, total, done
        self.figures: dict[str, float] = {}
        self.last = 0.0

    def advance(self, amount: int = 1, **figures: float) -> None:
        self.done += amount
        self.figures |= figures
        if (now := time.monotonic()) - self.last >= EVERY:
            self.last = now
            self.speaker._send(Event(self.speaker.key, "advance", self.title, self.done, self.total, self.figures))
