"""Agreement with numbers computed by the attractor paper's released code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ifsl_bench.learners import DualNewton, Network, SoftmaxRegression, TanhNetwork
from ifsl_bench.learners.network import activations
from ifsl_bench.learners.softmax import scores
from ifsl_bench.solve import LBFGS, ConjugateGradient, GradientDescent, Implicit, Neumann, Unroll, measured, minimise
from tests.tolerances import rounding

KINDS = ["none", "static", "attn"]
FORMULA = rounding(torch.float64, 25 * 64)  # sums over 25 support rows of 64 features
CONDITION = 100  # of the inner problems' Hessians in the metric of their penalty, with room
SOLVED = {torch.float64: 1e-9 * CONDITION, torch.float32: rounding(torch.float32, 1, CONDITION)}  # DualNewton's stop
ADJOINT = {
    torch.float64: SOLVED[torch.float64],
    torch.float32: 1e-5 * CONDITION,
}  # conjugate gradients' stop in float32
RBP = Neumann(20, float(np.float32(0.1)), 1.0)
EXACT = ConjugateGradient(1e-12, 5000)


class Stay:
    """A solver that takes the start for the solution."""

    def run(self, objective, v0, args):
        count = torch.zeros(1, dtype=torch.long)
        return measured(objective, v0, args, count == 0, count)


def close(result, expected, within=FORMULA):
    """Within this share of the largest number; gradients at a minimum are what is left of sums that cancel."""
    expected = torch.as_tensor(expected).to(result)
    torch.testing.assert_close(result, expected, rtol=within, atol=within * float(expected.abs().max()) + 1e-14)


def problem(e, learner):
    """The inner problem, its arguments, and what makes a point of a stored one."""
    if learner == "lr":
        return SoftmaxRegression(), e.regression(), lambda key: (e.regression_point(key),)
    return TanhNetwork(5), e.network(), e.network_point


@pytest.mark.parametrize("point", ["init", "probe", "tight"])
@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_differences_of_the_objective(episode, learner, kind, point):
    """The part `fold` drops of the objective is one number at all points."""
    e = episode(f"{learner}_{kind}")
    objective, args, point_of = problem(e, learner)

    def at(key):
        v = point_of(key)
        return v[0] if learner == "lr" else v

    gradient = objective.gradient(at(f"{point}/w"), args)
    for part, expected in zip((gradient,) if learner == "lr" else gradient, point_of(f"{point}/grad"), strict=True):
        close(part.detach(), expected)
    value, minimum = (objective.value(at(f"{key}/w"), args).detach().squeeze() for key in (point, "tight"))
    close(value - minimum, e.stored[f"{point}/inner_loss"] - e.stored["tight/inner_loss"])


@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_hessian_products(episode, learner, kind):
    e = episode(f"{learner}_{kind}")
    objective, args, point_of = problem(e, learner)
    v, d, jtv = (point_of(f"probe/{key}") for key in ("w", "v", "jtv"))
    product = objective.hessian(v[0] if learner == "lr" else v, args).product(d[0] if learner == "lr" else d)
    for a, b, expected in zip(d, (product,) if learner == "lr" else product, jtv, strict=True):
        close((a - b).detach(), expected)


@pytest.mark.parametrize("dtype", SOLVED)
@pytest.mark.parametrize("kind", KINDS)
def test_lr_solution_and_logits(episode, kind, dtype):
    e = episode(f"lr_{kind}", dtype)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, e.regression())
    assert bool(solution.converged.all())
    expected = e.regression_point("tight/w")
    value = solution.value.detach()
    assert float((value - expected).norm() / expected.norm()) < SOLVED[dtype]
    logits = e.joint(scores(solution.value, e.query)).detach()
    expected = e.tensor("tight/query_logits_no_dummy_step")
    assert float((logits - expected).norm() / expected.norm()) < SOLVED[dtype]
    close(e.query_loss(scores(solution.value, e.query)).detach(), e.stored["tight/query_loss"], SOLVED[dtype])


@pytest.mark.parametrize("dtype", SOLVED)
@pytest.mark.parametrize("linear", [RBP, ConjugateGradient()], ids=["rbp", "cg"])
@pytest.mark.parametrize("kind", ["static", "attn"])
def test_lr_meta_gradients(episode, kind, linear, dtype):
    e = episode(f"lr_{kind}", dtype)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, e.regression(), Implicit(linear))
    e.query_loss(scores(solution.value, e.query)).backward()
    assert solution.adjoint.episodes == 1
    assert solution.adjoint.failed == 0
    assert e.worst("tight/meta_grad" if linear is RBP else "tight/exact_meta_grad") < SOLVED[dtype]


@pytest.mark.parametrize("dtype", ADJOINT)
@pytest.mark.parametrize("linear", [RBP, EXACT], ids=["rbp", "cg"])
@pytest.mark.parametrize("kind", ["static", "attn"])
def test_mlp_meta_gradients_at_the_stored_solution(episode, kind, linear, dtype):
    e = episode(f"mlp_{kind}", dtype)
    linear = ConjugateGradient(1e-5, 5000) if linear is EXACT and dtype == torch.float32 else linear
    solution = minimise(TanhNetwork(5), Stay(), e.network_point("tight/w"), e.network(), Implicit(linear))
    novel = activations(solution.value, e.query)[1]
    loss = e.query_loss(novel)
    close(loss.detach(), e.stored["tight/query_loss"], SOLVED[dtype])
    loss.backward()
    assert solution.adjoint.failed == 0
    assert e.worst("tight/meta_grad" if linear is RBP else "tight/exact_meta_grad") < ADJOINT[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_mlp_logits_at_the_stored_solution(episode, kind):
    e = episode(f"mlp_{kind}")
    logits = e.joint(activations(e.network_point("tight/w"), e.query)[1])
    close(logits, e.stored["tight/query_logits_no_dummy_step"])


@pytest.mark.parametrize("kind", KINDS)
def test_mlp_search_from_beside_the_stored_solution_returns_to_it(episode, kind):
    e = episode(f"mlp_{kind}")
    generator = torch.Generator().manual_seed(0)
    optimum = e.network_point("tight/w")
    near = Network(*(w + 1e-3 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in optimum))
    solution = minimise(TanhNetwork(5), LBFGS(1e-6), near, e.network())
    assert bool(solution.converged.all())
    for weight, expected in zip(solution.value, optimum, strict=True):
        # The stop, 1e-6 of the gradient beside the minimum, over a decay of 1e-5 along what the data leave free.
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-4)


def test_unrolled_gradient_descent_trajectory_and_meta_gradients(episode):
    with_start = episode("lr_attn")
    e = episode("bptt20_lr_attn")
    e.kind = "attn"
    start = with_start.regression_point("init/w")
    args = e.regression()
    for steps in range(1, 21):
        with torch.no_grad():
            v = minimise(SoftmaxRegression(), GradientDescent(1.0, steps), start, args).value[0]
        w = e.tensor("trajectory/w/w_class_b")[steps - 1].T
        b = e.tensor("trajectory/w/b_class_b")[steps - 1]
        close(v, torch.cat([w, b[:, None]], 1))
    solution = minimise(SoftmaxRegression(), GradientDescent(1.0, 20), start, args, Unroll())
    novel = scores(solution.value, e.query)
    close(e.joint(novel).detach(), e.stored["query_logits"])
    loss = e.query_loss(novel)
    close(loss.detach(), e.stored["query_loss"])
    loss.backward()
    assert e.worst("meta_grad") < FORMULA
