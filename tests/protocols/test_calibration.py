"""AUSUC and calibrated accuracy against sweeps over all thresholds, logits and all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ifsl_bench.protocols.calibration import (
    MOST_CURVE_POINTS,
    N_BIAS_GRID_QUANTILES,
    RESAMPLE_COUNT,
    Margins,
    bootstrap_episode_counts,
    choose_curve_biases,
    find_best_bias,
    find_best_bias_by_resample,
    find_best_grid_bias_by_resample,
    find_bias,
)
from ifsl_bench.protocols.metrics import EpisodeHitCounts, harmonic_mean_by_episode, mean_with_interval

NAN, INF = np.nan, np.inf


def some(seed: int, episodes: int = 4, values: int = 6, base: int = 5, novel: int = 4) -> Margins:
    """Margins with many ties, a third of them of queries that are wrong anyway."""
    generator = np.random.default_rng(seed)

    def draw(n: int, shift: float) -> np.ndarray:
        margins = generator.integers(0, values, (episodes, n)) + shift
        return np.where(generator.random((episodes, n)) < 0.3, NAN, margins).astype(np.float32)

    return Margins(draw(base, 1), draw(novel, 0))


def sweep(values: np.ndarray) -> list[float]:
    """A threshold in each interval that margins make, their ends included."""
    at = sorted({float(v) for v in values.ravel() if np.isfinite(v)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(at)]
    return sorted([at[0] - 1, *at, *middles, at[-1] + 1])


def area(base: np.ndarray, novel: np.ndarray) -> float:
    """Under the curve of (novel, base) accuracy as the bias grows, by trapezoids."""
    x, y = [], []
    for bias in sweep(np.concatenate([base, novel])):
        y.append(sum(t >= bias for t in base) / len(base))
        x.append(sum(t < bias for t in novel) / len(novel))
    return sum((x1 - x0) * (y0 + y1) / 2 for x0, x1, y0, y1 in zip(x, x[1:], y, y[1:], strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_ausuc_is_the_area_under_a_sweep_of_all_biases(seed):
    margins = some(seed)
    counts = EpisodeHitCounts(*(np.zeros(4, int),) * 4, 5, 4, pairs=margins.doubled_ordered_pairs())
    for e, ausuc in enumerate(counts.metrics_by_unit()["ausuc"]):
        assert ausuc == pytest.approx(
            100 * area(margins.base_margins[e], margins.novel_margins[e]), abs=1e-9
        )  # rounding, in percent


def test_biases_of_a_grid_are_nearly_as_good_as_the_best_of_all():
    """In every resample within one in a thousand of the right answers; and some are not the best."""
    generator = np.random.default_rng(3)
    base, novel = generator.normal(1, 1, (12, 4000)), generator.normal(-0.5, 1, (12, 3000))
    base[generator.random(base.shape) < 0.3] = NAN
    base[0, 0], novel[0, 0] = INF, -INF
    margins, times = Margins(base.astype(np.float32), novel.astype(np.float32)), bootstrap_episode_counts(12)
    pairs = zip(
        find_best_grid_bias_by_resample(margins, times), find_best_bias_by_resample(margins, times), times, strict=True
    )
    hits = np.array([[np.dot(often, sum(margins.joint_hits_with_bias(b))) for b in biases] for *biases, often in pairs])
    assert (hits[:, 0] <= hits[:, 1]).all()
    assert (hits[:, 0] > 0.999 * hits[:, 1]).all()
    assert (hits[:, 0] < hits[:, 1]).any()


@pytest.mark.parametrize("values", [20, 10**6])
def test_no_bias_of_the_grid_is_better_than_the_one_chosen(values):
    """All quantiles are counted one by one, with many ties and with few."""
    margins, times = some(5, 12, values, base=600, novel=500), bootstrap_episode_counts(12)
    grid = np.unique(np.quantile(margins.finite_margins().astype(np.float64), np.linspace(0, 1, N_BIAS_GRID_QUANTILES)))
    hits = times @ np.stack([sum(margins.joint_hits_with_bias(bias)) for bias in grid], 1)  # [RESAMPLES, GRID]
    chosen = np.searchsorted(grid, find_best_grid_bias_by_resample(margins, times))
    assert (hits[np.arange(len(times)), chosen] == hits.max(1)).all()


def acc(margins: Margins, bias: float) -> int:
    return sum(
        int((margins.base_margins[e] >= bias).sum() + (margins.novel_margins[e] < bias).sum())
        for e in range(len(margins.base_margins))
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_bias_is_better_than_the_one_chosen_and_it_is_in_the_middle(seed):
    margins = some(seed, values=(6, 60, 1000)[seed % 3])
    tried = sweep(np.concatenate([margins.base_margins.ravel(), margins.novel_margins.ravel()]))
    hits = [acc(margins, bias) for bias in tried]
    bias = find_best_bias(margins)
    assert acc(margins, bias) == max(hits)
    # The plateaus: runs of thresholds that are equally good, between the margins beside them.
    plateaus, run = [], []
    for threshold, value in [*zip(tried, hits, strict=True), (INF, -1)]:
        if value == max(hits):
            run.append(threshold)
        elif run:
            plateaus.append(run)
            run = []
    at = np.sort(margins.finite_margins())
    ends = [(max(at[at < r[0]], default=at[0]), r[-1] if r[-1] in at else min(at[at > r[-1]], default=at[-1]))
            for r in plateaus]  # fmt: skip
    low, high = max(ends, key=lambda e: e[1] - e[0])
    assert bias == pytest.approx((low + high) / 2)


@pytest.mark.parametrize(
    ("base", "novel", "expected"),
    [
        ([3.0], [1.0], 2.0),
        ([1.0, 3.0], [2.0, 4.0], 2.5),  # as good as the two ends, which have no width
        ([1.0, 2.0], [NAN], 1.0),  # base classes always: no lower than need be
        ([NAN], [1.0, 2.0], np.nextafter(np.float32(2), np.float32(3))),  # novel ones always: above the highest
        ([NAN], [2.0, 2.0], np.nextafter(np.float32(2), np.float32(3))),
        ([NAN], [NAN], 0.0),
        ([INF], [-INF, INF], 0.0),  # no bias moves any of them
        ([2.0, INF], [0.0, -INF, INF], 1.0),
        ([1.0], [1.0], 1.0),  # all biases are as good
        ([10.0, 0.0], [0.0, 8.0], 9.0),
        ([0.0, 4.0, 9.0], [0.0, 4.0], 4.5),  # up to 9 all are as good, since at 0 and 4 two queries change places
        ([5.0, 1.0, 6.0], [0.0, 1.0], 2.5),  # 0 to 1 and 1 to 5 are one plateau
    ],
)
def test_ends_and_ties_by_hand(base, novel, expected):
    margins = Margins(np.array([base], np.float32), np.array([novel], np.float32))
    bias = find_best_bias(margins)
    assert bias == expected
    assert acc(margins, bias) == max(acc(margins, b) for b in (-100, 0, 0.5, 1, 2.5, 4.5, 9.5, 100))


@pytest.mark.parametrize("seed", range(30))
def test_the_biases_of_resamples_are_those_of_their_episodes_one_after_the_other(seed):
    margins = some(seed, values=(6, 60, 1000)[seed % 3], base=(5, 1)[seed % 2], novel=(4, 1)[seed % 2])
    times = np.random.default_rng(seed).multinomial(4, np.full(4, 0.25), 50)
    repeated = [
        Margins(np.repeat(margins.base_margins, often, 0), np.repeat(margins.novel_margins, often, 0))
        for often in times
    ]
    assert find_best_bias_by_resample(margins, times).tolist() == [find_best_bias(sample) for sample in repeated]


def test_resamples_are_draws_with_replacement_and_the_same_for_everybody():
    times = bootstrap_episode_counts(300)
    assert times.shape == (RESAMPLE_COUNT, 300)
    assert (times.sum(1) == 300).all()
    # The sd of 300 values, 4 of its standard errors.
    assert times.mean(0).std() == pytest.approx(np.sqrt(1 / RESAMPLE_COUNT), rel=0.16)
    assert times[0, :10].tolist() == [1, 0, 1, 1, 1, 1, 0, 0, 0, 1], "pinned: rows of all versions are paired"


@pytest.mark.parametrize("steps", [0, 1])  # the middle is rounded up to float32 for one, and down for the other
def test_a_bias_between_two_margins_that_are_neighbours_in_float32_tells_them_apart(steps):
    low, high = (np.float32((10_000_000 + steps + i) * 2.0**-26) for i in range(2))
    margins = Margins(np.array([[high]]), np.array([[low]]))
    bias = find_best_bias(margins)
    assert float(low) < bias < float(high)
    assert [hits.tolist() for hits in margins.joint_hits_with_bias(bias)] == [[1], [1]]


@pytest.mark.parametrize("seed", range(5))
def test_a_constant_on_the_novel_logits_changes_neither_ausuc_nor_calibrated_hits(seed):
    validation, test = some(seed), some(seed + 100)
    shifted = [Margins(m.base_margins - 1.5, m.novel_margins - 1.5) for m in (validation, test)]
    assert np.array_equal(shifted[1].doubled_ordered_pairs(), test.doubled_ordered_pairs())
    first, second = find_bias(validation).apply_to_episodes(test), find_bias(shifted[0]).apply_to_episodes(shifted[1])
    assert second.bias_on_novel_logits == first.bias_on_novel_logits - 1.5
    assert np.array_equal(first.base_joint, second.base_joint)
    assert np.array_equal(first.novel_joint, second.novel_joint)
    assert np.array_equal(first.hits_by_curve_bias[:, 1:], second.hits_by_curve_bias[:, 1:])
    assert not np.array_equal(test.joint_hits_with_bias(0)[1], shifted[1].joint_hits_with_bias(0)[1]), (
        "as hits themselves do"
    )


def test_the_curve_goes_through_quantiles_of_the_validation_margins():
    validation, test = some(0, 50, 1000), some(1, 60, 1000)
    calibration = find_bias(validation).apply_to_episodes(test)
    biases = choose_curve_biases(validation)
    at = np.sort(validation.finite_margins())
    assert len(biases) == MOST_CURVE_POINTS
    # Biases are kept in single precision, with a rounding of 6e-8, through a difference of logits.
    assert (biases[0], biases[25], biases[-1]) == pytest.approx((at[0], np.median(at), at[-1]), rel=1e-5)
    assert calibration.hits_by_curve_bias.shape == (MOST_CURVE_POINTS, 3)
    for bias, base, novel in calibration.hits_by_curve_bias:
        assert base == (test.base_margins >= bias).sum()
        assert novel == (test.novel_margins < bias).sum()
    assert calibration.n_validation_episodes == 50
    assert len(find_bias(Margins(*np.full((2, 3, 2), NAN))).apply_to_episodes(test).hits_by_curve_bias) == 0


def test_the_harmonic_mean_is_of_the_means_and_its_interval_that_of_the_delta_method():
    generator = np.random.default_rng(0)
    b = generator.binomial(25, 0.8, 400) / 25
    n = np.clip(b - 0.3 + generator.normal(0, 0.1, 400), 0, 1)
    harmonic_mean = mean_with_interval(harmonic_mean_by_episode(b, n))
    mean = np.array([b.mean(), n.mean()])

    def of(x: np.ndarray) -> float:
        return 2 * x[0] * x[1] / (x[0] + x[1])

    step = 1e-6
    slope = np.array([(of(mean + step * unit) - of(mean - step * unit)) / (2 * step) for unit in np.eye(2)])
    assert harmonic_mean.mean == pytest.approx(of(mean))
    assert harmonic_mean.interval == pytest.approx(1.96 * np.sqrt(slope @ np.cov(b, n) @ slope / 400))
    resampled = [of(np.array([b[i].mean(), n[i].mean()])) for i in generator.integers(0, 400, (2000, 400))]
    # Four standard errors of a deviation of 2,000.
    assert harmonic_mean.interval == pytest.approx(1.96 * np.std(resampled), rel=0.06)
    assert harmonic_mean_by_episode(np.zeros(3), np.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_hits_of_many_biases_are_those_of_each(seed):
    """With margins that equal a bias, and those that no bias reaches."""
    random = np.random.default_rng(seed)
    base, novel = (random.choice([-np.inf, -2, -1, 0, 1, 2, np.inf, NAN], size=(7, 5)) for _ in range(2))
    margins = Margins(base.astype(np.float32), novel.astype(np.float32))
    biases = np.array([-2.5, -2.0, -1.0, 0.5, 1.0, 2.0, 3.0])
    for bias, hits in zip(biases, margins.hits_by_bias(biases), strict=True):
        assert [part.sum() for part in margins.joint_hits_with_bias(bias)] == hits.tolist()
