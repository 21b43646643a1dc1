"""Pools of workers, the back ends of a run beside the present process, and the pool of loky's on this machine.

:mod:`ifsl_bench.experiments.dask_pool` has the pool of a cluster. A worker has one item at a time, since random numbers
and threads of PyTorch belong to a process. An item whose worker dies is tried again on another one, and goes on from
its last checkpoint.
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
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ifsl_bench.backbones.device import keep_freed_memory_in_allocator
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import FAILED, Log, count_resumed_stages, log_path
from ifsl_bench.experiments.runner import LOST_OUTCOME, Backend, WorkItem, WorkOutcome, run_item
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils import threads
from ifsl_bench.utils.errors import UserError, format_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter, Reporter

if TYPE_CHECKING:
    import loky

MAX_ATTEMPTS = 3  # at an item whose worker dies, for each checkpoint that it goes on from
POLL_INTERVAL_SECONDS = 1.0  # seconds between two looks at the workers


def local_backend(
    jobs: Iterable[Job], work: Workspace, device: str, count: int | None = None, devices: str | None = None
) -> Backend:
    """Return this process, or a pool of workers of this machine, which start with the first item.

    Args:
        jobs: whose methods the workers must be able to load.
        work: folders and reporter.
        device: as the user typed it.
        count: of processes of this machine; one for each device by default.
        devices: numbers of accelerators, ``0-7`` or ``0,2``.

    Raises:
        UserError: no such devices, or more of them than workers; a method that other processes cannot load.
    """
    if (count or 1) == 1 and not devices:
        return Backend()
    check_picklable(jobs)
    numbers = parse_device_numbers(devices) if devices else []
    if numbers and device not in ("auto", "cuda"):
        raise UserError(
            f"--devices lists the accelerators, and --device {device} the one to use: leave one of them out"
        )
    if numbers and count and count < len(numbers):
        raise UserError(
            f"--jobs {count} leaves some of --devices {devices} without a worker: leave --jobs out, for one worker "
            "each, or name fewer devices"
        )
    there = torch.cuda.device_count()
    if numbers and max(numbers) >= there:
        raise UserError(f"--devices {max(numbers)}: PyTorch sees {there} CUDA devices here, numbered from 0")
    if not numbers and work.device.type == "cuda" and work.device.index is None and count:
        numbers = list(range(min(count, there)))
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = [visible[number] if visible else str(number) for number in numbers]
    return LokyPool(work.reporter, count or len(names), names)


def parse_device_numbers(listed: str) -> list[int]:
    """Read ``0-2,5`` as [0, 1, 2, 5]; raise :class:`UserError` for anything else."""
    parts = [re.fullmatch(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", part) for part in listed.split(",")]
    ranges = [part and range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts]
    numbers = [number for numbers in ranges for number in numbers or ()]
    if not all(ranges) or len(set(numbers)) != len(numbers):
        raise UserError(f"--devices takes numbers, each once, as in 0-7 or 0,2, not {listed!r}")
    return numbers


def check_picklable(jobs: Iterable[Job]) -> None:
    """Raise :class:`UserError` where another process could not load a job's method."""
    for method, job in {job.method: job for job in jobs}.items():
        reason = None
        try:
            pickle.dumps(job)
        except Exception as error:
            reason = f"cannot be handed to other processes ({format_error(error)})"
        if method.__module__ == "__main__" and not job.method_ref.source_file:
            reason = "is defined in a notebook or script, where other processes cannot find it"
        if reason:
            advice = f"move it to a file (file.py:{method.__name__}), or run with --jobs 1"
            raise UserError(f"method {job.method_name!r} {reason}: {advice}")


# -- in a worker


def run_pickled_item(
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
    threads.set_thread_counts(cores, share)
    work, log = _open_workspace(packed_work)
    log.to = reporter or NullReporter()
    try:
        return replace(run_item(item, work, log), raised_error=None)
    finally:
        sys.stdout.flush()


@lru_cache(maxsize=1)
def _open_workspace(packed_work: bytes) -> tuple[Workspace, Log]:
    """Return the workspace of a run, which keeps features open from one item to the next, and its reporter."""
    work, _ = pickle.loads(packed_work)
    log = Log(work.home, NullReporter())
    return replace(work, reporter=log), log


def redirect_output(home: Paths, name: str) -> None:
    """Send what methods and libraries print in this process to a file: standard output is for tables.

    Args:
        home: with the folder of logs.
        name: of the worker; another run may write to the same file.
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


# -- pools of workers


@dataclass(eq=False)
class Worker:
    """A process that runs one item at a time.

    Attributes:
        host: name of its machine; an item that takes a whole machine shares it with no other.
        threads: how many cores it may keep busy.
        device: the name of its accelerator in CUDA_VISIBLE_DEVICES; "" where it has the devices of this process.
        running_item, running_future: the item that runs, and its outcome to come; None while the worker is idle.
    """

    name: str
    host: str = ""
    threads: int = 1
    device: str = ""
    running_item: WorkItem | None = None
    running_future: Any = None


class WorkerPool(Backend):
    """Workers that take items in order; the base of both kinds."""

    runs_items_in_parallel = True

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.run_id = reporter, uuid.uuid4().hex
        self.workers: list[Worker] = []
        self._warned: set[str] = set()

    @abstractmethod
    def _start_item(self, worker: Worker, content: bytes, packed_work: bytes) -> Any:
        """Start an item on a worker, and return a future of its outcome."""

    @abstractmethod
    def _outcome_of_lost_item(self, worker: Worker, error: Exception) -> WorkOutcome:
        """Return the outcome of an item whose future has an error in place of one."""

    def update_workers(self) -> None:
        """Update the list of workers; called every second or so."""

    def run(self, items: Iterator[WorkItem], work: Workspace) -> Iterator[tuple[WorkItem, WorkOutcome]]:
        packed_work = pickle.dumps((replace(work, reporter=NullReporter()), self.run_id))
        waiting: deque[WorkItem] = deque()
        ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        attempts, log_begins = Counter[str](), dict[str, int]()
        while True:
            waiting.extend(() if waiting else itertools.islice(items, 1))
            if not waiting and not self._busy_workers():
                return
            self.update_workers()
            for worker in [worker for worker in self.workers if worker.running_item is None]:
                waiting.extend(() if waiting else itertools.islice(items, 1))
                if not waiting or not self._can_take_item(worker, waiting[0]):
                    continue
                item = worker.running_item = waiting.popleft()
                log = log_path(work.home, item.log_key)
                log_begins.setdefault(item.log_key, log.stat().st_size if log.exists() else 0)
                attempts[item.log_key] += 1
                self.reporter.say(f"{item.title} ...")
                try:
                    worker.running_future = self._start_item(
                        worker, pickle.dumps(replace(item, job_indices=[])), packed_work
                    )
                except (OSError, BrokenExecutor) as error:  # no memory for another process, or it ended while idle
                    worker.running_future = Future()
                    worker.running_future.set_exception(error)
                worker.running_future.add_done_callback(lambda _, worker=worker: ended.put(worker))
            try:
                worker = ended.get(timeout=POLL_INTERVAL_SECONDS)
            except queue.Empty:
                continue
            future = worker.running_future
            assert worker.running_item is not None
            item = worker.running_item
            worker.running_item = worker.running_future = None
            try:
                outcome: WorkOutcome = future.result()
            except Exception as error:
                outcome = self._outcome_of_lost_item(worker, error)
            for text in dict.fromkeys(outcome.warnings):
                if text not in self._warned:
                    self._warned.add(text)
                    self.reporter.warn(text)
            for text in outcome.resumed_stages:
                self.reporter.say(text)
            if outcome.outcome_kind != LOST_OUTCOME:
                yield item, outcome
                continue
            # A job that a queueing system ends by its time limit again and again has a new checkpoint each time.
            checkpoints = count_resumed_stages(log_path(work.home, item.log_key), log_begins[item.log_key])
            if attempts[item.log_key] < MAX_ATTEMPTS * (1 + checkpoints):
                self.reporter.warn(
                    f"{item.title}: {outcome.failure_message}; it is run again, from its last checkpoint"
                )
                waiting.append(item)
            else:
                yield item, WorkOutcome(FAILED, f"{outcome.failure_message}, {attempts[item.log_key]} times")

    def _busy_workers(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.running_item]

    def _can_take_item(self, worker: Worker, item: WorkItem) -> bool:
        there = [
            other.running_item for other in self._busy_workers() if other.host == worker.host and other.running_item
        ]
        return not there or not (item.needs_whole_machine or any(other.needs_whole_machine for other in there))


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
        share, names = max(1, threads.whole_machine_threads() // count), devices or [""]
        self.workers = [Worker(str(n), "", share, names[n % len(names)]) for n in range(count)]
        self._executors: dict[str, loky.ProcessPoolExecutor] = {}
        self._theirs, self._ours = Pipe(duplex=False)  # nothing is sent, and it closes where this process ends

    def _start_item(self, worker: Worker, content: bytes, packed_work: bytes) -> Future[WorkOutcome]:
        import loky

        with _ignore_interrupts():  # nor do processes that are started inside receive them
            if worker.name not in self._executors:
                # If this process is killed, loky's tracker removes its semaphores, and need not warn of that.
                os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
                # No modules from the current folder; and a process that has read large data has not leaked memory.
                environment = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
                if worker.device:
                    environment["CUDA_VISIBLE_DEVICES"] = worker.device
                arguments = self._theirs, pickle.loads(packed_work)[0].home, worker.name
                self._executors[worker.name] = loky.ProcessPoolExecutor(
                    1, initializer=_prepare_worker, initargs=arguments, env=environment
                )
            executor = self._executors[worker.name]
            return executor.submit(
                run_pickled_item, content, packed_work, threads.whole_machine_threads(), worker.threads
            )

    def _outcome_of_lost_item(self, worker: Worker, error: Exception) -> WorkOutcome:
        if (executor := self._executors.pop(worker.name, None)) is not None:
            executor.shutdown(wait=False, kill_workers=True)
        if not isinstance(error, BrokenExecutor):
            return WorkOutcome(LOST_OUTCOME, f"its worker cannot be started ({format_error(error)})")
        status = re.search(r"\{(\w+)\((-?\d+)\)\}", str(error))  # as in "exit codes of the workers are {SIGKILL(-9)}"
        if status is None:
            return WorkOutcome(LOST_OUTCOME, "its worker died")
        if int(status[2]) >= 0:
            return WorkOutcome(LOST_OUTCOME, f"its worker ended with status {status[2]}")
        memory = ", perhaps for want of memory" if status[1] == "SIGKILL" else ""
        return WorkOutcome(LOST_OUTCOME, f"its worker was killed by {status[1]}{memory}")

    def close(self) -> None:
        with _ignore_interrupts():  # a second Ctrl-C leaves no workers behind
            for executor in self._executors.values():
                executor.shutdown(kill_workers=True)
            self._executors.clear()
            self._ours.close()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside, and in processes that are started inside."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _prepare_worker(parent: Connection, home: Paths, name: str) -> None:
    """Prepare a worker process."""
    threading.Thread(target=_exit_when_parent_ends, args=(parent,), daemon=True).start()
    redirect_output(home, name)
    keep_freed_memory_in_allocator()


def _exit_when_parent_ends(parent: Connection) -> None:
    """End this process, and its children, when its parent ends."""
    wait([parent])
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(1)
