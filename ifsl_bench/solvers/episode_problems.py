"""The learners of incremental few-shot episodes: fast weights next to a fixed base classifier, solved and applied.

A `Learner` defines the fast weights, an `InnerSolve` how they are found and how gradients pass through the solve:

    learner = LinearLearner(ways, features)
    c, p = to_prior(u, log_gamma, WEIGHT_DECAY, learner.groups[0].rows)
    solved = ConvergedSolve(Neumann()).solve(learner, (x, labels, base_logsumexp), [(c, p)])
    novel = learner.logits(solved.weights, query)  # [E, Q, N]

Shapes: E episodes at once, S support rows, Q queries, D features, K base classes, N novel classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ifsl_bench.solvers.attractor_prior import QuadraticPrior
from ifsl_bench.solvers.gradient_descent import GradientDescent, estimate_largest_curvature
from ifsl_bench.solvers.linear import AdjointReport, ConjugateGradient, LinearSolver, Neumann
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Solution, Solver
from ifsl_bench.solvers.regression import DualNewton, SoftmaxRegression
from ifsl_bench.solvers.softmax import RegressionArgs
from ifsl_bench.solvers.solve import Implicit, Unroll, minimise
from ifsl_bench.solvers.tree import Tree, tree_map
from ifsl_bench.utils.cosine import linear_logits
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes

WEIGHT_DECAY = 1e-5  # beside an attractor, as in the released code
WEIGHT_DECAYS = tuple(float(f"{10 ** (half / 2):.3g}") for half in range(-26, -1))  # 1e-13 ... 1e-1, to choose from
# In sessions, where one chosen for episodes takes too many base queries.
STRONG_WEIGHT_DECAYS = (0.316, 1.0, 3.16, 10.0)

SupportSet = tuple[Tensor, Tensor, Tensor]  # support features [E, S, D], labels [E, S] in 0..N-1, base_logsumexp [E, S]


def fixed_logsumexp(base_logits: Tensor, hidden: Tensor, earlier: Tensor | None = None) -> Tensor:
    """Return the classes whose logits are fixed as one class: the logsumexp of their logits, [E, S].

    Args:
        base_logits: [E, S, K].
        hidden: [E, K] bool; a hidden class is left out. -inf where none is left.
        earlier: [E, S, (t - 1) N] of the novel classes of earlier sessions; None where there are none.
    """
    if bool(hidden.any()):
        base_logits = base_logits.masked_fill(hidden[:, None], -torch.inf)
    met = base_logits if earlier is None else torch.cat([base_logits, earlier], -1)
    return met.logsumexp(-1)


@accept_old_names(common="shares_centre")
@dataclass(frozen=True)
class WeightGroup:
    """Fast weights under one regulariser, a mean over `rows` rows of `size` numbers.

    shares_centre: one centre serves all rows; else each novel class has its own.
    """

    rows: int
    size: int
    shares_centre: bool = False


@accept_old_names(
    parts="groups",
    solver="make_solver",
    past_saddles="with_saddle_escapes",
    onward="continue_search",
    join="join_groups",
    arguments="make_arguments",
    start="draw_start",
)
class Learner(ABC):
    """The model learned in an episode: its objective, a solver that suits it, and the parts of the fast weights."""

    groups: tuple[WeightGroup, ...]
    objective: Objective
    convex: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    @abstractmethod
    def make_solver(self, dtype: torch.dtype, training: bool = False) -> Solver:
        """Return the solver for the minimum.

        Args:
            dtype: the precision of the features.
            training: in meta-training the solver may be less exact.
        """

    def with_saddle_escapes(self, solver: Solver) -> Solver:
        """Return the solver where the gradient of a minimum is needed, and the gradient of a saddle will not do."""
        return solver

    def continue_search(self, args: Tree, start: Tree, end: Tree) -> tuple[Objective, Solver]:
        """Return objective and solver of a search that goes on after gradient steps.

        What is convex has one minimum, wherever they led.

        Args:
            args: the arguments of the objective.
            start: the fast weights before the gradient steps.
            end: the fast weights after them, from which the search goes on.
        """
        return self.objective, self.make_solver(args.features.dtype)

    @abstractmethod
    def join_groups(self, parts: Sequence[Tensor]) -> Tree:
        """Return fast weights, [E, rows, size] for each part, as the objective takes them."""

    @abstractmethod
    def make_arguments(self, support: SupportSet, priors: Sequence[QuadraticPrior]) -> Tree:
        """Return the arguments of the objective.

        Args:
            support: the support set.
            priors: the centres and precisions of each group.
        """

    @abstractmethod
    def logits(self, v: Tree, x: Tensor) -> Tensor:
        """Return the novel logits, [E, Q, N].

        Args:
            v: the fast weights.
            x: query features, [E, Q, D].
        """

    def draw_start(self) -> list[Tensor]:
        """Draw initial fast weights from uniform(-0.01, 0.01), [rows, size] for each part: always the same."""
        generator = torch.Generator().manual_seed(0)
        draws = (torch.rand(p.rows, p.size, generator=generator, dtype=torch.float64) for p in self.groups)
        return [0.02 * draw - 0.01 for draw in draws]


@dataclass(frozen=True)
class LinearLearner(Learner):
    """h(x) = W x + b. One part: [W, b], N rows of D+1. Convex."""

    ways: int
    features: int
    objective: Objective = field(default_factory=SoftmaxRegression)
    convex: bool = True

    def make_solver(self, dtype: torch.dtype, training: bool = False) -> Solver:
        return DualNewton()

    @property
    def groups(self) -> tuple[WeightGroup, ...]:  # type: ignore[override]
        return (WeightGroup(self.ways, self.features + 1),)

    def join_groups(self, parts: Sequence[Tensor]) -> Tree:
        return parts[0]

    def make_arguments(self, support: SupportSet, priors: Sequence[QuadraticPrior]) -> Tree:
        return RegressionArgs(*support, *priors[0])

    def logits(self, v: Tree, x: Tensor) -> Tensor:
        return linear_logits(x, v[..., :-1], v[..., -1])


class LearnerSolution(NamedTuple):
    """Fast weights, and how they were found."""

    fast_weights: Tree  # see `Learner.logits`
    statistics: dict[str, Tensor]  # [E] each: how each solve went
    adjoint: AdjointReport  # filled in by the backward pass


@dataclass(frozen=True)
class ConvergedSolve:
    """Solved to convergence; gradients by implicit differentiation with a linear solver."""

    linear: LinearSolver = field(default_factory=ConjugateGradient)

    def solve(
        self,
        learner: Learner,
        support: SupportSet,
        priors: Sequence[QuadraticPrior],
        start: Sequence[Tensor] = (),
        training: bool = False,
    ) -> LearnerSolution:
        args = learner.make_arguments(support, priors)
        solver = learner.make_solver(support[0].dtype, training)
        if training and not isinstance(self.linear, Neumann):  # a series is damped by more than it curves down there
            solver = learner.with_saddle_escapes(solver)
        solution = minimise(learner.objective, solver, None, args, Implicit(self.linear))
        return LearnerSolution(solution.value, solve_statistics(solution), solution.adjoint)


@accept_old_names(converge="converge_in_evaluation")
@dataclass(frozen=True)
class UnrolledSolve:
    """`steps` gradient steps from fixed initial values, differentiated through (truncated back-propagation in time).

    An episode's step is `rate`, or 1.8 / lambda_max where that is less, lambda_max being the largest curvature of its
    objective at the start; the statistics report it. converge_in_evaluation: outside training go on from there to the
    minimum (which for a convex learner does not depend on the start).
    """

    steps: int = 20
    rate: float = 1.0
    converge_in_evaluation: bool = True

    def solve(
        self,
        learner: Learner,
        support: SupportSet,
        priors: Sequence[QuadraticPrior],
        start: Sequence[Tensor] = (),
        training: bool = False,
    ) -> LearnerSolution:
        args, objective = learner.make_arguments(support, priors), learner.objective
        episodes = support[0].shape[0]
        v0 = learner.join_groups([part.expand(episodes, -1, -1) for part in start])
        objective.check_arguments(tree_map(Tensor.detach, args))
        with torch.no_grad():
            rate = 1.8 / estimate_largest_curvature(objective, v0, args)  # [E]
            rate = rate.nan_to_num(self.rate).clamp(torch.finfo(rate.dtype).tiny, self.rate)
        descent = GradientDescent(rate, self.steps)
        on = self.converge_in_evaluation and not training
        if on:
            there, fixed = v0, tree_map(Tensor.detach, args)
            with torch.no_grad():
                if not learner.convex:
                    there = minimise(objective, descent, v0, fixed, Unroll()).value
                goal, solver = learner.continue_search(fixed, v0, there)
            solution = minimise(goal, solver, None, args)
        else:
            solution = minimise(objective, descent, v0, args, Unroll())
        return LearnerSolution(solution.value, {**solve_statistics(solution), "step_rate": rate}, solution.adjoint)


# Finds the fast weights, from a start where it is unrolled, and passes gradients through that.
InnerSolve = ConvergedSolve | UnrolledSolve


def solve_statistics(solution: Solution) -> dict[str, Tensor]:
    """Return the statistics of a solve that a result keeps, [E] each."""
    norm = solution.gradient_norm
    return {
        "solver_steps": solution.steps.to(norm.dtype),
        "solver_unconverged": (~solution.converged).to(norm.dtype),
        "gradient_norm": norm,
    }
