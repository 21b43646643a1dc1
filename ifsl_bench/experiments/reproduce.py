"""A stored result's job, run again, and what came out held against what is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.analysis.aggregate import mismatch
from ifsl_bench.data.datasets import is_prepared
from ifsl_bench.data.preparing.metadata import data_of, metadata_of
from ifsl_bench.experiments.job import Job, make_jobs
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.runner import stages_of
from ifsl_bench.experiments.stages import data_stage_of
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method_source import same_method
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import is_plain
from ifsl_bench.store import schema as result_file
from ifsl_bench.store.rounding import changes, retrained, unexplained
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import short
from ifsl_bench.utils.threads import evaluating


@dataclass(frozen=True)
class Reproduced:
    """A stored result, and the same job's result now."""

    stored: Result
    rerun: Result
    episodes: int | None  # how many episodes have other counts; None where the two are not of the same episodes or data
    points: float  # accuracy now minus accuracy stored, in percentage points
    reasons: tuple[str, ...]  # what else is not as it was, in words
    chosen: tuple[str, ...] = ()  # in what the options and the training differ, in words
    search: tuple[str, ...] = ()  # in what the search for them differs, in words
    unexplained: tuple[str, ...] = ()  # what another processor does not explain, in words; see rounding

    @property
    def explained(self) -> bool:
        """True where another processor, or other libraries, explain all that differs."""
        same = self.episodes is not None and not self.search
        return same and all(reason.startswith("other ") for reason in self.reasons) and not self.unexplained

    @property
    def identical(self) -> bool:
        """True where all counts are the same, on the same episodes, with the same settings from the same search."""
        return self.episodes == 0 and not self.chosen and not self.search

    def close(self, within: float) -> bool:
        """Tells whether the accuracy differs by no more percentage points, with the same settings and episodes."""
        return self.episodes is not None and not self.chosen and within > 0 and abs(self.points) <= within

    @property
    def line(self) -> str:
        """The comparison in one line."""
        stored, count = self.stored, len(self.stored.episodes)
        of = f"{stored.label} on {stored.task}, seed {stored.seed}"
        if self.identical:
            return f"{of}: identical, all counts of {count:,} episodes (Acc. {stored.summary['acc']['mean']:.2f})"
        then, now = (f"{result.summary['acc']['mean']:.2f}" for result in (stored, self.rerun))
        where = "" if self.episodes is None else f", other counts in {self.episodes:,} of {count:,} episodes"
        reasons = (*self.chosen, *self.search, *self.reasons)
        because = f" ({'; '.join(reasons)})" if reasons else ""
        how = "differs as on another processor" if self.explained else "differs"
        return f"{of}: {how}, Acc. {now} where {then} is stored ({self.points:+.2f} points){where}{because}"

    @property
    def more(self) -> tuple[str, ...]:
        """More lines where counts differ: the processors, what was trained anew, each count, what stays unexplained."""
        if self.identical or self.episodes is None:
            return ()
        devices = (str(result.provenance.get("device", "unknown")) for result in (self.stored, self.rerun))
        anew = retrained(self.stored, self.rerun)
        cause = [f"rounding went through {anew}"] if anew else []
        counts = [change.line for change in changes(self.stored, self.rerun).values() if change.episodes]
        why = [f"not explained: {'; '.join(self.unexplained)}"] if self.unexplained else []
        return "stored on {}, now on {}".format(*devices), *cause, *counts, *why


def job_of(result: Result, home: Paths, task: str | None = None, method: str | None = None) -> Job:
    """The job that a result is of.

    Args:
        home: where the user's own tasks are.
        task, method: where they are to be found, if not under the names that the result says (a file, that is).

    Raises:
        UserError: task or method are not here, or have other options; or the result names a file in place of one.
    """
    method_name = method or result.method
    if method is None and registry.names_file(method_name):  # it is not the user who named that file
        raise UserError(f"{result.label} on {result.task} cannot be run again here: {method_name!r} is a file, not the "
                        "name of a method; where you trust it, say --method FILE.py:CLASS")  # fmt: skip
    if task is None and not is_plain(result.task):
        raise UserError(f"{result.label} cannot be run again here: {result.task!r} is no task's name; where you trust "
                        "that file, say --task FILE.toml")  # fmt: skip
    options, train = result.own_settings()
    request = Request(
        [method_name], [task or result.task], options, train, result.trials, seeds=[result.seed],
        episodes=len(result.episodes), calibrate=result.calibrated,
    )  # fmt: skip
    try:
        jobs = make_jobs(request, home)
    except UserError as error:
        raise UserError(f"{result.label} on {result.task} cannot be run again here: {error}") from error
    fitting = [job for job in jobs if job.task.name == result.task and job.label == result.label]
    if not fitting:
        labels = ", ".join(f"{job.label} on {job.task.name}" for job in jobs)
        raise UserError(f"{result.label} on {result.task} cannot be run again here: its job would be {labels} now")
    return fitting[0]


def reproduce(path: Path, work: Workspace, task: str | None = None, method: str | None = None) -> Reproduced:
    """Runs the job of a result file again, in the home of ``work``; nothing is written to the results folder.

    What that home holds already is used as it is; in an empty one everything is made anew.

    Raises:
        UserError: no result, a task or method that is not here, or data that have to be obtained first.
    """
    stored = result_file.read(path)
    job, seeds = job_of(stored, work.home, task, method), _seeds(path, stored)
    result = run_unstored(job, work)
    reasons = []
    if (stored.fingerprint, stored.novel_fingerprint) != (result.fingerprint, result.novel_fingerprint):
        reasons.append("other data")
    if stored.digest != result.digest:
        reasons.append("other episodes")
    episodes = None if reasons else _other_counts(stored, result)
    if not same_method(stored.provenance, result.provenance):
        reasons.append("other code of the method")
    if stored.pretraining.get("key") != result.pretraining["key"]:
        reasons.append("a backbone of another recipe")
    elif stored.pretraining.get("sha256") != result.pretraining["sha256"]:
        reasons.append("other weights of the backbone")
    changed = [key for key in ("device", "libraries") if stored.provenance.get(key) != result.provenance.get(key)]
    reasons += [f"other {key}" for key in changed]
    points = result.summary["acc"]["mean"] - stored.summary["acc"]["mean"]
    chosen, search = _other_settings(stored, result)
    why = unexplained(stored, result, seeds) if episodes or chosen else ()
    return Reproduced(stored, result, episodes, points, tuple(reasons), chosen, search, why)


def run_unstored(job: Job, work: Workspace) -> Result:
    """Runs the stages of a job one after the other; nothing is written to the results folder, nor to logs.

    Raises:
        UserError: data that have to be obtained first, episodes that cannot be drawn, training that diverged.
    """
    data_stage_of(job).check(metadata_of(job.task, work.home))  # before anything is made, let alone trained
    *stages, evaluation = stages_of(job)
    with evaluating():
        for stage in stages:
            stage.compute(work)
        return evaluation.compute(work)


def _seeds(path: Path, stored: Result) -> list[Result]:
    """The results of the row that is in this file, of all seeds that lie beside it."""
    stem = path.name.rpartition(".seed-")[0]
    beside = sorted(path.parent.glob(f"{escape(stem)}.seed-*.json")) if stem else []
    others = [result_file.read(neighbour) for neighbour in beside if neighbour != path]
    return [stored, *(result for result in others if not mismatch(stored, result) and result.label == stored.label)]


def _other_settings(stored: Result, rerun: Result) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Says in what the settings differ, and the search for them."""
    chosen = [
        f"{name}.{key} is {_short(now, key)} where {_short(then, key)} is stored"
        for name, then, now in (("options", stored.options, rerun.options), ("train", stored.train, rerun.train))
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    sides = [{(names, point) for names, tried in result.tuned.items() for point in tried} for result in (stored, rerun)]
    search = (
        [] if sides[0] == sides[1] else [f"other settings are tried, {len(sides[1])} where {len(sides[0])} are stored"]
    )
    for name in ("passed_over", "edge"):
        then, now = (sorted(getattr(result, name)) for result in (stored, rerun))
        if then != now:
            texts = " and ".join(now) or "empty", " and ".join(then) or "empty"
            search.append(f"{name} is {texts[0]} where {texts[1]} is stored")
    return tuple(chosen), tuple(search)


def _short(settings: Mapping[str, Any], key: str) -> str:
    return short(settings[key]) if key in settings else "the default"


def _other_counts(a: Result, b: Result) -> int:
    """Counts the episodes in which any count differs."""
    then, now = a.counts().columns(), b.counts().columns()
    differ = [(then[name] != now[name]).reshape(len(a.episodes), -1).any(1) for name in then.keys() & now.keys()]
    return int(np.any(differ, axis=0).sum())


def lend_data(task: Task, lender: Paths, scratch: Paths) -> None:
    """Links a task's data sets, its file, and weights from elsewhere from one home into an empty one."""
    here = [spec.name for spec in data_of(task, lender) if is_prepared(lender, spec.name)]
    pairs = [(lender.tasks, scratch.tasks), (lender.weights, scratch.weights)]
    pairs += ((lender.data / n, scratch.data / n) for n in here)
    for source, target in pairs:
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(source, target, target_is_directory=True)
