"""Images of a pool as a network from elsewhere wants them: resized, cut and normalised by its own rule."""

from __future__ import annotations

import torch
from torch import Tensor

from ifsl_bench.backbone.contract import Card


class Preprocess:
    """[B, H, W, C] uint8 -> [B, 3, h, w] float32, where (h, w) is the network's.

    Resizing is that of 8-bit images, with antialiasing, as Pillow does it. Grey images get three equal channels.
    """

    def __init__(self, card: Card, device: torch.device) -> None:
        from torchvision.transforms import InterpolationMode  # takes a second, and most commands need none of it

        self.card, self.mode = card, InterpolationMode(card.interpolation)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (card.mean, card.std))

    def __call__(self, batch: Tensor) -> Tensor:
        from torchvision.transforms import functional as F

        images = batch.permute(0, 3, 1, 2)
        resize = self.card.resize
        size = [resize] if isinstance(resize, int) else list(resize)
        images = F.center_crop(F.resize(images, size, self.mode, antialias=True), list(self.card.size))
        # Without a copy of what is repeated until the arithmetic is done.
        return ((images / 255).expand(-1, 3, -1, -1) - self.mean) / self.std


def enlarged(card: Card, shape: tuple[int, ...]) -> bool:
    """Returns whether images [H, W, C] have fewer pixels than the network sees."""
    return min(shape[:2]) < min(card.size)
