"""All stages of a job in their order, for those who tell of them or walk them one by one."""

from __future__ import annotations

from ifsl_bench.jobs.evaluating import Evaluate
from ifsl_bench.jobs.job import Job
from ifsl_bench.jobs.preparation import CheckEpisodes, PrepareData, Stage


def stages_of(job: Job) -> list[Stage]:
    """The stages of a job, each after those it waits for: its data first, what gives the result last.

    The checks of its episodes are part of the first.
    """
    stages: list[Stage] = [PrepareData(job.task, job.sides)]
    trials: set[str] = set()

    def add(stage: Stage) -> None:
        for needed in stage.inputs():
            # Candidates may be thousands: they are told apart by what they are called.
            if needed.kind == "trial":
                if str(needed) in trials:
                    continue
                trials.add(str(needed))
            elif isinstance(needed, (PrepareData, CheckEpisodes)) or needed in stages:
                continue
            add(needed)
        stages.append(stage)

    add(Evaluate(job))
    return stages
