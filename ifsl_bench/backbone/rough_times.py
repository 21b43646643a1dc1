"""Rough times of pretraining and of features, measured here on random images."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from ifsl_bench.backbone.device import choose_precision
from ifsl_bench.backbone.networks import channels_last, make_backbone, make_head
from ifsl_bench.common.timing import seconds_of
from ifsl_bench.protocol.task import Pretraining

SOME = 64  # images of a step or forward pass that is timed


def pretraining_seconds(
    spec: Pretraining, shape: tuple[int, ...], classes: int, images: int, device: torch.device
) -> float:
    """Of all steps of a pretraining.

    Args:
        shape: of an image [H, W, C], or of features [D].
        classes: base classes.
        images: in base/train.
    """
    whole = min(spec.batch, images)
    batch = min(whole, SOME)
    network = channels_last(make_backbone(spec.backbone, shape), device)
    head = make_head("linear", network.features, classes).to(device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    inputs, precision = _images(shape, batch, device), choose_precision(device)

    def step() -> None:
        with precision.autocast(device):
            hidden = network(inputs)
        F.cross_entropy(head(hidden.float()), labels).backward()

    return spec.steps * whole / batch * seconds_of(step, device)


@lru_cache  # the same for every pool
@torch.no_grad()
def feature_seconds(backbone: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Of one image."""
    network = channels_last(make_backbone(backbone, shape).eval(), device)
    batch = _images(shape, SOME, device)
    return seconds_of(lambda: network(batch), device) / SOME


def _images(shape: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.randn(batch, *shape, device=device)
    height, width, channels = shape
    return torch.randn(batch, height, width, channels, device=device).permute(0, 3, 1, 2)
