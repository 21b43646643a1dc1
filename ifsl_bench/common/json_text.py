"""JSON more strictly than Python reads it, and how deep a text of it is nested."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive, or each escape takes 64 bytes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def strict_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ValueError: it is none, or holds a number that is not finite, or an object with a name that is there twice.
        RecursionError: it is nested deeper than Python's parser goes.
    """
    return json.loads(text.decode(), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_object)


def depth_of(text: bytes) -> int:
    """Measures how deep a valid JSON text is nested; 1 for an object of numbers."""
    deepest = depth = 0
    for bracket in _TEXT.sub(b"", text).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return value
