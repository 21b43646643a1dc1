"""The images of a pretraining, step by step: drawn for an epoch, and brought to where the network is.

The order of the images and their crops are drawn on the CPU, whatever computes and however many processes share a
batch: the same seed gives the same images everywhere.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.device import free_memory
from ifsl_bench.backbones.images import batches, cut, cut_on_device, draw_crops
from ifsl_bench.backbones.networks import Normalise
from ifsl_bench.backbones.processes import World
from ifsl_bench.data.pools import Pool
from ifsl_bench.protocols.tasks.task import Pretraining
from ifsl_bench.utils.seeds import seed_of

SHARE = 0.5  # of a device's free memory that the images may take; the rest is for what the network computes
BLOCK = 8192  # images that come over at once, where the whole pool does
Batches = Generator[tuple[Tensor, Tensor]]  # of images [B, C, H, W] or features [B, D], and labels [B], on the device


@dataclass(frozen=True)
class Epoch:
    """The images of the steps of an epoch, of each step this process's part.

    Attributes:
        rows: int64 [B] of each step, images of the pool.
        crops: [3, B] of each step, see :func:`ifsl_bench.backbones.images.draw_crops`; None where nothing is augmented.
    """

    rows: list[np.ndarray]
    crops: list[Tensor] | None


def draw_epoch(pool: Pool, spec: Pretraining, seed: int, epoch: int, batch: int, steps: int, world: World) -> Epoch:
    """The first ``steps`` batches of an epoch; drawn whole, then divided among the processes."""
    order = np.random.Generator(np.random.PCG64(seed_of("order", seed, epoch))).permutation(len(pool))
    part = world.part(batch)
    rows = [order[i * batch : (i + 1) * batch][part] for i in range(steps)]
    if pool.images.ndim != 4 or not (spec.crop_padding or spec.flip):
        return Epoch(rows, None)
    generator = torch.Generator().manual_seed(seed_of("crops", seed, epoch))
    drawn = [draw_crops(batch, spec.crop_padding, spec.flip, generator) for _ in range(steps)]
    return Epoch(rows, [crops[:, part] for crops in drawn])


class HostFeed:
    """Feeds a network on the CPU: a thread gathers and augments the next batch from the map."""

    def __init__(self, pool: Pool, normalise: Normalise) -> None:
        self.pool, self.normalise = pool, normalise

    def batches(self, epoch: Epoch) -> Batches:
        """Yields the batches in order; close it, so that its thread ends."""
        crops = iter(epoch.crops or [])
        augment = None if epoch.crops is None else lambda images: cut(images, next(crops))
        loaded = batches(self.pool.images, epoch.rows, torch.device("cpu"), augment)
        with closing(loaded):
            for rows, images in zip(epoch.rows, loaded, strict=True):
                yield self.normalise(images), torch.from_numpy(self.pool.labels[rows])


class DeviceFeed:
    """Feeds a network on a device: what was drawn comes over once an epoch, the device gathers, crops and normalises.

    Args:
        resident: keep the pool on the device, so that nothing comes over in a step; otherwise the raw images of each
            step do, from pinned memory and one step ahead.
    """

    def __init__(self, pool: Pool, normalise: Normalise, device: torch.device, resident: bool) -> None:
        self.pool, self.normalise, self.device = pool, normalise, device
        self.images = _whole(pool.images, device) if resident else None  # [n, H, W, C], or [n, D]

    def batches(self, epoch: Epoch) -> Batches:
        rows = np.concatenate(epoch.rows)
        drawn = torch.from_numpy(np.stack([rows, self.pool.labels[rows]]))
        plan = torch.cat([drawn, torch.cat(epoch.crops, 1)] if epoch.crops else [drawn]).to(self.device)  # [2 or 5, n]
        parts = plan.split([len(rows) for rows in epoch.rows], 1)
        if self.images is not None:
            for part in parts:
                yield self._ready(self.images, part[0], part)
            return
        with closing(batches(self.pool.images, epoch.rows, self.device)) as loaded:
            for part, images in zip(parts, loaded, strict=True):
                yield self._ready(images, torch.arange(len(images), device=self.device), part)

    def _ready(self, images: Tensor, rows: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        chosen = cut_on_device(images, rows, part[2:]) if len(part) > 2 else images[rows]
        return self.normalise(chosen), part[1]


def make_feed(pool: Pool, normalise: Normalise, device: torch.device) -> HostFeed | DeviceFeed:
    """Makes the feed that brings the images of a pool to a network on the device."""
    if device.type == "cpu":
        return HostFeed(pool, normalise)
    return DeviceFeed(pool, normalise, device, fits(len(pool) * pool.images[:1].nbytes, device))


def fits(size: int, device: torch.device) -> bool:
    """Returns whether so many bytes are at most :data:`SHARE` of the device's free memory."""
    free = free_memory(device)
    return free is None or size <= SHARE * free


def _whole(images: np.ndarray, device: torch.device) -> Tensor:
    """A pool's images on the device, brought there block by block: in main memory they may not fit."""
    whole = torch.empty(tuple(images.shape), dtype=torch.from_numpy(np.array(images[:1])).dtype, device=device)
    for start in range(0, len(images), BLOCK):
        block = torch.from_numpy(np.array(images[start : start + BLOCK]))  # a copy: maps are read-only
        whole[start : start + len(block)] = block.to(device)
    return whole
