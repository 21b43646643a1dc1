"""Views of images: crops, flips and colours, drawn from a seed on the CPU and applied to whole batches on any device.

What torchvision does image by image is one gather or one matrix product a batch here. Two things differ: the crop is
not rounded to whole pixels, and brightness, contrast, saturation and hue are applied in this order always.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbones.images import apply_crops_on_device
from ifsl_bench.backbones.recipe import View

CROP_ASPECT_RATIOS = (3 / 4, 4 / 3)  # width to height of a crop
JITTER_PROBABILITY = 0.8  # share of the images whose colours vary
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # the luminance of red, green and blue (ITU-R BT.601)
# The axes in which the hue is an angle: luminance and the two differences of the YIQ colour space.
YIQ_OF_RGB = ((0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135))


def draw_augmentation(view: View, count: int, padding: int, flip: bool, random: np.random.Generator) -> Tensor:
    """Draw how images are cut and coloured.

    Args:
        view: the kind of view.
        count: number B of images.
        padding: pixels of the task's padding, by which a crop of the image's own size may be moved.
        flip: whether the task mirrors half of the images.
        random: the source of random numbers.

    Returns:
        float32 [B, 10]: centre (x, y) of the crop, from -1 to 1 in the image, or pixels by which it is moved down and
        right; half its width and height in the same units; 1 where it is mirrored; factors of brightness, contrast and
        saturation; the angle of the hue in radians; 1 where it is grey.
    """
    drawn = np.zeros((count, 10), np.float32)
    if view.scale == (1.0, 1.0):
        drawn[:, :2] = random.integers(-padding, padding + 1, (count, 2))
        drawn[:, 2:4] = 1
    else:
        area = random.uniform(*view.scale, count)
        ratio = np.exp(random.uniform(math.log(CROP_ASPECT_RATIOS[0]), math.log(CROP_ASPECT_RATIOS[1]), count))
        half = np.minimum(1, np.sqrt(np.stack([area * ratio, area / ratio], 1)))
        drawn[:, :2] = (1 - half) * random.uniform(-1, 1, (count, 2))
        drawn[:, 2:4] = half
    mirrored = flip if view.flip is None else view.flip
    drawn[:, 4] = (random.random(count) < 0.5) & mirrored
    jittered = random.random(count) < JITTER_PROBABILITY
    drawn[:, 5:8] = np.where(jittered[:, None], random.uniform(1 - view.jitter, 1 + view.jitter, (count, 3)), 1)
    drawn[:, 8] = np.where(jittered, random.uniform(-1, 1, count) * view.jitter / 4 * 2 * math.pi, 0)
    drawn[:, 9] = random.random(count) < view.grey
    return torch.from_numpy(drawn)


def apply_augmentation(images: Tensor, view: View, augmentation: Tensor) -> Tensor:
    """Cut and colour a batch of images.

    Args:
        images: uint8 [B, H, W, C].
        view: the kind of view.
        augmentation: [B, 10] of :func:`draw_augmentation`, on the images' device.

    Returns:
        [B, h, w, C], of values from 0 to 255; uint8 where colours and size are the image's own, else float32.
    """
    height, width = (round(view.side * x) for x in images.shape[1:3])
    if view.scale == (1.0, 1.0):
        crops = augmentation[:, (0, 1, 4)].T.round().long()
        images = apply_crops_on_device(images, torch.arange(len(images), device=images.device), crops)
        if view.side != 1:
            planes = images.permute(0, 3, 1, 2).float()
            planes = F.interpolate(planes, (height, width), mode="bilinear", antialias=True)
            images = planes.permute(0, 2, 3, 1)
    else:
        images = _crop_and_resize(images, height, width, augmentation)
    return _jitter_colours(images, augmentation) if view.jitter or view.grey else images


def _crop_and_resize(images: Tensor, height: int, width: int, drawn: Tensor) -> Tensor:
    """Cut crops and resize them by bilinear interpolation, [B, h, w, C]."""
    x, y, half_width, half_height, mirrored = drawn[:, :5].T
    affine = drawn.new_zeros(len(images), 2, 3)
    affine[:, 0, 0], affine[:, 0, 2] = half_width * (1 - 2 * mirrored), x
    affine[:, 1, 1], affine[:, 1, 2] = half_height, y
    planes = images.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(affine, [len(images), 1, height, width], align_corners=False)
    return F.grid_sample(planes, grid, padding_mode="border", align_corners=False).permute(0, 2, 3, 1)


def _jitter_colours(images: Tensor, drawn: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, or take the colours away; [B, h, w, C] float32 from 0 to 255.

    Each is linear in the colours of a pixel, so that an image has one matrix [C, C], and the mean that its contrast is
    relative to.
    """
    brightness, contrast, saturation, hue, grey = drawn[:, 5:].T
    pixels, channels = images.float().flatten(1, 2), images.shape[-1]  # [B, h w, C]
    weights = torch.tensor(GREY_WEIGHTS if channels == 3 else [1 / channels] * channels, device=images.device)
    mean = (pixels @ weights).mean(1)  # [B], luminance
    colours = torch.eye(channels, device=images.device).expand(len(images), -1, -1)
    if channels == 3:
        to_yiq = torch.tensor(YIQ_OF_RGB, device=images.device)
        cosine, sine = hue.cos(), hue.sin()
        turn = torch.eye(3, device=images.device).repeat(len(images), 1, 1)
        turn[:, 1, 1], turn[:, 1, 2], turn[:, 2, 1], turn[:, 2, 2] = cosine, -sine, sine, cosine
        luminance = weights.expand(3, 3)  # a pixel's luminance in each channel
        kept = (saturation * (1 - grey))[:, None, None]
        colours = (kept * colours + (1 - kept) * luminance) @ torch.linalg.inv(to_yiq) @ turn @ to_yiq
    scaled = (brightness * contrast)[:, None, None] * colours
    offset = (brightness * (1 - contrast) * mean)[:, None, None]
    return torch.baddbmm(offset, pixels, scaled.mT).clamp(0, 255).reshape(images.shape)
