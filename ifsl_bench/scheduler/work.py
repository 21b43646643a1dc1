"""Runs one node, in whatever process and on whatever machine."""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ifsl_bench.common import processor
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Mute, Reporter
from ifsl_bench.episodic.prepared import Workspace, workspace
from ifsl_bench.jobs.evaluating import Evaluate
from ifsl_bench.jobs.job import Job
from ifsl_bench.jobs.rates import Rates
from ifsl_bench.scheduler.graph import Node
from ifsl_bench.scheduler.logs import FAILED, Event, Log, event_now
from ifsl_bench.store.stored import store


@dataclass(frozen=True)
class Setting:
    """The settings that all nodes of a run share; can be pickled.

    Attributes:
        home: with whole paths.
        device: what the user said: "auto", "cpu", "cuda", "cuda:1".
        cores: of work that takes the whole machine, see :mod:`ifsl_bench.common.processor`.
        run: tells this run from others, so that a worker that serves several keeps nothing from one to the next.
        curves: as of the workspace; "" for none.
    """

    home: Home
    device: str
    cores: int
    run: str
    curves: str = ""

    @classmethod
    def of(cls, work: Workspace, device: str) -> Setting:
        """The setting of a run that begins."""
        return cls(work.home, device, processor.cores(), uuid.uuid4().hex, str(work.curves or ""))


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
        node = pickle.loads(content)
    except Exception as error:  # a method that is not there, or not as it was
        return event_now(FAILED, f"a worker cannot load it: {plainly(error)}")
    processor.limit(setting.cores, share)
    work, log = _opened(setting)
    try:
        return attempt(node, work, log, reporter or Mute())[0]
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
        from ifsl_bench.common.curves import Curves

        log.to = Curves(work.curves / node.key, reporter)
    with log.of(node.key, str(node)):
        try:
            with processor.evaluating():
                artefact = node.stage.compute(work)
            if node.last and isinstance(node.stage, Evaluate):
                store(node.stage.job, work, artefact)
        except Exception as error:
            return log.end(error, plainly(error)), error
        end = log.end()
    if node.amount is not None:
        Rates(work.home).learn(node.amount, end.seconds)
    return end, None


def plainly(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return one_line(f"the system refused{where}: {error.strerror or error}")
    return one_line(f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def _opened(setting: Setting) -> tuple[Workspace, Log]:
    """The workspace of a run, kept from one node to the next with what it has open, and its reporter."""
    log = Log(setting.home, Mute())
    work = workspace(setting.home.cache, setting.home.results, setting.device, log)
    return replace(work, curves=Path(setting.curves) if setting.curves else None), log


def check_sendable(jobs: Iterable[Job]) -> None:
    """Raises :class:`UserError` where another process could not load a job's method."""
    for method, job in {job.method: job for job in jobs}.items():
        why = ""
        if method.__module__ == "__main__" and not job.chosen.file:
            why = "is defined in a notebook or script, where other processes cannot find it"
        try:
            pickle.dumps(job)
        except Exception as error:
            why = why or f"cannot be handed to other processes ({plainly(error)})"
        if why:
            raise UserError(
                f"method {job.name!r} {why}: move it to a file (file.py:{method.__name__}), or run with --jobs 1"
            )
