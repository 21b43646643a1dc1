"""What a notebook calls, and what the command line calls: one function a command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.device import choose_device
from ifsl_bench.backbone.pretrain import pretrained_sha256, pretraining_key
from ifsl_bench.board import result_file as result_files
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.data.preparing.prepare import dataset_folder, is_prepared
from ifsl_bench.episodic.meta_training import Training
from ifsl_bench.protocol.variants import make_change
from ifsl_bench.running.job import Job, make_jobs
from ifsl_bench.running.pipeline import run_job
from ifsl_bench.running.workbench import Bench, Workspace


def workspace(
    home: str | Path | None = None,
    results: str | Path | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Workspace:
    """Where things are kept and computed; see :meth:`ifsl_bench.common.files.Home.locate` for the defaults."""
    return Workspace(Home.locate(home, results), choose_device(device), reporter or Reporter())


def run(
    method: str,
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
        method: a registered name, see ``ifsl-bench methods``.
        task: a task's name, or ``path/to/my.toml`` (with ``:name`` if it defines several); it may go on with changes,
            as in ``glyphs-5shot+ways=10``.
        options: the method's own, e.g. ``{"normalise": True}``.
        train: e.g. ``{"episodes_per_step": 4}``; see :class:`ifsl_bench.episodic.meta_training.Training`.
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
    jobs = make_jobs([method], [task], options or {}, training, [seed], episodes, changes, work.home)
    if len(jobs) != 1:
        raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
    return run_jobs(jobs, work, rerun=rerun, command="ifsl_bench.run(...)")[0]


def run_jobs(jobs: Sequence[Job], work: Workspace, *, rerun: bool = False, command: str = "") -> list[Result]:
    """Runs jobs in their order, skipping what is stored already; each result is on disk before the next job starts."""
    made: list[Result] = []
    bench: Bench | None = None
    for job in jobs:
        stored = None if rerun else stored_result(job, work)
        if stored is not None:
            work.reporter.say(f"{job.label} on {job.task.name}, seed {job.seed}: stored already (--rerun repeats it)")
            made.append(stored)
            continue
        wanted = (job.task, job.method.head, job.seed, job.training.views)
        if bench is None or (bench.task, bench.head, bench.seed, bench.views) != wanted:
            bench = Bench(*wanted, work)
        result = run_job(job, bench, command)
        _write(job, work, result)
        made.append(result)
    return made


def stored_result(job: Job, work: Workspace) -> Result | None:
    """The job's stored result, if it is what the job would make now.

    Task definition, data, method code, options, training, episodes and the backbone's weights must be the same, as far
    as data and backbone are in the cache to compare with.
    """
    path = job.result_path(work.home)
    if not path.exists():
        return None
    try:
        result = result_files.read(path)
    except CorruptFile as error:
        work.reporter.warn(f"{error}; it is made again")
        return None
    fingerprint = job.task.dataset.fingerprint
    if is_prepared(work.home, job.task.dataset.name):
        fingerprint = open_dataset(dataset_folder(work.home, job.task.dataset.name)).fingerprint
    key = pretraining_key(job.task, fingerprint or result.fingerprint, job.method.head, job.seed)
    weights = pretrained_sha256(work.home, key)
    tuned = job.tuned
    wanted = {
        "task": (result.task_hash, job.task.hash),
        "data": (result.fingerprint, fingerprint or result.fingerprint),
        "method's code": (result.provenance.get("method_source"), job.source),
        "options": tuple({k: v for k, v in o.items() if k not in tuned} for o in (result.options, job.settings()[0])),
        "training": (result.train, job.training.changes()),
        "seed": (result.seed, job.seed),
        "number of episodes": (len(result.episodes.base_joint), job.episodes),
        "backbone": (result.pretraining.get("key"), key),
        "backbone's weights": (result.pretraining.get("sha256"), weights or result.pretraining.get("sha256")),
    }
    changed = [name for name, (stored, now) in wanted.items() if stored != now]
    if changed:
        work.reporter.say(f"{path.name} is out of date (changed: {', '.join(changed)})")
        return None
    return result


def _write(job: Job, work: Workspace, result: Result) -> None:
    path = job.result_path(work.home)
    with locked(work.home.cache / "results"):
        if path.exists():
            _keep_old(path, result, work)
        result_files.write(work.home.results, result)
    work.reporter.say(f"result: {path}")


def _keep_old(path: Path, result: Result, work: Workspace) -> None:
    """A stored result that says something else is renamed, not overwritten: nothing is lost."""
    try:
        if result_files.read(path).episodes == result.episodes:
            return
    except CorruptFile:
        pass
    for n in itertools.count():
        kept = path.with_name(f"{path.name}.old-{n}")
        if not kept.exists():
            os.replace(path, kept)
            work.reporter.warn(f"the result that was there differs; it is kept as {kept}")
            return


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
    info = CheckpointFolder(checkpoint).info()
    needed = {"method", "options", "train", "seed", "pretraining", "pretraining_sha256", "finished", "history"}
    if info is None or needed - info.keys():
        raise UserError(f"{checkpoint} is no meta-trained model of {work.home.trained}")
    if not info["finished"]:
        raise UserError(f"the meta-training in {checkpoint} stopped at step {info['step']}; run it to its end first")
    training, changes = Training.parse(info["train"]), make_change(change or {})
    jobs = make_jobs([info["method"]], [task], info["options"], training, [info["seed"]], episodes, changes, work.home)
    if len(jobs) != 1:
        raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
    job = jobs[0]
    if info["method_source"] != job.source:
        work.reporter.warn(f"the code of {job.name} has changed since {checkpoint.name} was trained")
    bench = Bench(job.task, job.method.head, job.seed, job.training.views, work)
    key = pretraining_key(job.task, bench.dataset.fingerprint, job.method.head, job.seed)
    if key != info["pretraining"]:
        raise UserError(f"{checkpoint.name} was trained on the features of {info['pretraining']}; task {job.task.name} "
                        f"has {key}: choose a task with the same data and pretraining")  # fmt: skip
    if pretrained_sha256(work.home, key) != info["pretraining_sha256"]:
        raise UserError(f"the backbone {key} that {checkpoint.name} was trained on is not in {work.home.pretrained} "
                        f"or was trained again since; evaluate it with the --home it was trained in")  # fmt: skip
    return run_job(job, bench, command, checkpoint)
