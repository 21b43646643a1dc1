"""A stored result's job, run again, and what came out held against what is stored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ifsl_bench.board import result_file
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.data.preparing.prepare import dataset_folder, is_prepared
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.plugin.behaviour import comparable, differs
from ifsl_bench.protocol.metrics import COUNTS, MORE_COUNTS
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.training import Training
from ifsl_bench.running.api import run_job
from ifsl_bench.running.job import Job, make_jobs


@dataclass(frozen=True)
class Reproduced:
    """A stored result, and the same job's result now.

    Attributes:
        episodes: how many episodes have other counts; None where the two are not of the same episodes or data.
        points: accuracy now minus accuracy stored, in percentage points.
        reasons: what else is not as it was, in words.
    """

    stored: Result
    found: Result
    episodes: int | None
    points: float
    reasons: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether all counts are the same, of the same episodes."""
        return self.episodes == 0

    @property
    def line(self) -> str:
        """In one line."""
        stored, count = self.stored, len(self.stored.episodes.base_joint)
        of = f"{stored.label} on {stored.task}, seed {stored.seed}"
        if self.identical:
            return f"{of}: identical, all counts of {count:,} episodes (Acc. {stored.summary['acc']['mean']:.2f})"
        then, now = (f"{result.summary['acc']['mean']:.2f}" for result in (stored, self.found))
        where = "" if self.episodes is None else f", other counts in {self.episodes:,} of {count:,} episodes"
        because = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{of}: differs, Acc. {now} where {then} is stored ({self.points:+.2f} points){where}{because}"


def job_of(result: Result, home: Home, task: str | None = None, method: str | None = None) -> Job:
    """The job that a result is of.

    Args:
        home: where the user's own tasks are.
        task, method: where they are to be found, if not under the names that the result says (a file, that is).

    Raises:
        UserError: task or method are not here, or have other options.
    """
    recorded = result.provenance.get("distribution")
    package = str(recorded.get("name") or "") if isinstance(recorded, dict) else ""
    said = method or (f"{package}:{result.method}" if package and ":" not in result.method else result.method)
    options, train = result.given()
    count = len(result.episodes.base_joint)
    given = [said], [task or result.task], options, Training.parse(train), [result.seed], count
    try:
        jobs = make_jobs(*given, home=home, trials=result.trials, calibrate=result.calibrated)
    except UserError as error:
        raise UserError(f"{result.label} on {result.task} cannot be run again here: {error}") from error
    fitting = [job for job in jobs if job.task.name == result.task and job.label == result.label]
    if not fitting:
        found = ", ".join(f"{job.label} on {job.task.name}" for job in jobs)
        raise UserError(f"{result.label} on {result.task} cannot be run again here: its job would be {found} now")
    return fitting[0]


def reproduce(path: Path, work: Workspace, task: str | None = None, method: str | None = None) -> Reproduced:
    """Runs the job of a result file again, in the home of ``work``; nothing is written to the results folder.

    What that home holds already is used as it is; in an empty one everything is made anew.

    Raises:
        UserError: no result, a task or method that is not here, or data that have to be obtained first.
    """
    stored = result_file.read(path)
    job = job_of(stored, work.home, task, method)
    found = run_job(job, work)
    reasons = []
    if stored.fingerprint != found.fingerprint:
        reasons.append("other data")
    if stored.digest != found.digest:
        reasons.append("other episodes")
    episodes = None if reasons else _other_counts(stored, found)
    if stored.older:
        reasons.append("stored under an older rule for checkpoints and grids")
    if stored.probe and found.probe and comparable(stored.probe, found.probe):
        reasons += [f"the method differs in {other}"] if (other := differs(stored.probe, found.probe)) else []
    for name in ("device", "libraries"):
        if stored.provenance.get(name) != found.provenance.get(name):
            reasons.append(f"other {name}")
    points = found.summary["acc"]["mean"] - stored.summary["acc"]["mean"]
    return Reproduced(stored, found, episodes, points, tuple(reasons))


def _other_counts(a: Result, b: Result) -> int:
    """In how many episodes any count differs."""
    pairs = [(getattr(a.counts(), name), getattr(b.counts(), name)) for name in (*COUNTS, *MORE_COUNTS)]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    return int(np.any([one != other for one, other in known], axis=0).sum())


def lend_data(task: Task, lender: Home, scratch: Home) -> None:
    """Lets an empty home use a task's data set as it is prepared in another home, and the task files there."""
    pairs = [(lender.tasks, scratch.tasks)]
    if is_prepared(lender, task.dataset.name):
        pairs.append((dataset_folder(lender, task.dataset.name), dataset_folder(scratch, task.dataset.name)))
    for source, target in pairs:
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(source, target, target_is_directory=True)
