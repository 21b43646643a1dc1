"""The accuracies of an episode as integer counts, and what is computed from them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS, kind_of

Z95 = 1.96  # the protocol's 95% interval: 1.96 s / sqrt(n)


@dataclass(frozen=True)
class Counts:
    """Hits in each of n episodes."""

    base_joint: np.ndarray  # [n] base queries right among all K + N classes
    base_alone: np.ndarray  # [n] base queries right among the K base classes
    novel_joint: np.ndarray  # [n] novel queries right among all K + N classes
    novel_alone: np.ndarray  # [n] novel queries right among the N novel classes
    base_queries: int  # base queries in an episode; 0 in regular few-shot learning
    novel_queries: int  # novel queries in an episode, over all classes
    pairs: np.ndarray | None = None  # [n] twice the pairs that make AUSUC, see pairs; None in regular few-shot learning
    # [n] `base_joint` with a bias on the novel logits that was chosen on validation episodes; None where none was
    calibrated_base: np.ndarray | None = None
    calibrated_novel: np.ndarray | None = None  # [n] `novel_joint` with that bias

    quantile = Z95

    def __len__(self) -> int:
        return len(self.base_joint)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the task's kind, as far as they are known."""
        return kind_of(self.base_queries).metrics_of(self.columns())

    def per_episode(self) -> dict[str, np.ndarray]:
        """Metric -> its value in each episode, [n], in percent, for all :attr:`metrics`."""
        return {name: self.value(name) for name in self.metrics}

    def value(self, metric: str) -> np.ndarray:
        """One of :attr:`metrics` in each episode, [n], in percent.

        ``acc`` is over all queries; Delta_a = base joint - base alone, Delta_b = novel joint - novel alone, Delta their
        mean (Ren et al. 2019, section 4.3): negative where joint prediction hurts. ``harmonic`` is as :func:`harmonic`
        has it; ``ausuc`` the area under the base-novel curve (Chao et al. 2016).
        """
        return 100 * self._share(metric)

    def _share(self, metric: str) -> np.ndarray:
        """The metric as a share of the queries, [n]."""
        base, novel = self.base_queries, self.novel_queries
        if metric == "acc":
            return (self._hits("base_joint") + self._hits("novel_joint")) / (base + novel)
        if metric in COUNTS:
            return self._hits(metric) / (base if metric.startswith("base") else novel)
        if metric == "delta_a":
            return self._share("base_joint") - self._share("base_alone")
        if metric == "delta_b":
            return self._share("novel_joint") - self._share("novel_alone")
        if metric == "delta":
            return (self._share("delta_a") + self._share("delta_b")) / 2
        if metric == "harmonic":
            return harmonic(self._share("base_joint"), self._share("novel_joint"))
        if metric == "ausuc":
            return self._hits("pairs") / (2 * base * novel)
        hits = self._hits("calibrated_base"), self._hits("calibrated_novel")
        if metric == "calibrated_acc":
            return (hits[0] + hits[1]) / (base + novel)
        if metric == "calibrated_delta":
            lost = (hits[0] - self._hits("base_alone")) / base, (hits[1] - self._hits("novel_alone")) / novel
            return (lost[0] + lost[1]) / 2
        raise KeyError(metric)

    def _hits(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self, name), dtype=np.int64)

    def columns(self) -> dict[str, np.ndarray]:
        """Name of a count -> its value in each episode, [n], for all that there are."""
        return {name: values for name in (*COUNTS, *MORE_COUNTS) if (values := getattr(self, name)) is not None}

    def compact(self) -> Counts:
        """The counts in as few bytes as they need, for many results at once."""
        small: dict[str, Any] = {
            name: values.astype(np.min_scalar_type(values.max(initial=0))) for name, values in self.columns().items()
        }
        return replace(self, **small)


def harmonic(base: np.ndarray, novel: np.ndarray) -> np.ndarray:
    """The harmonic mean of the means of [n] and [n] values, spread over the episodes: [n], in the values' unit.

    An episode's own harmonic mean may be 0/0. So it is made linear at the means B and N (the delta method): an
    episode's value is H + dH/dB (b - B) + dH/dN (n - N). The mean of these is H = 2 B N / (B + N), and their standard
    deviation makes its interval, with the covariance of base and novel values in it.
    """
    b, n = float(base.mean()), float(novel.mean())
    if b + n == 0:
        return np.zeros(len(base))
    by_base, by_novel = 2 * (n / (b + n)) ** 2, 2 * (b / (b + n)) ** 2
    return 2 * b * n / (b + n) + by_base * (base - b) + by_novel * (novel - n)


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95% interval, in percent."""

    mean: float
    interval: float


def estimate(values: np.ndarray, choices: float = 0.0, quantile: float = Z95) -> Estimate:
    """Mean of [n] values and 1.96 sqrt(s^2 / n + choices), s with n - 1.

    Args:
        choices: the variance that choices on validation episodes give the mean.
        quantile: in place of 1.96.
    """
    variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), quantile * math.sqrt(variance + choices))


def summarise(per_episode: Mapping[str, np.ndarray], quantile: float = Z95) -> dict[str, Estimate]:
    """Every metric's mean and interval over episodes, or over the orders of sequences."""
    return {name: estimate(values, quantile=quantile) for name, values in per_episode.items()}


@dataclass(frozen=True)
class Paired:
    """A difference between two methods on the same episodes."""

    mean: float  # mean of A - B over episodes, in percentage points
    interval: float  # half-width of its 95% interval
    p: float  # two-sided p-value of a paired t-test (Student's distribution, n - 1) that the mean is zero


def paired(a: np.ndarray, b: np.ndarray, choices: float = 0.0, quantile: float = Z95) -> Paired:
    """Paired comparison of [n] and [n] per-episode values; for ``choices`` and ``quantile`` see :func:`estimate`.

    One episode has neither interval nor p-value: NaN.
    """
    from scipy.special import stdtr

    difference = a - b
    n = len(difference)
    if n == 1:
        return Paired(float(difference[0]), math.nan, math.nan)
    mean, error = float(difference.mean()), math.sqrt(float(np.var(difference, ddof=1)) / n + choices)
    if error == 0:
        return Paired(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return Paired(mean, quantile * error, 2 * float(stdtr(n - 1, -abs(mean) / error)))
