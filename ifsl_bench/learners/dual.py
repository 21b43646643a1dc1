"""Newton's method for softmax regression in its S x N dual numbers.

At the optimum V = C + P^-1 A X with A = (Y - pi) / S, [N, S]: the posterior mode of multi-class Gaussian process
classification with prior mean C x, kernel K = X P^-1 X^T and one fixed extra class (Rasmussen & Williams, Gaussian
Processes for Machine Learning, section 3.5). Their algorithm 3.3 factorises N + 1 matrices S x S a step. For matrices
this small a batched factorisation is slower than everything else together, so the Newton system (1 + M K) s = -r is
solved by conjugate gradients in the metric of K, loosely at first; a step of those is one product [N, S] x [S, S].
The line search looks for the root of the slope (monotone here), which costs no product at all since scores are affine
in the step: it needs no value of the objective, whose differences float32 cannot resolve near the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.solve.checks import check_options
from ifsl_bench.solve.linear import conjugate_gradient
from ifsl_bench.solve.objective import Objective
from ifsl_bench.solve.outcome import Outcome, relative_tolerance
from ifsl_bench.solve.tree import Tree, column, dot, doubled

from .single import few, newton
from .softmax import (
    Regression,
    SoftmaxRegression,
    cross_entropy,
    floored,
    indicator,
    kernel,
    misfit,
    one_hot,
    per_episode,
    residual,
    scores,
    weigh,
    with_rest,
)


@dataclass(frozen=True)
class DualNewton:
    """The solver of `SoftmaxRegression`. Needs no v0, for the minimum is unique.

    Stops when two things hold of |grad L| in the norm of P^-1. It is at most `tolerance` (default 1e-6 in float32, 1e-9
    in float64) times what it was at the centres, so L - L* <= 1/2 |grad L|^2 is small beside what there was to gain.
    And no support score is further from its value at the minimum than 0.01 (1e-5 in float64), for with a weak pull the
    first test alone may leave scores far off: that is bounded by |grad L| sqrt(max_i K_ii), or, where rounding spoils
    the bound, shown by a Newton step that moves no score. What float32 cannot solve is solved in float64, to 1e-9.

    On a CPU so many episodes are solved at a time as have `chunk` dual numbers: enough to hide the cost of calls, few
    enough to stay in the cache; up to `alone` of them (default `single.FEW`) are solved one by one, in float64, which
    is faster.

    Raises:
        ValueError: an option out of range.
    """

    tolerance: float | None = None
    max_steps: int = 100
    inner_steps: int = 50
    chunk: int = 2**16
    alone: int | None = None

    def __post_init__(self) -> None:
        check_options(self, positive=("tolerance",), counts=("max_steps", "inner_steps", "chunk"))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if not isinstance(objective, SoftmaxRegression):
            raise TypeError(f"DualNewton solves SoftmaxRegression, not {type(objective).__name__}: use LBFGS()")
        if few(args.features, self.alone):
            return self._one_by_one(args)
        size = max(args.features.shape[0], 1)
        if args.features.device.type == "cpu":
            size = max(1, self.chunk // (args.labels.shape[1] * args.centres.shape[-2]))
        found = self._in_chunks(args, size)
        failed = ~found[1]
        if args.features.dtype != torch.float64 and bool(failed.any()) and bool(args.precisions.min() > 0):
            # Rows that float32 does not tell apart, or a kernel of condition 1e8 and scores that do not saturate.
            rows = failed.nonzero()[:, 0]
            hard = doubled(objective.take(args, rows))
            again = list(replace(self, tolerance=min(self.tolerance or 1.0, 1e-9))._in_chunks(hard, size))
            again[2] = again[2] + found[2][rows]
            found = tuple(a.index_copy(0, rows, b.to(a.dtype)) for a, b in zip(found, again, strict=True))
        return Outcome(*found)

    def _in_chunks(self, args: Regression, size: int) -> tuple[Tensor, ...]:
        parts = [self._solve(_slice(args, start, size)) for start in range(0, args.features.shape[0], size)]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _solve(self, args: Regression) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, labels, rest, centres, precisions = args
        dtype = x.dtype
        tolerance = relative_tolerance(self.tolerance, dtype, 1e-6, 1e-9)
        inverse_p = 1 / floored(precisions)
        k = kernel(x, inverse_p)  # [E, S, S]
        f = start = scores(centres, x)  # [E, N, S]
        episodes, ways, size = f.shape
        hot = one_hot(labels, ways + 1)  # [E, N+1, S], the fixed class last
        a = torch.zeros_like(f)  # the dual numbers
        p = with_rest(f, rest)  # [E, N+1, S]
        r = misfit(p, hot) / -size  # the representer of the gradient: grad L = r X
        steps = torch.zeros(episodes, dtype=torch.long, device=x.device)
        r_image = r @ k
        first = length = best = dot(r, r_image)  # squared norms in the metric
        eps, largest, zero = torch.finfo(dtype).eps, k.diagonal(dim1=1, dim2=2).amax(1), k.new_zeros(())
        # A start that is already a solution up to rounding has no gradient to shrink.
        target = hot[:, :-1].to(dtype) / size
        share = tolerance**2 * torch.maximum(first, eps**2 * dot(target, target @ k))
        near = score_tolerance(dtype) / 10
        close = near**2 / largest.clamp_min(torch.finfo(dtype).tiny)
        converged = length <= torch.minimum(share, close)
        active = ~converged
        if dtype != torch.float64:
            # Rows so near to each other that K does not tell them apart: leave the episode to float64.
            active, converged = active & (clear := ~_blurred(k)), converged & clear
        idle = torch.zeros_like(steps)
        for step in range(self.max_steps):
            if not bool(active.any()):
                break
            # Superlinear forcing; the first direction is the gradient, for the Hessian at the centres says little.
            force = 0.3 * (3 * (length / first).clamp(0, 1).pow(0.25)).clamp_max(1)
            pi = p[:, :-1]
            shares = pi / size
            s, s_image, info = conjugate_gradient(
                lambda p, image, pi=pi, shares=shares: p + weigh(pi, shares, image),  # type: ignore[misc]
                lambda residual: residual @ k,
                -r,
                -r_image,
                force,
                self.inner_steps if step else 1,
                active,
            )
            t, p = _line_search(f, rest, p, s, s_image, labels, dot(a, s_image), dot(r, s_image), active)
            t = column(torch.where(active, t, zero), f)
            a = torch.addcmul(a, t, s)
            f = torch.addcmul(f, t, s_image)
            r = a - misfit(p, hot) / size
            r_image = r @ k
            length = dot(r, r_image)
            steps += active
            moved = t[:, 0, 0] * s_image.abs().amax((1, 2))
            small = active & (length <= share)
            if bool(small.any()):
                arrived = small & ((length <= close) | ((moved <= near) & (info()[0] <= 0.3)))
                converged, active = converged | arrived, active & ~arrived
            if step >= 8:
                # Rounding may end progress before the tolerance does: three steps that neither shrink the gradient nor
                # move a score by more than its rounding are enough. (Early on the gradient may grow while L falls.)
                rounding = 4 * eps * largest * a.abs().sum(2).amax(1)
                still = moved <= rounding
                idle = (idle + 1) * (still & (length >= 0.25 * best))
                best = torch.minimum(best, length)
                active = active & (idle < 3)
        v, norm, value, left, off = _at(a, f, k, start, inverse_p, args)
        sound = (left <= torch.maximum(1e4 * share, 1e-8 * first)) & (off <= 10 * near)
        return v, converged & sound, steps, norm, value

    def _one_by_one(self, given: Regression) -> Outcome:
        tolerance = relative_tolerance(self.tolerance, torch.float64, 1e-6, 1e-9)
        args = doubled(given)
        x = args.features
        inverse_p = 1 / floored(args.precisions)
        k, start = kernel(x, inverse_p), scores(args.centres, x)
        target = indicator(args.labels, start.shape[1], x.dtype) / x.shape[1]
        numbers = zip(*(y.numpy() for y in (k, start, args.rest, target)), strict=True)
        near = score_tolerance(torch.float64) / 10
        found = [newton(self, tolerance, near, *episode) for episode in numbers]
        a, f, converged, steps, goal = zip(*found, strict=True)
        duals, reached = torch.from_numpy(np.stack(a)), torch.from_numpy(np.stack(f))
        v, norm, value, left, off = _at(duals, reached, k, start, inverse_p, args)
        sound = (left <= left.new_tensor(goal)) & (off <= score_tolerance(torch.float64))
        dtype = given.features.dtype
        return Outcome(
            v.to(dtype), torch.tensor(converged) & sound, torch.tensor(steps), norm.to(dtype), value.to(dtype)
        )


def _blurred(k: Tensor) -> Tensor:
    """Whether rounding of K [E, S, S] is not small beside the distance of some two rows: [E]."""
    own = k.diagonal(dim1=1, dim2=2)
    distance = torch.sub(own[:, :, None] + own[:, None], k, alpha=2)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance.amin((1, 2)) < 100 * torch.finfo(k.dtype).eps * own.amax(1)


def score_tolerance(dtype: torch.dtype) -> float:
    """How far a support score may be from its value at the minimum."""
    return 1e-5 if dtype == torch.float64 else 1e-2


def _at(
    a: Tensor, f: Tensor, k: Tensor, start: Tensor, inverse_p: Tensor, args: Regression
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For dual numbers a and scores f [E, N, S]: V [E, N, D+1]; [E] each the gradient's norm at V, L, the square of the
    gradient in the norm of P^-1, and how far V is off f.

    A search adds its scores up step by step, and where rows are nearly equal its dual numbers may run away along what K
    does not see. What counts is where V is, so this looks afresh: at the gradient itself, whose length cannot come
    out negative, and at the scores of V. Infinitely off are dual numbers that no minimum has: there
    |a| = |target - pi / S| <= 1 / S.
    """
    x, labels, rest, centres, _ = args
    ways, size = a.shape[1:]
    a_image = a @ k
    r = a + residual(start + a_image, rest, labels)
    both, ones = torch.cat([a, r], 1) @ x, r.sum(2)  # [E, 2N, D]: one pass over the features for V and the gradient
    v = torch.addcmul(centres, torch.cat([both[:, :ways], a.sum(2, keepdim=True)], 2), inverse_p)  # [E, N, D+1]
    squares, square = both[:, ways:].square().sum(1), ones.square().sum(1)  # [E, D], [E]
    norm, left = (squares.sum(1) + square).sqrt(), squares @ inverse_p[:-1] + square * inverse_p[-1]
    value = cross_entropy(f, rest, labels).mean(1) + dot(a, a_image) / 2
    off = (scores(v, x) - f).abs().amax((1, 2))
    return v, norm, value, left, torch.where(a.abs().amax((1, 2)) <= 2 / size, off, torch.inf)


def _slice(args: Tree, start: int, size: int) -> Regression:
    x, labels, rest, centres, precisions = args
    part = slice(start, start + size)
    if start == 0 and size >= x.shape[0]:
        return Regression(*args)
    return Regression(x[part], labels[part], rest[part], per_episode(centres, part, 3), precisions)


def _line_search(
    f: Tensor,
    rest: Tensor,
    p: Tensor,
    s: Tensor,
    s_image: Tensor,
    labels: Tensor,
    fixed_slope: Tensor,
    slope: Tensor,
    active: Tensor,
    trials: int = 30,
) -> tuple[Tensor, Tensor]:
    """t [E] where the slope along s has fallen to a tenth of what it is at t = 0, and the probabilities there, p
    [E, N+1, S] like those given.

    Safeguarded Newton from a step short enough to be safe: along a line the logarithm of the second derivative
    changes at most as fast as the range of the scores' differences (Bach 2010). Where the slope is positive, L may have
    risen: by convexity it has not if g (t - low) <= -g_low low, nor can it over a move in which the curvature is nearly
    constant. Out of trials, the largest step known to descend.
    """
    size = f.shape[2]
    # How much further the label's score goes than another: what the labels and the probabilities have in common in the
    # slope is gone before it is added up.
    own = s_image.gather(1, labels[:, None])
    gains = torch.cat([own - s_image, own], 1)  # [E, N+1, S]
    reach = (s_image.amax(1).clamp_min(0) - s_image.amin(1).clamp_max(0)).amax(1)  # [E]
    t = torch.where(reach < 1, torch.ones_like(reach), reach.log1p() / reach)
    curvature_s = dot(s, s_image)
    low, high, g_low = torch.zeros_like(t), torch.full_like(t, torch.inf), torch.zeros_like(t)
    accept = -0.1 * slope
    done, some_done = ~active, not bool(active.all())
    for trial in range(trials + 1):
        moved = with_rest(torch.addcmul(f, column(t, f), s_image), rest)
        p = torch.where(column(done, f), p, moved) if some_done else moved
        if trial == trials:
            break
        weighted = p * gains
        sums = weighted.sum(1)
        g = fixed_slope + t * curvature_s - sums.sum(1) / size
        done = done | ((g.abs() <= accept) & ((g * (t - low) <= -g_low * low) | (t * reach <= 1)))
        if bool(done.all()):
            break
        some_done = True
        h = curvature_s + (dot(weighted, gains) - dot(sums, sums)) / size
        descends = g < 0
        low, high, g_low = (
            torch.where(descends, t, low),
            torch.where(descends, high, t),
            torch.where(descends, g, g_low),
        )
        new = t - g / h
        # The root may be orders of magnitude away: the slope of saturated scores says nothing of where they cross.
        middle = torch.where(low > 0, (low * high).sqrt(), high / 4)
        middle = torch.where(high.isinf(), 4 * t, torch.where(high < 4 * low, (low + high) / 2, middle))
        if trial % 3 == 2:  # Newton's steps alone may creep
            new = middle
        new = torch.where((new > low) & (new < torch.where(high.isinf(), 16 * t, high)), new, middle)
        if trial == trials - 1:
            new = low
        t = torch.where(done, t, new)
    return t, p
