"""Rough times of pretraining and of features, measured here on random images; each distinct thing once a process."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from ifsl_bench.backbone.device import choose_precision
from ifsl_bench.backbone.images import cut, draw_crops
from ifsl_bench.backbone.networks import channels_last, make_backbone, make_head
from ifsl_bench.backbone.registered import frozen_backbone
from ifsl_bench.common.timing import seconds_of
from ifsl_bench.protocol.task import Pretraining

SOME = 1 << 17  # bytes of images that are timed at once on a processor, where a few tell of many


def pretraining_seconds(
    spec: Pretraining, shape: tuple[int, ...], classes: int, images: int, held_out: int, device: torch.device
) -> float:
    """Of all steps of a pretraining, and of its accuracy.

    Args:
        shape: of an image [H, W, C], or of features [D].
        classes: base classes.
        images: in base/train.
        held_out: images of the pools that the accuracy is of.
    """
    if frozen_backbone(spec.backbone):  # its features, of which the classifier costs a small part
        return (images + held_out) * feature_seconds(spec.backbone, shape, device)
    batch = min(spec.batch, images)
    crops = (spec.crop_padding, spec.flip) if len(shape) == 3 and device.type == "cpu" else (0, False)
    each = _step_seconds(spec.backbone, shape, classes, batch, crops, device, torch.get_num_threads())
    return spec.steps * batch * each + held_out * feature_seconds(spec.backbone, shape, device)


@lru_cache
def _step_seconds(
    backbone: str, shape: tuple[int, ...], classes: int, batch: int, crops: tuple[int, bool], device: torch.device,
    threads: int,
) -> float:  # fmt: skip
    """Of one image in a step of so many."""
    some = _some(batch, shape, device)
    network = channels_last(make_backbone(backbone, shape), device)
    head = make_head("linear", network.features, classes).to(device)
    labels = torch.zeros(some, dtype=torch.int64, device=device)
    inputs, precision = _images(shape, some, device), choose_precision(device)
    optimiser = torch.optim.SGD([*network.parameters(), *head.parameters()], 1e-3, 0.9)
    raw = torch.zeros(some, *shape, dtype=torch.uint8)
    drawn = draw_crops(some, *crops, torch.Generator()) if any(crops) else None

    def step() -> None:
        if drawn is not None:
            cut(raw, drawn)
        with precision.autocast(device):
            hidden = network(inputs)
        loss = F.cross_entropy(head(hidden.float()), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return seconds_of(step, device) / some


def feature_seconds(backbone: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Of one image."""
    return _feature_seconds(backbone, shape, device, torch.get_num_threads())


@lru_cache
@torch.no_grad()
def _feature_seconds(backbone: str, shape: tuple[int, ...], device: torch.device, threads: int) -> float:
    network = channels_last(make_backbone(backbone, shape).eval(), device)
    if found := frozen_backbone(backbone):
        shape, some = (*found[0].card(found[1], own_weights=True).size, 3), 2 if device.type == "cpu" else 64
    else:
        some = _some(256, shape, device)
    batch = _images(shape, some, device)
    return seconds_of(lambda: network(batch), device) / len(batch)


@lru_cache
def features_of(backbone: str, shape: tuple[int, ...]) -> int:
    """How many features a network gives an image [H, W, C], or features [D]."""
    return make_backbone(backbone, shape).features


def _some(batch: int, shape: tuple[int, ...], device: torch.device) -> int:
    """How many images are timed at once: all of a batch on an accelerator, which wants many."""
    return batch if device.type != "cpu" or len(shape) == 1 else max(1, min(batch, SOME // math.prod(shape)))


def _images(shape: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.randn(batch, *shape, device=device)
    height, width, channels = shape
    return torch.randn(batch, height, width, channels, device=device).permute(0, 3, 1, 2)
