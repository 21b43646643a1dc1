"""What a notebook calls, and what the command line calls: one function a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.device import choose_device
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.processor import evaluating
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.outline import Outline, outline_of
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.episodic.trained import trained_facts
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocol.training import Training
from ifsl_bench.protocol.variants import make_change
from ifsl_bench.running.evaluating import Evaluate, stages_of
from ifsl_bench.running.job import Job, make_jobs
from ifsl_bench.running.preparation import PrepareData
from ifsl_bench.running.ranges import forget
from ifsl_bench.running.renewing import put_aside
from ifsl_bench.running.stored import store, stored_result


def workspace(
    home: str | Path | None = None,
    results: str | Path | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Workspace:
    """Where things are kept and computed; see :meth:`ifsl_bench.common.files.Home.locate` for the defaults.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1`` for everything; ``auto`` leaves it to a rule which stages an accelerator
            gets, if there is one, see :mod:`ifsl_bench.backbone.placement`.
    """
    return Workspace(Home.locate(home, results), choose_device(device), reporter or Reporter(), device != "auto")


def run(
    method: str | type[Method],
    task: str,
    *,
    options: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    seed: int = 0,
    episodes: int | None = None,
    change: Mapping[str, int | str] | None = None,
    tune: int = 0,
    calibrate: bool = False,
    rerun: bool = False,
    retrain: bool = False,
    work: Workspace | None = None,
) -> Result:
    """Runs one method on one task and returns the result, stored as a file as well.

    Args:
        method: a registered name, see ``ifsl-bench methods``; ``path/to/file.py:Class``; or a subclass of
            :class:`ifsl_bench.Method`.
        task: a task's name, or ``path/to/my.toml`` (with ``:name`` if it defines several); it may go on with changes,
            as in ``glyphs-5shot+ways=10``.
        options: the method's own, e.g. ``{"normalise": True}``.
        train: e.g. ``{"episodes_per_step": 4}``; see :class:`ifsl_bench.protocol.training.Training`.
        seed: of meta-training, and of pretraining unless the task has one for all seeds; never of the test episodes.
        episodes: the first so many test episodes; the task's own number by default, which may be exceeded.
        change: the same changes as a mapping, ``{"ways": 10, "base-classes": 50}``; see
            :mod:`ifsl_bench.protocol.variants`.
        tune: choose among so many settings of the method's space on validation episodes, its default among them; 0
            for the method as published.
        calibrate: add the bias to the novel logits that is best on validation episodes; a row of its own, such as
            ``imprint+cal``.
        rerun: evaluate again even if the same result is stored.
        retrain: train again even if the model is stored, which is kept under another name.
        work: folders, device and progress display; see :func:`workspace`.

    Raises:
        UserError: whatever is wrong, in one line.
    """
    work, training, changes = (
        work or workspace(),
        Training.parse({} if train is None else train),
        make_change(change or {}),
    )
    about = training, [seed], episodes, changes, work.home, tune, calibrate
    jobs = make_jobs([method], [task], options or {}, *about)
    return run_jobs([_only(jobs)], work, rerun=rerun, retrain=retrain, command="ifsl_bench.run(...)")[0]


def _only(jobs: Sequence[Job]) -> Job:
    if len(jobs) != 1:
        raise UserError(f"the file defines the tasks {', '.join(job.task.name for job in jobs)}; say which: FILE:NAME")
    return jobs[0]


def run_jobs(
    jobs: Sequence[Job], work: Workspace, *, rerun: bool = False, retrain: bool = False, command: str = ""
) -> list[Result]:
    """Runs jobs in their order, skipping what is stored already; each result is on disk before the next job starts.

    Args:
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored, which is kept under another name; rerun follows.
    """
    made: list[Result] = []
    renewed: set[Path] = set()  # what jobs share, as trials, is trained anew once
    for job in jobs:
        if retrain:
            for stage in stages_of(job):
                put_aside(stage, work, renewed)
        result = None if rerun or retrain else stored_result(job, work)
        if result is not None:
            work.reporter.say(f"{job}: stored already (--rerun repeats it)")
        else:
            result = run_job(job, work, command)
            store(job, work, result)
        made.append(result)
    return made


def run_job(job: Job, work: Workspace, command: str = "") -> Result:
    """Runs the stages of a job; nothing is written to the results folder.

    Raises:
        UserError: data that have to be obtained first, episodes that cannot be drawn, training that diverged.
    """
    _outline(job, work)  # before anything is made, let alone trained
    *stages, evaluation = stages_of(job, command)
    with evaluating():
        for stage in stages:
            stage.run(work)
        return evaluation.run(work)


def _outline(job: Job, work: Workspace) -> Outline:
    """What is known of the job's data; raises :class:`UserError` where its episodes cannot be drawn from them."""
    outline = outline_of(job.task, work.home)
    PrepareData(job.task, job.sides).check(outline)
    return outline


def evaluate_checkpoint(
    checkpoint: Path,
    task: str,
    *,
    select: str | None = None,
    episodes: int | None = None,
    change: Mapping[str, int | str] | None = None,
    work: Workspace | None = None,
    command: str = "",
) -> Result:
    """Evaluates a stored meta-trained model; nothing is trained, and the result is returned, not stored.

    Args:
        checkpoint: a folder under ``trained`` in the cache, or its name.
        select: "best" for the parameters that were best on validation, in place of the last ones.
        task, episodes, change: as in :func:`run`.

    Raises:
        UserError: no such model, an unfinished one, other code or options of the method, or a backbone that is not in
            the cache.
    """
    work = work or workspace()
    folder = checkpoint if checkpoint.is_dir() else work.home.trained / checkpoint.name
    info = trained_facts(folder)
    train = info["train"] | ({"select": select} if select else {})
    about = Training.parse(train), [info["seed"]], episodes, make_change(change or {}), work.home
    package = info.get("distribution", {}).get("name")  # others may have a method of that name too
    said = f"{package}:{info['method']}" if package and ":" not in info["method"] else info["method"]
    job = _only(make_jobs([said], [task], info["options"], *about))
    evaluation = Evaluate(job, folder, command)
    if other := job.other_method(work.home, info):
        work.reporter.warn(f"{job.name} is another method than the one that {folder.name} was trained with: {other}")
    PrepareData(job.task, ("test",)).run(work)
    if (key := evaluation.backbone.key(work.home)) != info["pretraining"]:
        raise UserError(f"{folder.name} was trained on the features of {info['pretraining']}; task {job.task.name} "
                        f"has {key}: choose a task with the same data and pretraining")  # fmt: skip
    if evaluation.backbone.weights(work.home) != info["pretraining_sha256"]:
        raise UserError(f"the backbone {key} that {folder.name} was trained on is not in {work.home.pretrained} "
                        f"or was trained again since; evaluate it with the --home it was trained in")  # fmt: skip
    result = evaluation.run(work)
    forget(job, work.home, folder)
    return result
