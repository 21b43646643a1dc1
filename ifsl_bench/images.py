"""Batches of images on their way into a network: gathered from the map, augmented and normalised on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.task import DataSpec


def gather(images: np.ndarray, rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows of a memory-mapped pool as a tensor on the device; [B, H, W, C] uint8, or [B, D] float32."""
    batch = torch.from_numpy(np.ascontiguousarray(images[rows]))
    return batch.to(device, non_blocking=True)


def crop_and_flip(batch: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Pads by ``padding`` black pixels, crops at random to the original size, and mirrors half of the images.

    Args:
        batch: [B, H, W, C] uint8.
        generator: on the CPU, so that every device augments alike.
    """
    count, height, width, _ = batch.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator) - padding
    mirrored = torch.rand(count, 1, generator=generator) < (0.5 if flip else 0.0)
    if padding == 0 and not flip:
        return batch
    y = torch.arange(height) + offsets[0]  # [B, H]
    x = torch.arange(width) + offsets[1]  # [B, W]
    x = torch.where(mirrored, x.flip(1), x)
    inside = ((y >= 0) & (y < height)).unsqueeze(2) & ((x >= 0) & (x < width)).unsqueeze(1)  # [B, H, W]
    flat = y.clamp(0, height - 1).unsqueeze(2) * width + x.clamp(0, width - 1).unsqueeze(1)
    flat = (flat + torch.arange(count).view(-1, 1, 1) * (height * width)).to(batch.device)
    pixels = batch.reshape(-1, batch.shape[-1])[flat.view(-1)].view_as(batch)
    return pixels * inside.to(batch.device).unsqueeze(-1)


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
