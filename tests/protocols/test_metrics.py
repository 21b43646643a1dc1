"""Counts, estimates and paired tests against SciPy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.protocols.metrics import (
    EPISODE_METRIC_NAMES,
    EpisodeHitCounts,
    mean_with_interval,
    paired_difference,
    summarise_by_metric,
)


def test_paired_is_scipys_paired_t_test():
    generator = np.random.default_rng(0)
    a = generator.normal(0.05, 1, 500)
    b = generator.normal(0.0, 1, 500) + 0.5 * a
    result, expected = paired_difference(a, b), stats.ttest_rel(a, b)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-9)  # the rounding of t, 1e-15, times its square
    assert result.mean == pytest.approx((a - b).mean())
    assert result.interval == pytest.approx(1.96 * stats.sem(a - b))
    assert paired_difference(a, a).p_value == 1.0
    far = paired_difference(a + 1, b)
    assert far.p_value == pytest.approx(stats.ttest_rel(a + 1, b).pvalue, rel=1e-6), (
        "the far tail too, where t is above 15"
    )
    assert 0 < far.p_value < 1e-50
    two = paired_difference(a[:2], b[:2])
    assert two.p_value == pytest.approx(stats.ttest_rel(a[:2], b[:2]).pvalue), "one degree of freedom"


def test_estimate():
    values = np.array([1.0, 2.0, 4.0])
    assert mean_with_interval(values).mean == pytest.approx(7 / 3)
    assert mean_with_interval(values).interval == pytest.approx(1.96 * stats.sem(values))


def test_metrics_by_hand():
    counts = EpisodeHitCounts(np.array([20, 25]), np.array([24, 25]), np.array([10, 0]), np.array([20, 5]), 25, 25)
    values = counts.metrics_by_unit()
    assert set(values) == {*EPISODE_METRIC_NAMES, "harmonic"}
    assert values["acc"].tolist() == [60.0, 50.0]
    assert values["base_joint"].tolist() == [80.0, 100.0]
    assert values["delta_a"] == pytest.approx([-16.0, 0.0])
    assert values["delta_b"] == pytest.approx([-40.0, -20.0])
    assert values["delta"] == pytest.approx([-28.0, -10.0])
    assert summarise_by_metric(values)["acc"].mean == 55.0
