"""`minimise`: solver x adjoint x linear solver; gradients go through the minimum, or the steps that led there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ifsl_bench.solvers.linear import AdjointReport, ConjugateGradient, LinearSolver
from ifsl_bench.solvers.objective import FunctionObjective, Objective
from ifsl_bench.solvers.outcome import Outcome, Solution, Solver
from ifsl_bench.solvers.tree import Tree, list_leaves, rebuild_tree, tensor_leaves, tree_map


class Adjoint(Protocol):
    """A way to differentiate a solve in its arguments."""

    def apply(self, objective: Objective, solver: Solver, v0: Tree, args: Tree) -> Solution:
        """Solve, with v0 detached and args that may need gradients.

        Args:
            objective: to be minimised.
            solver: finds the minimum.
            v0: the start, a tree with leading dimension E, or None.
            args: the arguments of the objective.
        """


@dataclass(frozen=True)
class Implicit:
    """Differentiates the optimality condition: -u^T d(dL/dv)/dargs with u = H^-1 v from a linear solver.

    With the default it is exact, with `Neumann()` it is recurrent back-propagation. Costs no memory for the iterations.
    """

    linear: LinearSolver = field(default_factory=ConjugateGradient)

    def apply(self, objective: Objective, solver: Solver, v0: Tree, args: Tree) -> Solution:
        flat = list_leaves(args)
        run = _BackwardContext(objective, solver, self.linear, v0, tree_map(Tensor.detach, args))
        if not (torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in flat)):
            with torch.no_grad():
                return _make_solution(run.solve(), run.report)
        if getattr(solver, "unrolls", False) and getattr(solver, "tolerance", None) is None:
            raise ValueError(
                f"Implicit() needs a stationary point, and {type(solver).__name__} stops after its steps wherever it "
                f"is: give it a tolerance, or use Unroll()"
            )
        minimum = _MinimumFunction.apply(run, *flat)
        assert run.outcome is not None
        return _make_solution(replace(run.outcome, unknowns=rebuild_tree(run.outcome.unknowns, minimum)), run.report)


@dataclass(frozen=True)
class Unroll:
    """Differentiates through the iterations of a solver with a fixed number of them (truncated back-propagation)."""

    def apply(self, objective: Objective, solver: Solver, v0: Tree, args: Tree) -> Solution:
        if not getattr(solver, "unrolls", False):
            raise TypeError(
                f"Unroll() needs a solver with a fixed number of differentiable steps, such as GradientDescent, and "
                f"{type(solver).__name__} is none: use Implicit()"
            )
        return _make_solution(solver.run(objective, v0, args), AdjointReport())


def _make_solution(outcome: Outcome, report: AdjointReport) -> Solution:
    norm, value = outcome.gradient_norm.detach(), outcome.objective.detach()
    return Solution(outcome.unknowns, outcome.converged, outcome.steps, norm, value, report)


@dataclass
class _BackwardContext:
    """The state that forward and backward share besides tensors."""

    objective: Objective
    solver: Solver
    linear_solver: LinearSolver
    start_point: Tree
    args: Tree
    report: AdjointReport = field(default_factory=AdjointReport)
    outcome: Outcome | None = None

    def solve(self) -> Outcome:
        self.outcome = self.solver.run(self.objective, self.start_point, self.args)
        if (never := self.objective.may_lack_minimum(self.args)) is not False:
            self.outcome = replace(self.outcome, converged=self.outcome.converged & ~torch.as_tensor(never))
        return self.outcome


class _MinimumFunction(torch.autograd.Function):
    """The map from args to the minimiser, with the implicit function theorem for a derivative."""

    @staticmethod
    def forward(ctx: Any, run: _BackwardContext, *flat: Tensor | None) -> tuple[Tensor, ...]:
        minimum = tensor_leaves(run.solve().unknowns)
        ctx.run = run
        ctx.save_for_backward(*minimum)
        # What is returned gets this node as its history. The outcome, which the node holds, must not: a ring of the two
        # would never be freed.
        return tuple(part.detach() for part in minimum)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: _BackwardContext = ctx.run
        assert run.outcome is not None
        v = rebuild_tree(run.outcome.unknowns, ctx.saved_tensors)
        u = run.linear_solver.solve(run.objective.hessian(v, run.args), rebuild_tree(v, cotangents), run.report)
        run.report.count_all_failed(run.objective.may_lack_minimum(run.args))
        return (None, *run.objective.pullback(v, run.args, u, list(ctx.needs_input_grad[1:])))


_solver_replacement: ContextVar[Callable[[Solver], Solver] | None] = ContextVar("replaced", default=None)


@contextmanager
def replace_solvers(replace: Callable[[Solver], Solver]) -> Iterator[None]:
    """Have `minimise` run replace(solver) wherever it would search for a minimum, while the context lasts.

    So a figure can look at a solve that is part of something larger, at unknowns of its own, without a search.
    """
    token = _solver_replacement.set(replace)
    try:
        yield
    finally:
        _solver_replacement.reset(token)


def minimise(
    objective: Objective | Callable[[Any, Any], Tensor],
    solver: Solver,
    v0: Tree,
    args: Tree,
    adjoint: Adjoint | None = None,
) -> Solution:
    """Minimise objective(v, args) over v, for E episodes at once, differentiably with respect to args.

    Args:
        objective: an `Objective`, or a function (v, args) -> [E].
        solver: how the minimum is sought: `LBFGS`, `DualNewton`, `GradientDescent`, or one with such a method `run`.
        v0: a tree of tensors with leading dimension E; None where solver or objective have a start of their own.
        args: a tree (tensor, tuple, named tuple, list, dict, None) of everything the objective depends on; only tensors
            in here receive gradients.
        adjoint: how gradients pass through the solve: `Implicit()`, the default, or `Unroll()`.

    Returns:
        A `Solution`. An episode that could not be solved is marked in its `converged`.

    Raises:
        ValueError: input that cannot be solved, whatever the solver.
        TypeError: a solver that does not suit the objective, or the adjoint.

    >>> def ridge(v, args):                                       # v [E, D]
    ...     x, y, strength = args                                 # x [E, S, D], y [E, S], strength []
    ...     fit = (x @ v[..., None])[..., 0] - y
    ...     return fit.square().mean(1) + strength * v.square().sum(1)
    >>> solution = minimise(ridge, LBFGS(), torch.zeros(E, D), (x, y, strength))
    >>> solution.value.sum().backward()  # d/dx, d/dy, d/dstrength
    """
    problem = objective if isinstance(objective, Objective) else FunctionObjective(objective)
    start = None if v0 is None else tree_map(Tensor.detach, v0)
    problem.check_arguments(tree_map(Tensor.detach, args))
    if start is not None and any(leaf.dtype not in (torch.float32, torch.float64) for leaf in tensor_leaves(start)):
        raise ValueError("v0 must be float32 or float64: rounding of anything shorter stops a search too early")
    through = adjoint or Implicit()
    if (replace := _solver_replacement.get()) is not None and isinstance(through, Implicit):
        solver = replace(solver)
    return through.apply(problem, solver, start, args)
