"""Counter-based random numbers on uint64: the same on every machine, and none depends on how many were drawn before."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def key_of(*parts: str | int) -> int:
    """The 64-bit key of a tuple of names and numbers: the first eight bytes of a SHA-256, big-endian."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def mix(keys: U64, counters: U64) -> U64:
    """splitmix64's output number `counters` (0, 1, ...) from the states `keys`; arrays that broadcast, uint64."""
    state = keys + (counters + np.uint64(1)) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: U64 = state ^ (state >> np.uint64(31))
    return mixed


def below(words: U64, bound: I64) -> I64:
    """Map uint64 words to 0 .. bound - 1 (bound < 2**31), uniform up to a part in 2**32; int64 of the same shape."""
    high: I64 = (words >> np.uint64(32)).astype(np.int64)
    scaled: I64 = (high * bound) >> 32
    return scaled


def between(words: U64, low: I64 | int, high: I64 | int) -> I64:
    """Map uint64 words to low .. high, both included; int64 of the same shape."""
    bound = np.asarray(high, dtype=np.int64) - np.asarray(low, dtype=np.int64) + 1
    value: I64 = low + below(words, bound)
    return value
