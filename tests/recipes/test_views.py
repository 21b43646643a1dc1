"""Views against torchvision, image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import functional as reference

from ifsl_bench.backbones.image_views import apply_augmentation, draw_augmentation
from ifsl_bench.backbones.recipe import View

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8))
COLUMNS = ("x", "y", "half_width", "half_height", "mirrored", "brightness", "contrast", "saturation", "hue", "grey")


def plain(count: int = len(IMAGES)) -> torch.Tensor:
    """Draws that change nothing."""
    drawn = torch.zeros(count, 10)
    drawn[:, 2:4] = drawn[:, 5:8] = 1
    return drawn


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_torchvisions(name: str) -> None:
    drawn = plain()
    drawn[:, COLUMNS.index(name)] = torch.linspace(0.6, 1.0, len(IMAGES))
    ours = apply_augmentation(IMAGES, View(jitter=0.4), drawn)
    for image, row, row_ours in zip(IMAGES, drawn, ours, strict=True):
        adjust = getattr(reference, f"adjust_{name}")
        theirs = adjust(image.permute(2, 0, 1).double() / 255, float(row[COLUMNS.index(name)])) * 255
        # torchvision's weights of red, green and blue have four digits.
        torch.testing.assert_close(row_ours.permute(2, 0, 1).double(), theirs, atol=0.1, rtol=0)


def test_grey_is_torchvisions() -> None:
    drawn = plain()
    drawn[:, -1] = 1
    ours = apply_augmentation(IMAGES, View(grey=1.0), drawn)
    for image, row in zip(IMAGES, ours, strict=True):
        theirs = reference.rgb_to_grayscale(image.permute(2, 0, 1).double(), 3)
        torch.testing.assert_close(row.permute(2, 0, 1).double(), theirs, atol=0.1, rtol=0)


def test_hue_turns_colours_and_keeps_their_luminance() -> None:
    drawn, weights = plain(), torch.tensor([0.299, 0.587, 0.114])
    middle = (IMAGES // 4 + 96).contiguous()  # far from 0 and 255, where colours are cut off
    drawn[:, COLUMNS.index("hue")] = torch.linspace(-0.6, 0.6, len(IMAGES))
    ours = apply_augmentation(middle, View(jitter=0.4), drawn)
    torch.testing.assert_close(ours @ weights, middle.float() @ weights, atol=1e-3, rtol=0)
    back = drawn.clone()
    back[:, COLUMNS.index("hue")] *= -1
    again = apply_augmentation(ours.round().to(torch.uint8), View(jitter=0.4), back)
    torch.testing.assert_close(again, middle.float(), atol=2.0, rtol=0)  # rounding to bytes between the two


def test_crops_are_torchvisions() -> None:
    """A crop of whole pixels, enlarged to the image's size."""
    drawn = plain()
    top, left, height, width = 3, 4, 8, 6
    drawn[:, 0], drawn[:, 1] = (2 * left + width) / 16 - 1, (2 * top + height) / 16 - 1
    drawn[:, 2], drawn[:, 3] = width / 16, height / 16
    drawn[::2, 4] = 1
    ours = apply_augmentation(IMAGES, View(scale=(0.1, 0.5), side=0.75), drawn)
    for number, (image, row) in enumerate(zip(IMAGES, ours, strict=True)):
        planes = image.permute(2, 0, 1).double()
        theirs = reference.resized_crop(planes, top, left, height, width, [12, 12], antialias=False)
        theirs = theirs.flip(2) if number % 2 == 0 else theirs
        inside = slice(1, -1)  # at the edges ours sees the pixels beside the crop, theirs its own edge again
        torch.testing.assert_close(
            row.permute(2, 0, 1).double()[:, inside, inside], theirs[:, inside, inside], atol=1e-2, rtol=0
        )


def test_the_tasks_own_crop_is_the_padding_and_crop_of_plain_training() -> None:
    from ifsl_bench.backbones.images import apply_crops

    drawn = draw_augmentation(View(), len(IMAGES), 2, True, np.random.default_rng(1))
    crops = drawn[:, (0, 1, 4)].T.long()
    assert torch.equal(apply_augmentation(IMAGES, View(), drawn), apply_crops(IMAGES, crops))
    assert 0 < crops[2].sum() < len(IMAGES)
    assert {-2, 2} <= set(crops[:2].flatten().tolist()) <= set(range(-2, 3))


def test_draws_have_the_shares_and_ranges_that_a_view_names() -> None:
    view, count = View(scale=(0.2, 0.9), flip=True, jitter=0.4, grey=0.2), 20_000
    drawn = draw_augmentation(view, count, 0, False, np.random.default_rng(2))
    half_width, half_height = drawn[:, 2], drawn[:, 3]
    area = half_width * half_height
    whole = (half_width < 1) & (half_height < 1)  # the others were cut to the image
    assert float(area.min()) >= 0.2
    assert float(area[whole].max()) <= 0.9 + 1e-6
    ratio = half_width / half_height
    assert float(ratio[whole].min()) >= 3 / 4 - 1e-4
    assert float(ratio[whole].max()) <= 4 / 3 + 1e-4
    assert float((drawn[:, :2].abs() + drawn[:, 2:4]).max()) <= 1 + 1e-6  # inside the image
    error = 4 * 0.5 / count**0.5  # four standard errors of a share
    assert float(drawn[:, 4].mean()) == pytest.approx(0.5, abs=error)
    assert float(drawn[:, 9].mean()) == pytest.approx(0.2, abs=error)
    assert float((drawn[:, 5] != 1).float().mean()) == pytest.approx(0.8, abs=error)
    assert 0.6 <= float(drawn[:, 5:8].min()) < float(drawn[:, 5:8].max()) <= 1.4


def test_grey_images_have_no_hue() -> None:
    drawn = draw_augmentation(View(jitter=0.4, grey=0.5), 12, 0, False, np.random.default_rng(3))
    assert apply_augmentation(IMAGES[..., :1].contiguous(), View(jitter=0.4, grey=0.5), drawn).shape == (12, 16, 16, 1)
