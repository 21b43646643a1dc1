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

from .linear import conjugate_gradient
from .objective import Objective
from .outcome import Outcome, relative_tolerance
from .single import doubled, few, newton
from .softmax import (
    Regression,
    SoftmaxRegression,
    cross_entropy,
    floored,
    indicator,
    kernel,
    per_episode,
    probabilities,
    scores,
    weigh,
)
from .tree import Tree, column, dot


@dataclass(frozen=True)
class DualNewton:
    """The solver of `SoftmaxRegression`. Needs no v0, for the minimum is unique.

    Stops at |grad L| <= tolerance |grad L at the centres| in the norm of P^-1, which bounds the distance to the
    minimum: L - L* <= 1/2 |grad L|^2 in that norm. Default 1e-6 in float32, 1e-9 in float64. What float32
    cannot solve is solved again in float64. On a CPU so many episodes are solved at a time as have `chunk` dual
    numbers: enough to hide the cost of calls, few enough to stay in the cache; very few are solved one by one, in
    float64 (`single`).
    """

    tolerance: float | None = None
    max_steps: int = 100
    inner_steps: int = 50
    chunk: int = 2**16

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if not isinstance(objective, SoftmaxRegression):
            raise TypeError(f"DualNewton solves SoftmaxRegression, not {type(objective).__name__}: use LBFGS()")
        if few(args.features):
            return self._one_by_one(args)
        count = args.features.shape[0]
        size = max(count, 1)
        if args.features.device.type == "cpu":
            size = max(1, self.chunk // (args.labels.shape[1] * args.centres.shape[-2]))
        parts = [self._solve(_slice(args, start, size)) for start in range(0, count, size)]
        found = parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts, strict=True))
        failed = ~found[1]
        if args.features.dtype != torch.float64 and bool(failed.any()) and bool(args.precisions.min() > 0):
            # Kernels of condition 1e8 (large features, weak pull, near-duplicate rows of different classes).
            rows = failed.nonzero()[:, 0]
            hard = Regression(*(a.double() if a.is_floating_point() else a for a in objective.take(args, rows)))
            again = replace(self, tolerance=self.tolerance or 1e-6)._solve(hard)
            found = tuple(a.index_copy(0, rows, b.to(a.dtype)) for a, b in zip(found, again, strict=True))
        return Outcome(*found)

    def _solve(self, args: Regression) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, labels, rest, centres, precisions = args
        dtype = x.dtype
        tolerance = relative_tolerance(self.tolerance, dtype, 1e-6, 1e-9)
        inverse_p = 1 / floored(precisions)
        k = kernel(x, inverse_p)  # [E, S, S]
        f = start = scores(centres, x)  # [E, N, S]
        episodes, ways, size = f.shape
        target = indicator(labels, ways, dtype) / size
        a = torch.zeros_like(f)  # the dual numbers
        pi = probabilities(f, rest)
        r = pi / size - target  # the representer of the gradient: grad L = r X
        steps = torch.zeros(episodes, dtype=torch.long, device=x.device)
        r_image = r @ k
        first = length = best = dot(r, r_image)  # squared norms in the metric
        # A start that is already a solution up to rounding has no gradient to shrink.
        goal = tolerance**2 * torch.maximum(first, torch.finfo(dtype).eps ** 2 * dot(target, target @ k))
        active = length > goal
        idle = torch.zeros_like(steps)
        eps, largest, zero = torch.finfo(dtype).eps, k.abs().amax((1, 2)), k.new_zeros(())
        for step in range(self.max_steps):
            if not bool(active.any()):
                break
            # Superlinear forcing; the first direction is the gradient, for the Hessian at the centres says little.
            force = 0.3 * (3 * (length / first).clamp(0, 1).pow(0.25)).clamp_max(1)
            shares = pi / size
            s, s_image, _ = conjugate_gradient(
                lambda p, image, pi=pi, shares=shares: p + weigh(pi, shares, image),  # type: ignore[misc]
                lambda residual: residual @ k,
                -r,
                -r_image,
                force,
                self.inner_steps if step else 1,
                active,
            )
            t, pi = _line_search(f, rest, pi, s, s_image, dot(a - target, s_image), dot(r, s_image), active)
            t = column(torch.where(active, t, zero), f)
            a = torch.addcmul(a, t, s)
            f = torch.addcmul(f, t, s_image)
            r = pi / size + a - target
            r_image = r @ k
            length = dot(r, r_image)
            steps += active
            active = active & (length > goal)
            if step >= 8:
                # Rounding may end progress before the tolerance does: three steps that neither shrink the gradient nor
                # move a score by more than its rounding are enough. (Early on the gradient may grow while L falls.)
                rounding = 4 * eps * largest * a.abs().sum(2).amax(1)
                still = t[:, 0, 0] * s_image.abs().amax((1, 2)) <= rounding
                idle = (idle + 1) * (still & (length >= 0.25 * best))
                best = torch.minimum(best, length)
                active = active & (idle < 3)
        # The scores were added up step by step. What counts is where the dual numbers are, so look at it afresh.
        v, r, norm, value = _at(a, k, start, target, inverse_p, args)
        sound = dot(r, r @ k) <= torch.maximum(1e4 * goal, 1e-8 * first)
        return v, (length <= goal) & sound, steps, norm, value

    def _one_by_one(self, given: Regression) -> Outcome:
        tolerance = relative_tolerance(self.tolerance, given.features.dtype, 1e-6, 1e-9)
        args = doubled(given)
        x = args.features
        inverse_p = 1 / floored(args.precisions)
        k, start = kernel(x, inverse_p), scores(args.centres, x)
        target = indicator(args.labels, start.shape[1], x.dtype) / x.shape[1]
        numbers = zip(*(y.numpy() for y in (k, start, args.rest, target)), strict=True)
        found = [newton(self, tolerance, *episode) for episode in numbers]
        a, converged, steps = zip(*found, strict=True)
        v, _, norm, value = _at(torch.from_numpy(np.stack(a)), k, start, target, inverse_p, args)
        dtype = given.features.dtype
        return Outcome(v.to(dtype), torch.tensor(converged), torch.tensor(steps), norm.to(dtype), value.to(dtype))


def _at(
    a: Tensor, k: Tensor, start: Tensor, target: Tensor, inverse_p: Tensor, args: Regression
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V [E, N, D+1] for dual numbers a [E, N, S]; the representer r of the gradient there, its norm, and L."""
    x, labels, rest, centres, _ = args
    ways, size = a.shape[1:]
    a_image = a @ k
    f = start + a_image
    r = probabilities(f, rest) / size + a - target
    both, ones = torch.cat([a, r], 1) @ x, r.sum(2)  # [E, 2N, D]: one pass over the features for V and the gradient
    v = torch.addcmul(centres, torch.cat([both[:, :ways], a.sum(2, keepdim=True)], 2), inverse_p)  # [E, N, D+1]
    norm = (both[:, ways:].square().sum((1, 2)) + ones.square().sum(1)).sqrt()
    value = cross_entropy(f, rest, labels).mean(1) + dot(a, a_image) / 2
    return v, r, norm, value


def _slice(args: Tree, start: int, size: int) -> Regression:
    x, labels, rest, centres, precisions = args
    part = slice(start, start + size)
    if start == 0 and size >= x.shape[0]:
        return Regression(*args)
    return Regression(x[part], labels[part], rest[part], per_episode(centres, part, 3), precisions)


def _line_search(
    f: Tensor,
    rest: Tensor,
    pi: Tensor,
    s: Tensor,
    s_image: Tensor,
    fixed_slope: Tensor,
    slope: Tensor,
    active: Tensor,
    trials: int = 30,
) -> tuple[Tensor, Tensor]:
    """t [E] where the slope along s has fallen to a tenth of what it is at t = 0, and the probabilities there.

    Safeguarded Newton from a step short enough to be safe: along a line the logarithm of the second derivative
    changes at most as fast as the range of the scores' differences (Bach 2010). Where the slope is positive, L may have
    risen: by convexity it has not if g (t - low) <= -g_low low, nor can it over a move in which the curvature is nearly
    constant. Out of trials, the largest step known to descend.
    """
    size = f.shape[2]
    reach = (s_image.amax(1).clamp_min(0) - s_image.amin(1).clamp_max(0)).amax(1)  # [E]
    t = torch.where(reach < 1, torch.ones_like(reach), reach.log1p() / reach)
    curvature_s = dot(s, s_image)
    low, high, g_low = torch.zeros_like(t), torch.full_like(t, torch.inf), torch.zeros_like(t)
    accept = -0.1 * slope
    done, some_done = ~active, not bool(active.all())
    for trial in range(trials + 1):
        moved = probabilities(torch.addcmul(f, column(t, f), s_image), rest)
        pi = torch.where(column(done, f), pi, moved) if some_done else moved
        if trial == trials:
            break
        weighted = pi * s_image
        g = fixed_slope + t * curvature_s + weighted.sum((1, 2)) / size
        done = done | ((g.abs() <= accept) & ((g * (t - low) <= -g_low * low) | (t * reach <= 1)))
        if bool(done.all()):
            break
        some_done = True
        sums = weighted.sum(1)
        h = curvature_s + (dot(weighted, s_image) - dot(sums, sums)) / size
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
    return t, pi
