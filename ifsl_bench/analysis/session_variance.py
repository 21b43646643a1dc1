"""Variance of a number in sessions by its sources: the order of classes, supports, the training seed. No torch.

A row, or the difference of two rows on the same sequences, has the values x[s, o, r] with training seed s, order o and
support set r of that order. They are modelled by independent effects,

    x[s, o, r] = mu + seed[s] + order[o] + support[o, r] + seed-by-order[s, o] + rest[s, o, r],

whose variances are estimated by the analysis of variance of this design (supports nested in orders, both crossed with
seeds; Searle, Casella and McCulloch 1992, Variance Components, chapter 4). Each estimate is a sum of mean squares with
positive and negative weights; its interval is that of Ting, Burdick, Graybill, Jeyaratnam and Lu (1990, Journal of
Statistical Computation and Simulation 35:135-143), which is exact for one mean square.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate, having
from ifsl_bench.analysis.comparison import overall as difference_of_rows
from ifsl_bench.analysis.image_variance import ImageVariance, over_images
from ifsl_bench.analysis.ranking import Difference, Prior, difference
from ifsl_bench.analysis.task_results import TaskResults, nothing_stored
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.protocols.registry import protocol_of
from ifsl_bench.utils.errors import UserError, unknown_name_error

TAIL = 0.025  # of a 95% interval, on each side
NO_DIFFERENCE = 1e-9  # points; a mean of differences that cancel is only that close to 0
IMAGES = "test images"
ONE = "one"  # a single value: one order, support set and seed
PARTS = ("order", "support", "seed", "seed by order", "rest")  # that the design tells apart
SOURCES = (*PARTS, IMAGES)


@dataclass(frozen=True, eq=False)
class MeanSquare:
    """A mean square, or a sum of several."""

    value: float
    degrees: float  # of freedom
    effective: float  # the fewer of these that effects with heavy tails leave it
    parts: np.ndarray | None = None  # what each order contributes, [orders]; None of training seeds

    @classmethod
    def over_orders(cls, parts: np.ndarray, degrees: float) -> MeanSquare:
        """Return the mean square of the contributions of orders.

        Of normal effects a mean square S has the variance 2 S^2 / degrees. Here it is read off the spread of the parts,
        and where it is larger, the effective degrees are those that would give it.

        Args:
            parts: the contribution of each order, [orders].
            degrees: of freedom.
        """
        value = float(parts.sum())
        variance = len(parts) * float(parts.var(ddof=1))
        return cls(value, degrees, min(degrees, 2 * value**2 / variance) if variance else degrees, parts)


@dataclass(frozen=True)
class Variance:
    """A variance with its 95% interval, in squared units of the row; an estimate below 0 counts as 0."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class WrongSign:
    """The chance that the sign of one comparison of two rows (one order, support set and seed) is not their mean's."""

    chance: float  # under normal effects; `low` and `high` are its 95% interval
    low: float
    high: float
    observed: float  # the share of the single comparisons made here whose sign is not that of their mean, ties half


def mean_difference(x: np.ndarray, images: ImageVariance | None = None) -> Difference:
    """Return the mean of differences [seeds, orders, supports] of two rows, with its error over orders and images.

    Args:
        x: the differences.
        images: the variance that test images give the mean; None where they are held fixed.

    Raises:
        UserError: there is one order.
    """
    means = _order_means(x)
    return difference(means, np.zeros_like(means), Prior(0.0, 0.0), random=2, images=images)


def _order_means(x: np.ndarray) -> np.ndarray:
    """[seeds, orders]."""
    if x.shape[1] < 2:
        raise UserError("one order of the classes has no interval over orders, and its variance cannot be split")
    return np.asarray(x.mean(2))


def split(x: np.ndarray) -> dict[str, Variance]:
    """Return the variances of the effects in [seeds, orders, supports], by :data:`PARTS`, and of all as "one".

    A part that the design cannot tell from others is left out: with one seed (pass one where all are the same by
    construction) those with seeds, with one support set for each order "support", which is then in "order", or "rest",
    which is in "seed by order". "one" is the variance of a single value, of any order, support set and seed.

    Raises:
        UserError: there is one order.
    """
    squares, weights = _mean_squares(x), _weights(*x.shape)
    return {part: _variance([(w, squares[name]) for name, w in of_part.items()]) for part, of_part in weights.items()}


def with_images(parts: Mapping[str, Variance], images: ImageVariance | None) -> dict[str, Variance]:
    """Return the variances of :func:`split` with that of test images, which adds to the variance of a single value.

    Args:
        parts: by :data:`PARTS`, and of all as "one".
        images: None where they are held fixed.
    """
    if images is None:
        return dict(parts)
    from scipy.special import chdtri

    value, low, high = images.value, 0.0, 0.0
    if value:
        low, high = (value * images.degrees / float(chdtri(images.degrees, tail)) for tail in (TAIL, 1 - TAIL))
    one = parts[ONE]
    both = Variance(
        one.value + value,
        max(0.0, one.value + value - math.hypot(one.value - one.low, value - low)),
        one.value + value + math.hypot(one.high - one.value, high - value),
    )
    return {**parts, IMAGES: Variance(value, low, high), ONE: both}


def _mean_squares(x: np.ndarray) -> dict[str, MeanSquare]:
    """Return the mean square of each part whose degrees of freedom are not 0."""
    seeds, orders, supports = x.shape
    means = _order_means(x)
    by_seed, by_order, by_support, mean = means.mean(1), means.mean(0), x.mean(0), means.mean()
    both = means - by_seed[:, None] - by_order + mean
    rest = x - means[:, :, None] - by_support + by_order[:, None]
    sums = {
        "order": (seeds * supports * (by_order - mean) ** 2, orders - 1),
        "support": (seeds * ((by_support - by_order[:, None]) ** 2).sum(1), orders * (supports - 1)),
        "seed by order": (supports * (both**2).sum(0), (seeds - 1) * (orders - 1)),
        "rest": ((rest**2).sum((0, 2)), (seeds - 1) * orders * (supports - 1)),
    }
    squares = {n: MeanSquare.over_orders(parts / degrees, degrees) for n, (parts, degrees) in sums.items() if degrees}
    if seeds > 1:
        of_seeds = orders * supports * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
        squares["seed"] = MeanSquare(of_seeds, seeds - 1, seeds - 1)
    return squares


def _weights(seeds: int, orders: int, supports: int) -> dict[str, dict[str, float]]:
    """Return part -> mean square -> its weight in the estimate, from the expected mean squares of the design."""
    m, r = 1 / seeds, 1 / supports
    weights = {
        "order": {"order": m * r, "support": -m * r, "seed by order": -m * r, "rest": m * r},
        "support": {"support": m, "rest": -m},
        "seed": {"seed": r / orders, "seed by order": -r / orders},
        "seed by order": {"seed by order": r, "rest": -r},
        "rest": {"rest": 1.0},
    }
    there = {"order"} | ({"support"} if supports > 1 else set())
    if seeds > 1:
        there |= {"seed", "seed by order"} | ({"rest"} if supports > 1 else set())
    parts = {
        part: {name: weight for name, weight in of_part.items() if name in there}
        for part, of_part in weights.items()
        if part in there
    }
    return parts | {"one": {name: sum(of_part.get(name, 0.0) for of_part in parts.values()) for name in there}}


def _merged(terms: Sequence[tuple[float, MeanSquare]]) -> list[tuple[float, MeanSquare]]:
    """Return the same sum, with one term for all over orders of one sign.

    An order whose effects are large raises several mean squares at once, and their sum varies more than that of
    independent ones. The sum has Satterthwaite's degrees of freedom.
    """
    merged = [(w, square) for w, square in terms if w and square.parts is None]
    for sign in (1, -1):
        same = [(abs(w), square, square.parts) for w, square in terms if w * sign > 0 and square.parts is not None]
        if parts := [w * of_orders for w, _, of_orders in same if of_orders is not None]:
            spread = sum((w * square.value) ** 2 / square.degrees for w, square, _ in same)
            value = sum(w * square.value for w, square, _ in same)
            merged.append((sign, MeanSquare.over_orders(np.sum(parts, axis=0), value**2 / spread if spread else 1.0)))
    return merged


def _variance(terms: Sequence[tuple[float, MeanSquare]]) -> Variance:
    low, high = _interval(_merged(terms))
    return Variance(max(0.0, sum(w * square.value for w, square in terms)), max(0.0, low), max(0.0, high))


def _interval(terms: Sequence[tuple[float, MeanSquare]]) -> tuple[float, float]:
    """Return the 95% interval of the sum of w times the expectation of a mean square (Ting et al. 1990)."""
    value = sum(w * square.value for w, square in terms)
    positive = [(w * square.value, square.effective) for w, square in terms if w > 0]
    negative = [(-w * square.value, square.effective) for w, square in terms if w < 0]
    below = _spread(positive, negative, TAIL)
    above = _spread(negative, positive, TAIL)  # the upper limit is minus the lower one of minus the sum
    return value - math.sqrt(max(0.0, below)), value + math.sqrt(max(0.0, above))


def _spread(positive: Sequence[tuple[float, float]], negative: Sequence[tuple[float, float]], tail: float) -> float:
    """Return the squared distance from an estimate, a sum of positive and negative terms, to its lower limit."""
    from scipy.special import chdtri, fdtri

    def shrunk(degrees: float) -> float:
        return 1 - degrees / float(chdtri(degrees, tail))

    def grown(degrees: float) -> float:
        return degrees / float(chdtri(degrees, 1 - tail)) - 1

    total = sum((shrunk(n) * a) ** 2 for a, n in positive) + sum((grown(n) * b) ** 2 for b, n in negative)
    for a, n in positive:
        for b, k in negative:
            f = float(fdtri(n, k, 1 - tail))
            total += ((f - 1) ** 2 - (shrunk(n) * f) ** 2 - grown(k) ** 2) / f * a * b
    for i, (a, n) in enumerate(positive):
        for b, k in positive[i + 1 :]:
            joint = (shrunk(n + k) * (n + k)) ** 2 / (n * k) - shrunk(n) ** 2 * n / k - shrunk(k) ** 2 * k / n
            total += joint / (len(positive) - 1) * a * b
    return total


def wrong_sign(x: np.ndarray, images: ImageVariance | None = None) -> WrongSign | None:
    """Estimate how often one comparison has the wrong sign, from differences [seeds, orders, supports] of two rows.

    None where their mean is 0, as of equal rows: it has no sign.

    The chance is Phi(-|d| / s), d the mean and s^2 the variance of a single difference. Its interval is the one of
    d / s, by the delta method, with Student's distribution and the degrees of freedom of the overall interval of d. It
    reaches 0.5 where the interval of d holds 0. Where d is small beside its own error, |d| is mostly larger than the
    true one, so that the chance is estimated too small.

    Args:
        x: the differences.
        images: the variance that test images give their mean; None where they are held fixed.

    Raises:
        UserError: there is one order.
    """
    from scipy.special import ndtr, stdtrit

    mean, squares = mean_difference(x, images), _mean_squares(x)
    if abs(mean.mean) < NO_DIFFERENCE:
        return None
    merged = _merged([(w, squares[name]) for name, w in _weights(*x.shape)["one"].items()])
    terms = [(w * square.value, square.effective) for w, square in merged]
    terms += [(images.value, images.degrees)] if images else []
    variance = sum(value for value, _ in terms)
    observed = float(((np.sign(x) != np.sign(mean.mean)) * np.where(x == 0, 0.5, 1.0)).mean())
    if variance <= 0:
        return WrongSign(0.0, 0.0, 0.0, observed)
    deviation = math.sqrt(variance)
    ratio = abs(mean.mean) / deviation
    of_variance = sum(2 * value**2 / degrees for value, degrees in terms)
    error = math.sqrt((mean.error / deviation) ** 2 + ratio**2 * of_variance / (4 * variance**2))
    half = float(stdtrit(min(mean.degrees, 1e9), 1 - TAIL)) * error
    return WrongSign(float(ndtr(-ratio)), float(ndtr(-(ratio + half))), float(ndtr(-max(0.0, ratio - half))), observed)


@dataclass(frozen=True, eq=False)
class VarianceSplit:
    """A row, or the difference a - b of two, with the variance of its parts."""

    a: SeedAggregate
    b: SeedAggregate | None
    mean: Estimate | Difference  # with its 95% interval: of a row over orders, of a difference over orders and seeds
    parts: Mapping[str, Variance]  # by SOURCES and "one"; what the design cannot tell is left out
    seeds: int  # how many it is over; 1 where all are the same by construction
    sign: WrongSign | None = None  # of a difference that is not 0


def splits_of_rows(board: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of each row, the best first.

    Args:
        board: the results of the task.
        metric: the metric that is split.

    Raises:
        UserError: the task is in episodes, has one order, or no row has the metric.
    """
    protocol_of(board.task).require_feature("variance", board.name, "variance splits that of tasks in sessions")
    if not board.rows:
        raise nothing_stored(board)
    rows = having((place.row for place in board.places), metric)
    if not rows:
        metrics = {name for row in board.rows for name in row.metrics}
        raise unknown_name_error("metric", metric, metrics, where=f"of the measured rows of {board.name}")
    return [split_of(row, metric) for row in rows]


def split_of(row: SeedAggregate, metric: str) -> VarianceSplit:
    """Return the split of a row; raise :class:`UserError` where there is one order of the classes.

    Args:
        row: the row.
        metric: the metric that is split.
    """
    x = _values(row, metric, row.seeds, row.fixed)
    parts = with_images(split(x), over_images(row, None, metric, row.seeds, len(x) < 2))
    return VarianceSplit(row, None, row.summary()[metric], parts, len(x))


def splits_of_differences(board: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of the difference of every two rows that have a seed in common, the better one first.

    Args:
        board: the results of the task.
        metric: the metric that is split.
    """
    rows = having((place.row for place in board.places), metric)
    splits = []
    for a, b in itertools.combinations(rows, 2):
        if seeds := [seed for seed in a.seeds if seed in b.seeds]:
            fixed = a.fixed and b.fixed
            x = _values(a, metric, seeds, fixed) - _values(b, metric, seeds, fixed)
            gap = difference_of_rows(a, b, board.compared, metric)
            images = over_images(a, b, metric, seeds, len(x) < 2)
            splits.append(VarianceSplit(a, b, gap, with_images(split(x), images), len(x), wrong_sign(x, images)))
    return splits


def _values(row: SeedAggregate, metric: str, seeds: Sequence[int], fixed: bool) -> np.ndarray:
    """Return [seeds, orders, supports] of a row; of the first seed where all are the same."""
    return row.by_sequence(metric, seeds[:1] if fixed else seeds)
