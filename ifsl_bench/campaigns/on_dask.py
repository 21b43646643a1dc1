"""What runs on a Dask worker: one node, which tells the command of its progress and hears when nobody wants it."""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.device import keep_freed_memory
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.served import Speaker
from ifsl_bench.campaigns.work import Outcome, Setting, plainly, run_node
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home, write_bytes
from ifsl_bench.common.owners import PARTIAL
from ifsl_bench.common.progress import Unheard

PROBE = 1 << 20  # bytes written to see whether a disk is full
ALONE = threading.Lock()  # generators and threads are a process's: of several commands one has it at a time
SICK = "its worker cannot write:"  # begins what is said of a node that is better handed to another worker


class _Topic:
    """Where a node's events go: to whoever listens to a topic of the scheduler."""

    def __init__(self, worker: Any, task: str, topic: str) -> None:
        self.worker, self.task, self.topic = worker, task, topic

    def check(self) -> None:
        """Raises :class:`Unheard` where nobody wants the node any more, or the scheduler is gone."""
        state = self.worker.state.tasks.get(self.task)
        if state is None or state.state == "cancelled" or self.worker.status.name != "running":
            raise Unheard("nobody listens")

    def send(self, event: Event) -> None:
        """Raises what :meth:`check` does."""
        self.check()
        self.worker.log_event(self.topic, asdict(event))


def run_on_worker(packed: bytes, key: str, setting: Setting, share: int, topic: str) -> Outcome:
    """Runs a node, pickled, as :func:`ifsl_bench.campaigns.work.run_node` does."""
    from distributed import get_worker

    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":  # Dask's own doing, where a nanny starts the worker
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    keep_freed_memory()
    worker = get_worker()
    try:
        node = pickle.loads(packed)
    except Exception as error:  # a method that is not there, or not as it was
        return Outcome(key, "failed", f"worker {worker.address} cannot load it: {plainly(error)}")
    line = _Topic(worker, str(worker.get_current_task()), topic)
    try:
        while not ALONE.acquire(timeout=1):  # a stage of another command, or one that was given up and has not noticed
            line.check()
        try:
            outcome = run_node(node, setting, share, Speaker(line, key, threading.Lock()))
        finally:
            ALONE.release()
    except Unheard:
        return Outcome(key, "lost", "nobody waits for it")
    if outcome.how == "failed" and (problem := cannot_write(setting.home)):
        return replace(outcome, how="lost", said=f"{SICK} {problem}")
    return outcome


def cannot_write(home: Home) -> str:
    """Why this process cannot write to the home, or to its temporary folder; "" where it can.

    A worker whose disk is full fails faster than others work: it would get one node after the other.
    """
    for folder in (home.cache, Path(tempfile.gettempdir())):
        probe = folder / f"{PARTIAL}probe-{platform.node()}-{os.getpid()}"
        try:
            write_bytes(probe, bytes(PROBE))
            probe.unlink()
        except (OSError, UserError) as error:
            return plainly(error)
    return ""
