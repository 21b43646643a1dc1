"""Meta-training, the stage of a job between its features and its evaluation, and what later stages ask of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import torch

from ifsl_bench.backbones.device import HOST, DeviceChoice
from ifsl_bench.data.preparing.metadata import DatasetMetadata, novel_fingerprint
from ifsl_bench.experiments.evaluation import block_bytes, evaluate
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.rates import Amount
from ifsl_bench.experiments.stages import CheckEpisodes, Features, PrepareData, Pretrain, Stage
from ifsl_bench.experiments.trained_models import Model, folders, holds, load_trained, training_threads
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.method import Base, Method
from ifsl_bench.plugin.options import defaults, make_method, remade
from ifsl_bench.protocols.tasks.task import NO_BACKBONE, Side
from ifsl_bench.store.result_folder import packaged_root
from ifsl_bench.store.schema import file_name
from ifsl_bench.utils.checkpoint import begun, finished_info
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.seeds import seed_of

WIDE = 512  # features of an image at most, of the networks that come with the package


def backbone_of(job: Job) -> Pretrain:
    """The stage that a job's backbone and base classifier come from."""
    return Pretrain(job.task, job.method.head, job.seed)


def data_stage_of(job: Job) -> PrepareData:
    """The stage that a job's data and its episodes come from."""
    return PrepareData(job.task, job.sides, job.training.sessions)


def key_of(job: Job, home: Paths) -> str:
    """A name that differs wherever the parameters could, between jobs of one method."""
    training = {k: v for k, v in job.training.changes().items() if k != "select"}  # every state holds both models
    plan, backbone = msgspec.to_builtins(job.schedule), backbone_of(job).key(home)
    made_of = [job.name, job.method.revision, job.options, training, plan, job.task.definition(), backbone]
    if job.task.novel_from:
        made_of.append(novel_fingerprint(job.task, home))
    return f"{job.task.name}-{quote(job.name)}-seed{job.seed}-{sha256_json(made_of)[:12]}"


def fresh(job: Job, work: Workspace, device: torch.device = HOST) -> Method:
    """The method with initial parameters, which depend on the method's name and the seed, not on the device."""
    base = backbone_of(job).prepared(work).base
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("method", job.name, job.seed))
        return moved(make_method(job.method, base, job.task.episode.ways, job.options), base, device)


def moved(method: Method, base: Base, device: torch.device) -> Method:
    """The method on a device: made there anew, since not all that it holds need be its parameters."""
    if method.base.weight.device == device:
        return method
    copy = remade(method, base.to(device), method.ways)
    copy.load_state_dict(method.state_dict())
    return copy.train(method.training)


def to_evaluate(job: Job, work: Workspace, method: Method) -> Method:
    """The method where episodes are evaluated."""
    return moved(method, backbone_of(job).prepared(work).base, work.place("evaluation").device)


def training_place(job: Job, work: Workspace) -> DeviceChoice:
    """Chooses where the method is meta-trained."""
    few = job.method.gpu_min_episodes(defaults(job.method, job.task) | dict(job.set_options))
    return work.place("meta-training", job.training.episodes_per_step, few)


def evaluation_amount(job: Job, episodes: int, work: Workspace) -> Amount:
    """The work of evaluating so many episodes, or sequences."""
    kind = "answering sequences" if job.task.sessions else "answering episodes"
    return Amount(kind, _named(job, work.place("evaluation")), episodes, _as_stored(job, kind))


class _Stored(msgspec.Struct):
    """What a stored result says of times."""

    cost: dict[str, float]
    train: dict[str, Any]
    episodes: dict[str, Any]
    training: dict[str, Any] | None = None


def _as_stored(job: Job, kind: str) -> float | None:
    """Seconds a unit of that kind of work, as the stored row or else the plain row of its method took it."""
    task, usual = job.task.name.partition("+")[0], job.task.evaluation.episodes
    rows = _stored_times(task, job.label, job.episodes), _stored_times(task, job.row.name, usual)
    return next((times[kind] for times in rows if kind in times), None)


@lru_cache(maxsize=512)
def _stored_times(task: str, label: str, episodes: int) -> dict[str, float]:
    """Seconds a unit by kind of work. One seed is enough for a guess, and no run ends for want of it."""
    try:
        result = msgspec.json.decode((packaged_root() / task / file_name(label, 0)).read_bytes(), type=_Stored)
    except (OSError, ValueError, ModuleNotFoundError):
        return {}
    kind = "answering sequences" if "sessions" in result.episodes else "answering episodes"
    times = {kind: result.cost["evaluation_seconds"] / episodes}
    if result.training:
        steps = max(map(int, result.training["validation"]))  # the last one is always validated
        times[MetaTrain.kind] = result.cost["training_seconds"] / (steps * result.train.get("episodes_per_step", 1))
    return times


def _named(job: Job, place: DeviceChoice) -> str:
    """A row on a task and a device, as rates are kept."""
    return f"{job.row.name}/{job.task.name}/{place.device.type}"


@dataclass(frozen=True)
class JobStage(Stage):
    """A stage of one job, which has the features of all pools and the base logits in memory."""

    job: Job

    @property
    def shown_seed(self) -> int:
        return self.job.seed

    def memory(self, data: DatasetMetadata, device: torch.device) -> int:
        """Those, in single precision, and the blocks of episodes of an evaluation."""
        width = math.prod(data.shape) if self.job.task.pretraining.backbone == NO_BACKBONE else WIDE
        pools = 4 * (width + data.base_classes) * sum(data.images(pool) for pool in data.starts)
        return pools + block_bytes(self.job.method, self.job.task.sessions is not None)


@dataclass(frozen=True)
class MetaTrain(JobStage):
    """The method, meta-trained if it has anything to train."""

    kind = "meta-training"
    trains = True

    def told(self, seeds: str) -> str:
        return f"meta-training {self.job.told(seeds)}: {self.job.schedule.steps:,} steps"

    def key(self, home: Paths) -> str:
        return key_of(self.job, home)

    def inputs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val"))

    def is_ours(self, folder: Path) -> bool:
        """Tells whether a folder is free, or has a model of the job's method."""
        return holds(folder, self.job.has_made)

    def folder(self, home: Paths) -> Path:
        """The folder of the model."""
        return next(folder for folder in folders(home.trained / key_of(self.job, home)) if self.is_ours(folder))

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        return [(self, self.folder(home))]

    def cached(self, home: Paths) -> bool:
        return finished_info(self.folder(home), pretraining_sha256=backbone_of(self.job).weights(home)) is not None

    def place(self, work: Workspace) -> DeviceChoice:
        return training_place(self.job, work)

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount:
        """The steps that are left, with their validations."""
        job, weights = self.job, backbone_of(self.job).weights(work.home)
        done = 0 if weights is None else begun(self.folder(work.home), "step")
        steps_left = max(0, job.schedule.steps - done) if job.trains else 0
        left = steps_left * job.training.episodes_per_step
        return Amount(self.kind, _named(job, self.place(work)), left, _as_stored(job, self.kind))

    def validate(self, work: Workspace, method: Method) -> float:
        """Accuracy in percent on the validation episodes that checkpoints are chosen on, where it is trained."""
        _, episodes = self.job.task.evaluation.halves
        loader = backbone_of(self.job).prepared(work).loader("val", device=self.place(work).device)
        return evaluate(method, self.job.name, loader, episodes, at_once=False).accuracy

    def compute(self, work: Workspace) -> Model:
        job, place, prepared = self.job, self.place(work), backbone_of(self.job).prepared(work)
        method = fresh(job, work, place.device)
        if not any(p.requires_grad for p in method.parameters()):
            return Model(method.eval())
        folder = self.folder(work.home)
        if finished_info(folder, pretraining_sha256=prepared.pretrained.sha256):
            with suppress(CorruptFile):  # which is trained again, below
                return load_trained(folder, method, job.label, job.training.select)
        from ifsl_bench.experiments.meta_training import MetaTrainer

        facts = {
            "method": job.chosen.file or job.name,
            **job.identity,
            "options": job.options,
            "train": {key: value for key, value in job.training.changes().items() if key != "select"},
            "task": job.task.name,
            "pretraining": prepared.pretrained.key,
            "pretraining_sha256": prepared.pretrained.sha256,
            "seed": job.seed,
            "place": str(place),
        }
        loader = prepared.episodes("train", place.device, job.training.views)
        if job.training.sessions > 1:
            loader = loader.drawn_by(prepared.training_sampler(job.training.sessions, place.device))
        for folder in folders(work.home.trained / key_of(job, work.home)):
            with locked(folder, work.reporter.warn):
                if self.is_ours(folder):  # asked under the lock: another process may have made it
                    say_place(work, self, place)
                    how = job.schedule, job.training, job.seed, facts, work.reporter
                    check = partial(self.validate, work)
                    return Model(method, MetaTrainer(folder, method, job.label, loader, check, *how).run(), folder.name)
        raise AssertionError("there is no end of folders")


def say_place(work: Workspace, stage: Stage, place: DeviceChoice) -> None:
    """Says where a stage runs, where there is a choice."""
    if work.device != HOST:
        work.reporter.say(f"{stage}, on {place}")


def features_stages(job: Job, sides: Iterable[Side]) -> list[Stage]:
    """The backbone of a job, and the features under it that the episodes of these sides need."""
    backbone, pools = backbone_of(job), {("base/train", 1): None}
    if job.task.pretraining.backbone == NO_BACKBONE:
        return [backbone]
    for side in sides:
        pools |= {(pool, job.training.views if side == "train" else 1): None for pool in job.task.pools(side)}
    return [backbone, *(Features(backbone, pool, views) for pool, views in pools)]


def prepared_for(job: Job, sides: Sequence[Side]) -> list[Stage]:
    """Lists the stages that work on the episodes of these sides begins with."""
    return [*(CheckEpisodes(job.task, side) for side in sides), *features_stages(job, sides)]
