"""What a search for options may try: a method's space, and the points in it that everybody tries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RATE = "train.rate"  # the learning rate of meta-training, as a name among options
SEED = 2019  # of the scrambled Halton points; the same for every method, so that nobody draws better ones
OUTER = 0.05  # share of a range, at either end, that counts as its edge


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, evenly spread or with ``log`` evenly in the logarithm.

    As a method declares it; in a search both ends are of the option's type (``options.space_of``), and where these are
    whole so are all numbers between.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (0 if self.log else -math.inf) < self.low < self.high < math.inf:
            raise ValueError(f"{self} is no range: low must be below high" + ", and positive" * self.log)

    def at(self, share: float) -> float:
        """The value that far into the range, from 0 to 1."""
        if self.log:
            value = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            value = self.low + share * (self.high - self.low)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return round(value)
        return min(max(float(f"{value:.3g}"), self.low), self.high)  # three digits, as people would write them

    def at_edge(self, value: float) -> bool:
        """Whether a value lies at an end of the range, or beyond it."""
        low, high = self.at(OUTER), self.at(1 - OUTER)
        return not low < value < high


@dataclass(frozen=True)
class Choices:
    """One of several values; none of them is at an edge."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, (str, bytes)) or not isinstance(self.values, Sequence) or not self.values:
            raise ValueError(f"{self} has nothing to choose from: values is a tuple of at least one")

    def at(self, share: float) -> Any:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def at_edge(self, value: Any) -> bool:
        return False


Space = Mapping[str, Range | Choices]


def halton(space: Space, count: int) -> list[dict[str, Any]]:
    """``count`` points of a space: the first ones of a scrambled Halton sequence with a fixed seed.

    The first coordinate belongs to the first option of the space, and so on: an option that is taken out of a search
    leaves the others' values as they are.
    """
    from scipy.stats.qmc import Halton  # takes half a second to import

    if not space or not count:
        return [{} for _ in range(count)]
    shares = Halton(len(space), scramble=True, seed=SEED).random(count)
    return [{key: space[key].at(float(u)) for key, u in zip(space, row, strict=True)} for row in shares]
