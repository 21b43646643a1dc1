"""What runs on a Dask worker: one node, which tells the command of its progress and hears when nobody wants it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ifsl_bench.backbone.device import keep_freed_memory
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.work import Outcome, Setting, run_node
from ifsl_bench.common.progress import Reporter, Stage

EVERY = 0.5  # seconds between two messages of progress


class Abandoned(BaseException):
    """Nobody waits for the node any more: the command has ended, or the scheduler is gone."""


class Telling(Reporter):
    """Sends what is reported to whoever listens to a topic of the scheduler."""

    def __init__(self, worker: Any, task: str, topic: str, key: str) -> None:
        self.worker, self.task, self.topic, self.key = worker, task, topic, key

    def tell(self, kind: str, text: str = "", **more: Any) -> None:
        self.check()
        self.worker.log_event(self.topic, asdict(Event(self.key, kind, text, **more)))

    def check(self) -> None:
        """Raises :class:`Abandoned` where the node is not wanted any more."""
        state = self.worker.state.tasks.get(self.task)
        if state is None or state.state == "cancelled" or self.worker.status.name != "running":
            raise Abandoned

    def say(self, text: str) -> None:
        self.tell("say", text)

    def warn(self, text: str) -> None:
        self.tell("warn", text)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Stage]:
        self.tell("stage", title, total=total, done=done)
        yield _Told(self, total, done)
        self.tell("end", title)


class _Told(Stage):
    def __init__(self, reporter: Telling, total: int, done: int) -> None:
        self.reporter, self.total, self.done = reporter, total, done
        self.last = time.monotonic()

    def advance(self, amount: int = 1, **figures: float) -> None:
        self.done += amount
        if time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            self.reporter.tell("advance", done=self.done, total=self.total, figures=figures)


def run_on_worker(packed: bytes, setting: Setting, share: int, topic: str) -> Outcome:
    """Runs a node, pickled, as :func:`ifsl_bench.campaigns.work.run_node` does."""
    from distributed import get_worker
    from distributed.worker import thread_state

    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":  # Dask's own doing, where a nanny starts the worker
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    keep_freed_memory()
    node = pickle.loads(packed)
    try:
        return run_node(node, setting, share, Telling(get_worker(), thread_state.key, topic, node.key))
    except Abandoned:
        return Outcome(node.key, "lost", "nobody waits for it")
