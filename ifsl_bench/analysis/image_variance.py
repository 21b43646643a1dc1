"""Variance of a mean over other test images of the same classes. Imports no torch.

Results record how often each test image was a query, and how often it was right, see
:class:`ifsl_bench.protocols.image_counts.ImageHits`. A metric is a weighted sum of shares of right queries, of the
pools of base and of novel queries. The share of a pool is made linear in its images,

    y[j] = a[j] / sum(a) * (x[j] - mean of x over the class of j, weighted by a),

with the queries a[j] of image j and the share x[j] of them that is right: a ratio estimator, since a[j] is random where
queries are drawn. The variance over other images of the same classes is the sum of y^2, with n / (n - 1) for a class of
n images that are asked equally often. Even and odd episodes have a y each, whose product takes the place of the square:
queries of one image in both halves share nothing but the image, and what episodes and draws add to a square is in the
variance over episodes. For the same reason products of two seeds take the place of squares unless models are held
fixed: what an image does to the model of one seed alone is in the variance over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.protocols.image_counts import ImageHits


@dataclass(frozen=True)
class ImageVariance:
    """The variance that the test images give a mean, in squared percent.

    Attributes:
        variance: at least 0.
        degrees_of_freedom: of freedom, fewer where few images make most of it.
    """

    variance: float
    degrees_of_freedom: float

    @property
    def interval_half_width(self) -> float:
        """Half-width of the 95% interval over images alone."""
        from scipy.special import stdtrit

        return float(stdtrit(min(self.degrees_of_freedom, 1e9), 0.975)) * math.sqrt(self.variance)


HELD_FIXED = ImageVariance(0.0, math.inf)


@dataclass(frozen=True)
class WeightedPoolShares:
    """Shares of right queries of the images of a pool, already times the weight that they have in a metric.

    Attributes:
        shares: [S, H, G] for each seed, part of the episodes and group of images.
        query_counts: [H, G] their queries.
        group_classes: [G] the class of each group.
    """

    shares: np.ndarray
    query_counts: np.ndarray
    group_classes: np.ndarray


def estimate_image_variance(
    a: SeedAggregate, b: SeedAggregate | None, metric: str, seeds: Sequence[int], models_fixed: bool
) -> ImageVariance | None:
    """Return the variance that test images give row a, or the difference a - b, as a mean over seeds.

    Args:
        a: one row.
        b: another one on the same task; None for the first alone.
        metric: its name.
        seeds: that the mean is over; where there is none, of each row all.
        models_fixed: whether the seeds' models are held fixed; else what images do to single models is left to the
            variance over seeds.

    Returns:
        None where a result does not record hits of images, or where the metric is not made of them.
    """
    parts: list[list[tuple[ImageHits, Mapping[str, Mapping[str, float]]]]] = []  # of each row, by seed
    for row in (a, b) if b else (a,):
        parts.append([])
        for seed in [seed for seed in row.seeds if seed in seeds] or row.seeds:
            hits, weights = row.image_hits[row.seeds.index(seed)], row.image_weights(metric, seed)
            if hits is None or weights is None:
                return None
            parts[-1].append((hits, weights))
    pools = []
    for name in parts[0][0][0].pools:
        step = max(hits.pools[name].step for part in parts for hits, _ in part)
        grouped = [[(hits.group_images(name, step), weights) for hits, weights in part] for part in parts]
        first = grouped[0][0][0].pools[name]
        if any((hits.pools[name].query_counts != first.query_counts).any() for part in grouped for hits, _ in part):
            return None
        mine, *others = [
            np.stack([_weighted_shares(hits, weights, name) for hits, weights in part]) for part in grouped
        ]
        for theirs in others:
            same = len(mine) == len(theirs)
            mine = mine - theirs if same else mine.mean(0, keepdims=True) - theirs.mean(0, keepdims=True)
        pools.append(WeightedPoolShares(mine, first.query_counts, np.repeat(np.arange(len(first.sizes)), first.groups)))
    return sum_pool_variances(pools, models_fixed)


def _weighted_shares(hits: ImageHits, weights: Mapping[str, Mapping[str, float]], name: str) -> np.ndarray:
    """Return the sum of the shares of a pool times their weights in a metric, [H, G]."""
    shares = hits.right_shares(name)
    total = np.zeros(hits.pools[name].query_counts.shape)
    for what, weight in weights.get(name, {}).items():
        total += weight * np.nan_to_num(shares[what])
    return total


def sum_pool_variances(pools: Sequence[WeightedPoolShares], models_fixed: bool) -> ImageVariance:
    """Return the variance of the mean over seeds of the sum of the pools' shares; see the top of this module.

    Args:
        pools: with the same seeds.
        models_fixed: see :func:`estimate_image_variance`.
    """
    value = spread = freedom = 0.0
    for pool in pools:
        # Classes of one group are one stratum: they have no variance within.
        alone = np.bincount(pool.group_classes)[pool.group_classes] == 1
        stratum = np.where(alone, len(pool.group_classes), pool.group_classes)
        y, weights = _linearise_shares(pool, stratum)  # [S, H, G], [H, G]
        seeds, first, second = len(y), y[:, 0], y[:, -1]
        products = first.sum(0) * second.sum(0) / seeds**2
        if not models_fixed and seeds > 1:
            products = (first.sum(0) * second.sum(0) - (first * second).sum(0)) / (seeds * (seeds - 1))
        products *= _finite_sample_correction(weights[0], weights[-1], stratum)[stratum]
        groups = np.bincount(stratum)
        means = np.bincount(stratum, products) / np.maximum(groups, 1)
        value += float(products.sum())
        spread += float(((products - means[stratum]) ** 2).sum())
        freedom += float(np.maximum(groups - 1, 0).sum())
    if value <= 0:
        return HELD_FIXED
    return ImageVariance(1e4 * value, min(freedom, 2 * value**2 / spread) if spread else freedom)


def _linearise_shares(pool: WeightedPoolShares, stratum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y, [S, H, G], and the weights of images, [H, G]."""
    weights = pool.query_counts / np.maximum(pool.query_counts.sum(1, keepdims=True), 1)
    y = np.empty_like(pool.shares)
    for seed, part in np.ndindex(pool.shares.shape[:2]):
        x, weight = pool.shares[seed, part], weights[part]
        sums, totals = np.bincount(stratum, weight * x), np.bincount(stratum, weight)
        y[seed, part] = weight * (x - np.divide(sums, totals, out=sums, where=totals > 0)[stratum])
    return y, weights


def _finite_sample_correction(first: np.ndarray, second: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Return how many times as large products would be if means over strata were known, [strata].

    For n images of equal weight that is n / (n - 1); in general it follows from the weights, [G], of the two parts.
    """
    both = np.bincount(stratum, first * second)
    lost = np.zeros_like(both)
    relative = []
    for weight in (first, second):
        totals = np.bincount(stratum, weight)[stratum]
        relative.append(np.divide(weight, totals, out=np.zeros_like(weight), where=totals > 0))
        lost += np.bincount(stratum, first * second * relative[-1])
    left = both - lost + both * np.bincount(stratum, relative[0] * relative[1])
    return np.divide(both, left, out=np.zeros_like(both), where=left > 1e-9 * both)
