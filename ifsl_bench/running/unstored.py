"""A job by itself, whose result nobody stores: to be compared with one that is."""

from __future__ import annotations

from ifsl_bench.board.result_file import Result
from ifsl_bench.common.processor import evaluating
from ifsl_bench.data.preparing.outline import outline_of
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.evaluating import stages_of
from ifsl_bench.running.job import Job
from ifsl_bench.running.preparation import PrepareData


def run_unstored(job: Job, work: Workspace) -> Result:
    """Runs the stages of a job one after the other; nothing is written to the results folder, nor to logs.

    Raises:
        UserError: data that have to be obtained first, episodes that cannot be drawn, training that diverged.
    """
    PrepareData(job.task, job.sides).check(
        outline_of(job.task, work.home)
    )  # before anything is made, let alone trained
    *stages, evaluation = stages_of(job)
    with evaluating():
        for stage in stages:
            stage.run(work)
        return evaluation.run(work)
