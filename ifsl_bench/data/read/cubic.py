"""Cubic interpolation as OpenCV has it."""

from __future__ import annotations

import numpy as np


def resize_cubic(image: np.ndarray, size: int) -> np.ndarray:
    """Resizes an image as OpenCV's INTER_CUBIC does, up to its rounding of weights to 11 bits.

    Args:
        image: uint8 [H, W, C].

    Returns:
        uint8 [size, size, C].
    """

    def taps(length: int) -> tuple[np.ndarray, np.ndarray]:
        centre = (np.arange(size) + 0.5) * length / size - 0.5
        first = np.floor(centre).astype(np.int64)
        t = centre - first  # [size]
        d = np.stack([t + 1, t, 1 - t, 2 - t])  # [4, size], distances of the taps
        a = -0.75
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        weights = np.where(d <= 1, near, far)
        return np.clip(first + np.arange(-1, 3)[:, None], 0, length - 1), weights

    rows, row_weights = taps(image.shape[0])
    columns, column_weights = taps(image.shape[1])
    used = image[rows]  # [4, size, W, C]
    tall = np.einsum("kyxc,ky->yxc", used, row_weights)
    wide = np.einsum("ykxc,kx->yxc", tall[:, columns], column_weights)
    return np.clip(np.rint(wide), 0, 255).astype(np.uint8)
