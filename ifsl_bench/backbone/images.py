"""Batches of images on their way into a network: gathered from the map and augmented on the CPU, one batch ahead of the
network, then normalised on the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocol.task import DataSpec


def gather(images: np.ndarray, rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows of a memory-mapped pool as a tensor on the device; [B, H, W, C] uint8, or [B, D] float32."""
    batch = torch.from_numpy(np.ascontiguousarray(images[rows]))
    return batch.to(device, non_blocking=True)


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
        batch = gather(images, chosen, torch.device("cpu"))
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


def crop_and_flip(batch: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Pads by ``padding`` black pixels, crops at random to the original size, and mirrors half of the images.

    Args:
        batch: [B, H, W, C] uint8, on the CPU.
        generator: on the CPU.
    """
    count, height, width, _ = batch.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator) - padding
    mirrored = torch.rand(count, 1, generator=generator) < (0.5 if flip else 0.0)
    if padding == 0 and not flip:
        return batch
    images, out = batch.numpy(), np.zeros(batch.shape, np.uint8)
    # Plain slices, image by image: ten times as fast as one gather of all pixels.
    for image, target, y, x, turned in zip(images, out, *offsets.squeeze(2).tolist(), mirrored.tolist(), strict=True):
        if abs(y) >= height or abs(x) >= width:
            continue  # nothing but padding
        if turned[0]:
            target = target[:, ::-1]
        target[max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)] = image[
            max(0, y) : height + min(0, y), max(0, x) : width + min(0, x)
        ]
    return torch.from_numpy(out)


class Normalise:
    """``(x / 255 - mean) / std`` per channel, [B, H, W, C] uint8 -> [B, C, H, W] float32; features pass unchanged."""

    def __init__(self, spec: DataSpec, channels: int, device: torch.device) -> None:
        mean = torch.tensor(spec.mean, device=device).expand(channels)
        std = torch.tensor(spec.std, device=device).expand(channels)
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __call__(self, batch: Tensor) -> Tensor:
        if batch.dim() == 2:
            return batch
        return torch.addcmul(self.shift, batch.float(), self.scale).permute(0, 3, 1, 2)
