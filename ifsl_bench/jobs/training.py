"""The stages of a job between :mod:`ifsl_bench.jobs.preparation` and :mod:`ifsl_bench.jobs.evaluating`:
meta-training, and trials of options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from ifsl_bench.backbone.placement import HOST, Place
from ifsl_bench.common.checkpoint import begun, finished_info
from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.preparing.outline import Outline, novel_fingerprint
from ifsl_bench.episodic.choosing import Tried, read_trial, tried_with, write_trial
from ifsl_bench.episodic.evaluation import block_bytes, evaluate
from ifsl_bench.episodic.prepared import PreparedTask, Workspace
from ifsl_bench.episodic.trained import Diverged, Model, folders, holds, load_trained, training_threads
from ifsl_bench.jobs.job import Job
from ifsl_bench.jobs.preparation import CheckEpisodes, Features, Pretrain, Stage
from ifsl_bench.jobs.rates import Amount
from ifsl_bench.plugin import settings
from ifsl_bench.plugin.method import Base, Method, NonFinite
from ifsl_bench.plugin.options import defaults, make_method
from ifsl_bench.protocol.calibration import Bias
from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.task import NO_BACKBONE, Side

WIDE = 512  # features of an image at most, of the networks that come with the package


def backbone_of(job: Job) -> Pretrain:
    """The stage that a job's backbone and base classifier come from."""
    return Pretrain(job.task, job.method.head, job.seed)


def key_of(job: Job, home: Home) -> str:
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
        return moved(job, make_method(job.method, base, job.task.episode.ways, job.options), base, device)


def moved(job: Job, method: Method, base: Base, device: torch.device) -> Method:
    """The method on a device: made there anew, since not all that it holds need be its parameters."""
    if method.base.weight.device == device:
        return method
    copy = make_method(job.method, base.to(device), job.task.episode.ways, job.options).to(device)
    copy.load_state_dict(method.state_dict())
    return copy.train(method.training)


def to_evaluate(job: Job, work: Workspace, method: Method) -> Method:
    """The method where episodes are evaluated."""
    return moved(job, method, backbone_of(job).prepared(work).base, work.place("evaluation").device)


def training_place(job: Job, work: Workspace) -> Place:
    """Chooses where the method is meta-trained."""
    few = job.method.few_episodes(defaults(job.method, job.task) | dict(job.given))
    return work.place("meta-training", job.training.episodes_per_step, few)


def evaluation_amount(job: Job, episodes: int, work: Workspace) -> Amount:
    """The work of evaluating so many episodes."""
    return Amount("evaluation", _named(job, work.place("evaluation")), episodes)


def _named(job: Job, place: Place) -> str:
    """A row on a task and a device, as rates are kept."""
    return f"{job.row.name}/{job.task.name}/{place.device.type}"


@dataclass(frozen=True)
class JobStage(Stage):
    """A stage of one job, which has the features of all pools and the base logits in memory."""

    job: Job

    @property
    def shown_seed(self) -> int:
        return self.job.seed

    def memory(self, data: Outline, device: torch.device) -> int:
        """Those, in single precision, and the blocks of episodes of an evaluation."""
        width = math.prod(data.shape) if self.job.task.pretraining.backbone == NO_BACKBONE else WIDE
        pools = 4 * (width + data.base_classes) * sum(data.images(pool) for pool in data.starts)
        return pools + block_bytes(self.job.method)


@dataclass(frozen=True)
class MetaTrain(JobStage):
    """The method, meta-trained if it has anything to train."""

    kind = "meta-training"

    def told(self, seeds: str) -> str:
        return f"meta-training {self.job.told(seeds)}: {self.job.schedule.steps:,} steps"

    def key(self, home: Home) -> str:
        return key_of(self.job, home)

    def inputs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val"))

    def is_ours(self, folder: Path) -> bool:
        """Tells whether a folder is free, or has a model of the job's method."""
        return holds(folder, self.job.has_made)

    def folder(self, home: Home) -> Path:
        """The folder of the model."""
        return next(folder for folder in folders(home.trained / key_of(self.job, home)) if self.is_ours(folder))

    def cached(self, home: Home) -> bool:
        return finished_info(self.folder(home), pretraining_sha256=backbone_of(self.job).weights(home)) is not None

    def place(self, work: Workspace) -> Place:
        return training_place(self.job, work)

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def amount(self, data: Outline, work: Workspace) -> Amount:
        """The steps that are left, with their validations."""
        job, weights = self.job, backbone_of(self.job).weights(work.home)
        done = 0 if weights is None else begun(self.folder(work.home), "step")
        steps_left = max(0, job.schedule.steps - done) if job.trains else 0
        return Amount(self.kind, _named(job, self.place(work)), steps_left * job.training.episodes_per_step)

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
        from ifsl_bench.episodic.meta_training import Course

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
        for folder in folders(work.home.trained / key_of(job, work.home)):
            with locked(folder, work.reporter.warn):
                if self.is_ours(folder):  # asked under the lock: another process may have made it
                    say_place(work, self, place)
                    how = job.schedule, job.training, job.seed, facts, work.reporter
                    check = partial(self.validate, work)
                    return Model(method, Course(folder, method, job.label, loader, check, *how).run(), folder.name)
        raise AssertionError("there is no end of folders")


@dataclass(frozen=True)
class Trial(JobStage):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    kind = "trial"

    def told(self, seeds: str) -> str:
        steps = f"{self.job.schedule.steps:,} steps, " if self.job.trains else ""
        episodes = len(self.job.task.evaluation.halves[0])
        return f"trial of {self.job.told(seeds)}: {steps}{episodes:,} validation episodes"

    @property
    def family(self) -> str:
        return trials_named(self.job)

    def key(self, home: Home) -> str:
        return key_of(self.job, home)

    def inputs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val") if self.job.trains else ("val",))

    def file(self, home: Home) -> Path:
        return home.cache / "trials" / f"{key_of(self.job, home)}-{self.job.training.select}.json"

    def cached(self, home: Home) -> bool:
        return self.found(home) is not None

    def found(self, home: Home) -> Tried | None:
        """The trial on the backbone that is in the home."""
        return self.kept(home, backbone_of(self.job).weights(home))

    def kept(self, home: Home, weights: str | None, reporter: Reporter | None = None) -> Tried | None:
        """The trial of the same method on the same backbone, if there is one."""
        return read_trial(self.file(home), weights, self.job.has_made, reporter)

    def place(self, work: Workspace) -> Place:
        evaluation = work.place("evaluation")
        return both(training_place(self.job, work), evaluation) if self.job.trains else evaluation

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def amount(self, data: Outline, work: Workspace) -> Amount:
        """Meta-training, beside which the episodes take little; without it these."""
        if self.job.trains:
            return MetaTrain(self.job).amount(data, work)
        return evaluation_amount(self.job, len(self.job.task.evaluation.halves[0]), work)

    def compute(self, work: Workspace) -> Tried:
        job, file, prepared = self.job, self.file(work.home), backbone_of(self.job).prepared(work)
        tried = self.kept(work.home, prepared.pretrained.sha256, work.reporter)
        if tried is None:
            tried = self._tried(work, prepared)
            write_trial(file, tried, prepared.pretrained.sha256, str(job), job.identity)
            work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation episodes")
        return tried

    def on_test(self, work: Workspace, episodes: range, title: str) -> Counts:
        """Counts the hits of what was tried on test episodes, calibrated by its own bias."""
        job, bias = self.job, self.compute(work).bias
        method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
        loader = backbone_of(job).prepared(work).loader("test", device=work.place("evaluation").device)
        alone = None if bias is None else Bias(bias, len(job.task.evaluation.halves[0]), np.empty(0), np.empty(0))
        counts = evaluate(method, job.name, loader, episodes, work.reporter, title, job.episodes, alone).counts
        assert isinstance(counts, Counts)  # no such question is asked of sequences
        return counts

    def _tried(self, work: Workspace, prepared: PreparedTask) -> Tried:
        job, episodes = self.job, self.job.task.evaluation.halves[0]
        try:
            method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
            loader = prepared.loader("val", device=work.place("evaluation").device)
            return tried_with(evaluate(method, job.name, loader, episodes, work.reporter, str(self)))
        except (Diverged, NonFinite) as error:
            return Tried(0.0, len(episodes), diverged=str(error))


def trials_named(job: Job) -> str:
    """The trials of a search, for people: what is tried, with what is not."""
    fixed = {key: value for key, value in job.given.items() if key not in job.method.space}
    return f"trials of {'.'.join(settings.label(job.method, job.name, fixed, job.task))} on {job.task.name}"


def both(first: Place, second: Place) -> Place:
    """Joins the places of work in two parts."""
    return first if first == second else Place(second.device, f"{second.why}, after meta-training on {first}")


def say_place(work: Workspace, stage: Stage, place: Place) -> None:
    """Says where a stage runs, where there is a choice."""
    if work.device != HOST:
        work.reporter.say(f"{stage}, on {place}")


def features_of(job: Job, sides: Iterable[Side]) -> list[Stage]:
    """The backbone of a job, and the features under it that the episodes of these sides need."""
    backbone, pools = backbone_of(job), {("base/train", 1): None}
    if job.task.pretraining.backbone == NO_BACKBONE:
        return [backbone]
    for side in sides:
        pools |= {(pool, job.training.views if side == "train" else 1): None for pool in job.task.pools(side)}
    return [backbone, *(Features(backbone, pool, views) for pool, views in pools)]


def prepared_for(job: Job, sides: Sequence[Side]) -> list[Stage]:
    """Lists the stages that work on the episodes of these sides begins with."""
    return [*(CheckEpisodes(job.task, side) for side in sides), *features_of(job, sides)]
