"""Trained models for figures: those that ``run`` has left in the home folder, or trained now where asked for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ifsl_bench.backbones.pretrained import is_package_used
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.metadata import load_task_metadata
from ifsl_bench.data.published_splits import read_mapping_of_columns
from ifsl_bench.experiments.evaluate_stage import EvaluationContext, EvaluationStage
from ifsl_bench.experiments.job import Job, make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.search import chosen_job_from_trials
from ifsl_bench.experiments.stages import MetaTrainStage, make_data_stage, make_pretrain_stage
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.method import masked_logits
from ifsl_bench.protocols.episode_loader import predict_batch
from ifsl_bench.protocols.loader import Batch
from ifsl_bench.protocols.sampling.episodes import EpisodeIndices
from ifsl_bench.protocols.tasks.task import NO_BACKBONE, Task
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.reporting.figures.style import short_names
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths


def make_figure_jobs(
    methods: Sequence[str],
    task: str,
    home: Paths,
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Any] | None = None,
) -> list[Job]:
    """Return the jobs of methods on a task, by seed, then method, as ``run`` makes them.

    Args:
        methods: their names.
        task: the name of the task.
        home: the folders.
        seeds: the training seeds.
        options: options of the methods.

    Raises:
        UserError: an unknown method or task, an impossible option, or a file with several tasks.
    """
    load_task(task, home)
    return make_jobs(RunConfig(methods, [task], options or {}, seeds=seeds), home)


def check_trained(jobs: Sequence[Job], home: Paths) -> None:
    """Raise :class:`UserError` where a job's model is not in the home folder, with the command that trains it.

    Args:
        jobs: the jobs.
        home: the folders.
    """
    lacking = [job for job in jobs if not is_trained(job, home)]
    if lacking:
        more = f" ({len(lacking)} of {len(jobs)} models are missing)" if len(jobs) > 1 else ""
        raise UserError(
            f"{lacking[0]} is not trained in {home.cache}: {training_command(lacking[0], home)} trains it and "
            f"stores its result, or add --train here, train=True in Python{more}"
        )


def open_trained_model(job: Job, work: Workspace) -> EvaluationContext:
    """Return the job's method with the options and parameters that ``run`` evaluates; search and train where they lack.

    What is trained stays in the home folder. The ``job`` of what is returned has the options that were chosen.

    Args:
        job: the job.
        work: the workspace.
    """
    make_data_stage(job).check_episodes_can_be_drawn(load_task_metadata(job.task, work.home))
    make_data_stage(job).compute(work)
    return EvaluationStage(job).open(work)


def is_trained(job: Job, home: Paths) -> bool:
    """Return whether nothing has to be trained for a job: no backbone, no trial, no method.

    Args:
        job: the job.
        home: the folders.
    """
    stage = make_pretrain_stage(job)
    backbone = stage.linear_stage or stage  # a head on its features takes seconds
    if job.task.pretraining.backbone != NO_BACKBONE and not (
        backbone.is_cached(home) or is_package_used(home, backbone.key(home))
    ):
        return False
    if not job.is_meta_trained:
        return True  # options that are chosen without training take seconds
    best = chosen_job_from_trials(job, home)
    return best is not None and MetaTrainStage(best).is_cached(home)


def training_command(job: Job, home: Paths) -> str:
    """Return the command that trains a job's model.

    Args:
        job: the job.
        home: the folders.
    """
    name = job.method_ref.source_file or job.row_label.method_name
    typed = job.row_label._replace(method_name=name).command_line_words
    words = ["ifsl-bench", "run", *typed[:2], "--task", job.task.name, *typed[2:]]
    words += ["--seed", str(job.seed)] if job.seed else []
    words += ["--home", str(home.cache)] if home.cache != Paths.locate().cache else []
    return shlex.join(words)


def check_index(task: Task, index: int) -> None:
    """Raise :class:`UserError` for an episode that the task's stream of test episodes does not count.

    Args:
        task: the task.
        index: the number of the episode.
    """
    if not 0 <= index < task.evaluation.episodes:
        most = task.evaluation.episodes - 1
        raise UserError(f"{task.name} has test episodes 0 to {most:,} to show (--index), not {index}")


@dataclass(frozen=True)
class PredictedEpisode:
    """One test episode, and what a method answers."""

    label: str  # of the method
    indices: EpisodeIndices  # indices of images, [1, ...]
    batch: Batch  # features
    logits: torch.Tensor  # [Q, K + N], classes that are out of play at -inf
    novel_class_names: tuple[str, ...]  # short names of the N novel classes
    base_class_names: tuple[str, ...]  # short names of the K base classes

    @property
    def predicted_labels(self) -> torch.Tensor:
        """Return joint labels [Q]; a tie goes to the lower, a base class before a novel one, as in evaluation."""
        return self.logits.argmax(-1)

    @property
    def true_labels(self) -> torch.Tensor:
        """Return joint labels [Q]."""
        return self.batch.query_labels[0].cpu()

    @property
    def is_right(self) -> torch.Tensor:
        """Return whether each query is answered with its class, [Q] bool."""
        return self.predicted_labels == self.true_labels


@torch.no_grad()
def predict_episode(context: EvaluationContext, index: int, label: str = "") -> PredictedEpisode:
    """Return a test episode with a method's answer.

    Args:
        context: the trained model.
        index: the number of the episode.
        label: in place of the job's label.
    """
    loader, dataset, task = context.make_episode_loader(), context.prepared_task.dataset, context.job.task
    drawn, batch = loader.sampler.sample(index, 1), loader.load_batch(index, 1)
    answer = predict_batch(context.method.eval(), context.job.method_name, batch)
    novel = tuple(short_novel_names(dataset, task)[i] for i in drawn.classes[0].tolist())
    base = tuple(short_names(readable_class_names(dataset.pool("base/train").class_names)))
    logits = masked_logits(answer, batch.masked_base_classes)[0].float().cpu()
    return PredictedEpisode(label or context.job.label, drawn, batch, logits, novel, base)


def short_novel_names(dataset: Dataset, task: Task) -> list[str]:
    """Return short names of all novel classes that test episodes draw from.

    Args:
        dataset: the data set of the task.
        task: the task.
    """
    return short_names(readable_class_names(dataset.pool(task.pool("test", "novel")).class_names))


def readable_class_names(classes: Sequence[str]) -> list[str]:
    """Return names of classes for readers: of a WordNet id the name that it has in Tiny-ImageNet, if it is there."""
    titles = read_mapping_of_columns("tiny-tiered.csv", "wnid", "name")
    names = [titles.get(name, name) for name in classes]
    often = Counter(names)
    return [title if often[title] == 1 else f"{title} ({name})" for title, name in zip(names, classes, strict=True)]
