"""The functions that notebooks and the command line call, one for each command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from ifsl_bench.experiments.evaluate_stage import EvaluationStage
from ifsl_bench.experiments.job import Job, make_jobs, unused_training_options_fault
from ifsl_bench.experiments.run_config import RunConfig, expand_method_names, expand_task_names
from ifsl_bench.experiments.runner import run_jobs
from ifsl_bench.experiments.stages import DataStage, make_pretrain_stage
from ifsl_bench.experiments.trained_models import read_training_record
from ifsl_bench.experiments.training_curves import make_curve_logs
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.experiments.workspace import workspace as workspace
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED
from ifsl_bench.protocols.tasks.variants import make_task_changes
from ifsl_bench.reporting.frames import Results
from ifsl_bench.store import schema as result_file
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import default_reporter, in_notebook

Methods = str | type[Method] | Sequence[str | type[Method]]
CALL = "ifsl_bench.run(...)"  # the command that results record of a call


@overload
def run(method: str | type[Method], task: str, *, seeds: None = None, **how: Any) -> Result: ...


@overload
def run(method: Methods, task: str | Sequence[str], **how: Any) -> Result | Results: ...


def run(  # type: ignore[misc]  # which keywords there are is said here, and once
    method: Methods,
    task: str | Sequence[str],
    *,
    seeds: int | None = None,
    options: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    seed: int = 0,
    episodes: int | None = None,
    recipe: str | Sequence[str] = (),
    change: Mapping[str, int | str] | None = None,
    tune: int = 0,
    calibrate: bool = False,
    rerun: bool = False,
    retrain: bool = False,
    progress: bool | None = None,
    log: str | None = None,
    log_dir: str | Path | None = None,
    home: str | Path | None = None,
    results: str | Path | None = None,
    work: Workspace | None = None,
) -> Result | Results:
    """Run methods on tasks and return the results, which are stored as files as well.

    One method on one task, without ``seeds``, gives one result; a list of either, or ``seeds``, gives
    :class:`ifsl_bench.reporting.frames.Results`. What is stored already is not repeated.

    Args:
        method: a registered name, see ``ifsl-bench methods``; ``path/to/file.py:Class``; or a subclass of
            :class:`ifsl_bench.Method`; or a list of these, which may have globs and the sets ``paper`` and ``all``.
        task: a task's name, or ``path/to/my.toml`` (with ``:name`` if it defines several); it may go on with changes,
            as in ``glyphs-5shot+ways=10``; or a list of these, which may have globs and sets.
        seeds: how many training seeds, from ``seed`` on.
        options: the method's own, e.g. ``{"normalise": True}``.
        train: e.g. ``{"episodes_per_step": 4}``; see :class:`ifsl_bench.protocols.tasks.variants.TrainingChanges`.
        seed: of meta-training, and of pretraining unless the task has one for all seeds; never of the test episodes.
        episodes: the number of test episodes, from the first on; the task's own number by default, which may be
            exceeded.
        recipe: how the backbone is trained, a name or file with options as ``closer.beta=1``, or a list of these; the
            task's own by default.
        change: the same changes as a mapping, ``{"ways": 10, "base-classes": 50}``; see
            :mod:`ifsl_bench.protocols.tasks.variants`.
        tune: the number of settings of the method's space, its default among them, to choose from on validation
            episodes; 0 for the method as published.
        calibrate: add the bias to the novel logits that is best on validation episodes; a row of its own, such as
            ``imprint+cal``.
        rerun: evaluate again even if the same result is stored.
        retrain: train again even if the model is stored, which is kept under another name.
        progress: show what is done, and how long it takes; None: in a notebook, unless ``work`` is given.
        log: "csv" or "tensorboard" for the curves of trainings.
        log_dir: the folder of these curves; among the logs of the home folder by default.
        home: the folder of caches, as ``--home``.
        results: the folder of results, as ``--results``.
        work: folders, device and progress display; see :func:`workspace`; not together with ``home`` or ``results``.

    Raises:
        UserError: whatever is wrong, in one line. If some of several jobs fail, the others are done and stored first.

    Example:
        >>> result = ifsl_bench.run("imprint", "glyphs-5shot", episodes=20)
        >>> result.label, result.seed
        ('imprint.episodes=20', 0)
    """
    single = seeds is None and isinstance(method, (str, type)) and isinstance(task, str)
    single = single and (isinstance(recipe, str) or len(recipe) < 2)
    if work is not None and (home is not None or results is not None):
        raise UserError("work has folders of its own; give home and results to ifsl_bench.workspace(...) instead")
    if progress is None:
        progress = work is None and in_notebook()
    work = work or workspace(home, results)
    work = replace(work, curve_logs=make_curve_logs(log, log_dir, work.home) or work.curve_logs)
    if progress:
        work = replace(work, reporter=default_reporter())
    _check_seeds(seed, seeds)
    config = RunConfig(
        _to_list(method), _to_list(task), options or {}, {} if train is None else train, tune, seed, seeds, episodes,
        calibrate, make_task_changes(change or {}), recipes=[recipe] if isinstance(recipe, str) else recipe,
    )  # fmt: skip
    jobs = make_jobs(config if single else _expand_names(config, work), work.home)
    if remark := unused_training_options_fault(
        jobs, config.train
    ):  # no error: a loop over methods has some that do not train
        work.reporter.warn(remark)
    if single:
        return run_job(_require_single_job(jobs), work, rerun=rerun, retrain=retrain)
    ended = run_jobs(jobs, work, rerun=rerun, retrain=retrain, command=CALL)
    if ended.jobs_failed:
        failed = f"{len(ended.jobs_failed)} of {len(jobs)} jobs failed, the others are stored"
        raise UserError(f"{failed}: {'; '.join(ended.failure_messages)}")
    return Results(result_file.read_result(job.result_path(work.home)) for job in ended.jobs_stored)


def _to_list(names: Any) -> list[Any]:
    return list(names) if isinstance(names, (list, tuple)) else [names]


def _check_seeds(seed: Any, seeds: Any) -> None:
    """Raise :class:`UserError` for seeds that are no whole numbers."""
    if type(seed) is not int:
        raise UserError(f"seeds must be whole numbers from 0 to {LARGEST_SEED}, not {[seed]}")
    if seeds is not None and (type(seeds) is not int or seeds < 1):
        raise UserError(f"seeds is how many training seeds, 1 or more, not {seeds!r}; seed=5, seeds=3 runs 5, 6 and 7")


def _expand_names(config: RunConfig, work: Workspace) -> RunConfig:
    """Return the config with the names that its globs and sets stand for."""
    methods: list[str | type[Method]] = []
    for method in config.methods:
        methods += expand_method_names([method], work.reporter.warn) if isinstance(method, str) else [method]
    all_names = all(isinstance(task, str) for task in config.tasks)
    return replace(
        config, methods=methods, tasks=expand_task_names(config.tasks, work.home) if all_names else config.tasks
    )


def _require_single_job(jobs: Sequence[Job]) -> Job:
    if len(jobs) != 1:
        raise UserError(f"the file defines the tasks {', '.join(job.task.name for job in jobs)}; say which: FILE:NAME")
    return jobs[0]


def run_job(job: Job, work: Workspace, *, rerun: bool = False, retrain: bool = False, command: str = CALL) -> Result:
    """Run one job in this process and return its result, which is on disk then.

    Args:
        job: to run.
        work: folders, device and reporter.
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored, which is kept under another name; rerun follows.
        command: recorded with the result.
    """
    run_jobs([job], work, rerun=rerun, retrain=retrain, command=command)
    return result_file.read_result(job.result_path(work.home))


def evaluate_checkpoint(
    checkpoint: str | Path,
    task: str,
    *,
    select: str | None = None,
    episodes: int | None = None,
    change: Mapping[str, int | str] | None = None,
    work: Workspace | None = None,
    command: str = "",
) -> Result:
    """Evaluate a stored meta-trained model; nothing is trained, and the result is returned, not stored.

    Args:
        checkpoint: a folder under ``trained`` in the cache, or its name.
        task: a task's name or file, as in :func:`run`.
        select: "best" for the parameters that were best on validation, in place of the last ones.
        episodes: the number of test episodes, from the first on; the task's own number by default.
        change: of the task, as in :func:`run`.
        work: folders, device and progress display; see :func:`workspace`.
        command: recorded with the result.

    Raises:
        UserError: no such model, an unfinished one, other code or options of the method, or a backbone that is not in
            the cache.

    Example:
        >>> result = ifsl_bench.run("lwof", "glyphs-5shot")  # doctest: +SKIP
        >>> checkpoint = result.provenance["checkpoint"]  # doctest: +SKIP
        >>> elsewhere = ifsl_bench.evaluate_checkpoint(checkpoint, "glyphs-1shot")  # doctest: +SKIP
    """
    work = work or workspace()
    checkpoint = Path(checkpoint)
    folder = checkpoint if os.path.isdir(checkpoint) else work.home.trained_models / checkpoint.name
    info = read_training_record(folder)
    train = info["train"] | ({"select": select} if select else {})
    config = RunConfig([info["method"]], [task], info["options"], train, seed=info["seed"], episodes=episodes,
                      change=make_task_changes(change or {}))  # fmt: skip
    job = _require_single_job(make_jobs(config, work.home))
    evaluation = EvaluationStage(job, folder, command)
    if not job.is_made_by_same_code(info):
        work.reporter.warn(f"{job.method_name} has other code than the method that {folder.name} was trained with")
    DataStage(job.task, ("test",)).compute(work)
    if (key := make_pretrain_stage(job).key(work.home)) != info["pretraining"]:
        raise UserError(f"{folder.name} was trained on the features of {info['pretraining']}; task {job.task.name} "
                        f"has {key}: choose a task with the same data and pretraining")  # fmt: skip
    if make_pretrain_stage(job).weights_checksum(work.home) != info["pretraining_sha256"]:
        raise UserError(f"the backbone {key} that {folder.name} was trained on is not in {work.home.pretrained} "
                        f"or was trained again since; evaluate it with the --home it was trained in")  # fmt: skip
    return evaluation.compute(work)
