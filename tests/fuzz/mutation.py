"""Changes of bytes that know nothing of any format, and of words in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    511,
    512,
    513,
    32767,
    65535,
    65536,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 2,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
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
        other = random.randrange(len(content) + 1)
        return before + content[other : other + length] + after
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
        other = random.randrange(len(tokens) or 1)
        way = random.randrange(5)
        if way == 0:
            tokens[at : at + 1] = []
        elif way == 1:
            tokens[at:at] = tokens[other : other + random.choice((1, 3, 10))] * random.choice((1, 2, 2, 300))
        elif way == 2 and tokens:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        elif way == 3:
            tokens[at : at + 1] = [random.choice(words)]
        else:
            tokens.insert(at, random.choice(words))
    return "".join(tokens).encode("utf-8", "surrogatepass")[:MOST]
