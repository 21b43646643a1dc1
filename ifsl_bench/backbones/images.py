"""Batches of images on their way into a network: gathered and augmented.

On the CPU they are gathered from the map and augmented one batch ahead of the network. Devices augment them themselves,
with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor


def batches(
    images: np.ndarray,
    rows: Iterable[np.ndarray],
    device: torch.device,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Tensor]:
    """The batches of a pool, each made ready by a thread while the network is busy with the one before.

    Args:
        images: [n, ...], a pool's.
        rows: the images of each batch.
        augment: on the CPU; called for one batch after the other, in order.
    """

    def ready(chosen: np.ndarray) -> Tensor:
        batch = torch.from_numpy(np.ascontiguousarray(images[chosen]))
        if augment:
            batch = augment(batch)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as ahead:
        waiting = None
        for chosen in rows:
            batch, waiting = waiting, ahead.submit(ready, chosen)
            if batch:
                yield batch.result().to(device, non_blocking=True)
        if waiting:
            yield waiting.result().to(device, non_blocking=True)


def draw_crops(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """The places where images are cut and which of them are mirrored, drawn at random.

    Args:
        generator: on the CPU.

    Returns:
        int64 [3, B]: rows by which a crop lies below the image and columns by which it lies right of it,
        -padding..padding, and 1 where it is mirrored, otherwise 0.
    """
    offsets = torch.randint(0, 2 * padding + 1, (2, count), generator=generator) - padding
    mirrored = torch.rand(count, generator=generator) < (0.5 if flip else 0.0)
    return torch.cat([offsets, mirrored[None].long()])


def cut(batch: Tensor, crops: Tensor) -> Tensor:
    """Crops as large as the images of what is black around them, mirrored or not.

    Args:
        batch: [B, H, W, C] uint8, on the CPU.
        crops: [3, B], see :func:`draw_crops`.
    """
    _, height, width, _ = batch.shape
    images, out = batch.numpy(), np.zeros(batch.shape, np.uint8)
    # Plain slices, image by image: ten times as fast as one gather of all pixels.
    for image, target, y, x, turned in zip(images, out, *crops.tolist(), strict=True):
        if abs(y) >= height or abs(x) >= width:
            continue  # nothing but padding
        if turned:
            target = target[:, ::-1]
        target[max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)] = image[
            max(0, y) : height + min(0, y), max(0, x) : width + min(0, x)
        ]
    return torch.from_numpy(out)


def cut_on_device(pool: Tensor, rows: Tensor, crops: Tensor) -> Tensor:
    """The same of some images of a pool, gathered in one operation, on any device and without a wait.

    Args:
        pool: [n, H, W, C] uint8.
        rows: int64 [B].
        crops: [3, B], see :func:`draw_crops`.

    Returns:
        [B, H, W, C] uint8.
    """
    _, height, width, _ = pool.shape
    down, right, mirrored = crops.unsqueeze(2)  # [B, 1] each
    count = torch.arange(max(height, width), device=pool.device)
    y = count[:height] + down  # [B, H], where a row of a crop comes from
    x = (count[:width] - (width - 1) * mirrored).abs() + right  # [B, W]
    there, across = y.clamp(0, height - 1), x.clamp(0, width - 1)
    inside = (y == there)[:, :, None] & (x == across)[:, None]  # [B, H, W]
    return pool[rows[:, None, None], there[:, :, None], across[:, None]] * inside[..., None]
