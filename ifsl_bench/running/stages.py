"""The stages of a run: data set, pretraining, features, meta-training, evaluation.

Each is a small description that can be pickled. It knows its key, whether its artefact is in the home folder, about how
long it takes, and how to run. :func:`stages_of` lists those of a job; runs, resumed runs and ``--dry-run`` all walk
that one list.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ifsl_bench.backbone.features import bank_folder, is_computed
from ifsl_bench.backbone.pretrain import HeadKind, pretrained_sha256, pretraining_key
from ifsl_bench.backbone.rough_times import feature_seconds, pretraining_seconds
from ifsl_bench.board.result_file import SCHEMA, Result, counts_entry, summary_entry
from ifsl_bench.common.checkpoint import is_finished
from ifsl_bench.common.files import Home, locked, sha256_json
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.preparing.outline import Outline, fingerprint_of
from ifsl_bench.data.preparing.prepare import is_prepared, rough_seconds
from ifsl_bench.episodic.choosing import Choice, choose
from ifsl_bench.episodic.evaluation import Evaluated, evaluate, predict
from ifsl_bench.episodic.meta_training import meta_train
from ifsl_bench.episodic.prepared import PreparedTask, Workspace
from ifsl_bench.episodic.rough_times import episode_seconds, random_method, step_seconds
from ifsl_bench.episodic.trained import Model, load_trained
from ifsl_bench.plugin import settings
from ifsl_bench.plugin.contract import Asked, check_answers
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocol.episodes import task_sampler
from ifsl_bench.protocol.metrics import summarise
from ifsl_bench.protocol.task import NO_BACKBONE, Side, Task
from ifsl_bench.running.job import Job
from ifsl_bench.running.provenance import provenance

FIRST = 8  # test episodes that the contract is checked on in every run


class Stage(ABC):
    """A piece of work."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is, for people."""

    @abstractmethod
    def key(self, home: Home) -> str:
        """What its artefact is called; equal keys of one kind of stage mean equal artefacts."""

    @abstractmethod
    def cached(self, home: Home) -> bool:
        """Whether the artefact is there."""

    @abstractmethod
    def estimate(self, data: Outline, device: torch.device) -> float | None:
        """About how many seconds it takes here; None where nobody knows."""

    @abstractmethod
    def run(self, work: Workspace) -> Any:
        """Opens the artefact, or makes it, from where an earlier run stopped."""


@dataclass(frozen=True)
class PrepareData(Stage):
    """The data set, from which the episodes of some sides can be drawn."""

    task: Task
    sides: tuple[Side, ...]

    @property
    def title(self) -> str:
        return f"data set {self.task.dataset.name}"

    def key(self, home: Home) -> str:
        return self.task.dataset.name

    def cached(self, home: Home) -> bool:
        return is_prepared(home, self.task.dataset.name)

    def check(self, data: Outline) -> None:
        """Raises :class:`UserError` where episodes cannot be drawn, as far as that is known."""
        for side in self.sides if data.starts else ():
            task_sampler(self.task, side, 0, data.starts.__getitem__)

    def estimate(self, data: Outline, device: torch.device) -> float | None:
        return rough_seconds(self.task.dataset.name)

    def run(self, work: Workspace) -> None:
        prepared = PreparedTask(self.task, "linear", 0, work)  # episodes depend on no backbone
        for side in self.sides:
            prepared.sampler(side)
        prepared.check_digest()


@dataclass(frozen=True)
class Pretrain(Stage):
    """The backbone and its base classifier. ``seed`` is that of training."""

    task: Task
    head: HeadKind
    seed: int

    @property
    def title(self) -> str:
        spec = self.task.pretraining
        return f"pretraining {spec.backbone}, {self.head} head, seed {self.task.pretraining_seed(self.seed)}"

    def key(self, home: Home, fingerprint: str = "?") -> str:
        """On data of that fingerprint, where they are neither prepared nor pinned."""
        return pretraining_key(self.task, fingerprint_of(self.task, home) or fingerprint, self.head, self.seed)

    def cached(self, home: Home) -> bool:
        return pretrained_sha256(home, self.key(home)) is not None

    def estimate(self, data: Outline, device: torch.device) -> float | None:
        size = (data.shape, data.base_classes, data.images("base/train"))
        return pretraining_seconds(self.task.pretraining, *size, device) if data.shape else None

    def run(self, work: Workspace) -> None:
        _ = work.prepared(self.task, self.head, self.seed).pretrained


@dataclass(frozen=True)
class Features(Stage):
    """The features of a pool under a pretraining, of the plain images or of ``views`` augmented ones of each."""

    backbone: Pretrain
    pool: str
    views: int

    @property
    def title(self) -> str:
        return f"features of {self.pool}" + (f", {self.views} views" if self.views > 1 else "")

    def key(self, home: Home) -> str:
        folder = bank_folder(home, self.backbone.key(home), self.pool, self.backbone.task, self.views)
        return folder.relative_to(home.features).as_posix()

    def cached(self, home: Home) -> bool:
        return is_computed(home.features / self.key(home), pretrained_sha256(home, self.backbone.key(home)))

    def estimate(self, data: Outline, device: torch.device) -> float | None:
        images, backbone = self.views * data.images(self.pool), self.backbone.task.pretraining.backbone
        return images * feature_seconds(backbone, data.shape, device) if data.shape else None

    def run(self, work: Workspace) -> None:
        work.prepared(self.backbone.task, self.backbone.head, self.backbone.seed).features(self.pool, self.views)


@dataclass(frozen=True)
class _OfJob(Stage):
    """A stage of one job, with one setting of its options."""

    job: Job
    options: Mapping[str, Any]

    def prepared(self, work: Workspace) -> PreparedTask:
        return work.prepared(self.job.task, self.job.method.head, self.job.seed)

    def fresh(self, work: Workspace) -> Method:
        """The method with initial parameters, which depend on the method's name and the seed."""
        base = self.prepared(work).base.to(work.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("method", self.job.name, self.job.seed))
            return make_method(self.job.method, base, self.job.task.episode.ways, self.options).to(work.device)

    def validate(self, work: Workspace, method: Method) -> Evaluated:
        """On the validation episodes."""
        count = self.job.task.evaluation.validation_episodes
        with Reporter().stage("", count) as stage:
            return evaluate(method, self.job.name, self.prepared(work).loader("val"), count, stage)

    def dummy(self, data: Outline, device: torch.device) -> Method | None:
        """The method on random weights; None where the shape of the data is unknown."""
        size = (data.base_classes, data.shape, device)
        return random_method(self.job.method, self.options, self.job.task, *size) if data.shape else None


@dataclass(frozen=True)
class MetaTrain(_OfJob):
    """The method, meta-trained if it has anything to train."""

    @property
    def title(self) -> str:
        tuned = "".join(f", {key}={settings.short(self.options[key])}" for key in self.job.tuned)
        return f"meta-training {self.job.where}: {self.job.schedule.steps:,} steps{tuned}"

    def key(self, home: Home) -> str:
        """Different whenever the parameters could differ."""
        job = self.job
        training = {k: v for k, v in job.training.changes().items() if k != "select"}  # every state holds both models
        plan, backbone = msgspec.to_builtins(job.schedule), Pretrain(job.task, job.method.head, job.seed).key(home)
        made_of = [job.name, job.source, dict(self.options), training, plan, job.task.definition(), backbone]
        return f"{job.task.name}-{job.name}-seed{job.seed}-{sha256_json(made_of)[:12]}"

    def cached(self, home: Home) -> bool:
        backbone = Pretrain(self.job.task, self.job.method.head, self.job.seed).key(home)
        return is_finished(home.trained / self.key(home), pretraining_sha256=pretrained_sha256(home, backbone))

    def estimate(self, data: Outline, device: torch.device) -> float | None:
        job, method = self.job, self.dummy(data, device)
        return job.schedule.steps * step_seconds(job.task, method, job.training.episodes_per_step) if method else None

    def run(self, work: Workspace) -> Model:
        job, method, prepared = self.job, self.fresh(work), self.prepared(work)
        if not any(p.requires_grad for p in method.parameters()):
            return Model(method.eval())
        facts = {
            "method": job.chosen.file or job.name,
            "method_source": job.source,
            "options": dict(self.options),
            "train": job.training.changes(),
            "task": job.task.name,
            "pretraining": prepared.pretrained.key,
            "pretraining_sha256": prepared.pretrained.sha256,
            "seed": job.seed,
        }
        folder, how = work.home.trained / self.key(work.home), (job.schedule, job.training, job.seed)
        with locked(folder, work.reporter.say):
            loader, accuracy = (
                prepared.loader("train", job.training.views),
                lambda model: self.validate(work, model).accuracy,
            )
            trained = meta_train(folder, method, job.name, loader, accuracy, *how, facts, work.reporter)
        return Model(method, trained, folder.name)


@dataclass(frozen=True)
class Evaluate(_OfJob):
    """The result, after a choice among settings on the validation episodes; :mod:`ifsl_bench.running.stored` keeps it.

    Attributes:
        command: what the user typed, recorded with the result.
        model: the folder of a stored model to evaluate, in place of the job's own.
    """

    command: str = ""
    model: Path | None = None

    @property
    def title(self) -> str:
        job, tries = self.job, len(self.job.settings())
        more = "" if job.trains else " or more"
        choice = f", after choosing {', '.join(job.tuned)} among {tries}{more}" if tries > 1 else ""
        return f"evaluating {job.where}: {job.episodes:,} episodes{choice}"

    def key(self, home: Home) -> str:
        return f"{self.job.result_path(home).relative_to(home.results).as_posix()} of {self.job.source}"

    def cached(self, home: Home) -> bool:
        return False  # where a result is stored nobody asks for its stages

    def estimate(self, data: Outline, device: torch.device) -> float | None:
        job, method = self.job, self.dummy(data, device)
        tries = len(job.settings()) if job.tuned else 0
        episodes = job.episodes + tries * job.task.evaluation.validation_episodes
        return episodes * episode_seconds(job.task, method) if method else None

    def _best(self, work: Workspace) -> tuple[Model, Choice]:
        job, options = self.job, self.job.settings()
        if self.model is not None:
            return load_trained(self.model, self.fresh(work), job.name, job.training.select), Choice(options[0], {})
        choice = Choice(options[0], {})
        if len(options) > 1:
            following = partial(settings.beyond, job.method, job.options)
            attempt = lambda setting: self.validate(work, MetaTrain(job, setting).run(work).method)  # noqa: E731
            choice = choose(job.name, job.tuned, options, following, attempt, work.reporter)
        return MetaTrain(job, choice.options).run(work), choice

    def run(self, work: Workspace) -> Result:
        job, prepared = self.job, self.prepared(work)
        (method, trained, folder), choice = self._best(work)
        test, backbone = prepared.loader("test"), prepared.pretrained
        first = test.batch(0, FIRST)
        predict(method.eval(), job.name, first)
        check_answers(Asked(job.name, method, first.support, first.query, first.masked))
        start = time.perf_counter()
        with work.reporter.stage(f"evaluating {job.label} on {job.task.name}", job.episodes) as stage:
            found = evaluate(method, job.name, test, job.episodes, stage)
        seconds = time.perf_counter() - start
        if remark := found.unconverged("episodes"):
            work.reporter.warn(f"{job.label} on {job.task.name}: {remark}")
        for remark in trained.remarks() if trained else ():
            work.reporter.warn(f"{job.where}: {remark}")
        return Result(
            schema=SCHEMA,
            method=job.name,
            label=job.label,
            options=choice.options,
            tuned={", ".join(job.tuned): choice.accuracies} if choice.accuracies else {},
            train=job.training.changes(),
            task=job.task.name,
            task_hash=job.task.hash,
            digest=test.sampler.digest(job.episodes),
            fingerprint=prepared.dataset.fingerprint,
            seed=job.seed,
            episodes=counts_entry(found.counts, test.sampler.classes(job.episodes)),
            summary=summary_entry(summarise(found.counts.per_episode())),
            solver=found.described(),
            pretraining=backbone.entry(),
            training=trained.entry() if trained else {},
            cost={
                "parameters": sum(p.numel() for p in method.parameters()),
                "pretraining_seconds": round(backbone.info["seconds"], 3),
                "training_seconds": round(trained.seconds, 3) if trained else 0.0,
                "evaluation_seconds": round(seconds, 3),
                "episodes_per_second": round(job.episodes / seconds, 1),
            },
            provenance={
                **provenance(self.command, work.device, job.method.requires),
                "method_source": job.source,
                "checkpoint": folder,
            },
            partial=prepared.dataset.partial,
        )


def stages_of(job: Job, command: str = "") -> tuple[PrepareData, list[Stage], Evaluate]:
    """The stages of a job in their order: its data, what is made of them, and what gives the result."""
    task, backbone = job.task, Pretrain(job.task, job.method.head, job.seed)
    stages: list[Stage] = [backbone]
    if task.pretraining.backbone != NO_BACKBONE:
        pools = {("base/train", 1): None}
        for side in job.sides:
            pools |= {(pool, job.training.views if side == "train" else 1): None for pool in task.pools(side)}
        stages += [Features(backbone, pool, views) for pool, views in pools]
    if job.trains:
        stages += [MetaTrain(job, options) for options in job.settings()]
    return PrepareData(task, job.sides), stages, Evaluate(job, job.settings()[0], command)
