"""The novel classes of a stream's episodes as the few numbers that they follow from. Imports no torch.

They are those of :class:`ifsl_bench.protocols.episodes.Sampler`, which draws whole episodes on any device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ifsl_bench.utils.seeds import seed_of

# Finaliser constants of splitmix64 (Steele, Lea and Flood 2014): products wrap at 64 bits.
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
OF_CLASSES = 1  # the purpose of the words that choose classes
MOST_STEPS = 1 << 27  # some seconds of drawing; a text of more is refused
_TEXT = re.compile(r"drawn ([0-9]{1,8}) x ([0-9]{1,8}) of ([0-9]{1,9}), key (-?[0-9]{1,19})")


def stream_key(*stream: str | int, of: str = "episodes") -> int:
    """The number that all draws of a stream begin with, e.g. ``stream_key("glyphs-5shot", "test", 0)``."""
    return seed_of(of, *stream) - (1 << 62)


@dataclass(frozen=True)
class ClassDraws:
    """The draws of novel classes for the first episodes of a stream."""

    episodes: int  # how many episodes
    ways: int  # different classes of each
    classes: int  # how many classes there are to choose from
    key: int  # of the stream, see stream_key

    def __str__(self) -> str:
        return f"drawn {self.episodes} x {self.ways} of {self.classes}, key {self.key}"

    @classmethod
    def parse(cls, text: str) -> ClassDraws:
        """Reads what ``str`` wrote; raises :class:`ValueError` for another text, or more ways than classes."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("it does not say how classes are drawn, as in 'drawn 2000 x 5 of 108, key 1'")
        draws = cls(*map(int, match.groups()))
        if not 0 < draws.ways <= draws.classes:
            raise ValueError(f"it draws {draws.ways} different classes of {draws.classes}")
        if draws.steps > MOST_STEPS:
            raise ValueError(f"it draws {draws.ways} classes in {draws.episodes:,} episodes, which takes too long")
        return draws

    def __len__(self) -> int:
        return self.episodes * self.ways

    @property
    def steps(self) -> int:
        """The number of places that are compared to draw them."""
        return self.episodes * self.ways**2

    def array(self) -> np.ndarray:
        """The classes, int64 [episodes, ways], which nobody may change: results of one task share them."""
        return _drawn(self)


@lru_cache(maxsize=32)
def _drawn(draws: ClassDraws) -> np.ndarray:
    place = np.arange(draws.ways, dtype=np.uint64)
    with np.errstate(over="ignore"):
        index = np.arange(draws.episodes, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(draws.key % 2**64)
        stream = _mix(_mix(index) + np.uint64(OF_CLASSES))
        words = _mix(stream[:, None] + (place + np.uint64(1)) * np.uint64(GOLDEN))
    choices = np.uint64(draws.classes) - place
    picks = _shuffled((place + ((words >> np.uint64(32)) * choices >> np.uint64(32))).astype(np.int64))
    picks.flags.writeable = False
    return picks


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return x ^ (x >> np.uint64(31))


def _shuffled(targets: np.ndarray) -> np.ndarray:
    """The picks of the first steps of a Fisher-Yates shuffle of 0, 1, ..., step i at the place ``targets[:, i]`` >= i.

    The shuffled array is never made: only places that an earlier step has swapped hold another number than their own.
    """
    put = np.zeros_like(targets)  # what step i leaves at its target: what lay at place i
    picks, rows = targets.copy(), np.arange(len(targets))
    for i in range(1, targets.shape[1]):
        for place, lay in ((np.full(len(targets), i), put), (targets[:, i], picks)):
            earlier = targets[:, :i] == place[:, None]
            last = i - 1 - earlier[:, ::-1].argmax(1)
            lay[:, i] = np.where(earlier.any(1), put[rows, last], place)
    return picks
