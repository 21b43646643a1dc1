"""The variation of a letter's images: every number that sets the difficulty, and the drawing from these numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs import raster, rng
from ifsl_bench.data.sets.glyphs.fonts import Outline

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

SIDE = 32


@dataclass(frozen=True)
class Style:
    """Ranges (least, greatest) and half-widths of what is drawn, uniformly, for each image."""

    size: tuple[int, int] = (13 * 256, 28 * 256)  # larger side of the letter, in 1/256 pixel
    position: int = 200  # greatest share of the room around the letter that it is moved by, in 1/256
    half_angle_tangent: int = 8627  # tan(7.5 degrees) in 1/65536: rotation within 15 degrees
    shear: int = 64  # greatest sideways shift per height, in 1/256
    stretch: tuple[int, int] = (205, 320)  # width against height, in 1/256
    contrast: tuple[int, int] = (50, 210)  # grey levels between letter and background
    gradient: int = 120  # greatest change of the background across the image, each axis, in 1/256 of the contrast
    noise: tuple[int, int] = (45, 165)  # standard deviation of a pixel's noise, in 1/256 of the contrast


STYLE = Style()

# Order of the random words of an image; the noise has a counter of its own.
_FACE, _SIZE, _X, _Y, _ANGLE, _SHEAR, _STRETCH = range(7)
_CONTRAST, _LEVEL, _POLARITY, _SLOPE_X, _SLOPE_Y, _NOISE, _SEED = range(7, 14)

_UNITS = 1 << 10  # grey levels are computed in 1/_UNITS


def draw(keys: U64, outlines: Sequence[Outline]) -> npt.NDArray[np.uint8]:
    """The images [N, 32, 32, 1], with the keys [N], of a letter that has these outlines, one for each face."""
    words = rng.mix(keys[:, None], np.arange(_SEED + 1, dtype=np.uint64)[None, :])
    faces = rng.below(words[:, _FACE], np.array([len(outlines)], dtype=np.int64))
    sizes = rng.between(words[:, _SIZE], *STYLE.size)
    positions = rng.between(words[:, [_X, _Y]], -STYLE.position, STYLE.position)
    drawn = [outlines[face] for face in faces.tolist()]
    return _paint(raster.coverage(drawn, _matrices(words), sizes, positions, SIDE), words)[..., None]


def _matrices(words: U64) -> I64:
    """Rotation x shear x stretch, [N, 2, 2] in 2**-14."""
    tangent = rng.between(words[:, _ANGLE], -STYLE.half_angle_tangent, STYLE.half_angle_tangent)
    shear = rng.between(words[:, _SHEAR], -STYLE.shear, STYLE.shear)
    stretch = rng.between(words[:, _STRETCH], *STYLE.stretch)
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


def _paint(filled: I64, words: U64) -> npt.NDArray[np.uint8]:
    """Grey levels [N, 32, 32] of letters with the coverage `filled`: background gradient, contrast, polarity, noise."""
    contrast = rng.between(words[:, _CONTRAST], *STYLE.contrast)
    dark = rng.below(words[:, _LEVEL], 256 - contrast)
    bright_letter = rng.below(words[:, _POLARITY], np.full(len(words), 2)) == 1
    ground = np.where(bright_letter, dark, dark + contrast)
    letter = np.where(bright_letter, dark + contrast, dark)

    # The gradient runs over +-31 half pixels, so it changes the corners by at most half its sum.
    slopes = rng.between(words[:, [_SLOPE_X, _SLOPE_Y]], -STYLE.gradient, STYLE.gradient) * contrast[:, None]
    ramp = np.arange(SIDE, dtype=np.int64) * 2 - (SIDE - 1)
    across = slopes[:, :, None] * ramp * (_UNITS // 256) // (2 * (SIDE - 1))  # [N, 2, 32]
    level = (ground * _UNITS)[:, None, None] + across[:, 0, None, :] + across[:, 1, :, None]
    level += ((letter * _UNITS)[:, None, None] - level) * filled // raster.FULL

    # Four bytes sum to a bell of standard deviation 147.8; 443 / 65536 is its inverse. A word serves two pixels.
    deviation = rng.between(words[:, _NOISE], *STYLE.noise) * contrast  # 1/256 grey level
    sums = _byte_sums(rng.mix(words[:, _SEED, None], np.arange(SIDE * SIDE // 2, dtype=np.uint64)[None, :]))
    noise = (sums - 510) * (deviation * 443 * (_UNITS // 256))[:, None] >> 16
    level += noise.reshape(-1, SIDE, SIDE)
    grey: npt.NDArray[np.uint8] = np.clip((level + _UNITS // 2) // _UNITS, 0, 255).astype(np.uint8)
    return grey


def _byte_sums(words: U64) -> I64:
    """Sum of the low four bytes and of the high four of each word: [N, P] to [N, 2 P], low before high."""
    pairs = (words & np.uint64(0x00FF00FF00FF00FF)) + ((words >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    fours = (pairs & np.uint64(0x0000FFFF0000FFFF)) + ((pairs >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    both = np.stack([fours & np.uint64(0xFFFFFFFF), fours >> np.uint64(32)], axis=-1)
    return both.reshape(len(words), -1).astype(np.int64)
