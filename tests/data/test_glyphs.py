"""The letters: the same bytes however they are asked for; how they are drawn, against something independent."""

from __future__ import annotations

import hashlib
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.data.sets import glyphs
from ifsl_bench.data.sets.glyphs import GlyphPool, fonts, raster, rng, style
from ifsl_bench.data.sets.glyphs.fonts import UNIT, FontError, Outline
from tests.tools import derive_letters as derive

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


def test_every_letter_shows_in_every_face() -> None:
    """No empty image, and none that is a missing letter's box: each face's image differs from the other letters'."""
    letters = [letter for letter in LETTERS for _ in range(6)]
    images = glyphs.render(letters, np.tile(np.arange(6), len(LETTERS)), 0).astype(np.int64)
    spread = images.max(axis=(1, 2, 3)) - images.min(axis=(1, 2, 3))
    assert spread.min() >= style.STYLE.contrast[0] // 2
    assert len({image.tobytes() for image in images}) == len(images)


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


IDENTITY = np.array([[[1 << 14, 0], [0, 1 << 14]]])
CENTRE = np.zeros((1, 2), np.int64)


def polygon(*contours: list[tuple[int, int]]) -> Outline:
    """An outline of closed contours, in font units."""
    points = np.array([point for contour in contours for point in contour], np.int64) * UNIT
    after, first = [], 0
    for contour in contours:
        after += [first + (number + 1) % len(contour) for number in range(len(contour))]
        first += len(contour)
    return Outline(points[:, 0].copy(), points[:, 1].copy(), np.array(after, np.int64))


def square(low: int, high: int) -> list[tuple[int, int]]:
    return [(low, low), (high, low), (high, high), (low, high)]


def fill(outline: Outline, size: int, side: int) -> np.ndarray:
    sizes = np.array([size * raster.PIXEL])
    return raster.coverage([outline], IDENTITY, sizes, CENTRE, side)[0]


def test_square_covers_its_pixels_exactly() -> None:
    expected = np.zeros((8, 8), np.int64)
    expected[2:6, 2:6] = raster.FULL
    np.testing.assert_array_equal(fill(polygon(square(0, 100)), 4, 8), expected)


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
        if ord(letter) not in fonts.characters(face):
            continue
        linear = np.eye(2) + generator.uniform(-0.25, 0.25, (2, 2))
        matrix = np.round(linear * (1 << 14)).astype(np.int64)
        size = int(generator.integers(18, 29))
        ours = raster.coverage(
            [fonts.outline(face, ord(letter))], matrix[None], np.array([size * raster.PIXEL]), CENTRE, 32
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

        worst = max(worst, float(np.abs(ours / raster.FULL - theirs).mean()))
    assert worst < 0.006


def test_random_words_are_splitmix64() -> None:
    mask = (1 << 64) - 1

    def word(state: int, counter: int) -> int:
        state = (state + (counter + 1) * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    states = [0, 1, 1234567, rng.key_of("a", 1), mask]
    counters = [0, 1, 2, 1000, mask]
    found = rng.mix(np.array(states, np.uint64)[:, None], np.array(counters, np.uint64)[None, :])
    assert found.tolist() == [[word(state, counter) for counter in counters] for state in states]
    # The first outputs that the generator's authors publish for the state 1234567.
    assert found[2, :3].tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_ranges_are_reached_and_kept() -> None:
    words = rng.mix(np.array([3], np.uint64), np.arange(4000, dtype=np.uint64))
    values = rng.between(words, -3, 4)
    assert values.tolist() == [-3 + (((word >> 32) * 8) >> 32) for word in words.tolist()]
    shares = np.bincount(values + 3, minlength=8) / 4000
    assert shares.min() > 0.1
    assert len(shares) == 8


def test_key_is_a_hash_of_all_parts() -> None:
    text = "recipe\x1f0\x1f65"
    assert rng.key_of("recipe", 0, 65) == int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def test_a_differing_font_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((fonts.font_directory() / "DejaVuSans.ttf").read_bytes())
    content[1000] ^= 1
    (tmp_path / "DejaVuSans.ttf").write_bytes(content)
    shutil.copy(fonts.font_directory() / "DejaVuSerif.ttf", tmp_path)
    monkeypatch.setattr(fonts, "font_directory", lambda: tmp_path)
    fonts.open_face.cache_clear()
    try:
        fonts.open_face("DejaVuSerif")
        with pytest.raises(FontError, match=r"DejaVuSans\.ttf has SHA-256"):
            fonts.open_face("DejaVuSans")
        with pytest.raises(FontError, match=r"DejaVuSansMono\.ttf cannot be read"):
            fonts.open_face("DejaVuSansMono")
    finally:
        fonts.open_face.cache_clear()


@pytest.mark.slow("draws all letters of twelve fonts and compares each with each")
def test_list_is_what_the_derivation_gives() -> None:
    committed = Path(glyphs.__file__).with_name("letters.tsv").read_text(encoding="utf-8")
    assert derive.table(derive.derive()) == committed


def test_no_two_letters_look_alike() -> None:
    for maps in ([derive.UPRIGHT], [derive.TWISTS[0]]):
        alike = derive.look_alikes(list(LETTERS), maps)
        pairs = [
            (one.label, other.label)
            for row, one in enumerate(LETTERS)
            for column, other in enumerate(LETTERS[:row])
            if alike[row, column]
        ]
        assert not pairs


def test_look_alikes_are_found() -> None:
    """Same shapes of other scripts, of other cases, and turned by 180 degrees; and none where there are none."""
    by_character = {chr(letter.codepoint): letter for letter in derive.candidates()}

    def alike(one: str, other: str) -> bool:
        return bool(derive.look_alikes([by_character[one], by_character[other]], [derive.UPRIGHT])[0, 1])

    for pair in ("AА", "AΑ", "Oo", "Ss", "Cc", "Vv", "bq", "dp", "nu", "Oօ", "hհ", "Uᑌ", "Oᐤ", "ᐁᐃ", "ოω"):
        assert alike(*pair), pair
    for pair in ("AB", "bd", "OQ", "EF", "MW", "Λ\u0394", "ბმ", "אע"):
        assert not alike(*pair), pair


def test_letters_are_whole_and_faces_have_them() -> None:
    for letter in LETTERS:
        character = chr(letter.codepoint)
        assert "WITH" not in letter.name.split(), letter
        assert not unicodedata.decomposition(character), letter
        assert letter.name == unicodedata.name(character)
        assert letter.name.startswith(letter.script), letter
        assert letter.label == f"{letter.name} (U+{letter.codepoint:04X})"
        assert letter.faces, letter
        for face in fonts.FONT_SHA256:
            name = fonts.open_face(face).getBestCmap().get(letter.codepoint, ".notdef")
            assert (face in letter.faces) == (name != ".notdef"), letter
        for face in letter.faces:
            assert len(fonts.outline(face, letter.codepoint).x) >= 3, letter
