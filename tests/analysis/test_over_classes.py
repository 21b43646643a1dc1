"""Intervals over novel classes, against SciPy, explicit projections and simulation."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis.comparison import estimate_class_intervals


def episodes(rng, n: int, classes: int, ways: int = 5) -> np.ndarray:
    return rng.random((n, classes)).argsort(1)[:, :ways]


def test_with_one_class_an_episode_it_is_the_t_test_of_class_means():
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(12), 30)[:, None]
    d = 3 * rng.normal(size=12)[classes[:, 0]] + rng.normal(size=360)
    result = estimate_class_intervals(d[:, None], 7 * classes + 3)
    means = d.reshape(12, 30).mean(1)
    low, high = stats.t.interval(0.95, 11, means.mean(), stats.sem(means))
    assert (
        result.mean_differences[0] - result.interval_half_widths[0],
        result.mean_differences[0] + result.interval_half_widths[0],
    ) == pytest.approx((low, high))
    assert result.degrees_of_freedom[0] == pytest.approx(11)
    expected = means.var(ddof=1) - np.mean([part.var(ddof=1) for part in d.reshape(12, 30)]) / 30
    assert result.class_effect_sds[0] == pytest.approx(np.sqrt(expected))
    assert result.n_classes == 12


def test_the_analysis_of_variance_by_explicit_projections():
    rng = np.random.default_rng(1)
    n, count, ways = 120, 14, 3
    classes = episodes(rng, n, count, ways)
    z = np.zeros((n, count))
    for e, labels in enumerate(classes):
        z[e, labels] = 1 / ways
    onto, mean = z @ np.linalg.pinv(z), np.full((n, n), 1 / n)
    d = 4 * z @ rng.normal(size=(count, 5)) + rng.normal(size=(n, 5))
    residual = np.array([x @ (np.eye(n) - onto) @ x for x in d.T]) / np.trace(np.eye(n) - onto)
    between = np.array([x @ (onto - mean) @ x for x in d.T]) / np.trace(onto - mean)
    k = np.trace(z.T @ (onto - mean) @ z) / np.trace(onto - mean)
    effect = (between - residual) / k
    assert (effect > 0).all()
    weight = (z.mean(0) ** 2).sum()
    variance = weight * effect + residual / n
    first, second = weight / k * between, (1 / n - weight / k) * residual
    degrees = variance**2 / (first**2 / (count - 1) + second**2 / (n - count))
    result = estimate_class_intervals(d, classes)
    assert result.class_effect_sds**2 == pytest.approx(effect)
    assert result.degrees_of_freedom == pytest.approx(degrees)
    assert result.interval_half_widths == pytest.approx(stats.t.ppf(0.975, degrees) * np.sqrt(variance))
    assert result.mean_differences == pytest.approx(d.mean(0))


def test_an_estimate_below_zero_counts_as_zero():
    """Differences that no class explains: what is left of noise beside the fit on classes."""
    rng = np.random.default_rng(2)
    classes = episodes(rng, 200, 12)
    z = np.zeros((200, 12))
    np.put_along_axis(z, classes, 0.2, 1)
    noise = rng.normal(size=(200, 1))
    d = 1.5 + noise - z @ np.linalg.pinv(z) @ noise
    result = estimate_class_intervals(d, classes)
    assert result.class_effect_sds[0] == 0
    assert result.degrees_of_freedom[0] == pytest.approx(188)
    assert result.interval_half_widths[0] == pytest.approx(
        stats.t.ppf(0.975, 188) * np.sqrt((d - 1.5).T @ (d - 1.5) / 188 / 200)[0, 0]
    )
    equal = estimate_class_intervals(np.zeros((200, 1)), classes)
    assert (equal.mean_differences[0], equal.interval_half_widths[0]) == (0, 0)


def test_an_estimate_just_above_zero_has_an_interval_of_use():
    rng = np.random.default_rng(3)
    classes = episodes(rng, 2000, 20)
    result = estimate_class_intervals(rng.normal(size=(2000, 400)), classes)
    assert result.degrees_of_freedom.min() == 3
    assert (result.interval_half_widths < 8 * 1.96 / np.sqrt(2000)).all()


def test_where_classes_cannot_be_told_apart_there_is_none():
    same = np.tile(np.arange(5), (100, 1))
    assert (
        estimate_class_intervals(np.ones((100, 1)), same)
        == "100 episodes with 5 novel classes do not tell the classes apart"
    )
    orders = estimate_class_intervals(np.ones((100, 1)), same, units="orders")
    assert orders == "100 orders with 5 novel classes do not tell the classes apart"
    assert estimate_class_intervals(np.ones((1, 1)), same[:1], units="orders") == "there is one order"
    each_once = estimate_class_intervals(np.arange(10.0)[:, None], np.arange(10)[:, None])
    assert each_once == "10 episodes with 10 novel classes do not tell the classes apart"
    few = episodes(np.random.default_rng(4), 30, 40)
    assert re.match(r"30 episodes with (39|40) novel classes do not", estimate_class_intervals(np.ones((30, 1)), few))


@pytest.mark.parametrize(("classes", "spread"), [(20, 4.5), (45, 0.5), (108, 4.0)])
def test_intervals_hold_the_mean_over_all_classes_as_often_as_they_say(classes, spread):
    """At the numbers of novel test classes of our tasks; an interval over episodes misses it far more often."""
    rng, cases = np.random.default_rng(5), 600
    drawn = episodes(rng, 2000, classes)
    d = (spread * rng.normal(size=(classes, cases)))[drawn].mean(1) + 4.5 * rng.normal(size=(2000, cases))
    result = estimate_class_intervals(d, drawn)
    held = (np.abs(result.mean_differences) <= result.interval_half_widths).mean()
    assert held >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / cases)
    assert (np.abs(result.mean_differences) <= 1.96 * stats.sem(d)).mean() < 0.92
    assert np.mean(result.class_effect_sds**2) == pytest.approx(
        spread**2, rel=0.1 if spread > 1 else 0.5
    )  # noise is most of it
