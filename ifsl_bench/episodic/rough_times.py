"""Rough times of meta-training and of evaluation, measured here on random features; each distinct thing once a process.

Nothing is compiled for an estimate. What is not compiled yet has none: torch would take many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ifsl_bench.backbone.networks import make_backbone
from ifsl_bench.common.timing import seconds_of
from ifsl_bench.kernels import store
from ifsl_bench.plugin.method import Base, Method, Query, Support, ask
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocol.task import EpisodeSpec, Task

BACKWARD = 1.3  # drawing the episodes and the optimiser's step, beside forward and backward pass
AT_ONCE = 20  # episodes of an evaluation that is timed
SPREAD = 0.5  # of the images of a class around its mean, in deviations of the features


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
    features = make_backbone(task.pretraining.backbone, shape).features
    return Sizes(task.episode, task.shots, classes, features, device, torch.get_num_threads())


def step_seconds(kind: type[Method], options: Mapping[str, Any], sizes: Sizes, episodes: int) -> float | None:
    """Of one step of meta-training on so many episodes; None where it is not compiled yet."""
    return _compiled(lambda: _step_seconds(kind, _timed(kind, options), sizes, episodes))


def episode_seconds(kind: type[Method], options: Mapping[str, Any], sizes: Sizes) -> float | None:
    """Of evaluating one episode; None where it is not compiled yet."""
    return _compiled(lambda: _episode_seconds(kind, _timed(kind, options), sizes))


def _timed(kind: type[Method], options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options that an estimate is made with: those that are searched take as long as their default does."""
    return tuple(sorted((key, value) for key, value in options.items() if key not in kind.space))


@lru_cache
def _step_seconds(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes, episodes: int) -> float:
    method = _random_method(kind, options, sizes)
    support, query = _episodes(sizes, method, episodes)

    def step() -> None:
        method.train()
        method.zero_grad()
        ask(method, kind.__name__, support, query).logits.square().mean().backward()

    return BACKWARD * seconds_of(step, sizes.device, 20)


@lru_cache
@torch.no_grad()
def _episode_seconds(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes) -> float:
    method = _random_method(kind, options, sizes).eval()
    support, query = _episodes(sizes, method, AT_ONCE)
    return seconds_of(lambda: ask(method, kind.__name__, support, query), sizes.device) / AT_ONCE


def _random_method(kind: type[Method], options: tuple[tuple[str, Any], ...], sizes: Sizes) -> Method:
    """A method beside a random base classifier."""
    weight = torch.randn(sizes.classes, sizes.features) / sizes.features**0.5
    base = Base(weight, torch.zeros(sizes.classes), torch.randn(sizes.classes, sizes.features).relu())
    return make_method(kind, base.to(sizes.device), sizes.shape.ways, dict(options)).to(sizes.device)


def _episodes(sizes: Sizes, method: Method, episodes: int) -> tuple[Support, Query]:
    """Random features in the shapes of the task: of no sign, as a network gives them, and alike within a class."""
    weight, shape, device = method.base.weight, sizes.shape, sizes.device
    labels = torch.arange(shape.ways, device=device).repeat_interleave(sizes.shots).expand(episodes, -1)
    hidden = torch.zeros(episodes, len(weight), dtype=torch.bool, device=device)

    def rand(rows: int) -> torch.Tensor:
        return torch.randn(episodes, rows, weight.shape[1], device=device)

    means = rand(shape.ways)
    x = (means.repeat_interleave(sizes.shots, 1) + SPREAD * rand(shape.ways * sizes.shots)).relu()
    novel = means.repeat_interleave(shape.novel_queries, 1) + SPREAD * rand(shape.ways * shape.novel_queries)
    q = torch.cat([novel, rand(shape.base_queries)], 1).relu()
    return Support(x, labels, hidden, x @ weight.T), Query(q, q @ weight.T)


def _compiled(call: Callable[[], float]) -> float | None:
    try:
        with store.nothing_compiled():
            return call()
    except store.NotCompiledError:
        return None
