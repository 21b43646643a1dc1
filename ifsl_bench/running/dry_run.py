"""``--dry-run``: the stages of a run, what is cached, and a rough time measured here on random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ifsl_bench.data.preparing.outline import outline_of
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.job import Job
from ifsl_bench.running.stages import stages_of
from ifsl_bench.running.stored import stored_result


def dry_run(jobs: Sequence[Job], work: Workspace, rerun: bool = False) -> list[dict[str, str]]:
    """Rows of stage, state ("cached" or "to do") and rough time, in the order of the run. Changes nothing on disk.

    Raises:
        UserError: data that have to be obtained first, or episodes that cannot be drawn from them.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}  # what several jobs need is there once
    for job in jobs:
        if not rerun and stored_result(job, work) is not None:
            title = f"result {job.where}"
            rows[title, ""] = {"stage": title, "state": "cached", "rough time": ""}
            continue
        outline = outline_of(job.task, work.home)
        data, stages, evaluation = stages_of(job)
        data.check(outline)
        for stage in (data, *stages, evaluation):
            if (key := (stage.title, stage.key(work.home))) not in rows:
                cached = stage.cached(work.home)
                shown = "" if cached else _shown(stage.estimate(outline, work.device))
                state = "cached" if cached else "to do"
                rows[key] = {"stage": stage.title, "state": state, "rough time": shown}
    return list(rows.values())


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {10 * round(seconds / 10):.0f} s"
