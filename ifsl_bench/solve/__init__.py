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

Two objectives come with closed forms and with coordinates in which their size is that of the support set:
`SoftmaxRegression` (convex; `DualNewton()` solves thousands of episodes a second) and `TanhNetwork` (`LBFGS()` with
v0 = None works in its dual numbers). `fold` turns an attractor into the centres and precisions they take:

    c, p = fold(u, log_gamma, weight_decay=1e-5, rows=N)
    args = Regression(features, labels, base_logits.logsumexp(-1), c, p)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args, Implicit(Neumann()))
    novel = query @ solution.value[..., :-1].mT + solution.value[..., None, :, -1]      # [E, Q, N]
"""

from .attractor import Memory, attention, fold, fold_offset, prototypes, ridge, unit
from .dual import DualNewton
from .episodic import fixed_class, statistics
from .lbfgs import LBFGS
from .linear import AdjointReport, ConjugateGradient, Direct, LinearSolver, Neumann
from .minimise import Implicit, Solution, Unroll, minimise
from .network import TanhNetwork
from .network_space import Network, NetworkArgs
from .objective import FunctionObjective, LinearOutcome, Objective
from .outcome import Outcome, Solver, measured
from .softmax import Regression, SoftmaxRegression
from .solvers import GradientDescent, Newton, largest_curvature

__all__ = [
    "LBFGS",
    "AdjointReport",
    "ConjugateGradient",
    "Direct",
    "DualNewton",
    "FunctionObjective",
    "GradientDescent",
    "Implicit",
    "LinearOutcome",
    "LinearSolver",
    "Memory",
    "Network",
    "NetworkArgs",
    "Neumann",
    "Newton",
    "Objective",
    "Outcome",
    "Regression",
    "SoftmaxRegression",
    "Solution",
    "Solver",
    "TanhNetwork",
    "Unroll",
    "attention",
    "fixed_class",
    "fold",
    "fold_offset",
    "largest_curvature",
    "measured",
    "minimise",
    "prototypes",
    "ridge",
    "statistics",
    "unit",
]
