"""Stored results of jobs: whether they are current, and how files that are made again are put aside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ifsl_bench.data.preparing.metadata import find_dataset_fingerprint, find_novel_fingerprint
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.stages import PretrainStage, Stage
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.store import schema
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths, quarantine_path
from ifsl_bench.utils.locks import hold_lock


@dataclass(frozen=True)
class CachedResult:
    """The stored result of a job, or the reason why it is not used.

    Attributes:
        stored_result: None where the job would make another one now, or none is stored.
        outdated_reason: why it is not used; "" where it is, or none is stored.
        is_damaged: whether its file is damaged.
    """

    stored_result: Result | None = None
    outdated_reason: str = ""
    is_damaged: bool = False


def find_cached_result(job: Job, home: Paths) -> CachedResult:
    """Return a job's stored result if it is current, or the reason why it is not.

    Task definition, data, options, training, episodes and the backbone's weights must be the same, as far as data and
    backbone are in the cache to compare with, and so must be the method.

    Args:
        job: to run.
        home: the folders with results and cache.
    """
    # A run that repeats its results asks for none.
    from ifsl_bench.backbones.weights import has_other_weights
    from ifsl_bench.experiments.search import candidates_by_round

    path, searched = job.result_path(home), job.searched_names
    if not os.path.exists(path):
        return CachedResult()
    try:
        result = schema.read_result(path)
    except CorruptFile as error:
        return CachedResult(None, str(error), True)
    fingerprint = find_dataset_fingerprint(job.task.dataset, home)
    key = PretrainStage(job.task, job.method.head, job.seed).key(home, result.fingerprint)
    tried = {setting for accuracies in result.tuned.values() for setting in accuracies}
    rounds = candidates_by_round(job, lambda candidate: result.validation_accuracy(candidate.name)) if searched else []
    to_try = {candidate.name for candidates in rounds for candidate in candidates}
    compared = {
        "task": (result.task_hash, job.task.hash),
        "data": (result.fingerprint, fingerprint or result.fingerprint),
        "novel classes' data": (
            result.novel_fingerprint,
            find_novel_fingerprint(job.task, home) or result.novel_fingerprint,
        ),
        "options": (result.user_settings()[0], {k: v for k, v in job.method_options.items() if k not in searched}),
        "training": (result.user_settings()[1], job.training_changes.non_default_values()),
        "choice of options or checkpoint": (result.setting, job.setting),
        "calibration": (result.includes_bias, job.is_calibrated),
        "settings to choose from": (tried, to_try),
        "seed": (result.seed, job.seed),
        "number of episodes": (len(result.episodes), job.n_episodes),
        "backbone": (result.pretraining.get("key"), key),
        "backbone's weights": (has_other_weights(home, key, result.pretraining.get("sha256")), False),
    }
    changed = [name for name, (stored, now) in compared.items() if stored != now]
    changed += [] if job.is_made_by_same_code(result.provenance) else ["the method's code"]
    return CachedResult(None, f"changed: {', '.join(changed)}") if changed else CachedResult(result)


def load_current_result(job: Job, work: Workspace) -> Result | None:
    """Return a job's stored result, see :func:`find_cached_result`, and report why it is not used.

    Args:
        job: to run.
        work: the folders and the reporter.
    """
    stored = find_cached_result(job, work.home)
    if stored.is_damaged:
        work.reporter.warn(f"{stored.outdated_reason}; it is made again")
    elif stored.outdated_reason:
        work.reporter.say(f"{job.result_path(work.home).name} is out of date ({stored.outdated_reason})")
    return stored.stored_result


def backup_outputs(stage: Stage, work: Workspace, renewed: set[Path]) -> None:
    """Rename the models and trials of a stage, so that they are made again; shared ones are renamed once.

    Args:
        stage: whose files are renamed.
        work: the folders and the reporter.
        renewed: the files that were renamed before; the files of the stage are added.
    """
    for artefact, path in stage.list_artefacts(work.home):
        if path in renewed:  # before the lock, which an abandoned worker may hold
            continue
        with hold_lock(path, work.reporter.warn):
            if path.exists():
                work.reporter.say(f"{artefact}: the old one is kept as {quarantine_path(path, 'replaced')}")
        renewed.add(path)
