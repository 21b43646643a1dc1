"""Rough times of meta-training and of evaluation, measured here on random features; each distinct thing once a process.

Nothing is compiled for an estimate, but inside :func:`compiling`. What is not compiled yet has none: torch would take
many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ifsl_bench.backbone.features import FeaturePool
from ifsl_bench.backbone.rough_times import features_of
from ifsl_bench.common.timing import seconds_of
from ifsl_bench.episodic.evaluation import evaluate, predict
from ifsl_bench.episodic.loader import EpisodeLoader
from ifsl_bench.episodic.meta_training import BLOCK
from ifsl_bench.kernels import store
from ifsl_bench.plugin.method import Base, Method, masked_logits
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocol.episodes import Sampler
from ifsl_bench.protocol.task import EpisodeSpec, Task

CLASSES = 20  # novel ones to draw from
STEPS = 16  # of meta-training that are timed at once
AT_ONCE = 250  # episodes of an evaluation that is timed, which a real one takes at once too
SPREAD = 0.5  # of the images of a class around its mean, in deviations of the features


_uncompiled: set[Any] = set()
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@dataclass(frozen=True)
class Sizes:
    """All that the time of an episode depends on, beside the method: made by :func:`sizes_of`.

    Attributes:
        shape: of an episode.
        classes: base classes.
        features: of an image.
        threads: that share the work.
    """

    shape: EpisodeSpec
    shots: int
    classes: int
    features: int
    device: torch.device
    threads: int


def sizes_of(task: Task, classes: int, shape: tuple[int, ...], device: torch.device) -> Sizes:
    """Of a task's episodes; ``shape`` is that of an image [H, W, C], or of features [D]."""
    features = features_of(task.pretraining.backbone, shape)
    return Sizes(task.episode, task.shots, classes, features, device, torch.get_num_threads())


def step_seconds(kind: type[Method], options: Mapping[str, Any], sizes: Sizes, episodes: int) -> float | None:
    """Of one step of meta-training on so many episodes; None where it is not compiled yet."""
    return _compiled(_step_seconds, kind, _timed(kind, options), sizes, episodes)


def episode_seconds(kind: type[Method], options: Mapping[str, Any], sizes: Sizes) -> float | None:
    """Of evaluating one episode; None where it is not compiled yet."""
    return _compiled(_episode_seconds, kind, _timed(kind, options), sizes)


def _timed(kind: type[Method], options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options that an estimate is made with: those that are searched take as long as their default does."""
    return tuple(sorted((key, value) for key, value in options.items() if key not in kind.space))


@lru_cache
def _step_seconds(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes, episodes: int) -> float:
    method, loader = _random_method(kind, options, sizes).train(), _loader(sizes)
    optimiser = torch.optim.Adam([p for p in method.parameters() if p.requires_grad], 1e-3)
    steps = max(1, min(STEPS, BLOCK // episodes))

    def some() -> None:
        block = loader.batch(0, steps * episodes)
        for step in range(steps):
            batch = block.part(step * episodes, (step + 1) * episodes)
            logits = masked_logits(predict(method, kind.__name__, batch), batch.masked)
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
            optimiser.step()

    return seconds_of(some, sizes.device) / steps


@lru_cache
def _episode_seconds(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes) -> float:
    method, loader = _random_method(kind, options, sizes), _loader(sizes)
    return seconds_of(lambda: evaluate(method, kind.__name__, loader, range(AT_ONCE)), sizes.device) / AT_ONCE


def _random_method(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes) -> Method:
    """A method beside a random base classifier."""
    weight = torch.randn(sizes.classes, sizes.features) / sizes.features**0.5
    prototypes, counts = torch.randn(sizes.classes, sizes.features).relu(), torch.full((sizes.classes,), 100.0)
    base = Base(weight, torch.zeros(sizes.classes), prototypes, counts=counts, covariance=torch.eye(sizes.features))
    return make_method(kind, base.to(sizes.device), sizes.shape.ways, dict(options)).to(sizes.device)


def _loader(sizes: Sizes) -> EpisodeLoader:
    """Of random features: of no sign, as a network gives them, and alike within a class."""
    shape = sizes.shape
    ways, each = max(CLASSES, shape.ways), sizes.shots + shape.novel_queries
    queries = -(-shape.base_queries // sizes.classes)
    novel, base = (
        _pool(name, *size, sizes) for name, size in (("novel", (ways, each)), ("base", (sizes.classes, queries)))
    )
    sampler = Sampler(("a rough time",), shape, sizes.shots, novel.starts, base.starts, device=sizes.device)
    return EpisodeLoader(sampler, novel, base if shape.base_queries else None)


def _pool(name: str, classes: int, each: int, sizes: Sizes) -> FeaturePool:
    device = sizes.device
    means = torch.randn(classes, 1, sizes.features, device=device)
    features = (means + SPREAD * torch.randn(classes, each, sizes.features, device=device)).relu().flatten(0, 1)
    logits = features @ torch.randn(sizes.features, sizes.classes, device=device) / sizes.features**0.5
    return FeaturePool(name, features, logits, np.arange(classes + 1) * each, 1)


def _compiled(call: Callable[..., float], *arguments: Any) -> float | None:
    asked = (call, arguments)
    if asked in _uncompiled:
        return None
    try:
        with nullcontext() if _compiling.get() else store.nothing_compiled():
            return call(*arguments)
    except store.NotCompiledError:
        _uncompiled.add(asked)
        return None


def forget_uncompiled() -> None:
    """What was not compiled may be now."""
    _uncompiled.clear()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, what an estimate needs is compiled first."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)
