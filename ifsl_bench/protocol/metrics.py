"""The five accuracies of an episode as integer hit counts, and what is computed from them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

COUNTS = ("base_joint", "base_alone", "novel_joint", "novel_alone")
METRICS = ("acc", "base_joint", "base_alone", "novel_joint", "novel_alone", "delta_a", "delta_b", "delta")
REGULAR = ("acc",)  # without base classes joint and alone are one, and there is nothing to lose
Z95 = 1.96  # the protocol's 95% interval: 1.96 s / sqrt(n)


@dataclass(frozen=True)
class Counts:
    """Hits in each of n episodes.

    Attributes:
        base_joint: [n] base queries right among all K + N classes.
        base_alone: [n] base queries right among the K base classes.
        novel_joint: [n] novel queries right among all K + N classes.
        novel_alone: [n] novel queries right among the N novel classes.
        base_queries: base queries in an episode; 0 in regular few-shot learning.
        novel_queries: novel queries in an episode, over all classes.
    """

    base_joint: np.ndarray
    base_alone: np.ndarray
    novel_joint: np.ndarray
    novel_alone: np.ndarray
    base_queries: int
    novel_queries: int

    def __len__(self) -> int:
        return len(self.base_joint)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What these counts give: :data:`METRICS`, or in regular few-shot learning the accuracy alone."""
        return METRICS if self.base_queries else REGULAR

    def per_episode(self) -> dict[str, np.ndarray]:
        """Each of :attr:`metrics` for each episode, [n], in percent.

        ``acc`` is over all queries; Delta_a = base joint - base alone, Delta_b = novel joint - novel alone, Delta
        their mean (Ren et al. 2019, section 4.3): negative where joint prediction hurts.
        """
        value = {"acc": (self.base_joint + self.novel_joint) / (self.base_queries + self.novel_queries)}
        if not self.base_queries:
            return {name: 100 * value[name] for name in REGULAR}
        value |= {
            "base_joint": self.base_joint / self.base_queries,
            "base_alone": self.base_alone / self.base_queries,
            "novel_joint": self.novel_joint / self.novel_queries,
            "novel_alone": self.novel_alone / self.novel_queries,
        }
        value["delta_a"] = value["base_joint"] - value["base_alone"]
        value["delta_b"] = value["novel_joint"] - value["novel_alone"]
        value["delta"] = (value["delta_a"] + value["delta_b"]) / 2
        return {name: 100 * value[name] for name in METRICS}


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95% interval, in percent."""

    mean: float
    interval: float


def estimate(values: np.ndarray) -> Estimate:
    """Mean of [n] values and 1.96 s / sqrt(n), s with n - 1."""
    n = len(values)
    spread = float(np.std(values, ddof=1)) if n > 1 else math.nan
    return Estimate(float(np.mean(values)), Z95 * spread / math.sqrt(n))


def summarise(per_episode: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Every metric's mean and interval over episodes."""
    return {name: estimate(values) for name, values in per_episode.items()}


@dataclass(frozen=True)
class Paired:
    """A difference between two methods on the same episodes.

    Attributes:
        mean: mean of A - B over episodes, in percentage points.
        interval: half-width of its 95% interval.
        p: two-sided p-value of a paired t-test (Student's distribution, n - 1) that the mean is zero.
    """

    mean: float
    interval: float
    p: float


def paired(a: np.ndarray, b: np.ndarray) -> Paired:
    """Paired comparison of [n] and [n] per-episode values."""
    from scipy.special import stdtr

    difference = a - b
    n = len(difference)
    mean, error = float(difference.mean()), float(np.std(difference, ddof=1)) / math.sqrt(n)
    if error == 0:
        return Paired(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return Paired(mean, Z95 * error, 2 * float(stdtr(n - 1, -abs(mean) / error)))
