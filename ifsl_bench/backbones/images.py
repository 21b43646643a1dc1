"""Images on their way from a pool into a network: drawn, gathered, augmented, normalised.

The order of the images and their crops are drawn on the CPU, whatever computes: the same seed gives the same images
everywhere. A network on the CPU has its batches gathered and augmented by a thread, one batch ahead. An accelerator
gathers, augments and normalises itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.device import free_device_memory_bytes
from ifsl_bench.data.pools import Pool
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.tasks.task import Pretraining

MAX_MEMORY_SHARE = 0.5  # of a device's free memory that the images may take; the rest is for what the network computes
IMAGES_PER_COPY = 8192  # images that are copied at once, where the whole pool goes to a device
BatchGenerator = Generator[
    tuple[Tensor, Tensor]
]  # images [B, C, H, W] or features [B, D], and labels [B], on the device


def load_batches(
    images: np.ndarray,
    rows: Iterable[np.ndarray],
    device: torch.device,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Tensor]:
    """Yield the batches of a pool, each gathered by a thread while the network works on the one before.

    Args:
        images: [n, ...], a pool's.
        rows: indices of the images of each batch, int64 [B].
        device: where the batches go.
        augment: applied on the CPU, to one batch after the other, in order.
    """

    def gather(chosen: np.ndarray) -> Tensor:
        batch = torch.from_numpy(np.ascontiguousarray(images[chosen]))
        if augment:
            batch = augment(batch)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as ahead:
        waiting = None
        for chosen in rows:
            batch, waiting = waiting, ahead.submit(gather, chosen)
            if batch:
                yield batch.result().to(device, non_blocking=True)
        if waiting:
            yield waiting.result().to(device, non_blocking=True)


# -- augmentation ------------------------------------------------------------------------------------------------------


def draw_crops(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Draw the places where images are cut, and which of them are mirrored.

    Args:
        count: number B of images.
        padding: pixels by which a crop may be moved, in each direction.
        flip: whether half of the images are mirrored.
        generator: on the CPU.

    Returns:
        int64 [3, B]: rows by which a crop lies below the image and columns by which it lies right of it,
        -padding..padding, and 1 where it is mirrored, otherwise 0.
    """
    offsets = torch.randint(0, 2 * padding + 1, (2, count), generator=generator) - padding
    mirrored = torch.rand(count, generator=generator) < (0.5 if flip else 0.0)
    return torch.cat([offsets, mirrored[None].long()])


def apply_crops(batch: Tensor, crops: Tensor) -> Tensor:
    """Cut crops as large as the images out of the images and the black around them.

    Args:
        batch: [B, H, W, C] uint8, on the CPU.
        crops: [3, B], see :func:`draw_crops`.

    Returns:
        [B, H, W, C] uint8.
    """
    _, height, width, _ = batch.shape
    images, out = batch.numpy(), np.zeros(batch.shape, np.uint8)
    # Plain slices, image by image: ten times as fast as one gather of all pixels.
    for image, target, y, x, mirrored in zip(images, out, *crops.tolist(), strict=True):
        if abs(y) >= height or abs(x) >= width:
            continue  # nothing but padding
        if mirrored:
            target = target[:, ::-1]
        target[max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)] = image[
            max(0, y) : height + min(0, y), max(0, x) : width + min(0, x)
        ]
    return torch.from_numpy(out)


def apply_crops_on_device(pool: Tensor, rows: Tensor, crops: Tensor) -> Tensor:
    """Cut the crops of :func:`apply_crops` out of a pool's images, in one gather, on any device and without a wait.

    Args:
        pool: [n, H, W, C] uint8.
        rows: int64 [B], indices of the images.
        crops: [3, B], see :func:`draw_crops`.

    Returns:
        [B, H, W, C] uint8.
    """
    _, height, width, _ = pool.shape
    down, right, mirrored = crops.unsqueeze(2)  # [B, 1] each
    count = torch.arange(max(height, width), device=pool.device)
    y = count[:height] + down  # [B, H], where a row of a crop comes from
    x = (count[:width] - (width - 1) * mirrored).abs() + right  # [B, W]
    row, column = y.clamp(0, height - 1), x.clamp(0, width - 1)
    inside = (y == row)[:, :, None] & (x == column)[:, None]  # [B, H, W]
    return pool[rows[:, None, None], row[:, :, None], column[:, None]] * inside[..., None]


# -- the batches of an epoch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochPlan:
    """The images of each step of an epoch.

    Attributes:
        rows_by_batch: int64 [B] of each step, indices of images of the pool.
        crops_by_batch: int64 [3, B] of each step, see :func:`draw_crops`; None where nothing is augmented.
    """

    rows_by_batch: list[np.ndarray]
    crops_by_batch: list[Tensor] | None


def plan_epoch(pool: Pool, spec: Pretraining, seed: int, epoch: int, batch: int, steps: int) -> EpochPlan:
    """Draw the first batches of an epoch: a permutation of the pool's images, and a crop of each.

    Args:
        pool: the images to train on.
        spec: defines how they are augmented.
        seed: of the pretraining.
        epoch: number of the epoch, from 0.
        batch: images of a step.
        steps: number of batches.
    """
    order = np.random.Generator(np.random.PCG64(derive_seed("order", seed, epoch))).permutation(len(pool))
    rows = [order[i * batch : (i + 1) * batch] for i in range(steps)]
    if pool.images.ndim != 4 or not (spec.crop_padding or spec.flip):
        return EpochPlan(rows, None)
    generator = torch.Generator().manual_seed(derive_seed("crops", seed, epoch))
    return EpochPlan(rows, [draw_crops(batch, spec.crop_padding, spec.flip, generator) for _ in range(steps)])


class HostBatchLoader:
    """Feeds a network on the CPU: a thread gathers and augments the next batch from the map."""

    def __init__(self, pool: Pool, normalise: Callable[[Tensor], Tensor]) -> None:
        self.pool, self.normalise = pool, normalise

    def load_batches(self, epoch: EpochPlan) -> BatchGenerator:
        """Yield the batches in order; close it, so that its thread ends."""
        crops = iter(epoch.crops_by_batch or [])
        augment = None if epoch.crops_by_batch is None else lambda images: apply_crops(images, next(crops))
        with closing(load_batches(self.pool.images, epoch.rows_by_batch, torch.device("cpu"), augment)) as loaded:
            for rows, images in zip(epoch.rows_by_batch, loaded, strict=True):
                yield self.normalise(images), torch.from_numpy(self.pool.labels[rows])


class DeviceBatchLoader:
    """Feeds a network on an accelerator, which gathers, crops and normalises; rows and crops are copied once an epoch.

    Args:
        pool: the images to train on.
        normalise: on the device.
        device: the accelerator.
        resident: keep the pool on the device, so that nothing is copied in a step; otherwise the raw images of each
            step are, from pinned memory and one step ahead.
    """

    def __init__(self, pool: Pool, normalise: Callable[[Tensor], Tensor], device: torch.device, resident: bool) -> None:
        self.pool, self.normalise, self.device = pool, normalise, device
        self.images = _copy_pool_to_device(pool.images, device) if resident else None  # [n, H, W, C], or [n, D]

    def load_batches(self, epoch: EpochPlan) -> BatchGenerator:
        """Yield the batches in order; close it, so that its thread ends."""
        rows = np.concatenate(epoch.rows_by_batch)
        drawn = torch.from_numpy(np.stack([rows, self.pool.labels[rows]]))
        plan = torch.cat([drawn, torch.cat(epoch.crops_by_batch, 1)] if epoch.crops_by_batch else [drawn]).to(
            self.device
        )  # [2 or 5, n]
        parts = plan.split([len(rows) for rows in epoch.rows_by_batch], 1)
        if self.images is not None:
            for part in parts:
                yield self._gather_batch(self.images, part[0], part)
            return
        with closing(load_batches(self.pool.images, epoch.rows_by_batch, self.device)) as loaded:
            for part, images in zip(parts, loaded, strict=True):
                yield self._gather_batch(images, torch.arange(len(images), device=self.device), part)

    def _gather_batch(self, images: Tensor, rows: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        chosen = apply_crops_on_device(images, rows, part[2:]) if len(part) > 2 else images[rows]
        return self.normalise(chosen), part[1]


def make_batch_loader(
    pool: Pool, normalise: Callable[[Tensor], Tensor], device: torch.device
) -> HostBatchLoader | DeviceBatchLoader:
    """Make what brings the images of a pool to a network.

    Args:
        pool: the images to train on.
        normalise: on the device.
        device: where the network is.
    """
    if device.type == "cpu":
        return HostBatchLoader(pool, normalise)
    return DeviceBatchLoader(pool, normalise, device, fits_in_device_memory(len(pool) * pool.images[:1].nbytes, device))


def fits_in_device_memory(size: int, device: torch.device) -> bool:
    """Return whether a pool may be kept on a device: it takes at most :data:`MAX_MEMORY_SHARE` of the free memory.

    Args:
        size: of the pool in bytes.
        device: where the pool would be.
    """
    free = free_device_memory_bytes(device)
    return free is None or size <= MAX_MEMORY_SHARE * free


def _copy_pool_to_device(images: np.ndarray, device: torch.device) -> Tensor:
    """Copy a pool's images to the device, block by block: in main memory they may not fit."""
    whole = torch.empty(tuple(images.shape), dtype=torch.from_numpy(np.array(images[:1])).dtype, device=device)
    for start in range(0, len(images), IMAGES_PER_COPY):
        block = torch.from_numpy(np.array(images[start : start + IMAGES_PER_COPY]))  # a copy: maps are read-only
        whole[start : start + len(block)] = block.to(device)
    return whole
