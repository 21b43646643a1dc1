"""The stages after pretraining: meta-train (or load), evaluate, and make the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ifsl_bench.board.result_file import SCHEMA, Result, counts_entry, summary_entry
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.episodic import evaluation
from ifsl_bench.episodic.meta_training import Trained, meta_train
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocol.metrics import estimate, summarise
from ifsl_bench.running.job import Job, short
from ifsl_bench.running.provenance import provenance
from ifsl_bench.running.workbench import Bench

MOST_UNCONVERGED = 0.001  # share of episodes above which a run says that solves did not converge


def run_job(job: Job, bench: Bench, command: str, checkpoint: Path | None = None) -> Result:
    """Trains (or loads), evaluates and returns the result; nothing is written to the results folder."""
    work = bench.work
    for side in job.sides if checkpoint is None else ():
        bench.sampler(side)  # episodes that cannot be drawn are an error before pretraining, not after
    bench.check_digest()
    if checkpoint is None:
        method, chosen, tuned, trained, folder = _best_model(job, bench)
    else:
        method, trained, folder = _load_model(job, bench, checkpoint)
        chosen, tuned = job.settings()[0], {}
    test = bench.loader("test")
    start = time.perf_counter()
    with work.reporter.stage(f"evaluating {job.label} on {job.task.name}", job.episodes) as stage:
        evaluated = evaluation.evaluate(method, job.name, test, job.episodes, stage)
    seconds = time.perf_counter() - start
    _say_unconverged(f"{job.label} on {job.task.name}", evaluated, "episodes", work.reporter)
    if trained is not None:
        _say_unsolved(job, trained.solves, work.reporter)
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
            "sha256": bench.pretrained.sha256,
            "accuracy": {k: round(100 * v, 4) for k, v in pretrained["accuracy"].items()},
            "precision": pretrained["precision"],
            "device": pretrained["device"],
        },
        training={}
        if trained is None
        else {"validation": {str(k): v for k, v in trained.history.items()}, "kept_step": trained.kept_step}
        | ({"solves": trained.solves} if trained.solves else {}),
        cost={
            "parameters": sum(p.numel() for p in method.parameters()),
            "pretraining_seconds": round(pretrained["seconds"], 3),
            "training_seconds": 0.0 if trained is None else round(trained.seconds, 3),
            "evaluation_seconds": round(seconds, 3),
            "episodes_per_second": round(job.episodes / seconds, 1),
        },
        provenance={
            **provenance(command, work.device, job.method.requires),
            "method_source": job.source,
            "checkpoint": folder,
        },
        partial=bench.dataset.partial,
    )


def _say_unconverged(who: str, evaluated: evaluation.Evaluated, episodes: str, reporter: Reporter) -> None:
    unconverged = evaluated.statistics.get("solver_unconverged")
    if unconverged is not None and unconverged.mean() > MOST_UNCONVERGED:
        reporter.warn(
            f"{who}: the inner solve of {int(unconverged.sum())} of {len(unconverged)} {episodes} did not converge"
        )


def _say_unsolved(job: Job, solves: Mapping[str, int], reporter: Reporter) -> None:
    """What went wrong in the solves of a meta-training more often than in ``MOST_UNCONVERGED`` of its episodes."""
    kinds = {
        "unconverged": ("episodes", "inner solve did not converge"),
        "adjoint_diverged": ("adjoint_episodes", "Neumann series grew: a shorter rate may help"),
        "adjoint_failed": ("adjoint_episodes", "linear solve for the gradient missed its tolerance"),
    }
    for key, (total, what) in kinds.items():
        if (count := solves.get(key, 0)) > MOST_UNCONVERGED * solves.get(total, 0):
            reporter.warn(
                f"{job.label} on {job.task.name}, seed {job.seed}: in {count} of {solves[total]} episodes of "
                f"meta-training the {what}"
            )


def _describe(values: np.ndarray) -> dict[str, float]:
    """Mean, maximum and sum over the episodes where a statistic is finite, and in how many it is not."""
    finite = values[np.isfinite(values)].astype(np.float64)
    return {
        "mean": float(finite.mean()) if len(finite) else 0.0,
        "max": float(finite.max()) if len(finite) else 0.0,
        "total": float(finite.sum()),
        "episodes": len(values),
        "not_finite": len(values) - len(finite),
    }


def _best_model(
    job: Job, bench: Bench
) -> tuple[Method, dict[str, Any], dict[str, dict[str, float]], Trained | None, str]:
    """The method, trained; where it declares ``tune``, with the values that are best on the validation episodes.

    A best value at the end of a grid is no optimum: the search goes on beyond it, see :meth:`Job.beyond`.
    """
    settings = job.settings()
    if len(settings) == 1:
        method, trained, folder = _model(job, bench, settings[0])
        return method, settings[0], {}, trained, folder
    values: dict[str, float] = {}

    def attempt(options: dict[str, Any]) -> float:
        setting = ", ".join(f"{k}={short(options[k])}" for k in job.tuned)
        evaluated = _validate(job.name, bench, _model(job, bench, options)[0])
        _say_unconverged(f"{job.name}: {setting}", evaluated, "validation episodes", bench.work.reporter)
        accuracy = _accuracy(evaluated)
        values[setting] = accuracy
        bench.work.reporter.say(f"{job.name}: {setting}: {accuracy:.2f}% on the validation episodes")
        return accuracy

    tried = [(attempt(options), options) for options in settings]
    best = max(tried, key=lambda pair: pair[0])  # the first of equals
    if (following := job.beyond(best[1])) is not None:
        best = _further(attempt, best, following, bench.work.reporter)
    method, trained, folder = _model(job, bench, best[1])
    return method, best[1], {", ".join(job.tuned): values}, trained, folder


def _further(
    attempt: Callable[[dict[str, Any]], float],
    best: tuple[float, dict[str, Any]],
    following: Iterator[dict[str, Any]],
    reporter: Reporter,
) -> tuple[float, dict[str, Any]]:
    """Follows a best value at the end of its grid for as long as accuracy rises."""
    for options in following:
        try:
            accuracy = attempt(options)
        except UserError as error:  # the option's range ends here
            reporter.say(str(error))
            break
        if accuracy <= best[0]:
            break
        best = accuracy, options
    return best


def _validate(name: str, bench: Bench, method: Method) -> evaluation.Evaluated:
    count = bench.task.evaluation.validation_episodes
    with Reporter().stage("", count) as stage:
        return evaluation.evaluate(method, name, bench.loader("val"), count, stage)


def _accuracy(evaluated: evaluation.Evaluated) -> float:
    """In percent."""
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
    folder = job.trained_folder(bench.work.home, bench.pretrained.key, options)
    facts = {
        "method": job.name,
        "method_source": job.source,
        "options": dict(options),
        "train": job.training.changes(),
        "task": job.task.name,
        "pretraining": bench.pretrained.key,
        "pretraining_sha256": bench.pretrained.sha256,
        "seed": job.seed,
    }
    with locked(folder, bench.work.reporter.say):
        trained = meta_train(
            folder,
            method,
            job.name,
            bench.loader("train"),
            lambda m: _accuracy(_validate(job.name, bench, m)),
            job.plan,
            job.training,
            job.seed,
            facts,
            bench.work.reporter,
        )
    return method, trained, folder.name


def _load_model(job: Job, bench: Bench, checkpoint: Path) -> tuple[Method, Trained, str]:
    """A stored model, its parameters put into a fresh method; :func:`check_model` has seen it before."""
    state = CheckpointFolder(checkpoint).load()
    if state is None:
        raise UserError(f"{checkpoint} is no meta-trained model: it has no checkpoint.json")
    info = state.info
    method = _fresh(job, bench, job.settings()[0])
    which = job.training.select
    with torch.no_grad():
        for key, value in method.named_parameters():
            stored = state.tensors.get(f"{which}.{key}")
            if stored is None or stored.shape != value.shape:
                raise CorruptFile(f"{checkpoint} does not fit method {job.name!r}: parameter {key} is missing")
            value.copy_(stored)
    history = {int(k): v for k, v in info["history"].items()}
    kept = info["best"] if which == "best" else info["step"]
    return method.eval(), Trained(history, kept, info["seconds"], info.get("solves", {})), checkpoint.name
