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

from ifsl_bench.analysis.aggregate import SeedAggregate, select_rows_with_metric
from ifsl_bench.analysis.comparison import estimate_overall_difference as difference_of_rows
from ifsl_bench.analysis.image_variance import ImageVariance, estimate_image_variance
from ifsl_bench.analysis.ranking import RowDifference, SeedVariancePrior, estimate_difference
from ifsl_bench.analysis.task_results import TaskResults, make_no_results_error
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.utils.errors import UserError, unknown_name_error

INTERVAL_TAIL_PROBABILITY = 0.025  # of a 95% interval, on each side
ZERO_DIFFERENCE_TOLERANCE = 1e-9  # points; a mean of differences that cancel is only that close to 0
IMAGE_SOURCE_NAME = "test images"
SINGLE_VALUE_VARIANCE_KEY = "one"  # a single value: one order, support set and seed
DESIGN_VARIANCE_SOURCES = ("order", "support", "seed", "seed by order", "rest")  # that the design tells apart
ALL_VARIANCE_SOURCES = (*DESIGN_VARIANCE_SOURCES, IMAGE_SOURCE_NAME)


@dataclass(frozen=True, eq=False)
class MeanSquare:
    """A mean square, or a sum of several.

    Attributes:
        value: in squared units of the metric.
        degrees_of_freedom: for normal effects.
        effective_degrees_of_freedom: fewer than these where effects have heavy tails.
        order_contributions: the part of the value that each order contributes, [orders]; None of training seeds.
    """

    value: float
    degrees_of_freedom: float
    effective_degrees_of_freedom: float
    order_contributions: np.ndarray | None = None

    @classmethod
    def from_orders(cls, order_contributions: np.ndarray, degrees_of_freedom: float) -> MeanSquare:
        """Return the mean square of the contributions of orders.

        Of normal effects a mean square S has the variance 2 S^2 / degrees of freedom. The spread of the contributions
        gives an estimate of the variance of S. Where the estimate is larger than 2 S^2 / degrees, the effective degrees
        of freedom are the number that makes both equal.

        Args:
            order_contributions: the contribution of each order, [orders].
            degrees_of_freedom: of the mean square, before heavy tails.
        """
        value = float(order_contributions.sum())
        variance = len(order_contributions) * float(order_contributions.var(ddof=1))
        return cls(
            value,
            degrees_of_freedom,
            min(degrees_of_freedom, 2 * value**2 / variance) if variance else degrees_of_freedom,
            order_contributions,
        )


@dataclass(frozen=True)
class VarianceEstimate:
    """A variance with its 95% interval, in squared units of the row; an estimate below 0 counts as 0."""

    estimated_value: float
    lower_limit: float
    upper_limit: float


@dataclass(frozen=True)
class WrongSignChance:
    """The chance that the sign of one comparison of two rows (one order, support set and seed) is not their mean's.

    Attributes:
        chance: under normal effects.
        lower_limit: of its 95% interval.
        upper_limit: of its 95% interval.
        observed_share: the share of the single comparisons made here whose sign is not that of their mean, ties half.
    """

    chance: float
    lower_limit: float
    upper_limit: float
    observed_share: float


def estimate_mean_difference(differences: np.ndarray, image_variance: ImageVariance | None = None) -> RowDifference:
    """Return the mean of differences [seeds, orders, supports] of two rows, with its error over orders and images.

    Args:
        differences: in percentage points, [seeds, orders, supports].
        image_variance: the variance that test images give the mean; None where they are held fixed.

    Raises:
        UserError: there is one order.
    """
    means = _mean_of_each_order(differences)
    return estimate_difference(
        means, np.zeros_like(means), SeedVariancePrior(0.0, 0.0), n_seed_dependent=2, image_variance=image_variance
    )


def _mean_of_each_order(x: np.ndarray) -> np.ndarray:
    """Return the means over support sets, [seeds, orders]; raise :class:`UserError` for one order."""
    if x.shape[1] < 2:
        raise UserError("one order of the classes has no interval over orders, and its variance cannot be split")
    return np.asarray(x.mean(2))


def split_variance(values: np.ndarray) -> dict[str, VarianceEstimate]:
    """Return the variances of the effects in [seeds, orders, supports], by :data:`DESIGN_VARIANCE_SOURCES` and "one".

    A part that the design cannot tell from others is left out: with one seed (pass one where all are the same by
    construction) those with seeds, with one support set for each order "support", which is then in "order", or "rest",
    which is in "seed by order". "one" is the variance of a single value, of any order, support set and seed.

    Raises:
        UserError: there is one order.
    """
    squares, weights = compute_mean_squares(values), weights_of_mean_squares(*values.shape)
    return {
        part: _estimate_variance([(w, squares[name]) for name, w in of_part.items()])
        for part, of_part in weights.items()
    }


def add_image_variance(
    variances: Mapping[str, VarianceEstimate], image_variance: ImageVariance | None
) -> dict[str, VarianceEstimate]:
    """Add the variance of test images to :func:`split_variance`'s, and to the variance of a single value.

    Args:
        variances: by :data:`DESIGN_VARIANCE_SOURCES`, and of all as "one".
        image_variance: None where they are held fixed.
    """
    if image_variance is None:
        return dict(variances)
    from scipy.special import chdtri

    value, low, high = image_variance.variance, 0.0, 0.0
    if value:
        low, high = (
            value * image_variance.degrees_of_freedom / float(chdtri(image_variance.degrees_of_freedom, tail))
            for tail in (INTERVAL_TAIL_PROBABILITY, 1 - INTERVAL_TAIL_PROBABILITY)
        )
    one = variances[SINGLE_VALUE_VARIANCE_KEY]
    both = VarianceEstimate(
        one.estimated_value + value,
        max(0.0, one.estimated_value + value - math.hypot(one.estimated_value - one.lower_limit, value - low)),
        one.estimated_value + value + math.hypot(one.upper_limit - one.estimated_value, high - value),
    )
    return {**variances, IMAGE_SOURCE_NAME: VarianceEstimate(value, low, high), SINGLE_VALUE_VARIANCE_KEY: both}


def compute_mean_squares(x: np.ndarray) -> dict[str, MeanSquare]:
    """Return the mean square of each part whose degrees of freedom are not 0, of [seeds, orders, supports].

    Raises:
        UserError: there is one order.
    """
    seeds, orders, supports = x.shape
    means = _mean_of_each_order(x)
    by_seed, by_order, by_support, mean = means.mean(1), means.mean(0), x.mean(0), means.mean()
    both = means - by_seed[:, None] - by_order + mean
    rest = x - means[:, :, None] - by_support + by_order[:, None]
    sums = {
        "order": (seeds * supports * (by_order - mean) ** 2, orders - 1),
        "support": (seeds * ((by_support - by_order[:, None]) ** 2).sum(1), orders * (supports - 1)),
        "seed by order": (supports * (both**2).sum(0), (seeds - 1) * (orders - 1)),
        "rest": ((rest**2).sum((0, 2)), (seeds - 1) * orders * (supports - 1)),
    }
    squares = {n: MeanSquare.from_orders(parts / degrees, degrees) for n, (parts, degrees) in sums.items() if degrees}
    if seeds > 1:
        of_seeds = orders * supports * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
        squares["seed"] = MeanSquare(of_seeds, seeds - 1, seeds - 1)
    return squares


def weights_of_mean_squares(seeds: int, orders: int, supports: int) -> dict[str, dict[str, float]]:
    """Return part -> mean square -> its weight in the estimate, from the expected mean squares of the design.

    Args:
        seeds: how many.
        orders: how many.
        supports: support sets of each order.
    """
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


def _merge_order_terms(terms: Sequence[tuple[float, MeanSquare]]) -> list[tuple[float, MeanSquare]]:
    """Merge the terms over orders that have one sign into one term.

    An order whose effects are large raises several mean squares at once, and their sum varies more than that of
    independent ones. The sum has Satterthwaite's degrees of freedom.
    """
    merged = [(w, square) for w, square in terms if w and square.order_contributions is None]
    for sign in (1, -1):
        same = [
            (abs(w), square, square.order_contributions)
            for w, square in terms
            if w * sign > 0 and square.order_contributions is not None
        ]
        if parts := [w * of_orders for w, _, of_orders in same if of_orders is not None]:
            spread = sum((w * square.value) ** 2 / square.degrees_of_freedom for w, square, _ in same)
            value = sum(w * square.value for w, square, _ in same)
            merged.append((sign, MeanSquare.from_orders(np.sum(parts, axis=0), value**2 / spread if spread else 1.0)))
    return merged


def _estimate_variance(terms: Sequence[tuple[float, MeanSquare]]) -> VarianceEstimate:
    low, high = _variance_interval(_merge_order_terms(terms))
    return VarianceEstimate(max(0.0, sum(w * square.value for w, square in terms)), max(0.0, low), max(0.0, high))


def _variance_interval(terms: Sequence[tuple[float, MeanSquare]]) -> tuple[float, float]:
    """Return the 95% interval of the sum of w times the expectation of a mean square (Ting et al. 1990)."""
    value = sum(w * square.value for w, square in terms)
    positive = [(w * square.value, square.effective_degrees_of_freedom) for w, square in terms if w > 0]
    negative = [(-w * square.value, square.effective_degrees_of_freedom) for w, square in terms if w < 0]
    below = _squared_distance_to_lower_limit(positive, negative, INTERVAL_TAIL_PROBABILITY)
    above = _squared_distance_to_lower_limit(
        negative, positive, INTERVAL_TAIL_PROBABILITY
    )  # the upper limit is minus the lower one of minus the sum
    return value - math.sqrt(max(0.0, below)), value + math.sqrt(max(0.0, above))


def _squared_distance_to_lower_limit(
    positive: Sequence[tuple[float, float]], negative: Sequence[tuple[float, float]], tail: float
) -> float:
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


def estimate_wrong_sign_chance(
    differences: np.ndarray, image_variance: ImageVariance | None = None
) -> WrongSignChance | None:
    """Estimate how often one comparison has the wrong sign, from differences [seeds, orders, supports] of two rows.

    None where their mean is 0, as of equal rows: it has no sign.

    The chance is Phi(-|d| / s), d the mean and s^2 the variance of a single difference. Its interval is the one of
    d / s, by the delta method, with Student's distribution and the degrees of freedom of the overall interval of d. It
    reaches 0.5 where the interval of d holds 0. Where d is small beside its own error, |d| is mostly larger than the
    true one, so that the chance is estimated too small.

    Args:
        differences: in percentage points, [seeds, orders, supports].
        image_variance: the variance that test images give their mean; None where they are held fixed.

    Raises:
        UserError: there is one order.
    """
    from scipy.special import ndtr, stdtrit

    mean, squares = estimate_mean_difference(differences, image_variance), compute_mean_squares(differences)
    if abs(mean.mean) < ZERO_DIFFERENCE_TOLERANCE:
        return None
    merged = _merge_order_terms(
        [(w, squares[name]) for name, w in weights_of_mean_squares(*differences.shape)["one"].items()]
    )
    terms = [(w * square.value, square.effective_degrees_of_freedom) for w, square in merged]
    terms += [(image_variance.variance, image_variance.degrees_of_freedom)] if image_variance else []
    variance = sum(value for value, _ in terms)
    observed = float(((np.sign(differences) != np.sign(mean.mean)) * np.where(differences == 0, 0.5, 1.0)).mean())
    if variance <= 0:
        return WrongSignChance(0.0, 0.0, 0.0, observed)
    deviation = math.sqrt(variance)
    ratio = abs(mean.mean) / deviation
    of_variance = sum(2 * value**2 / degrees for value, degrees in terms)
    error = math.sqrt((mean.standard_error / deviation) ** 2 + ratio**2 * of_variance / (4 * variance**2))
    half = float(stdtrit(min(mean.degrees_of_freedom, 1e9), 1 - INTERVAL_TAIL_PROBABILITY)) * error
    return WrongSignChance(
        float(ndtr(-ratio)), float(ndtr(-(ratio + half))), float(ndtr(-max(0.0, ratio - half))), observed
    )


@dataclass(frozen=True, eq=False)
class VarianceSplit:
    """A row, or the difference a - b of two, with the variance of its parts."""

    row: SeedAggregate
    subtracted_row: SeedAggregate | None
    mean_with_interval: (
        Estimate | RowDifference
    )  # with its 95% interval: of a row over orders, of a difference over orders and seeds
    variances: Mapping[str, VarianceEstimate]  # by source and "one"; what the design cannot tell is left out
    n_seeds: int  # how many it is over; 1 where all are the same by construction
    wrong_sign_chance: WrongSignChance | None = None  # of a difference that is not 0


def split_variance_of_rows(task_results: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of each row, the best first.

    Args:
        task_results: the results of the task.
        metric: the metric that is split.

    Raises:
        UserError: the task is in episodes, has one order, or no row has the metric.
    """
    protocol_of_task(task_results.task).require_feature(
        "variance", task_results.task_name, "variance splits that of tasks in sessions"
    )
    if not task_results.rows:
        raise make_no_results_error(task_results)
    rows = select_rows_with_metric((place.row for place in task_results.ranked_rows), metric)
    if not rows:
        metrics = {name for row in task_results.rows for name in row.metric_names}
        raise unknown_name_error("metric", metric, metrics, where=f"of the measured rows of {task_results.task_name}")
    return [split_variance_of_row(row, metric) for row in rows]


def split_variance_of_row(row: SeedAggregate, metric: str) -> VarianceSplit:
    """Return the split of a row; raise :class:`UserError` where there is one order of the classes.

    Args:
        row: with results of all orders.
        metric: the metric that is split.
    """
    x = _crossed_metric_values(row, metric, row.seeds, row.is_seed_independent)
    parts = add_image_variance(split_variance(x), estimate_image_variance(row, None, metric, row.seeds, len(x) < 2))
    return VarianceSplit(row, None, row.summarise_metrics()[metric], parts, len(x))


def split_variance_of_differences(task_results: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of the difference of every two rows that have a seed in common, the better one first.

    Args:
        task_results: the results of the task.
        metric: the metric that is split.
    """
    rows = select_rows_with_metric((place.row for place in task_results.ranked_rows), metric)
    splits = []
    for a, b in itertools.combinations(rows, 2):
        if seeds := [seed for seed in a.seeds if seed in b.seeds]:
            fixed = a.is_seed_independent and b.is_seed_independent
            x = _crossed_metric_values(a, metric, seeds, fixed) - _crossed_metric_values(b, metric, seeds, fixed)
            gap = difference_of_rows(a, b, task_results.comparable_rows, metric)
            images = estimate_image_variance(a, b, metric, seeds, len(x) < 2)
            splits.append(
                VarianceSplit(
                    a,
                    b,
                    gap,
                    add_image_variance(split_variance(x), images),
                    len(x),
                    estimate_wrong_sign_chance(x, images),
                )
            )
    return splits


def _crossed_metric_values(row: SeedAggregate, metric: str, seeds: Sequence[int], fixed: bool) -> np.ndarray:
    """Return [seeds, orders, supports] of a row; of the first seed where all are the same."""
    return row.metric_by_sequence(metric, seeds[:1] if fixed else seeds)
