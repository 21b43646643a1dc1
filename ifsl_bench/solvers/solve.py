"""One entry point: solver x adjoint x linear solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ifsl_bench.solvers.adjoint import Adjoint, Implicit
from ifsl_bench.solvers.objective import FunctionObjective, Objective
from ifsl_bench.solvers.outcome import Solution, Solver
from ifsl_bench.solvers.tree import Tree, tensors, tree_map

_replaced: ContextVar[Callable[[Solver], Solver] | None] = ContextVar("replaced", default=None)


@contextmanager
def solvers_replaced(replace: Callable[[Solver], Solver]) -> Iterator[None]:
    """Has `minimise` run replace(solver) wherever it would search for a minimum, while the context lasts.

    So a figure can look at a solve that is part of something larger, at unknowns of its own, without a search.
    """
    token = _replaced.set(replace)
    try:
        yield
    finally:
        _replaced.reset(token)


def minimise(
    objective: Objective | Callable[[Any, Any], Tensor],
    solver: Solver,
    v0: Tree,
    args: Tree,
    adjoint: Adjoint | None = None,
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
    start = None if v0 is None else tree_map(Tensor.detach, v0)
    problem.check(tree_map(Tensor.detach, args))
    if start is not None and any(leaf.dtype not in (torch.float32, torch.float64) for leaf in tensors(start)):
        raise ValueError("v0 must be float32 or float64: rounding of anything shorter stops a search too early")
    through = adjoint or Implicit()
    if (replace := _replaced.get()) is not None and isinstance(through, Implicit):
        solver = replace(solver)
    return through.apply(problem, solver, start, args)
