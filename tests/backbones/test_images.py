"""Augmentation and normalisation against loops over single pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ifsl_bench.backbones.images import cut, cut_on_device, draw_crops


def test_a_cut_is_pad_crop_mirror():
    images = torch.randint(1, 256, (40, 7, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = cut(images, draw_crops(40, 2, True, torch.Generator().manual_seed(5)))
    generator = torch.Generator().manual_seed(5)
    offsets = torch.randint(0, 5, (2, 40, 1), generator=generator)
    mirrored = torch.rand(40, 1, generator=generator) < 0.5
    assert 5 < mirrored.sum() < 35
    for i in range(40):
        padded = np.pad(images[i].numpy(), ((2, 2), (2, 2), (0, 0)))
        dy, dx = int(offsets[0, i]), int(offsets[1, i])
        cropped = padded[dy : dy + 7, dx : dx + 9]
        expected = cropped[:, ::-1] if mirrored[i] else cropped
        np.testing.assert_array_equal(out[i].numpy(), expected)


@pytest.mark.parametrize(("padding", "flip"), [(2, True), (9, True), (3, False), (0, True)])
def test_a_device_cuts_the_same_images_as_the_cpu(padding, flip):
    """Also crops that lie beside the image, all black."""
    pool = torch.randint(1, 256, (30, 7, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = torch.randperm(30)[:20]
    crops = draw_crops(20, padding, flip, torch.Generator().manual_seed(3))
    expected = cut(pool[rows], crops)
    assert torch.equal(cut_on_device(pool, rows, crops), expected)
