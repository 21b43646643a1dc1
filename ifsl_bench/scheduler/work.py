"""Runs one node, in whatever process and on whatever machine."""

from __future__ import annotations

import pickle
import sys
import uuid
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ifsl_bench.common import processor
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Mute, Relay, Reporter
from ifsl_bench.episodic.prepared import Workspace, workspace
from ifsl_bench.jobs.evaluating import Evaluate
from ifsl_bench.jobs.rates import Rates
from ifsl_bench.scheduler.graph import Node
from ifsl_bench.scheduler.logs import DONE, Log
from ifsl_bench.store.stored import store

Ending = Literal["done", "failed", "lost"]


@dataclass(frozen=True)
class Setting:
    """The settings that all nodes of a run share; can be pickled.

    Attributes:
        home: with whole paths.
        device: what the user said: "auto", "cpu", "cuda", "cuda:1".
        cores: of work that takes the whole machine, see :mod:`ifsl_bench.common.processor`.
        curves: as of the workspace; "" for none.
        run: tells this run from others, so that a worker that serves several keeps nothing from one to the next.
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


@dataclass(frozen=True)
class Outcome:
    """The end of a node; can be pickled, whatever the method raised.

    Attributes:
        key: of the node.
        how: "done"; "failed", which the same node would do again; or "lost": its worker died, or what it
            had made was taken away.
        why: one line: why it failed or was lost.
        seconds: that it took.
    """

    key: str
    how: Ending
    why: str = ""
    seconds: float = 0.0


def packed(node: Node) -> bytes:
    """A node for another process; what only the loop needs of it, up to hundreds of jobs, stays here."""
    return pickle.dumps(replace(node, needs=(), results=()))


def run_packed(content: bytes, key: str, setting: Setting, share: int, reporter: Reporter | None = None) -> Outcome:
    """Runs a packed node to its end, and stores what it makes; what goes wrong is told by what is returned.

    Args:
        key: of the node, which a process that cannot load it does not know.
        share: cores that this process may keep busy.
        reporter: hears of it, beside the node's log.
    """
    try:
        node = pickle.loads(content)
    except Exception as error:  # a method that is not there, or not as it was
        return Outcome(key, "failed", f"a worker cannot load it: {plainly(error)}")
    processor.limit(setting.cores, share)
    work, relay = _work(setting)
    try:
        return attempt(node, work, relay, reporter or Mute())[0]
    finally:
        sys.stdout.flush()


def attempt(node: Node, work: Workspace, relay: Relay, reporter: Reporter) -> tuple[Outcome, Exception | None]:
    """Runs a node in a workspace, and stores a result; returns how it ended, and the error if it failed.

    Args:
        relay: the workspace's reporter, which is led to the node's log and to ``reporter``.

    Raises:
        Unheard: the reporter has nobody who listens.
    """
    heard = reporter
    if work.curves:
        from ifsl_bench.common.curves import Curves

        heard = Curves(work.curves / node.key, reporter)
    with Log(work.home, node.key, str(node), heard) as log:
        relay.to = log
        try:
            with processor.evaluating():
                artefact = node.stage.compute(work)
            if node.last and isinstance(node.stage, Evaluate):
                store(node.stage.job, work, artefact)
        except Exception as error:
            why = plainly(error)
            log.failed(error, why)
            return Outcome(node.key, "failed", why, log.seconds), error
        finally:
            relay.to = reporter
        log.write(DONE, seconds=log.seconds)
        if node.amount is not None:
            Rates(work.home).learn(node.amount, log.seconds)
        return Outcome(node.key, "done", "", log.seconds), None


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
def _work(setting: Setting) -> tuple[Workspace, Relay]:
    """The workspace of a run, kept from one node to the next with what it has open."""
    relay = Relay(Mute())
    work = workspace(setting.home.cache, setting.home.results, setting.device, relay)
    return replace(work, curves=Path(setting.curves) if setting.curves else None), relay
