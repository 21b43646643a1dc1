"""From a method's name and a task's name to a stored result: the stages in order, each taken from the cache or made."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ifsl_bench import evaluation, registry
from ifsl_bench._version import __version__
from ifsl_bench.checkpoint import CheckpointFolder
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.prepare import ensure
from ifsl_bench.device import choose_device
from ifsl_bench.episodes import Sampler
from ifsl_bench.errors import CorruptFile, UserError
from ifsl_bench.features import FeaturePool, base_classifier, compute_features, feature_pool
from ifsl_bench.loader import EpisodeLoader
from ifsl_bench.method import Base, Method, options_of, resolve_options
from ifsl_bench.metrics import estimate, summarise
from ifsl_bench.pretrain import Pretrained, pretrain
from ifsl_bench.provenance import provenance
from ifsl_bench.reporter import Reporter
from ifsl_bench.result import SCHEMA, Result, counts_entry, file_name, summary_entry
from ifsl_bench.seeds import seed_of
from ifsl_bench.store import Home, locked, read_json, sha256_json, write_json
from ifsl_bench.task import Side, Task, find
from ifsl_bench.training import Trained, Training, meta_train


@dataclass(frozen=True)
class Workspace:
    """Where things are kept, where they are computed, and who hears of it."""

    home: Home = field(default_factory=Home.locate)
    device: torch.device = field(default_factory=lambda: choose_device("auto"))
    reporter: Reporter = field(default_factory=Reporter)


@dataclass(frozen=True)
class Job:
    """One result to be made.

    Attributes:
        name: the method's registered name.
        options: as given, checked and converted.
        seed: of pretraining and meta-training.
        episodes: the first so many test episodes of the task.
    """

    name: str
    method: type[Method]
    options: Mapping[str, Any]
    task: Task
    training: Training
    seed: int
    episodes: int

    @property
    def label(self) -> str:
        """The method's name with everything that is not the default."""
        declared = options_of(self.method)
        parts = [f"{k}={_short(v)}" for k, v in self.options.items() if v != declared[k].default]
        parts += [f"{k}={_short(v)}" for k, v in self.training.changes().items()]
        if self.episodes != self.task.evaluation.episodes:
            parts.append(f"episodes={self.episodes}")
        return ".".join([self.name, *parts])

    def result_path(self, home: Home) -> Path:
        return home.results / self.task.name / file_name(self.label, self.seed)

    @property
    def source(self) -> str:
        """Identity of the method's code: its own module and those of its base classes."""
        sha = hashlib.sha256(__version__.encode())
        for kind in self.method.__mro__:
            module = sys.modules.get(kind.__module__)
            path = getattr(module, "__file__", None)
            if issubclass(kind, Method) and kind is not Method and path:
                sha.update(Path(path).read_bytes())
        return sha.hexdigest()[:16]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def make_jobs(
    methods: Sequence[str],
    tasks: Sequence[str],
    options: Mapping[str, Any],
    training: Training,
    seeds: Sequence[int],
    episodes: int | None,
) -> list[Job]:
    """The jobs of a command, by task, then seed, then method; every name and option is checked before any work.

    Raises:
        UserError: an unknown name, an impossible option or number of episodes.
    """
    if not methods or not tasks:
        raise UserError("name at least one method and one task")
    chosen = [(name, registry.method(name)) for name in dict.fromkeys(methods)]
    resolved = {name: resolve_options(method, name, options) for name, method in chosen}
    jobs = []
    for task in dict.fromkeys(itertools.chain.from_iterable(find(name) for name in tasks)):
        count = task.evaluation.episodes if episodes is None else episodes
        if not 2 <= count <= task.evaluation.episodes:
            raise UserError(f"--episodes must be 2 to {task.evaluation.episodes} for task {task.name}, not {count}")
        jobs += [
            Job(name, method, resolved[name], task, training, seed, count) for seed in seeds for name, method in chosen
        ]
    return jobs


class Bench:
    """A task with one pretraining: features, episodes and the base classifier, each made when first needed."""

    def __init__(self, task: Task, head: str, seed: int, views: int, work: Workspace) -> None:
        self.task, self.head, self.seed, self.views, self.work = task, head, seed, views, work
        self._pools: dict[tuple[str, int], FeaturePool] = {}

    @cached_property
    def dataset(self) -> Dataset:
        return ensure(self.work.home, self.task.dataset, self.work.reporter)

    @cached_property
    def pretrained(self) -> Pretrained:
        home, reporter = self.work.home, self.work.reporter
        return pretrain(home, self.task, self.dataset, self.head, self.seed, self.work.device, reporter)  # type: ignore[arg-type]

    def _features(self, pool: str, views: int = 1) -> np.ndarray:
        work = self.work
        return compute_features(
            work.home, self.task, self.dataset, self.pretrained, pool, work.device, work.reporter, views
        )

    @cached_property
    def base(self) -> Base:
        """The base classifier, on the CPU."""
        return base_classifier(self.pretrained, self._features("base/train"), self.dataset.pool("base/train"))

    def pool(self, name: str, views: int = 1) -> FeaturePool:
        if (name, views) not in self._pools:
            features = self._features(name, views)
            self._pools[name, views] = feature_pool(features, self.dataset.pool(name), self.base, self.work.device)
        return self._pools[name, views]

    def sampler(self, side: Side) -> Sampler:
        """The episodes of a side: training episodes follow the training seed, the others are the task's own."""
        task = self.task
        stream_seed = self.seed if side == "train" else task.evaluation.seed
        return Sampler(
            (task.name, side, stream_seed),
            task.episode,
            task.shots,
            novel=self.dataset.pool(task.pool(side, "novel")).starts,
            base=self.dataset.pool(task.pool(side, "base")).starts,
            hide=side == "train" and task.protocol == "shared",
            parity=task.base_parity(side),
            device=self.work.device,
        )

    def loader(self, side: Side) -> EpisodeLoader:
        views = self.views if side == "train" else 1
        novel, base = self.task.pool(side, "novel"), self.task.pool(side, "base")
        return EpisodeLoader(self.sampler(side), self.pool(novel, views), self.pool(base, views))

    def check_digest(self) -> None:
        """Holds the test episodes against the pinned or first recorded digest.

        Raises:
            UserError: they differ, so that results would not be comparable.
        """
        task, count = self.task, self.task.evaluation.episodes
        digest = self.sampler("test").digest(count)
        record = self.work.home.cache / "digests" / f"{task.name}-{task.hash}-{self.dataset.fingerprint[:12]}.json"
        expected = task.digest
        if expected is None and record.exists():
            expected = read_json(record).get("digest")
        if expected is None:
            write_json(record, {"task": task.name, "task_hash": task.hash, "episodes": count, "digest": digest})
        elif expected != digest:
            where = "its task file" if task.digest else record
            raise UserError(
                f"the test episodes of {task.name} have digest {digest[:16]}, {where} says {expected[:16]}: they are "
                f"not the episodes that stored results were measured on"
            )


def run_job(job: Job, bench: Bench, command: str, checkpoint: Path | None = None) -> Result:
    """Trains (or loads), evaluates and returns the result; nothing is written to the results folder."""
    work = bench.work
    bench.check_digest()
    if checkpoint is None:
        method, chosen, tuned, trained, folder = _best_model(job, bench)
    else:
        method, trained, folder = _load_model(job, bench, checkpoint)
        chosen, tuned = dict(job.options), {}
    test = bench.loader("test")
    start = time.perf_counter()
    with work.reporter.stage(f"evaluating {job.label} on {job.task.name}", job.episodes) as stage:
        evaluated = evaluation.evaluate(method, job.name, test, job.episodes, stage)
    seconds = time.perf_counter() - start
    pretrained = bench.pretrained.info
    return Result(
        schema=SCHEMA,
        method=job.name,
        label=job.label,
        options=chosen,
        tuned=tuned,
        train=job.training.changes(),
        task=job.task.name,
        task_hash=job.task.hash,
        digest=test.sampler.digest(job.episodes),
        fingerprint=bench.dataset.fingerprint,
        seed=job.seed,
        episodes=counts_entry(evaluated.counts),
        summary=summary_entry(summarise(evaluated.counts.per_episode())),
        solver={key: _describe(value) for key, value in evaluated.statistics.items()},
        pretraining={
            "key": bench.pretrained.key,
            "sha256": pretrained.get("tensors", {}).get("sha256", ""),
            "accuracy": {k: round(100 * v, 4) for k, v in pretrained["accuracy"].items()},
            "precision": pretrained["precision"],
            "device": pretrained["device"],
        },
        training={}
        if trained is None
        else {"validation": {str(k): v for k, v in trained.history.items()}, "kept_step": trained.kept_step},
        cost={
            "parameters": sum(p.numel() for p in method.parameters()),
            "pretraining_seconds": round(pretrained["seconds"], 3),
            "training_seconds": 0.0 if trained is None else round(trained.seconds, 3),
            "evaluation_seconds": round(seconds, 3),
            "episodes_per_second": round(job.episodes / seconds, 1),
        },
        provenance={**provenance(command, work.device), "method_source": job.source, "checkpoint": folder},
    )


def _describe(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(np.mean(values)),
        "max": float(np.max(values)),
        "total": float(np.sum(values)),
        "episodes": len(values),
    }


def _best_model(
    job: Job, bench: Bench
) -> tuple[Method, dict[str, Any], dict[str, dict[str, float]], Trained | None, str]:
    """The method, trained; where it declares ``tune``, with the values that are best on the validation episodes."""
    free = {key: grid for key, grid in job.method.tune.items() if key not in job.options}
    if not free:
        method, trained, folder = _model(job, bench, job.options)
        return method, dict(job.options), {}, trained, folder
    tuned: dict[str, dict[str, float]] = {}
    best: tuple[float, dict[str, Any]] | None = None
    for values in itertools.product(*free.values()):
        options = {**job.options, **dict(zip(free, values, strict=True))}
        accuracy = _validate(job.name, bench, _model(job, bench, options)[0])
        setting = ", ".join(f"{k}={_short(options[k])}" for k in free)
        tuned.setdefault(", ".join(free), {})[setting] = accuracy
        bench.work.reporter.say(f"{job.name}: {setting}: {accuracy:.2f}% on the validation episodes")
        if best is None or accuracy > best[0]:
            best = accuracy, options
    assert best is not None
    method, trained, folder = _model(job, bench, best[1])
    return method, best[1], tuned, trained, folder


def _validate(name: str, bench: Bench, method: Method) -> float:
    """Accuracy in percent on the validation episodes."""
    count = bench.task.evaluation.validation_episodes
    with Reporter().stage("", count) as stage:
        evaluated = evaluation.evaluate(method, name, bench.loader("val"), count, stage)
    return estimate(evaluated.counts.per_episode()["acc"]).mean


def _fresh(job: Job, bench: Bench, options: Mapping[str, Any]) -> Method:
    """The method with initial parameters, which depend on the method's name and the seed."""
    base = bench.base.to(bench.work.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("method", job.name, job.seed))
        return job.method(base, job.task.episode.ways, **options).to(bench.work.device)


def _model(job: Job, bench: Bench, options: Mapping[str, Any]) -> tuple[Method, Trained | None, str]:
    """A method with these options, meta-trained if it has anything to train; and its folder under ``trained``."""
    method = _fresh(job, bench, options)
    if not any(p.requires_grad for p in method.parameters()):
        return method.eval(), None, ""
    plan = job.training.plan(job.method.schedule or job.task.meta_training)
    folder = trained_folder(job, bench.work, bench.pretrained.key, options)
    facts = {
        "method": job.name,
        "method_source": job.source,
        "options": dict(options),
        "train": job.training.changes(),
        "task": job.task.name,
        "pretraining": bench.pretrained.key,
        "pretraining_sha256": bench.pretrained.info["tensors"]["sha256"],
        "seed": job.seed,
    }
    with locked(folder, bench.work.reporter.say):
        trained = meta_train(
            folder,
            method,
            job.name,
            bench.loader("train"),
            lambda m: _validate(job.name, bench, m),
            plan,
            job.training,
            job.seed,
            facts,
            bench.work.reporter,
        )
    return method, trained, folder.name


def trained_folder(job: Job, work: Workspace, pretraining_key: str, options: Mapping[str, Any]) -> Path:
    """Where a meta-trained model is kept; the name changes with everything that changes its parameters."""
    training = {k: v for k, v in job.training.changes().items() if k != "select"}  # both models are in every state
    plan = msgspec.to_builtins(job.training.plan(job.method.schedule or job.task.meta_training))
    made_of = [job.name, job.source, dict(options), training, plan, job.task.definition(), pretraining_key, job.seed]
    return work.home.trained / f"{job.task.name}-{job.name}-seed{job.seed}-{sha256_json(made_of)[:12]}"


def _load_model(job: Job, bench: Bench, checkpoint: Path) -> tuple[Method, Trained, str]:
    state = CheckpointFolder(checkpoint).load()
    if state is None:
        raise UserError(f"{checkpoint} is no meta-trained model: it has no checkpoint.json")
    info = state.info
    if not info["finished"]:
        raise UserError(f"the meta-training in {checkpoint} stopped at step {info['step']}; run it to its end first")
    if info["pretraining_sha256"] != bench.pretrained.info["tensors"]["sha256"]:
        raise UserError(
            f"{checkpoint} was trained on the features of {info['pretraining']}, of which this cache has another copy "
            f"or none: evaluate it with the --home it was trained in, and on a task with the same data and pretraining"
        )
    method = _fresh(job, bench, job.options)
    which = job.training.select
    with torch.no_grad():
        for key, value in method.named_parameters():
            stored = state.tensors.get(f"{which if which == 'best' else 'last'}.{key}")
            if stored is None or stored.shape != value.shape:
                raise CorruptFile(
                    f"{checkpoint} does not fit method {job.name!r}: parameter {key} is missing or differs"
                )
            value.copy_(stored)
    history = {int(k): v for k, v in info["history"].items()}
    kept = info["best"] if which == "best" else info["step"]
    return method.eval(), Trained(history, kept, info["seconds"]), checkpoint.name
