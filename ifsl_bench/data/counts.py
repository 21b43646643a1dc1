"""How many classes and images a source should hold, against how many it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ifsl_bench.data.pools import EVERY_POOL


@dataclass(frozen=True)
class Count:
    """Classes and images of a pool."""

    classes: int
    images: int

    def __str__(self) -> str:
        return f"{self.classes:,} classes with {self.images:,} images"

    @classmethod
    def of(cls, labels: np.ndarray) -> Count:
        """Counts labels [n]."""
        return cls(len(np.unique(labels)), len(labels))


Counts = Mapping[str, Count]  # by pool


def differences(expected: Counts, found: Counts) -> list[str]:
    """What differs, pool by pool, with the counts side by side; empty where nothing does."""
    none = Count(0, 0)
    lines = []
    for pool in EVERY_POOL:
        should, does = expected.get(pool, none), found.get(pool, none)
        if should != does:
            lines.append(f"{pool} should have {should} and has {does}")
    return lines
