"""The space of a search for options: the ranges and choices that a method declares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ifsl_bench.utils.deprecated import accept_old_names

LEARNING_RATE_OPTION = "train.rate"  # the learning rate of meta-training, as a name among options


@accept_old_names(at="value_at_share", share="share_of_value", beside="neighbouring_values")
@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, evenly spread or with ``log`` evenly in the logarithm.

    As a method declares it; in a search both ends are of the option's type (``options.search_space``), and where these
    are whole, so are all numbers between.

    Example:
        >>> ifsl_bench.Range(1e-3, 1e1, log=True).value_at_share(0.5)
        0.1
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (0 if self.log else -math.inf) < self.low < self.high < math.inf:
            raise ValueError(f"{self} is no range: low must be below high" + ", and positive" * self.log)

    def value_at_share(self, share: float) -> float:
        """Return the value that far into the range, from 0 to 1; beyond these, the nearer end."""
        if self.log:
            value = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            value = self.low + share * (self.high - self.low)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return min(max(round(value), self.low), self.high)
        return min(max(float(f"{value:.3g}"), self.low), self.high)  # three digits, as people would write them

    def share_of_value(self, value: float) -> float:
        """Return the place of a value in the range, the inverse of :meth:`value_at_share`."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def neighbouring_values(self, value: float, reach: float) -> list[float]:
        """Return the values as far below and above.

        Args:
            value: in the range.
            reach: how far, as a share of the range.
        """
        share = self.share_of_value(value)
        return [self.value_at_share(share - reach), self.value_at_share(share + reach)]


@accept_old_names(at="value_at_share", beside="neighbouring_values")
@dataclass(frozen=True)
class Choices:
    """One of several values.

    Example:
        >>> ifsl_bench.Choices(("cosine", "euclidean")).value_at_share(0.0)
        'cosine'
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, (str, bytes)) or not isinstance(self.values, Sequence) or not self.values:
            raise ValueError(f"{self} has nothing to choose from: values is a tuple of at least one")

    def value_at_share(self, share: float) -> Any:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def neighbouring_values(self, value: Any, reach: float) -> list[Any]:
        """Return the values before and after, in a circle.

        Args:
            value: one of the choices.
            reach: has no effect; the neighbours are the same for every reach.
        """
        place = self.values.index(value) if value in self.values else 0
        return [self.values[place - 1], self.values[(place + 1) % len(self.values)]]


SearchSpace = Mapping[str, Range | Choices]
