"""Work items on the workers of a Dask scheduler.

Each worker has one item at a time, whatever its number of threads. So each item is sent to one idle worker by name.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ifsl_bench.backbones.device import choose_device, keep_freed_memory_in_allocator
from ifsl_bench.experiments.backends import Worker, WorkerPool, check_picklable, redirect_output, run_pickled_item
from ifsl_bench.experiments.cluster import (
    ACCELERATOR_RESOURCE,
    LOCAL_CLUSTER,
    ClusterSpec,
    WorkerRequirements,
    connect_to_scheduler,
    find_unmet_requirement,
    import_dask,
    is_reachable_from_network,
    write_shared_requirements,
)
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import FAILED
from ifsl_bench.experiments.runner import LOST_OUTCOME, WorkOutcome
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.method_source import hash_method_source
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.progress import ConsumerDisconnected, NullReporter, ProgressTask
from ifsl_bench.utils.threads import whole_machine_threads

WORKER_WAIT_SECONDS = 20.0  # seconds that work waits for a worker before a warning
ITEM_RUNNING_LOCK = (
    threading.Lock()
)  # several commands may share a worker, whose random numbers and threads are its process's


class DaskPool(WorkerPool):
    """The workers of a cluster, which is started, or connected to, with its first use.

    Args:
        spec: of the cluster.
        work: folders and reporter.
        device: as the user typed it; it is looked for on the workers, not here.
        jobs: whose methods the workers must have.

    Raises:
        UserError: no such device, or a certain one of several; a method that other processes cannot load.
    """

    def __init__(self, spec: ClusterSpec, work: Workspace, device: str, jobs: Sequence[Job]) -> None:
        super().__init__(work.reporter)
        if device not in ("auto", "cpu", "cuda"):
            if device.partition(":")[0] not in ("cpu", "cuda"):
                choose_device(device)  # raises an error that lists the devices
            raise UserError(
                f"--device {device}: a worker decides which one of its devices it computes on; with --cluster it is "
                "auto, cpu or cuda"
            )
        self.spec, self.home, self.device = spec, work.home, device
        check_picklable(jobs)
        by_method = {job.method_name: job for job in jobs}
        self.methods = [
            (name, pickle.dumps(job.method_ref), hash_method_source(job.method)) for name, job in by_method.items()
        ]
        self.accelerated = False
        self._stack = ExitStack()
        self._started: Any = None  # the cluster, if it was started here
        self._failures: list[str] = []  # messages of a queueing system
        self._refused: set[str] = set()  # addresses of workers that get no work
        self._idle_since = float("inf")

    @cached_property
    def client(self) -> Any:
        """The connection to the scheduler; where other machines could send work to that, there is a warning."""
        client, self._started = connect_to_scheduler(self.spec, self.home, self._stack, self._failures)
        listeners = self._started.scheduler.listeners if self._started else ()
        addresses: list[str] = [listener.listen_address for listener in listeners] or [self.spec.scheduler_address]
        for address in filter(is_reachable_from_network, addresses):
            self.reporter.warn(
                f"the scheduler of {self.spec.name} listens at {address} without TLS: whoever reaches it runs programs "
                "as you; see docs/running.md"
            )
        return client

    @property
    def _is_cluster_alive(self) -> bool:
        return bool(self.client.status == "running")

    @cached_property
    def _worker_requirements(self) -> WorkerRequirements:
        return self._stack.enter_context(write_shared_requirements(self.home, self.methods))

    def prepare(self, work: Workspace) -> Workspace:
        """Return the workspace with the kind of device that the workers compute on.

        Raises:
            UserError: no worker has the device that the user names.
        """
        accelerated = self.spec.uses_accelerators
        if self.spec.scheduler_address and self.device != "cpu":
            accelerated = any(map(_has_accelerator, self._known_workers().values()))
        self.accelerated = accelerated and self.device != "cpu"
        if self.device == "cuda" and not self.accelerated:
            resources = f'--resources "{ACCELERATOR_RESOURCE}=1"'
            raise UserError(f"--device cuda: no worker of {self.spec.name} declares an accelerator, {resources}")
        self._idle_since = time.monotonic()
        return replace(
            work, device=torch.device("cuda" if self.accelerated else "cpu"), device_is_forced=self.device != "auto"
        )

    def update_workers(self) -> None:
        """Examine new workers; take the items of those that are gone, and ask for others.

        Raises:
            UserError: the scheduler is gone, a queueing system refuses jobs, or the first workers cannot work.
        """
        there = self._known_workers()
        if self._failures:
            raise UserError(f"{self.spec.name}: {self._failures[-1]}")
        if len(there) < self.spec.n_workers:
            self._started.scale(self.spec.n_workers)  # counts workers that have been requested and not begun
        for worker in list(self.workers):
            if worker.name not in there and worker.running_item is None:
                self.workers.remove(worker)
            elif worker.name not in there:
                worker.running_future.cancel(force=True)
        if new := there.keys() - {worker.name for worker in self.workers} - self._refused:
            self._add_suitable_workers({address: there[address] for address in new})
        if new or self._busy_workers():
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > WORKER_WAIT_SECONDS:
            self._idle_since = float("inf")
            self.reporter.warn(
                f"{self.spec.name}: work waits for workers, or for one with {ACCELERATOR_RESOURCE}=1 among its "
                f"resources; there are {len(there)} workers"
            )

    def close(self) -> None:
        """Cancel all items, which stop at their next report, and end a cluster that was started here."""
        for worker in self._busy_workers() if "client" in vars(self) and self._is_cluster_alive else ():
            worker.running_future.cancel(force=True)
        self.workers.clear()
        self._stack.close()

    def _start_item(self, worker: Worker, content: bytes, packed_work: bytes) -> Any:
        arguments = content, packed_work, whole_machine_threads(), worker.threads
        resources = {ACCELERATOR_RESOURCE: 1} if self.accelerated else None
        key = f"ifsl_bench-{uuid.uuid4().hex}"
        return self.client.submit(
            run_on_worker, *arguments, pure=False, workers=[worker.name], key=key, resources=resources
        )

    def _outcome_of_lost_item(self, worker: Worker, error: Exception) -> WorkOutcome:
        if not isinstance(error, (import_dask().CancelledError, import_dask("distributed").scheduler.KilledWorker)):
            return WorkOutcome(FAILED, f"on worker {worker.name}: {type(error).__name__}: {error}")
        self.workers.remove(worker)  # where it is alive after all, it is found again
        self._known_workers()  # raises where the scheduler is gone, which cancels all futures
        return WorkOutcome(LOST_OUTCOME, f"its worker {worker.name} died")

    def _known_workers(self) -> Mapping[str, Any]:
        """Return the workers of the scheduler, by address."""
        # Not Client.scheduler_info, which may return an older answer without workers.
        workers: Mapping[str, Any] = self._ask_scheduler(self.client.sync, self.client.scheduler.identity)["workers"]
        return workers

    def _ask_scheduler(self, question: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return an answer of the scheduler's; raise :class:`UserError` where it is gone."""
        if self._is_cluster_alive:
            try:
                return question(*arguments, **keywords)
            except OSError:
                pass  # its connection broke; the client notices that a moment later
            except (RuntimeError, import_dask().CancelledError):
                if self._is_cluster_alive:
                    raise
        raise UserError(f"the scheduler of {self.spec.name} is gone; the same command goes on from where it stopped")

    def _add_suitable_workers(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the new workers that meet the requirements; raise :class:`UserError` where a first one does not."""
        run, workers, first = self.client.run, list(new), not self.workers
        if self.spec.cluster_class_name == LOCAL_CLUSTER:  # its processes write where this one does
            self._ask_scheduler(run, redirect_output, self.home, "cluster", workers=workers, on_error="ignore")
        for address, answer in self._ask_scheduler(
            run, find_unmet_requirement, self._worker_requirements, workers=workers, on_error="return"
        ).items():
            if isinstance(answer, OSError):
                continue  # it has left
            worker, host = new[address], new[address]["host"]
            if not answer and self.accelerated and not _has_accelerator(worker):
                self._refused.add(address)
            elif not answer:
                self.workers.append(Worker(address, host, worker["nthreads"]))
            else:
                problem = answer if isinstance(answer, str) else f"cannot work: {escape_controls(repr(answer))}"
                if first:
                    raise UserError(f"worker {address} on {host} {problem}")
                self._refused.add(address)  # the others go on
                self.reporter.warn(f"worker {address} on {host} gets no work: it {problem}")


def _has_accelerator(worker: Mapping[str, Any]) -> bool:
    return bool(worker.get("resources", {}).get(ACCELERATOR_RESOURCE, 0) >= 1)


# -- on a worker


class _CancellationReporter(NullReporter):
    """Raises :class:`ConsumerDisconnected` at the next report where the item is cancelled, or the scheduler is gone."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.task = worker, str(worker.get_current_task())

    def say(self, text: str = "") -> None:
        state = self.worker.state.tasks.get(self.task)
        if state is None or state.state == "cancelled" or self.worker.status.name != "running":
            raise ConsumerDisconnected("its command has ended")

    warn = say

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        self.say()
        yield ProgressTask(title, total, done, lambda amount, figures: self.say())


def run_on_worker(content: bytes, packed_work: bytes, cores: int, share: int) -> WorkOutcome:
    """Run a pickled item with :func:`ifsl_bench.experiments.backends.run_pickled_item`, one at a time in this process.

    Args:
        content: the item.
        packed_work: the workspace, without its reporter.
        cores: threads of work that takes a whole machine.
        share: threads that this process may keep busy with other work.
    """
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":  # Dask's own doing, where a nanny starts the worker
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    keep_freed_memory_in_allocator()
    reporter = _CancellationReporter(import_dask().get_worker())
    try:
        while not ITEM_RUNNING_LOCK.acquire(
            timeout=1
        ):  # of another command, or a cancelled one that has not yet stopped
            reporter.say()
        try:
            return run_pickled_item(content, packed_work, cores, share, reporter)
        finally:
            ITEM_RUNNING_LOCK.release()
    except ConsumerDisconnected:
        return WorkOutcome(LOST_OUTCOME, "its command has ended")
