"""The stages of a job between :mod:`ifsl_bench.running.preparation` and :mod:`ifsl_bench.running.evaluating`:
meta-training, and trials of options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from ifsl_bench.backbone.placement import HOST, Place
from ifsl_bench.common.checkpoint import begun, finished, finished_info
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.common.locks import locked
from ifsl_bench.common.processor import share, threads
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.preparing.outline import Outline, novel_fingerprint
from ifsl_bench.episodic.choosing import Tried, read_trial, tried_with, write_trial
from ifsl_bench.episodic.evaluation import block_bytes, evaluate
from ifsl_bench.episodic.meta_training import Diverged, meta_train, training_threads
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.episodic.rough_times import episode_seconds, sizes_of, step_seconds
from ifsl_bench.episodic.trained import Model, folders, holds
from ifsl_bench.plugin.method import Base, Method, NonFinite
from ifsl_bench.plugin.options import defaults, make_method
from ifsl_bench.protocol.calibration import Bias
from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.task import NO_BACKBONE, Side
from ifsl_bench.running.job import Job
from ifsl_bench.running.preparation import CheckEpisodes, Features, Pretrain, Stage

WIDE = 512  # features of an image at most, of the networks that come with the package


@dataclass(frozen=True)
class OfJob(Stage):
    """A stage of one job."""

    job: Job

    @property
    def backbone(self) -> Pretrain:
        return Pretrain(self.job.task, self.job.method.head, self.job.seed)

    def key(self, home: Home) -> str:
        """Different whenever the parameters could differ between jobs of one method."""
        job = self.job
        training = {k: v for k, v in job.training.changes().items() if k != "select"}  # every state holds both models
        plan, backbone = msgspec.to_builtins(job.schedule), self.backbone.key(home)
        made_of = [job.name, job.method.revision, job.options, training, plan, job.task.definition(), backbone]
        if job.task.novel_from:
            made_of.append(novel_fingerprint(job.task, home))
        return f"{job.task.name}-{quote(job.name)}-seed{job.seed}-{sha256_json(made_of)[:12]}"

    def fresh(self, work: Workspace, device: torch.device = HOST) -> Method:
        """The method with initial parameters, which depend on the method's name and the seed, not on the device."""
        base = self.backbone.prepared(work).base
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("method", self.job.name, self.job.seed))
            return self._on(self._made(base), base, device)

    def _made(self, base: Base) -> Method:
        return make_method(self.job.method, base, self.job.task.episode.ways, self.job.options)

    def _on(self, method: Method, base: Base, device: torch.device) -> Method:
        """The method on a device: made there anew, since not all that it holds need be its parameters."""
        if method.base.weight.device == device:
            return method
        moved = self._made(base.to(device)).to(device)
        moved.load_state_dict(method.state_dict())
        return moved.train(method.training)

    def to_evaluate(self, work: Workspace, method: Method) -> Method:
        """The method where episodes are evaluated."""
        return self._on(method, self.backbone.prepared(work).base, self.evaluation(work).device)

    def memory(self, data: Outline, device: torch.device) -> int:
        """Features and base logits of all pools, in single precision, and the blocks of episodes of an evaluation."""
        width = math.prod(data.shape) if self.job.task.pretraining.backbone == NO_BACKBONE else WIDE
        pools = 4 * (width + data.base_classes) * sum(data.images(pool) for pool in data.starts)
        return pools + block_bytes(self.job.method)

    def training(self, work: Workspace) -> Place:
        """Where the method is meta-trained."""
        job = self.job
        few = job.method.few_episodes(defaults(job.method, job.task) | dict(job.given))
        return work.place("meta-training", job.training.episodes_per_step, few)

    def evaluation(self, work: Workspace) -> Place:
        """Where its episodes are evaluated."""
        return work.place("evaluation")

    def step_seconds(self, data: Outline, work: Workspace) -> float | None:
        """About how long a step of meta-training takes."""
        job, device = self.job, self.training(work).device
        if not data.shape:
            return None
        episodes = job.training.episodes_per_step
        with threads(training_threads(episodes) if device.type == "cpu" else share()):
            sizes = sizes_of(job.task, data.base_classes, data.shape, device)
            return step_seconds(job.method, job.options, sizes, episodes)

    def evaluation_seconds(self, episodes: int, data: Outline, work: Workspace) -> float | None:
        """About how long so many episodes take."""
        job, device = self.job, self.evaluation(work).device
        if not data.shape:
            return None
        each = episode_seconds(job.method, job.options, sizes_of(job.task, data.base_classes, data.shape, device))
        return None if each is None else episodes * each

    def begun(self, home: Home) -> int:
        """Steps of meta-training that an earlier run has done and this one goes on from."""
        folder = MetaTrain(self.job).folder(home)
        weights = self.backbone.weights(home)
        return 0 if weights is None else begun(folder, "step")

    def training_seconds(self, data: Outline, work: Workspace) -> float | None:
        """About how long what is left of meta-training takes, with its validations."""
        job, task = self.job, self.job.task
        if not job.trains:
            return 0.0
        step, (_, episodes) = self.step_seconds(data, work), task.evaluation.halves
        often = job.schedule.steps // job.schedule.validate_every
        checks = self.evaluation_seconds(often * len(episodes), data, work)
        left = 1 - min(1.0, self.begun(work.home) / job.schedule.steps)
        return None if step is None or checks is None else left * (job.schedule.steps * step + checks)


@dataclass(frozen=True)
class MetaTrain(OfJob):
    """The method, meta-trained if it has anything to train."""

    kind = "meta-training"

    def __str__(self) -> str:
        return f"meta-training {self.job}: {self.job.schedule.steps:,} steps"

    def needs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val"))

    def is_ours(self, folder: Path) -> bool:
        """Whether a folder is free, or has a model of the job's method."""
        return holds(folder, self.job.has_made)

    def folder(self, home: Home) -> Path:
        """Where the model is, or will be."""
        return next(folder for folder in folders(home.trained / self.key(home)) if self.is_ours(folder))

    def cached(self, home: Home) -> bool:
        return finished_info(self.folder(home), pretraining_sha256=self.backbone.weights(home)) is not None

    def place(self, work: Workspace) -> Place:
        return self.training(work)

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        return self.training_seconds(data, work)

    def validate(self, work: Workspace, method: Method) -> float:
        """Accuracy in percent on the validation episodes that checkpoints are chosen on, where it is trained."""
        _, episodes = self.job.task.evaluation.halves
        loader = self.backbone.prepared(work).loader("val", device=self.place(work).device)
        return evaluate(method, self.job.name, loader, episodes, at_once=False).accuracy

    def run(self, work: Workspace) -> Model:
        job, place, prepared = self.job, self.place(work), self.backbone.prepared(work)
        method = self.fresh(work, place.device)
        if not any(p.requires_grad for p in method.parameters()):
            return Model(method.eval())
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
        loader = prepared.loader("train", job.training.views, place.device)
        for folder in folders(work.home.trained / self.key(work.home)):
            done = finished(folder, pretraining_sha256=prepared.pretrained.sha256) is not None
            with nullcontext() if done else locked(folder, work.reporter.warn):  # a read-only folder grants no lock
                if self.is_ours(folder):  # asked under the lock: another process may have made it
                    if not done:
                        say_place(work, self, place)
                    how = job.schedule, job.training, job.seed, facts, work.reporter
                    check = partial(self.validate, work)
                    return Model(method, meta_train(folder, method, job.label, loader, check, *how), folder.name)
        raise AssertionError("there is no end of folders")


@dataclass(frozen=True)
class Trial(OfJob):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    kind = "trial"

    def __str__(self) -> str:
        steps = f"{self.job.schedule.steps:,} steps, " if self.job.trains else ""
        return f"trial of {self.job}: {steps}{len(self.job.task.evaluation.halves[0]):,} validation episodes"

    def needs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val") if self.job.trains else ("val",))

    def file(self, home: Home) -> Path:
        return home.cache / "trials" / f"{self.key(home)}-{self.job.training.select}.json"

    def cached(self, home: Home) -> bool:
        return self.found(home) is not None

    def found(self, home: Home) -> Tried | None:
        """The trial on the backbone that is in the home."""
        return self.kept(home, self.backbone.weights(home))

    def kept(self, home: Home, weights: str | None, reporter: Reporter | None = None) -> Tried | None:
        """The trial of the same method on the same backbone, if there is one."""
        return read_trial(self.file(home), weights, self.job.has_made, reporter)

    def place(self, work: Workspace) -> Place:
        return both(self.training(work), self.evaluation(work)) if self.job.trains else self.evaluation(work)

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        training = self.training_seconds(data, work)
        trying = self.evaluation_seconds(len(self.job.task.evaluation.halves[0]), data, work)
        return None if training is None or trying is None else training + trying

    def run(self, work: Workspace) -> Tried:
        job, file, prepared = self.job, self.file(work.home), self.backbone.prepared(work)
        tried = self.kept(work.home, prepared.pretrained.sha256, work.reporter)
        if tried is None:
            episodes = job.task.evaluation.halves[0]
            try:
                method = self.to_evaluate(work, MetaTrain(job).run(work).method)
                loader = prepared.loader("val", device=self.evaluation(work).device)
                tried = tried_with(evaluate(method, job.name, loader, episodes, work.reporter, str(self)))
            except (Diverged, NonFinite) as error:
                tried = Tried(0.0, len(episodes), diverged=str(error))
            write_trial(file, tried, prepared.pretrained.sha256, str(job), job.identity)
            work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation episodes")
        return tried

    def on_test(self, work: Workspace, episodes: range, title: str) -> Counts:
        """Counts the hits of what was tried on test episodes, calibrated by its own bias."""
        job, bias = self.job, self.run(work).bias
        method = self.to_evaluate(work, MetaTrain(job).run(work).method)
        loader = self.backbone.prepared(work).loader("test", device=self.evaluation(work).device)
        alone = None if bias is None else Bias(bias, len(job.task.evaluation.halves[0]), np.empty(0), np.empty(0))
        return evaluate(method, job.name, loader, episodes, work.reporter, title, job.episodes, alone).counts


def both(first: Place, second: Place) -> Place:
    """Of work in two parts."""
    return first if first == second else Place(second.device, f"{second.why}, after meta-training on {first}")


def say_place(work: Workspace, stage: Stage, place: Place) -> None:
    """Says where a stage runs, where there is a choice."""
    if work.device != HOST:
        work.reporter.say(f"{stage}, on {place}")


def features_of(job: Job, sides: Iterable[Side]) -> list[Stage]:
    """The backbone of a job, and the features under it that the episodes of these sides need."""
    backbone, pools = Pretrain(job.task, job.method.head, job.seed), {("base/train", 1): None}
    if job.task.pretraining.backbone == NO_BACKBONE:
        return [backbone]
    for side in sides:
        pools |= {(pool, job.training.views if side == "train" else 1): None for pool in job.task.pools(side)}
    return [backbone, *(Features(backbone, pool, views) for pool, views in pools)]


def prepared_for(job: Job, sides: Sequence[Side]) -> list[Stage]:
    """What work on the episodes of these sides begins with."""
    return [*(CheckEpisodes(job.task, side) for side in sides), *features_of(job, sides)]
