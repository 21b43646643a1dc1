"""The embedded data set `glyphs`: letters rendered from the twelve DejaVu faces, a class per letter.

The split is by script: Latin, Greek and Cyrillic train, Georgian validates, Armenian, Hebrew, Lao and Canadian
Aboriginal test. Every image is a function of (recipe, seed, letter, index) in integer arithmetic, hence the same bytes
on every machine. `tests/tools/derive_letters.py` says how the letters were chosen, `variation` how an image varies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs import fonts, rng, variation

IMAGE_SHAPE = (32, 32, 1)
SEED = 0  # of the data set; another seed gives other images of the same letters

# Raise it with every change of the code that changes a pixel.
VERSION = 1

SIDES = ("base", "novel/train", "novel/val", "novel/test")
# Images per class. The base pools follow each other in index, so no image is in two of them.
PER_CLASS = {"base/train": 100, "base/val": 30, "base/test": 30, "novel/train": 80, "novel/val": 60, "novel/test": 60}

_LETTERS = Path(__file__).with_name("letters.tsv")
_BLOCK = 128  # images drawn at once; any other number gives the same bytes


@dataclass(frozen=True)
class Letter:
    """A class. `side` is one of SIDES; `faces` are the faces that have the letter (file names without .ttf)."""

    codepoint: int
    name: str
    script: str
    side: str
    faces: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the class in tables, such as LATIN SMALL LETTER A (U+0061)."""
        return f"{self.name} (U+{self.codepoint:04X})"


@dataclass(frozen=True)
class GlyphPool:
    """Class c is letters[c]; its images have the indices first .. first + per_class - 1."""

    name: str
    letters: tuple[Letter, ...]
    first: int
    per_class: int


@cache
def letters() -> tuple[Letter, ...]:
    """All letters, by side, then by code point."""
    head, *rows = _LETTERS.read_text(encoding="utf-8").splitlines()
    faces = tuple(head.split("\t")[-1].split(" "))
    alphabet = []
    for row in rows:
        codepoint, _, name, script, side, has = row.split("\t")
        chosen = tuple(face for face, mark in zip(faces, has, strict=True) if mark == "1")
        alphabet.append(Letter(int(codepoint, 16), name, script, side, chosen))
    return tuple(alphabet)


@cache
def recipe() -> str:
    """SHA-256, in hex, of all that determines the images: code version, seed, style, letters, font files."""
    parts = {
        "version": VERSION,
        "seed": SEED,
        "style": asdict(variation.STYLE),
        "letters": [[letter.codepoint, letter.side, letter.faces] for letter in letters()],
        "fonts": fonts.FONT_SHA256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def pools() -> dict[str, GlyphPool]:
    """The six pools by name."""
    by_side = {side: tuple(letter for letter in letters() if letter.side == side) for side in SIDES}
    by_name = {}
    first = 0
    for name, per_class in PER_CLASS.items():
        side = "base" if name.startswith("base/") else name
        by_name[name] = GlyphPool(name, by_side[side], first if side == "base" else 0, per_class)
        first += per_class
    return by_name


def render(letters: Sequence[Letter], indices: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint8]:
    """Image number indices[i] of letters[i], for N letters: [N, 32, 32, 1].

    Each image depends on its letter, its index, the seed and the recipe alone. Raises FontError when a font file is
    missing or is not the recipe's.
    """
    distinct = set(letters)
    key = {letter: rng.key_of(recipe(), seed, letter.codepoint) for letter in distinct}
    outlines = {letter: [fonts.outline(face, letter.codepoint) for face in letter.faces] for letter in distinct}
    images = np.empty((len(letters), *IMAGE_SHAPE), dtype=np.uint8)
    for start in range(0, len(letters), _BLOCK):
        chosen = letters[start : start + _BLOCK]
        counters = np.asarray(indices[start : start + _BLOCK]).astype(np.uint64)
        keys = rng.mix(np.array([key[letter] for letter in chosen], dtype=np.uint64), counters)
        images[start : start + len(chosen)] = variation.draw(keys, [outlines[letter] for letter in chosen])
    return images


def fill(pool: GlyphPool, out: npt.NDArray[np.uint8], advance: Callable[[int], None]) -> None:
    """Write the pool's images into out [classes x per_class, 32, 32, 1], by class, then by index.

    advance(k) is called after k more images are written. One process does, since a core draws thousands a second.
    Raises FontError as `render` does.
    """
    indices = np.arange(pool.first, pool.first + pool.per_class, dtype=np.int64)
    for label, letter in enumerate(pool.letters):
        start = label * pool.per_class
        out[start : start + pool.per_class] = render([letter] * pool.per_class, indices, SEED)
        advance(pool.per_class)
