"""The one-hidden-layer tanh network of the MLP attractors, in the large form and in the form of its dual numbers.

    h(x) = W tanh(W_2 x + b_2) + W_3 x + b,  L = mean CE([fixed logits ; h(x_i)], y_i) + three diagonal quadratics

Both layers see x only through the S support rows, and their penalties are diagonal quadratics, so at every stationary
point W_3 = c_3 + P_3^-1 X^T beta and [W_2, b_2] = c_2 + P_2^-1 [X 1]^T B. The search runs in (B [H, S], beta [N, S],
[W b]): with 40 hidden units and 25 rows 1,330 numbers instead of 23,000, and no product in it touches a D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.solvers import numba_backend
from ifsl_bench.solvers.attractor_prior import QuadraticPrior
from ifsl_bench.solvers.coordinates import EuclideanCoordinates, SearchCoordinates
from ifsl_bench.solvers.episode_problems import Learner, SupportSet, WeightGroup
from ifsl_bench.solvers.lbfgs import LBFGS
from ifsl_bench.solvers.linear import MAX_RELATIVE_RESIDUAL, LinearOutcome, Operator, solve_self_adjoint
from ifsl_bench.solvers.network_space import (
    DualCoordinates,
    NetworkArgs,
    NetworkShape,
    NetworkWeights,
    compute_activations,
    draw_fixed_start_numbers,
    make_activation_hessian,
)
from ifsl_bench.solvers.numba_code_cache import kernels_enabled
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Outcome, Solver
from ifsl_bench.solvers.softmax import (
    SMALLEST_NORMAL_FLOAT64,
    adjoint_of_class_scores,
    class_scores,
    cross_entropy,
    cross_entropy_gradient,
)
from ifsl_bench.solvers.support_checks import NamedPrior, check_support_sets_and_priors
from ifsl_bench.solvers.tree import (
    Tree,
    fixed_normal_draws,
    inner_product_by_episode,
    pack_leaves_into_rows,
    to_float64,
    tree_map,
)


@dataclass(frozen=True)
class TanhNetwork(NetworkShape, Objective):
    """L above for v a `NetworkWeights` and args a `NetworkArgs`.

    Not convex. With v0 = None a search runs in dual numbers. It starts from fixed random functions of each support row
    (from zero it would start on a saddle), the same ones in every episode and on every machine, so large that the
    inputs of the hidden units spread by `start_spread`; or from `start`, that is from the point with the same
    activations on the support set and the least penalty.
    """

    def value(self, v: Tree, args: Tree) -> Tensor:
        _, f = compute_activations(v, args.features)
        fit = cross_entropy(f, args.base_logsumexp, args.labels).mean(1)
        penalty = (args.output_precisions * (v.output - args.output_centres).square()).sum((1, 2))
        penalty = penalty + (args.skip_precisions * (v.skip - args.skip_centres).square()).sum((1, 2))
        penalty = penalty + (args.hidden_precisions * (v.hidden - args.hidden_centres).square()).sum((1, 2))
        return fit + penalty / 2

    def gradient(self, v: Tree, args: Tree) -> Tree:
        t, f = compute_activations(v, args.features)
        df = cross_entropy_gradient(f, args.base_logsumexp, args.labels)  # [E, N, S]
        da = (v.output[..., :-1].mT @ df) * (1 - t.square())  # [E, H, S]
        output = torch.cat([df @ t.mT, df.sum(2, keepdim=True)], 2)
        return NetworkWeights(
            output + args.output_precisions * (v.output - args.output_centres),
            df @ args.features + args.skip_precisions * (v.skip - args.skip_centres),
            adjoint_of_class_scores(da, args.features) + args.hidden_precisions * (v.hidden - args.hidden_centres),
        )

    def hessian(self, v: Tree, args: Tree) -> Operator:
        return NetworkHessian(self, v, args)

    def select_episodes(self, args: Tree, index: Tensor) -> Tree:
        return args.select_episodes(index)

    def check_arguments(self, args: Tree) -> None:
        size, priors = args.features.shape[2], []
        for name, rows, columns in (
            ("output", self.ways, self.hidden + 1),
            ("skip", self.ways, size),
            ("hidden", self.hidden, size + 1),
        ):
            centres, precisions = f"{name}_centres", f"{name}_precisions"
            priors.append(
                NamedPrior(centres, getattr(args, centres), precisions, getattr(args, precisions), rows, columns)
            )
        check_support_sets_and_priors(args.features, args.labels, args.base_logsumexp, self.ways, priors)

    def may_lack_minimum(self, args: Tree) -> Tensor:
        return torch.cat([args.output_precisions, args.skip_precisions, args.hidden_precisions]).min() <= 0

    def descend(self, v: Tree, args: Tree, rate: float | Tensor, steps: int) -> Tree:
        slowly = super().descend
        if kernels_enabled(args.features):
            return numba_backend.run_gradient_descent(self.kernel_problems(args), v, args, rate, steps, slowly)
        return slowly(v, args, rate, steps)

    def pullback(self, v: Tree, args: Tree, u: Tree, needed: list[bool]) -> list[Tensor | None]:
        if needed[0] or needed[2]:
            return super().pullback(v, args, u, needed)
        grads: list[Tensor | None] = [None] * 3
        parts = zip(v, u, args[3::2], args[4::2], needed[3::2], needed[4::2], strict=True)
        for point, part, centres, precisions, pulled, weighted in parts:
            grads.append((precisions * part).sum_to_size(centres.shape) if pulled else None)
            grads.append((part * (centres - point)).sum((0, 1)) if weighted else None)
        return grads

    def search_minimum(self, solver: LBFGS, args: Tree) -> Outcome | None:
        """Search in dual numbers by compiled kernels; None where these are off.

        Args:
            solver: its options are the kernels'.
            args: the arguments of the objective, a `NetworkArgs`.
        """
        x = args.features
        if not kernels_enabled(x):
            return None
        tolerance = (
            torch.as_tensor(solver.relative_tolerance(x.dtype), dtype=torch.float64).expand(len(x)).contiguous().numpy()
        )
        planes, outer = draw_fixed_start_numbers(self.hidden, self.ways, x.shape[2], self.seed)
        count = (self.hidden + self.ways) * x.shape[1] + outer.numel()
        starts = np.empty((0, count))
        if self.start is not None:
            starts = (
                DualCoordinates.from_arguments(replace(self, start=to_float64(self.start)), to_float64(args))
                .initial_point()
                .numpy()
            )
        start = (starts, planes.numpy(), outer.numpy(), fixed_normal_draws(count).numpy(), self.start_spread)
        options = (tolerance, solver.gap, solver.max_steps, solver.history, solver.max_trials, solver.escapes)
        return self.kernel_problems(args).solve(x.dtype, start, options)

    def kernel_problems(self, args: Tree) -> numba_backend.KernelProblems:
        """Return the episodes of args as the kernels take them."""
        x, n, h = args.features, self.ways, self.hidden
        shapes = ((n, h + 1), (n, x.shape[2]), (h, x.shape[2] + 1))
        return numba_backend.make_network_problems(args, NetworkWeights(*(x.new_empty(0, *shape) for shape in shapes)))

    def search_coordinates(self, v0: Tree, args: Tree) -> SearchCoordinates:
        return DualCoordinates.from_arguments(self, args) if v0 is None else EuclideanCoordinates(self, v0, args)


class NetworkHessian(Operator):
    """The Hessian of a `TanhNetwork` at v."""

    def __init__(self, shape: NetworkShape, v: NetworkWeights, args: NetworkArgs) -> None:
        self.shape, self.v, self.args = shape, v, args

    @cached_property
    def product(self) -> Callable[[Tree], Tree]:  # type: ignore[override]
        args, x, curvature = self.args, self.args.features, make_activation_hessian(self.v, self.args)

        def product(d: Tree) -> Tree:
            da, df, output = curvature(class_scores(d.hidden, x), d.skip @ x.mT, d.output)
            return NetworkWeights(
                output + args.output_precisions * d.output,
                df @ x + args.skip_precisions * d.skip,
                adjoint_of_class_scores(da, x) + args.hidden_precisions * d.hidden,
            )

        return product

    @cached_property
    def _kernel_problems(self) -> numba_backend.KernelProblems:
        return TanhNetwork(self.shape.ways, self.shape.hidden).kernel_problems(self.args)

    def neumann_series(self, rhs: Tree, steps: int, damping: float, rate: float) -> tuple[Tree, Tensor]:
        if kernels_enabled(rhs.output):
            return self._kernel_problems.neumann_series(self.v, rhs, steps, damping, rate)
        return super().neumann_series(rhs, steps, damping, rate)

    def add_shift(self, shift: float) -> NetworkHessian:
        moved = {name: getattr(self.args, name) + shift for name in self.args._fields if name.endswith("_precisions")}
        return NetworkHessian(self.shape, self.v, self.args._replace(**moved))

    def largest_eigenvalue(self, like: Tree, steps: int) -> Tensor:
        if kernels_enabled(like.output):
            return self._kernel_problems.largest_eigenvalue(
                self.v, fixed_normal_draws(self._kernel_problems.n_unknowns), steps
            )
        return super().largest_eigenvalue(like, steps)

    def solve(self, rhs: Tree, tolerance: float | None, max_steps: int) -> LinearOutcome:
        """Solve for u = P^-1 rhs + a correction in the dual numbers.

        By conjugate gradients, or MINRES, in their metric, in float64.

        Args:
            rhs: a `NetworkWeights`.
            tolerance: on the residual of the correction, relative, in the metric; None for the default.
            max_steps: for each episode and method.
        """
        if kernels_enabled(rhs.output):
            return self._kernel_problems.solve_hessian(
                self.v, rhs, tolerance or 1e-10, max_steps, MAX_RELATIVE_RESIDUAL
            )
        dtype = rhs.output.dtype
        v, args, rhs = to_float64((self.v, self.args, rhs))
        space, curvature, x = (
            DualCoordinates.from_arguments(self.shape, args),
            make_activation_hessian(v, args),
            args.features,
        )
        output, skip, hidden = (
            space.inverse_output_precisions * rhs.output,
            space.inverse_skip_precisions * rhs.skip,
            space.inverse_hidden_precisions * rhs.hidden,
        )
        da, df, moved = curvature(class_scores(hidden, x), skip @ x.mT, output)
        b = -space.join_coordinates(da, df, space.inverse_output_precisions * moved)
        apply, image = space.add_penalty_to_hessian(curvature), space.apply_metric(b)
        z, steps, indefinite = solve_self_adjoint(apply, space.apply_metric, b, image, tolerance or 1e-10, max_steps)
        correction = space.to_unknowns(z, add_centres=False)
        u = NetworkWeights(output + correction.output, skip + correction.skip, hidden + correction.hidden)
        # The residual of H u = rhs, in the norm in which it bounds u's error where the objective curves as the penalty.
        product = NetworkHessian(self.shape, v, args).product(u)
        precisions = (
            1 / space.inverse_output_precisions,
            1 / space.inverse_skip_precisions,
            1 / space.inverse_hidden_precisions,
        )
        parts = list(zip(product, rhs, u, precisions, strict=True))
        wrong = torch.stack([((a - b).square() / p).sum((1, 2)) for a, b, _, p in parts])
        size = torch.stack([(c.square() * p).sum((1, 2)) for _, _, c, p in parts])
        share = (wrong.sum(0) / size.sum(0).clamp_min(SMALLEST_NORMAL_FLOAT64)).sqrt()
        u = tree_map(lambda leaf: leaf.to(dtype), u)
        return LinearOutcome(u, share, steps, ~(share <= MAX_RELATIVE_RESIDUAL), indefinite)


MAX_SADDLE_ESCAPES = 8  # from saddles, in one solve


@dataclass(frozen=True)
class NetworkLearner(Learner):
    """h(x) = W tanh(W_2 x + b_2) + W_3 x + b. Parts: [W, b], N x (H+1); W_3, N x D; [W_2, b_2], H x (D+1).

    One centre serves all hidden units.
    """

    ways: int
    features: int
    units: int = 40
    convex: bool = False

    @property
    def objective(self) -> Objective:  # type: ignore[override]
        return TanhNetwork(self.ways, self.units)

    def continue_search(self, args: Tree, start: Tree, end: Tree) -> tuple[Objective, Solver]:
        objective, solver = TanhNetwork(self.ways, self.units, start=end), self.make_solver(args.features.dtype)
        space = objective.search_coordinates(None, args)
        z = space.initial_point()
        _, _, remainder = space.evaluate(z, space.apply_metric(z))  # [E]
        slope = pack_leaves_into_rows(objective.gradient(start, args))
        # As near to the minimum as a search from `start` would come: much of that way is done.
        done = inner_product_by_episode(slope, slope).sqrt() / remainder.clamp_min(torch.finfo(remainder.dtype).tiny)
        done = done.nan_to_num(1, 1).clamp_min(1e-3)  # an episode that is beyond help must not stop the others
        return objective, replace(solver, tolerance=self.gradient_tolerance(remainder.dtype) * done)

    def make_solver(self, dtype: torch.dtype, training: bool = False) -> LBFGS:
        tolerance = self.gradient_tolerance(dtype, training)
        return LBFGS(tolerance, gap=1e-4) if training else LBFGS(tolerance, gap=1e-8)

    def with_saddle_escapes(self, solver: Solver) -> Solver:
        return replace(solver, escapes=MAX_SADDLE_ESCAPES) if isinstance(solver, LBFGS) else solver

    def gradient_tolerance(self, dtype: torch.dtype, training: bool = False) -> float:
        # The minimum is flat: at 1e-5 some logits are a tenth off, which training's noise hides and a result would not.
        return 1e-10 if dtype == torch.float64 else 1e-5 if training else 1e-6

    @property
    def groups(self) -> tuple[WeightGroup, ...]:  # type: ignore[override]
        d = self.features
        return (
            WeightGroup(self.ways, self.units + 1),
            WeightGroup(self.ways, d),
            WeightGroup(self.units, d + 1, shares_centre=True),
        )

    def join_groups(self, parts: Sequence[Tensor]) -> Tree:
        return NetworkWeights(*parts)

    def make_arguments(self, support: SupportSet, priors: Sequence[QuadraticPrior]) -> Tree:
        return NetworkArgs(*support, *priors[0], *priors[1], *priors[2])

    def logits(self, v: Tree, x: Tensor) -> Tensor:
        t = torch.tanh(torch.baddbmm(v.hidden[:, None, :, -1], x, v.hidden[..., :-1].mT))  # [E, Q, H]
        outer = torch.baddbmm(v.output[:, None, :, -1], t, v.output[..., :-1].mT)
        return torch.baddbmm(outer, x, v.skip.mT)
