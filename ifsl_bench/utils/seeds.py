"""Seeds for random numbers, made from names and numbers; there is no hidden state."""

from __future__ import annotations

import hashlib


def seed_of(*parts: str | int) -> int:
    """Return a seed in 0..2^63-1 for a purpose, as ``seed_of("order", seed, epoch)``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
