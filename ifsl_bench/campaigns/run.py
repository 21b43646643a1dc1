"""Runs jobs: makes their graph, finds workers for it, and says what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ifsl_bench.campaigns.graph import Graph, Node, graph_of
from ifsl_bench.campaigns.here import Here
from ifsl_bench.campaigns.logs import log_path
from ifsl_bench.campaigns.schedule import Failure, Watch, Workers, schedule
from ifsl_bench.common.errors import UserError
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.job import Job
from ifsl_bench.running.renewing import put_aside


@dataclass(frozen=True)
class Ended:
    """What became of jobs.

    Attributes:
        made: those whose result is stored, in their order.
        failed: a line for each of the others.
    """

    made: list[Job]
    failed: list[str]


def run_campaign(
    jobs: Sequence[Job],
    work: Workspace,
    *,
    rerun: bool = False,
    retrain: bool = False,
    command: str = "",
    workers: Workers | None = None,
    watch: Watch | None = None,
) -> Ended:
    """Runs jobs, skipping what is done already; one that fails does not stop the others.

    Args:
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored, which is kept under another name; rerun follows.
        command: what the user typed, recorded with results.
        workers: that run the stages; this process by default. They are closed at the end.

    Raises:
        UserError: the only job cannot be run, or all of them for one and the same reason.
    """
    graph = graph_of(jobs, work, rerun, retrain, command)
    renewed: set[Path] = set()

    def before(node: Node) -> None:
        if node.anew:
            put_aside(node.stage, work, renewed)

    hands = workers or Here(work)
    try:
        failures = schedule(graph, hands, watch, before)
    except BaseException:
        hands.close(at_once=True)
        raise
    hands.close()
    if len(jobs) == 1 and isinstance(hands, Here) and hands.errors:
        raise next(iter(hands.errors.values()))
    if failures and len(failures) == len(jobs) and len({failure.said for failure in failures}) == 1:
        raise UserError(failures[0].said)
    failed = {failure.job for failure in failures}
    made = [job for index, job in enumerate(graph.jobs) if index not in failed]
    return Ended(made, [_line(failure, graph, work) for failure in failures])


def _line(failure: Failure, graph: Graph, work: Workspace) -> str:
    """Which job, in which stage, and why."""
    job, node = graph.jobs[failure.job], failure.node
    if node is None:
        return f"{job}: {failure.said}"
    log = log_path(work.home, node.key)
    return f"{job}, in {node.stage.kind}: {failure.said}" + (f" (log: {log})" if log.exists() else "")
