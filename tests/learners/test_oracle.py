"""Agreement with numbers computed by the attractor paper's released code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ifsl_bench.learners import DualNewton, Network, SoftmaxRegression, TanhNetwork
from ifsl_bench.learners.network import activations
from ifsl_bench.learners.softmax import scores
from ifsl_bench.solve import (
    LBFGS,
    ConjugateGradient,
    GradientDescent,
    Implicit,
    Neumann,
    Outcome,
    Unroll,
    measured,
    minimise,
)
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


def close(found, expected, within=FORMULA):
    """Within this share of the largest number; gradients at a minimum are what is left of sums that cancel."""
    expected = torch.as_tensor(expected).to(found)
    torch.testing.assert_close(found, expected, rtol=within, atol=within * float(expected.abs().max()) + 1e-14)


@pytest.mark.parametrize("point", ["init", "probe", "tight"])
@pytest.mark.parametrize("kind", KINDS)
def test_lr_objective_its_parts_and_its_gradient(episode, kind, point):
    e = episode(f"lr_{kind}")
    args, offset = e.regression()
    v = e.regression_point(f"{point}/w")
    total = SoftmaxRegression().value(v, args) + offset
    close(total.detach()[0], e.stored[f"{point}/inner_loss"])
    if kind != "none":
        pull, _ = e.regression(weight_decay=0.0)
        close(((pull.precisions * (v - pull.centres).square()).sum() / 2).detach(), e.stored[f"{point}/reg_term"])
    gradient = SoftmaxRegression().gradient(v, args).detach()[0]
    expected = np.concatenate([e.stored[f"{point}/grad/w_class_b"].T, e.stored[f"{point}/grad/b_class_b"][:, None]], 1)
    close(gradient, expected)


@pytest.mark.parametrize("point", ["init", "probe", "tight"])
@pytest.mark.parametrize("kind", KINDS)
def test_mlp_objective_its_parts_and_its_gradient(episode, kind, point):
    e = episode(f"mlp_{kind}")
    args, offset = e.network()
    v = e.network_point(f"{point}/w")
    objective = TanhNetwork(5)
    close((objective.value(v, args) + offset).detach().squeeze(), e.stored[f"{point}/inner_loss"])
    if kind != "none":
        pull, constant = e.network(weight_decay=0.0)
        parts = (
            (pull.output_precisions, v.output, pull.output_centres),
            (pull.skip_precisions, v.skip, pull.skip_centres),
            (pull.hidden_precisions, v.hidden, pull.hidden_centres),
        )
        reg = sum((p * (w - c).square()).sum() / 2 for p, w, c in parts) + constant
        close(reg.detach().squeeze(), e.stored[f"{point}/reg_term"])
    found = objective.gradient(v, args)
    expected = e.network_point(f"{point}/grad")
    for part, other in zip(found, expected, strict=True):
        close(part.detach(), other)


@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_hessian_products(episode, learner, kind):
    e = episode(f"{learner}_{kind}")
    if learner == "lr":
        objective, args = SoftmaxRegression(), e.regression()[0]
        v, d, jtv = (e.regression_point(f"probe/{k}") for k in ("w", "v", "jtv"))
        found = [(d - objective.hessian(v, args).product(d)).detach()]
        jtv = [jtv]
    else:
        objective, args = TanhNetwork(5), e.network()[0]
        v, d, jtv = (e.network_point(f"probe/{k}") for k in ("w", "v", "jtv"))
        found = [(a - b).detach() for a, b in zip(d, objective.hessian(v, args).product(d), strict=True)]
    for part, other in zip(found, jtv, strict=True):
        close(part, other)


@pytest.mark.parametrize("dtype", SOLVED)
@pytest.mark.parametrize("kind", KINDS)
def test_lr_solution_and_logits(episode, kind, dtype):
    e = episode(f"lr_{kind}", dtype)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, e.regression()[0])
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
    solution = minimise(SoftmaxRegression(), DualNewton(), None, e.regression()[0], Implicit(linear))
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
    solution = minimise(TanhNetwork(5), Stay(), e.network_point("tight/w"), e.network()[0], Implicit(linear))
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
    there = e.network_point("tight/w")
    near = Network(*(w + 1e-3 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in there))
    solution = minimise(TanhNetwork(5), LBFGS(1e-6), near, e.network()[0])
    assert bool(solution.converged.all())
    for found, expected in zip(solution.value, there, strict=True):
        # The stop, 1e-6 of the gradient beside the minimum, over a decay of 1e-5 along what the data leave free.
        torch.testing.assert_close(found.detach(), expected, rtol=1e-3, atol=1e-4)


def test_unrolled_gradient_descent_trajectory_and_meta_gradients(episode):
    with_start = episode("lr_attn")
    e = episode("bptt20_lr_attn")
    e.kind = "attn"
    start = with_start.regression_point("init/w")
    args = e.regression()[0]
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


def test_outcomes_are_what_solvers_return():
    assert Outcome.__dataclass_fields__.keys() == {"v", "converged", "steps", "gradient_norm", "objective"}
