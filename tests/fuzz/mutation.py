"""Changes of bytes that know nothing of any format, and of words in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

# At and beside powers of two.
_BITS = (0, 3, 7, 8, 9, 15, 16, 24, 31, 32, 40, 63, 64)
NUMBERS = sorted({(1 << bit) + step for bit in _BITS for step in (-1, 0, 1)})
MOST = 1 << 20  # bytes of a case


def number(random: Random, width: int) -> bytes:
    """A number that programs tend to get wrong, in so many bytes of either order."""
    value = random.choice(NUMBERS) if random.random() < 0.7 else random.getrandbits(8 * width)
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, random.choice(("little", "big")))


def once(random: Random, content: bytes) -> bytes:
    """A file with one change."""
    at = random.randrange(len(content) + 1)
    if random.random() < 0.4:  # where headers are
        at = min(at, random.choice((16, 64, 512))) if random.random() < 0.7 else max(0, len(content) - at % 64)
    length = min(random.choice((1, 1, 2, 4, 8, 16, 100, 1000)), len(content) - at)
    before, piece, after = content[:at], content[at : at + length], content[at + length :]
    way = random.randrange(8)
    if way == 0 and piece:
        flipped = bytearray(piece)
        flipped[random.randrange(len(piece))] ^= 1 << random.randrange(8)
        return before + flipped + after
    if way == 1:
        return before + random.randbytes(length) + after
    if way == 2:
        return before + after
    if way == 3:
        return before + piece * random.choice((2, 3, 50)) + after
    if way == 4:
        value = number(random, random.choice((1, 2, 4, 8)))
        return before + value + content[at + len(value) :]
    if way == 5:
        return before + bytes([random.choice((0, 0xFF, 0x20, 0x30))]) * length + after
    if way == 6:
        start = random.randrange(len(content) + 1)
        return before + content[start : start + length] + after
    return content[:at] if random.random() < 0.3 else before + number(random, 4) + piece + after


def spoiled(random: Random, content: bytes) -> bytes:
    """A file with a few changes."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        content = once(random, content)
    return content[:MOST]


def spoiled_text(random: Random, content: bytes, words: Sequence[str]) -> bytes:
    """A text with words left out, repeated, changed places, or others from a list; now and then as bytes."""
    if random.random() < 0.2:
        return spoiled(random, content)
    tokens = re.findall(r"\w+|\s+|[^\w\s]", content.decode())
    for _ in range(random.choice((1, 1, 2, 3, 10))):
        at = random.randrange(len(tokens) or 1)
        position = random.randrange(len(tokens) or 1)
        way = random.randrange(5)
        if way == 0:
            tokens[at : at + 1] = []
        elif way == 1:
            tokens[at:at] = tokens[position : position + random.choice((1, 3, 10))] * random.choice((1, 2, 2, 300))
        elif way == 2 and tokens:
            tokens[at], tokens[position] = tokens[position], tokens[at]
        elif way == 3:
            tokens[at : at + 1] = [random.choice(words)]
        else:
            tokens.insert(at, random.choice(words))
    return "".join(tokens).encode("utf-8", "surrogatepass")[:MOST]


def _inner(value: Any, random: Random) -> Any:
    """Some object or list in a tree."""
    while True:
        parts = value.values() if isinstance(value, dict) else value
        below = [part for part in parts if isinstance(part, (dict, list)) and part]
        if not below or random.random() < 0.35:
            return value
        value = random.choice(below)


def _other(old: Any, random: Random, strange: Sequence[Any]) -> Any:
    """A value near the old one, of its kind or of another."""
    if isinstance(old, (int, float)) and not isinstance(old, bool) and random.random() < 0.4:
        return random.choice([old + 1, old - 1, -old, old * 2, float(old), str(old)])
    if random.random() < 0.1:
        deep: Any = random.choice(strange)
        for _ in range(random.choice((3, 15, 19, 20, 21, 100, 500))):
            deep = [deep] if random.random() < 0.5 else {"a": deep}
        return deep
    return random.choice(strange)


def change_json(value: Any, random: Random, strange: Sequence[Any], names: Sequence[str]) -> None:
    """A name left out, changed or added, two parts that change places, or a value changed."""
    if not value:
        return
    at, way = _inner(value, random), random.random()
    if isinstance(at, list):
        index = random.randrange(len(at))
        if way < 0.2:
            del at[index]
        elif way < 0.4:
            at[index:index] = at[: random.choice((1, 2, 50))] * random.choice((1, 1, 2, 100))
        elif way < 0.5:
            random.shuffle(at)
        else:
            at[index] = _other(at[index], random, strange)
        return
    name = random.choice(list(at))
    if way < 0.15:
        del at[name]
    elif way < 0.25:
        at[random.choice(names)] = at.pop(name)
    elif way < 0.45:
        at[random.choice(names)] = random.choice(strange)
    elif way < 0.55:
        second_name = random.choice(list(at))
        at[name], at[second_name] = at[second_name], at[name]
    else:
        at[name] = _other(at[name], random, strange)
