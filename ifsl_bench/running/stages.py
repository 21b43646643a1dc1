"""The stages of a job, behind those of :mod:`ifsl_bench.running.preparation`: meta-training, trials, evaluation.

:func:`stages_of` lists all of them. Runs, resumed runs and dry runs walk that one list.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import torch

from ifsl_bench.backbone.placement import HOST, Place
from ifsl_bench.board.result_file import SCHEMA, Calibration, Result, calibration_entry, counts_entry, summary_entry
from ifsl_bench.common.checkpoint import finished, is_finished
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.common.locks import locked
from ifsl_bench.common.processor import share, threads
from ifsl_bench.common.progress import Mute, Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.preparing.outline import Outline
from ifsl_bench.episodic.choosing import Tried, best_of, read_trial, write_trial
from ifsl_bench.episodic.evaluation import Evaluated, evaluate, predict
from ifsl_bench.episodic.meta_training import Diverged, meta_train, training_threads
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.episodic.rough_times import episode_seconds, sizes_of, step_seconds
from ifsl_bench.episodic.trained import Model, folders, holds, load_trained
from ifsl_bench.plugin import settings
from ifsl_bench.plugin.contract import Asked, check_answers, check_repeated
from ifsl_bench.plugin.method import Base, Method, NonFinite
from ifsl_bench.plugin.options import make_method
from ifsl_bench.plugin.probe_cache import everything
from ifsl_bench.plugin.space import RATE
from ifsl_bench.protocol.metrics import Counts, summarise
from ifsl_bench.protocol.task import NO_BACKBONE, Side
from ifsl_bench.running.job import TUNING_SEED, Job
from ifsl_bench.running.preparation import CheckEpisodes, Features, PrepareData, Pretrain, Stage
from ifsl_bench.running.provenance import provenance

WIDE = 512  # features of an image at most, of the networks that come with the package
FIRST = 8  # test episodes that the contract is checked on in every run


@dataclass(frozen=True)
class _OfJob(Stage):
    """A stage of one job."""

    job: Job

    @property
    def backbone(self) -> Pretrain:
        return Pretrain(self.job.task, self.job.method.head, self.job.seed)

    def key(self, home: Home) -> str:
        """Different whenever the parameters could differ though `Job.other_method` sees nothing."""
        job = self.job
        training = {k: v for k, v in job.training.changes().items() if k != "select"}  # every state holds both models
        plan, backbone = msgspec.to_builtins(job.schedule), self.backbone.key(home)
        made_of = [job.name, job.method.revision, job.options, training, plan, job.task.definition(), backbone]
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

    def memory(self, data: Outline) -> int:
        """Features and base logits of all pools, in single precision."""
        width = math.prod(data.shape) if self.job.task.pretraining.backbone == NO_BACKBONE else WIDE
        return 4 * (width + data.base_classes) * sum(data.images(pool) for pool in data.starts)

    def training(self, work: Workspace) -> Place:
        """Where the method is meta-trained."""
        return work.place("meta-training", self.job.training.episodes_per_step)

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

    def training_seconds(self, data: Outline, work: Workspace) -> float | None:
        """About how long meta-training takes, with its validations."""
        job, task = self.job, self.job.task
        if not job.trains:
            return 0.0
        step, (_, episodes) = self.step_seconds(data, work), task.evaluation.halves
        often = job.schedule.steps // job.schedule.validate_every
        checks = self.evaluation_seconds(often * len(episodes), data, work)
        return None if step is None or checks is None else job.schedule.steps * step + checks


@dataclass(frozen=True)
class MetaTrain(_OfJob):
    """The method, meta-trained if it has anything to train."""

    kind = "meta-training"

    def __str__(self) -> str:
        return f"meta-training {self.job}: {self.job.schedule.steps:,} steps"

    def needs(self) -> Sequence[Stage]:
        return _prepared(self.job, ("train", "val"))

    def is_ours(self, home: Home, folder: Path) -> bool:
        """Whether a folder is free, or what is in it was trained by what computes the same as the job's method."""
        return holds(folder, lambda info: not self.job.other_method(home, info))

    def folder(self, home: Home) -> Path:
        """Where the model is, or will be."""
        return next(folder for folder in folders(home.trained / self.key(home)) if self.is_ours(home, folder))

    def cached(self, home: Home) -> bool:
        return is_finished(self.folder(home), pretraining_sha256=self.backbone.weights(home))

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
        return evaluate(method, self.job.name, loader, episodes).accuracy

    def run(self, work: Workspace) -> Model:
        job, place, prepared = self.job, self.place(work), self.backbone.prepared(work)
        method = self.fresh(work, place.device)
        if not any(p.requires_grad for p in method.parameters()):
            return Model(method.eval())
        facts = {
            "method": job.chosen.file or job.name,
            **self.job.identity(work.home),
            "distribution": job.chosen.distribution,
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
                if self.is_ours(work.home, folder):  # asked under the lock: another process may have made it
                    if not done:
                        say_place(work, self, place)
                    how = job.schedule, job.training, job.seed, facts, work.reporter
                    check = partial(self.validate, work)
                    return Model(method, meta_train(folder, method, job.name, loader, check, *how), folder.name)
        raise AssertionError("there is no end of folders")


@dataclass(frozen=True)
class Trial(_OfJob):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    kind = "trial"

    def __str__(self) -> str:
        steps = f"{self.job.schedule.steps:,} steps, " if self.job.trains else ""
        return f"trial of {self.job}: {steps}{len(self.job.task.evaluation.halves[0]):,} validation episodes"

    def needs(self) -> Sequence[Stage]:
        return _prepared(self.job, ("train", "val") if self.job.trains else ("val",))

    def file(self, home: Home) -> Path:
        return home.cache / "trials" / f"{self.key(home)}-{self.job.training.select}.json"

    def cached(self, home: Home) -> bool:
        return self.kept(home, self.backbone.weights(home)) is not None

    def kept(self, home: Home, weights: str | None, reporter: Reporter | None = None) -> Tried | None:
        """The trial of the same method on the same backbone, if there is one."""
        return read_trial(self.file(home), weights, lambda made_by: self.is_mine(home, made_by), reporter)

    def identity(self, home: Home) -> dict[str, Any]:
        """What tells the method from others: what it computes; all its code, where a trial is as fast as a probe."""
        return self.job.identity(home) if self.job.trains else {"code": everything(self.job.method)}

    def is_mine(self, home: Home, made_by: Mapping[str, Any]) -> bool:
        return not self.job.other_method(home, made_by) if self.job.trains else made_by == self.identity(home)

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
                found = evaluate(method, job.name, loader, episodes, work.reporter, str(self))
                tried = Tried(found.accuracy, len(episodes), found.unconverged)
            except (Diverged, NonFinite) as error:
                tried = Tried(0.0, len(episodes), diverged=str(error))
            write_trial(file, tried, prepared.pretrained.sha256, str(job), self.identity(work.home))
            work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation episodes")
        return tried


@dataclass(frozen=True)
class TrainChosen(_OfJob):
    """The best of a job's candidates, meta-trained with a seed that is not the trials'."""

    kind = "meta-training"

    def __str__(self) -> str:
        return f"meta-training the choice for {self.job}: {self.job.schedule.steps:,} steps"

    def key(self, home: Home) -> str:
        return f"{super().key(home)}-{self.job.setting}-{self.job.training.select}"

    def needs(self) -> Sequence[Stage]:
        return [*_prepared(self.job, ("train", "val")), *(Trial(one) for _, one in self.job.candidates())]

    def cached(self, home: Home) -> bool:
        return False  # what is chosen is known where all trials are

    def place(self, work: Workspace) -> Place:
        return self.training(work)

    def threads(self) -> int:
        return training_threads(self.job.training.episodes_per_step) if self.job.trains else 1

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        return MetaTrain(self.job).estimate(data, work)

    def run(self, work: Workspace) -> Model:
        best, _ = Evaluate(self.job).chosen(work, Mute())
        return MetaTrain(best).run(work)


@dataclass(frozen=True)
class Evaluate(_OfJob):
    """The result, of the best of its candidates; :mod:`ifsl_bench.running.stored` keeps it.

    Attributes:
        command: what the user typed, recorded with the result.
        model: the folder of a stored model to evaluate, in place of the job's own.
    """

    kind = "evaluation"
    command: str = ""
    model: Path | None = None

    def __str__(self) -> str:
        return f"evaluating {self.job}: {self.job.episodes:,} episodes"

    def needs(self) -> Sequence[Stage]:
        job = self.job
        # Every row has calibrated numbers beside its own; validation episodes that cannot be drawn are no hindrance.
        more: list[Stage] = list(_features(job, job.sides if job.task.regular else (*job.sides, "val")))
        if job.searched and self.model is None:
            if job.trials and job.seed != TUNING_SEED and job.trains:  # which waits for the trials
                more += [TrainChosen(replace(job, calibrated=False, episodes=job.task.evaluation.episodes))]
            else:
                more += [Trial(one) for _, one in job.candidates()]
        elif job.trains and self.model is None:
            more += [MetaTrain(replace(job, calibrated=False))]
        return [*(CheckEpisodes(job.task, side) for side in job.sides), *more]

    def cached(self, home: Home) -> bool:
        return False  # where a result is stored nobody asks for its stages

    def place(self, work: Workspace) -> Place:
        return self.evaluation(work)

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        more = 0 if self.job.task.regular else len(self.job.task.evaluation.halves[0])  # for calibration
        return self.evaluation_seconds(self.job.episodes + more, data, work)

    def chosen(self, work: Workspace, reporter: Reporter | None = None) -> tuple[Job, dict[str, Any]]:
        """The best of the job's candidates, with this job's seed, and what a result says of the choice.

        Args:
            reporter: who hears of the choice, in place of the workspace's.
        """
        reporter = reporter or work.reporter
        if not self.job.searched or self.model is not None:
            return self.job, {"options": self.job.options, "tuned": {}}
        candidates = {settings.spelled(point): (point, one) for point, one in self.job.candidates()}
        tried = {spelled: Trial(one).run(work) for spelled, (_, one) in candidates.items()}
        name = best_of(str(self.job), tried, reporter)
        reporter.say(f"{self.job}: {name} is the best of {len(tried)}, {tried[name].accuracy:.2f}% on validation")
        point, best = candidates[name]
        return replace(best, seed=self.job.seed), {
            "options": {**best.options, **{key: value for key, value in point.items() if key != RATE}},
            "tuned": {", ".join(point): {spelled: trial.accuracy for spelled, trial in tried.items()}},
            "passed_over": [spelled for spelled, trial in tried.items() if trial.failed],
            "edge": settings.at_edge(self.job.method, point, self.job.trials),
        }

    def run(self, work: Workspace) -> Result:
        job, choice = self.chosen(work)
        stage, prepared, place = MetaTrain(job), self.backbone.prepared(work), self.evaluation(work)
        if self.model is None:
            method, trained, folder = stage.run(work)
        else:
            method, trained, folder = load_trained(self.model, stage.fresh(work), job.name, job.training.select)
        method = self.to_evaluate(work, method)
        say_place(work, self, place)
        test, backbone = prepared.loader("test", device=place.device), prepared.pretrained
        first = test.batch(0, FIRST)
        predict(method.eval(), job.name, first)
        asked = Asked(job.name, method, first.support, first.query, first.masked)
        answers = check_answers(asked)
        start = time.perf_counter()
        found = evaluate(method, job.name, test, range(job.episodes), work.reporter, f"evaluating {self.job}")
        seconds = time.perf_counter() - start
        check_repeated(asked, answers)  # all that lies between must have left no trace
        counts, calibration = self.calibrated(work, method, found)
        for remark in (*found.remarks(), *(trained.remarks() if trained else ())):
            work.reporter.warn(f"{self.job}: {remark}")
        return Result(
            schema=SCHEMA,
            method=job.name,
            label=self.job.label,
            **choice,
            setting=self.job.setting,
            train=job.training.changes(),
            task=job.task.name,
            task_hash=job.task.hash,
            digest=test.sampler.digest(job.episodes),
            fingerprint=prepared.dataset.fingerprint,
            seed=job.seed,
            episodes=counts_entry(counts, test.sampler.classes(job.episodes)),
            summary=summary_entry(summarise(counts.per_episode())),
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
                **provenance(self.command, place.device, job.method.requires),
                "method_source": job.source,
                "distribution": job.chosen.distribution,
                "checkpoint": folder,
            },
            partial=prepared.dataset.partial,
            calibration=calibration,
            transductive=job.method.transductive,
            probe=self.job.probe(work.home),
            places={
                "pretraining": backbone.info["device"],
                **prepared.features_places(),
                **({"meta-training": trained.place} if trained and trained.place else {}),
                "evaluation": str(place),
            },
        )

    def calibrated(self, work: Workspace, method: Method, found: Evaluated) -> tuple[Counts, Calibration | None]:
        """The counts with those of the bias that is best on the validation episodes that options are chosen on.

        Without them in regular few-shot learning, and with a warning where the data have too few validation classes.
        """
        job, prepared = self.job, self.backbone.prepared(work)
        if found.margins is None:
            return found.counts, None
        try:
            prepared.sampler("val")
        except UserError as error:
            work.reporter.warn(f"{job}: no calibrated Acc., since validation episodes cannot be drawn: {error}")
            return found.counts, None
        loader, episodes = prepared.loader("val", device=self.evaluation(work).device), job.task.evaluation.halves[0]
        validation = evaluate(method, job.name, loader, episodes, work.reporter, f"calibrating {job}")
        counts, bias = found.calibrated(validation, job.calibrated)
        return counts, calibration_entry(bias, job.calibrated)


def both(first: Place, second: Place) -> Place:
    """Of work in two parts."""
    return first if first == second else Place(second.device, f"{second.why}, after meta-training on {first}")


def say_place(work: Workspace, stage: Stage, place: Place) -> None:
    """Says where a stage runs, where there is a choice."""
    if work.device != HOST:
        work.reporter.say(f"{stage}, on {place}")


def _features(job: Job, sides: Iterable[Side]) -> list[Stage]:
    """The backbone of a job, and the features under it that the episodes of these sides need."""
    backbone, pools = Pretrain(job.task, job.method.head, job.seed), {("base/train", 1): None}
    if job.task.pretraining.backbone == NO_BACKBONE:
        return [backbone]
    for side in sides:
        pools |= {(pool, job.training.views if side == "train" else 1): None for pool in job.task.pools(side)}
    return [backbone, *(Features(backbone, pool, views) for pool, views in pools)]


def _prepared(job: Job, sides: Sequence[Side]) -> list[Stage]:
    """What work on the episodes of these sides begins with."""
    return [*(CheckEpisodes(job.task, side) for side in sides), *_features(job, sides)]


def stages_of(job: Job, command: str = "") -> list[Stage]:
    """The stages of a job, each after those it waits for: its data first, what gives the result last.

    The checks of its episodes are part of the first.
    """
    found: list[Stage] = [PrepareData(job.task, job.sides)]

    def add(stage: Stage) -> None:
        for needed in stage.needs():
            # Candidates are different by construction, and may be thousands: they are not compared.
            if not isinstance(needed, (PrepareData, CheckEpisodes)) and (
                isinstance(needed, Trial) or needed not in found
            ):
                add(needed)
        found.append(stage)

    add(Evaluate(job, command))
    return found
