"""What a notebook calls, and what the command line calls: one function a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.device import choose_device
from ifsl_bench.backbone.pretrain import pretrained_sha256
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.outline import outline_of
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.episodic.trained import trained_facts
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocol.training import Training
from ifsl_bench.protocol.variants import make_change
from ifsl_bench.running.job import Job, make_job
from ifsl_bench.running.stages import Evaluate, PrepareData, Pretrain, stages_of
from ifsl_bench.running.stored import store, stored_result


def workspace(
    home: str | Path | None = None,
    results: str | Path | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Workspace:
    """Where things are kept and computed; see :meth:`ifsl_bench.common.files.Home.locate` for the defaults."""
    return Workspace(Home.locate(home, results), choose_device(device), reporter or Reporter())


def run(
    method: str | type[Method],
    task: str,
    *,
    options: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    seed: int = 0,
    episodes: int | None = None,
    change: Mapping[str, int] | None = None,
    rerun: bool = False,
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
        episodes: the first so many test episodes; all of the task's by default.
        change: the same changes as a mapping, ``{"ways": 10, "base-classes": 50}``; see
            :mod:`ifsl_bench.protocol.variants`.
        rerun: evaluate again even if the same result is stored.
        work: folders, device and progress display; see :func:`workspace`.

    Raises:
        UserError: whatever is wrong, in one line.
    """
    work, training, changes = work or workspace(), Training.parse(train or {}), make_change(change or {})
    job = make_job(method, task, options or {}, training, seed, episodes, changes, work.home)
    return run_jobs([job], work, rerun=rerun, command="ifsl_bench.run(...)")[0]


def run_jobs(jobs: Sequence[Job], work: Workspace, *, rerun: bool = False, command: str = "") -> list[Result]:
    """Runs jobs in their order, skipping what is stored already; each result is on disk before the next job starts."""
    made: list[Result] = []
    for job in jobs:
        result = None if rerun else stored_result(job, work)
        if result is not None:
            work.reporter.say(f"{job.where}: stored already (--rerun repeats it)")
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
    data, stages, evaluation = stages_of(job, command)
    data.check(outline_of(job.task, work.home))  # before anything is made, let alone trained
    for stage in (data, *stages):
        stage.run(work)
    return evaluation.run(work)


def evaluate_checkpoint(
    checkpoint: Path,
    task: str,
    *,
    episodes: int | None = None,
    change: Mapping[str, int] | None = None,
    work: Workspace | None = None,
    command: str = "",
) -> Result:
    """Evaluates a stored meta-trained model; nothing is trained, and the result is returned, not stored.

    Args:
        checkpoint: a folder under ``trained`` in the cache, or its name.
        task, episodes, change: as in :func:`run`.

    Raises:
        UserError: no such model, an unfinished one, other code or options of the method, or a backbone that is not in
            the cache.
    """
    work = work or workspace()
    if not checkpoint.is_dir() and (work.home.trained / checkpoint.name).is_dir():
        checkpoint = work.home.trained / checkpoint.name
    info = trained_facts(checkpoint)
    if ".py:" in str(info["method"]):  # a path in a file that may be a stranger's is no reason to run code
        raise UserError(f"{checkpoint.name} is of a method in a file, {info['method']}; run that file to evaluate it")
    training, about = Training.parse(info["train"]), (episodes, make_change(change or {}), work.home)
    job = make_job(info["method"], task, info["options"], training, info["seed"], *about)
    if info["method_source"] != job.source:
        work.reporter.warn(f"the code of {job.name} has changed since {checkpoint.name} was trained")
    PrepareData(job.task, ("test",)).run(work)
    if (key := Pretrain(job.task, job.method.head, job.seed).key(work.home)) != info["pretraining"]:
        raise UserError(f"{checkpoint.name} was trained on the features of {info['pretraining']}; task {job.task.name} "
                        f"has {key}: choose a task with the same data and pretraining")  # fmt: skip
    if pretrained_sha256(work.home, key) != info["pretraining_sha256"]:
        raise UserError(f"the backbone {key} that {checkpoint.name} was trained on is not in {work.home.pretrained} "
                        f"or was trained again since; evaluate it with the --home it was trained in")  # fmt: skip
    return Evaluate(job, job.settings()[0], command, checkpoint).run(work)
