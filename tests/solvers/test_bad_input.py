"""Bad input is refused before the solve, in words that say what to do."""

from __future__ import annotations

import math

import pytest
import torch

from ifsl_bench.solvers import (
    LBFGS,
    DualNewton,
    GradientDescent,
    NetworkArgs,
    Neumann,
    RegressionArgs,
    SoftmaxRegression,
    TanhNetwork,
    minimise,
)


def regression(features=None, labels=None, base_logsumexp=None, ways=2, precision=0.1):
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.1, 1.0]]]) if features is None else features
    y = torch.tensor([[0, 1, 0, 1]]) if labels is None else labels
    r = torch.zeros(y.shape) if base_logsumexp is None else base_logsumexp
    return RegressionArgs(x, y, r, torch.zeros(ways, x.shape[-1] + 1), torch.full((x.shape[-1] + 1,), precision))


def network(args):
    ways, d = args.centres.shape[0], args.features.shape[-1]
    p = args.precisions[0]
    sizes = (ways, 4), (ways, d), (1, d + 1)
    return NetworkArgs(*args[:3], *(pull for rows, size in sizes for pull in (torch.zeros(rows, size), p.expand(size))))


def solve(learner, args):
    if learner == "lr":
        return minimise(SoftmaxRegression(), DualNewton(), None, args)
    return minimise(TanhNetwork(args.centres.shape[0], 3), LBFGS(), None, network(args))


def with_entry(value):
    x = regression().features.clone()
    x[0, 1, 1] = value
    return x


@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (regression(with_entry(math.nan)), r"not finite in episodes \[0\]"),
        (regression(labels=torch.tensor([[0, 0, 0, 0]])), "class 1 has no support image in episode 0"),
        (regression(labels=torch.tensor([[0, 1, 2, 1]])), r"must lie in 0\.\.1, and 0\.\.2"),
        (regression(labels=torch.tensor([[0, 1, -1, 1]])), r"-1\.\.1 were given"),
        (regression(features=torch.zeros(1, 0, 2), labels=torch.zeros(1, 0, dtype=torch.long)), "is empty"),
        (regression(base_logsumexp=torch.full((1, 4), math.nan)), "fixed logits are not finite"),
        (regression(base_logsumexp=torch.full((1, 3), 0.0)), r"labels and base_logsumexp \[E, S\]"),
        (regression(precision=-1.0), "must not be negative"),
        (
            regression(
                labels=torch.zeros(1, 4, dtype=torch.long), base_logsumexp=torch.full((1, 4), -math.inf), ways=1
            ),
            "one class and no base classes leaves",
        ),
    ],
)
def test_refused(learner, args, words):
    with pytest.raises(ValueError, match=words):
        solve(learner, args)


def test_precisions_of_the_wrong_length_are_refused():
    args = regression()
    with pytest.raises(ValueError, match=r"needs \[3\]"):
        minimise(SoftmaxRegression(), DualNewton(), None, args._replace(precisions=torch.ones(2)))


@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("base_logsumexp", [0.0, -math.inf], ids=["base", "regular"])
def test_separable_data_without_a_ridge_are_flagged(learner, base_logsumexp):
    solution = solve(learner, regression(base_logsumexp=torch.full((1, 4), base_logsumexp), precision=0.0))
    assert not bool(solution.converged.any())
    assert bool(solution.objective.isfinite().all())


def test_very_large_finite_features_are_no_error():
    args = regression(features=regression().features * 1e18)
    assert minimise(SoftmaxRegression(), DualNewton(), None, args).converged.shape == (1,)


def test_dual_newton_says_what_it_solves():
    with pytest.raises(TypeError, match="use LBFGS"):
        minimise(lambda v, args: v.square().sum(1), DualNewton(), torch.zeros(1, 2), None)


@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_a_pull_that_is_none_is_refused(learner):
    def problem_of(args, **changed):
        if learner == "lr":
            return SoftmaxRegression(), DualNewton(), args._replace(**changed)
        filled = network(args)
        names = {"centres": "skip_centres", "precisions": "skip_precisions"}
        return TanhNetwork(2, 3), LBFGS(), filled._replace(**{names[k]: v for k, v in changed.items()})

    columns = 3 if learner == "lr" else 2
    args = regression()
    for changed, words in (
        ({"centres": torch.full((2, columns), math.nan)}, "centres is not finite"),
        ({"precisions": torch.full((columns,), math.inf)}, "precisions is not finite"),
        ({"centres": torch.zeros(2, columns + 1)}, "centres has shape"),
        ({"centres": torch.zeros(4, 2, columns)}, "for each of 1 episodes"),
        ({"centres": torch.zeros(2, columns).double()}, "float64 on cpu, features are torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            minimise(*problem_of(args, **changed)[:2], None, problem_of(args, **changed)[2])
    with pytest.raises(ValueError, match="labels must be int64"):
        minimise(*problem_of(args)[:2], None, problem_of(args)[2]._replace(labels=args.labels.float()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DualNewton(-1e-6), "DualNewton.tolerance=-1e-06.: it must be positive"),
        (lambda: DualNewton(math.nan), "finite"),
        (lambda: LBFGS(torch.tensor([1e-5, -1.0])), "every tolerance must be positive"),
        (lambda: LBFGS(history=0), "at least 1"),
        (lambda: LBFGS(escapes=-1), "at least 0"),
        (lambda: LBFGS(max_steps=1.5), "whole number"),
        (lambda: GradientDescent(0.0), "positive"),
        (lambda: Neumann(0), "at least 1"),
        (lambda: Neumann(20, 1.0), "below 1"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
