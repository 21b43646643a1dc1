"""Nodes on the workers of a Dask scheduler, behind the interface of :mod:`ifsl_bench.campaigns.schedule`.

Each worker has one node at a time, whatever its number of threads: PyTorch's random numbers and threads are a process's.
So a node is sent to one idle worker by name, and it is known which worker owns it.
"""

from __future__ import annotations

import pickle
import platform
import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from ifsl_bench.campaigns.cluster import Cluster, opened
from ifsl_bench.campaigns.cluster_file import ClusterSpec, dask
from ifsl_bench.campaigns.graph import Node
from ifsl_bench.campaigns.on_dask import run_on_worker
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.work import Outcome, Setting
from ifsl_bench.campaigns.worker_check import Wanted, unfit, wanted
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.progress import Reporter
from ifsl_bench.running.job import Job

ACCELERATOR = "GPU"  # what a worker with one declares: --resources "GPU=1"
PACKAGES = ("ifsl_bench", "torch")
LOOK = 1.0  # seconds between two looks at who is there
SILENCE = 20.0  # seconds without a worker for what waits, until somebody is told


@dataclass
class _Worker:
    """A worker that is fit."""

    address: str
    host: str
    threads: int
    accelerator: bool
    node: Node | None = None
    future: Any = field(default=None, repr=False)


@contextmanager
def dask_workers(
    spec: ClusterSpec, setting: Setting, jobs: Iterable[Job], reporter: Reporter
) -> Iterator[DaskWorkers]:
    """The workers of a cluster; one that is started here is ended with the block.

    Raises:
        UserError: the cluster cannot be had, or its first workers are unfit.
    """
    methods = {job.name: (job.name, pickle.dumps(job.chosen), job.source) for job in jobs}
    with opened(spec, setting.home, reporter.warn) as cluster, wanted(setting.home, methods.values()) as needed:
        workers = DaskWorkers(cluster, setting, needed, reporter)
        try:
            yield workers
        finally:
            workers.close()


class DaskWorkers:
    """See :class:`ifsl_bench.campaigns.schedule.Workers`."""

    in_order = False

    def __init__(self, cluster: Cluster, setting: Setting, needed: Wanted, reporter: Reporter) -> None:
        self.cluster, self.setting, self.needed, self.reporter = cluster, setting, needed, reporter
        self._workers: dict[str, _Worker] = {}  # by address
        self._refused: set[str] = set()
        self._heard: queue.SimpleQueue[Event | Outcome] = queue.SimpleQueue()
        self._looked, self._idle_since, self._told = 0.0, time.monotonic(), False
        self._waiting: Node | None = None  # one that no worker could take
        cluster.client.subscribe_topic(self._topic, lambda event: self._heard.put(Event(**event[1])))

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
        assert worker is not None, "the loop asks first"
        worker.node = node
        share = max(worker.threads, node.wants.threads)
        worker.future = self.cluster.client.submit(
            run_on_worker, pickle.dumps(node), self.setting, share, self._topic,
            key=f"{self._topic}/{node.key}/{time.monotonic_ns()}", priority=priority, workers=[worker.address],
            resources={ACCELERATOR: 1} if node.wants.accelerator else None, pure=False,
        )  # fmt: skip

    def wait(self) -> Iterable[Event | Outcome]:
        if time.monotonic() - self._looked > LOOK:
            self._look()
        found: list[Event | Outcome] = list(self._ended())
        until = time.monotonic() + (0 if found else 0.5)
        while (left := until - time.monotonic()) > 0 and not found:
            try:
                found.append(self._heard.get(timeout=min(left, 0.05)))
            except queue.Empty:
                found += self._ended()
        while not self._heard.empty():
            found.append(self._heard.get())
        return found

    def cancel(self, key: str) -> None:
        """Nothing: a node is sent to a worker that is idle, so that it has begun."""

    def close(self, at_once: bool = False) -> None:
        """Lets go of all nodes: what a worker has begun stops at its next step."""
        for worker in self._workers.values():
            if worker.future is not None and self.cluster.alive:
                worker.future.cancel(force=True)
                worker.node = worker.future = None

    # -- who is there

    def _idle(self, node: Node) -> _Worker | None:
        """An idle worker that can take a node, on a machine with enough idle cores."""
        wants = node.wants
        free = [w for w in self._workers.values() if w.node is None and w.accelerator >= wants.accelerator]
        free = [w for w in free if self._busy(w.host) == 0 or self._busy(w.host) + wants.threads <= self._size(w.host)]
        return min(free, key=lambda w: (w.accelerator, -w.threads), default=None)  # leave accelerators to their own

    def _busy(self, host: str) -> int:
        return sum(w.node.wants.threads for w in self._workers.values() if w.node and w.host == host)

    def _size(self, host: str) -> int:
        return sum(w.threads for w in self._workers.values() if w.host == host)

    def _look(self) -> None:
        """Asks the scheduler who is there; new workers are examined."""
        there: Mapping[str, Any] = self._ask(self.cluster.client.scheduler_info)["workers"]
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
        client, mine = self.cluster.client, versions()
        asked = self._ask(client.get_versions, packages=list(PACKAGES))["workers"]
        theirs = {address: asked[address] for address in new if asked.get(address)}  # others left in between
        problems = {address: _mismatch(mine, found) for address, found in theirs.items()}
        if same := [address for address, problem in problems.items() if not problem]:
            answers = self._ask(client.run, unfit, self.needed, workers=same, on_error="return")
            for address, answer in answers.items():
                if isinstance(answer, OSError):  # it left in between
                    del problems[address]
                else:
                    problems[address] = answer if isinstance(answer, str) else f"cannot work: {one_line(repr(answer))}"
        for address, problem in problems.items():
            name = f"worker {address} on {new[address]['host']}"
            if problem and not self._workers:
                raise UserError(f"{name} {problem}")
            if problem:  # the others go on
                self._refused.add(address)
                self.reporter.warn(f"{name} gets no work: it {problem}")
                continue
            info = new[address]
            accelerator = info.get("resources", {}).get(ACCELERATOR, 0) >= 1
            self._workers[address] = _Worker(address, info["host"], info["nthreads"], accelerator)

    def _tell(self, there: int) -> None:
        """Says once why nothing happens."""
        if self._waiting is None or any(w.node for w in self._workers.values()):
            self._idle_since, self._told = time.monotonic(), False
        elif not self._told and time.monotonic() - self._idle_since > SILENCE:
            self._told = True
            lack = f"a worker with {ACCELERATOR}=1 among its resources" if there else "workers"
            self.reporter.warn(f"{self.cluster.name}: {self._waiting} waits for {lack}; there are {there} workers")

    def _ended(self) -> Iterator[Outcome]:
        """Outcomes of the nodes that have ended."""
        for worker in self._workers.values():
            if worker.node is not None and worker.future.done():
                node, future = worker.node, worker.future
                worker.node = worker.future = None
                yield self._outcome(node, worker, future)

    def _outcome(self, node: Node, worker: _Worker, future: Any) -> Outcome:
        if future.status == "cancelled":
            self._ask(lambda: None)  # as all futures are, once the scheduler is gone
            return Outcome(node.key, "lost", f"its worker {worker.address} died")
        if (error := future.exception()) is None:
            return future.result()  # type: ignore[no-any-return]
        if isinstance(error, dask("distributed").scheduler.KilledWorker):
            return Outcome(node.key, "lost", f"its worker {worker.address} died")
        return Outcome(node.key, "failed", one_line(f"on worker {worker.address}: {type(error).__name__}: {error}"))


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
