"""The committed list of letters: what it must never hold, and that it is what the derivation gives."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from ifsl_bench.data.sets import glyphs
from ifsl_bench.data.sets.glyphs import fonts
from tests.tools import derive_letters as derive

LETTERS = glyphs.letters()


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
