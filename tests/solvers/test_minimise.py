"""Solver x adjoint x linear solver on small problems of any form, against finite differences and each other."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple

import pytest
import torch

from ifsl_bench.solvers import (
    LBFGS,
    ConjugateGradient,
    FunctionObjective,
    GradientDescent,
    Implicit,
    Neumann,
    Objective,
    Unroll,
    estimate_largest_curvature,
    minimise,
)

Args = namedtuple("Args", ["a", "b", "strength"])


def quartic(v, args):
    """Convex, with a Hessian that changes along the way: |A v - b|^2 / 2 + strength |v|^2 / 2 + sum v^4 / 40."""
    fit = (args.a @ v[:, :, None])[:, :, 0] - args.b
    return (fit.square().sum(1) + args.strength * v.square().sum(1)) / 2 + v.pow(4).sum(1) / 40


class Quartic(Objective):
    """The same with its gradient in closed form, and arguments that can be split."""

    def value(self, v, args):
        return quartic(v, args)

    def gradient(self, v, args):
        fit = (args.a @ v[:, :, None])[:, :, 0] - args.b
        return (args.a.mT @ fit[:, :, None])[:, :, 0] + args.strength * v + v.pow(3) / 10

    def select_episodes(self, args, index):
        return Args(args.a[index], args.b[index], args.strength)


def quartic_args(episodes=4, rows=6, size=5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(episodes, rows, size, generator=g, dtype=dtype)
    return Args(a, torch.randn(episodes, rows, generator=g, dtype=dtype), torch.tensor(0.3, dtype=dtype))


STOP = 1e-9 * 1000  # of the first gradient, as L-BFGS is asked in the tests of saddles, with room for flat places
SOLVERS = [LBFGS(1e-11), GradientDescent(0.05, 800, 1e-6)]


@pytest.mark.slow("hundreds of solves")
@pytest.mark.parametrize("objective", [quartic, Quartic()], ids=["function", "closed form"])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "adjoint",
    [
        pytest.param(Implicit(), id="cg"),
        pytest.param(Implicit(Neumann(1500, 0.0, 0.05)), id="neumann", marks=pytest.mark.slow("1,500 terms a solve")),
        pytest.param(Unroll(), id="unroll"),
    ],
)
def test_gradcheck(objective, solver, adjoint):
    if isinstance(adjoint, Unroll):
        if not isinstance(solver, GradientDescent):
            with pytest.raises(TypeError, match="GradientDescent"):
                minimise(objective, solver, torch.zeros(2, 3), quartic_args(2, 4, 3), adjoint)
            return
        solver = GradientDescent(0.05, 7)
    args = quartic_args(2, 4, 3)
    v0 = torch.full((2, 3), 0.1, dtype=torch.float64)

    def loss(*leaves):
        return minimise(objective, solver, v0, Args(*leaves), adjoint).value.sin().sum()

    leaves = [leaf.clone().requires_grad_() for leaf in args]
    # Central differences with 1e-6: gradient descent stops at 1e-6 of the first gradient, which is in both ends alike.
    assert torch.autograd.gradcheck(loss, leaves, atol=1e-5, rtol=1e-3, fast_mode=True)


def test_all_solvers_agree_and_report():
    args, v0 = quartic_args(), torch.ones(4, 5, dtype=torch.float64)
    solutions = [minimise(quartic, solver, v0, args) for solver in SOLVERS]
    for solution in solutions:
        assert bool(solution.converged.all())
        # The loosest of them, descent, stops at 1e-6 of the first gradient, and goes far below in 800 steps.
        torch.testing.assert_close(solution.value, solutions[0].value, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(solution.objective, quartic(solution.value, args))
        assert solution.steps.shape == solution.gradient_norm.shape == (4,)
        assert float(solution.gradient_norm.max()) < 1e-6


@pytest.mark.parametrize("objective", [quartic, Quartic()], ids=["whole", "split"])
def test_lbfgs_treats_every_episode_as_if_it_were_alone(objective):
    args = quartic_args(9, 6, 12, seed=3)
    scale = torch.logspace(-1, 1, 9, dtype=torch.float64)
    args = args._replace(a=args.a * scale[:, None, None])
    v0 = torch.ones(9, 12, dtype=torch.float64)
    whole = minimise(objective, LBFGS(1e-10), v0, args)
    assert bool(whole.converged.all())
    assert int(whole.steps.max()) > int(whole.steps.min())
    for i in range(9):
        alone = minimise(
            quartic, LBFGS(1e-10), v0[i : i + 1], Args(args.a[i : i + 1], args.b[i : i + 1], args.strength)
        )
        assert int(alone.steps) == pytest.approx(int(whole.steps[i]), rel=0.3, abs=10)
        torch.testing.assert_close(
            alone.value[0], whole.value[i], rtol=1e-4, atol=1e-6
        )  # 1e-10 through a condition of 1e4


def test_trees_of_unknowns_and_arguments():
    def f(v, args):
        return (v["x"] - args[0]["t"]).square().sum((1, 2)) + (v["y"][0] * args[1][:, None] - 1).square().sum(1)

    v0 = {"x": torch.zeros(3, 2, 2), "y": (torch.zeros(3, 4),)}
    t, scale = torch.randn(2, 2).requires_grad_(), torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    solution = minimise(f, LBFGS(), v0, ({"t": t}, scale, None))
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.value["x"], t.expand(3, 2, 2), rtol=1e-3, atol=1e-3)  # float32's stop: 1e-5
    solution.value["y"][0].sum().backward()
    # A derivative of it, at scales of 1 to 4.
    torch.testing.assert_close(scale.grad, -4 / scale.detach() ** 2, rtol=1e-2, atol=1e-2)


def test_only_arguments_receive_gradients_and_only_those_that_ask():
    args = quartic_args()
    v0 = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    b = args.b.clone().requires_grad_()
    minimise(quartic, LBFGS(), v0, args._replace(b=b)).value.sum().backward()
    assert v0.grad is None
    assert b.grad is not None
    assert not minimise(quartic, LBFGS(), v0, args).value.requires_grad
    with torch.no_grad():
        assert not minimise(quartic, LBFGS(), v0, args._replace(b=b)).value.requires_grad


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_series_that_grows_is_replaced_by_what_it_would_tend_to(damping, dtype):
    args = quartic_args(4, dtype=dtype)
    args = args._replace(a=args.a * torch.tensor([0.1, 10.0, 0.1, 10.0], dtype=dtype)[:, None, None])
    v0 = torch.zeros(4, 5, dtype=dtype)
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    b = args.b.clone().requires_grad_()
    solution = minimise(quartic, LBFGS(), v0, args._replace(b=b), Implicit(Neumann(20, damping, 0.5)))
    (solution.value * weight).sum().backward()
    assert (solution.adjoint.n_diverged, solution.adjoint.n_failed, solution.adjoint.n_indefinite) == (2, 0, 0)
    v, a = solution.value.detach(), args.a
    eye = torch.eye(5, dtype=dtype)
    h = a.mT @ a + torch.diag_embed(args.strength + 0.3 * v.square())
    limit = torch.linalg.solve(h + damping / 0.5 * eye, weight)
    t = (1 - damping) * eye - 0.5 * h
    series = 0.5 * sum(torch.linalg.matrix_power(t, k) for k in range(21)) @ weight[:, :, None]
    u = torch.where(torch.tensor([False, True, False, True])[:, None], limit, series[:, :, 0])
    near = {torch.float64: 1e-6, torch.float32: 1e-3}[
        dtype
    ]  # L-BFGS stops at 1e-8 and 1e-5, through a condition of 100
    torch.testing.assert_close(b.grad, (a @ u[:, :, None])[:, :, 0], rtol=near, atol=near)


def test_conjugate_gradients_say_when_they_ran_out_of_steps():
    args = quartic_args(2, 30, 20)
    b = args.b.clone().requires_grad_()
    v0 = torch.zeros(2, 20, dtype=torch.float64)
    solution = minimise(quartic, LBFGS(), v0, args._replace(b=b), Implicit(ConjugateGradient(1e-10, 2)))
    solution.value.sum().backward()
    assert (solution.adjoint.episodes, solution.adjoint.n_failed) == (2, 2)
    assert bool((solution.adjoint.residual > 1e-10).all())


def falls_for_ever(v, args):
    return torch.nn.functional.softplus(-v * args).sum(1)


def falls_without_bound(v, args):
    return (v * args).sum(1)


def flat(v, args):
    return 0 * v.sum(1) * args


def saddle(v, args):
    """A saddle at v_1 = 0 between minima at v_1 = +-sqrt(1/2), for every v_0 that the search may come along."""
    return args * (v[:, 0].square() - v[:, 1].square() + v[:, 1].pow(4))


def breaks(v, args):
    return (v + args).log().sum(1) + v.square().sum(1)


@pytest.mark.parametrize("objective", [falls_for_ever, falls_without_bound, breaks, flat])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_cannot_converge_is_flagged(objective, dtype):
    v0 = torch.full((2, 3), -1.0 if objective is breaks else 0.1, dtype=dtype)
    solution = minimise(objective, LBFGS(), v0, torch.tensor(0.5, dtype=dtype))
    assert not bool(solution.converged.any())


def test_a_start_without_a_gradient_is_a_minimum_or_left():
    strength, v0 = torch.tensor(0.5, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    solution = minimise(saddle, LBFGS(1e-9), v0, strength)
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.value[:, 1].abs(), torch.full((2,), 0.5**0.5, dtype=torch.float64))
    minimum = minimise(lambda v, a: a * (v - 1).square().sum(1), LBFGS(1e-9), v0 + 1, strength)
    assert bool(minimum.converged.all())
    torch.testing.assert_close(minimum.value, v0 + 1)


def test_a_saddle_that_a_search_runs_into_is_left_as_often_as_asked():
    strength = torch.tensor([0.5, 2.0], dtype=torch.float64)
    v0 = torch.tensor([[0.3, 0.0], [-1.0, 0.7]], dtype=torch.float64)
    stays = minimise(saddle, LBFGS(1e-9), v0, strength)
    assert bool(stays.converged.all())
    torch.testing.assert_close(stays.value[0], torch.zeros(2, dtype=torch.float64), rtol=0, atol=STOP)
    escape = minimise(saddle, LBFGS(1e-9, escapes=1), v0, strength)
    assert bool(escape.converged.all())
    torch.testing.assert_close(escape.value[:, 1].abs(), torch.full((2,), 0.5**0.5, dtype=torch.float64))
    torch.testing.assert_close(escape.objective, -strength / 4)
    assert int(escape.steps[0]) > int(stays.steps[0])


def test_a_saddle_has_a_gradient_by_minres_and_is_counted():
    strength = torch.tensor([0.5, 2.0], dtype=torch.float64)
    v0 = torch.tensor([[0.3, 0.0], [-1.0, 0.7]], dtype=torch.float64)
    c = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)

    def tilted(v, args):
        return saddle(v, strength) + (args * v).sum(1)

    for escapes, expected in ((0, [-0.5, 1.0]), (1, [-0.5, -0.5])):
        solution = minimise(tilted, LBFGS(1e-9, escapes=escapes), v0, c)
        c.grad = None
        solution.value.sum().backward()
        assert (solution.adjoint.n_indefinite, solution.adjoint.n_failed) == (1 - escapes, 0)
        # -1 over the second derivatives 2 a and -2 a, or 2 a and 4 a in a well.
        inverse = torch.tensor([[-1.0, expected[1]], [-0.25, -0.125]], dtype=torch.float64)
        torch.testing.assert_close(c.grad, inverse, rtol=10 * STOP, atol=10 * STOP)  # third derivatives up to 24


def test_implicit_differentiation_refuses_what_need_not_be_stationary():
    args, v0 = quartic_args(), torch.zeros(4, 5, dtype=torch.float64)
    args.b.requires_grad_()
    with pytest.raises(ValueError, match="give it a tolerance, or use Unroll"):
        minimise(quartic, GradientDescent(0.05, 20), v0, args)


def test_a_bad_episode_does_not_disturb_the_others():
    args = quartic_args(3)
    poisoned = args._replace(b=args.b.clone())
    poisoned.b[1] = torch.nan
    v0 = torch.zeros(3, 5, dtype=torch.float64)
    good, result = minimise(Quartic(), LBFGS(), v0, args), minimise(Quartic(), LBFGS(), v0, poisoned)
    assert result.converged.tolist() == [True, False, True]
    for i in (0, 2):
        torch.testing.assert_close(result.value[i], good.value[i])


def test_too_few_steps_are_flagged():
    args, v0 = quartic_args(), torch.ones(4, 5, dtype=torch.float64)
    for solver in (LBFGS(max_steps=2), GradientDescent(0.01, 3, tolerance=1e-6)):
        assert not bool(minimise(quartic, solver, v0, args).converged.any())
    assert not bool(minimise(quartic, GradientDescent(10.0, 20), v0, args).converged.any())
    growing = minimise(lambda v, _: v.square().sum(1), GradientDescent(1.5, 3), v0, None)
    assert bool(growing.value.isfinite().all())
    assert not bool(growing.converged.any())


def test_clear_errors():
    v0 = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one value per episode"):
        minimise(lambda v, args: v.sum(), LBFGS(), v0, None)
    with pytest.raises(ValueError, match="give v0"):
        minimise(lambda v, args: v.sum(1), LBFGS(), None, None)
    with pytest.raises(TypeError, match="tensors"):
        minimise(lambda v, args: v.sum(1), LBFGS(), v0, (1.0,))


def test_largest_curvature_of_an_indefinite_hessian():
    def saddle(v, h):
        return (v * h * v).sum(1) / 2

    h = torch.tensor([[3.0, -3.0, 1.0], [1.0, -5.0, 5.0]], dtype=torch.float64)
    curvature = estimate_largest_curvature(FunctionObjective(saddle), torch.zeros(2, 3, dtype=torch.float64), h)
    torch.testing.assert_close(curvature, torch.tensor([3.0, 5.0], dtype=torch.float64))


def test_lbfgs_takes_long_steps_where_the_curvature_is_negative():
    def well(v, args):
        return -torch.exp(-(v - args).square().sum(1) / 2)

    v0 = torch.tensor([[4.0, 0.0], [3.0, 2.0]], dtype=torch.float64)
    solution = minimise(well, LBFGS(1e-9, max_steps=60), v0, torch.zeros(2, dtype=torch.float64))
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.value, torch.zeros(2, 2, dtype=torch.float64), rtol=0, atol=STOP)


@pytest.mark.parametrize("adjoint", [Implicit(), Unroll()], ids=["implicit", "unroll"])
def test_nothing_is_kept_after_a_step(adjoint):
    a, b, strength = quartic_args()
    solver = GradientDescent(0.05, 20) if isinstance(adjoint, Unroll) else LBFGS()
    solution = minimise(
        Quartic(), solver, torch.zeros(4, 5, dtype=a.dtype), Args(a, b, strength.requires_grad_()), adjoint
    )
    solution.value.sum().backward()
    value = weakref.ref(solution.value)
    del solution
    gc.collect()
    assert value() is None


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_no_episodes_at_all(solver):
    solution = minimise(quartic, solver, torch.zeros(0, 5, dtype=torch.float64), quartic_args(0))
    assert solution.value.shape == (0, 5)
    assert solution.converged.shape == (0,)


def test_short_floats_are_refused():
    with pytest.raises(ValueError, match="float32 or float64"):
        minimise(lambda v, _: v.square().sum(1), LBFGS(), torch.zeros(2, 3, dtype=torch.bfloat16), None)
