"""The letters: the same bytes however they are asked for; how they are drawn, against something independent."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.data.sets.glyphs import dataset as glyphs
from ifsl_bench.data.sets.glyphs import drawing, fonts
from ifsl_bench.data.sets.glyphs.fonts import LetterOutline
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import spoil
from tests.tools import derive_letters as derive

LETTERS = glyphs.read_all_letters()
SAMPLE = LETTERS[::7]

# Of `sample()`. A change of it is a change of the data set: every stored result stands on these bytes.
SAMPLE_SHA256 = "a01bdedbe29f2b163753f559ccc9d5b6b3316c933421dbda196b16032743360f"


def sample() -> np.ndarray:
    return np.concatenate([glyphs.render_images(letter, np.array([0, 7, 133])) for letter in SAMPLE])


def test_bytes_are_the_known_ones() -> None:
    assert hashlib.sha256(sample().tobytes()).hexdigest() == SAMPLE_SHA256


def test_batches_do_not_matter() -> None:
    order = np.random.default_rng(0).permutation(40)
    for letter in SAMPLE[:5]:
        whole = glyphs.render_images(letter, np.arange(40))
        assert whole.shape == (40, 32, 32, 1)
        assert whole.dtype == np.uint8
        np.testing.assert_array_equal(glyphs.render_images(letter, order), whole[order])
        np.testing.assert_array_equal(glyphs.render_images(letter, order[:1]), whole[order[:1]])


@pytest.mark.slow("all letters are rendered")
def test_every_letter_shows_in_every_face() -> None:
    """No empty image, and none that is a missing letter's box: each face's image differs from the other letters'."""
    images = np.concatenate([glyphs.render_images(letter, np.arange(6)) for letter in LETTERS]).astype(np.int64)
    spread = images.max(axis=(1, 2, 3)) - images.min(axis=(1, 2, 3))
    assert spread.min() >= drawing.GLYPH_STYLE.contrast[0] // 2
    assert len({image.tobytes() for image in images}) == len(images)


def test_recipe_follows_what_determines_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    before = glyphs.compute_recipe_digest()
    assert len(before) == 64
    monkeypatch.setattr(drawing, "GLYPH_STYLE", drawing.GlyphStyle(shear=7))
    glyphs.compute_recipe_digest.cache_clear()
    try:
        assert glyphs.compute_recipe_digest() != before
    finally:
        monkeypatch.undo()
        glyphs.compute_recipe_digest.cache_clear()
    assert glyphs.compute_recipe_digest() == before


IDENTITY = np.array([[[1 << 14, 0], [0, 1 << 14]]])
CENTRE = np.zeros((1, 2), np.int64)


def square(low: int, high: int) -> list[tuple[int, int]]:
    return [(low, low), (high, low), (high, high), (low, high)]


def fill(outline: LetterOutline, size: int, side: int) -> np.ndarray:
    sizes = np.array([size * drawing.POSITION_UNITS_PER_PIXEL])
    return drawing.compute_pixel_coverage([outline], IDENTITY, sizes, CENTRE, side)[0]


@pytest.mark.parametrize("face", ["DejaVuSans", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSerif-Italic"])
def test_letters_agree_with_freetype_and_agg(face: str) -> None:
    """FreeType reads the outline and Agg fills it, eight times as large; the mean difference stays below 0.6%."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    prop = FontProperties(fname=str(fonts.font_directory() / f"{face}.ttf"))
    generator = np.random.default_rng(5)
    worst = 0.0
    for letter in "AgQ8ßÆЖჟФ":
        if ord(letter) not in fonts.open_font_face(face).getBestCmap():
            continue
        linear = np.eye(2) + generator.uniform(-0.25, 0.25, (2, 2))
        matrix = np.round(linear * (1 << 14)).astype(np.int64)
        size = int(generator.integers(18, 29))
        ours = drawing.compute_pixel_coverage(
            [fonts.make_letter_outline(face, ord(letter))],
            matrix[None],
            np.array([size * drawing.POSITION_UNITS_PER_PIXEL]),
            CENTRE,
            32,
        )[0]

        path = TextPath((0, 0), letter, size=100, prop=prop)
        mapped = path.transformed(Affine2D(np.block([[linear, np.zeros((2, 1))], [np.array([[0.0, 0.0, 1.0]])]])))
        box = mapped.get_extents()
        placing = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
        placing = placing.scale(size * 8 / max(box.width, box.height)).translate(128, 128)
        renderer = RendererAgg(256, 256, 72)
        context = renderer.new_gc()
        context.set_linewidth(0)
        renderer.draw_path(context, mapped, placing, (0.0, 0.0, 0.0, 1.0))
        alpha = np.asarray(renderer.buffer_rgba())[..., 3] / 255.0
        theirs = alpha.reshape(32, 8, 32, 8).mean(axis=(1, 3))

        worst = max(worst, float(np.abs(ours / drawing.FULL_COVERAGE - theirs).mean()))
    assert worst < 0.006


def test_a_differing_font_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for face in ("DejaVuSans", "DejaVuSerif"):
        shutil.copy(fonts.font_directory() / f"{face}.ttf", tmp_path)
    spoil(tmp_path / "DejaVuSans.ttf", 1000)
    monkeypatch.setattr(fonts, "font_directory", lambda: tmp_path)
    fonts.open_font_face.cache_clear()
    try:
        fonts.open_font_face("DejaVuSerif")
        with pytest.raises(UserError, match=r"DejaVuSans\.ttf has SHA-256"):
            fonts.open_font_face("DejaVuSans")
        with pytest.raises(UserError, match=r"DejaVuSansMono\.ttf cannot be read"):
            fonts.open_font_face("DejaVuSansMono")
    finally:
        fonts.open_font_face.cache_clear()


@pytest.mark.slow("draws all letters of twelve fonts and compares each with each")
def test_list_is_what_the_derivation_gives() -> None:
    committed = Path(glyphs.__file__).with_name("letters.tsv").read_text(encoding="utf-8")
    assert derive.table(derive.derive()) == committed
