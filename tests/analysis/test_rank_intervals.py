"""Rank intervals, against SciPy, brute force and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis.ranking import (
    SeedVariancePrior,
    _seed_variance_of_rows,
    estimate_difference,
    fit_seed_variance_prior,
    rank_intervals,
)

NOTHING = SeedVariancePrior(0.0, 0.0)


def drawn(seed, rows, seeds, episodes, spread=0.4):
    rng = np.random.default_rng(seed)
    own = spread * rng.normal(size=(rows, seeds, 1))
    return own + rng.normal(size=(rows, 1, episodes)) + 0.3 * rng.normal(size=(rows, seeds, episodes))


def test_over_episodes_alone_it_is_the_paired_t_test():
    a, b = drawn(0, 2, 1, 50)
    result = estimate_difference(a, b, NOTHING, 2)
    expected = stats.ttest_rel(a[0], b[0], alternative="greater")
    assert result.one_sided_p_value() == pytest.approx(
        expected.pvalue, rel=1e-9
    )  # rounding, times t squared in the tail
    low, high = stats.ttest_rel(a[0], b[0]).confidence_interval(0.95)
    assert (result.mean - result.interval, result.mean + result.interval) == pytest.approx((low, high))
    fixed = np.repeat(a, 3, 0), np.repeat(b, 3, 0)
    assert estimate_difference(*fixed, NOTHING, 0).one_sided_p_value() == pytest.approx(expected.pvalue, rel=1e-9)


def test_where_episodes_leave_no_doubt_it_is_the_paired_t_test_over_seeds():
    rng = np.random.default_rng(1)
    a, b = (np.repeat(rng.normal(size=(5, 1)), 20, 1) for _ in range(2))
    result = estimate_difference(a, b, NOTHING, 2)
    assert result.one_sided_p_value() == pytest.approx(
        stats.ttest_rel(a[:, 0], b[:, 0], alternative="greater").pvalue, rel=1e-9
    )
    assert result.degrees_of_freedom == pytest.approx(4)


def test_satterthwaite_by_hand():
    a, b = drawn(2, 2, 4, 30)
    d = a - b
    seeds, episodes = d.mean(1).var(ddof=1) / 4, d.mean(0).var(ddof=1) / 30
    result = estimate_difference(a, b, NOTHING, 2)
    assert result.standard_error == pytest.approx(math.sqrt(seeds + episodes))
    assert result.degrees_of_freedom == pytest.approx((seeds + episodes) ** 2 / (seeds**2 / 3 + episodes**2 / 29))
    assert 2 * 0.02 < 4 * seeds < 2 * 0.4
    firm = estimate_difference(a, b, SeedVariancePrior(0.4, 3.0), 2)
    moderated = (3 * 2 * 0.4 + 3 * 4 * seeds) / 6 / 4
    assert firm.standard_error == pytest.approx(math.sqrt(moderated + episodes))
    assert firm.degrees_of_freedom == pytest.approx((moderated + episodes) ** 2 / (moderated**2 / 6 + episodes**2 / 29))
    assert estimate_difference(a, b, SeedVariancePrior(0.02, 3.0), 2).standard_error == result.standard_error, (
        "moderation makes nothing smaller"
    )
    wary = estimate_difference(a, b, SeedVariancePrior(0.4, 3.0, 0.9), 2)
    least = 2 * 0.9 / 4
    assert wary.standard_error == firm.standard_error
    assert wary.degrees_of_freedom == pytest.approx((least + episodes) ** 2 / (least**2 / 6 + episodes**2 / 29))
    chosen = estimate_difference(a, b, NOTHING, 2, 0.3)
    assert chosen.standard_error == pytest.approx(math.sqrt(seeds + episodes + 0.3))
    shares = seeds**2 / 3 + episodes**2 / 29 + 0.3**2 / 99
    assert chosen.degrees_of_freedom == pytest.approx((seeds + episodes + 0.3) ** 2 / shares)


def test_the_prior_is_the_rows_variance_without_what_a_seed_does_to_all_of_them():
    rng = np.random.default_rng(3)
    own = 0.5 * rng.normal(size=(4000, 5))
    alike = own + 10 * rng.normal(size=(1, 5)) + 20 * rng.normal(size=(4000, 1))
    prior = fit_seed_variance_prior(alike, np.zeros(4000, bool))
    assert prior.variance == pytest.approx(0.25, rel=0.05)  # four standard errors: 4,000 rows, 4 degrees each
    assert prior.degrees_of_freedom == 4, "equal variances: as firm as it may be"
    spread = np.exp(2 * rng.normal(size=(4000, 1)))
    assert fit_seed_variance_prior(own * spread, np.zeros(4000, bool)).degrees_of_freedom < 1.5, (
        "they have little in common"
    )


def test_a_row_of_which_a_seed_has_collapsed_moves_no_other_row():
    means = drawn(8, 10, 5, 10).mean(2)
    collapsed = means.copy()
    collapsed[7, 2] -= 30
    before, after = (fit_seed_variance_prior(x, np.zeros(10, bool)) for x in (means, collapsed))
    assert after.variance == pytest.approx(before.variance, rel=0.25), "of ten rows one counts as the next"
    own = collapsed[7].var(ddof=1)
    # The other rows' variances move too, by what the next line but one allows.
    assert after.mean_variance == pytest.approx(before.mean_variance + (own - means[7].var(ddof=1)) / 10, rel=0.1)
    variances = [_seed_variance_of_rows(x)[np.arange(10) != 7] for x in (means, collapsed)]
    assert variances[1] == pytest.approx(variances[0], rel=0.25), "the effect of its seed is not that of its row"


def test_rows_that_cannot_vary_are_no_part_of_the_prior():
    means = np.vstack([drawn(4, 5, 4, 10).mean(2), np.full((3, 4), 70.0)])
    fixed = np.array([False] * 5 + [True] * 3)
    assert fit_seed_variance_prior(means, fixed) == fit_seed_variance_prior(means[:5], np.zeros(5, bool))
    assert fit_seed_variance_prior(np.ones((4, 3)), np.zeros(4, bool)) == NOTHING, "rows that do not vary at all"
    assert fit_seed_variance_prior(means[3:], fixed[3:]) == NOTHING, "two rows tell nothing"


def test_ranks_of_rows_that_are_far_apart_are_certain_and_of_equal_ones_open():
    x = drawn(6, 6, 5, 60, spread=0.05)
    apart = x + 30 * np.arange(6)[:, None, None]
    assert [(r.best_rank, r.worst_rank) for r in rank_intervals(apart, np.zeros(6, bool))] == [
        (i, i) for i in (6, 5, 4, 3, 2, 1)
    ]
    pairs = x + 30 * (np.arange(6) // 2)[:, None, None]
    assert [str(r) for r in rank_intervals(pairs, np.zeros(6, bool))] == ["5-6", "5-6", "3-4", "3-4", "1-2", "1-2"]


def test_a_noisy_row_gains_nothing_by_its_noise():
    """A better and steadier row never has a worse interval than a noisy one below it."""
    for seed in range(10):
        x = drawn(seed, 8, 5, 60, spread=0.1) + np.linspace(0, 4, 8)[:, None, None]
        x[2] += 6 * np.random.default_rng(seed).normal(size=(5, 1))
        steady = [i for i in range(8) if i != 2]
        intervals = rank_intervals(x, np.zeros(8, bool))
        for i, j in itertools.permutations(steady, 2):
            if x[i].mean() - x[j].mean() > 2:
                assert intervals[i].best_rank <= intervals[j].best_rank
        assert intervals[2].worst_rank - intervals[2].best_rank >= 2, "its rank is open"


@pytest.mark.parametrize("seeds", [3, pytest.param(10, marks=pytest.mark.slow("many seeds are drawn"))])
def test_equal_rows_are_told_apart_in_no_more_than_one_case_of_twenty(seeds):
    cases = 400
    wrong = sum(
        any((r.best_rank, r.worst_rank) != (1, 8) for r in rank_intervals(drawn(case, 8, seeds, 40), np.zeros(8, bool)))
        for case in range(cases)
    )
    assert wrong / cases <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / cases)
