"""The variance over test images: against plain loops, and against the truth of images that are drawn anew."""

from __future__ import annotations

import numpy as np
import pytest

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.image_variance import WeightedPoolShares, estimate_image_variance, sum_pool_variances
from ifsl_bench.analysis.ranking import Ranking, SeedVariancePrior, estimate_difference
from ifsl_bench.protocols.image_counts import ImageHits, PoolHits
from ifsl_bench.protocols.metrics import EpisodeHitCounts
from ifsl_bench.store.schema import StoredImageHits
from tests.store.result_fields import counted


def test_it_is_that_of_a_plain_loop():
    """Two classes, weights and one part: the sum of squares of what each image adds."""
    rng = np.random.default_rng(0)
    asked, classes = rng.integers(1, 9, (1, 7)), np.array([0, 0, 0, 1, 1, 1, 1])
    x = rng.random((2, 1, 7))
    expected = 0.0
    for c in (0, 1):
        own = [j for j in range(7) if classes[j] == c]
        share = x.mean(0)[0]
        a = [asked[0, j] for j in own]
        mean = sum(n * share[j] for n, j in zip(a, own, strict=True)) / sum(a)
        parts = [n / asked.sum() * (share[j] - mean) for n, j in zip(a, own, strict=True)]
        squares, cubes = sum(n**2 for n in a), sum(n**3 for n in a)
        left = 1 - 2 * cubes / squares / sum(a) + squares / sum(a) ** 2  # of the expectation, as the mean is estimated
        expected += sum(part**2 for part in parts) / left
    found = sum_pool_variances([WeightedPoolShares(x, asked, classes)], models_fixed=True)
    assert found.variance == pytest.approx(1e4 * expected)
    cross = sum_pool_variances([WeightedPoolShares(x, asked, classes)], models_fixed=False)
    halves = sum_pool_variances(
        [WeightedPoolShares(x.transpose(1, 0, 2), np.repeat(asked, 2, 0), classes)], models_fixed=True
    )
    assert cross.variance == pytest.approx(halves.variance), "products of seeds, and of halves, in place of squares"
    assert cross.variance < found.variance
    equal = sum_pool_variances([WeightedPoolShares(x, np.full((1, 7), 5), classes)], models_fixed=True)
    within = sum(n * np.var(x.mean(0)[0, classes == c], ddof=1) for c, n in ((0, 3), (1, 4)))
    assert equal.variance == pytest.approx(1e4 * within / 49)


@pytest.mark.parametrize("seeds", [1, 3])
def test_it_is_the_variance_over_images_alone_though_few_queries_are_asked_of_each(seeds):
    """Queries are random and answers vary from query to query and from seed to seed: neither is counted as images'."""
    rng, classes = np.random.default_rng(1), np.repeat(np.arange(20), 15)
    mean, spread, own = 0.6, 0.25, 0.15  # of images, and of an image with one seed
    estimates = []
    for _ in range(300):
        chance = np.clip(rng.normal(mean, spread, 300), 0, 1)
        of_seed = np.clip(chance + rng.normal(0, own, (seeds, 1, 300)), 0, 1)
        asked = rng.poisson(2.0, (2, 300))
        right = rng.binomial(asked, of_seed) / np.maximum(asked, 1)
        estimates.append(
            sum_pool_variances([WeightedPoolShares(right, asked, classes)], models_fixed=seeds < 2).variance
        )
    draws = np.clip(rng.normal(mean, spread, 10**6), 0, 1)
    shown = np.clip(draws[:, None] + rng.normal(0, own, (10**6, 4)), 0, 1)
    truth = np.cov(shown[:, 0], shown[:, 0 if seeds < 2 else 1])[0, 1]  # what seeds have in common
    assert np.mean(estimates) == pytest.approx(1e4 * truth / 300, rel=0.05)


def test_a_class_of_one_image_is_compared_with_others_of_one():
    shares = np.array([0.1, 0.5, 0.9, 0.2, 0.4]).reshape(1, 1, 5)
    asked, classes = np.ones((1, 5), int), np.array([0, 1, 2, 3, 3])
    found = sum_pool_variances([WeightedPoolShares(shares, asked, classes)], models_fixed=True)
    assert found.variance == pytest.approx(
        1e4 / 25 * (3 * np.var([0.1, 0.5, 0.9], ddof=1) + 2 * np.var([0.2, 0.4], ddof=1))
    )


def rows_of_images(step: int = 1) -> list[SeedAggregate]:
    """Two rows of three seeds with the hits of 40 base and 40 novel images; the second row's are grouped."""
    rng = np.random.default_rng(3)
    asked = rng.poisson(6, (2, 40))
    rows, episodes, classes = [], 40, np.tile(np.arange(5), (40, 1))
    for label, better in (("a", 0.1), ("b", 0.0)):
        results = []
        for seed in range(3):
            pools, sums = {}, {}
            for name in ("base", "novel"):
                alone = rng.binomial(asked, 0.6 + better)
                pools[name] = PoolHits(np.full(4, 10), 1, asked, {"joint": rng.binomial(alone, 0.9), "alone": alone})
                for what in ("joint", "alone"):
                    total = int(pools[name].right_counts[what].sum())
                    sums[f"{name}_{what}"] = rng.multinomial(total, np.full(episodes, 1 / episodes))
            hits = ImageHits(pools, right_counts_are_shares=False)
            for name in pools if label == "b" else ():
                hits = hits.group_images(name, step)
            counts = EpisodeHitCounts(**sums, base_queries=30, novel_queries=30)
            results.append(counted(label, seed, counts, classes, images=StoredImageHits.from_image_hits(hits)))
        rows.append(SeedAggregate(label, "yours", tuple(results)))
    return rows


def test_overall_intervals_ranks_and_comparisons_include_images():
    a, b = rows_of_images()
    images = estimate_image_variance(a, b, "acc", a.seeds, models_fixed=False)
    x, y = (row.metric_by_seed("acc") for row in (a, b))
    expected = estimate_difference(x, y, SeedVariancePrior(0, 0), 2, image_variance=images)
    assert expected.standard_error**2 == pytest.approx(
        estimate_difference(x, y, SeedVariancePrior(0, 0), 2).standard_error ** 2 + images.variance
    )
    assert Ranking([a, b]).estimate_row_difference(a, b) == expected
    assert not expected.images_fixed
    comparison = compare_rows(a, b, [a, b])
    assert comparison.overall_differences["acc"] == expected
    fixed = estimate_image_variance(a, b, "delta", a.seeds, models_fixed=True)
    assert comparison.image_intervals["delta"].interval == pytest.approx(fixed.interval_half_width)
    assert "ausuc" not in comparison.image_intervals
    older = SeedAggregate(
        "b",
        "yours",
        tuple(counted("b", s, b.results[s].to_hit_counts(), b.results[s].drawn_novel_classes()) for s in b.seeds),
    )
    assert estimate_image_variance(a, older, "acc", a.seeds, models_fixed=True) is None
    assert Ranking([a, older]).estimate_row_difference(a, older).images_fixed


def test_rows_whose_images_are_grouped_differently_are_compared_on_the_larger_groups():
    fine, (_, coarse) = rows_of_images(), rows_of_images(step=4)
    assert coarse.results[0].images.pools["base"].step == 4

    def variance(a, b):
        return estimate_image_variance(a, b, "acc", a.seeds, models_fixed=True)

    mixed, backwards = variance(fine[0], coarse), variance(coarse, fine[0])
    assert mixed.variance == pytest.approx(backwards.variance) != pytest.approx(variance(*fine).variance)
    assert variance(coarse, fine[1]).variance == 0, "the same hits"
    assert mixed.degrees_of_freedom < variance(*fine).degrees_of_freedom
