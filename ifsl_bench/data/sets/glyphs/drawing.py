"""Images of letters in integer arithmetic, hence the same bytes on every machine.

Random numbers are counter-based: none depends on how many were drawn before. Outlines are filled in fixed point by
non-zero winding, with exact horizontal coverage on four lines per pixel row. :class:`GlyphStyle` has every number that
sets the difficulty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs.fonts import LetterOutline

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
_SPLITMIX_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SPLITMIX_SECOND_FACTOR = 0x94D049BB133111EB


def derive_key(*parts: str | int) -> int:
    """Return the 64-bit key of names and numbers: the first eight bytes of a SHA-256, big-endian."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def splitmix64(keys: UInt64Array, counters: UInt64Array) -> UInt64Array:
    """Return outputs of splitmix64; the arrays broadcast.

    Args:
        keys: States of the generator, uint64.
        counters: Numbers of the outputs after each state, from 0, uint64.
    """
    state = keys + (counters + np.uint64(1)) * np.uint64(_SPLITMIX_INCREMENT)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_SPLITMIX_FIRST_FACTOR)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SPLITMIX_SECOND_FACTOR)
    mixed: UInt64Array = state ^ (state >> np.uint64(31))
    return mixed


def draw_uniform_below(words: UInt64Array, bound: Int64Array) -> Int64Array:
    """Map uint64 words to 0 .. bound - 1, uniform up to a part in 2**32; int64 of the same shape.

    Args:
        words: Random words.
        bound: Below 2**31; broadcasts with the words.
    """
    high: Int64Array = (words >> np.uint64(32)).astype(np.int64)
    scaled: Int64Array = (high * bound) >> 32
    return scaled


def draw_uniform_between(words: UInt64Array, low: Int64Array | int, high: Int64Array | int) -> Int64Array:
    """Map uint64 words to low .. high, both included; int64 of the same shape.

    Args:
        words: Random words.
        low: The smallest number.
        high: The largest number; both broadcast with the words.
    """
    bound = np.asarray(high, dtype=np.int64) - np.asarray(low, dtype=np.int64) + 1
    value: Int64Array = low + draw_uniform_below(words, bound)
    return value


POSITION_UNITS_PER_PIXEL = 256  # positions are in 1/PIXEL of a pixel
LINES_PER_PIXEL = 4  # lines per pixel row
FULL_COVERAGE = POSITION_UNITS_PER_PIXEL * LINES_PER_PIXEL  # coverage of a pixel that lies inside
_LINE_DISTANCE = POSITION_UNITS_PER_PIXEL // LINES_PER_PIXEL


def compute_pixel_coverage(
    outlines: Sequence[LetterOutline], matrices: Int64Array, sizes: Int64Array, positions: Int64Array, side: int
) -> Int64Array:
    """Fill one outline per image.

    Args:
        outlines: N outlines.
        matrices: [N, 2, 2], linear maps, y upwards, in 2**-14.
        sizes: [N], larger sides of the mapped outlines' bounding boxes, in 1/256 pixel.
        positions: [N, 2], places of the boxes, x and y (downwards), from -256 (left or upper edge) to 256.
        side: Height and width of an image in pixels.

    Returns:
        The coverage [N, side, side], 0 .. FULL.
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
        room = side * POSITION_UNITS_PER_PIXEL - extent * sizes // larger
        start = (room * (256 + position)) >> 9
        scaled = (values - np.repeat(low, counts)) * np.repeat(sizes, counts) // np.repeat(larger, counts)
        placed.append(scaled + np.repeat(start, counts))
    after = np.concatenate([outline.next_point for outline in outlines]) + np.repeat(first, counts)
    image = np.repeat(np.arange(len(outlines), dtype=np.int64), counts)
    return _add_coverage_of_one_size(placed[0], placed[1], after, image, len(outlines), side)


def _add_coverage_of_one_size(
    x: Int64Array, y: Int64Array, after: Int64Array, image: Int64Array, images: int, side: int
) -> Int64Array:
    """Compute the coverage [images, side, side] of the polygons whose edges run from point i to point after[i]."""
    # An edge meets the lines whose height h has min(y) <= h < max(y); line k lies at (k + 1/2) _STEP.
    line = np.clip((y + _LINE_DISTANCE // 2 - 1) // _LINE_DISTANCE, 0, side * LINES_PER_PIXEL)
    line_after = line[after]
    upper, lower = np.minimum(line, line_after), np.maximum(line, line_after)
    edge = np.flatnonzero(lower > upper)
    meets = (lower - upper)[edge]
    x0, y0 = x[edge], y[edge]
    dx, dy = x[after[edge]] - x0, y[after[edge]] - y0
    slope = (dx << 20) // dy
    key = (image[edge] * (side * LINES_PER_PIXEL)) << 32

    # One row per crossing of an edge and a line.
    skipped = np.cumsum(meets) - meets
    at_line = np.arange(int(meets.sum()), dtype=np.int64) + np.repeat(upper[edge] - skipped, meets)
    height = at_line * _LINE_DISTANCE + (_LINE_DISTANCE // 2 - np.repeat(y0, meets))
    at = np.repeat(x0, meets) + ((np.repeat(slope, meets) * height + (1 << 19)) >> 20)
    np.clip(at, 0, side * POSITION_UNITS_PER_PIXEL, out=at)

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
        cell = ((bounds >> 32) // LINES_PER_PIXEL) * (side + 2) + position // POSITION_UNITS_PER_PIXEL
        part = position % POSITION_UNITS_PER_PIXEL
        np.add.at(changes, cell, sign * (POSITION_UNITS_PER_PIXEL - part))
        np.add.at(changes, cell + 1, sign * part)
    filled: Int64Array = np.cumsum(changes.reshape(images, side, side + 2), axis=2)[:, :, :side]
    return filled


IMAGE_SIDE = 32


@dataclass(frozen=True)
class GlyphStyle:
    """Ranges (least, greatest) and half-widths of what is drawn, uniformly, for each image."""

    size: tuple[int, int] = (13 * 256, 28 * 256)  # larger side of the letter, in 1/256 pixel
    position: int = 200  # greatest share of the room around the letter that it is moved by, in 1/256
    half_angle_tangent: int = 8627  # tan(7.5 degrees) in 1/65536: rotation within 15 degrees
    shear: int = 64  # greatest sideways shift per height, in 1/256
    stretch: tuple[int, int] = (205, 320)  # width against height, in 1/256
    contrast: tuple[int, int] = (50, 210)  # grey levels between letter and background
    gradient: int = 120  # greatest change of the background across the image, each axis, in 1/256 of the contrast
    noise: tuple[int, int] = (45, 165)  # standard deviation of a pixel's noise, in 1/256 of the contrast


GLYPH_STYLE = GlyphStyle()

# Order of the random words of an image; the noise has a counter of its own.
_FACE, _SIZE, _X, _Y, _ANGLE, _SHEAR, _STRETCH = range(7)
_CONTRAST, _LEVEL, _POLARITY, _SLOPE_X, _SLOPE_Y, _NOISE, _SEED = range(7, 14)

_UNITS = 1 << 10  # grey levels are computed in 1/_UNITS


def draw_images(keys: UInt64Array, outlines: Sequence[LetterOutline]) -> npt.NDArray[np.uint8]:
    """Draw images [N, 32, 32, 1] of a letter.

    Args:
        keys: [N], one for each image.
        outlines: Of the letter, one for each face.
    """
    words = splitmix64(keys[:, None], np.arange(_SEED + 1, dtype=np.uint64)[None, :])
    faces = draw_uniform_below(words[:, _FACE], np.array([len(outlines)], dtype=np.int64))
    sizes = draw_uniform_between(words[:, _SIZE], *GLYPH_STYLE.size)
    positions = draw_uniform_between(words[:, [_X, _Y]], -GLYPH_STYLE.position, GLYPH_STYLE.position)
    drawn = [outlines[face] for face in faces.tolist()]
    return _blend_letter_into_background(
        compute_pixel_coverage(drawn, _transformation_matrices(words), sizes, positions, IMAGE_SIDE), words
    )[..., None]


def _transformation_matrices(words: UInt64Array) -> Int64Array:
    """Return rotation x shear x stretch, [N, 2, 2] in 2**-14."""
    tangent = draw_uniform_between(words[:, _ANGLE], -GLYPH_STYLE.half_angle_tangent, GLYPH_STYLE.half_angle_tangent)
    shear = draw_uniform_between(words[:, _SHEAR], -GLYPH_STYLE.shear, GLYPH_STYLE.shear)
    stretch = draw_uniform_between(words[:, _STRETCH], *GLYPH_STYLE.stretch)
    # (1 - t^2, 2 t) / (1 + t^2): cosine and sine without a transcendental function.
    square, unit = tangent * tangent, 1 << 32
    cosine = ((unit - square) << 14) // (unit + square)
    sine = (tangent << 31) // (unit + square)
    rows = [
        (cosine * stretch) >> 8,
        (cosine * shear - (sine << 8)) >> 8,
        (sine * stretch) >> 8,
        (sine * shear + (cosine << 8)) >> 8,
    ]
    return np.stack(rows, axis=1).reshape(-1, 2, 2)


def _blend_letter_into_background(filled: Int64Array, words: UInt64Array) -> npt.NDArray[np.uint8]:
    """Return grey levels [N, 32, 32] of letters with coverage `filled`: background, contrast, polarity, noise."""
    contrast = draw_uniform_between(words[:, _CONTRAST], *GLYPH_STYLE.contrast)
    dark = draw_uniform_below(words[:, _LEVEL], 256 - contrast)
    bright_letter = draw_uniform_below(words[:, _POLARITY], np.full(len(words), 2)) == 1
    ground = np.where(bright_letter, dark, dark + contrast)
    letter = np.where(bright_letter, dark + contrast, dark)

    # The gradient runs over +-31 half pixels, so it changes the corners by at most half its sum.
    slopes = (
        draw_uniform_between(words[:, [_SLOPE_X, _SLOPE_Y]], -GLYPH_STYLE.gradient, GLYPH_STYLE.gradient)
        * contrast[:, None]
    )
    ramp = np.arange(IMAGE_SIDE, dtype=np.int64) * 2 - (IMAGE_SIDE - 1)
    across = slopes[:, :, None] * ramp * (_UNITS // 256) // (2 * (IMAGE_SIDE - 1))  # [N, 2, 32]
    level = (ground * _UNITS)[:, None, None] + across[:, 0, None, :] + across[:, 1, :, None]
    level += ((letter * _UNITS)[:, None, None] - level) * filled // FULL_COVERAGE

    # Four bytes sum to a bell of standard deviation 147.8; 443 / 65536 is its inverse. A word serves two pixels.
    deviation = draw_uniform_between(words[:, _NOISE], *GLYPH_STYLE.noise) * contrast  # 1/256 grey level
    sums = _sum_bytes_of_half_words(
        splitmix64(words[:, _SEED, None], np.arange(IMAGE_SIDE * IMAGE_SIDE // 2, dtype=np.uint64)[None, :])
    )
    noise = (sums - 510) * (deviation * 443 * (_UNITS // 256))[:, None] >> 16
    level += noise.reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
    grey: npt.NDArray[np.uint8] = np.clip((level + _UNITS // 2) // _UNITS, 0, 255).astype(np.uint8)
    return grey


def _sum_bytes_of_half_words(words: UInt64Array) -> Int64Array:
    """Sum of the low four bytes and of the high four of each word: [N, P] to [N, 2 P], low before high."""
    pairs = (words & np.uint64(0x00FF00FF00FF00FF)) + ((words >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    fours = (pairs & np.uint64(0x0000FFFF0000FFFF)) + ((pairs >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    both = np.stack([fours & np.uint64(0xFFFFFFFF), fours >> np.uint64(32)], axis=-1)
    return both.reshape(len(words), -1).astype(np.int64)
