"""Nodes on the workers of a Dask scheduler.

Each worker has one node at a time, whatever its number of threads: PyTorch's random numbers and threads are those of
a process. So a node is sent to one idle worker by name, and it is known which worker owns it.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from psutil import virtual_memory

from ifsl_bench.backbone.device import choose_device, keep_freed_memory
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.progress import Reporter, Stage, Unheard
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.jobs.job import Job
from ifsl_bench.plugin.method_source import method_source
from ifsl_bench.scheduler.cluster import LOCAL, Cluster, ClusterSpec, dask, opened, read_cluster
from ifsl_bench.scheduler.executors import Executor, Place, check_sendable
from ifsl_bench.scheduler.graph import Node
from ifsl_bench.scheduler.local_workers import MEMORY, print_to
from ifsl_bench.scheduler.work import Outcome, Setting, packed, run_packed
from ifsl_bench.scheduler.worker_check import ACCELERATOR, MustHave, unfit, wanted

SILENCE = 20.0  # seconds that work waits for a worker until somebody is told
ALONE = threading.Lock()  # generators and threads are a process's: of several commands one has it at a time


def check_cluster(name: str, jobs: Iterable[Job], device: str) -> ClusterSpec:
    """The cluster that is asked for, as far as it can be known before it is started or connected to.

    Args:
        name: what follows ``--cluster``.

    Raises:
        UserError: what :func:`read_cluster` says; no such device; a method that other processes cannot load.
    """
    spec = read_cluster(name)
    check_sendable(jobs)
    if device not in ("auto", "cpu", "cuda"):
        if device.partition(":")[0] not in ("cpu", "cuda"):
            choose_device(device)  # which says what there is
        raise UserError(f"--device {device}: which one of its devices a worker computes on is for the worker to say; "
                        "with --cluster it is auto, cpu or cuda")  # fmt: skip
    return spec


def cluster_workers(name: str, jobs: Iterable[Job], work: Workspace, device: str) -> tuple[DaskWorkers, Workspace]:
    """The workers that ``--cluster`` asks for, and the workspace with the kind of device that they compute on.

    Args:
        name: what follows ``--cluster``.
        device: what follows ``--device``; it is looked for on the workers, not here.

    Raises:
        UserError: what :func:`check_cluster` says; no worker has such a device.
    """
    workers = DaskWorkers(check_cluster(name, jobs, device), Setting.of(work, device), jobs, work.reporter)
    accelerated = device != "cpu" and workers.accelerated()
    if device == "cuda" and not accelerated:
        workers.close()
        raise UserError(f'--device cuda: no worker of {name} declares an accelerator, --resources "{ACCELERATOR}=1"')
    workers.setting = replace(workers.setting, device=device if accelerated else "cpu")
    kind = torch.device("cuda" if accelerated else "cpu")
    return workers, replace(work, device=kind, forced=device != "auto")


class DaskWorkers(Executor):
    """The workers of a cluster, which is started, or connected to, when there is something to do.

    Args:
        jobs: whose methods the workers must have.
    """

    def __init__(self, spec: ClusterSpec, setting: Setting, jobs: Iterable[Job], reporter: Reporter) -> None:
        super().__init__([])
        self.spec, self.setting, self.reporter = spec, setting, reporter
        methods = {job.name: (job.name, pickle.dumps(job.chosen), method_source(job.method)) for job in jobs}
        self.methods = tuple(methods.values())
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._needed: MustHave | None = None
        self._refused: set[str] = set()  # addresses of workers that get no work
        self._idle_since = time.monotonic()
        # Bytes for each worker that has no limit of its own.
        self._memory = MEMORY * virtual_memory().available / spec.count if spec.kind == LOCAL else float("inf")

    @property
    def cluster(self) -> Cluster:
        """The connection to the scheduler, made when it is first asked for."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(opened(self.spec, self.setting.home, self.reporter.warn))
        return self._cluster

    @property
    def count(self) -> int:
        """The number of workers that there are, or will be."""
        return self.spec.count or max(1, len(self._there()))

    def accelerated(self) -> bool:
        """Tells whether any worker declares an accelerator."""
        if not self.spec.address:
            return self.spec.accelerators
        return any(_has_accelerator(info) for info in self._there().values())

    def look(self) -> None:
        """New workers are examined; from those that are gone their nodes are taken."""
        there = self._there()
        self.cluster.mend(len(there))
        for place in list(self.places):
            if place.name not in there and place.node is None:
                self.places.remove(place)
            elif place.name not in there:
                place.future.cancel(force=True)
        if new := there.keys() - {place.name for place in self.places} - self._refused:
            self._examine({address: there[address] for address in new})
        if any(place.node for place in self.places):
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > SILENCE:
            self._idle_since = float("inf")
            self.reporter.warn(f"{self.spec.name}: work waits for workers, or for one with {ACCELERATOR}=1 among its "
                               f"resources; there are {len(there)} workers")  # fmt: skip

    def close(self) -> None:
        """Cancels all nodes, which stop at their next report, and ends a cluster that was started here."""
        if self._cluster is not None and self._cluster.alive:
            for place in self.places:
                if place.future is not None:
                    place.future.cancel(force=True)
        self.places.clear()
        self._stack.close()

    def _send(self, place: Place, node: Node, share: int) -> Any:
        return self.cluster.client.submit(
            run_on_worker, packed(node), node.key, self.setting, share, pure=False, workers=[place.name],
            key=f"ifsl_bench-{self.setting.run}/{node.key}/{uuid.uuid4().hex}",
            resources={ACCELERATOR: 1} if node.wants.accelerator else None,
        )  # fmt: skip

    def _lost(self, place: Place, node: Node, error: Exception) -> Outcome:
        if not isinstance(error, (dask().CancelledError, dask("distributed").scheduler.KilledWorker)):
            return Outcome(node.key, "failed", one_line(f"on worker {place.name}: {type(error).__name__}: {error}"))
        self.places.remove(place)  # where it is alive after all, it is found again
        self._there()  # all futures are cancelled, once the scheduler is gone
        return Outcome(node.key, "lost", f"its worker {place.name} died")

    def _there(self) -> Mapping[str, Any]:
        """The workers that the scheduler knows, by address."""
        client = self.cluster.client
        # Not Client.scheduler_info: what it returns may be the answer to its own clock, which asks for no workers.
        workers: Mapping[str, Any] = self._ask(client.sync, client.scheduler.identity)["workers"]
        return workers

    def _ask(self, question: Any, *arguments: Any, **keywords: Any) -> Any:
        """An answer of the scheduler's; raises :class:`UserError` where it is gone."""
        if self.cluster.alive:
            try:
                return question(*arguments, **keywords)
            except (OSError, RuntimeError, dask().CancelledError):
                if self.cluster.alive:
                    raise
        raise UserError(f"the scheduler of {self.spec.name} is gone; the same command goes on from where it stopped")

    def _examine(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        if self._needed is None:
            self._needed = self._stack.enter_context(wanted(self.setting.home, self.methods))
        run, workers = self.cluster.client.run, list(new)
        if self.spec.kind == LOCAL:  # its processes write where this one does
            self._ask(run, print_to, self.setting, "cluster", workers=workers, on_error="ignore")
        answers = self._ask(run, unfit, self._needed, workers=workers, on_error="return")
        first = not self.places
        for address, answer in answers.items():
            if isinstance(answer, OSError):
                continue  # it has left
            if answer:
                problem = answer if isinstance(answer, str) else f"cannot work: {one_line(repr(answer))}"
                if first:
                    raise UserError(f"worker {address} on {new[address]['host']} {problem}")
                self._refused.add(address)  # the others go on
                self.reporter.warn(f"worker {address} on {new[address]['host']} gets no work: it {problem}")
                continue
            info = new[address]
            memory = info["memory_limit"] or self._memory
            device = address if _has_accelerator(info) else ""
            self.places.append(Place(address, info["host"], info["nthreads"], memory, device))


def _has_accelerator(info: Mapping[str, Any]) -> bool:
    return bool(info.get("resources", {}).get(ACCELERATOR, 0) >= 1)


# -- what runs on a worker


class _Asking(Reporter):
    """Raises :class:`Unheard` at the next word where nobody wants the node any more, or the scheduler is gone."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.task = worker, str(worker.get_current_task())

    def say(self, text: str = "") -> None:
        state = self.worker.state.tasks.get(self.task)
        if state is None or state.state == "cancelled" or self.worker.status.name != "running":
            raise Unheard("nobody listens")

    warn = say

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Stage]:
        asking = self

        class Asked(Stage):
            def advance(self, amount: int = 1, **figures: float) -> None:
                asking.say()

        self.say()
        yield Asked()


def run_on_worker(content: bytes, key: str, setting: Setting, share: int) -> Outcome:
    """Runs a packed node, as :func:`ifsl_bench.scheduler.work.run_packed` does."""
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":  # Dask's own doing, where a nanny starts the worker
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    keep_freed_memory()
    asking = _Asking(dask().get_worker())
    try:
        while not ALONE.acquire(timeout=1):  # a stage of another command, or one that was given up and has not noticed
            asking.say()
        try:
            return run_packed(content, key, setting, share, asking)
        finally:
            ALONE.release()
    except Unheard:
        return Outcome(key, "lost", "nobody waits for it")
