"""Names of classes that fit where they are to stand."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

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
    plain = [w[:-1] if len(w) > 1 and re.fullmatch(r"\(.*\)", w[-1]) else w for w in words]
    shared = [max((n for n in range(1, len(w)) if beginnings[tuple(w[:n])] > 1), default=0) for w in plain]
    found = [" ".join(w) for w in words]
    for forms in (words, plain):  # the shorter, the better
        shorter = [" ".join(w[n:]) for w, n in zip(forms, shared, strict=True)]
        often = Counter(shorter)
        found = [new if often[new] == 1 else old for new, old in zip(shorter, found, strict=True)]
    return found


@functools.lru_cache(4096)
def width_of(text: str, size: float = SMALLEST) -> float:
    """Of a text in our font, in inches."""
    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text, size=size, prop=FontProperties("DejaVu Sans")).get_extents().x1) / 72


def fitting(text: str, width: float, size: float = SMALLEST) -> str:
    """A text cut to so many inches, with dots where something is missing."""
    if width_of(text, size) <= width:
        return text
    while text and width_of(f"{text}…", size) > width:
        text = text[:-1].rstrip(" (,-")
    return f"{text}…"
