"""Nodes on the workers of a Dask scheduler, behind the interface of :mod:`ifsl_bench.campaigns.schedule`.

Each worker has one node at a time, whatever its number of threads: PyTorch's random numbers and threads are those of
a process. So a node is sent to one idle worker by name, and it is known which worker owns it.
"""

from __future__ import annotations

import math
import pickle
import platform
import queue
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import psutil
import torch

from ifsl_bench.backbone.device import choose_device
from ifsl_bench.campaigns.cluster import Cluster, opened
from ifsl_bench.campaigns.cluster_file import ACCELERATOR, LOCAL, ClusterSpec, dask, read_cluster
from ifsl_bench.campaigns.graph import Node, Wants
from ifsl_bench.campaigns.local import MEMORY, check_sendable
from ifsl_bench.campaigns.on_dask import SICK, run_on_worker
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.served import print_to
from ifsl_bench.campaigns.work import Outcome, Setting
from ifsl_bench.campaigns.worker_check import MustHave, unfit, wanted, without_accelerator
from ifsl_bench.common import processor
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.job import Job

PACKAGES = ("ifsl_bench", "torch", "numpy", "numba", "distributed")  # that decide digits, or whether messages arrive
LOOK = 1.0  # seconds between two looks at who is there
SILENCE = 20.0  # seconds that work waits for a worker until somebody is told


def check_cluster(said: str, jobs: Sequence[Job], device: str) -> ClusterSpec:
    """The cluster that is asked for, as far as it can be known before it is started or connected to.

    Raises:
        UserError: what :func:`read_cluster` says; no such device; a method that other processes cannot load.
    """
    spec = read_cluster(said)
    check_sendable(jobs)
    if device not in ("auto", "cpu", "cuda"):
        if device.partition(":")[0] not in ("cpu", "cuda"):
            choose_device(device)  # which says what there is
        raise UserError(f"--device {device}: which one of its devices a worker computes on is for the worker to say; "
                        "with --cluster it is auto, cpu or cuda")  # fmt: skip
    return spec


def cluster_workers(said: str, jobs: Sequence[Job], work: Workspace, device: str) -> tuple[DaskWorkers, Workspace]:
    """The workers that ``--cluster`` asks for, and the workspace with the kind of device that they compute on.

    Args:
        said: what follows ``--cluster``.
        device: what follows ``--device``; it is looked for on the workers, not here.

    Raises:
        UserError: what :func:`check_cluster` says; no worker has such a device.
    """
    spec = check_cluster(said, jobs, device)
    setting = Setting(work.home, device, processor.cores(), uuid.uuid4().hex, str(work.curves or ""))
    hands = DaskWorkers(spec, setting, jobs, work.reporter)
    found = device != "cpu" and hands.accelerators()
    if device == "cuda" and not found:
        hands.close()
        raise UserError(f'--device cuda: no worker of {said} declares an accelerator, --resources "{ACCELERATOR}=1"')
    hands.setting = replace(setting, device=device if found else "cpu")
    return hands, replace(work, device=torch.device("cuda" if found else "cpu"), forced=device != "auto")


@dataclass
class _Worker:
    """A worker that is fit, and the node that it has."""

    address: str
    host: str
    threads: int
    memory: float
    accelerator: bool
    node: Node | None = None
    future: Any = field(default=None, repr=False)


class DaskWorkers:
    """See :class:`ifsl_bench.campaigns.schedule.Workers`. A cluster is started when there is something to do.

    Args:
        jobs: whose methods the workers must have.
    """

    in_order = False

    def __init__(self, spec: ClusterSpec, setting: Setting, jobs: Iterable[Job], reporter: Reporter) -> None:
        self.spec, self.setting, self.reporter = spec, setting, reporter
        self.methods = tuple({job.name: (job.name, pickle.dumps(job.chosen), job.source) for job in jobs}.values())
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._needed: MustHave | None = None
        self._workers: dict[str, _Worker] = {}  # by address
        self._refused: set[str] = set()
        self._waiting: Node | None = None  # what no worker could take when it was last asked
        self._heard: queue.SimpleQueue[Event | Outcome | None] = queue.SimpleQueue()  # None: a node has ended
        # Bytes for each worker that has no limit of its own.
        self._memory = MEMORY * psutil.virtual_memory().available / spec.count if spec.kind == LOCAL else math.inf
        self._looked, self._idle_since, self._told = 0.0, time.monotonic(), False

    @property
    def cluster(self) -> Cluster:
        """The connection to the scheduler, made when it is first asked for."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(opened(self.spec, self.setting.home, self.reporter.warn))
            self._cluster.client.subscribe_topic(self._topic, self._put)
        return self._cluster

    def _put(self, event: tuple[float, dict[str, Any]]) -> None:
        said = {key: value for key, value in event[1].items() if key != "worker"}  # which Dask adds
        self._heard.put(Event(**said))

    @property
    def count(self) -> int:
        """How many workers there are, or will be."""
        return self.spec.count or max(1, len(self._there()))

    def accelerators(self) -> bool:
        """Whether any worker declares an accelerator."""
        if not self.spec.address:
            return self.spec.accelerators
        return any(_has_accelerator(info) for info in self._there().values())

    @property
    def _topic(self) -> str:
        return f"ifsl_bench-{self.setting.run}"

    # -- what the loop calls

    def fits(self, node: Node) -> bool:
        found = self._idle(node) is not None
        self._waiting = None if found else node
        return found

    def submit(self, node: Node, priority: int) -> None:
        worker = self._idle(node)
        assert worker is not None
        packed = pickle.dumps(replace(node, needs=(), results=()))  # the rest is the loop's business
        share = max(worker.threads, node.wants.threads)
        worker.node = node
        worker.future = self.cluster.client.submit(
            run_on_worker, packed, node.key, self.setting, share, self._topic, pure=False, priority=priority,
            key=f"{self._topic}/{node.key}/{uuid.uuid4().hex}", workers=[worker.address],
            resources={ACCELERATOR: 1} if node.wants.accelerator else None,
        )  # fmt: skip
        worker.future.add_done_callback(lambda future: self._heard.put(None))

    def wait(self) -> Iterable[Event | Outcome]:
        if time.monotonic() - self._looked > LOOK:
            self._look()
        found: list[Event | Outcome] = []
        with suppress(queue.Empty):
            said = [self._heard.get(timeout=0.5)]
            while not self._heard.empty():
                said.append(self._heard.get())
            found += [one for one in said if one is not None]
        return [*found, *self._ended()]  # in this order: what a node has said comes before its end

    def close(self, at_once: bool = False) -> None:
        """Lets go of all nodes: what a worker has begun stops at its next word. A cluster of our own is ended."""
        if self._cluster is not None and self._cluster.alive:
            for worker in self._workers.values():
                if worker.future is not None:
                    worker.future.cancel(force=True)
        self._workers.clear()
        self._stack.close()

    # -- who is there

    def _idle(self, node: Node) -> _Worker | None:
        """An idle worker that can take a node, on a machine with enough idle cores."""
        wants = node.wants
        free = [w for w in self._workers.values() if w.node is None and w.accelerator >= wants.accelerator]
        free = [w for w in free if self._has_room(w.host, wants)]
        return min(free, key=lambda w: (w.accelerator, -w.threads), default=None)  # leave accelerators to their own

    def _has_room(self, host: str, wants: Wants) -> bool:
        """Whether a machine has cores and memory for one more node; an idle one takes any."""
        here = [worker for worker in self._workers.values() if worker.host == host]
        running = [worker.node.wants for worker in here if worker.node is not None]
        threads = sum(other.threads for other in running) + wants.threads
        memory = sum(other.memory for other in running) + wants.memory
        enough = threads <= sum(worker.threads for worker in here) and memory <= sum(worker.memory for worker in here)
        return not running or enough

    def _there(self) -> Mapping[str, Any]:
        """The workers that the scheduler knows, by address."""
        client = self.cluster.client
        # Not Client.scheduler_info: what it returns may be the answer to its own clock, which asks for no workers.
        return self._ask(client.sync, client.scheduler.identity)["workers"]

    def _look(self) -> None:
        """Sees who is there; new workers are examined."""
        there = self._there()
        self._looked = time.monotonic()
        self.cluster.mend(len(there))
        for address in self._workers.keys() - there.keys():
            worker = self._workers.pop(address)
            if worker.node is not None:
                worker.future.cancel(force=True)
                self._heard.put(Outcome(worker.node.key, "lost", f"its worker {address} died"))
        if new := there.keys() - self._workers.keys() - self._refused:
            self._examine({address: there[address] for address in new})
        self._tell(len(there))

    def _ask(self, question: Any, *arguments: Any, **keywords: Any) -> Any:
        """An answer of the scheduler's; raises :class:`UserError` where it is gone."""
        if self.cluster.alive:
            try:
                return question(*arguments, **keywords)
            except (OSError, RuntimeError, dask().CancelledError):
                if self.cluster.alive:
                    raise
        raise UserError(f"the scheduler of {self.cluster.name} is gone; the same command goes on from where it stopped")

    def _examine(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        if self._needed is None:
            self._needed = self._stack.enter_context(wanted(self.setting.home, self.methods))
        client, mine = self.cluster.client, versions()
        asked = self._ask(client.get_versions, packages=list(PACKAGES))["workers"]
        theirs = {address: asked[address] for address in new if asked.get(address)}  # others left in between
        problems = {address: _mismatch(mine, found) for address, found in theirs.items()}
        if same := [address for address, problem in problems.items() if not problem]:
            answers = self._ask(client.run, unfit, self._needed, workers=same, on_error="return")
            for address, answer in answers.items():
                if isinstance(answer, OSError):  # it left in between
                    del problems[address]
                else:
                    problems[address] = answer if isinstance(answer, str) else f"cannot work: {one_line(repr(answer))}"
        declared = [address for address, info in new.items() if _has_accelerator(info) and problems.get(address) == ""]
        if declared:
            answers = self._ask(client.run, without_accelerator, workers=declared, on_error="return")
            problems |= {
                address: f"declares {ACCELERATOR}=1, but PyTorch sees none there"
                for address, answer in answers.items()
                if answer is True
            }
        first = not self._workers
        for address, problem in problems.items():
            name = f"worker {address} on {new[address]['host']}"
            if problem and first:
                raise UserError(f"{name} {problem}")
            if problem:  # the others go on
                self._refused.add(address)
                self.reporter.warn(f"{name} gets no work: it {problem}")
                continue
            info = new[address]
            if self.spec.kind == LOCAL:  # its processes write where this one does
                self._ask(client.run, print_to, self.setting, info["name"], workers=[address], on_error="return")
            memory = info["memory_limit"] or self._memory
            self._workers[address] = _Worker(address, info["host"], info["nthreads"], memory, _has_accelerator(info))

    def _tell(self, there: int) -> None:
        """Says once why nothing happens."""
        waiting = self._waiting is not None and self._idle(self._waiting) is None  # some may have come since
        if not waiting or any(worker.node for worker in self._workers.values()):
            self._idle_since, self._told = time.monotonic(), False
        elif not self._told and time.monotonic() - self._idle_since > SILENCE:
            self._told = True
            lack = f"a worker with {ACCELERATOR}=1 among its resources" if there else "workers"
            self.reporter.warn(f"{self.cluster.name}: {self._waiting} waits for {lack}; there are {there} workers")

    def _ended(self) -> Iterator[Outcome]:
        """Outcomes of the nodes that have ended."""
        for worker in list(self._workers.values()):
            if worker.node is not None and worker.future.done():
                node, future = worker.node, worker.future
                worker.node = worker.future = None
                outcome = self._outcome(node, worker, future)
                if outcome.how == "lost" and outcome.said.startswith(SICK):
                    self._dismiss(worker, outcome.said)
                yield outcome

    def _dismiss(self, worker: _Worker, why: str) -> None:
        """Gives a worker nothing more; raises :class:`UserError` where it was the last."""
        del self._workers[worker.address]
        self._refused.add(worker.address)
        said = f"worker {worker.address} on {worker.host} gets no more work: {why}"
        if not self._workers:
            raise UserError(f"{said}; there is no other, and the same command goes on from where it stopped")
        self.reporter.warn(said)

    def _outcome(self, node: Node, worker: _Worker, future: Any) -> Outcome:
        if future.status == "cancelled":
            self._ask(lambda: None)  # as all futures are, once the scheduler is gone
            return Outcome(node.key, "lost", f"its worker {worker.address} died")
        if (error := future.exception()) is None:
            return future.result()
        if isinstance(error, dask("distributed").scheduler.KilledWorker):
            return Outcome(node.key, "lost", f"its worker {worker.address} died")
        return Outcome(node.key, "failed", one_line(f"on worker {worker.address}: {type(error).__name__}: {error}"))


def _has_accelerator(info: Mapping[str, Any]) -> bool:
    return bool(info.get("resources", {}).get(ACCELERATOR, 0) >= 1)


def versions() -> dict[str, str]:
    """What a worker must have the same of."""
    return {"python": _minor(platform.python_version()), **{name: version(name) for name in PACKAGES}}


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def _mismatch(mine: Mapping[str, str], theirs: Mapping[str, Any]) -> str:
    """In what a worker's versions differ, in words; "" in nothing."""
    found = theirs["packages"] | {"python": _minor(theirs["packages"]["python"])}
    return "; ".join(
        f"has {name} {found[name]}, this command has {wanted}: install the same on both"
        if found.get(name)
        else f"has no {name}, this command has {wanted}: install it there"
        for name, wanted in mine.items()
        if found.get(name) != wanted
    )
