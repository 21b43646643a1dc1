"""The images of the glyphs: the same bytes however they are asked for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from ifsl_bench.data.sets import glyphs
from ifsl_bench.data.sets.glyphs import GlyphPool, fonts, style

LETTERS = glyphs.letters()
SAMPLE = LETTERS[::7]

# Of `sample()`. A change of it is a change of the data set: every stored result stands on these bytes.
SAMPLE_SHA256 = "a01bdedbe29f2b163753f559ccc9d5b6b3316c933421dbda196b16032743360f"


def sample() -> np.ndarray:
    letters = [letter for letter in SAMPLE for _ in range(3)]
    return glyphs.render(letters, np.tile(np.array([0, 7, 133]), len(SAMPLE)), 0)


def small_pool() -> GlyphPool:
    return GlyphPool("small", LETTERS[::150], first=40, per_class=300)


def filled(pool: GlyphPool) -> tuple[np.ndarray, list[int]]:
    out = np.zeros((len(pool.letters) * pool.per_class, 32, 32, 1), np.uint8)
    steps: list[int] = []
    glyphs.fill(pool, out, steps.append)
    return out, steps


def test_bytes_are_the_known_ones() -> None:
    assert hashlib.sha256(sample().tobytes()).hexdigest() == SAMPLE_SHA256


def test_batches_do_not_matter() -> None:
    letters = [letter for letter in SAMPLE for _ in range(4)]
    indices = np.tile(np.arange(4), len(SAMPLE))
    whole = glyphs.render(letters, indices, 3)
    assert whole.shape == (len(letters), 32, 32, 1)
    assert whole.dtype == np.uint8
    order = np.random.default_rng(0).permutation(len(letters))
    mixed = glyphs.render([letters[number] for number in order], indices[order], 3)
    np.testing.assert_array_equal(mixed, whole[order])
    for number in order[:20]:
        alone = glyphs.render([letters[number]], indices[number : number + 1], 3)
        np.testing.assert_array_equal(alone[0], whole[number])


def test_seed_letter_and_index_matter() -> None:
    one, two = LETTERS[:2]
    images = [
        glyphs.render([letter], np.array([index]), seed)
        for letter, index, seed in ((one, 0, 0), (one, 1, 0), (one, 0, 1), (two, 0, 0))
    ]
    assert len({image.tobytes() for image in images}) == len(images)


def test_pool_is_sorted_by_class_then_index() -> None:
    pool = small_pool()
    out, steps = filled(pool)
    assert sum(steps) == len(out)
    assert min(steps) > 0
    for row in (0, 299, 300, len(out) - 1):
        letter, index = pool.letters[row // 300], 40 + row % 300
        np.testing.assert_array_equal(out[row], glyphs.render([letter], np.array([index]), glyphs.SEED)[0])


PROCESS = """
import hashlib, sys
import numpy as np
from ifsl_bench.data.sets import glyphs

pool = glyphs.GlyphPool("small", glyphs.letters()[::150], 40, 300)
out = np.zeros((len(pool.letters) * 300, 32, 32, 1), np.uint8)
glyphs.fill(pool, out, lambda count: None)
assert "torch" not in sys.modules
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_another_process_draws_the_same_bytes() -> None:
    # The path is passed on, since the package may come from the working directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == hashlib.sha256(filled(small_pool())[0].tobytes()).hexdigest()


def test_every_letter_shows_in_every_face() -> None:
    """No empty image, and none that is a missing letter's box: each face's image differs from the other letters'."""
    letters = [letter for letter in LETTERS for _ in range(6)]
    images = glyphs.render(letters, np.tile(np.arange(6), len(LETTERS)), 0).astype(np.int64)
    spread = images.max(axis=(1, 2, 3)) - images.min(axis=(1, 2, 3))
    assert spread.min() >= style.STYLE.contrast[0] // 2
    assert len({image.tobytes() for image in images}) == len(images)


def test_letter_is_inside_and_covers_enough() -> None:
    keys = np.arange(1, 1 + len(LETTERS), dtype=np.uint64)
    quiet = style.Style(contrast=(200, 200), gradient=0, noise=(0, 0))
    faces = [[fonts.outline(face, letter.codepoint) for face in letter.faces] for letter in LETTERS]
    images = style.draw(keys, faces, quiet)[..., 0].astype(np.int64)
    ground = np.where(np.abs(images[:, :1, :1] - images).max(axis=(1, 2)) > 0, images[:, 0, 0], -1)
    assert (ground >= 0).all()  # two levels at least
    corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    ink = np.abs(images - np.median(corners, axis=1)[:, None, None]) > 100
    assert ink.any(axis=2).sum(axis=1).max() <= 30
    share = ink.mean(axis=(1, 2))
    assert share.min() > 0.015
    assert share.max() < 0.9


def test_recipe_follows_what_determines_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    before = glyphs.recipe()
    assert len(before) == 64
    monkeypatch.setattr(style, "STYLE", style.Style(shear=7))
    glyphs.recipe.cache_clear()
    try:
        assert glyphs.recipe() != before
    finally:
        monkeypatch.undo()
        glyphs.recipe.cache_clear()
    assert glyphs.recipe() == before
