"""Agreement of the inner problems with numbers computed by the attractor paper's released code.

Logits and meta-gradients, through the methods: ``tests/methods/test_attractors.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ifsl_bench.methods.ridge import Ridge

from ifsl_bench.solvers import LBFGS, GradientDescent, NetworkWeights, SoftmaxRegression, minimise
from tests.methods.test_attractors import CLASSES, N, arguments, pieces, point, stored_episode
from tests.tolerances import rounding

FORMULA = rounding(torch.float64, 25 * 64)  # sums over 25 support rows of 64 features


def close(result, expected, within=FORMULA):
    """Within this share of the largest number; gradients at a minimum are what is left of sums that cancel."""
    torch.testing.assert_close(result, expected, rtol=within, atol=within * float(expected.abs().max()) + 1e-14)


def problem(z, learner, kind):
    """A stored episode's inner problem and its arguments."""
    base, support, *_ = stored_episode(z)
    decay = float(np.float32(1e-3 if kind == "none" else 1e-5))  # stored in single precision
    method = CLASSES.get(kind, Ridge)(base, N, learner=learner, weight_decay=decay).eval()
    if kind != "none":
        method.load_state_dict(pieces(kind, learner, z, "meta"))
    with torch.no_grad():
        return method.learner.objective, arguments(method, support)


def parts(v):
    return v if isinstance(v, NetworkWeights) else [v]


@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", ["none", "static", "attn"])
def test_derivatives_and_differences_of_the_objective(oracle, learner, kind):
    """The part `to_prior` drops of the objective is one number at all points."""
    z = oracle(f"{learner}_{kind}_s5_nomask")
    objective, args = problem(z, learner, kind)
    minimum = objective.value(point(z, learner, "tight/w"), args).squeeze()
    for place in ("init", "probe", "tight"):
        v = point(z, learner, f"{place}/w")
        gradient, stored = objective.gradient(v, args), point(z, learner, f"{place}/grad")
        for part, expected in zip(parts(gradient), parts(stored), strict=True):
            close(part, expected)
        fall = z[f"{place}/inner_loss"] - z["tight/inner_loss"]
        close(objective.value(v, args).squeeze() - minimum, fall)
    v, d, jtv = (point(z, learner, f"probe/{key}") for key in ("w", "v", "jtv"))
    product = objective.hessian(v, args).product(d)
    for a, b, expected in zip(parts(d), parts(product), parts(jtv), strict=True):
        close(a - b, expected)


def test_mlp_search_from_beside_the_stored_solution_returns_to_it(oracle):
    z = oracle("mlp_attn_s5_nomask")
    objective, args = problem(z, "mlp", "attn")
    generator = torch.Generator().manual_seed(0)
    optimum = point(z, "mlp", "tight/w")
    near = NetworkWeights(*(w + 1e-3 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in optimum))
    solution = minimise(objective, LBFGS(1e-6), near, args)
    assert bool(solution.converged.all())
    for weight, expected in zip(solution.value, optimum, strict=True):
        # The stop, 1e-6 of the gradient beside the minimum, over a decay of 1e-5 along what the data leave free.
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)


def test_unrolled_gradient_descent_trajectory(oracle):
    start = point(oracle("lr_attn_s5_nomask"), "lr", "init/w")
    z = oracle("bptt20_lr_attn_s5_nomask")
    _, args = problem(z, "lr", "attn")
    for steps in (1, 2, 20):
        v = minimise(SoftmaxRegression(), GradientDescent(1.0, steps), start, args).value[0]
        w, b = (z[f"trajectory/w/{name}_class_b"][steps - 1] for name in ("w", "b"))
        close(v, torch.cat([w.T, b[:, None]], 1))
