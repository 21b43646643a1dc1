"""What a worker does: it runs one node, in whatever process and on whatever machine it is."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ifsl_bench.campaigns.graph import Node
from ifsl_bench.campaigns.logs import Log
from ifsl_bench.common import processor
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.api import workspace
from ifsl_bench.running.stages import Evaluate
from ifsl_bench.running.stored import store

Ended = Literal["done", "failed", "lost"]


@dataclass(frozen=True)
class Setting:
    """What all nodes of a run share; can be pickled.

    Attributes:
        home: with whole paths.
        device: what the user said: "auto", "cpu", "cuda", "cuda:1".
        cores: of work that takes the whole machine, see :mod:`ifsl_bench.common.processor`.
        run: tells this run from others, so that a worker that serves several keeps nothing from one to the next.
    """

    home: Home
    device: str
    cores: int
    run: str


@dataclass(frozen=True)
class Outcome:
    """How a node ended; can be pickled, whatever the method raised.

    Attributes:
        key: of the node.
        how: "done"; "failed", which the same node would do again; or "lost": its worker died.
        said: one line that says why it failed or was lost.
        mistake: whether that is a mistake of the user's, or a state of the machine that the user can change.
        seconds: that it took.
    """

    key: str
    how: Ended
    said: str = ""
    mistake: bool = False
    seconds: float = 0.0


def run_node(node: Node, setting: Setting, share: int | None = None, reporter: Reporter | None = None) -> Outcome:
    """Runs a node to its end, and stores what it makes; what goes wrong is told by what is returned.

    Args:
        share: cores that this process may keep busy; None for all of ``setting.cores``.
        reporter: hears of it, beside the node's log.
    """
    import time

    start = time.monotonic()
    processor.limit(setting.cores, share or setting.cores)
    with Log(setting.home, node, reporter or Reporter()) as log:
        try:
            run_stage(node, replace(_work(setting), reporter=log))
        except UserError as error:
            return log.ended(Outcome(node.key, "failed", str(error), True, time.monotonic() - start))
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            said = f"the system refused{where}: {error.strerror or error}"
            return log.ended(Outcome(node.key, "failed", said, True, time.monotonic() - start))
        except MemoryError:
            return log.ended(Outcome(node.key, "failed", "not enough memory", True, time.monotonic() - start))
        except Exception as error:
            log.write(traceback.format_exc())
            said = one_line(f"{type(error).__name__}: {error}")
            return log.ended(Outcome(node.key, "failed", said, False, time.monotonic() - start))
        return log.ended(Outcome(node.key, "done", seconds=time.monotonic() - start))


def run_stage(node: Node, work: Workspace) -> None:
    """Runs a node's stage, and stores a result."""
    made = node.stage.run(work)
    if node.last and isinstance(node.stage, Evaluate):
        store(node.stage.job, work, made)


@lru_cache(maxsize=1)
def _work(setting: Setting) -> Workspace:
    """The workspace of a run, kept from one node to the next with what it has open."""
    return workspace(setting.home.cache, setting.home.results, setting.device)
