"""The dual Newton method against SciPy and scikit-learn, on every shape and on problems meant to be hard."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ifsl_bench.solvers import (
    ConjugateGradient,
    DualNewton,
    Implicit,
    Neumann,
    RegressionArgs,
    SoftmaxRegression,
    minimise,
    numba_code_cache,
    regression,
)
from tests.tolerances import rounding

STOP = 1e-9  # DualNewton's in float64: of the gradient at the centres, in the metric of the penalty


@pytest.fixture(params=[True, False], ids=["batched", "compiled"])
def way(request):
    """All at once in torch, as on a device, or one by one by compiled kernels."""
    with numba_code_cache.use_batched_solvers(request.param):
        yield


@pytest.fixture(params=[1, 8, None], ids=["conjugate gradients", "factorised", "compiled"])
def adjoint(request, monkeypatch):
    """The ways to a gradient. In torch the adjoint factorises where a look at how far it is costs something."""
    monkeypatch.setattr(regression, "choose_steps_between_checks", lambda like: request.param)
    with numba_code_cache.use_batched_solvers(request.param is not None):
        yield


def problem(
    ways=5, shots=5, base=12, features=32, norm=12.0, gamma=0.01, episodes=3, seed=0, duplicate=False, copy=False,
    lift=0.0, decay=1e-5, same=False, dtype=torch.float64,
):  # fmt: skip
    """Random episodes. duplicate: pairs of equal support images; same: all of them equal; copy: a support class sits
    on a base class's weight; lift: what a confident base classifier adds to its logits."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    weight = normal(max(base, 1), features)
    means = normal(episodes, ways, features)
    if copy:
        means[:, 0] = weight[0]
    x = means.repeat_interleave(shots, 1) + 0.7 * normal(episodes, ways * shots, features)
    x = norm * x / x.norm(dim=-1, keepdim=True)
    if duplicate:
        x[:, 1::2] = x[:, : 2 * (x.shape[1] // 2) : 2]
    if same:
        x = x[:, :1].expand_as(x).clone()
    labels = torch.arange(ways).repeat_interleave(shots).expand(episodes, -1)
    base_logsumexp = (
        (x @ weight.T / features**0.5).logsumexp(-1) if base else torch.full(labels.shape, -math.inf).double()
    )
    c = 0.1 * normal(episodes, ways, features + 1)
    base_logsumexp = base_logsumexp + lift
    p = decay + 2 * gamma / ways * (0.3 * normal(features + 1)).exp()
    return RegressionArgs(x.to(dtype), labels, base_logsumexp.to(dtype), c.to(dtype), p.to(dtype))


def scipy_solution(args, index, **options):
    x = np.concatenate([args.features[index].double().numpy(), np.ones((args.features.shape[1], 1))], 1)
    y, base_logsumexp = args.labels[index].numpy(), args.base_logsumexp[index].double().numpy()
    c, p = args.centres[index].double().numpy(), args.precisions.double().numpy()
    rows = np.arange(len(y))

    def value(flat):
        v = flat.reshape(c.shape)
        f = np.concatenate([x @ v.T, base_logsumexp[:, None]], 1)
        top = f.max(1, keepdims=True)
        e = np.exp(f - top)
        loss = (np.log(e.sum(1)) + top[:, 0] - f[rows, y]).mean() + (p * (v - c) ** 2).sum() / 2
        pi = e[:, :-1] / e.sum(1, keepdims=True)
        pi[rows, y] -= 1
        return loss, (pi.T @ x / len(y) + p * (v - c)).ravel()

    return minimize(value, c.ravel(), jac=True, method="L-BFGS-B", options=options)


SHAPES = {
    "plain": {},
    "one way, one shot": {"ways": 1, "shots": 1},
    "one shot, no base": {"shots": 1, "base": 0},
    "more rows than features": {"features": 4},
    "norm 50, weak": {"norm": 50.0, "gamma": 1e-6},
    "norm 50, weak, regular": {"norm": 50.0, "gamma": 1e-6, "base": 0},
    "strong": {"gamma": 10.0},
    "saturated": {"shots": 1, "norm": 30.0, "lift": 25.0, "gamma": 0.0, "decay": 1e-6, "episodes": 8},
    "duplicates across classes": {"duplicate": True, "shots": 1, "ways": 6},
    "all rows equal": {"same": True, "ways": 20, "shots": 1, "base": 0},
    "no pull": {"gamma": 0.0, "decay": 1e-6, "norm": 20.0, "lift": 3.0},
    "everything": {"norm": 50.0, "gamma": 1e-6, "duplicate": True, "copy": True, "shots": 3},
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_no_worse_than_scipy(shape, dtype):
    args = problem(**shape, dtype=dtype)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args)
    assert bool(solution.converged.all())
    assert int(solution.steps.max()) <= (30 if dtype == torch.float64 else 90)
    double = RegressionArgs(*(a.double() if a.is_floating_point() else a for a in args))
    value = SoftmaxRegression().value(solution.value.double(), double)
    torch.testing.assert_close(solution.objective.double(), value, rtol=1e-4, atol=1e-5)  # float32: logits up to 1,000
    for index in range(value.shape[0]):
        peer = scipy_solution(double, index, maxiter=20000, maxfun=20000, ftol=1e-15, gtol=1e-10)
        # A share of the objective, which may be as small as 1e-6 where nothing pulls.
        assert float(value[index]) <= peer.fun * (1 + (1e-7 if dtype == torch.float64 else 2e-3))
        # SciPy's minimum is only that good; where it is, ours has the same scores.
        reached = DualNewton(1e-11).run(SoftmaxRegression(), None, SoftmaxRegression().select_episodes(double, [index]))
        assert bool(reached.converged)
        scores = (solution.value[index].double() - reached.unknowns[0])[:, :-1] @ double.features[index].T
        # By the stop in the metric of the weakest penalty, 1e-6, and rows of norm 50; in float32 by 1e-6 likewise.
        assert float(scores.abs().max()) <= (1e-5 if dtype == torch.float64 else 2e-2)
        if dtype == torch.float64:
            gradient = SoftmaxRegression().gradient(solution.value, args)[index]
            # Two roundings of a gradient that is all but zero.
            assert float(gradient.norm()) == pytest.approx(float(solution.gradient_norm[index]), rel=1e-3, abs=1e-7)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [{}, {"ways": 1, "shots": 1}], ids=str)
@pytest.mark.parametrize("precision", [1e-4, 1e2])
def test_the_tolerance_asked_for_is_kept(shape, precision):
    args = problem(**shape, episodes=6)
    args = args._replace(precisions=torch.full_like(args.precisions, precision))
    tolerance = 1e-13 if precision >= 1 else 1e-11
    solution = minimise(SoftmaxRegression(), DualNewton(tolerance), None, args)
    assert bool(solution.converged.all())
    size = [
        (SoftmaxRegression().gradient(v, args).square() / args.precisions).sum((1, 2)).sqrt()
        for v in (solution.value, args.centres)
    ]
    assert bool((size[0] <= 30 * tolerance * size[1]).all())


@pytest.mark.slow("scikit-learn is imported")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("penalty", [1e-3, 10.0])
def test_scikit_learn_without_base_classes(penalty):
    linear = pytest.importorskip("sklearn.linear_model")
    args = problem(base=0, episodes=1, norm=3.0)
    size = args.features.shape[1]
    # scikit-learn does not penalise the bias: here its precision is made negligible.
    p = torch.full_like(args.precisions, penalty)
    p[-1] = 1e-9
    args = args._replace(centres=torch.zeros_like(args.centres), precisions=p)
    solution = minimise(SoftmaxRegression(), DualNewton(1e-12), None, args)
    model = linear.LogisticRegression(C=1 / (penalty * size), tol=1e-12, max_iter=10000)
    model.fit(args.features[0].numpy(), args.labels[0].numpy())
    v = solution.value[0].numpy()
    # scikit-learn's L-BFGS stops by the fall of its objective too, which is flat to 1e-16 within 1e-8 of the minimum.
    np.testing.assert_allclose(v[:, :-1], model.coef_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(v[:, -1] - v[:, -1].mean(), model.intercept_ - model.intercept_.mean(), atol=1e-4)


@pytest.mark.usefixtures("way")
def test_one_episode_at_a_time_gives_the_same_as_a_batch():
    args = problem(episodes=3)
    whole = minimise(SoftmaxRegression(), DualNewton(), None, args)
    objective = SoftmaxRegression()
    for index in range(3):
        alone = minimise(objective, DualNewton(), None, objective.select_episodes(args, torch.tensor([index])))
        torch.testing.assert_close(whole.value[index : index + 1], alone.value, rtol=100 * STOP, atol=STOP)


def query_loss(args, solver=None, linear=None):
    solution = minimise(SoftmaxRegression(), solver or DualNewton(1e-12), None, args, linear and Implicit(linear))
    g = torch.Generator().manual_seed(9)
    query = torch.randn(solution.value.shape[0], 4, solution.value.shape[2], generator=g, dtype=torch.float64)
    return (query @ solution.value.mT).logsumexp(-1).sum() + solution.value.square().sum()


@pytest.mark.slow("hundreds of solves")
@pytest.mark.usefixtures("adjoint")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="plain"),
        pytest.param({"base": 0}, id="regular", marks=pytest.mark.slow("hundreds of solves")),
        pytest.param({"ways": 1}, id="one"),
    ],
)
def test_gradcheck_of_the_solved_loss(shape):
    args = problem(features=5, episodes=2, gamma=0.05, norm=3.0, **{"ways": 3, "shots": 2, **shape})
    leaves = [a.requires_grad_() for a in args if a.is_floating_point() and bool(a.isfinite().all())]

    def loss(*tensors):
        base_logsumexp = tensors[1] if args.base_logsumexp.requires_grad else args.base_logsumexp
        return query_loss(RegressionArgs(tensors[0], args.labels, base_logsumexp, tensors[-2], tensors[-1]))

    # Central differences: the solver's 1e-12 over eps, and eps squared.
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("way")
def test_shared_centres_receive_the_sum_over_episodes():
    args = problem(features=5, episodes=3)
    shared = args.centres[0].clone().requires_grad_()
    query_loss(args._replace(centres=shared)).backward()
    apart = args.centres[:1].expand(3, -1, -1).clone().requires_grad_()
    query_loss(args._replace(centres=apart)).backward()
    torch.testing.assert_close(shared.grad, apart.grad.sum(0))


@pytest.mark.parametrize("name", ["norm 50, weak", "everything"])
def test_conjugate_gradients_and_factorisation_agree_on_hard_problems(name, monkeypatch):
    gradients = []
    for steps in (1, 8):
        monkeypatch.setattr(regression, "choose_steps_between_checks", lambda like, steps=steps: steps)
        args = problem(**SHAPES[name])
        args = args._replace(centres=args.centres.requires_grad_(), precisions=args.precisions.requires_grad_())
        with numba_code_cache.use_batched_solvers():
            query_loss(args, DualNewton(), ConjugateGradient(1e-12, 5000)).backward()
        gradients.append((args.centres.grad, args.precisions.grad))
    for first, second in zip(*gradients, strict=True):
        assert float((first - second).norm() / second.norm()) < 1e-5  # a residual of 1e-12 through a condition of 1e7


@pytest.mark.parametrize("name", ["plain", "norm 50, weak", "everything", "all rows equal"])
@pytest.mark.usefixtures("adjoint")
def test_exact_gradients_in_single_precision(name):
    gradients = []
    for dtype in (torch.float64, torch.float32):
        args = problem(**SHAPES[name])
        exact = [a.float().to(dtype) if a.is_floating_point() else a for a in args]  # the same problem, rounded
        exact[3:] = [a.requires_grad_() for a in exact[3:]]
        solver = DualNewton(1e-12 if dtype == torch.float64 else None)
        solution = minimise(SoftmaxRegression(), solver, None, RegressionArgs(*exact))
        solution.value.sin().sum().backward()
        assert solution.adjoint.n_failed == 0
        gradients.append([a.grad.double() for a in exact[3:]])
    for double, single in zip(*gradients, strict=True):
        assert float((double - single).norm() / double.norm()) < 1e-3  # float32's 6e-8 through a condition of 1e4


@pytest.mark.usefixtures("way")
def test_an_inverse_that_is_not_one_is_reported():
    args = problem(**SHAPES["everything"])
    args = args._replace(centres=args.centres.requires_grad_())
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args, Implicit(ConjugateGradient(max_steps=2)))
    solution.value.sin().sum().backward()
    assert (solution.adjoint.episodes, solution.adjoint.n_failed) == (3, 3)
    assert bool((solution.adjoint.residual > 1e-3).all())  # two steps are far too few


SUM = rounding(torch.float64, 5000)  # terms of the series, the last of them below 0.9 to this power


@pytest.mark.usefixtures("way")
def test_neumann_series_tends_to_the_damped_inverse_and_its_divergence_is_counted():
    args = problem(norm=3.0, gamma=0.1)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args)
    v, rhs = solution.value, torch.ones_like(solution.value)
    objective = SoftmaxRegression()
    report = minimise(objective, DualNewton(), None, args).adjoint
    u = Neumann(5000, 0.1, 1.0).solve(objective.hessian(v, args), rhs, report)
    torch.testing.assert_close(objective.hessian(v, args).product(u) + 0.1 * u, rhs, rtol=SUM, atol=SUM)
    assert (report.episodes, report.n_diverged) == (3, 0)
    strong = problem(norm=3.0, gamma=10.0)  # 2 gamma / N = 4 exceeds 1.9
    strong = strong._replace(centres=strong.centres.requires_grad_())
    solution = minimise(objective, DualNewton(), None, strong, Implicit(Neumann()))
    solution.value.sum().backward()
    assert (solution.adjoint.episodes, solution.adjoint.n_diverged) == (3, 3)


@pytest.mark.usefixtures("way")
def test_what_has_no_minimum_has_no_exact_gradient():
    strength = torch.zeros(3, dtype=torch.float64)
    objective, g = SoftmaxRegression(), torch.Generator().manual_seed(0)
    x, c = torch.randn(2, 2, 2, generator=g, dtype=torch.float64), torch.zeros(2, 2, 3, dtype=torch.float64)
    labels, base_logsumexp = torch.tensor([[0, 1]] * 2), torch.zeros(2, 2, dtype=torch.float64)
    args = RegressionArgs(x, labels, base_logsumexp, c.requires_grad_(), strength)
    solution = minimise(objective, DualNewton(), None, args)
    assert not bool(solution.converged.any())
    solution.value.sum().backward()
    assert (solution.adjoint.episodes, solution.adjoint.n_failed) == (2, 2)
