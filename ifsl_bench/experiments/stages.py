"""The stages of a job before its evaluation: data, pretraining, features and meta-training.

A stage is a small description that can be pickled. Its ``compute`` opens the artefact, or makes it under a file lock,
from where an earlier run stopped; it makes inputs that are missing, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from ifsl_bench.backbones.device import CPU_DEVICE, DeviceChoice, StageType
from ifsl_bench.backbones.features import feature_folder, parse_seen_stage, read_feature_record
from ifsl_bench.backbones.find_recipe import find_recipe
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    HeadNotIncludedError,
    find_packaged_file,
    make_features_key,
    make_pretraining_key,
    read_features_sha256,
    read_weights_sha256,
    shares_linear_backbone,
)
from ifsl_bench.data.dataset_views import NOVEL_POOLS, shorten_fingerprint
from ifsl_bench.data.datasets import is_prepared
from ifsl_bench.data.pools import find_pool_entry
from ifsl_bench.data.preparing.metadata import (
    DatasetMetadata,
    check_supports_known,
    data_specs_of_task,
    find_dataset_fingerprint,
    find_novel_fingerprint,
)
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.trained_models import TrainedModel, is_free_or_same_method, load_trained, model_folders
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.method import Base, Method
from ifsl_bench.plugin.options import default_options, make_method, remake_method
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.sampling.episodes import make_training_sampler
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE, Side, Task
from ifsl_bench.utils.checkpoint import read_finished_metadata
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.locks import hold_lock


class Stage(ABC):
    """One step on the way to a result.

    Attributes:
        stage_name: of stage, in a word.
        device_rule_name: the kind of work by which its device is chosen.
    """

    stage_name: ClassVar[str]
    device_rule_name: ClassVar[StageType] = "data"

    @abstractmethod
    def key(self, home: Paths) -> str:
        """Name the artefact; equal keys of one kind of stage mean equal artefacts."""

    @abstractmethod
    def compute(self, work: Workspace) -> Any:
        """Open the artefact, or make it, from where an earlier run stopped."""

    def is_cached(self, home: Paths) -> bool:
        """Return whether the artefact exists; never, for a stage that leaves none."""
        return False

    def list_artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        """List the trained models and trials that the stage makes, with their files or folders."""
        return []

    def choose_device(self, work: Workspace) -> DeviceChoice:
        """Choose the device of the stage, with the reason."""
        return work.choose_device(self.device_rule_name)


@dataclass(frozen=True)
class DataStage(Stage):
    """The data of a task, and a check that the episodes of some sides can be drawn from them.

    Attributes:
        sessions_per_training_episode: of the episodes of meta-training.
    """

    stage_name = "data"
    task: Task
    sides: tuple[Side, ...] = ()
    sessions_per_training_episode: int = 1

    def __str__(self) -> str:
        others = f" with novel classes of {self.task.novel_from}" if self.task.novel_from else ""
        return f"data set {self.task.dataset.name}{others}"

    def key(self, home: Paths) -> str:
        return "+".join(spec.name for spec in data_specs_of_task(self.task, home))

    def is_cached(self, home: Paths) -> bool:
        return all(is_prepared(home, spec.name) for spec in data_specs_of_task(self.task, home))

    def check_episodes_can_be_drawn(self, data: DatasetMetadata) -> None:
        """Raise :class:`UserError` where episodes cannot be drawn, as far as the metadata show it."""

        def starts(pool: str) -> np.ndarray:
            return find_pool_entry(data.class_starts_by_pool, pool, self.task.dataset.name)

        check_supports_known(self.task, data.reason_supports_unknown)
        for side in self.sides if data.class_starts_by_pool else ():
            protocol_of_task(self.task).make_sampler(
                self.task, side, 0, starts, classes=lambda pool: data.class_names_by_pool.get(pool, ())
            )
        if self.sessions_per_training_episode > 1 and data.class_starts_by_pool:
            make_training_sampler(self.task, self.sessions_per_training_episode, 0, starts)
        if data.class_names_by_pool.get("novel/test"):
            protocol_of_task(self.task).published_class_order(self.task, data.class_names_by_pool.__getitem__)

    def compute(self, work: Workspace) -> None:
        prepared = PreparedTask(self.task, "linear", 0, work)  # episodes depend on no backbone
        _ = prepared.dataset
        for side in self.sides:
            prepared.check_episodes(side)
        if self.sessions_per_training_episode > 1:
            prepared.training_sampler(self.sessions_per_training_episode)


@dataclass(frozen=True)
class PretrainStage(Stage):
    """The backbone and its base classifier. ``seed`` is the training seed, ``input_kind`` what methods are given."""

    stage_name = device_rule_name = "pretraining"
    task: Task
    head: HeadKind
    seed: int
    input_kind: str = "features"

    def __str__(self) -> str:
        task, seed = self.task, self.task.pretraining_seed(self.seed)
        recipe = f"recipe {find_recipe(task.recipe_reference).label}, " if task.recipe_reference else ""
        return f"pretraining {task.pretraining.backbone}, {recipe}{self.head} head, seed {seed}"

    def key(self, home: Paths, fingerprint: str = "?") -> str:
        """Name the pretraining.

        Args:
            home: where data are.
            fingerprint: of data that are neither prepared nor pinned.
        """
        return make_pretraining_key(
            self.task, find_dataset_fingerprint(self.task.dataset, home) or fingerprint, self.head, self.seed
        )

    def features_key(self, home: Paths) -> str:
        """Name the folder of its features."""
        return make_features_key(
            self.task, find_dataset_fingerprint(self.task.dataset, home) or "?", self.head, self.seed
        )

    @property
    def linear_stage(self) -> PretrainStage | None:
        """The pretraining on whose backbone this head is fitted; None where it has its own."""
        return replace(self, head="linear") if shares_linear_backbone(self.task, self.head) else None

    def weights_checksum(self, home: Paths) -> str | None:
        """Return the checksum of the weights in the cache; None where there are none."""
        return read_weights_sha256(home, self.key(home))

    def is_cached(self, home: Paths) -> bool:
        return self.weights_checksum(home) is not None

    def check_backbone_fits(self, data: DatasetMetadata, home: Paths) -> None:
        """Raise :class:`NotIncluded` where the backbone has features of other data alone.

        Args:
            data: of the task.
            home: where weights are.
        """
        included = self.task.pretraining.backbone == INCLUDED_BACKBONE and bool(data.shape and data.fingerprint)
        if included and not (self.linear_stage or find_packaged_file(home, self.key(home))):
            raise HeadNotIncludedError(self.task)

    def open_task(self, work: Workspace) -> PreparedTask:
        """Open the task with this pretraining."""
        return work.open_task(self.task, self.head, self.seed, self.input_kind)

    def compute(self, work: Workspace) -> None:
        _ = self.open_task(work).pretrained_backbone


@dataclass(frozen=True)
class FeatureStage(Stage):
    """The features of a pool under a pretraining, of the plain images or of ``n_views`` augmented ones of each.

    With ``n_backbone_stages`` other than 0 they are the maps behind so many stages of the backbone; below 0, all but so
    many.
    """

    stage_name = device_rule_name = "features"
    backbone: PretrainStage
    pool_name: str
    n_views: int
    n_backbone_stages: int = 0

    def __str__(self) -> str:
        name = "maps" if self.n_backbone_stages else "features"
        return f"{name} of {self.pool_name}" + (f", {self.n_views} views" if self.n_views > 1 else "")

    def key(self, home: Paths) -> str:
        task, origin = self.backbone.task, ""
        if task.novel_from and self.pool_name in NOVEL_POOLS:
            origin = shorten_fingerprint(find_novel_fingerprint(task, home)) or "?"
        of = self.n_views, origin, self.n_backbone_stages
        folder = feature_folder(home, self.backbone.features_key(home), self.pool_name, task, *of)
        return folder.relative_to(home.features).as_posix()

    def is_cached(self, home: Paths) -> bool:
        there, weights = (
            read_feature_record(home.features / self.key(home)),
            read_features_sha256(home, self.backbone.key(home)),
        )
        return weights is not None and there.get("pretraining_sha256") == weights

    def compute(self, work: Workspace) -> None:
        self.backbone.open_task(work).open_features(self.pool_name, self.n_views, self.n_backbone_stages)


def make_data_stage(job: Job) -> DataStage:
    """Return the stage of a job's data and episodes."""
    return DataStage(job.task, job.required_sides, job.training_changes.sessions)


def make_pretrain_stage(job: Job) -> PretrainStage:
    """Return the stage of a job's backbone and base classifier."""
    return PretrainStage(job.task, job.method.head, job.seed, job.input_kind)


def list_backbone_stages(job: Job) -> list[Stage]:
    """List the stages of a job's backbone and features, each after its inputs."""
    backbone, task = make_pretrain_stage(job), job.task
    stages: list[Stage] = []
    if linear := backbone.linear_stage:
        stages += (
            [linear]
            if task.pretraining.backbone == INCLUDED_BACKBONE
            else [linear, FeatureStage(linear, "base/train", 1)]
        )
    stages.append(backbone)
    if task.pretraining.backbone == NO_BACKBONE:
        return stages
    # Every row has calibrated numbers beside its own, where validation episodes can be drawn.
    sides = (*job.required_sides, "val") if task.has_base else job.required_sides
    pools = {("base/train", 1): None}
    for side in sides:
        pools |= {(pool, job.training_changes.views if side == "train" else 1): None for pool in task.pools(side)}
    stages += [FeatureStage(backbone, pool, views) for pool, views in pools]
    if stage := parse_seen_stage(job.input_kind):
        stages += [FeatureStage(backbone, pool, views, stage) for pool, views in pools]
    return stages


# -- meta-training


def meta_training_key(job: Job, home: Paths) -> str:
    """Return a name that differs wherever the parameters could, between jobs of one method.

    Args:
        job: to train.
        home: where data are.
    """
    training = {
        k: v for k, v in job.training_changes.non_default_values().items() if k != "select"
    }  # every state holds both models
    plan, backbone = msgspec.to_builtins(job.meta_training_schedule), make_pretrain_stage(job).key(home)
    made_of = [
        job.method_name,
        job.method.revision,
        job.method_options,
        training,
        plan,
        job.task.definition(),
        backbone,
    ]
    if job.task.novel_from:
        made_of.append(find_novel_fingerprint(job.task, home))
    return f"{job.task.name}-{quote(job.method_name)}-seed{job.seed}-{sha256_json(made_of)[:12]}"


def make_untrained_method(job: Job, work: Workspace, device: torch.device = CPU_DEVICE) -> Method:
    """Make the method with initial parameters, which depend on its name and the seed, not on the device.

    Args:
        job: of the method.
        work: where its backbone is.
        device: of the method.
    """
    base = make_pretrain_stage(job).open_task(work).base_classifier
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("method", job.method_name, job.seed))
        return copy_to_device(make_method(job.method, base, job.task.episode.ways, job.method_options), base, device)


def copy_to_device(method: Method, base: Base, device: torch.device) -> Method:
    """Return the method on a device: constructed there, since not all of its state need be parameters.

    Args:
        method: to move.
        base: its base classifier.
        device: of the result.
    """
    if method.base.weight.device == device:
        return method
    copy = remake_method(method, base.to(device), method.ways)
    copy.load_state_dict(method.state_dict())
    return copy.train(method.training)


def copy_for_evaluation(job: Job, work: Workspace, method: Method) -> Method:
    """Return the method on the device where episodes are evaluated.

    Args:
        job: of the method.
        work: with the device.
        method: on any device.
    """
    return copy_to_device(
        method, make_pretrain_stage(job).open_task(work).base_classifier, work.choose_device("evaluation").device
    )


def report_chosen_device(work: Workspace, stage: Stage, place: DeviceChoice) -> None:
    """Report the device of a stage, where there is a choice.

    Args:
        work: with the reporter.
        stage: that begins.
        place: its device.
    """
    if work.device != CPU_DEVICE:
        work.reporter.say(f"{stage}, on {place}")


@dataclass(frozen=True)
class MetaTrainStage(Stage):
    """The method of a job, meta-trained if it has anything to train."""

    stage_name = "meta-training"
    job: Job

    def __str__(self) -> str:
        return f"meta-training {self.job}: {self.job.meta_training_schedule.steps:,} steps"

    def key(self, home: Paths) -> str:
        return meta_training_key(self.job, home)

    def is_folder_of_this_job(self, folder: Path) -> bool:
        """Return whether a folder is free, or has a model of the job's method."""
        return is_free_or_same_method(folder, self.job.is_made_by_same_code)

    def model_folder(self, home: Paths) -> Path:
        """Return the folder of the model."""
        return next(
            folder
            for folder in model_folders(home.trained_models / meta_training_key(self.job, home))
            if self.is_folder_of_this_job(folder)
        )

    def list_artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        return [(self, self.model_folder(home))]

    def is_cached(self, home: Paths) -> bool:
        return (
            read_finished_metadata(
                self.model_folder(home), pretraining_sha256=make_pretrain_stage(self.job).weights_checksum(home)
            )
            is not None
        )

    def choose_device(self, work: Workspace) -> DeviceChoice:
        few = self.job.method.gpu_min_episodes(
            default_options(self.job.method, self.job.task) | dict(self.job.set_options)
        )
        return work.choose_device("meta-training", self.job.training_changes.episodes_per_step, few)

    def measure_validation_accuracy(self, work: Workspace, method: Method) -> float:
        """Return the accuracy in percent on the validation episodes that checkpoints are chosen on.

        Args:
            work: where the job's data and features are.
            method: on the device where it is trained.
        """
        _, episodes = self.job.task.evaluation.validation_halves
        loader = make_pretrain_stage(self.job).open_task(work).loader("val", device=self.choose_device(work).device)
        return evaluate_method(method, self.job.method_name, loader, episodes, at_once=False).accuracy

    def compute(self, work: Workspace) -> TrainedModel:
        job, place, prepared = self.job, self.choose_device(work), make_pretrain_stage(self.job).open_task(work)
        method = make_untrained_method(job, work, place.device)
        if not any(p.requires_grad for p in method.parameters()):
            return TrainedModel(method.eval())
        folder = self.model_folder(work.home)
        if read_finished_metadata(folder, pretraining_sha256=prepared.pretrained_backbone.sha256):
            with suppress(CorruptFile):  # which is trained again, below
                return load_trained(folder, method, job.label, job.training_changes.select)
        from ifsl_bench.experiments.meta_training import MetaTrainer

        facts = {
            "method": job.method_ref.source_file or job.method_name,
            **job.method_code_identity,
            "options": job.method_options,
            "train": {
                key: value for key, value in job.training_changes.non_default_values().items() if key != "select"
            },
            "task": job.task.name,
            "pretraining": prepared.pretrained_backbone.pretraining_key,
            "pretraining_sha256": prepared.pretrained_backbone.sha256,
            "seed": job.seed,
            "place": str(place),
        }
        loader = prepared.episode_loader("train", place.device, job.training_changes.views)
        if job.training_changes.sessions > 1:
            loader = loader.with_sampler(prepared.training_sampler(job.training_changes.sessions, place.device))
        for folder in model_folders(work.home.trained_models / meta_training_key(job, work.home)):
            with hold_lock(folder, work.reporter.warn):
                if self.is_folder_of_this_job(folder):  # looked up under the lock: another process may have made it
                    report_chosen_device(work, self, place)
                    reporter = work.curve_reporter(self.stage_name, meta_training_key(job, work.home))
                    how = job.meta_training_schedule, job.training_changes, job.seed, facts, reporter
                    check = partial(self.measure_validation_accuracy, work)
                    return TrainedModel(
                        method, MetaTrainer(folder, method, job.label, loader, check, *how).run(), folder.name
                    )
        raise AssertionError("there is no end of folders")
