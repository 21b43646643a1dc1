"""The accuracies of an episode as integer counts, and the statistics of them. Imports no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from ifsl_bench.protocols.calibration import Margins

EPISODE_COUNT_NAMES = ("base_joint", "base_alone", "novel_joint", "novel_alone")
OPTIONAL_EPISODE_COUNT_NAMES = ("pairs", "calibrated_base", "calibrated_novel")  # of episodes with base classes
EPISODE_METRIC_NAMES = ("acc", "base_joint", "base_alone", "novel_joint", "novel_alone", "delta_a", "delta_b", "delta")
BALANCE_METRIC_NAMES = ("harmonic", "ausuc", "calibrated_acc", "calibrated_delta")  # what joint accuracy hides
NORMAL_QUANTILE_95 = 1.96  # the protocol's 95% interval: 1.96 s / sqrt(n)
HitCountsT = TypeVar("HitCountsT", bound="HitCounts")


class HitCounts(ABC):
    """Integer counts of n episodes or sequences, and the metrics that follow; a protocol has a subclass of its own.

    A subclass is a frozen dataclass whose columns are arrays [n, ...].
    """

    interval_quantile: float = NORMAL_QUANTILE_95  # in place of 1.96, for 95% intervals over its units
    supports: int = 1  # support sets of each order
    state_bytes_per_class: float | None = None  # of the state that a method carries on, for each novel class

    @abstractmethod
    def __len__(self) -> int:
        """The number of episodes or sequences."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The metrics that follow from these counts."""

    @abstractmethod
    def metric_by_unit(self, metric: str) -> np.ndarray:
        """Return one of :attr:`metrics` for each unit of intervals, [units], in percent."""

    @abstractmethod
    def count_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of counts by name, [n, ...], without those that are missing."""

    def count_array(self, name: str) -> np.ndarray:
        """Return a count, int64 [n, ...]; arrays of :meth:`to_smallest_dtypes` have few bytes and would overflow."""
        return np.asarray(getattr(self, name), dtype=np.int64)

    @property
    def n_interval_units(self) -> int:
        """How many units intervals are over: episodes, or orders of sequences."""
        return len(self)

    def metrics_by_unit(self) -> dict[str, np.ndarray]:
        """Return each metric for each unit of intervals, [units], in percent."""
        return {name: self.metric_by_unit(name) for name in self.metrics}

    def summarise_metrics(self) -> dict[str, Estimate]:
        """Return each metric's mean and 95% interval over the units."""
        return summarise_by_metric(self.metrics_by_unit(), self.interval_quantile)

    def to_smallest_dtypes(self: HitCountsT) -> HitCountsT:
        """Return the counts in as few bytes as they need, for many results at once."""
        small: dict[str, Any] = {
            name: values.astype(np.min_scalar_type(values.max(initial=0)))
            for name, values in self.count_arrays().items()
        }
        return replace(self, **small)  # type: ignore[type-var]

    def use_calibrated_counts(self: HitCountsT) -> HitCountsT:
        """Return the counts with the bias as the plain ones; raises :class:`KeyError` where there is no bias."""
        raise KeyError("calibrated_acc")

    def selection_hits(self, margins: Margins | None, bias: float | None) -> dict[str, list[int]]:
        """Return the hits of each validation episode that a choice of options rests on, by count.

        Args:
            margins: of the validation queries, if there are base classes.
            bias: the best one on the novel logits, if there are margins.
        """
        return {name: values.tolist() for name, values in self.count_arrays().items()}

    def image_weights_of_metric(self, metric: str) -> dict[str, dict[str, float]] | None:
        """Return the weights with which the mean of a metric is a sum of shares of right queries.

        The harmonic mean is made linear, see :func:`harmonic_mean_by_episode`.

        Args:
            metric: its name.

        Returns:
            Pool -> name of :attr:`~.image_counts.PoolHits.right_counts` -> weight of its share; None where there are
            none.
        """
        return None

    def total_image_hits(self) -> dict[str, dict[str, int | None]]:
        """Return what the hits of single images add up to; see :class:`~.image_counts.ImageHits`.

        Returns:
            Pool -> "asked" and names of hits -> their sum over all queries; None for what no count gives.
        """
        return {}

    def metrics_to_columns(self) -> dict[str, Any]:
        """Return columns with a value for each episode, or for each sequence and session, for data frames."""
        return {"episode": np.arange(len(self)), **self.count_arrays(), "acc": self.metric_by_unit("acc")}

    def metric_by_sequence(self, metric: str) -> np.ndarray:
        """Return a metric for each episode or sequence, [n], in percent."""
        return self.metric_by_unit(metric)

    def accuracy_triangle(self) -> np.ndarray:
        """Return, in sessions, accuracies after session t on the classes of session g, [n, T + 1, T + 1]."""
        raise NotImplementedError

    def base_only_counts(self: HitCountsT) -> HitCountsT:
        """Return, in sessions, the counts of the model that never answers with a novel class."""
        raise NotImplementedError

    def metric_after_sessions(self, metric: str) -> np.ndarray:
        """Return a metric after each of T + 1 sessions, [n, T + 1], in percent; [n, 0] in episodes."""
        return np.empty((len(self), 0))

    def average_within_units(self, values: np.ndarray) -> np.ndarray:
        """Return values [n, ...] averaged within each unit of intervals, [units, ...]."""
        return values


@dataclass(frozen=True)
class EpisodeHitCounts(HitCounts):
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

    def __len__(self) -> int:
        return len(self.base_joint)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics, as far as the counts they need are there.

        Without base classes joint and alone are one, and there is nothing to lose: then it is the accuracy alone.
        """
        if not self.base_queries:
            return EPISODE_METRIC_NAMES[:1]
        biased = self.calibrated_base is not None and self.calibrated_novel is not None
        there = {
            "harmonic": True,
            "ausuc": self.pairs is not None,
            "calibrated_acc": biased,
            "calibrated_delta": biased,
        }
        return (*EPISODE_METRIC_NAMES, *(name for name in BALANCE_METRIC_NAMES if there[name]))

    def metric_by_unit(self, metric: str) -> np.ndarray:
        """Return one of :attr:`metrics` in each episode, [n], in percent.

        ``acc`` is over all queries; Delta_a = base joint - base alone, Delta_b = novel joint - novel alone, Delta their
        mean (Ren et al. 2019, section 4.3): negative where joint prediction hurts. ``harmonic`` is as
        :func:`harmonic_mean_by_episode` has it; ``ausuc`` is the area under the base-novel curve (Chao et al. 2016).
        """
        return 100 * self._metric_share(metric)

    def _metric_share(self, metric: str) -> np.ndarray:
        """Return the metric as a share of the queries, [n]."""
        base, novel = self.base_queries, self.novel_queries
        if metric == "acc":
            return (self.count_array("base_joint") + self.count_array("novel_joint")) / (base + novel)
        if metric in EPISODE_COUNT_NAMES:
            return self.count_array(metric) / (base if metric.startswith("base") else novel)
        if metric == "delta_a":
            return self._metric_share("base_joint") - self._metric_share("base_alone")
        if metric == "delta_b":
            return self._metric_share("novel_joint") - self._metric_share("novel_alone")
        if metric == "delta":
            return (self._metric_share("delta_a") + self._metric_share("delta_b")) / 2
        if metric == "harmonic":
            return harmonic_mean_by_episode(self._metric_share("base_joint"), self._metric_share("novel_joint"))
        if metric == "ausuc":
            return self.count_array("pairs") / (2 * base * novel)
        hits = self.count_array("calibrated_base"), self.count_array("calibrated_novel")
        if metric == "calibrated_acc":
            return (hits[0] + hits[1]) / (base + novel)
        if metric == "calibrated_delta":
            lost = (
                (hits[0] - self.count_array("base_alone")) / base,
                (hits[1] - self.count_array("novel_alone")) / novel,
            )
            return (lost[0] + lost[1]) / 2
        raise KeyError(metric)

    def count_arrays(self) -> dict[str, np.ndarray]:
        """Return the counts by name, [n], for all that there are."""
        return {
            name: values
            for name in (*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES)
            if (values := getattr(self, name)) is not None
        }

    def use_calibrated_counts(self) -> EpisodeHitCounts:
        if self.calibrated_base is None or self.calibrated_novel is None:
            raise KeyError("calibrated_acc")
        return replace(self, base_joint=self.calibrated_base, novel_joint=self.calibrated_novel)

    def selection_hits(self, margins: Margins | None, bias: float | None) -> dict[str, list[int]]:
        counts = self
        if margins is not None and bias is not None:
            base, novel = margins.joint_hits_with_bias(bias)
            counts = replace(self, calibrated_base=base, calibrated_novel=novel)
        return {name: values.tolist() for name, values in counts.count_arrays().items()}

    def image_weights_of_metric(self, metric: str) -> dict[str, dict[str, float]] | None:
        queries = self.base_queries + self.novel_queries
        base, novel = self.base_queries / queries, self.novel_queries / queries
        if not self.base_queries:
            return {"novel": {"joint": 1.0}}
        if metric in EPISODE_COUNT_NAMES:
            pool, what = metric.split("_")
            return {pool: {what: 1.0}}
        by_base, by_novel = harmonic_mean_derivatives(
            self._metric_share("base_joint").mean(), self._metric_share("novel_joint").mean()
        )
        lost = {"joint": 1.0, "alone": -1.0}, {"joint": 0.5, "alone": -0.5}, {"calibrated": 0.5, "alone": -0.5}
        weights: dict[str, dict[str, dict[str, float]]] = {
            "acc": {"base": {"joint": base}, "novel": {"joint": novel}},
            "delta_a": {"base": lost[0]},
            "delta_b": {"novel": lost[0]},
            "delta": {"base": lost[1], "novel": lost[1]},
            "harmonic": {"base": {"joint": by_base}, "novel": {"joint": by_novel}},
            "calibrated_acc": {"base": {"calibrated": base}, "novel": {"calibrated": novel}},
            "calibrated_delta": {"base": lost[2], "novel": lost[2]},
        }
        return weights.get(metric)

    def total_image_hits(self) -> dict[str, dict[str, int | None]]:
        totals: dict[str, dict[str, int | None]] = {}
        for pool, queries in (("base", self.base_queries), ("novel", self.novel_queries)):
            columns = {"joint": f"{pool}_joint", "alone": f"{pool}_alone", "calibrated": f"calibrated_{pool}"}
            sums = {
                what: int(self.count_array(name).sum()) for what, name in columns.items() if name in self.count_arrays()
            }
            if queries:
                totals[pool] = {"asked": len(self) * queries, **sums}
        return totals

    def metrics_to_columns(self) -> dict[str, Any]:
        """Return a row for each episode: counts of right queries, and ``acc``, percent of all queries.

        ``base_joint`` and ``novel_joint`` are right among all classes, ``base_alone`` and ``novel_alone`` among the
        classes of their kind, of ``base_queries`` and ``novel_queries``; ``calibrated_*`` with the bias found on
        validation. What is missing is NaN.
        """
        queries = {"base_queries": self.base_queries, "novel_queries": self.novel_queries}
        counts = {
            name: self.count_arrays().get(name, np.nan)
            for name in (*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES)
        }
        values = {"episode": np.arange(len(self)), **queries, **counts, "acc": self.metric_by_unit("acc")}
        return {name: np.broadcast_to(value, len(self)) for name, value in values.items()}


def harmonic_mean_by_episode(base: np.ndarray, novel: np.ndarray) -> np.ndarray:
    """Return the harmonic mean of two means, spread over the episodes: [n], in the values' unit.

    An episode's own harmonic mean may be 0/0. So it is made linear at the means B and N (the delta method): an
    episode's value is H + dH/dB (b - B) + dH/dN (n - N). The mean of these is H = 2 B N / (B + N), and their standard
    deviation makes its interval, with the covariance of base and novel values in it.

    Args:
        base: [n] values of the base queries.
        novel: [n] values of the novel queries.
    """
    b, n = float(base.mean()), float(novel.mean())
    if b + n == 0:
        return np.zeros(len(base))
    by_base, by_novel = harmonic_mean_derivatives(b, n)
    return 2 * b * n / (b + n) + by_base * (base - b) + by_novel * (novel - n)


def harmonic_mean_derivatives(base: float, novel: float) -> tuple[float, float]:
    """Return dH/dB and dH/dN of the harmonic mean H of B and N; 0 where both are 0.

    Args:
        base: B.
        novel: N.
    """
    both = base + novel
    return (2 * (novel / both) ** 2, 2 * (base / both) ** 2) if both else (0.0, 0.0)


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95% interval, in percent."""

    mean: float
    interval: float


def mean_with_interval(values: np.ndarray, choices: float = 0.0, quantile: float = NORMAL_QUANTILE_95) -> Estimate:
    """Return the mean of [n] values and the half-width 1.96 sqrt(s^2 / n + choices), s with n - 1.

    Args:
        values: [n], in percent.
        choices: the variance that choices on validation episodes give the mean.
        quantile: in place of 1.96.
    """
    variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), quantile * math.sqrt(variance + choices))


def summarise_by_metric(
    per_episode: Mapping[str, np.ndarray], quantile: float = NORMAL_QUANTILE_95
) -> dict[str, Estimate]:
    """Return every metric's mean and interval over episodes, or over the orders of sequences.

    Args:
        per_episode: metric -> [n] values, in percent.
        quantile: in place of 1.96.
    """
    return {name: mean_with_interval(values, quantile=quantile) for name, values in per_episode.items()}


@dataclass(frozen=True)
class PairedDifference:
    """A difference between two methods on the same episodes."""

    mean: float  # mean of A - B over episodes, in percentage points
    interval: float  # half-width of its 95% interval
    p_value: float  # two-sided p-value of a paired t-test (Student's distribution, n - 1) that the mean is zero


def paired_difference(
    a: np.ndarray, b: np.ndarray, choices: float = 0.0, quantile: float = NORMAL_QUANTILE_95
) -> PairedDifference:
    """Compare [n] and [n] values of the same episodes, in pairs.

    One episode has neither interval nor p-value: NaN.

    Args:
        a: [n] values of one method, in percent.
        b: [n] values of the other.
        choices: the variance that choices on validation episodes give the mean difference.
        quantile: in place of 1.96.
    """
    from scipy.special import stdtr

    difference = a - b
    n = len(difference)
    if n == 1:
        return PairedDifference(float(difference[0]), math.nan, math.nan)
    mean, error = float(difference.mean()), math.sqrt(float(np.var(difference, ddof=1)) / n + choices)
    if error == 0:
        return PairedDifference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return PairedDifference(mean, quantile * error, 2 * float(stdtr(n - 1, -abs(mean) / error)))
