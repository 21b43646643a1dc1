"""Rough times of meta-training and of evaluation, measured here on random features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ifsl_bench.backbone.networks import make_backbone
from ifsl_bench.common.timing import seconds_of
from ifsl_bench.kernels import store
from ifsl_bench.learners import compiled
from ifsl_bench.plugin.method import Base, Method, Query, Support, ask
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocol.task import Task

BACKWARD = 1.3  # drawing the episodes and the optimiser's step, beside forward and backward pass


def random_method(
    kind: type[Method],
    options: Mapping[str, Any],
    task: Task,
    classes: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> Method:
    """A method beside a random base classifier, to be timed.

    Args:
        classes: base classes.
        shape: of an image [H, W, C], or of features [D].
    """
    features = make_backbone(task.pretraining.backbone, shape).features
    base = Base(torch.randn(classes, features), torch.zeros(classes), torch.randn(classes, features))
    return make_method(kind, base.to(device), task.episode.ways, options).to(device)


def _episodes(task: Task, method: Method, episodes: int) -> tuple[Support, Query]:
    """Random features in the shapes of the task."""
    weight, shape = method.base.weight, task.episode
    queries = shape.base_queries + shape.ways * shape.novel_queries
    labels = torch.arange(shape.ways, device=weight.device).repeat_interleave(task.shots).expand(episodes, -1)
    hidden = torch.zeros(episodes, len(weight), dtype=torch.bool, device=weight.device)

    def rand(rows: int) -> torch.Tensor:
        return torch.randn(episodes, rows, weight.shape[1], device=weight.device)

    x, q = rand(shape.ways * task.shots), rand(queries)
    return Support(x, labels, hidden, x @ weight.T), Query(q, q @ weight.T)


def step_seconds(task: Task, method: Method, episodes: int) -> float:
    """Of one step of meta-training on so many episodes."""
    support, query = _episodes(task, method, episodes)

    def step() -> None:
        method.train()
        ask(method, type(method).__name__, support, query).logits.square().mean().backward()

    return BACKWARD * _seconds_of(step, method.base.weight.device, 5)


@torch.no_grad()
def episode_seconds(task: Task, method: Method, at_once: int = 20) -> float:
    """Of evaluating one episode."""
    support, query = _episodes(task, method, at_once)
    name, device = type(method).__name__, method.base.weight.device
    return _seconds_of(lambda: ask(method.eval(), name, support, query), device, 3) / at_once


def _seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """By kernels that are compiled; else in torch, which takes longer: nothing is compiled for an estimate."""
    if store.anything_kept():
        try:
            with store.nothing_compiled():
                return seconds_of(call, device, repeats)
        except store.NotCompiledError:
            pass
    with compiled.batched():
        return seconds_of(call, device, repeats)
