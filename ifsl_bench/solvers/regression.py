"""The convex case: softmax regression with fixed extra logits and with a diagonal quadratic pull towards given centres.

    L(V) = mean_i CE([fixed logits_i ; V x_i], y_i) + 1/2 sum_kd p_d (V_kd - c_kd)^2

x_i ends in a one, the bias. Fixed logits enter through their logsumexp alone. Every vector of interest has the form
P^-1 (.) + P^-1 X^T (.), so solves and implicit gradients happen in N x S numbers; see `dual`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ifsl_bench.solvers import numba_backend
from ifsl_bench.solvers.linear import MAX_RELATIVE_RESIDUAL, LinearOutcome, Operator, check_solver_options
from ifsl_bench.solvers.numba_code_cache import kernels_enabled
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Outcome, relative_tolerance
from ifsl_bench.solvers.softmax import (
    SMALLEST_NORMAL_FLOAT64,
    RegressionArgs,
    adjoint_of_class_scores,
    apply_cross_entropy_hessian,
    class_scores,
    cross_entropy,
    cross_entropy_gradient,
    floor_precisions,
    precision_kernel_matrix,
    probabilities_of_novel_classes,
    probability_of_fixed_class,
)
from ifsl_bench.solvers.support_checks import NamedPrior, check_support_sets_and_priors
from ifsl_bench.solvers.tree import Tree, choose_steps_between_checks, fixed_normal_draws, to_float64

MAX_FACTORISED_SIZE = 256  # dual numbers up to which a device factorises a system


class SoftmaxRegression(Objective):
    """L above for V [E, N, D+1] (the bias last) and args a `RegressionArgs`."""

    def value(self, v: Tree, args: Tree) -> Tensor:
        f = class_scores(v, args.features)  # [E, N, S]
        penalty = (args.precisions * (v - args.centres).square()).sum((1, 2))
        return cross_entropy(f, args.base_logsumexp, args.labels).mean(1) + penalty / 2

    def gradient(self, v: Tree, args: Tree) -> Tree:
        r = cross_entropy_gradient(class_scores(v, args.features), args.base_logsumexp, args.labels)  # [E, N, S]
        return args.precisions * (v - args.centres) + adjoint_of_class_scores(r, args.features)

    def hessian(self, v: Tree, args: Tree) -> Operator:
        return RegressionHessian(v, args)

    def pullback(self, v: Tree, args: Tree, u: Tree, needed: list[bool]) -> list[Tensor | None]:
        x, labels, base_logsumexp, centres, precisions = args
        grads: list[Tensor | None] = [None] * 5
        if needed[3]:
            grads[3] = (precisions * u).sum_to_size(centres.shape)
        if needed[4]:
            grads[4] = (u * (centres - v)).sum((0, 1))
        if needed[0] or needed[2]:
            count = x.shape[1]
            f = class_scores(v, x)
            pi, pi_base = (
                probabilities_of_novel_classes(f, base_logsumexp),
                probability_of_fixed_class(f, base_logsumexp),
            )
            xu = class_scores(u, x)  # [E, N, S]
            if needed[2]:
                grads[2] = (xu * pi).sum(1) * pi_base / count
            if needed[0]:
                moved = apply_cross_entropy_hessian(pi, pi / count, xu)
                grads[0] = -(
                    cross_entropy_gradient(f, base_logsumexp, labels).mT @ u[..., :-1] + moved.mT @ v[..., :-1]
                )
        return grads

    def descend(self, v: Tree, args: Tree, rate: float | Tensor, steps: int) -> Tree:
        slowly = super().descend
        if kernels_enabled(args.features):
            return numba_backend.run_gradient_descent(
                numba_backend.make_regression_problems(args), v, args, rate, steps, slowly
            )
        return slowly(v, args, rate, steps)

    def select_episodes(self, args: Tree, index: Tensor) -> Tree:
        return args.select_episodes(index)

    def check_arguments(self, args: Tree) -> None:
        x, centres = args.features, args.centres
        ways = centres.shape[-2] if centres.dim() > 1 else 1
        prior = NamedPrior("centres", centres, "precisions", args.precisions, ways, x.shape[2] + 1)
        check_support_sets_and_priors(x, args.labels, args.base_logsumexp, ways, [prior])

    def may_lack_minimum(self, args: Tree) -> Tensor:
        return args.precisions.min() <= 0


class RegressionHessian(Operator):
    """P + X^T M X at v, M [E, N x S, N x S] being the Hessian of the mean cross-entropy in the scores."""

    def __init__(self, v: Tensor, args: RegressionArgs) -> None:
        self.v, self.args = v, args

    @cached_property
    def product(self) -> Callable[[Tree], Tree]:  # type: ignore[override]
        args = self.args
        pi = probabilities_of_novel_classes(class_scores(self.v, args.features), args.base_logsumexp)  # [E, N, S]
        shares = pi / pi.shape[2]
        x = torch.nn.functional.pad(args.features, (0, 1), value=1.0)  # [E, S, D+1]
        transposed = x.mT
        return lambda d: torch.addcmul(apply_cross_entropy_hessian(pi, shares, d @ transposed) @ x, args.precisions, d)

    def solve(self, rhs: Tree, tolerance: float | None, max_steps: int) -> LinearOutcome:
        """Solve for u = P^-1 (rhs - X^T w) with (1 + M K) w = M X P^-1 rhs.

        By conjugate gradients in the metric of the kernel K, in float64, for kernels of nearly equal rows are as good
        as singular.

        Args:
            rhs: [E, N, D+1].
            tolerance: on the residual of w, relative, in the metric; None for the default.
            max_steps: for each episode.
        """
        if kernels_enabled(rhs):
            return numba_backend.make_regression_problems(self.args).solve_hessian(
                self.v, rhs, tolerance or 1e-10, max_steps, MAX_RELATIVE_RESIDUAL
            )
        if (
            choose_steps_between_checks(rhs) > 1
            and self.args.centres.shape[-2] * self.args.features.shape[1] <= MAX_FACTORISED_SIZE
        ):
            return self._solve_by_factorisation(rhs)  # a dozen operations, in place of a dozen for each step
        from ifsl_bench.solvers import dual

        k, inverse_p, pi, b = self._reduce_system(rhs)
        w, steps = dual.solve_newton_system(k, pi, b, tolerance or 1e-10, max_steps)
        return self._expand_solution(rhs, w, pi, inverse_p, steps)

    def neumann_series(self, rhs: Tree, steps: int, damping: float, rate: float) -> tuple[Tree, Tensor]:
        if kernels_enabled(rhs):
            return numba_backend.make_regression_problems(self.args).neumann_series(self.v, rhs, steps, damping, rate)
        return super().neumann_series(rhs, steps, damping, rate)

    def add_shift(self, shift: float) -> RegressionHessian:
        return RegressionHessian(self.v, self.args._replace(precisions=self.args.precisions + shift))

    def largest_eigenvalue(self, like: Tree, steps: int) -> Tensor:
        if kernels_enabled(like):
            problems = numba_backend.make_regression_problems(self.args)
            return problems.largest_eigenvalue(self.v, fixed_normal_draws(problems.n_unknowns), steps)
        return super().largest_eigenvalue(like, steps)

    def _solve_by_factorisation(self, rhs: Tree) -> LinearOutcome:
        """Solve the system of `solve` by a factorisation, in float64."""
        k, inverse_p, pi, b = self._reduce_system(rhs)
        episodes, ways, count = pi.shape
        m = -pi[:, :, None] * pi[:, None] / count  # [E, N, N, S]
        m.diagonal(dim1=1, dim2=2).add_((pi / count).mT)
        mk = (m[..., None] * k[:, None, None]).transpose(2, 3).reshape(episodes, ways * count, ways * count)
        mk.diagonal(dim1=1, dim2=2).add_(1)
        w = torch.linalg.solve_ex(mk, b.flatten(1)[:, :, None])[0].view(episodes, ways, count)
        return self._expand_solution(rhs, w, pi, inverse_p, torch.zeros_like(b[:, 0, 0]))

    def _reduce_system(self, rhs: Tree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return K, P^-1, the probabilities and M X P^-1 rhs, in float64."""
        v, args, rhs = to_float64((self.v, self.args, rhs))
        x, inverse_p = args.features, 1 / floor_precisions(args.precisions)
        pi = probabilities_of_novel_classes(class_scores(v, x), args.base_logsumexp)
        return (
            precision_kernel_matrix(x, inverse_p),
            inverse_p,
            pi,
            apply_cross_entropy_hessian(pi, pi / pi.shape[2], class_scores(inverse_p * rhs, x)),
        )

    def _expand_solution(self, rhs: Tensor, w: Tensor, pi: Tensor, inverse_p: Tensor, steps: Tensor) -> LinearOutcome:
        """Make u of w [E, N, S]; the residual of H u = rhs in the norm of P^-1 bounds u's error in the norm of P."""
        x = self.args.features.double()
        u = inverse_p * (rhs - adjoint_of_class_scores(w, x))
        gap = adjoint_of_class_scores(apply_cross_entropy_hessian(pi, pi / pi.shape[2], class_scores(u, x)) - w, x)
        share = (
            (inverse_p * gap.square()).sum((1, 2))
            / (u.square() / inverse_p).sum((1, 2)).clamp_min(SMALLEST_NORMAL_FLOAT64)
        ).sqrt()
        inaccurate = ~(share <= MAX_RELATIVE_RESIDUAL)
        return LinearOutcome(u.to(rhs.dtype), share, steps, inaccurate, torch.zeros_like(inaccurate))


@dataclass(frozen=True)
class DualNewton:
    """The solver of `SoftmaxRegression`. Needs no v0, for the minimum is unique.

    Stops when two things hold of |grad L| in the norm of P^-1. It is at most `tolerance` (default 1e-6 in float32, 1e-9
    in float64) times what it was at the centres, so L - L* <= 1/2 |grad L|^2 is small against what there was to gain.
    And no support score is further from its value at the minimum than 0.01 (1e-5 in float64), for with a weak pull the
    first test alone may leave scores far off: that is bounded by |grad L| sqrt(max_i K_ii), or, where rounding spoils
    the bound, shown by a Newton step that moves no score. What float32 cannot solve is solved in float64, to 1e-9.

    On a CPU compiled kernels solve one episode after the other, in float64 and to its tolerance (`numba_backend`).

    Raises:
        ValueError: an option out of range.
    """

    tolerance: float | None = None
    max_steps: int = 100
    inner_steps: int = 50

    def __post_init__(self) -> None:
        check_solver_options(self, positive=("tolerance",), counts=("max_steps", "inner_steps"))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if not isinstance(objective, SoftmaxRegression):
            raise TypeError(f"DualNewton solves SoftmaxRegression, not {type(objective).__name__}: use LBFGS()")
        if kernels_enabled(args.features):
            tolerance = relative_tolerance(self.tolerance, torch.float64, 1e-6, 1e-9)
            problems = numba_backend.make_regression_problems(args)
            return problems.solve(args.features.dtype, tolerance, self.max_steps, self.inner_steps)
        from ifsl_bench.solvers import dual  # what the kernels do not serve

        return dual.solve_regressions(args, self.tolerance, self.max_steps, self.inner_steps)
