"""Newton's method for softmax regression in its S x N dual numbers.

At the optimum V = C + P^-1 A X with A = (Y - pi) / S, [N, S]; docs/solve.md derives what follows from it. Rasmussen
& Williams (Gaussian Processes for Machine Learning, algorithm 3.3) factorise N + 1 matrices S x S a step. For matrices
this small a batched factorisation is slower than everything else together, so the Newton system (1 + M K) s = -r is
solved by conjugate gradients in the metric of K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.solvers.outcome import Outcome, relative_tolerance
from ifsl_bench.solvers.softmax import (
    RegressionArgs,
    class_scores,
    cross_entropy,
    cross_entropy_gradient,
    floor_precisions,
    labels_minus_probabilities,
    one_hot,
    precision_kernel_matrix,
)
from ifsl_bench.solvers.tree import (
    IterationState,
    choose_steps_between_checks,
    expand_to_episode_shape,
    indices_of_marked_episodes,
    inner_product_by_episode,
    iterate_until_finished,
    to_float64,
)

FORCING_TERM = 1e-2  # the residual of a Newton step's system, where there are enough steps for that
STEPS_BEFORE_FIRST_CHECK = 4  # Newton steps before the first look at how far the episodes have come


def solve_regressions(args: RegressionArgs, tolerance: float | None, max_steps: int, inner_steps: int) -> Outcome:
    """Solve all episodes at once, by the rules of `DualNewton`.

    Args:
        args: the episodes.
        tolerance: on the gradient; None for the default of the precision.
        max_steps: Newton steps of each episode.
        inner_steps: conjugate gradient steps in each Newton step.
    """
    outcome = _solve_episode_batch(args, tolerance, max_steps, inner_steps)
    if args.features.dtype == torch.float64 or (count := int((~outcome.converged).sum())) == 0:
        return outcome
    if not bool(args.precisions.min() > 0):
        return outcome
    # Rows that float32 does not tell apart, or a kernel of condition 1e8 and scores that do not saturate.
    rows = indices_of_marked_episodes(~outcome.converged, count)
    hard = to_float64(args.select_episodes(rows))
    return outcome.replace_episodes(
        rows, _solve_episode_batch(hard, min(tolerance or 1.0, 1e-9), max_steps, inner_steps)
    )


def solve_newton_system(k: Tensor, pi: Tensor, b: Tensor, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor]:
    """Solve (1 + M K) w = b, and return w [E, N, S] and the steps [E].

    M is the Hessian of the cross-entropy.

    Args:
        k: the kernel K, [E, S, S].
        pi: the probabilities, [E, N, S].
        b: the right-hand side, [E, N, S].
        tolerance: on the residual, relative to b, in the metric of K.
        max_steps: for each episode.
    """
    image = b @ k
    w, _, steps = _conjugate_gradient(
        k,
        pi,
        b,
        image,
        inner_product_by_episode(b, image),
        tolerance,
        max_steps,
        check_every=choose_steps_between_checks(k),
    )
    return w, steps.long()


@dataclass
class _DualNewtonState(IterationState):
    fields_put_back: ClassVar = ("duals", "scores", "steps", "converged")
    fields_common_to_episodes: ClassVar = ("max_step_extension", "step_extension_exponents", "iteration")

    # What does not change.
    kernel_matrix: Tensor  # [E, S, S]
    labels: Tensor  # [E, 1, S]
    one_hot_labels: Tensor  # [E, N+1, S] labels as booleans, the fixed class last
    initial_gradient_square: Tensor  # [E] the gradient's squared norm at the centres
    relative_gradient_square_goal: Tensor  # [E] a squared norm below both goals is small enough
    absolute_gradient_square_goal: Tensor  # [E]
    largest_kernel_diagonal: Tensor  # [E] of the kernel's diagonal
    max_step_extension: Tensor  # [] how much further than is safe a line search goes
    step_extension_exponents: Tensor  # [3] in this share of the way, in logarithms
    # What does.
    duals: Tensor  # [E, N, S] the dual numbers
    scores: Tensor  # [E, N+1, S] scores, the fixed class last
    probabilities: Tensor  # [E, N+1, S] probabilities
    gradient: Tensor  # [E, N, S] the representer of the gradient: grad L = r X
    kernel_gradient: Tensor  # [E, N, S] r K
    gradient_square: Tensor  # [E] the gradient's squared norm in the metric, and its least so far
    least_gradient_square: Tensor
    steps: Tensor  # [E]
    steps_without_progress: Tensor  # [E] steps in vain
    converged: Tensor  # [E] bool
    is_active: Tensor  # [E] bool
    iteration: int = 0


def _solve_episode_batch(args: RegressionArgs, tolerance: float | None, max_steps: int, inner_steps: int) -> Outcome:
    x, labels, base_logsumexp, centres, precisions = args
    dtype = x.dtype
    inverse_p = 1 / floor_precisions(precisions)
    k = precision_kernel_matrix(x, inverse_p)  # [E, S, S]
    start = class_scores(centres, x)  # [E, N, S]
    episodes, ways, size = start.shape
    hot = one_hot(labels, ways + 1)  # [E, N+1, S], the fixed class last
    f = torch.cat([start, base_logsumexp[:, None]], 1)
    p = f.softmax(1)
    r = labels_minus_probabilities(p, hot) / -size
    r_image = r @ k
    first = inner_product_by_episode(r, r_image)
    eps, largest = torch.finfo(dtype).eps, k.diagonal(dim1=1, dim2=2).amax(1)
    # A start that is already a solution up to rounding has no gradient to shrink.
    target = hot[:, :-1].to(dtype) / size
    relative = relative_tolerance(tolerance, dtype, 1e-6, 1e-9)
    share = relative**2 * torch.maximum(first, eps**2 * inner_product_by_episode(target, target @ k))
    near = 1e-6 if dtype == torch.float64 else 1e-3  # a tenth of how far a support score may be from its minimum's
    close = near**2 / largest.clamp_min(torch.finfo(dtype).tiny)
    converged = first <= torch.minimum(share, close)
    active = ~converged
    if dtype != torch.float64:
        # Rows so near to each other that K does not tell them apart: leave the episode to float64.
        active, converged = active & (clear := ~_has_rows_closer_than_rounding(k)), converged & clear

    def step(s: _DualNewtonState) -> _DualNewtonState:
        d, rho, _ = _conjugate_gradient(
            s.kernel_matrix,
            s.probabilities[:, :-1],
            -s.gradient,
            -s.kernel_gradient,
            s.gradient_square,
            FORCING_TERM,
            min(inner_steps, max(1, 2 * s.iteration)),
        )
        d_image, solved = d @ s.kernel_matrix, rho <= 0.09 * s.gradient_square
        t, p = _line_search(s, d, d_image)
        t = expand_to_episode_shape(t * s.is_active, d)
        a = torch.addcmul(s.duals, t, d)
        f = torch.cat([torch.addcmul(s.scores[:, :-1], t, d_image), s.scores[:, -1:]], 1)
        p = torch.where(expand_to_episode_shape(s.is_active, p), p, s.probabilities)
        r = a - labels_minus_probabilities(p, s.one_hot_labels) / size
        r_image = r @ s.kernel_matrix
        length = inner_product_by_episode(r, r_image)
        moved = t[:, 0, 0] * d_image.abs().amax((1, 2))
        arrived = (
            s.is_active
            & (length <= s.relative_gradient_square_goal)
            & ((length <= s.absolute_gradient_square_goal) | ((moved <= near) & solved))
        )
        converged, active, idle, best = (
            s.converged | arrived,
            s.is_active & ~arrived,
            s.steps_without_progress,
            s.least_gradient_square,
        )
        if s.iteration >= 8:
            # Rounding may end progress before the tolerance does: three steps that neither shrink the gradient nor
            # move a score by more than its rounding are enough. (Early on the gradient may grow while L falls.)
            still = moved <= 4 * eps * s.largest_kernel_diagonal * a.abs().sum(2).amax(1)
            idle = (idle + 1) * (still & (length >= 0.25 * best))
            best = torch.minimum(best, length)
            active = active & (idle < 3)
        return replace(
            s,
            duals=a,
            scores=f,
            probabilities=p,
            gradient=r,
            kernel_gradient=r_image,
            gradient_square=length,
            least_gradient_square=best,
            steps=s.steps + s.is_active,
            steps_without_progress=idle,
            converged=converged,
            is_active=active,
            iteration=s.iteration + 1,
        )

    none = torch.zeros(episodes, dtype=torch.long, device=x.device)
    s = _DualNewtonState(
        k,
        labels[:, None],
        hot,
        first,
        share,
        close,
        largest,
        k.new_tensor(16.0),
        k.new_tensor([1.0, 0.5, 0.0]),
        torch.zeros_like(start),
        f,
        p,
        r,
        r_image,
        first,
        first,
        none,
        none,
        converged,
        active,
    )
    s = iterate_until_finished(
        step, s, max_steps, lambda s: (s, s.is_active), lambda _: step, first_check=STEPS_BEFORE_FIRST_CHECK
    )
    v, norm, value, remainder, off = evaluate_dual_solution(s.duals, s.scores[:, :-1], k, start, inverse_p, args)
    sound = (remainder <= torch.maximum(1e4 * share, 1e-8 * first)) & (off <= 10 * near)
    return Outcome(v, s.converged & sound, s.steps, norm, value)


def _conjugate_gradient(
    k: Tensor,
    pi: Tensor,
    b: Tensor,
    kernel_b: Tensor,
    square: Tensor,
    tolerance: float,
    count: int,
    check_every: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make `count` steps of conjugate gradients for (1 + M K) w = b in the metric of K.

    Returns w [E, N, S], the square of the residual [E], and the steps [E] until the residual was `tolerance` of b.

    `linear.conjugate_gradient` for an operator that is at least 1: the curvature along a direction is at least the
    residual's square. Steps of episodes that are done have length 0; after each `check_every` steps the host checks
    whether all are done. `kernel_b` is b K, and `square` its product with b.
    """
    shares = pi / pi.shape[2]
    residual, p, kernel_p = b, b, kernel_b
    least = (tolerance**2 * square).clamp_min(torch.finfo(pi.dtype).tiny)
    rho, zero = square.maximum(least), torch.zeros_like(least)
    w, steps = torch.zeros_like(b), zero
    for i in range(1, count + 1):
        h = shares * kernel_p
        h = p + torch.addcmul(h, pi, h.sum(1, keepdim=True), value=-1)
        going = rho > least
        length = expand_to_episode_shape(
            torch.where(going, rho / inner_product_by_episode(h, kernel_p).maximum(rho), zero), p
        )
        w = torch.addcmul(w, length, p)
        residual = torch.addcmul(residual, length, h, value=-1)
        kernel_residual = residual @ k
        before, rho = rho, inner_product_by_episode(residual, kernel_residual).maximum(least)
        steps = steps + going if check_every else steps
        if i == count or (check_every and i % check_every == 0 and not bool(going.any())):
            break
        ratio = expand_to_episode_shape(rho / before, p)
        p, kernel_p = torch.addcmul(residual, ratio, p), torch.addcmul(kernel_residual, ratio, kernel_p)
    return w, rho, steps


def _line_search(s: _DualNewtonState, d: Tensor, kernel_d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step along d [E, N, S], and the probabilities there; scores move along d K, which is `kernel_d`.

    From a step that is safe (docs/solve.md), Newton's method on the slope goes on, at most 16 times as far. That is
    too far where scores saturate, so points between the two are looked at as well: the furthest is taken where L has
    certainly fallen.
    """
    move = torch.nn.functional.pad(kernel_d, (0, 0, 0, 1))  # [E, N+1, S]
    least, most = torch.aminmax(move, dim=1)
    reach = (most - least).amax(1, keepdim=True)  # [E, 1]
    safe = torch.where(reach < 1, torch.ones_like(reach), reach.log1p() / reach)
    # How much further the label's score goes than another: what the labels and the probabilities have in common in
    # the slope is gone before it is added up.
    gains = (move.gather(1, s.labels) - move)[:, None]
    fixed_slope, fixed_curvature, size = (
        inner_product_by_episode(s.duals, kernel_d)[:, None],
        inner_product_by_episode(d, kernel_d)[:, None],
        move.shape[2],
    )

    def gains_times_probability(t: Tensor) -> Tensor:
        """Return gains times their probability at steps t [E, T]: [E, T, N+1, S]."""
        return torch.addcmul(s.scores[:, None], t[:, :, None, None], move[:, None]).softmax(2) * gains

    fitted = gains_times_probability(safe)
    sums = fitted.sum(2)  # [E, 1, S]
    slope = torch.addcmul(fixed_slope, safe, fixed_curvature) - sums.sum(2) / size
    curvature = fixed_curvature + inner_product_by_episode(fitted, gains - sums[:, :, None])[:, None] / size
    further = torch.fmin(1 - slope / (curvature * safe), s.max_step_extension)  # [E, 1]
    steps = safe * further**s.step_extension_exponents  # [E, T]
    slopes = torch.addcmul(fixed_slope, steps, fixed_curvature) - gains_times_probability(steps).sum((2, 3)) / size
    # By convexity L falls by -slope t at least up to the safe step, and rises by slope' (t' - t) at most from there.
    good = slopes * (steps - safe) <= -0.5 * slope * safe
    t = steps.gather(1, good.to(torch.uint8).argmax(1, keepdim=True))
    return t[:, 0], torch.addcmul(s.scores, t[:, :, None], move).softmax(1)


def _has_rows_closer_than_rounding(k: Tensor) -> Tensor:
    """Mark episodes where rounding of K [E, S, S] is not small against the distance of some two rows: [E]."""
    own = k.diagonal(dim1=1, dim2=2)
    distance = torch.sub(own[:, :, None] + own[:, None], k, alpha=2)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance.amin((1, 2)) < 100 * torch.finfo(k.dtype).eps * own.amax(1)


def evaluate_dual_solution(
    a: Tensor, f: Tensor, k: Tensor, start: Tensor, inverse_p: Tensor, args: RegressionArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the solution that a search has found.

    A search adds its scores up step by step, and where rows are nearly equal its dual numbers may run away along what K
    does not see. What counts is where V is, so both are computed afresh: the gradient itself, whose length cannot come
    out negative, and the scores of V. Infinitely off are dual numbers that no minimum has: there
    |a| = |target - pi / S| <= 1 / S.

    Args:
        a: dual numbers, [E, N, S].
        f: scores, as the search has added them up, [E, N, S].
        k: the kernel K, [E, S, S].
        start: scores at the centres, [E, N, S].
        inverse_p: inverse precisions, [D+1].
        args: the episodes.

    Returns:
        V [E, N, D+1]; and [E] each the gradient's norm at V, L, the square of the gradient in the norm of P^-1, and how
        far V is off f.
    """
    x, labels, base_logsumexp, centres, _ = args
    ways, size = a.shape[1:]
    a_image = a @ k
    r = a + cross_entropy_gradient(start + a_image, base_logsumexp, labels)
    both, ones = torch.cat([a, r], 1) @ x, r.sum(2)  # [E, 2N, D]: one pass over the features for V and the gradient
    v = torch.addcmul(centres, torch.cat([both[:, :ways], a.sum(2, keepdim=True)], 2), inverse_p)  # [E, N, D+1]
    squares, square = both[:, ways:].square().sum(1), ones.square().sum(1)  # [E, D], [E]
    norm, remainder = (squares.sum(1) + square).sqrt(), squares @ inverse_p[:-1] + square * inverse_p[-1]
    value = cross_entropy(f, base_logsumexp, labels).mean(1) + inner_product_by_episode(a, a_image) / 2
    off = (class_scores(v, x) - f).abs().amax((1, 2))
    return v, norm, value, remainder, torch.where(a.abs().amax((1, 2)) <= 2 / size, off, torch.inf)
