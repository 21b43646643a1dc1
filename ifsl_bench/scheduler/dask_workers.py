"""Nodes on the workers of a Dask scheduler.

Each worker has one node at a time, whatever its number of threads: PyTorch's random numbers and threads are those of
a process. So a node is sent to one idle worker by name, and it is known which worker owns it.
"""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from psutil import virtual_memory

from ifsl_bench.backbone.device import choose_device, keep_freed_memory
from ifsl_bench.common import processor
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home, write_bytes
from ifsl_bench.common.owners import PARTIAL
from ifsl_bench.common.progress import Reporter, Stage, Unheard
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.jobs.job import Job
from ifsl_bench.plugin.method_source import method_source
from ifsl_bench.scheduler.cluster import Cluster, opened
from ifsl_bench.scheduler.cluster_file import ACCELERATOR, LOCAL, ClusterSpec, dask, read_cluster
from ifsl_bench.scheduler.executors import Executor, Place, check_sendable
from ifsl_bench.scheduler.graph import Node
from ifsl_bench.scheduler.local_workers import MEMORY, print_to, visible
from ifsl_bench.scheduler.work import Outcome, Setting, packed, plainly, run_packed
from ifsl_bench.scheduler.worker_check import MustHave, unfit, wanted, without_accelerator

SILENCE = 20.0  # seconds that work waits for a worker until somebody is told
PROBE = 1 << 20  # bytes written to see whether a disk is full
ALONE = threading.Lock()  # generators and threads are a process's: of several commands one has it at a time
SICK = "its worker cannot write:"  # begins what is said of a node that is better handed to another worker


def check_cluster(name: str, jobs: Sequence[Job], device: str) -> ClusterSpec:
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


def cluster_workers(name: str, jobs: Sequence[Job], work: Workspace, device: str) -> tuple[DaskWorkers, Workspace]:
    """The workers that ``--cluster`` asks for, and the workspace with the kind of device that they compute on.

    Args:
        name: what follows ``--cluster``.
        device: what follows ``--device``; it is looked for on the workers, not here.

    Raises:
        UserError: what :func:`check_cluster` says; no worker has such a device.
    """
    spec = check_cluster(name, jobs, device)
    setting = Setting(work.home, device, processor.cores(), uuid.uuid4().hex, str(work.curves or ""))
    workers = DaskWorkers(spec, setting, jobs, work.reporter)
    accelerated = device != "cpu" and workers.accelerated()
    if device == "cuda" and not accelerated:
        workers.close()
        raise UserError(f'--device cuda: no worker of {name} declares an accelerator, --resources "{ACCELERATOR}=1"')
    workers.setting = replace(setting, device=device if accelerated else "cpu")
    kind = torch.device("cuda" if accelerated else "cpu")
    return workers, replace(work, device=kind, forced=device != "auto")


class DaskWorkers(Executor):
    """The workers of a cluster, which is started, or connected to, when there is something to do.

    Args:
        jobs: whose methods the workers must have.
    """

    def __init__(self, spec: ClusterSpec, setting: Setting, jobs: Iterable[Job], reporter: Reporter) -> None:
        self.spec, self.setting, self.reporter = spec, setting, reporter
        methods = {job.name: (job.name, pickle.dumps(job.chosen), method_source(job.method)) for job in jobs}
        self.methods = tuple(methods.values())
        self.places: list[Place] = []
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._needed: MustHave | None = None
        self._refused: set[str] = set()  # addresses of workers that get no work
        self._waiting: Node | None = None  # what no worker could take when it was last asked
        self._idle_since, self._told = time.monotonic(), False
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

    def fits(self, node: Node) -> bool:
        fits = super().fits(node)
        self._waiting = None if fits else node
        return fits

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
        self._tell(len(there))

    def close(self) -> None:
        """Cancels all nodes, which stop at their next report, and ends a cluster that was started here."""
        if self._cluster is not None and self._cluster.alive:
            for place in self.places:
                if place.future is not None:
                    place.future.cancel(force=True)
        self.places.clear()
        self._stack.close()

    def _send(self, place: Place, node: Node) -> Any:
        share = max(place.threads, node.wants.threads)
        return self.cluster.client.submit(
            run_on_worker, packed(node), node.key, self.setting, share, pure=False, workers=[place.name],
            key=f"ifsl_bench-{self.setting.run}/{node.key}/{uuid.uuid4().hex}",
            resources={ACCELERATOR: 1} if node.wants.accelerator else None,
        )  # fmt: skip

    def outcome(self, node: Node, future: Any) -> Outcome:
        (place,) = (place for place in self.places if place.node is node)
        outcome = super().outcome(node, future)
        if outcome.how == "lost" and outcome.why.startswith(SICK):
            self._dismiss(place, outcome.why)
        return outcome

    def _lost(self, place: Place, node: Node, error: Exception) -> Outcome:
        if not isinstance(error, (dask().CancelledError, dask("distributed").scheduler.KilledWorker)):
            return Outcome(node.key, "failed", one_line(f"on worker {place.name}: {type(error).__name__}: {error}"))
        self.places.remove(place)  # where it is alive after all, it is found again
        self._ask(lambda: None)  # all futures are cancelled, once the scheduler is gone
        return Outcome(node.key, "lost", f"its worker {place.name} died")

    def _dismiss(self, place: Place, why: str) -> None:
        """Gives a worker nothing more; raises :class:`UserError` where it was the last."""
        self.places.remove(place)
        self._refused.add(place.name)
        message = f"worker {place.name} on {place.host} gets no more work: {why}"
        if not self.places:
            raise UserError(f"{message}; there is no other, and the same command goes on from where it stopped")
        self.reporter.warn(message)

    def _there(self) -> Mapping[str, Any]:
        """The workers that the scheduler knows, by address."""
        client = self.cluster.client
        # Not Client.scheduler_info: what it returns may be the answer to its own clock, which asks for no workers.
        return self._ask(client.sync, client.scheduler.identity)["workers"]

    def _ask(self, question: Any, *arguments: Any, **keywords: Any) -> Any:
        """An answer of the scheduler's; raises :class:`UserError` where it is gone."""
        if self.cluster.alive:
            try:
                return question(*arguments, **keywords)
            except (OSError, RuntimeError, dask().CancelledError):
                if self.cluster.alive:
                    raise
        raise UserError(f"the scheduler of {self.cluster.name} is gone; the same command goes on from where it stopped")

    def _run(self, addresses: Sequence[str], function: Any, *arguments: Any) -> dict[str, Any]:
        """Runs a function on some workers; returns each one's answer or error, without workers that have left."""
        if not addresses:
            return {}
        answers = self._ask(self.cluster.client.run, function, *arguments, workers=addresses, on_error="return")
        return {address: answer for address, answer in answers.items() if not isinstance(answer, OSError)}

    def _examine(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        if self._needed is None:
            self._needed = self._stack.enter_context(wanted(self.setting.home, self.methods))
        answers = self._run(list(new), unfit, self._needed)
        problems = {a: answer if isinstance(answer, str) else f"cannot work: {one_line(repr(answer))}"
                    for a, answer in answers.items()}  # fmt: skip
        fit = [address for address, problem in problems.items() if not problem]
        if self.spec.kind == LOCAL:  # its processes write where this one does, and share its accelerators
            for address in fit:
                name = new[address]["name"]
                device = self._device(name) if self.spec.accelerators else ""
                self._run([address], _begin_local, self.setting, str(name), device)
        declared = [address for address in fit if _has_accelerator(new[address])]
        for address, lacks in self._run(declared, without_accelerator).items():
            if lacks is True:
                problems[address] = f"declares {ACCELERATOR}=1, but PyTorch sees none there"
        first = not self.places
        for address, problem in problems.items():
            name = f"worker {address} on {new[address]['host']}"
            if problem and first:
                raise UserError(f"{name} {problem}")
            if problem:  # the others go on
                self._refused.add(address)
                self.reporter.warn(f"{name} gets no work: it {problem}")
                continue
            info = new[address]
            device = address if _has_accelerator(info) else ""
            memory = info["memory_limit"] or self._memory
            self.places.append(Place(address, info["host"], info["nthreads"], memory, device))

    def _device(self, name: int) -> str:
        there = torch.cuda.device_count()
        return visible(name % there) if there else ""  # the worker is refused, and says why

    def _tell(self, there: int) -> None:
        """Says once why nothing happens."""
        waiting = self._waiting is not None and self._place_for(self._waiting) is None  # some may have come since
        if not waiting or any(place.node for place in self.places):
            self._idle_since, self._told = time.monotonic(), False
        elif not self._told and time.monotonic() - self._idle_since > SILENCE:
            self._told = True
            lack = f"a worker with {ACCELERATOR}=1 among its resources" if there else "workers"
            self.reporter.warn(f"{self.cluster.name}: {self._waiting} waits for {lack}; there are {there} workers")


def _has_accelerator(info: Mapping[str, Any]) -> bool:
    return bool(info.get("resources", {}).get(ACCELERATOR, 0) >= 1)


# -- what runs on a worker


def _begin_local(setting: Setting, name: str, device: str) -> None:
    print_to(setting, name)
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device


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
            outcome = run_packed(content, key, setting, share, asking)
        finally:
            ALONE.release()
    except Unheard:
        return Outcome(key, "lost", "nobody waits for it")
    if outcome.how == "failed" and (problem := cannot_write(setting.home)):
        return replace(outcome, how="lost", why=f"{SICK} {problem}")
    return outcome


def cannot_write(home: Home) -> str:
    """Says why this process cannot write to the home, or to its temporary folder; "" where it can.

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
