"""Newton's method for softmax regression in its S x N dual numbers.

At the optimum V = C + P^-1 A X with A = (Y - pi) / S, [N, S]; docs/solve.md derives what follows from it. Rasmussen
& Williams (Gaussian Processes for Machine Learning, algorithm 3.3) factorise N + 1 matrices S x S a step. For matrices
this small a batched factorisation is slower than everything else together, so the Newton system (1 + M K) s = -r is
solved by conjugate gradients in the metric of K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from ifsl_bench.solve.iterate import iterate
from ifsl_bench.solve.krylov import Krylov, conjugate_gradient
from ifsl_bench.solve.outcome import Outcome, relative_tolerance
from ifsl_bench.solve.search import root_of_slope
from ifsl_bench.solve.tree import column, dot, doubled

from .softmax import (
    Regression,
    cross_entropy,
    floored,
    kernel,
    misfit,
    one_hot,
    residual,
    scores,
    weigh,
    with_rest,
)  # fmt: skip


def newton(args: Regression, tolerance: float | None, max_steps: int, inner_steps: int, chunk: int) -> Outcome:
    """See `DualNewton`: all episodes at once, or as many as have `chunk` dual numbers on a CPU."""
    size = max(args.features.shape[0], 1)
    if args.features.device.type == "cpu":
        size = max(1, chunk // (args.labels.shape[1] * args.centres.shape[-2]))

    def in_chunks(args: Regression, tolerance: float | None) -> Outcome:
        starts = range(0, args.features.shape[0], size)
        parts = [_solve(args.take(slice(i, i + size)), tolerance, max_steps, inner_steps) for i in starts]
        if len(parts) == 1:
            return parts[0]
        return Outcome(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Outcome)))

    found = in_chunks(args, tolerance)
    rows = (~found.converged).nonzero()[:, 0]
    if args.features.dtype == torch.float64 or len(rows) == 0 or not bool(args.precisions.min() > 0):
        return found
    # Rows that float32 does not tell apart, or a kernel of condition 1e8 and scores that do not saturate.
    return found.put(rows, in_chunks(doubled(args.take(rows)), min(tolerance or 1.0, 1e-9)))


def system(k: Tensor, pi: Tensor, b: Tensor, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor]:
    """w [E, N, S] with (1 + M K) w = b, M being the Hessian of the cross-entropy for probabilities pi [E, N, S] and
    K [E, S, S] a kernel; and the steps it took [E]."""
    w, _, info = _solver(k, pi)(b, b @ k, tolerance, max_steps)
    return w, info().steps


def _solver(k: Tensor, pi: Tensor) -> Callable[..., tuple[Tensor, Tensor, Callable[[], Krylov]]]:
    """`conjugate_gradient` with 1 + M K, in the metric of K."""
    shares = pi / pi.shape[2]
    return partial(conjugate_gradient, lambda p, image: p + weigh(pi, shares, image), lambda r: r @ k)


@dataclass(frozen=True)
class _State:
    a: Tensor  # [E, N, S] the dual numbers
    f: Tensor  # [E, N, S] scores
    p: Tensor  # [E, N+1, S] probabilities, the fixed class last
    r: Tensor  # [E, N, S] the representer of the gradient: grad L = r X
    r_image: Tensor  # [E, N, S] r K
    length: Tensor  # [E] the gradient's squared norm in the metric, and its least so far
    best: Tensor
    steps: Tensor  # [E]
    idle: Tensor  # [E] steps in vain
    converged: Tensor  # [E] bool
    active: Tensor  # [E] bool
    count: int = 0


def _solve(args: Regression, tolerance: float | None, max_steps: int, inner_steps: int) -> Outcome:
    x, labels, rest, centres, precisions = args
    dtype = x.dtype
    inverse_p = 1 / floored(precisions)
    k = kernel(x, inverse_p)  # [E, S, S]
    start = scores(centres, x)  # [E, N, S]
    episodes, ways, size = start.shape
    hot = one_hot(labels, ways + 1)  # [E, N+1, S], the fixed class last
    p = with_rest(start, rest)  # [E, N+1, S]
    r = misfit(p, hot) / -size
    r_image = r @ k
    first = dot(r, r_image)
    eps, largest, zero = torch.finfo(dtype).eps, k.diagonal(dim1=1, dim2=2).amax(1), k.new_zeros(())
    # A start that is already a solution up to rounding has no gradient to shrink.
    target = hot[:, :-1].to(dtype) / size
    relative = relative_tolerance(tolerance, dtype, 1e-6, 1e-9)
    share = relative**2 * torch.maximum(first, eps**2 * dot(target, target @ k))
    near = score_tolerance(dtype) / 10
    close = near**2 / largest.clamp_min(torch.finfo(dtype).tiny)
    converged = first <= torch.minimum(share, close)
    active = ~converged
    if dtype != torch.float64:
        # Rows so near to each other that K does not tell them apart: leave the episode to float64.
        active, converged = active & (clear := ~_blurred(k)), converged & clear

    def step(s: _State) -> _State:
        # Superlinear forcing; the first direction is the gradient, for the Hessian at the centres says little.
        force = 0.3 * (3 * (s.length / first).clamp(0, 1).pow(0.25)).clamp_max(1)
        most = inner_steps if s.count else 1
        d, d_image, info = _solver(k, s.p[:, :-1])(-s.r, -s.r_image, force, most, s.active)
        line = _Line(s, rest, d, d_image, labels)
        t = root_of_slope(line, dot(s.r, d_image), line.reach, s.active)
        t = column(torch.where(s.active, t, zero), d)
        a, f = torch.addcmul(s.a, t, d), torch.addcmul(s.f, t, d_image)
        r = a - misfit(line.p, hot) / size
        r_image = r @ k
        length = dot(r, r_image)
        moved = t[:, 0, 0] * d_image.abs().amax((1, 2))
        converged, active, idle, best = s.converged, s.active, s.idle, s.best
        small = active & (length <= share)
        if bool(small.any()):
            arrived = small & ((length <= close) | ((moved <= near) & (info().residual <= 0.3)))
            converged, active = converged | arrived, active & ~arrived
        if s.count >= 8:
            # Rounding may end progress before the tolerance does: three steps that neither shrink the gradient nor
            # move a score by more than its rounding are enough. (Early on the gradient may grow while L falls.)
            still = moved <= 4 * eps * largest * a.abs().sum(2).amax(1)
            idle = (idle + 1) * (still & (length >= 0.25 * best))
            best = torch.minimum(best, length)
            active = active & (idle < 3)
        return _State(a, f, line.p, r, r_image, length, best, s.steps + s.active, idle, converged, active, s.count + 1)

    none = torch.zeros(episodes, dtype=torch.long, device=x.device)
    begin = _State(torch.zeros_like(start), start, p, r, r_image, first, first, none, none, converged, active)
    s = iterate(step, begin, max_steps, lambda s: s.active)
    v, norm, value, left, off = at(s.a, s.f, k, start, inverse_p, args)
    sound = (left <= torch.maximum(1e4 * share, 1e-8 * first)) & (off <= 10 * near)
    return Outcome(v, s.converged & sound, s.steps, norm, value)


class _Line:
    """L along the dual direction d [E, N, S], whose image moves the scores; see `root_of_slope`."""

    def __init__(self, s: _State, rest: Tensor, d: Tensor, d_image: Tensor, labels: Tensor) -> None:
        self.f, self.p, self.rest, self.d_image = s.f, s.p, rest, d_image
        # How much further the label's score goes than another: what the labels and the probabilities have in common in
        # the slope is gone before it is added up.
        own = d_image.gather(1, labels[:, None])
        self.gains = torch.cat([own - d_image, own], 1)  # [E, N+1, S]
        self.reach = (d_image.amax(1).clamp_min(0) - d_image.amin(1).clamp_max(0)).amax(1)  # [E]
        self.fixed_slope, self.fixed_curvature = dot(s.a, d_image), dot(d, d_image)

    def move(self, t: Tensor, done: Tensor | None) -> None:
        moved = with_rest(torch.addcmul(self.f, column(t, self.f), self.d_image), self.rest)
        self.p = moved if done is None else torch.where(column(done, moved), self.p, moved)

    def slope(self, t: Tensor) -> Tensor:
        self.weighted = self.p * self.gains
        self.sums = self.weighted.sum(1)
        return self.fixed_slope + t * self.fixed_curvature - self.sums.sum(1) / self.f.shape[2]

    def curvature(self) -> Tensor:
        spread = dot(self.weighted, self.gains) - dot(self.sums, self.sums)
        return self.fixed_curvature + spread / self.f.shape[2]


def _blurred(k: Tensor) -> Tensor:
    """Whether rounding of K [E, S, S] is not small beside the distance of some two rows: [E]."""
    own = k.diagonal(dim1=1, dim2=2)
    distance = torch.sub(own[:, :, None] + own[:, None], k, alpha=2)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance.amin((1, 2)) < 100 * torch.finfo(k.dtype).eps * own.amax(1)


def score_tolerance(dtype: torch.dtype) -> float:
    """How far a support score may be from its value at the minimum."""
    return 1e-5 if dtype == torch.float64 else 1e-2


def at(
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
