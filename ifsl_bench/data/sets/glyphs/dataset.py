"""The embedded data set `glyphs`: letters rendered from the twelve DejaVu faces, a class per letter.

The split is by script: Latin, Greek and Cyrillic train, Georgian validates, Armenian, Hebrew, Lao and Canadian
Aboriginal test. Every image is a function of (recipe, seed, letter, index) in integer arithmetic, hence the same bytes
on every machine. `tests/tools/derive_letters.py` says how the letters were chosen, `drawing` how an image varies.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.sets.glyphs import drawing, fonts
from ifsl_bench.data.source import BuildContext, DatasetSource, PoolCounts, PoolSize

IMAGE_SHAPE = (32, 32, 1)
GLYPH_SEED = 0  # of the data set; another seed gives other images of the same letters

# Raise it with every change of the code that changes a pixel.
CODE_VERSION = 1

SIDES = ("base", "novel/train", "novel/val", "novel/test")
# Pool -> index of the first image of each class, and images per class. No image is in two of the base pools.
FIRST_AND_COUNT_OF_POOL = {
    "base/train": (0, 100),
    "base/val": (100, 30),
    "base/test": (130, 30),
    "novel/train": (0, 80),
    "novel/val": (0, 60),
    "novel/test": (0, 60),
}

_LETTERS_FILE = Path(__file__).with_name("letters.tsv")


@dataclass(frozen=True)
class Letter:
    """A class. `side` is one of SIDES; `faces` are the faces that have the letter (file names without .ttf)."""

    codepoint: int
    name: str
    script: str
    class_side: str
    font_faces: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the class in tables, such as LATIN SMALL LETTER A (U+0061)."""
        return f"{self.name} (U+{self.codepoint:04X})"


@cache
def read_all_letters() -> tuple[Letter, ...]:
    """Return all letters, by side, then by code point."""
    head, *rows = _LETTERS_FILE.read_text(encoding="utf-8").splitlines()
    faces = tuple(head.split("\t")[-1].split(" "))
    alphabet = []
    for row in rows:
        codepoint, _, name, script, side, has = row.split("\t")
        chosen = tuple(face for face, mark in zip(faces, has, strict=True) if mark == "1")
        alphabet.append(Letter(int(codepoint, 16), name, script, side, chosen))
    return tuple(alphabet)


def select_letters_of_pool(pool: str) -> list[Letter]:
    """Return the classes of a pool, in order."""
    side = "base" if pool.startswith("base/") else pool
    return [letter for letter in read_all_letters() if letter.class_side == side]


@cache
def compute_recipe_digest() -> str:
    """Return the SHA-256, in hex, of all that determines the images: code version, seed, style, letters, font files."""
    parts = {
        "version": CODE_VERSION,
        "seed": GLYPH_SEED,
        "style": asdict(drawing.GLYPH_STYLE),
        "letters": [[letter.codepoint, letter.class_side, letter.font_faces] for letter in read_all_letters()],
        "fonts": fonts.FONT_SHA256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def render_images(letter: Letter, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return images of a letter, [N, 32, 32, 1]; each depends on letter, index and recipe alone.

    Args:
        letter: The class.
        indices: [N].

    Raises:
        UserError: A font file is missing, or is not the recipe's.
    """
    key = np.array([drawing.derive_key(compute_recipe_digest(), GLYPH_SEED, letter.codepoint)], dtype=np.uint64)
    outlines = [fonts.make_letter_outline(face, letter.codepoint) for face in letter.font_faces]
    return drawing.draw_images(drawing.splitmix64(key, indices.astype(np.uint64)), outlines)


class Glyphs(DatasetSource):
    """Letters of eight scripts in twelve DejaVu faces, 32x32, one channel; no script on two sides."""

    name = "glyphs"
    summary: ClassVar[str] = "letters rendered from the DejaVu faces, 32x32; embedded, no download"
    needs_source: ClassVar[bool] = False

    def recipe(self) -> str:
        return compute_recipe_digest()

    def expected_shape_and_counts(self) -> tuple[tuple[int, ...], PoolCounts]:
        counts = {
            pool: PoolSize(len(select_letters_of_pool(pool)), each * len(select_letters_of_pool(pool)))
            for pool, (_, each) in FIRST_AND_COUNT_OF_POOL.items()
        }
        return IMAGE_SHAPE, counts

    def build(self, context: BuildContext) -> None:
        total = sum(count.n_images for count in self.expected_shape_and_counts()[1].values())
        with context.reporter.report_stage("rendering glyphs", total) as stage:
            for pool, (first, each) in FIRST_AND_COUNT_OF_POOL.items():
                alphabet = select_letters_of_pool(pool)
                labels = np.repeat(np.arange(len(alphabet)), each)
                with context.writer.write_pool(
                    pool, labels, tuple(letter.label for letter in alphabet), IMAGE_SHAPE
                ) as images:
                    for label, letter in enumerate(alphabet):
                        images[label * each : (label + 1) * each] = render_images(
                            letter, np.arange(first, first + each)
                        )
                        stage.advance(each)
