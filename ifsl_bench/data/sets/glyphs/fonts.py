"""Outlines of letters, unhinted and exact in integers, from the DejaVu files that matplotlib ships."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from fontTools.ttLib import TTFont

Int64Array = npt.NDArray[np.int64]

# Coordinates are font units times UNIT: implied points (halves) and the points of a quadratic curve cut into up to
# eight pieces (64ths) are then integers.
SUBUNITS_PER_FONT_UNIT = 128
_CURVE_PIECE_COUNTS = (1, 2, 4, 8)

FONT_SHA256 = {
    "DejaVuSans": "3fdf69cabf06049ea70a00b5919340e2ce1e6d02b0cc3c4b44fb6801bd1e0d22",
    "DejaVuSans-Bold": "b184b89e3c1075f22f6b71575b6fc20d4972b3cfd3b23322ca6fd596dcaef167",
    "DejaVuSans-Oblique": "ccdf74b350f11fd3dd5774de50e5e6346a1a5da1f5b7d5fb83590665e97a5213",
    "DejaVuSans-BoldOblique": "6edf0283160186af451cbee71e7b845f2e4cabf264bb992ce668c83c25465e6f",
    "DejaVuSansMono": "602ec86b8948cfcd956482fe64f94c36c867770149ef2f791d4613f443bcecb3",
    "DejaVuSansMono-Bold": "baada9a5172fe20886251aff0433fc38461912d5daf07287e7bee56620a8da96",
    "DejaVuSansMono-Oblique": "28052813f7a709fc89f52d192dc995ef4f0fdc5c3d7b73a49d6849b1916d0cd0",
    "DejaVuSansMono-BoldOblique": "a69081c15c76c827e0a27a5a7f5c74b6135c843499955495ffa8c20d3a98288b",
    "DejaVuSerif": "107244956e9962b9e96faccdc551825e0ae0898ae13737133e1b921a2fd35ffa",
    "DejaVuSerif-Bold": "c3753f2ed6bc673f15846dc45addbeb3b9c872f32fb18fd53a21f1bef1ed7676",
    "DejaVuSerif-Italic": "3e7994fbc54fa10ce3352a42d548fadd7d9cadb69cb1109bc9d960f6dac57f04",
    "DejaVuSerif-BoldItalic": "d93efec7a9d2e826768d1a2ee95b95870e15e29599a84f3484af1de1cec2e181",
}


@dataclass(frozen=True)
class LetterOutline:
    """Closed polygons: point i (x [M], y [M], in 1/UNIT font units, y upwards) is joined to point `after[i]`."""

    x: Int64Array
    y: Int64Array
    next_point: Int64Array


def font_directory() -> Path:
    """Return the directory of the font files in this installation of matplotlib."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def open_font_face(face: str) -> TTFont:
    """Open the font of a face; raise UserError if its file is missing or has another SHA-256."""
    from fontTools.ttLib import TTFont

    path = font_directory() / f"{face}.ttf"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"font file {path} cannot be read ({error.strerror}); reinstall matplotlib") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != FONT_SHA256[face]:
        raise UserError(
            f"font file {path} has SHA-256 {digest}, but glyphs are rendered from {FONT_SHA256[face]}: "
            "its images would not be comparable with anybody's; install a matplotlib with the original fonts"
        )
    return TTFont(BytesIO(content), lazy=True)


@cache
def make_letter_outline(face: str, codepoint: int) -> LetterOutline:
    """Return a letter's outline, with curves cut into lines.

    Args:
        face: Name of the font file without its suffix.
        codepoint: Of the letter; the face must have it.
    """
    font = open_font_face(face)
    contours = _resolve_contours(font["glyf"], font.getBestCmap()[codepoint])
    points = np.concatenate([xy for xy, _ in contours])
    extent = int((points.max(axis=0) - points.min(axis=0)).max())
    polygons = [_flatten_curves(xy, on_curve, extent) for xy, on_curve in contours]
    after, first = [], 0
    for polygon in polygons:
        after.append(first + np.roll(np.arange(len(polygon)), -1))
        first += len(polygon)
    joined = np.concatenate(polygons)
    return LetterOutline(joined[:, 0].copy(), joined[:, 1].copy(), np.concatenate(after))


def _resolve_contours(glyphs: Any, name: str) -> list[tuple[Int64Array, npt.NDArray[np.bool_]]]:
    """Return the glyph's contours, composites resolved: (points [M, 2] in 1/UNIT font units, on the curve [M])."""
    coordinates, ends, flags = glyphs[name].getCoordinates(glyphs)
    points = np.floor(np.array(list(coordinates), np.float64) * SUBUNITS_PER_FONT_UNIT + 0.5).astype(np.int64)
    on_curve = (np.array(list(flags), np.int64) & 1).astype(bool)
    cuts = np.array(ends, np.int64)[:-1] + 1
    return list(zip(np.split(points, cuts), np.split(on_curve, cuts), strict=True))


def _flatten_curves(points: Int64Array, on_curve: npt.NDArray[np.bool_], extent: int) -> Int64Array:
    """Return a TrueType contour as a polygon [M, 2]; chords stray less than 1/600 of `extent` from the curve."""
    points, on_curve = _rotate_to_start_on_curve(points, on_curve)
    following, on_following = np.roll(points, -1, axis=0), np.roll(on_curve, -1)
    corners: list[Int64Array] = []
    controls: list[Int64Array | None] = []  # the control point between a corner and the next, if any
    for here, on_here, there, on_there in zip(points, on_curve, following, on_following, strict=True):
        if on_here:
            corners.append(here)
            controls.append(None)
        else:
            controls[-1] = here
            if not on_there:
                corners.append((here + there) // 2)
                controls.append(None)
    pieces: list[Int64Array] = []
    for number, (start, control) in enumerate(zip(corners, controls, strict=True)):
        stop = corners[(number + 1) % len(corners)]
        if control is None:
            pieces.append(start[None])
            continue
        bend = int(np.abs(start - 2 * control + stop).max())
        count = next((n for n in _CURVE_PIECE_COUNTS if bend * 150 <= extent * n * n), _CURVE_PIECE_COUNTS[-1])
        step = np.arange(count, dtype=np.int64)[:, None]
        back = count - step
        pieces.append((back * back * start + 2 * back * step * control + step * step * stop) // (count * count))
    return np.concatenate(pieces)


def _rotate_to_start_on_curve(
    points: Int64Array, on_curve: npt.NDArray[np.bool_]
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return the same contour, begun at a point on the curve (an implied one where all points are controls)."""
    if on_curve.any():
        first = int(np.argmax(on_curve))
        return np.roll(points, -first, axis=0), np.roll(on_curve, -first)
    implied = (points[-1:] + points[:1]) // 2
    return np.concatenate([implied, points]), np.concatenate([np.array([True]), on_curve])
