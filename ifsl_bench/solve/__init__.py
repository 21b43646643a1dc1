"""Inner optimisation for few-shot learners, batched over episodes and differentiable in all an objective depends on.

    solution = minimise(objective, solver, v0, args, adjoint)

Objective, solver, adjoint and the adjoint's linear solver are chosen independently:

    minimise(f, LBFGS(), v0, args)                                            # exact implicit gradients
    minimise(f, LBFGS(), v0, args, Implicit(Neumann(steps=20, damping=0.1)))  # recurrent back-propagation
    minimise(f, GradientDescent(1.0, steps=20), v0, args, Unroll())           # truncated back-propagation in time

`f(v, args)` returns one value per episode, [E]; v0 (a tensor or a tree of tensors) has the leading dimension E; args
is a tree of everything f depends on, and nothing outside it receives a gradient. `solution.value` is the minimiser;
`solution.converged`, `.steps`, `.gradient_norm` and `.objective` say per episode how it went and are meant to be
stored with a result; `solution.adjoint` says after `backward()` how the backward pass went.

Problems of incremental few-shot episodes, with closed forms and solvers of their own, are in `ifsl_bench.learners`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .adjoint import Adjoint, Implicit, Unroll
from .linear import AdjointReport, ConjugateGradient, LinearOutcome, LinearSolver, Neumann, Operator
from .minimise import minimise
from .objective import FunctionObjective, Objective
from .outcome import Outcome, Solution, Solver, measured
from .solvers import GradientDescent, largest_curvature

if TYPE_CHECKING:
    from .coordinates import Space
    from .lbfgs import LBFGS

__all__ = [
    "LBFGS", "Adjoint", "AdjointReport", "ConjugateGradient", "FunctionObjective", "GradientDescent",
    "Implicit", "LinearOutcome", "LinearSolver", "Neumann", "Objective", "Operator",
    "Outcome", "Solution", "Solver", "Space", "Unroll", "largest_curvature", "measured", "minimise",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """L-BFGS and what it searches in are imported where they are asked for."""
    if name not in ("LBFGS", "Space"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'lbfgs' if name == 'LBFGS' else 'coordinates'}"), name)
