"""The results of solvers and of `minimise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ifsl_bench.solvers.linear import AdjointReport
from ifsl_bench.solvers.objective import Objective, value_and_gradient
from ifsl_bench.solvers.tree import Tree, inner_product_by_episode, pack_leaves_into_rows, rebuild_tree, tensor_leaves
from ifsl_bench.utils.deprecated import accept_old_names


@accept_old_names(v="unknowns", put="replace_episodes")
@dataclass(frozen=True)
class Outcome:
    """A point and how it was reached, episode by episode."""

    unknowns: Tree
    converged: Tensor  # [E] bool
    steps: Tensor  # [E]
    gradient_norm: Tensor  # [E], Euclidean, of the large form
    objective: Tensor  # [E]

    def replace_episodes(self, rows: Tensor, part: Outcome) -> Outcome:
        """Return the outcome with some episodes replaced by those in `part`, whose steps come on top.

        Args:
            rows: the indices of these episodes.
            part: their outcome.
        """
        here = [*tensor_leaves(self.unknowns), self.converged, self.steps, self.gradient_norm, self.objective]
        new = [
            *tensor_leaves(part.unknowns),
            part.converged,
            part.steps + self.steps[rows],
            part.gradient_norm,
            part.objective,
        ]
        both = [a.index_copy(0, rows, b.to(a.dtype)) for a, b in zip(here, new, strict=True)]
        return Outcome(rebuild_tree(self.unknowns, both[:-4]), *both[-4:])


@dataclass(frozen=True)
class Solution:
    """The result of `minimise`, episode by episode.

    value: the minimiser, differentiable in args. converged [E] bool, steps [E], gradient_norm [E] (Euclidean),
    objective [E]: constants. adjoint: filled in by the backward pass.
    """

    value: Any
    converged: Tensor
    steps: Tensor
    gradient_norm: Tensor
    objective: Tensor
    adjoint: AdjointReport


class Solver(Protocol):
    """Minimises an objective from v0; a solver may have a start of its own and take v0 = None."""

    def run(self, objective: Objective, v0: Any, args: Any) -> Outcome:
        """Solve; called without a graph, on detached tensors, unless the adjoint is `Unroll`.

        Args:
            objective: to be minimised.
            v0: the start, a tree with leading dimension E, or None.
            args: the arguments of the objective.
        """


def evaluate_outcome(objective: Objective, v: Tree, args: Tree, converged: Tensor, steps: Tensor) -> Outcome:
    """Return the outcome at v, with value and gradient norm evaluated there.

    Args:
        objective: to evaluate.
        v: the point, a tree with leading dimension E.
        args: the arguments of the objective.
        converged: [E] bool; an episode whose value or gradient is not finite counts as not converged.
        steps: of the search, [E].
    """
    value, slope = value_and_gradient(objective, v, args)
    flat = pack_leaves_into_rows(slope)
    norm = inner_product_by_episode(flat, flat).sqrt()
    return Outcome(v, converged & norm.isfinite() & value.isfinite(), steps, norm, value)


def relative_tolerance(tolerance: float | None, dtype: torch.dtype, single: float, double: float) -> float:
    """Return a tolerance, or the default of the precision.

    Args:
        tolerance: the user's; None for the default.
        dtype: the precision.
        single: the default of float32.
        double: the default of float64.
    """
    return tolerance if tolerance is not None else (double if dtype == torch.float64 else single)
