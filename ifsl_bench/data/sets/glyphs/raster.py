"""Filling of outlines in fixed point: non-zero winding, exact horizontal coverage on four lines per pixel row.

Everything is int64, so that the result is the same on every machine. Only closed polygons come in, hence the winding
numbers of a line sum to zero and one running sum over all lines of all images serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs.fonts import Outline

I64 = npt.NDArray[np.int64]

PIXEL = 256  # positions are in 1/PIXEL of a pixel
LINES = 4  # lines per pixel row
FULL = PIXEL * LINES  # coverage of a pixel that lies inside
_STEP = PIXEL // LINES


def coverage(outlines: Sequence[Outline], matrices: I64, sizes: I64, positions: I64, side: int) -> I64:
    """Fill one outline per image.

    outlines: N outlines. matrices [N, 2, 2]: the linear map, y upwards, in 2**-14. sizes [N]: the larger side of the
    mapped outline's bounding box, in 1/256 pixel. positions [N, 2]: where the box lies in the room left around it, x
    and y (downwards), from -256 (at the left or upper edge) to 256. Returns the coverage [N, side, side], 0 .. FULL.
    """
    counts = np.array([len(outline.x) for outline in outlines], dtype=np.int64)
    first = np.cumsum(counts) - counts
    # All points, mapped and placed, in 1/PIXEL pixel, y downwards.
    x = np.concatenate([outline.x for outline in outlines])
    y = np.concatenate([outline.y for outline in outlines])
    cells = np.repeat(matrices.reshape(-1, 4), counts, axis=0)
    right = cells[:, 0] * x + cells[:, 1] * y
    down = -(cells[:, 2] * x + cells[:, 3] * y)
    left, top = np.minimum.reduceat(right, first), np.minimum.reduceat(down, first)
    width = np.maximum.reduceat(right, first) - left
    height = np.maximum.reduceat(down, first) - top
    larger = np.maximum(np.maximum(width, height), 1)
    placed = []
    for values, low, extent, position in ((right, left, width, positions[:, 0]), (down, top, height, positions[:, 1])):
        room = side * PIXEL - extent * sizes // larger
        start = (room * (256 + position)) >> 9
        scaled = (values - np.repeat(low, counts)) * np.repeat(sizes, counts) // np.repeat(larger, counts)
        placed.append(scaled + np.repeat(start, counts))
    after = np.concatenate([outline.after for outline in outlines]) + np.repeat(first, counts)
    image = np.repeat(np.arange(len(outlines), dtype=np.int64), counts)
    return _fill(placed[0], placed[1], after, image, len(outlines), side)


def _fill(x: I64, y: I64, after: I64, image: I64, images: int, side: int) -> I64:
    """Coverage [images, side, side] of the polygons whose edges run from point i to point after[i]."""
    # An edge meets the lines whose height h has min(y) <= h < max(y); line k lies at (k + 1/2) _STEP.
    line = np.clip((y + _STEP // 2 - 1) // _STEP, 0, side * LINES)
    line_after = line[after]
    upper, lower = np.minimum(line, line_after), np.maximum(line, line_after)
    edge = np.flatnonzero(lower > upper)
    meets = (lower - upper)[edge]
    x0, y0 = x[edge], y[edge]
    dx, dy = x[after[edge]] - x0, y[after[edge]] - y0
    slope = (dx << 20) // dy
    key = (image[edge] * (side * LINES)) << 32

    # One row per crossing of an edge and a line.
    skipped = np.cumsum(meets) - meets
    at_line = np.arange(int(meets.sum()), dtype=np.int64) + np.repeat(upper[edge] - skipped, meets)
    height = at_line * _STEP + (_STEP // 2 - np.repeat(y0, meets))
    at = np.repeat(x0, meets) + ((np.repeat(slope, meets) * height + (1 << 19)) >> 20)
    np.clip(at, 0, side * PIXEL, out=at)

    # Sorted by image, line and position, with the direction in the lowest bit.
    keys = np.repeat(key + (dy > 0), meets) + (at_line << 32) + (at << 1)
    keys.sort()
    winding = np.cumsum(((keys & 1) << 1) - 1)
    inside = winding != 0
    enters = inside.copy()
    enters[1:] &= ~inside[:-1]
    opening, closing = keys[enters], keys[~inside]

    # A span [a, b) is [a, end of row) minus [b, end of row): two differences along the row, summed at the end.
    changes = np.zeros(images * side * (side + 2), dtype=np.int64)
    for bounds, sign in ((opening, 1), (closing, -1)):
        position = (bounds & 0xFFFFFFFF) >> 1
        cell = ((bounds >> 32) // LINES) * (side + 2) + position // PIXEL
        part = position % PIXEL
        np.add.at(changes, cell, sign * (PIXEL - part))
        np.add.at(changes, cell + 1, sign * part)
    filled: I64 = np.cumsum(changes.reshape(images, side, side + 2), axis=2)[:, :, :side]
    return filled
