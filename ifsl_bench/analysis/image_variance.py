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
from dataclasses import dataclass, replace

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.protocols.image_counts import ImageHits


@dataclass(frozen=True)
class ImageVariance:
    """The variance that the test images give a mean, in squared percent.

    Attributes:
        variance: at least 0.
        degrees_of_freedom: fewer where few images make most of the variance.
    """

    variance: float
    degrees_of_freedom: float

    @property
    def interval_half_width(self) -> float:
        """Half-width of the 95% interval over images alone."""
        from scipy.special import stdtrit

        return float(stdtrit(min(self.degrees_of_freedom, 1e9), 0.975)) * math.sqrt(self.variance)


IMAGES_HELD_FIXED = ImageVariance(0.0, math.inf)


@dataclass(frozen=True)
class WeightedPoolShares:
    """Shares of right queries of the images of a pool, already times the weight that they have in a metric.

    Attributes:
        right_shares: [S, H, G] for each seed, part of the episodes and group of images.
        query_counts: [H, G] their queries.
        class_of_group: [G] the class of each group.
    """

    right_shares: np.ndarray
    query_counts: np.ndarray
    class_of_group: np.ndarray


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
    pools = []
    for of_rows in _collect_right_shares_of_rows([a, b] if b else [a], metric, seeds) or ():
        mine, *others = [pool.right_shares for pool in of_rows]
        for theirs in others:
            same = len(mine) == len(theirs)
            mine = mine - theirs if same else mine.mean(0, keepdims=True) - theirs.mean(0, keepdims=True)
        pools.append(replace(of_rows[0], right_shares=mine))
    return sum_pool_variances(pools, models_fixed) if pools else None


def _collect_right_shares_of_rows(
    rows: Sequence[SeedAggregate], metric: str, seeds: Sequence[int]
) -> list[list[WeightedPoolShares]] | None:
    """Return for each pool the shares of each row, of the same groups of images; None where they are not recorded."""
    parts: list[list[tuple[ImageHits, Mapping[str, Mapping[str, float]]]]] = []  # of each row, by seed
    for row in rows:
        parts.append([])
        for seed in [seed for seed in row.seeds if seed in seeds] or row.seeds:
            hits, weights = row.image_hits[row.seeds.index(seed)], row.image_weights(metric, seed)
            if hits is None or weights is None:
                return None
            parts[-1].append((hits, weights))
    pools = []
    for name in parts[0][0][0].pools:
        step = max(hits.pools[name].images_per_group for part in parts for hits, _ in part)
        grouped = [[(hits.group_images(name, step), weights) for hits, weights in part] for part in parts]
        first = grouped[0][0][0].pools[name]
        if any((hits.pools[name].query_counts != first.query_counts).any() for part in grouped for hits, _ in part):
            return None
        shares = [np.stack([_weigh_right_shares(hits, weights, name) for hits, weights in part]) for part in grouped]
        classes = np.repeat(np.arange(len(first.images_per_class)), first.groups_per_class)
        pools.append([WeightedPoolShares(of_row, first.query_counts, classes) for of_row in shares])
    return pools


def _weigh_right_shares(hits: ImageHits, weights: Mapping[str, Mapping[str, float]], name: str) -> np.ndarray:
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
    return _estimate_effects_of_pools([[pool] for pool in pools], models_fixed).estimate_mean_variance()


@dataclass(frozen=True)
class ImageEffects:
    """What each group of test images does to the means of K rows, in percent.

    Attributes:
        effects_in_even_episodes: [S, K, G] effects by seed in the even episodes; a product of two has its correction
            already.
        effects_in_odd_episodes: [S, K, G] those in the odd episodes; in sessions the same.
        class_of_group: [G] classes, by which products have a mean of their own.
        models_fixed: see :func:`estimate_image_variance`.
    """

    effects_in_even_episodes: np.ndarray
    effects_in_odd_episodes: np.ndarray
    class_of_group: np.ndarray
    models_fixed: bool

    def effects_on_weighted_sums(self, weights: np.ndarray) -> ImageEffects:
        """Return the effects on weighted sums of the rows.

        Args:
            weights: [n, K].
        """
        return replace(
            self,
            effects_in_even_episodes=weights @ self.effects_in_even_episodes,
            effects_in_odd_episodes=weights @ self.effects_in_odd_episodes,
        )

    def estimate_covariance(self) -> np.ndarray:
        """Return the covariances that test images give the rows, as means over seeds, [K, K]; not always positive."""
        seeds = len(self.effects_in_even_episodes)
        both = self.effects_in_even_episodes.sum(0) @ self.effects_in_odd_episodes.sum(0).T
        if self.models_fixed or seeds < 2:
            both = both / seeds**2
        else:
            both = (both - (self.effects_in_even_episodes @ self.effects_in_odd_episodes.swapaxes(1, 2)).sum(0)) / (
                seeds * (seeds - 1)
            )
        return np.asarray(both + both.T) / 2

    def estimate_mean_variance(self) -> ImageVariance:
        """Return the mean over the rows of the variance that test images give them."""
        seeds = len(self.effects_in_even_episodes)
        products = (self.effects_in_even_episodes.sum(0) * self.effects_in_odd_episodes.sum(0)).mean(0)  # [G]
        if self.models_fixed or seeds < 2:
            products = products / seeds**2
        else:
            products = (products - (self.effects_in_even_episodes * self.effects_in_odd_episodes).sum(0).mean(0)) / (
                seeds * (seeds - 1)
            )
        value, groups = float(products.sum()), np.bincount(self.class_of_group)
        means = np.bincount(self.class_of_group, products) / np.maximum(groups, 1)
        spread = float(((products - means[self.class_of_group]) ** 2).sum())
        freedom = float(np.maximum(groups - 1, 0).sum())
        if value <= 0:
            return IMAGES_HELD_FIXED
        return ImageVariance(value, min(freedom, 2 * value**2 / spread) if spread else freedom)


def estimate_image_effects(
    rows: Sequence[SeedAggregate], metric: str, seeds: Sequence[int], models_fixed: bool
) -> ImageEffects | None:
    """Return what each test image does to the means of rows; None where a result does not record hits of images.

    Args:
        rows: on one task, with these seeds all.
        metric: its name.
        seeds: that means are over.
        models_fixed: see :func:`estimate_image_variance`.
    """
    pools = _collect_right_shares_of_rows(rows, metric, seeds)
    return _estimate_effects_of_pools(pools, models_fixed) if pools else None


def _estimate_effects_of_pools(pools: Sequence[Sequence[WeightedPoolShares]], models_fixed: bool) -> ImageEffects:
    """Return the effects of the images of all pools on rows, of whose shares each pool has one for each row."""
    first, second, strata, before = [], [], [], 0
    for of_rows in pools:
        # Classes of one group are one stratum: they have no variance within.
        classes = of_rows[0].class_of_group
        alone = np.bincount(classes)[classes] == 1
        stratum = np.where(alone, len(classes), classes)
        linear = [_linearise_shares(pool, stratum) for pool in of_rows]
        weights = linear[0][1]  # [H, G]
        y = 100 * np.stack([effects for effects, _ in linear], 2)  # [S, H, K, G]
        scale = np.sqrt(_finite_sample_correction(weights[0], weights[-1], stratum)[stratum])
        first.append(y[:, 0] * scale)
        second.append(y[:, -1] * scale)
        strata.append(stratum + before)
        before += int(stratum.max()) + 1
    return ImageEffects(np.concatenate(first, -1), np.concatenate(second, -1), np.concatenate(strata), models_fixed)


def _linearise_shares(pool: WeightedPoolShares, stratum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y, [S, H, G], and the weights of images, [H, G]."""
    weights = pool.query_counts / np.maximum(pool.query_counts.sum(1, keepdims=True), 1)
    y = np.empty_like(pool.right_shares)
    for seed, part in np.ndindex(pool.right_shares.shape[:2]):
        x, weight = pool.right_shares[seed, part], weights[part]
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
