"""What runs on a Dask worker: one node, which tells the command of its progress and hears when nobody wants it."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import asdict
from typing import Any

from ifsl_bench.backbone.device import keep_freed_memory
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.served import Speaker
from ifsl_bench.campaigns.work import Outcome, Setting, plainly, run_node


class _Topic:
    """Where a node's events go: to whoever listens to a topic of the scheduler."""

    def __init__(self, worker: Any, task: str, topic: str) -> None:
        self.worker, self.task, self.topic = worker, task, topic

    def send(self, event: Event) -> None:
        """Raises :class:`BrokenPipeError` where nobody wants the node any more, or the scheduler is gone."""
        state = self.worker.state.tasks.get(self.task)
        if state is None or state.state == "cancelled" or self.worker.status.name != "running":
            raise BrokenPipeError("nobody listens")
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
    try:
        return run_node(
            node, setting, share, Speaker(_Topic(worker, str(worker.get_current_task()), topic), key, threading.Lock())
        )
    except BrokenPipeError:
        return Outcome(key, "lost", "nobody waits for it")
