"""Inner optimisation for few-shot learners, batched over episodes, with derivatives by all inputs.

    solution = minimise(objective, solver, v0, args, adjoint)

Objective, solver, adjoint and the adjoint's linear solver are chosen independently:

    minimise(f, LBFGS(), v0, args)                                            # exact implicit gradients
    minimise(f, LBFGS(), v0, args, Implicit(Neumann(steps=20, damping=0.1)))  # recurrent back-propagation
    minimise(f, GradientDescent(1.0, steps=20), v0, args, Unroll())           # truncated back-propagation in time

`f(v, args)` returns one value per episode, [E]; v0 (a tensor or a tree of tensors) has the leading dimension E; args
is a tree of everything f depends on, and nothing outside it receives a gradient. `solution.value` is the minimiser;
`solution.converged`, `.steps`, `.gradient_norm` and `.objective` report the solve of each episode and are meant to be
stored with a result; `solution.adjoint` reports the backward pass after `backward()`.

Two objectives of few-shot episodes come with closed forms and with coordinates in which they are as large as the
support set: `SoftmaxRegression` (convex; `DualNewton()` solves thousands of episodes a second) and `TanhNetwork`
(`LBFGS()` with v0 = None works in its dual numbers). `to_prior` turns an attractor into the centres and precisions they
take:

    c, p = to_prior(u, log_gamma, weight_decay=1e-5, rows=N)
    args = RegressionArgs(features, labels, base_logits.logsumexp(-1), c, p)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args, Implicit(Neumann()))
    novel = query @ solution.value[..., :-1].mT + solution.value[..., None, :, -1]      # [E, Q, N]

A `Learner` puts these together for the episodes of a method; see `episode_problems`. On a CPU single episodes are
solved by code that Numba compiles (`numba_*.py`), on one core each and in double precision: a torch operation on the
numbers of one episode costs several times what it computes. `numba_backend` passes tensors to it.

Names are imported when first used: a linear method loads no network.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ifsl_bench.utils.cosine import normalise_with_epsilon as normalise_with_epsilon

    from .attractor_prior import AttractorMLP as AttractorMLP
    from .attractor_prior import QuadraticPrior as QuadraticPrior
    from .attractor_prior import attention_weights as attention_weights
    from .attractor_prior import ridge_prior as ridge_prior
    from .attractor_prior import to_prior as to_prior
    from .coordinates import SearchCoordinates as SearchCoordinates
    from .episode_problems import STRONG_WEIGHT_DECAYS as STRONG_WEIGHT_DECAYS
    from .episode_problems import WEIGHT_DECAY as WEIGHT_DECAY
    from .episode_problems import WEIGHT_DECAYS as WEIGHT_DECAYS
    from .episode_problems import ConvergedSolve as ConvergedSolve
    from .episode_problems import InnerSolve as InnerSolve
    from .episode_problems import Learner as Learner
    from .episode_problems import LinearLearner as LinearLearner
    from .episode_problems import UnrolledSolve as UnrolledSolve
    from .episode_problems import WeightGroup as WeightGroup
    from .episode_problems import fixed_logsumexp as fixed_logsumexp
    from .episode_problems import solve_statistics as solve_statistics
    from .gradient_descent import GradientDescent as GradientDescent
    from .gradient_descent import estimate_largest_curvature as estimate_largest_curvature
    from .lbfgs import LBFGS as LBFGS
    from .linear import AdjointReport as AdjointReport
    from .linear import ConjugateGradient as ConjugateGradient
    from .linear import LinearOutcome as LinearOutcome
    from .linear import LinearSolver as LinearSolver
    from .linear import Neumann as Neumann
    from .linear import Operator as Operator
    from .network import NetworkLearner as NetworkLearner
    from .network import TanhNetwork as TanhNetwork
    from .network_space import NetworkArgs as NetworkArgs
    from .network_space import NetworkWeights as NetworkWeights
    from .objective import FunctionObjective as FunctionObjective
    from .objective import Objective as Objective
    from .outcome import Outcome as Outcome
    from .outcome import Solution as Solution
    from .outcome import Solver as Solver
    from .outcome import evaluate_outcome as evaluate_outcome
    from .regression import DualNewton as DualNewton
    from .regression import SoftmaxRegression as SoftmaxRegression
    from .softmax import RegressionArgs as RegressionArgs
    from .solve import Adjoint as Adjoint
    from .solve import Implicit as Implicit
    from .solve import Unroll as Unroll
    from .solve import minimise as minimise

_MODULES = {
    "attractor_prior": ("AttractorMLP", "QuadraticPrior", "attention_weights", "ridge_prior", "to_prior"),
    "coordinates": ("SearchCoordinates",),
    "episode_problems": (
        *(
            "STRONG_WEIGHT_DECAYS",
            "WEIGHT_DECAY",
            "WEIGHT_DECAYS",
            "ConvergedSolve",
            "Learner",
            "LinearLearner",
            "InnerSolve",
        ),
        *("UnrolledSolve", "WeightGroup", "fixed_logsumexp", "solve_statistics"),
    ),
    "gradient_descent": ("GradientDescent", "estimate_largest_curvature"),
    "lbfgs": ("LBFGS",),
    "linear": ("AdjointReport", "ConjugateGradient", "LinearOutcome", "LinearSolver", "Neumann", "Operator"),
    "network": ("NetworkLearner", "TanhNetwork"),
    "network_space": ("NetworkWeights", "NetworkArgs"),
    "objective": ("FunctionObjective", "Objective"),
    "outcome": ("Outcome", "Solution", "Solver", "evaluate_outcome"),
    "regression": ("DualNewton", "SoftmaxRegression"),
    "softmax": ("RegressionArgs",),
    "solve": ("Adjoint", "Implicit", "Unroll", "minimise"),
    "ifsl_bench.utils.cosine": ("normalise_with_epsilon",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# Old names, for one release.
_RENAMED = {
    "Converged": "ConvergedSolve",
    "Memory": "AttractorMLP",
    "Meta": "InnerSolve",
    "Network": "NetworkWeights",
    "Part": "WeightGroup",
    "Regression": "RegressionArgs",
    "Space": "SearchCoordinates",
    "Unrolled": "UnrolledSolve",
    "attention": "attention_weights",
    "fixed_class": "fixed_logsumexp",
    "fold": "to_prior",
    "largest_curvature": "estimate_largest_curvature",
    "learner_of": "make_learner",
    "measured": "evaluate_outcome",
    "ridge": "ridge_prior",
    "statistics": "solve_statistics",
    "unit": "normalise_with_epsilon",
}

__all__ = sorted([*_MODULE_OF, "make_learner"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _RENAMED:
        warnings.warn(
            f"ifsl_bench.solvers.{name} is now {_RENAMED[name]}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(__name__), _RENAMED[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = getattr(import_module(module if "." in module else f"{__name__}.{module}"), name)
    globals()[name] = value  # a submodule of the same name, such as minimise, must not replace it
    return value


def make_learner(name: Literal["lr", "mlp"], ways: int, features: int) -> "Learner":
    """Return the learner that an option names.

    Args:
        name: ``lr``, linear and convex, or ``mlp``, the tanh network.
        ways: N, the novel classes of an episode.
        features: D, the size of a feature.
    """
    if name == "lr":
        from .episode_problems import LinearLearner

        return LinearLearner(ways, features)
    from .network import NetworkLearner

    return NetworkLearner(ways, features)
