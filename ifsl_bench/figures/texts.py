"""Names of classes that fit where they are to stand."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from ifsl_bench.common.errors import one_line
from ifsl_bench.figures.style import SMALLEST


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the words at their beginning that others have there too, and without a number in brackets at their
    end, as far as they stay different.

    ``["GREEK LETTER XI (U+039E)", "GREEK LETTER MU (U+03BC)"]`` become ``["XI", "MU"]``.
    """
    words = [one_line(name).split() or [one_line(name)] for name in names]
    beginnings = Counter(tuple(w[:n]) for w in words for n in range(1, len(w)))
    left = [_forms(w, beginnings) for w in words]  # what each name may be called, the shortest first
    while True:
        often = Counter(forms[0] for forms in left)
        again = [forms for forms in left if often[forms[0]] > 1 and len(forms) > 1]
        if not again:
            return [forms[0] for forms in left]
        for forms in again:
            del forms[0]


def _forms(words: list[str], beginnings: Mapping[tuple[str, ...], int]) -> list[str]:
    plain = words[:-1] if len(words) > 1 and re.fullmatch(r"\(.*\)", words[-1]) else words
    shared = max((n for n in range(1, len(plain)) if beginnings[tuple(plain[:n])] > 1), default=0)
    suffixes = [" ".join(form[start:]) for form in (plain, words) for start in range(shared, -1, -1)]
    return sorted(dict.fromkeys(suffixes), key=len)


@functools.lru_cache(4096)
def width_of(text: str, size: float = SMALLEST) -> float:
    """Of a text in our font, in inches."""
    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties("DejaVu Sans")).get_extents().x1) / 72


def wrapped(text: str, width: float, size: float = SMALLEST) -> list[str]:
    """A text in one line of so many inches, or in two, the first as long as it can be; cut where that is not enough."""
    if width_of(text, size) <= width:
        return [text]
    words = text.split(" ")
    fit = [n for n in range(1, len(words)) if width_of(" ".join(words[:n]), size) <= width]
    if not fit:
        return [fitting(text, width, size)]
    return [" ".join(words[: fit[-1]]), fitting(" ".join(words[fit[-1] :]), width, size)]


def fitting(text: str, width: float, size: float = SMALLEST) -> str:
    """A text cut to so many inches, with dots where something is missing."""
    if width_of(text, size) <= width:
        return text
    while text and width_of(f"{text}…", size) > width:
        text = text[:-1].rstrip(" (,-")
    return f"{text}…"
