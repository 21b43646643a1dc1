"""The split of a variance against plain loops, SciPy, and simulations with known effects."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis.session_variance import (
    DESIGN_VARIANCE_SOURCES,
    MeanSquare,
    _variance_interval,
    compute_mean_squares,
    estimate_mean_difference,
    estimate_wrong_sign_chance,
    split_variance,
)
from ifsl_bench.analysis.task_results import load_results_by_name
from ifsl_bench.utils.files import Paths


def simulated(rng, shape, deviations, mean=0.0) -> np.ndarray:
    """[seeds, orders, supports] of normal effects with the deviations of PARTS."""
    m, o, r = shape
    order, support, seed, interaction, rest = deviations
    return (
        mean
        + order * rng.normal(size=(1, o, 1))
        + support * rng.normal(size=(1, o, r))
        + seed * rng.normal(size=(m, 1, 1))
        + interaction * rng.normal(size=(m, o, 1))
        + rest * rng.normal(size=(m, o, r))
    )


def test_of_one_seed_it_is_scipys_interval_of_the_order_means():
    x = simulated(np.random.default_rng(0), (1, 12, 4), (1, 1, 1, 1, 1))
    means = [np.mean([x[0, o, r] for r in range(4)]) for o in range(12)]
    result = estimate_mean_difference(x)
    low, high = stats.t.interval(0.95, 11, np.mean(means), stats.sem(means))
    assert (result.mean - result.interval, result.mean + result.interval) == pytest.approx((low, high))
    assert result.models_fixed


def test_heavy_tails_leave_fewer_degrees():
    """A mean square of n values of excess kurtosis k has the variance S^2 (2 / (n - 1) + k / n): k = 0, and 6."""
    rng, effective = np.random.default_rng(5), dict[str, float]()
    for name, draw in (("normal", rng.normal), ("exponential", rng.exponential)):
        x = draw(size=(1, 4000, 1))
        effective[name] = compute_mean_squares(x)["order"].effective_degrees_of_freedom
    assert effective["normal"] > 0.85 * 3999
    assert effective["exponential"] == pytest.approx(3999 / (1 + 6 / 2), rel=0.3)


def test_the_interval_of_one_mean_square_is_exact():
    low, high = _variance_interval([(0.5, MeanSquare(3.0, 7, 7))])
    assert (low, high) == pytest.approx(
        (0.5 * 3.0 * 7 / stats.chi2.ppf(0.975, 7), 0.5 * 3.0 * 7 / stats.chi2.ppf(0.025, 7))
    )


def test_a_difference_of_mean_squares_is_at_its_limit_where_their_ratio_is():
    """The lower limit of A - B is 0 where A / B is the upper 2.5% point of F: there the interval is exact."""
    ratio = stats.f.ppf(0.975, 6, 11)
    assert _variance_interval([(1.0, MeanSquare(ratio * 2.0, 6, 6)), (-1.0, MeanSquare(2.0, 11, 11))])[
        0
    ] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "there"),
    [
        ((4, 20, 3), {*DESIGN_VARIANCE_SOURCES, "one"}),
        ((1, 20, 3), {"order", "support", "one"}),
        ((4, 20, 1), {"order", "seed", "seed by order", "one"}),
        ((1, 20, 1), {"order", "one"}),
    ],
)
def test_estimates_are_unbiased_and_intervals_hold_the_truth(shape, there):
    """Over 400 cases: means within four standard errors; 92% of the intervals hold, where 95% would but once in 100.

    Estimates below 0 count as 0, so effects are large against their errors; parts that cannot be told apart add up.
    """
    rng, deviations = (
        np.random.default_rng(2),
        dict(zip(DESIGN_VARIANCE_SOURCES, (2.0, 1.5, 2.0, 1.0, 0.7), strict=True)),
    )
    if shape[0] == 1:
        deviations |= dict.fromkeys(("seed", "seed by order", "rest"), 0.0)
    truth = {part: deviation**2 for part, deviation in deviations.items()}
    if shape[2] == 1:
        truth["order"] += truth["support"]
        truth["seed by order"] += truth["rest"]
    truth["one"] = sum(deviation**2 for deviation in deviations.values())
    cases = [split_variance(simulated(rng, shape, tuple(deviations.values()))) for _ in range(400)]
    assert set(cases[0]) == there
    for part in there:
        values = np.array([case[part].estimated_value for case in cases])
        assert abs(values.mean() - truth[part]) < 4 * stats.sem(values), part
        held = np.mean([case[part].lower_limit <= truth[part] <= case[part].upper_limit for case in cases])
        assert held > 0.92, (part, held)


def test_the_interval_of_a_single_value_holds_with_skewed_supports():
    """One set of supports raises the mean squares of orders and of supports at once: taken as independent, 89% hold."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(1000):
        x = (rng.exponential(size=(1, 100, 4)) - 1) * 0.3
        variance = split_variance(x)["one"]
        held += variance.lower_limit <= 0.09 <= variance.upper_limit
        if not _:
            of_orders = [x[0, o].mean() for o in range(100)]
            parts = [
                (mean - np.mean(of_orders)) ** 2 / 99 + ((x[0, o] - mean) ** 2).sum() / 300 * 3 / 4
                for o, mean in enumerate(of_orders)
            ]
            degrees = 2 * sum(parts) ** 2 / (100 * np.var(parts, ddof=1))
            expected = [degrees * sum(parts) / stats.chi2.ppf(tail, degrees) for tail in (0.975, 0.025)]
            assert [variance.lower_limit, variance.upper_limit] == pytest.approx(expected)
    assert held > 908


def test_the_chance_of_a_wrong_sign():
    rng = np.random.default_rng(3)
    deviations, mean = (0.3, 0.5, 0.4, 0.2, 0.3), 0.6
    truth = stats.norm.cdf(-mean / np.sqrt(np.square(deviations).sum()))
    cases = [estimate_wrong_sign_chance(simulated(rng, (5, 60, 4), deviations, mean)) for _ in range(300)]
    assert np.mean([case.lower_limit <= truth <= case.upper_limit for case in cases]) > 0.91
    assert np.mean([case.chance for case in cases]) == pytest.approx(truth, abs=0.02)
    assert np.mean([case.observed_share for case in cases]) == pytest.approx(truth, abs=0.02)
    none = estimate_wrong_sign_chance(simulated(rng, (5, 60, 4), deviations, 0.0))
    assert none.upper_limit == 0.5
    assert estimate_wrong_sign_chance(np.ones((2, 3, 2))).chance == 0
    tied = np.array([[[1.0], [0.0], [2.0], [-1.0]]])
    assert estimate_wrong_sign_chance(tied).observed_share == (1 + 0.5) / 4


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, -0.6], [0.7, -0.7, 1 / 3, -1 / 3]])
def test_a_difference_of_0_has_no_sign_that_could_be_wrong(values):
    """Some of these sum to 1e-17."""
    assert estimate_wrong_sign_chance(np.reshape(values, (1, 4, 1))) is None


def test_overall_is_wider_by_the_seeds():
    x = simulated(np.random.default_rng(4), (5, 50, 4), (0.5, 0.5, 1.0, 0.1, 0.1))
    assert estimate_mean_difference(x).interval > estimate_mean_difference(x.mean(0, keepdims=True)).interval


def average_accuracies(label: str) -> np.ndarray:
    """[seeds, 100, 4] of a stored row on glyphs-sessions, from its counts by a plain loop."""
    seeds = []
    for result in load_results_by_name("glyphs-sessions", Paths.locate()).find_row(label).results:
        counts, of_sequences = result.to_hit_counts(), []
        for hits, queries in zip(counts.hits.astype(int), counts.queries.astype(int), strict=True):
            after, at = [], 0
            for t in range(11):
                after.append(100 * hits[at : at + t + 1].sum() / queries[: t + 1].sum())
                at += t + 1
            of_sequences.append(np.mean(after))
        seeds.append(np.reshape(of_sequences, (100, 4)))
    return np.array(seeds)


def test_the_command_splits_rows_and_differences_of_stored_rows(call):
    """Mean squares of statistics' textbooks over the accuracies, and the signs of all single comparisons."""
    status, out, _ = call("variance", "glyphs-sessions", "--method", "teen,protonet", "--format", "json")
    assert status == 0
    teen, protonet, difference = json.loads(out)
    assert (teen["method"], protonet["method"]) == ("teen", "protonet")
    x = average_accuracies("teen") - average_accuracies("protonet")
    seeds = len(x)
    assert (difference["a"], difference["b"], difference["seeds"]) == ("teen", "protonet", seeds)
    wrong_share = np.mean(x < 0)
    assert difference["wrong_sign_made"] == pytest.approx(wrong_share, abs=1e-4)
    assert 0.3 < wrong_share < 0.5
    assert difference["wrong_sign"] == pytest.approx(wrong_share, abs=0.03)
    assert difference["mean"] == pytest.approx(x.mean(), abs=1e-4)
    interaction = x.mean(2) - x.mean((1, 2))[:, None] - x.mean((0, 2)) + x.mean()
    rest = x - x.mean(2)[:, :, None] - x.mean(0) + x.mean((0, 2))[:, None]
    ms_rest, ms_interaction = (rest**2).sum() / ((seeds - 1) * 300), 4 * (interaction**2).sum() / ((seeds - 1) * 99)
    ms_seed = 400 * x.mean((1, 2)).var(ddof=1)
    assert difference["sd_rest"] == pytest.approx(np.sqrt(ms_rest), abs=1e-4)
    assert difference["sd_seed"] == pytest.approx(np.sqrt((ms_seed - ms_interaction) / 400), abs=1e-4)
    assert difference["sd_seed_by_order"] == pytest.approx(np.sqrt(max(0, ms_interaction - ms_rest) / 4), abs=1e-4)
    _, text, _ = call("variance", "glyphs-sessions", "--method", "teen,protonet")
    assert "wrong sign" in text
    percent = 100 * difference["wrong_sign"]  # of four digits
    assert any(f"{round(percent + shift)}% (" in text for shift in (-0.01, 0.01))


def test_rows_that_no_seed_changes_have_no_variance_over_seeds(call):
    _, out, _ = call("variance", "tiny-features-sessions", "--method", "ncm,imprint", "--format", "json")
    ncm, _, difference = json.loads(out)
    assert ncm["seeds"] == difference["seeds"] == 1
    assert ncm["sd_seed"] is None
    parts = [ncm[f"sd_{part}"] for part in ("order", "support", "test_images")]
    assert ncm["sd_single"] == pytest.approx(np.linalg.norm(parts), abs=1e-4)
    wrong = [difference[name] for name in ("wrong_sign", "wrong_sign_low", "wrong_sign_high", "wrong_sign_made")]
    assert (difference["mean"], wrong) == (0, [None] * 4), "on these features the two are the same"
    _, text, _ = call("variance", "tiny-features-sessions", "--method", "ncm,imprint,teen")
    assert "No wrong sign is given where the mean of A - B is 0" in text
    assert "%" not in next(line for line in text.splitlines() if line.startswith("imprint  ncm"))
    assert "No wrong sign" not in call("variance", "glyphs-sessions", "--method", "teen,protonet")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["glyphs-5shot"], "glyphs-5shot is in episodes; variance splits that of tasks in sessions"),
        (["cub-sessions-published"], "no results of task 'cub-sessions-published' are stored"),
        (["mini-sessions-published"], "one order of the classes has no interval over orders"),
        (["glyphs-sessions", "--metric", "gac"], "did you mean 'gacc' or"),
    ],
)
def test_what_cannot_be_split_is_one_line(words, said, call):
    status, _, err = call("variance", *words)
    assert (status, err.count("\n")) == (2, 1)
    assert said in err
