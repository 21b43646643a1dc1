"""Self-adjoint systems: Krylov methods, and linear solvers for the adjoint, u = H^-1 v, exactly or as in a paper.

Methods need products with the operator alone, and treat each episode by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from ifsl_bench.solvers.tree import (
    Tree,
    choose_steps_between_checks,
    expand_to_episode_shape,
    inner_product_by_episode,
    pack_leaves_into_rows,
    rebuild_tree,
    tensor_leaves,
    unpack_rows_to_tree,
)
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes

ApplyOperator = Callable[[Tensor, Tensor], Tensor]  # p, M p -> A p
ApplyMetric = Callable[[Tensor], Tensor]  # p -> M p


def solve_self_adjoint(
    apply: ApplyOperator, metric: ApplyMetric, rhs: Tensor, metric_rhs: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve A x = rhs, and return x, the steps [E], and where A has turned out to be indefinite [E].

    There MINRES solves, elsewhere conjugate gradients, which are cheaper and end at the first negative curvature.

    Args:
        apply: `apply(p, M p)` is A p.
        metric: `metric(p)` is M p.
        rhs: [E, ...].
        metric_rhs: M rhs.
        tolerance: on the residual, relative to rhs, in the norm of M.
        max_steps: for each episode and method.
    """
    x, steps, indefinite, _ = conjugate_gradient(apply, metric, rhs, metric_rhs, tolerance, max_steps)
    if bool(indefinite.any()):
        by_minres, more = minres(apply, metric, rhs, metric_rhs, tolerance, max_steps, indefinite)
        x, steps = torch.where(expand_to_episode_shape(indefinite, x), by_minres, x), steps + more
    return x, steps, indefinite


def conjugate_gradient(
    apply: ApplyOperator, metric: ApplyMetric, rhs: Tensor, metric_rhs: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve A x = rhs for A self-adjoint and positive in the metric M.

    Args:
        apply: `apply(p, M p)` is A p.
        metric: `metric(p)` is M p.
        rhs: [E, ...].
        metric_rhs: M rhs.
        tolerance: on the residual, relative to rhs, in the norm of M.
        max_steps: for each episode.

    Returns:
        x, the steps [E], where A curves downwards [E], and along which direction [E, ...].

    Vectors and their images are carried side by side, so a step costs one product with the
    metric. Stops at |residual|_M <= tolerance |rhs|_M, each episode by itself, or where A shows no positive curvature.
    The residual comes from the recurrence: whether x is a solution is for the caller to measure.
    """
    x, residual, residual_image = torch.zeros_like(rhs), rhs, metric_rhs
    p, p_image = rhs, metric_rhs
    rho = inner_product_by_episode(rhs, metric_rhs)  # [E]
    goal = rho * tolerance**2
    active = rho > 0
    steps, zero = torch.zeros_like(rho), rho.new_zeros(())
    indefinite, direction = torch.zeros_like(rho, dtype=torch.bool), torch.zeros_like(rhs)
    eps, size = torch.finfo(rhs.dtype).eps, torch.zeros_like(rho)
    often = choose_steps_between_checks(rhs)
    for step in range(1, max_steps + 1):
        h = apply(p, p_image)
        curvature = inner_product_by_episode(h, p_image)
        own, square = inner_product_by_episode(h, h), inner_product_by_episode(p, p)
        size = size.maximum(own / square.clamp_min(torch.finfo(rhs.dtype).tiny))  # of A, squared, from below
        # Beyond what its rounding could be; and where A is semidefinite, zero means that A p is zero too.
        noise = 4 * eps * (size * square * inner_product_by_episode(p_image, p_image)).sqrt()
        down = active & ((curvature < -noise) | ((curvature <= noise) & (own > 64 * eps * size * square)))
        indefinite = indefinite | down
        direction = torch.where(expand_to_episode_shape(down, p), p, direction)
        active = active & ~down & (curvature > 0)
        length = expand_to_episode_shape(torch.where(active, rho / curvature, zero), rhs)
        x = torch.addcmul(x, length, p)
        residual = torch.addcmul(residual, length, h, value=-1)
        residual_image = metric(residual)
        steps += active
        new = inner_product_by_episode(residual, residual_image)
        ratio = expand_to_episode_shape(torch.where(active, new / rho, zero), rhs)
        rho = torch.where(active, new, rho)
        active = active & (new > goal)
        if step % often == 0 and not bool(active.any()):
            break
        p = torch.addcmul(residual, ratio, p)
        p_image = torch.addcmul(residual_image, ratio, p_image)
    return x, steps.long(), indefinite, direction


def minres(
    apply: ApplyOperator,
    metric: ApplyMetric,
    rhs: Tensor,
    metric_rhs: Tensor,
    tolerance: float,
    max_steps: int,
    active: Tensor,
) -> tuple[Tensor, Tensor]:
    """Solve A x = rhs in some episodes, for A self-adjoint in the metric M, and return x [E, ...] and the steps [E].

    A may be indefinite. Paige & Saunders (Solution of sparse indefinite systems of linear equations, 1975):
    |rhs - A x|_M is the least over the Krylov space and never grows. Stops at tolerance |rhs|_M.

    Args:
        apply: `apply(p, M p)` is A p.
        metric: `metric(p)` is M p.
        rhs: [E, ...].
        metric_rhs: M rhs.
        tolerance: on the residual, relative to rhs, in the norm of M.
        max_steps: for each episode.
        active: the episodes to solve, [E] bool; x is zero in the others.
    """
    tiny = torch.finfo(rhs.dtype).tiny
    beta = inner_product_by_episode(rhs, metric_rhs).clamp_min(0).sqrt()  # [E]
    goal = tolerance * beta
    active = active & (beta > 0)
    zero, unit = torch.zeros_like(beta), torch.ones_like(beta)

    def divide(vector: Tensor, length: Tensor) -> Tensor:
        return vector / expand_to_episode_shape(length.clamp_min(tiny), vector)

    x, w, w_before, v_before = (torch.zeros_like(rhs) for _ in range(4))
    v, v_image = divide(rhs, beta), divide(metric_rhs, beta)
    # The residual, the last rotation, what it left of the next columns.
    remaining, c, s, d, e = beta, -unit, zero, zero, zero
    beta = zero
    steps = torch.zeros_like(beta)
    often = choose_steps_between_checks(rhs)
    for step in range(1, max_steps + 1):
        # Lanczos: A v = beta v_before + alpha v + beta_next v_next.
        h = apply(v, v_image)
        alpha = inner_product_by_episode(h, v_image)
        h = h - expand_to_episode_shape(alpha, h) * v - expand_to_episode_shape(beta, h) * v_before
        h_image = metric(h)
        beta = inner_product_by_episode(h, h_image).clamp_min(0).sqrt()
        # One more column of the tridiagonal matrix, rotated to triangular form.
        above, diagonal = c * d + s * alpha, s * d - c * alpha
        far_above, e, d = e, s * beta, -c * beta
        length = (diagonal.square() + beta.square()).sqrt().clamp_min(tiny)
        c, s = diagonal / length, beta / length
        w_before, w = (
            w,
            divide(
                v - expand_to_episode_shape(far_above, v) * w_before - expand_to_episode_shape(above, v) * w, length
            ),
        )
        x = torch.addcmul(x, expand_to_episode_shape(torch.where(active, c * remaining, zero), x), w)
        steps += active
        remaining = s * remaining
        active = active & (remaining > goal)
        if step % often == 0 and not bool(active.any()):
            break
        v_before, v, v_image = v, divide(h, beta), divide(h_image, beta)
    return x, steps.long()


_COUNTED_EVENTS = ("diverged", "failed", "indefinite")
# A linear solve has failed if its relative residual is larger in the norm that bounds the error
MAX_RELATIVE_RESIDUAL = 1e-3


@dataclass(frozen=True)
class LinearOutcome:
    """The answer of a linear solve and how it went, episode by episode."""

    value: Tree
    residual: Tensor  # [E], measured at the answer: relative to the right-hand side, or to u
    steps: Tensor  # [E]
    failed: Tensor  # [E] bool: the residual is too large
    indefinite: Tensor  # [E] bool: H curves downwards somewhere


@accept_old_names(inverse="solve", series="neumann_series", shifted="add_shift", largest="largest_eigenvalue")
class Operator:
    """H, on trees with the leading dimension E, each episode with its own.

    An author needs `product`, d -> H d, alone; a subclass overrides what the structure of its H makes cheaper.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    def __init__(self, product: Callable[[Tree], Tree]) -> None:
        self.product = product

    def solve(self, rhs: Tree, tolerance: float | None, max_steps: int) -> LinearOutcome:
        """Solve for H^-1 rhs by conjugate gradients, or MINRES where H is indefinite.

        Args:
            rhs: a tree with leading dimension E.
            tolerance: on the residual, relative to rhs; None for the default.
            max_steps: for each episode and method.
        """
        b = pack_leaves_into_rows(rhs)
        if tolerance is None:
            tolerance = 1e-10 if b.dtype == torch.float64 else 1e-5
        x, steps, indefinite = solve_self_adjoint(
            lambda p, _: pack_leaves_into_rows(self.product(unpack_rows_to_tree(p, rhs))),
            lambda r: r,
            b,
            b,
            tolerance,
            max_steps,
        )
        wrong = b - pack_leaves_into_rows(self.product(unpack_rows_to_tree(x, rhs)))
        share = (
            inner_product_by_episode(wrong, wrong) / inner_product_by_episode(b, b).clamp_min(torch.finfo(b.dtype).tiny)
        ).sqrt()
        return LinearOutcome(
            unpack_rows_to_tree(x, rhs), share, steps, ~(share <= max(10 * tolerance, 1e-12)), indefinite
        )

    def neumann_series(self, rhs: Tree, steps: int, damping: float, rate: float) -> tuple[Tree, Tensor]:
        """Return the sum of `Neumann`, and where the last term is longer than the one before it, or not finite [E].

        Args:
            rhs: the first term, a tree with leading dimension E.
            steps: how many terms follow.
            damping: the share of a term that each step takes off, besides rate H.
            rate: the step size.
        """
        terms = tensor_leaves(rhs)
        totals = [term.clone() for term in terms]
        keep = 1 - damping
        length = before = squared_norm_by_episode(terms)
        for step in range(steps):
            products = tensor_leaves(self.product(rebuild_tree(rhs, terms)))
            terms = [torch.add(keep * term, h, alpha=-rate) for term, h in zip(terms, products, strict=True)]
            for total, term in zip(totals, terms, strict=True):
                total += term
            if step >= steps - 2:
                before, length = length, squared_norm_by_episode(terms)
        return rebuild_tree(rhs, [rate * total for total in totals]), ~length.isfinite() | (
            (length > before) & (steps > 1)
        )

    def add_shift(self, shift: float) -> Operator:
        """Return the operator H + shift."""

        def product(d: Tree) -> Tree:
            pairs = zip(tensor_leaves(self.product(d)), tensor_leaves(d), strict=True)
            return rebuild_tree(d, [torch.add(h, part, alpha=shift) for h, part in pairs])

        return Operator(product) if shift else self

    def largest_eigenvalue(self, like: Tree, steps: int) -> Tensor:
        """Return an estimate (from below) of the largest absolute eigenvalue, by power iteration: [E].

        Args:
            like: a tree of the form of H's arguments.
            steps: of the power iteration.
        """
        z = pack_leaves_into_rows(like)
        generator = torch.Generator().manual_seed(0)
        d = torch.randn(z.shape[1], generator=generator, dtype=z.dtype).to(z.device).expand_as(z)
        size = torch.ones_like(z[:, 0])
        for _ in range(steps):
            d = d / d.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
            h = pack_leaves_into_rows(self.product(unpack_rows_to_tree(d, like))).detach()
            # Not d . h: where eigenvalues come as +-lambda, d is a mixture of both and the quotient means nothing.
            size, d = h.norm(dim=1), h
        return size


@accept_old_names(
    count="add_counts",
    take="record_outcome",
    diverged="n_diverged",
    failed="n_failed",
    indefinite="n_indefinite",
)
@dataclass
class AdjointReport:
    """Statistics of the backward pass, which fills them in.

    n_diverged: episodes whose Neumann series grew; failed: episodes whose linear solve missed its tolerance;
        indefinite:
    episodes whose Hessian curves downwards somewhere, so that the search has stopped at no minimum. These are counted
    where the episodes are: the first look at one makes a device wait, once for all three.
    """

    episodes: int = 0
    residual: Tensor | None = field(default=None, repr=False)  # [E] of the latest backward pass
    steps: Tensor | None = field(default=None, repr=False)  # [E] of the latest backward pass
    _counts: dict[str, int | Tensor] = field(default_factory=lambda: dict.fromkeys(_COUNTED_EVENTS, 0), repr=False)

    @property
    def n_diverged(self) -> int:
        return self._read_event_count("diverged")

    @property
    def n_failed(self) -> int:
        return self._read_event_count("failed")

    @property
    def n_indefinite(self) -> int:
        return self._read_event_count("indefinite")

    def add_counts(self, **more: Tensor | int) -> None:
        """Add to the counts: a number, or the episodes that are marked [E] bool."""
        for name, value in more.items():
            self._counts[name] = self._counts[name] + (value.sum() if isinstance(value, Tensor) else value)

    def count_all_failed(self, where: Tensor | bool) -> None:
        """Count every episode as failed where that is true []."""
        if where is not False:
            self._counts["failed"] = torch.where(torch.as_tensor(where), self.episodes, self._counts["failed"])

    def record_outcome(self, outcome: LinearOutcome) -> Tree:
        """Note how a linear solve went, and return its answer."""
        self.episodes += outcome.failed.shape[0]
        self.add_counts(failed=outcome.failed, indefinite=outcome.indefinite)
        self.residual, self.steps = outcome.residual, outcome.steps
        return outcome.value

    def _read_event_count(self, name: str) -> int:
        waiting = {key: value for key, value in self._counts.items() if isinstance(value, Tensor)}
        if waiting:
            self._counts |= dict(zip(waiting, torch.stack([*waiting.values()]).tolist(), strict=True))
        return int(self._counts[name])


class LinearSolver(Protocol):
    """Solves H u = v."""

    def solve(self, operator: Operator, rhs: Tree, report: AdjointReport) -> Tree:
        """Return u for v = rhs, and write the statistics to the report.

        Args:
            operator: H.
            rhs: v, a tree with leading dimension E.
            report: counts how the solves went.
        """


@dataclass(frozen=True)
class ConjugateGradient:
    """Exact to a relative residual of `tol` (default: 1e-10, or as far as float32 goes).

    Where H turns out to be indefinite, the point is no minimum: the episode is counted, and solved by MINRES.

    Softmax regression and the tanh network are solved in float64 whatever the precision of the arguments. An episode
    has failed where the residual measured at the answer is too large (see `LinearOutcome`): near-singular Hessians.

    Raises:
        ValueError: an option out of range.
    """

    tol: float | None = None
    max_steps: int = 500

    def __post_init__(self) -> None:
        check_solver_options(self, positive=("tol",), counts=("max_steps",))

    def solve(self, operator: Operator, rhs: Tree, report: AdjointReport) -> Tree:
        return report.record_outcome(operator.solve(rhs, self.tol, self.max_steps))


@dataclass(frozen=True)
class Neumann:
    """Recurrent back-propagation: a truncated, damped Neumann series (Liao et al. 2018; Ren et al. 2019).

    With F(V) = V - rate grad L(V) and J = dF/dV:  v_0 = v, g = v;  `steps` times  v <- J^T v - damping v, g <- g + v;
    u = rate g. As steps grow it tends to (H + damping / rate)^-1 v, so it is biased where the damping is not small
    against H, and it diverges once H has an eigenvalue above (2 - damping) / rate, or one below -damping / rate. An
    episode counts as diverged when the last term is longer than the one before it, or not finite.

    A sum that grows is no estimate of anything: it grows with the power `steps` of an eigenvalue, and one such gradient
    stays in Adam's second moment for a thousand steps. A diverged episode gets (H + damping / rate)^-1 v itself, by
    `Operator.solve`, to which the series of its neighbours tend. Its gradient then has the size of theirs, which
    H^-1 v would not give, and no episode is left out.
    """

    steps: int = 20
    damping: float = 0.1
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_solver_options(self, positive=("rate",), counts=("steps",))
        if not 0 <= self.damping < 1:
            raise ValueError(f"Neumann(damping={self.damping}): it must be at least 0 and below 1")

    def solve(self, operator: Operator, rhs: Tree, report: AdjointReport) -> Tree:
        u, diverged = operator.neumann_series(rhs, self.steps, self.damping, self.rate)
        report.episodes += diverged.shape[0]
        grown = int(diverged.sum())
        report.add_counts(diverged=grown)
        report.steps = torch.full_like(diverged, self.steps, dtype=torch.long)
        if grown:
            limit = self._solve_for_series_limit(operator, rhs, diverged, report)
            pairs = zip(tensor_leaves(u), tensor_leaves(limit), strict=True)
            u = rebuild_tree(rhs, [torch.where(expand_to_episode_shape(diverged, a), b, a) for a, b in pairs])
        return u

    def _solve_for_series_limit(self, operator: Operator, rhs: Tree, rows: Tensor, report: AdjointReport) -> Tree:
        """Return (H + damping / rate)^-1 rhs for the episodes marked in `rows` [E], zero for the others."""
        some = rebuild_tree(rhs, [torch.where(expand_to_episode_shape(rows, v), v, 0.0) for v in tensor_leaves(rhs)])
        outcome = operator.add_shift(self.damping / self.rate).solve(some, None, 1000)
        report.add_counts(failed=outcome.failed & rows, indefinite=outcome.indefinite & rows)
        return outcome.value


def squared_norm_by_episode(parts: list[Tensor]) -> Tensor:
    """Return the squared length of each episode's vector, which comes in parts [E, ...]: [E]."""
    return torch.stack([inner_product_by_episode(part, part) for part in parts]).sum(0)


def check_solver_options(owner: Any, positive: tuple[str, ...] = (), counts: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a solver's option that is not positive and finite, or a count below one; None passes.

    Args:
        owner: the solver, with options as attributes.
        positive: names of the options that must be positive and finite.
        counts: names of the options that must be whole numbers, at least one.
    """
    for name in positive + counts:
        value = getattr(owner, name)
        where = f"{type(owner).__name__}({name}={value})"
        if isinstance(value, Tensor):
            if not bool((value.isfinite() & (value > 0)).all()):
                raise ValueError(f"{type(owner).__name__}: every {name} must be positive and finite")
        elif name in counts:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{where}: it must be a whole number, at least 1")
        elif value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"{where}: it must be positive and finite")
