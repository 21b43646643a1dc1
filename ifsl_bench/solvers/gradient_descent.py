"""Gradient descent with a fixed number of steps, and the largest rate that suits an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.solvers.linear import check_solver_options
from ifsl_bench.solvers.objective import Objective, value_and_gradient
from ifsl_bench.solvers.outcome import Outcome, evaluate_outcome
from ifsl_bench.solvers.tree import Tree, inner_product_by_episode, pack_leaves_into_rows, tensor_leaves, tree_map


@dataclass(frozen=True)
class GradientDescent:
    """`steps` steps of size `rate`, one or [E]: with `Unroll()`, truncated back-propagation through time.

    The result is defined by the number of steps, so an episode counts as converged when it stayed finite and did not
    end above where it began; give a `tolerance` to ask for |grad| <= tolerance |grad at v0| instead, without which
    `Implicit` refuses it. See `estimate_largest_curvature` for rates that are safe.

    Raises:
        ValueError: an option out of range, or no v0.
    """

    rate: float | Tensor = 1.0
    steps: int = 20
    tolerance: float | None = None
    unrolls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_solver_options(self, positive=("rate", "tolerance"), counts=("steps",))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if v0 is None:
            raise ValueError("gradient descent needs v0: where a fixed number of steps ends depends on where it starts")

        v = objective.descend(v0, args, self.rate, self.steps)
        end, fixed = tree_map(Tensor.detach, v), tree_map(Tensor.detach, args)
        count = tensor_leaves(v)[0].shape[0]
        steps = torch.full((count,), self.steps, device=tensor_leaves(v)[0].device)
        outcome = evaluate_outcome(objective, end, fixed, torch.ones_like(steps, dtype=torch.bool), steps)
        value, slope0 = value_and_gradient(objective, tree_map(Tensor.detach, v0), fixed)
        if self.tolerance is None:
            converged = outcome.converged & (outcome.objective <= value)
        else:
            flat = pack_leaves_into_rows(slope0)
            converged = outcome.converged & (
                outcome.gradient_norm <= self.tolerance * inner_product_by_episode(flat, flat).sqrt()
            )
        return Outcome(v, converged, steps, outcome.gradient_norm, outcome.objective)


def estimate_largest_curvature(objective: Objective, v: Tree, args: Tree, steps: int = 50) -> Tensor:
    """Return an estimate (from below) of the largest absolute eigenvalue of the Hessian, by power iteration: [E].

    Gradient descent on a convex objective contracts for rates below two over it.

    Args:
        objective: twice differentiable.
        v: the point of the Hessian, a tree with leading dimension E.
        args: the arguments of the objective.
        steps: of the power iteration.
    """
    return objective.hessian(v, tree_map(Tensor.detach, args)).largest_eigenvalue(v, steps)
