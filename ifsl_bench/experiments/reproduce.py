"""Run of a stored result's job again, and the comparison of the two."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.data.datasets import is_prepared
from ifsl_bench.data.preparing.metadata import data_specs_of_task, load_task_metadata
from ifsl_bench.experiments.job import Job, make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import list_stages
from ifsl_bench.experiments.stages import make_data_stage
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import parse_label, split_off_recipe
from ifsl_bench.plugin.method_source import is_same_method
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import is_task_name
from ifsl_bench.store import schema
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import format_value
from ifsl_bench.utils.threads import limit_evaluation_threads

# In points of accuracy. Processors round differently, a training carries that on over thousands of steps and ends about
# as far away as another seed does, and of the stored rows nine in ten pairs of seeds differ by no more.
ACCURACY_TOLERANCE_POINTS = 1.0


@dataclass(frozen=True)
class Reproduction:
    """A stored result, and the same job's result now.

    Attributes:
        n_differing_episodes: number of episodes or sequences with other counts; None where these or the data are not
            the same.
        difference_reasons: other differences of data, code, backbone, device and libraries, in words.
        setting_differences: differences of options and training, in words.
        search_differences: differences of the search for them, in words.
    """

    stored_result: Result
    new_result: Result
    n_differing_episodes: int | None
    difference_reasons: tuple[str, ...]
    setting_differences: tuple[str, ...] = ()
    search_differences: tuple[str, ...] = ()

    @property
    def accuracy_change(self) -> float:
        """Accuracy now minus accuracy stored, in percentage points."""
        return self.new_result.summary["acc"]["mean"] - self.stored_result.summary["acc"]["mean"]

    @property
    def is_identical(self) -> bool:
        """Whether all counts are the same, with the same settings from the same search."""
        return self.n_differing_episodes == 0 and not self.setting_differences and not self.search_differences

    @property
    def is_explained_by_platform(self) -> bool:
        """Whether device or libraries are others, and the accuracy differs by ``ACCURACY_TOLERANCE_POINTS`` at most."""
        moved = any(
            self.stored_result.provenance.get(key) != self.new_result.provenance.get(key)
            for key in ("device", "libraries")
        )
        same = (
            self.n_differing_episodes is not None
            and not self.search_differences
            and all(r.startswith("other ") for r in self.difference_reasons)
        )
        return moved and same and abs(self.accuracy_change) <= ACCURACY_TOLERANCE_POINTS

    def is_accuracy_close(self, within: float) -> bool:
        """Return whether the accuracy differs by ``within`` points at most, with the same settings and episodes."""
        return (
            self.n_differing_episodes is not None
            and not self.setting_differences
            and within > 0
            and abs(self.accuracy_change) <= within
        )

    @property
    def summary_line(self) -> str:
        """The comparison in one line."""
        stored, drawn = self.stored_result, self.stored_result.protocol.format_count(len(self.stored_result.episodes))
        of = f"{stored.label} on {stored.task}, seed {stored.seed}"
        if self.is_identical:
            return f"{of}: identical, all counts of {drawn} (Acc. {stored.summary['acc']['mean']:.2f})"
        then, now = (f"{result.summary['acc']['mean']:.2f}" for result in (stored, self.new_result))
        where = (
            "" if self.n_differing_episodes is None else f", other counts in {self.n_differing_episodes:,} of {drawn}"
        )
        reasons = (*self.setting_differences, *self.search_differences, *self.difference_reasons)
        because = f" ({'; '.join(reasons)})" if reasons else ""
        how = "differs as on another processor" if self.is_explained_by_platform else "differs"
        return f"{of}: {how}, Acc. {now} where {then} is stored ({self.accuracy_change:+.2f} points){where}{because}"

    @property
    def device_difference(self) -> str | None:
        """The devices of both, in a line; None where all is the same or cannot be compared."""
        if self.is_identical or self.n_differing_episodes is None:
            return None
        devices = (str(result.provenance.get("device", "unknown")) for result in (self.stored_result, self.new_result))
        return "stored on {}, now on {}".format(*devices)


def job_from_result(result: Result, home: Paths, task: str | None = None, method: str | None = None) -> Job:
    """Return the job that a result is of.

    Args:
        result: a stored one.
        home: the folders with the user's own tasks.
        task: a file with the task, if it is not found by its name.
        method: a file with the method, if it is not found by its name.

    Raises:
        UserError: task or method are not here, or have other options; or the result names a file in place of one.
    """
    method_name = method or result.method
    if method is None and registry.refers_to_file(method_name):  # it is not the user who named that file
        raise UserError(
            f"{result.label} on {result.task} cannot be run again here: {method_name!r} is a file, not the name of a "
            "method; where you trust it, say --method FILE.py:CLASS"
        )
    if task is None and not is_task_name(result.task):
        raise UserError(
            f"{result.label} cannot be run again here: {result.task!r} is no task's name; where you trust that file, "
            "say --task FILE.toml"
        )
    recipe = parse_label(result.label).recipe
    if registry.refers_to_file(split_off_recipe(recipe)[0]):
        raise UserError(f"{result.label} on {result.task} cannot be run again here: its recipe is a file, not a name")
    options, train = result.user_settings()
    request = RunConfig(
        [method_name],
        [task or result.task],
        options,
        train,
        result.n_trials,
        seeds=[result.seed],
        episodes=len(result.episodes),
        calibrate=result.includes_bias,
        recipes=[recipe] if recipe else (),
    )
    try:
        jobs = make_jobs(request, home)
    except UserError as error:
        in_file = method is None and not registry.is_installed_method(method_name)
        hint = "; of a method in a file say --method FILE.py:CLASS" if in_file else ""
        raise UserError(f"{result.label} on {result.task} cannot be run again here: {error}{hint}") from error
    fitting = [job for job in jobs if job.task.name == result.task and job.label == result.label]
    if not fitting:
        labels = ", ".join(f"{job.label} on {job.task.name}" for job in jobs)
        raise UserError(f"{result.label} on {result.task} cannot be run again here: its job would be {labels} now")
    return fitting[0]


def reproduce(path: Path, work: Workspace, task: str | None = None, method: str | None = None) -> Reproduction:
    """Run the job of a result file again; nothing is written to the results folder.

    Args:
        path: of the stored result.
        work: artefacts in its home are used; in an empty one everything is made.
        task: a file with the task, if it is not found by its name.
        method: a file with the method, if it is not found by its name.

    Raises:
        UserError: the file is no result, task or method are not here, or data have to be obtained first.
    """
    stored = schema.read_result(path)
    result = run_without_storing(job_from_result(stored, work.home, task, method), work)
    reasons = []
    if (stored.fingerprint, stored.novel_fingerprint) != (result.fingerprint, result.novel_fingerprint):
        reasons.append("other data")
    if stored.digest != result.digest:
        reasons.append(f"other {stored.protocol.drawn_items_noun}")
    episodes = None if reasons else _count_differing_units(stored, result)
    if not is_same_method(stored.provenance, result.provenance):
        reasons.append("other code of the method")
    if stored.pretraining.get("key") != result.pretraining["key"]:
        reasons.append("a backbone of another recipe")
    elif stored.pretraining.get("sha256") != result.pretraining["sha256"]:
        reasons.append("other weights of the backbone")
    changed = [key for key in ("device", "libraries") if stored.provenance.get(key) != result.provenance.get(key)]
    reasons += [f"other {key}" for key in changed]
    return Reproduction(stored, result, episodes, tuple(reasons), *_setting_differences(stored, result))


def run_without_storing(job: Job, work: Workspace) -> Result:
    """Run the stages of a job one after the other; nothing is written to the results folder, nor to logs.

    Args:
        job: to run.
        work: the folders, device and reporter.

    Raises:
        UserError: data that have to be obtained first, episodes that cannot be drawn, training that diverged.
    """
    make_data_stage(job).check_episodes_can_be_drawn(
        load_task_metadata(job.task, work.home)
    )  # before anything is made, let alone trained
    *stages, evaluation = list_stages(job)
    with limit_evaluation_threads():
        for stage in stages:
            stage.compute(work)
        return evaluation.compute(work)


def _setting_differences(stored: Result, rerun: Result) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the differences of the settings, and of the search for them."""
    chosen = [
        f"{name}.{key} is {_format_setting(now, key)} where {_format_setting(then, key)} is stored"
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


def _format_setting(settings: Mapping[str, Any], key: str) -> str:
    return format_value(settings[key]) if key in settings else "the default"


def _count_differing_units(a: Result, b: Result) -> int:
    """Count the episodes or sequences in which any count differs."""
    then, now = a.to_hit_counts().count_arrays(), b.to_hit_counts().count_arrays()
    differ = [(then[name] != now[name]).reshape(len(a.episodes), -1).any(1) for name in then.keys() & now.keys()]
    return int(np.any(differ, axis=0).sum())


def link_prepared_data(task: Task, lender: Paths, scratch: Paths) -> None:
    """Link a task's data sets, its file, and weights from elsewhere from one home into an empty one.

    Args:
        task: whose data are needed.
        lender: the home that has them.
        scratch: the empty one.
    """
    here = [spec.name for spec in data_specs_of_task(task, lender) if is_prepared(lender, spec.name)]
    pairs = [(lender.tasks, scratch.tasks), (lender.weights, scratch.weights)]
    pairs += ((lender.data / n, scratch.data / n) for n in here)
    for source, target in pairs:
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(source, target, target_is_directory=True)
