"""Trained models for figures: those that ``run`` has left in the home folder, or trained now where asked for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ifsl_bench.backbones.pretrained import is_offered
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.metadata import metadata_of
from ifsl_bench.experiments.evaluate_stage import Evaluate, EvaluationContext
from ifsl_bench.experiments.evaluation import predict
from ifsl_bench.experiments.job import Job, make_jobs
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.search import kept_choice
from ifsl_bench.experiments.stages import MetaTrain, backbone_of, data_stage_of
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.method import masked_logits
from ifsl_bench.protocols.episode_loader import Batch
from ifsl_bench.protocols.sampling.episodes import EpisodeIndices
from ifsl_bench.protocols.tasks.task import NO_BACKBONE, Task
from ifsl_bench.protocols.tasks.task_files import find_one
from ifsl_bench.reporting.figures.texts import short_names
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths


def jobs_of(methods: Sequence[str], task: str, home: Paths, seeds: Sequence[int] = (0,),
            options: Mapping[str, Any] | None = None) -> list[Job]:  # fmt: skip
    """The jobs whose models are wanted, by seed, then method, as ``run`` makes them.

    Raises:
        UserError: an unknown method or task, an impossible option, or a file with several tasks.
    """
    find_one(task, home)
    return make_jobs(Request(methods, [task], options or {}, seeds=seeds), home)


def check_trained(jobs: Sequence[Job], home: Paths) -> None:
    """Raises :class:`UserError` where a job's model is not in the home folder, with the command that trains it."""
    lacking = [job for job in jobs if not is_trained(job, home)]
    if lacking:
        more = f" ({len(lacking)} of {len(jobs)} models are missing)" if len(jobs) > 1 else ""
        raise UserError(f"{lacking[0]} is not trained in {home.cache}: {command_of(lacking[0], home)} trains it and "
                        f"stores its result, or add --train here, train=True in Python{more}")  # fmt: skip


def open_model(job: Job, work: Workspace) -> EvaluationContext:
    """The job's method where it is evaluated, with what was chosen and trained for ``run``, or is now: it stays in the
    home folder. Its ``job`` has the options that were chosen. Raises :class:`UserError` for data that are not there."""
    data_stage_of(job).check(metadata_of(job.task, work.home))
    data_stage_of(job).compute(work)
    return Evaluate(job).open(work)


def dataset_of(job: Job, work: Workspace) -> Dataset:
    """The data set of a job's task, made where it needs no files; raises :class:`UserError` where it is not there."""
    return PreparedTask(job.task, job.method.head, job.seed, work).dataset


def is_trained(job: Job, home: Paths) -> bool:
    """True if nothing has to be trained for a job: no backbone, no trial, no method."""
    stage = backbone_of(job)
    backbone = stage.linear or stage  # a head on its features takes seconds
    if job.task.pretraining.backbone != NO_BACKBONE and not (
        backbone.cached(home) or is_offered(home, backbone.key(home))
    ):
        return False
    if not job.trains:
        return True  # options that are chosen without training take seconds
    best = kept_choice(job, home)
    return best is not None and MetaTrain(best).cached(home)


def command_of(job: Job, home: Paths) -> str:
    """The command that trains a job's model."""
    typed = job.row._replace(name=job.chosen.file or job.row.name).typed
    words = ["ifsl-bench", "run", *typed[:2], "--task", job.task.name, *typed[2:]]
    words += ["--seed", str(job.seed)] if job.seed else []
    words += ["--home", str(home.cache)] if home.cache != Paths.locate().cache else []
    return shlex.join(words)


def check_index(task: Task, index: int) -> None:
    """Raises :class:`UserError` for an episode that the task's stream of test episodes does not count."""
    if not 0 <= index < task.evaluation.episodes:
        most = task.evaluation.episodes - 1
        raise UserError(f"{task.name} has test episodes 0 to {most:,} to show (--index), not {index}")


@dataclass(frozen=True)
class Episode:
    """One test episode, and what a method answers."""

    label: str  # of the method
    drawn: EpisodeIndices  # indices of images, [1, ...]
    batch: Batch  # features
    logits: torch.Tensor  # [Q, K + N], classes that are out of play at -inf
    classes: tuple[str, ...]  # short names of the N novel classes
    base_classes: tuple[str, ...]  # short names of the K base classes

    @property
    def predicted(self) -> torch.Tensor:
        """[Q] joint labels; a tie goes to the lower, a base class before a novel one, as in evaluation."""
        return self.logits.argmax(-1)

    @property
    def labels(self) -> torch.Tensor:
        """[Q] joint labels."""
        return self.batch.labels[0].cpu()

    @property
    def right(self) -> torch.Tensor:
        """[Q] bool."""
        return self.predicted == self.labels


@torch.no_grad()
def episode_of(ready: EvaluationContext, index: int, label: str = "") -> Episode:
    """A test episode with a method's answer."""
    loader, dataset, task = ready.episodes(), ready.prepared.dataset, ready.job.task
    drawn, batch = loader.sampler.sample(index, 1), loader.batch(index, 1)
    answer = predict(ready.method.eval(), ready.job.name, batch)
    novel = tuple(novel_names(dataset, task)[i] for i in drawn.classes[0].tolist())
    base = tuple(short_names(dataset.pool("base/train").classes))
    logits = masked_logits(answer, batch.masked)[0].float().cpu()
    return Episode(label or ready.job.label, drawn, batch, logits, novel, base)


def novel_names(dataset: Dataset, task: Task) -> list[str]:
    """Short names of all novel classes that test episodes draw from."""
    return short_names(dataset.pool(task.pool("test", "novel")).classes)
