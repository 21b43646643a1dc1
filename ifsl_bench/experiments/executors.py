"""Executors: the places where nodes run, each of which takes one node at a time; and how a node runs in a process.

``submit(node)`` hands a node to an idle place and returns a future, ``end(node)`` tells what became of it.
:class:`Here` has this process as its only place, :class:`ifsl_bench.experiments.local_workers.LocalWorkers` has worker
processes of loky on this machine, and :class:`ifsl_bench.experiments.dask_workers.DaskWorkers` those of a cluster.
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ifsl_bench.backbones.device import give_back_freed_memory
from ifsl_bench.experiments.evaluate_stage import Evaluate
from ifsl_bench.experiments.graph import Node
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import FAILED, Event, Log, event_now
from ifsl_bench.experiments.rates import Rates
from ifsl_bench.experiments.stored_results import store
from ifsl_bench.experiments.training_curves import CurveLogs, Curves
from ifsl_bench.experiments.workspace import Workspace, workspace
from ifsl_bench.utils import threads as processor
from ifsl_bench.utils.errors import UserError, format_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter, Reporter

HERE = "here"  # the device of places that see what this process sees


@dataclass(eq=False)
class Place:
    """A process that runs one node at a time."""

    name: str
    host: str = ""  # its machine, of which it has so many cores and bytes:
    threads: int = 1
    memory: float = float("inf")
    device: str = HERE  # the accelerator that it computes on, "" for none; places that share one take turns
    node: Node | None = None  # what it runs; None while it is idle
    last: str = ""  # key of the node before: what that has opened, the next one may use
    future: Any = None  # of its node


class Executor(ABC):
    """The base of those that run nodes; they say how one is sent to a place, and what becomes of one that is lost."""

    in_order = False
    """True where nodes are handed out job by job, so that one job ends before the next begins, and tell of themselves;
    False where they go by how many results wait for them, and their logs are read."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)

    @property
    def count(self) -> int:
        """The number of nodes that can run at once."""
        return len(self.places)

    def ready(self, work: Workspace) -> Workspace:
        """Returns the workspace with the kind of device that the places compute on."""
        return work

    def fits(self, node: Node) -> bool:
        """Tells whether a place can take the node now."""
        return self._place_for(node) is not None

    def submit(self, node: Node) -> Any:
        """Sends a node that fits to an idle place; returns a future of its end."""
        place = self._place_for(node)
        assert place is not None
        place.node = node
        try:
            place.future = self._send(place, node, max(place.threads, node.wants.threads))
        except (OSError, BrokenExecutor) as error:  # no memory for another process, or one that ended while it was idle
            place.future = Future()
            place.future.set_exception(error)
        return place.future

    def end(self, node: Node) -> Event:
        """Returns how a node ended ("done", "failed" or "lost"), and frees its place.

        Raises:
            UserError: there is no place left where nodes could run.
        """
        (place,) = (place for place in self.places if place.node is node)
        try:
            event: Event = place.future.result()
        except Exception as error:
            event = self._lost(place, error)
        place.node, place.future, place.last = None, None, node.key
        return event

    def look(self) -> None:  # noqa: B027  # in one process there is nothing to see
        """Sees which places there are; called every second or so."""

    def close(self) -> None:  # noqa: B027  # or to end
        """Ends all places, and what they run."""

    @abstractmethod
    def _send(self, place: Place, node: Node, share: int) -> Any:
        """Starts the node in a place, with so many cores; returns a future of its end."""

    @abstractmethod
    def _lost(self, place: Place, error: Exception) -> Event:
        """The end of a place's node whose future has an error in place of one."""

    def _place_for(self, node: Node) -> Place | None:
        """An idle place on a machine with room; accelerators are left to those that want one, and what the nodes before
        have opened to those that go on with it."""
        in_use = {place.device for place in self.places if place.node and place.node.wants.accelerator}
        places = [place for place in self.places if place.node is None and self._has_room(place.host, node)]
        if node.wants.accelerator:
            places = [place for place in places if place.device and place.device not in in_use]
        return min(places, key=lambda p: (bool(p.device), p.last not in node.needs, -p.threads), default=None)

    def _has_room(self, host: str, node: Node) -> bool:
        """Tells whether a machine has cores and memory for one more node; an idle machine takes any."""
        places = [place for place in self.places if place.host == host]
        wants = [node.wants, *(place.node.wants for place in places if place.node)]
        threads, memory = sum(w.threads for w in wants), sum(w.memory for w in wants)
        enough = threads <= sum(p.threads for p in places) and memory <= sum(p.memory for p in places)
        return len(wants) == 1 or enough


class Here(Executor):
    """This process. A node has run when it has been submitted.

    Args:
        alone: whether one job is run: the error of a stage of its is raised as it is.
    """

    in_order = True

    def __init__(self, work: Workspace, alone: bool = False) -> None:
        super().__init__([Place(HERE)])
        self.log, self.reporter, self.alone = Log(work.home, work.reporter), work.reporter, alone
        self.work = replace(work, reporter=self.log)

    def _send(self, place: Place, node: Node, share: int) -> Future[Event]:
        future: Future[Event] = Future()
        event, error = attempt(node, self.work, self.log, self.reporter)
        future.set_exception(error) if error and self.alone else future.set_result(event)
        return future

    def _lost(self, place: Place, error: Exception) -> Event:
        raise error


# -- how a node runs, in whatever process and on whatever machine


@dataclass(frozen=True)
class Setting:
    """The settings that all nodes of a run share; can be pickled."""

    home: Paths  # with whole paths
    device: str  # what the user said: "auto", "cpu", "cuda", "cuda:1"
    cores: int  # of work that takes the whole machine, see ifsl_bench.utils.threads
    run: str  # tells this run from others: a worker that serves several keeps nothing from one to the next
    curves: CurveLogs | None = None  # as of the workspace


def packed(node: Node) -> bytes:
    """A node for another process; what only the loop needs of it, up to hundreds of jobs, stays here."""
    return pickle.dumps(replace(node, needs=(), results=()))


def run_packed(content: bytes, setting: Setting, share: int, reporter: Reporter | None = None) -> Event:
    """Runs a packed node to its end, and stores what it makes; returns how it ended, whatever goes wrong.

    Args:
        share: cores that this process may keep busy.
        reporter: hears of it, beside the node's log.
    """
    try:
        node: Node = pickle.loads(content)
    except Exception as error:  # a method that is not there, or not as it was
        return event_now(FAILED, f"a worker cannot load it: {format_error(error)}")
    processor.limit(setting.cores, share)
    work, log = _opened(setting)
    try:
        return attempt(node, work, log, reporter or NullReporter())[0]
    finally:
        sys.stdout.flush()


def attempt(node: Node, work: Workspace, log: Log, reporter: Reporter) -> tuple[Event, Exception | None]:
    """Runs a node in a workspace, and stores a result; returns how it ended, and the error if it failed.

    Args:
        log: the workspace's reporter.
        reporter: hears what the log does.

    Raises:
        Unheard: the reporter has nobody who listens.
    """
    log.to = reporter
    if work.curves:
        log.to = Curves(work.curves, node.key, reporter)
    with log.of(node.key, str(node)):
        try:
            with processor.evaluating():
                artefact = node.stage.compute(work)
            if node.last and isinstance(node.stage, Evaluate):
                store(node.stage.job, work, artefact)
        except Exception as error:
            return log.end(error), error
        finally:
            give_back_freed_memory()
        end = log.end()
    if node.amount is not None:
        Rates(work.home).learn(node.amount, end.seconds)
    return end, None


@lru_cache(maxsize=1)
def _opened(setting: Setting) -> tuple[Workspace, Log]:
    """The workspace of a run, kept from one node to the next with what it has open, and its reporter."""
    log = Log(setting.home, NullReporter())
    work = workspace(setting.home.cache, setting.home.results, setting.device, log)
    return replace(work, curves=setting.curves), log


def check_sendable(jobs: Iterable[Job]) -> None:
    """Raises :class:`UserError` where another process could not load a job's method."""
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
