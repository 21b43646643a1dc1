"""The choice of the data set's letters; `python -m tests.tools.derive_letters` writes letters.tsv anew.

A candidate is a letter or syllable of one of the eight scripts that is not composed: its Unicode name lacks WITH, it
has no decomposition, and at least one face draws it in one piece rather than from other glyphs (which drops the
syllables with an added dot).

Look-alikes are dropped over all scripts and sides. Each candidate is drawn upright in each of its faces, black on
white, in a box of 24 pixels, so that size does not count. Two drawings are alike when almost all ink of each lies
within a small distance of the other's, as they are or with one turned by 180 degrees: all but 2% within 1 pixel, or,
in the same face, all but 1% within the square root of 2 pixels. Two letters are look-alikes when any two of their
drawings are. Of look-alikes the first one stays, in this order: training scripts before validation before test, then
more faces, then the lower code point. Those that stay are compared once more, one of each two stretched, rotated or
sheared about as far as two images can differ in this, and the first one stays again.

Which letters are base classes, and which stay where a script has too many, is decided by a hash of the code point.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs import drawing, fonts
from ifsl_bench.data.sets.glyphs.dataset import SIDES, Letter

SCRIPT_STAGE = {
    "LATIN": "train",
    "GREEK": "train",
    "CYRILLIC": "train",
    "GEORGIAN": "val",
    "ARMENIAN": "test",
    "HEBREW": "test",
    "LAO": "test",
    "CANADIAN": "test",
}
STAGES = ("train", "val", "test")
BASE_CLASSES = 100
MOST_PER_SCRIPT = 60  # of validation and test

_SIDE = 28  # pixels of a clean drawing
_BOX = 24  # pixels of the letter in it, larger side
FACES = tuple(fonts.FONT_SHA256)


@dataclass(frozen=True)
class Rule:
    """Drawings are alike when at most `percent` of either's ink is farther than sqrt(reach) pixels from the other's."""

    reach: int
    percent: int
    same_face: bool


RULES = (Rule(1, 2, False), Rule(2, 1, True))

# Linear maps, row by row, in 2**-14.
Map = tuple[int, int, int, int]
UPRIGHT: Map = (16384, 0, 0, 16384)
TWISTS: tuple[Map, ...] = (
    (21299, 0, 0, 16384),  # 1.3 times as wide
    (12603, 0, 0, 16384),  # 1.3 times as narrow
    (16026, -3406, 3406, 16026),  # by 12 degrees
    (14849, -6924, 6924, 14849),  # by 25 degrees
    (16384, 3277, 0, 16384),  # sheared by 0.2
)


def derive() -> list[Letter]:
    """The letters of the data set, by side, then by code point."""
    letters = without_look_alikes(without_look_alikes(candidates(), [UPRIGHT]), TWISTS)
    chosen: list[Letter] = []
    for stage in STAGES:
        stage_letters = sorted(
            (letter for letter in letters if letter.class_side == stage), key=lambda letter: _rank(letter.codepoint)
        )
        if stage == "train":
            chosen += [_with_side(letter, "base") for letter in stage_letters[:BASE_CLASSES]]
            chosen += [_with_side(letter, "novel/train") for letter in stage_letters[BASE_CLASSES:]]
            continue
        for script in SCRIPT_STAGE:
            of_script = [letter for letter in stage_letters if letter.script == script]
            chosen += [_with_side(letter, f"novel/{stage}") for letter in of_script[:MOST_PER_SCRIPT]]
    return sorted(chosen, key=lambda letter: (SIDES.index(letter.class_side), letter.codepoint))


def components(face: str, codepoint: int) -> int:
    """The number of simple glyphs that the face builds the letter from: 1 for a letter drawn by itself."""

    def count(name: str) -> int:
        glyph = glyphs[name]
        return sum(count(part.glyphName) for part in glyph.components) if glyph.isComposite() else 1

    glyphs = fonts.open_font_face(face)["glyf"]
    return count(fonts.open_font_face(face).getBestCmap()[codepoint])


def candidates() -> list[Letter]:
    """Uncomposed letters in the order in which look-alikes stay; `side` holds the stage here."""
    letters = []
    for codepoint in sorted({codepoint for face in FACES for codepoint in fonts.open_font_face(face).getBestCmap()}):
        character = chr(codepoint)
        name = unicodedata.name(character, "")
        script = name.split(" ")[0]
        if script not in SCRIPT_STAGE or unicodedata.category(character) not in ("Lu", "Ll", "Lo"):
            continue
        words = name.split(" ")
        if "WITH" in words or unicodedata.decomposition(character):
            continue
        if not {"LETTER", "LIGATURE", "SYLLABICS"} & set(words):
            continue
        has = tuple(face for face in FACES if codepoint in fonts.open_font_face(face).getBestCmap())
        if min(components(face, codepoint) for face in has) > 1:
            continue
        letters.append(Letter(codepoint, name, script, SCRIPT_STAGE[script], has))
    return sorted(
        letters, key=lambda letter: (STAGES.index(letter.class_side), -len(letter.font_faces), letter.codepoint)
    )


def without_look_alikes(letters: list[Letter], maps: Sequence[Map]) -> list[Letter]:
    """The letters that are not like one that stays before them."""
    alike = look_alikes(letters, maps)
    numbers: list[int] = []
    for number in range(len(letters)):
        if not alike[number, numbers].any():
            numbers.append(number)
    return [letters[number] for number in numbers]


def look_alikes(letters: list[Letter], maps: Sequence[Map]) -> npt.NDArray[np.bool_]:
    """Which letters look alike by any of the rules, either one drawn through any of the maps: symmetric [L, L]."""
    owner = np.array([number for number, letter in enumerate(letters) for _ in letter.font_faces])
    face = np.array([FACES.index(name) for letter in letters for name in letter.font_faces])
    plain = _drawings(letters, UPRIGHT)
    groups = [np.flatnonzero(face == number) for number in np.unique(face)]
    alike = np.zeros((len(letters), len(letters)), dtype=bool)
    for through in maps:
        mapped = _drawings(letters, through)
        for drawings in (mapped, mapped[:, ::-1, ::-1]):
            for rule in RULES:
                for rows in groups if rule.same_face else [np.arange(len(owner))]:
                    first, second = _alike(drawings[rows], plain[rows], rule, symmetric=through == UPRIGHT)
                    alike[owner[rows[first]], owner[rows[second]]] = True
    result: npt.NDArray[np.bool_] = alike | alike.T
    return result


def _alike(
    left: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_], rule: Rule, symmetric: bool
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The pairs (rows of left, rows of right) that are alike; drawings [n, 28, 28].

    `symmetric` says that left and right are the same or turned: one of (i, j) and (j, i) may then be left out.
    """
    # Sums of at most 28 x 28 ones: exact in float32, whatever the order.
    left_flat, left_near = _flat(left), _flat(_grow(left, rule.reach))
    right_flat, right_near = _flat(right), _flat(_grow(right, rule.reach))
    left_enough, right_enough = (
        area - area * rule.percent // 100 for area in (left_flat.sum(axis=1), right_flat.sum(axis=1))
    )
    pairs = []
    for start in range(0, len(left), 512):
        rows = slice(start, start + 512)
        first = start if symmetric else 0
        within = left_flat[rows] @ right_near[first:].T >= left_enough[rows, None]
        within &= left_near[rows] @ right_flat[first:].T >= right_enough[first:]
        row, column = np.nonzero(within)
        pairs.append((row + start, column + first))
    return np.concatenate([row for row, _ in pairs]), np.concatenate([column for _, column in pairs])


def _flat(drawings: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    return drawings.reshape(len(drawings), -1).astype(np.float32)


def _drawings(letters: list[Letter], through: Map) -> npt.NDArray[np.bool_]:
    """Clean drawings of all letters in all their faces, [n, 28, 28]: where at least half of a pixel is inked."""
    outlines = [fonts.make_letter_outline(face, letter.codepoint) for letter in letters for face in letter.font_faces]
    blocks = []
    for start in range(0, len(outlines), 256):
        block = outlines[start : start + 256]
        matrices = np.tile(np.array(through, dtype=np.int64).reshape(2, 2), (len(block), 1, 1))
        sizes = np.full(len(block), _BOX * drawing.POSITION_UNITS_PER_PIXEL, dtype=np.int64)
        middle = np.zeros((len(block), 2), dtype=np.int64)
        blocks.append(
            drawing.compute_pixel_coverage(block, matrices, sizes, middle, _SIDE) * 2 >= drawing.FULL_COVERAGE
        )
    return np.concatenate(blocks)


def _grow(ink: npt.NDArray[np.bool_], reach: int) -> npt.NDArray[np.bool_]:
    """All pixels within sqrt(reach) of ink [n, side, side]; nothing reaches the edge, since the box leaves room."""
    near = ink.copy()
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            if 0 < down * down + right * right <= reach:
                near |= np.roll(ink, (down, right), axis=(1, 2))
    return near


def _rank(codepoint: int) -> str:
    return hashlib.sha256(f"glyphs {codepoint:04X}".encode()).hexdigest()


def _with_side(letter: Letter, side: str) -> Letter:
    return Letter(letter.codepoint, letter.name, letter.script, side, letter.font_faces)


def table(letters: list[Letter]) -> str:
    """The text of letters.tsv; the last column has a 1 for each face, in the header's order, that has the letter."""
    lines = ["\t".join(["codepoint", "character", "name", "script", "side", " ".join(FACES)])]
    for letter in letters:
        has = "".join("1" if face in letter.font_faces else "0" for face in FACES)
        code = f"{letter.codepoint:04X}"
        lines.append("\t".join([code, chr(letter.codepoint), letter.name, letter.script, letter.class_side, has]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    target = Path(fonts.__file__).with_name("letters.tsv")
    target.write_text(table(derive()), encoding="utf-8", newline="\n")
    print(f"wrote {target}")
