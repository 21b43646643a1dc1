"""One entry point: solver x adjoint x linear solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .linear import AdjointReport, ConjugateGradient, LinearSolver
from .objective import FunctionObjective, Objective
from .outcome import Outcome, Solver
from .tree import Tree, leaves, rebuild, tensors, tree_map


@dataclass(frozen=True)
class Implicit:
    """Differentiate the optimality condition: -u^T d(dL/dv)/dargs with u = H^-1 v from a linear solver.

    With the default it is exact, with `Neumann()` it is recurrent back-propagation. Costs no memory for the iterations.
    """

    linear: LinearSolver = field(default_factory=ConjugateGradient)


@dataclass(frozen=True)
class Unroll:
    """Differentiate through the iterations of a solver with a fixed number of them (truncated back-propagation)."""


@dataclass(frozen=True)
class Solution:
    """What was found, and how it went episode by episode.

    value: the minimiser, differentiable in args. converged [E] bool, steps [E], gradient_norm [E] (Euclidean),
    objective [E]: constants. adjoint: filled in by the backward pass.
    """

    value: Any
    converged: Tensor
    steps: Tensor
    gradient_norm: Tensor
    objective: Tensor
    adjoint: AdjointReport


def minimise(
    objective: Objective | Callable[[Any, Any], Tensor],
    solver: Solver,
    v0: Tree,
    args: Tree,
    adjoint: Implicit | Unroll | None = None,
) -> Solution:
    """The minimiser over v of objective(v, args), for E episodes at once, differentiable with respect to args.

    objective: an `Objective`, or a function (v, args) -> [E]. v0: a tree of tensors with leading dimension E, or None
    where solver or objective have a start of their own. args: a tree (tensor, tuple, named tuple, list, dict, None) of
    everything the objective depends on; only tensors in here receive gradients. adjoint: `Implicit()` by default.
    Bad input is refused with a ValueError; an episode that could not be solved is marked in `converged`.

    >>> def ridge(v, args):                                       # v [E, D]
    ...     x, y, strength = args                                 # x [E, S, D], y [E, S], strength []
    ...     fit = (x @ v[..., None])[..., 0] - y
    ...     return fit.square().mean(1) + strength * v.square().sum(1)
    >>> solution = minimise(ridge, LBFGS(), torch.zeros(E, D), (x, y, strength))
    >>> solution.value.sum().backward()  # d/dx, d/dy, d/dstrength
    """
    problem = objective if isinstance(objective, Objective) else FunctionObjective(objective)
    adjoint = Implicit() if adjoint is None else adjoint
    problem.check(tree_map(Tensor.detach, args))
    report = AdjointReport()
    start = None if v0 is None else tree_map(Tensor.detach, v0)
    if start is not None and any(leaf.dtype not in (torch.float32, torch.float64) for leaf in tensors(start)):
        raise ValueError("v0 must be float32 or float64: rounding of anything shorter stops a search too early")
    if isinstance(adjoint, Unroll):
        if not getattr(solver, "unrolls", False):
            raise TypeError(
                f"Unroll() needs a solver with a fixed number of differentiable steps, such as GradientDescent, and "
                f"{type(solver).__name__} is none: use Implicit()"
            )
        return _solution(solver.run(problem, start, args), report)
    flat = leaves(args)
    detached = tree_map(Tensor.detach, args)
    if not (torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in flat)):
        with torch.no_grad():
            return _solution(_flagged(solver.run(problem, start, detached), problem, detached), report)
    if getattr(solver, "unrolls", False) and getattr(solver, "tolerance", None) is None:
        raise ValueError(
            f"Implicit() needs a stationary point, and {type(solver).__name__} stops after its steps wherever it is: "
            f"give it a tolerance, or use Unroll()"
        )
    run = _Run(problem, solver, adjoint, start, detached, report)
    found = _Implicit.apply(run, *flat)
    assert run.outcome is not None
    outcome = run.outcome
    return _solution(outcome, report, rebuild(outcome.v, found))


def _flagged(outcome: Outcome, objective: Objective, args: Tree) -> Outcome:
    if not objective.unbounded(args):
        return outcome
    never = torch.zeros_like(outcome.converged)
    return Outcome(outcome.v, never, outcome.steps, outcome.gradient_norm, outcome.objective)


def _solution(outcome: Outcome, report: AdjointReport, value: Tree = None) -> Solution:
    return Solution(
        outcome.v if value is None else value,
        outcome.converged,
        outcome.steps,
        outcome.gradient_norm.detach(),
        outcome.objective.detach(),
        report,
    )


@dataclass
class _Run:
    """What forward and backward share besides tensors."""

    objective: Objective
    solver: Solver
    adjoint: Implicit
    v0: Tree
    args: Tree
    report: AdjointReport
    outcome: Outcome | None = None


class _Implicit(torch.autograd.Function):
    """args -> argmin, with the implicit function theorem for a derivative."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *flat: Tensor | None) -> tuple[Tensor, ...]:
        run.outcome = _flagged(run.solver.run(run.objective, run.v0, run.args), run.objective, run.args)
        found = tensors(run.outcome.v)
        ctx.run = run
        ctx.save_for_backward(*found)
        # What is returned gets this node as its history. The outcome, which the node holds, must not: a ring of the two
        # would never be freed.
        return tuple(part.detach() for part in found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        assert run.outcome is not None
        v = rebuild(run.outcome.v, ctx.saved_tensors)
        u = run.adjoint.linear.solve(run.objective, v, run.args, rebuild(run.outcome.v, cotangents), run.report)
        if run.objective.unbounded(run.args):
            run.report.failed = run.report.episodes
        return (None, *run.objective.pullback(v, run.args, u, list(ctx.needs_input_grad[1:])))
