"""Runs jobs: what they share first, then each of them, in this process or on the workers of a back end.

:func:`run_jobs` divides jobs into work items in three phases: distinct data sets; pretrainings with their features, and
checks of episodes; the jobs, with the trials of their searches. With workers each phase is one parallel map; a single
process goes through the items job by job. An item is a few stages that one process computes one after the other; a job
one of whose items failed is left out, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ifsl_bench.backbones.device import CPU_DEVICE, release_freed_memory
from ifsl_bench.data.datasets import is_prepared
from ifsl_bench.data.preparing.metadata import (
    DatasetMetadata,
    cache_fingerprints,
    data_specs_of_task,
    load_task_metadata,
)
from ifsl_bench.experiments.evaluate_stage import EvaluationStage
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.logs import DONE, FAILED, Log, log_path
from ifsl_bench.experiments.stages import (
    DataStage,
    MetaTrainStage,
    Stage,
    list_backbone_stages,
    make_data_stage,
    make_pretrain_stage,
)
from ifsl_bench.experiments.stored_results import backup_outputs, load_current_result
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.store.schema import Result, rename_replaced_result, write_result
from ifsl_bench.utils.errors import UserError, format_error, unknown_name_error
from ifsl_bench.utils.files import Paths, check_writable
from ifsl_bench.utils.locks import hold_lock
from ifsl_bench.utils.threads import limit_evaluation_threads

MAX_JOBS_NAMED = 3  # jobs that are named where one cause has stopped many
DATA_PHASE, SHARED_PHASE, JOB_PHASE = range(3)  # the phases of a run
LOST_OUTCOME = "lost"  # the kind of an outcome, beside DONE and FAILED


@dataclass
class WorkItem:
    """Stages that one process computes one after the other; can be pickled.

    Attributes:
        log_key: names its log.
        title: for people.
        job_indices: of the jobs that need it.
        needs_whole_machine: whether it keeps every core of a machine busy.
    """

    log_key: str
    title: str
    stages: list[Stage] = field(default_factory=list)
    job_indices: list[int] = field(default_factory=list)
    needs_whole_machine: bool = False


@dataclass(frozen=True)
class WorkOutcome:
    """How a work item ended.

    Attributes:
        outcome_kind: "done", "failed", or "lost" if its worker died.
        failure_message: why it failed, in one line.
        failed_stage: the kind of the stage that failed.
        warnings: of its stages.
        resumed_stages: a line for each training that went on from a checkpoint.
        seconds: the time it took.
        raised_error: the exception, in the process where it was raised.
    """

    outcome_kind: str
    failure_message: str = ""
    failed_stage: str = ""
    warnings: tuple[str, ...] = ()
    resumed_stages: tuple[str, ...] = ()
    seconds: float = 0.0
    raised_error: Exception | None = None


class JobFailure(NamedTuple):
    """The reason why a job has no result, in one line, with the stage that failed and its log, if there are any."""

    reason: str
    failed_stage: str = ""
    log_path: str = ""


@dataclass(frozen=True)
class RunSummary:
    """The jobs of a run that have a result, those that failed, and a line for each cause."""

    jobs_stored: list[Job]
    jobs_failed: list[Job]
    failure_messages: list[str]


class Backend:
    """The processes that work items run in; this base class has the present one.

    Attributes:
        runs_items_in_parallel: whether several items run at once.
    """

    runs_items_in_parallel = False

    def prepare(self, work: Workspace) -> Workspace:
        """Return the workspace with the device that items are computed on."""
        return work

    def run(self, items: Iterator[WorkItem], work: Workspace) -> Iterator[tuple[WorkItem, WorkOutcome]]:
        """Run items, and yield each with its outcome.

        Args:
            items: taken one at a time, when there is a process for the next one.
            work: folders and device.
        """
        log = Log(work.home, work.reporter)
        logged = replace(work, reporter=log)
        for item in items:
            yield item, run_item(item, logged, log)

    def close(self) -> None:
        """End all other processes, and what they run."""


def store_result(job: Job, work: Workspace, result: Result) -> None:
    """Write a result; one with other hits that was there is renamed, not overwritten, so that nothing is lost.

    Args:
        job: the job of the result.
        work: the folders and the reporter.
        result: to store.
    """
    with hold_lock(work.home.results / "results", work.reporter.warn, ""):
        name = rename_replaced_result(work.home.results, result)
        write_result(work.home.results, result)
    if name:
        work.reporter.warn(f"the result that was there differs; it is kept as {name}")
    work.reporter.say(f"result: {job.result_path(work.home)}")


def run_item(item: WorkItem, work: Workspace, log: Log) -> WorkOutcome:
    """Compute the stages of an item, and store the result if one of them makes it.

    Args:
        item: the stages.
        work: folders and device; its reporter is ``log``.
        log: receives the progress.
    """
    stage: Stage | None = None
    failure: Exception | None = None
    with log.open_log_of_item(item.log_key, item.title):
        try:
            with limit_evaluation_threads():
                for stage in item.stages:
                    artefact = stage.compute(work)
                    if isinstance(stage, EvaluationStage):
                        store_result(stage.job, work, artefact)
        except Exception as error:
            failure = error
        finally:
            release_freed_memory()
        log.log_end_of_item(failure)
    facts = tuple(log.warnings), tuple(log.resumed), log.seconds_since_start
    if failure is None:
        return WorkOutcome(DONE, "", "", *facts)
    return WorkOutcome(FAILED, format_error(failure), stage.stage_name if stage else "", *facts, failure)


def make_training_stage(job: Job) -> Stage | None:
    """Return the stage that searches and meta-trains for a job; None where there is nothing of either."""
    if job.searched_names:
        from ifsl_bench.experiments.search import SearchStage

        return SearchStage(replace(job, is_calibrated=False, n_episodes=job.task.evaluation.episodes))
    return MetaTrainStage(replace(job, is_calibrated=False)) if job.is_meta_trained else None


def list_stages(job: Job) -> list[Stage]:
    """List the stages of a job, each after its inputs: the data first, the result last."""
    training = make_training_stage(job)
    return [make_data_stage(job), *list_backbone_stages(job), *([training] if training else []), EvaluationStage(job)]


def result_item_key(job: Job, home: Paths) -> str:
    """Return the key of the work item that makes a result.

    Args:
        job: of the result.
        home: with the folder of results.
    """
    return f"result/{job.task.name}-{job.task.hash[:12]}/{job.result_path(home).stem}"


def divide_into_work_items(
    jobs: Mapping[int, Job], work: Workspace, retrain: bool = False, command: str = "", parallel: bool = True
) -> list[list[WorkItem]]:
    """Divide jobs into items, by phase; what is cached needs none.

    Args:
        jobs: by index.
        work: folders and device.
        retrain: whether trained models are made again.
        command: the command line, recorded with results.
        parallel: whether trials of searches are items of their own.
    """
    home = work.home
    phases: tuple[dict[str, WorkItem], ...] = {}, {}, {}
    cached: dict[tuple[str, str], bool] = {}

    def is_cached(stage: Stage) -> bool:
        key = stage.stage_name, stage.key(home)
        if key not in cached:
            cached[key] = stage.is_cached(home)
        return cached[key]

    def add(phase: int, index: int, key: str, title: str, stages: Iterable[Stage], whole: bool = False) -> None:
        item = phases[phase].setdefault(key, WorkItem(key, title, needs_whole_machine=whole))
        keys = {(stage.stage_name, stage.key(home)) for stage in item.stages}
        item.stages += [stage for stage in stages if (stage.stage_name, stage.key(home)) not in keys]
        item.job_indices.append(index)

    on_host = work.choose_device("pretraining").device == CPU_DEVICE
    for index, job in jobs.items():
        data, backbone, training = make_data_stage(job), make_pretrain_stage(job), make_training_stage(job)
        if not is_cached(data):
            add(DATA_PHASE, index, f"data/{data.key(home)}", str(data), [DataStage(job.task)], whole=True)
        episodes = "-".join([job.task.name, job.task.hash[:12], *data.sides, str(data.sessions_per_training_episode)])
        add(SHARED_PHASE, index, f"episodes/{episodes}", f"episodes of {job.task.name}", [data])
        if missing := [stage for stage in list_backbone_stages(job) if not is_cached(stage)]:
            add(SHARED_PHASE, index, f"pretraining/{backbone.key(home)}", str(backbone), missing, whole=on_host)
        stages = [training] if training and (retrain or not is_cached(training)) else []
        if stages and job.searched_names and job.is_meta_trained and parallel:
            from ifsl_bench.experiments.search import TrialStage, candidates_by_round

            for candidate in candidates_by_round(job)[0]:
                trial = TrialStage(candidate.job)
                if retrain or not is_cached(trial):
                    add(JOB_PHASE, index, f"trial/{trial.key(home)}", str(trial), [trial])
        add(
            JOB_PHASE,
            index,
            result_item_key(job, home),
            str(job),
            [*stages, EvaluationStage(job, command_line=command)],
        )
    trials_first = sorted(phases[JOB_PHASE].values(), key=lambda item: not item.log_key.startswith("trial/"))
    return [list(phases[DATA_PHASE].values()), list(phases[SHARED_PHASE].values()), trials_first]


def run_jobs(
    jobs: Sequence[Job],
    work: Workspace,
    backend: Backend | None = None,
    *,
    rerun: bool = False,
    retrain: bool = False,
    command: str = "",
) -> RunSummary:
    """Run jobs, skipping those whose result is stored; one that fails does not stop the others.

    Args:
        jobs: each once.
        work: folders, device and reporter.
        backend: the processes that compute; this one by default. It is closed at the end.
        rerun: evaluate again even if a result is stored.
        retrain: train again even if a model is stored, which is renamed; rerun follows.
        command: the command line, recorded with results.

    Raises:
        UserError: the only job cannot be run, or all of them for one and the same reason; or results cannot be written,
            which is found before anything is computed.
    """
    backend, reporter = backend or Backend(), work.reporter
    failures: dict[int, JobFailure] = {}
    renewed: set[Path] = set()

    def needed(items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        """Yield the items that a job still needs; models that one makes again are renamed first, each once."""
        for item in items:
            if not all(index in failures for index in item.job_indices):
                for stage in item.stages if retrain else ():
                    backup_outputs(stage, work, renewed)
                yield item

    try:
        work = backend.prepare(work)
        todo = _jobs_to_run(jobs, work, rerun or retrain, failures)
        if todo:
            check_writable(work.home.results)
        with cache_fingerprints():
            phases = divide_into_work_items(todo, work, retrain, command, backend.runs_items_in_parallel)
        if not backend.runs_items_in_parallel:  # one job ends before the next begins
            phases = [sorted(chain.from_iterable(phases), key=lambda item: item.job_indices[0])]
        finished = len(jobs) - len(todo) - len(failures)
        for phase in phases:
            for item, outcome in backend.run(needed(phase), work):
                if outcome.outcome_kind == FAILED:
                    if outcome.raised_error and len(jobs) == 1:
                        raise outcome.raised_error
                    reporter.say(
                        f"{item.title} failed: {outcome.failure_message}"
                    )  # and once more in the list at the end
                    log = log_path(work.home, item.log_key)
                    failure = JobFailure(
                        outcome.failure_message, outcome.failed_stage, str(log) if log.exists() else ""
                    )
                    failures |= {index: failure for index in item.job_indices if index not in failures}
                elif backend.runs_items_in_parallel:
                    finished += item.log_key.startswith("result/")
                    count = f", {finished} of {len(jobs)} jobs done" if item.log_key.startswith("result/") else ""
                    reporter.say(f"{item.title}: done in {outcome.seconds:.1f} s{count}")
    finally:
        backend.close()
    if failures and len(failures) == len(jobs) and len({failure.reason for failure in failures.values()}) == 1:
        raise UserError(failures[0].reason)
    causes: dict[JobFailure, list[str]] = {}
    for index in sorted(failures):
        causes.setdefault(failures[index], []).append(str(jobs[index]))
    lines = []
    for failure, names in causes.items():
        stage = f", in {failure.failed_stage}" if failure.failed_stage else ""
        lines.append(
            f"{_join_first_names(names)}{stage}: "
            f"{failure.reason}{f' (log: {failure.log_path})' if failure.log_path else ''}"
        )
    stored = [job for index, job in enumerate(jobs) if index not in failures]
    return RunSummary(stored, [jobs[index] for index in sorted(failures)], lines)


def _jobs_to_run(jobs: Sequence[Job], work: Workspace, anyway: bool, failures: dict[int, JobFailure]) -> dict[int, Job]:
    """Return the jobs whose result is not stored; those that cannot be run are reported, and become failures."""
    todo: dict[int, Job] = {}
    metadata: dict[str, DatasetMetadata] = {}
    reasons: dict[str, list[str]] = {}
    with cache_fingerprints():
        for index, job in enumerate(jobs):
            try:
                if not anyway and load_current_result(job, work) is not None:
                    work.reporter.say(f"{job}: done already (--rerun repeats it)")
                    continue
                check_job_is_runnable(job, work.home, metadata)
                todo[index] = job
            except UserError as error:
                failures[index] = JobFailure(str(error))
                reasons.setdefault(str(error), []).append(str(job))
    for reason, names in reasons.items() if len(failures) < len(jobs) else ():
        work.reporter.say(f"{_join_first_names(names)} cannot be run: {reason}")
    return todo


def _join_first_names(names: Sequence[str]) -> str:
    """Join the first names, and count the others."""
    few = (
        names
        if len(names) <= MAX_JOBS_NAMED
        else [*names[: MAX_JOBS_NAMED - 1], f"and {len(names) - MAX_JOBS_NAMED + 1} more"]
    )
    return "; ".join(few)


def check_job_is_runnable(job: Job, home: Paths, metadata: dict[str, DatasetMetadata], lacking: bool = False) -> None:
    """Check that a job's data are there, or can be made, and that its episodes can be drawn from them.

    Args:
        job: to run.
        home: where data are.
        metadata: hash of a task -> its data, filled here.
        lacking: whether data may have to be obtained first.

    Raises:
        UserError: they are not, or cannot.
    """
    if job.task.hash not in metadata:
        metadata[job.task.hash] = load_task_metadata(job.task, home, lacking)
    make_data_stage(job).check_episodes_can_be_drawn(metadata[job.task.hash])
    make_pretrain_stage(job).check_backbone_fits(metadata[job.task.hash], home)


def check_data_paths(data: Mapping[str, Path], tasks: Sequence[Task], home: Paths, forms: bool = False) -> None:
    """Check the paths that data sets are made from.

    Args:
        data: data set -> path.
        tasks: of the run.
        home: where prepared data sets are.
        forms: whether the names of the files are compared with the forms of the data set, as its preparation does.

    Raises:
        UserError: a data set that no task has, or a path that is needed and not there, or has other files.
    """
    used = {spec.name for task in tasks for spec in data_specs_of_task(task, home)}
    for name, path in data.items():
        if name not in used:
            raise unknown_name_error("data set", name, used, where="of these tasks")
        if is_prepared(home, name):
            continue
        if not os.path.exists(path.expanduser()):
            raise UserError(f"data set {name}: there is no {path}")
        if forms:
            from ifsl_bench.data.preparing.prepare import check_source_files

            check_source_files(name, path.expanduser())


def prepare_from_paths(data: Mapping[str, Path], work: Workspace) -> None:
    """Make the data sets that are not prepared yet.

    Args:
        data: data set -> the path that it is made from.
        work: folders and reporter.

    Raises:
        UserError: unusable files, or a data set that was made from other files.
    """
    for name, path in data.items():
        if is_prepared(work.home, name) and not os.path.exists(path.expanduser()):
            continue  # its source may be deleted
        from ifsl_bench.data.preparing.prepare import prepare_dataset

        prepare_dataset(work.home, name, path.expanduser(), False, work.reporter)
