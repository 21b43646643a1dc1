"""One episode at a time, in NumPy and double precision, for the few episodes of a meta-training step on a CPU.

The numbers are few, 25 x 5 and 25 x 45 at five shots. The searches are those of `dual` and `ifsl_bench.solve.lbfgs`,
where the reasons for each rule are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log1p, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.solve.outcome import Outcome, relative_tolerance
from ifsl_bench.solve.single import EPS, Array, inner
from ifsl_bench.solve.tree import doubled

from .dual import at, score_tolerance
from .softmax import TINY, Regression, floored, indicator, kernel, scores


def newton(args: Regression, tolerance: float | None, max_steps: int, inner_steps: int, chunk: int) -> Outcome:
    """See `DualNewton`; `chunk` says nothing here."""
    dtype = args.features.dtype
    args = doubled(args)
    x = args.features
    inverse_p = 1 / floored(args.precisions)
    k, start = kernel(x, inverse_p), scores(args.centres, x)
    target = indicator(args.labels, start.shape[1], x.dtype) / x.shape[1]
    options = relative_tolerance(tolerance, torch.float64, 1e-6, 1e-9), max_steps, inner_steps
    numbers = zip(*(y.numpy() for y in (k, start, args.rest, target)), strict=True)
    a, f, converged, steps, goal = zip(*(_newton(*options, *episode) for episode in numbers), strict=True)
    duals, reached = torch.from_numpy(np.stack(a)), torch.from_numpy(np.stack(f))
    v, norm, value, left, off = at(duals, reached, k, start, inverse_p, args)
    sound = (left <= left.new_tensor(goal)) & (off <= score_tolerance(torch.float64))
    return Outcome(v.to(dtype), torch.tensor(converged) & sound, torch.tensor(steps), norm.to(dtype), value.to(dtype))


def system(k: Tensor, pi: Tensor, b: Tensor, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor]:
    """See `dual.system`."""
    r = -b
    numbers = zip(*(y.numpy() for y in (k, pi, r, r @ k)), strict=True)
    found = [_direction(*episode, tolerance, max_steps) for episode in numbers]  # type: ignore[call-arg]
    return torch.from_numpy(np.stack([w for w, *_ in found])), torch.tensor([steps for *_, steps in found])


def one_by_one(space: Any) -> tuple[Any, list[SingleNetwork]]:
    """A `DualSpace` in float64, and its episodes."""
    exact = space.double()
    return exact, [exact.single(i) for i in range(len(exact.gram))]


def _newton(
    tolerance: float, max_steps: int, inner_steps: int, k: Array, start: Array, rest: Array, target: Array
) -> tuple[Array, Array, bool, int, float]:
    """Dual numbers and scores [N, S] at the optimum, whether they are, the steps it took, and the square of a length
    that the gradient certainly lost; see `DualNewton`.

    k [S, S] the kernel, start [N, S] the scores at the centres, rest [S], target [N, S] labels as zeros and 1/S.
    """
    size, near = target.shape[1], score_tolerance(torch.float64) / 10
    f, a = start, np.zeros_like(start)
    pi = _probabilities(f, rest)
    r = pi / size - target
    r_image = r @ k
    first = length = best = inner(r, r_image)
    largest = float(k.diagonal().max())
    share = tolerance**2 * max(first, EPS**2 * inner(target, target @ k))
    close = near**2 / max(largest, TINY)
    steps = idle = 0
    converged = length <= min(share, close)
    while not converged and steps < max_steps and idle < 3:
        force = 0.3 * min(1.0, 3 * min(length / first, 1.0) ** 0.25)
        s, s_image, left, _ = _direction(k, pi, r, r_image, force, inner_steps if steps else 1)
        t, pi = _line_search(f, rest, pi, s, s_image, inner(a - target, s_image), inner(r, s_image))
        a = a + t * s
        f = f + t * s_image
        r = pi / size + a - target
        r_image = r @ k
        length = inner(r, r_image)
        steps += 1
        moved = t * float(np.abs(s_image).max())
        converged = length <= share and (length <= close or (moved <= near and left <= 0.3))
        if steps > 8:
            rounding = 4 * EPS * largest * float(np.abs(a).sum(1).max())
            still = moved <= rounding
            idle = idle + 1 if still and length >= 0.25 * best else 0
            best = min(best, length)
    return a, f, converged, steps, max(1e4 * share, 1e-8 * first)


def _direction(
    k: Array, pi: Array, r: Array, r_image: Array, tolerance: float, most: int
) -> tuple[Array, Array, float, int]:
    """s and s K [N, S] with (1 + M K) s = -r, the share of r that is left, and the steps it took: conjugate gradients
    in the metric of K [S, S], M being the Hessian of the cross-entropy for probabilities pi [N, S]."""
    shares = pi / pi.shape[1]
    s, s_image = np.zeros_like(r), np.zeros_like(r)
    residual, residual_image = -r, -r_image
    p, p_image = residual, residual_image
    rho = first = inner(residual, residual_image)
    goal, steps = rho * tolerance**2, 0
    while steps < most and rho > 0:
        d = shares * p_image
        h = p + d - shares * (pi * p_image).sum(0)
        curvature = inner(h, p_image)
        if not curvature > 0:
            break
        steps += 1
        length = rho / curvature
        s = s + length * p
        s_image = s_image + length * p_image
        residual = residual - length * h
        residual_image = residual @ k
        new = inner(residual, residual_image)
        ratio, rho = new / rho, new
        if not new > goal:
            break
        p = residual + ratio * p
        p_image = residual_image + ratio * p_image
    return s, s_image, sqrt(abs(rho) / max(first, TINY)), steps


def _line_search(
    f: Array, rest: Array, pi: Array, s: Array, s_image: Array, fixed_slope: float, slope: float, trials: int = 30
) -> tuple[float, Array]:
    """A step length where the slope has fallen to a tenth, and the probabilities there."""
    size = f.shape[1]
    reach = float((np.maximum(s_image.max(0), 0) - np.minimum(s_image.min(0), 0)).max())
    t = 1.0 if reach < 1 else log1p(reach) / reach
    curvature = inner(s, s_image)
    low, high, g_low = 0.0, inf, 0.0
    for trial in range(trials + 1):
        pi = _probabilities(f + t * s_image, rest)
        if trial == trials:
            break
        weighted = pi * s_image
        g = fixed_slope + t * curvature + float(weighted.sum()) / size
        if abs(g) <= -0.1 * slope and (g * (t - low) <= -g_low * low or t * reach <= 1):
            break
        sums = weighted.sum(0)
        h = curvature + (inner(weighted, s_image) - float(sums @ sums)) / size
        low, high, g_low = (t, high, g) if g < 0 else (low, t, g_low)
        new = t - g / h if h else inf
        if trial % 3 == 2 or not low < new < (16 * t if high == inf else high):
            if high == inf:
                new = 4 * t
            elif high < 4 * low:
                new = (low + high) / 2
            else:
                new = sqrt(low * high) if low > 0 else high / 4
        t = low if trial == trials - 1 else new
    return t, pi


def _probabilities(f: Array, rest: Array) -> Array:
    """Softmax over the scores f [N, S] and the fixed class, without the latter."""
    top = np.maximum(f.max(0), rest)
    e = np.exp(f - top)
    return e / (e.sum(0) + np.exp(rest - top))


@dataclass
class SingleNetwork:
    """One episode of a `network_space.DualSpace`: the same coordinates, metric and objective."""

    kernel_2: Array  # [S, S]
    kernel_3: Array  # [S, S]
    gram: Array  # [S, S]
    precision: Array  # [H+1]
    hidden_0: Array  # [H, S]
    skip_0: Array  # [N, S]
    target: Array  # [N, S]
    rest: Array  # [S]
    centres: Array  # [N, H+1]

    def __post_init__(self) -> None:
        h, n, size = len(self.hidden_0), len(self.target), self.target.shape[1]
        self.rows, self.units = h + n, h
        self.end = self.rows * size

    def image(self, z: Array) -> Array:
        """M z."""
        out = np.empty_like(z)
        duals, image = z[: self.end].reshape(self.rows, -1), out[: self.end].reshape(self.rows, -1)
        np.matmul(duals[: self.units], self.kernel_2, out=image[: self.units])
        np.matmul(duals[self.units :], self.kernel_3, out=image[self.units :])
        shape = self.centres.shape
        np.multiply(z[self.end :].reshape(shape), self.precision, out=out[self.end :].reshape(shape))
        return out

    def evaluate(self, z: Array, image: Array) -> tuple[float, Array, float]:
        """Value, gradient [P], and the norm of the gradient in the large form."""
        h, size = self.units, self.target.shape[1]
        activations = image[: self.end].reshape(self.rows, size)
        moved = z[self.end :].reshape(self.centres.shape)
        output = self.centres + moved
        w = output[:, :-1]
        t = np.tanh(self.hidden_0 + activations[:h])  # [H, S]
        f = w @ t + self.skip_0 + activations[h:] + output[:, -1:]  # [N, S]
        top = np.maximum(f.max(0), self.rest)
        f -= top
        e = np.exp(f)
        total = e.sum(0) + np.exp(self.rest - top)
        value = inner(z, image) / 2 - inner(f - np.log(total), self.target)
        df = e / total
        df /= size
        df -= self.target
        g = z.copy()
        duals = g[: self.end].reshape(self.rows, size)
        back = w.T @ df
        back *= 1 - t * t
        duals[:h] += back
        duals[h:] += df
        large = np.empty_like(output)  # the gradient in [W b]
        np.matmul(df, t.T, out=large[:, :-1])
        df.sum(1, out=large[:, -1])
        large += self.precision * moved
        np.divide(large, self.precision, out=g[self.end :].reshape(large.shape))
        ones = duals[:h].sum(1)
        square = inner(duals, duals @ self.gram) + inner(ones, ones) + inner(large, large)
        return value, g, sqrt(max(square, 0.0)) if isfinite(square) else inf
