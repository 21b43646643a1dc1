"""Worker processes that work items are computed in: of loky on this machine, or of a Dask cluster.

A worker has one item at a time, since random numbers and threads of PyTorch belong to a process. An item whose
worker dies is tried again on another one, and goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import re
import signal
import sys
import threading
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ifsl_bench.backbones.device import keep_freed_memory
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import Log, log_path, progress
from ifsl_bench.experiments.runner import FAILED, LOST, Backend, WorkItem, WorkOutcome, run_item
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils import threads
from ifsl_bench.utils.errors import UserError, format_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter, Reporter

if TYPE_CHECKING:
    import loky

TRIES = 3  # of an item whose worker dies, without coming further
FURTHER = 0.01  # share of a piece of work that an attempt has to add for the tries to be counted from the first again
LOOK = 1.0  # seconds between two looks at the workers


def visible_name(device: int) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES has for the device of a number."""
    if (there := torch.cuda.device_count()) <= device:
        raise UserError(f"--devices {device}: PyTorch sees {there} CUDA devices here, numbered from 0")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[device].strip() if names else str(device)


def check_sendable(jobs: Iterable[Job]) -> None:
    """Raise :class:`UserError` where another process could not load a job's method."""
    for method, job in {job.method: job for job in jobs}.items():
        why = ""
        if method.__module__ == "__main__" and not job.chosen.file:
            why = "is defined in a notebook or script, where other processes cannot find it"
        try:
            pickle.dumps(job)
        except Exception as error:
            why = why or f"cannot be handed to other processes ({format_error(error)})"
        if why:
            raise UserError(
                f"method {job.name!r} {why}: move it to a file (file.py:{method.__name__}), or run with --jobs 1"
            )


# -- one worker process


def run_packed(
    content: bytes, packed_work: bytes, cores: int, share: int, reporter: Reporter | None = None
) -> WorkOutcome:
    """Run a pickled work item in this process.

    Args:
        content: the item.
        packed_work: the workspace, without its reporter.
        cores: threads of work that takes a whole machine, see :mod:`ifsl_bench.utils.threads`.
        share: threads that this process may keep busy with other work.
        reporter: receives the progress, as does the item's log.
    """
    try:
        item: WorkItem = pickle.loads(content)
    except Exception as error:  # a method that is not there, or not as it was
        return WorkOutcome(FAILED, f"a worker cannot load it: {format_error(error)}")
    threads.limit(cores, share)
    work, log = _opened(packed_work)
    log.to = reporter or NullReporter()
    try:
        return replace(run_item(item, work, log), error=None)
    finally:
        sys.stdout.flush()


@lru_cache(maxsize=1)
def _opened(packed_work: bytes) -> tuple[Workspace, Log]:
    """The workspace of a run, kept from one item to the next with its open features, and its reporter."""
    work, _ = pickle.loads(packed_work)
    log = Log(work.home, NullReporter())
    return replace(work, reporter=log), log


def print_to(home: Paths, name: str) -> None:
    """Send what methods and libraries print in this process to a file: standard output is for tables.

    Args:
        home: with the folder of logs.
        name: of the worker; another run that is not over may write to the same file.
    """
    try:
        path = home.logs / "workers" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside; what is started inside never hears it."""
    hears = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if hears else None
    try:
        yield
    finally:
        if hears:
            signal.signal(signal.SIGINT, before)


# -- pools of workers


@dataclass(eq=False)
class Worker:
    """A process that runs one item at a time.

    Attributes:
        host: its machine; an item that takes a whole machine shares it with no other.
        threads: that it may keep busy.
        device: the name of its accelerator in CUDA_VISIBLE_DEVICES; "" where it sees what this process sees.
        item, future: what it runs; None while it is idle.
    """

    name: str
    host: str = ""
    threads: int = 1
    device: str = ""
    item: WorkItem | None = None
    future: Any = None


class _Attempts:
    """How often an item was begun, since an attempt came further than those before it."""

    def __init__(self, log: Path) -> None:
        self.log, self.begins_at = log, log.stat().st_size if log.exists() else 0
        self.count, self.reached = 0, 0.0

    def has_another(self) -> bool:
        """Count from the first again if the last attempt came further than those before it.

        A job of a queueing system that ends by its time limit, again and again, goes on from a later checkpoint each
        time.
        """
        if (reached := progress(self.log, self.begins_at)) >= self.reached + FURTHER:
            self.count, self.reached = 1, reached
        return self.count < TRIES


class WorkerPool(Backend):
    """Workers that take items in order; the base of both kinds."""

    parallel = True

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.run_id = reporter, uuid.uuid4().hex
        self.workers: list[Worker] = []
        self._warned: set[str] = set()

    @abstractmethod
    def _send(self, worker: Worker, content: bytes, packed_work: bytes) -> Any:
        """Start an item on a worker; returns a future of its outcome."""

    @abstractmethod
    def _lost(self, worker: Worker, error: Exception) -> WorkOutcome:
        """The outcome of an item whose future has an error in place of one."""

    def look(self) -> None:
        """Find out which workers there are; called every second or so."""

    def run(self, items: Iterator[WorkItem], work: Workspace) -> Iterator[tuple[WorkItem, WorkOutcome]]:
        packed_work = pickle.dumps((replace(work, reporter=NullReporter()), self.run_id))
        pending: deque[WorkItem] = deque()
        attempts: dict[str, _Attempts] = {}
        ends: queue.SimpleQueue[Worker] = queue.SimpleQueue()

        def first() -> WorkItem | None:
            pending.extend(() if pending else itertools.islice(items, 1))
            return pending[0] if pending else None

        while first() or self._busy():
            self.look()
            for worker in [worker for worker in self.workers if worker.item is None]:
                if (item := first()) and self._has_room(worker, item):
                    attempt = attempts.setdefault(item.key, _Attempts(log_path(work.home, item.key)))
                    attempt.count += 1
                    self._begin(worker, pending.popleft(), packed_work)
                    worker.future.add_done_callback(lambda _, worker=worker: ends.put(worker))
            with contextlib.suppress(queue.Empty):
                item, outcome = self._end(ends.get(timeout=LOOK))
                self._warn(outcome.warnings)
                if outcome.kind != LOST:
                    yield item, outcome
                elif attempts[item.key].has_another():
                    self.reporter.warn(f"{item.title}: {outcome.text}; it is run again, from its last checkpoint")
                    pending.append(item)
                else:
                    yield item, WorkOutcome(FAILED, f"{outcome.text}, {TRIES} times")

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.item]

    def _has_room(self, worker: Worker, item: WorkItem) -> bool:
        there = [other.item for other in self._busy() if other.host == worker.host and other.item]
        return not there or not (item.whole or any(other.whole for other in there))

    def _begin(self, worker: Worker, item: WorkItem, packed_work: bytes) -> None:
        worker.item = item
        self.reporter.say(f"{item.title} ...")
        try:
            worker.future = self._send(worker, pickle.dumps(replace(item, jobs=[], renews=())), packed_work)
        except (OSError, BrokenExecutor) as error:  # no memory for another process, or one that ended while it was idle
            worker.future = Future()
            worker.future.set_exception(error)

    def _end(self, worker: Worker) -> tuple[WorkItem, WorkOutcome]:
        item, future = worker.item, worker.future
        assert item is not None
        worker.item = worker.future = None
        try:
            return item, future.result()
        except Exception as error:
            return item, self._lost(worker, error)

    def _warn(self, warnings: Iterable[str]) -> None:
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                self.reporter.warn(text)


class LokyPool(WorkerPool):
    """Worker processes that share the cores of this machine, each with an accelerator if there are any.

    Each worker is an executor of loky's with one process: an executor gives up all its work where a process is killed,
    and its processes see the same accelerators.

    Args:
        reporter: receives the progress.
        count: of processes.
        devices: names of accelerators, which the processes get in turn; empty: all see what this process sees.
    """

    def __init__(self, reporter: Reporter, count: int, devices: list[str]) -> None:
        super().__init__(reporter)
        share, seen = max(1, threads.cores() // count), devices or [""]
        self.workers = [Worker(str(n), "", share, seen[n % len(seen)]) for n in range(count)]
        self._executors: dict[str, loky.ProcessPoolExecutor] = {}
        self._theirs, self._ours = Pipe(duplex=False)  # says nothing, and closes where this process ends

    def _send(self, worker: Worker, content: bytes, packed_work: bytes) -> Future[WorkOutcome]:
        with _no_interrupts():  # nor are they heard by what is started meanwhile
            if worker.name not in self._executors:
                self._executors[worker.name] = self._start(worker, pickle.loads(packed_work)[0].home)
            executor = self._executors[worker.name]
            return executor.submit(run_packed, content, packed_work, threads.cores(), worker.threads)

    def _start(self, worker: Worker, home: Paths) -> loky.ProcessPoolExecutor:
        import loky

        # No modules from the current folder; and a process that has read large data has not lost memory.
        environment = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
        if worker.device:
            environment["CUDA_VISIBLE_DEVICES"] = worker.device
        about = self._theirs, home, worker.name
        return loky.ProcessPoolExecutor(1, initializer=_begin_worker, initargs=about, env=environment)

    def _lost(self, worker: Worker, error: Exception) -> WorkOutcome:
        if (executor := self._executors.pop(worker.name, None)) is not None:
            executor.shutdown(wait=False, kill_workers=True)
        if isinstance(error, BrokenExecutor):
            return WorkOutcome(LOST, f"its worker {_how_ended(str(error))}")
        return WorkOutcome(LOST, f"its worker cannot be started ({format_error(error)})")

    def close(self) -> None:
        with _no_interrupts():  # who presses Ctrl-C twice shall not leave workers behind
            for executor in self._executors.values():
                executor.shutdown(kill_workers=True)
            self._executors.clear()
            self._ours.close()


def _how_ended(message: str) -> str:
    """How a process of loky's ended, from the status in its message: ``{SIGKILL(-9)}``, ``{EXIT(1)}``."""
    status = re.search(r"\((-?\d+)\)\}", message)
    if status is None:
        return "died"
    number = int(status[1])
    if number >= 0:
        return f"ended with status {number}"
    return f"was killed by signal {-number}" + (", perhaps for want of memory" if number == -9 else "")


def _begin_worker(parent: Connection, home: Paths, name: str) -> None:
    """Prepare a worker process."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    print_to(home, name)
    keep_freed_memory()


def _end_with(parent: Connection) -> None:
    """End this process, and its children, when its parent ends."""
    wait([parent])
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(1)
