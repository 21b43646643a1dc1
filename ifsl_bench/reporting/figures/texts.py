"""Names of classes that fit where they are to stand."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from ifsl_bench.reporting.figures.style import SMALLEST
from ifsl_bench.utils.errors import one_line


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the words at their beginning that others have there too, and without a number in brackets at their
    end, as far as they stay different.

    ``["GREEK LETTER XI (U+039E)", "GREEK LETTER MU (U+03BC)"]`` become ``["XI", "MU"]``.
    """
    words = [one_line(name).split() or [one_line(name)] for name in names]
    beginnings = Counter(tuple(w[:n]) for w in words for n in range(1, len(w)))
    candidates = [_forms(w, beginnings) for w in words]  # what each name may be called, the shortest first
    while True:
        often = Counter(forms[0] for forms in candidates)
        again = [forms for forms in candidates if often[forms[0]] > 1 and len(forms) > 1]
        if not again:
            return [forms[0] for forms in candidates]
        for forms in again:
            del forms[0]


def _forms(words: list[str], beginnings: Mapping[tuple[str, ...], int]) -> list[str]:
    plain = words[:-1] if len(words) > 1 and re.fullmatch(r"\(.*\)", words[-1]) else words
    shared = max((n for n in range(1, len(plain)) if beginnings[tuple(plain[:n])] > 1), default=0)
    suffixes = [" ".join(form[start:]) for form in (plain, words) for start in range(shared, -1, -1)]
    return sorted(dict.fromkeys(suffixes), key=len)


@functools.lru_cache(4096)
def width_of(text: str, size: float = SMALLEST) -> float:
    """The width of a text in our font, in inches."""
    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties("DejaVu Sans")).get_extents().x1) / 72


def wrapped(text: str, width: float, size: float = SMALLEST, most: int = 2) -> str:
    """A text in as many lines of so many inches as it needs; where these are too many, the last one ends in dots."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size) <= width:
            lines[-1] = longer
            continue
        *full, rest = _pieces(word, width, size)
        lines += [*full, rest]
    lines = lines if lines[0] else lines[1:]
    return "\n".join(lines if len(lines) <= most else [*lines[: most - 1], _cut(lines[most - 1], width, size)])


def _pieces(word: str, width: float, size: float) -> list[str]:
    """A word, or its parts where it is wider than a line, all but the last with a hyphen."""
    pieces = []
    while width_of(word, size) > width and len(word) > 1:
        fit = max((n for n in range(1, len(word)) if width_of(f"{word[:n]}-", size) <= width), default=1)
        pieces.append(f"{word[:fit]}-")
        word = word[fit:]
    return [*pieces, word]


def _cut(text: str, width: float, size: float) -> str:
    """A text that ends in dots and is no wider than ``width``."""
    while text and width_of(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text.rstrip(' (,-')}…"
