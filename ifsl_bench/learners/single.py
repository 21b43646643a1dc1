"""One episode at a time, in NumPy and double precision, for the few episodes of a meta-training step on a CPU.

For so few numbers (25 x 5 and 25 x 45 at five shots) a call of torch costs several times what it computes; a call of
NumPy does not. The searches are those of `dual` and `lbfgs`, where the reasons for each rule are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, isfinite, log1p, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ifsl_bench.solve.lbfgs import LBFGS

    from .dual import DualNewton
    from .network_space import DualSpace

Array = np.ndarray[Any, np.dtype[np.float64]]

FEW = 6  # episodes up to which one after the other is faster than all at once, for LR and MLP, at 1 and 5 shots
EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)


def few(like: Tensor, most: int | None = None) -> bool:
    """Whether to solve the episodes of `like` [E, ...] one by one: up to `most`, by default FEW."""
    return like.device.type == "cpu" and 1 <= like.shape[0] <= (FEW if most is None else most)


def aside(z: Tensor) -> Tensor:
    """Small steps [E, P] off z, the same for equal z."""
    draw = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z)
    return 1e-3 * (1 + z.abs().amax(1, keepdim=True)) * draw


def newton(
    solver: DualNewton, tolerance: float, near: float, k: Array, start: Array, rest: Array, target: Array
) -> tuple[Array, Array, bool, int, float]:
    """Dual numbers and scores [N, S] at the optimum, whether they are, the steps it took, and the square of a length
    that the gradient certainly lost; see `DualNewton`.

    near: a Newton step that moves no score further is the last one; k [S, S] the kernel, start [N, S] the scores at the
    centres, rest [S], target [N, S] labels as zeros and 1/S.
    """
    size = target.shape[1]
    f, a = start, np.zeros_like(start)
    pi = _probabilities(f, rest)
    r = pi / size - target
    r_image = r @ k
    first = length = best = _dot(r, r_image)
    largest = float(k.diagonal().max())
    share = tolerance**2 * max(first, EPS**2 * _dot(target, target @ k))
    close = near**2 / max(largest, TINY)
    steps = idle = 0
    converged = length <= min(share, close)
    while not converged and steps < solver.max_steps and idle < 3:
        force = 0.3 * min(1.0, 3 * min(length / first, 1.0) ** 0.25)
        s, s_image, left, _ = newton_direction(k, pi, r, r_image, force, solver.inner_steps if steps else 1)
        t, pi = _line_search(f, rest, pi, s, s_image, _dot(a - target, s_image), _dot(r, s_image))
        a = a + t * s
        f = f + t * s_image
        r = pi / size + a - target
        r_image = r @ k
        length = _dot(r, r_image)
        steps += 1
        moved = t * float(np.abs(s_image).max())
        converged = length <= share and (length <= close or (moved <= near and left <= 0.3))
        if steps > 8:
            rounding = 4 * EPS * largest * float(np.abs(a).sum(1).max())
            still = moved <= rounding
            idle = idle + 1 if still and length >= 0.25 * best else 0
            best = min(best, length)
    return a, f, converged, steps, max(1e4 * share, 1e-8 * first)


def newton_direction(
    k: Array, pi: Array, r: Array, r_image: Array, tolerance: float, most: int
) -> tuple[Array, Array, float, int]:
    """s and s K [N, S] with (1 + M K) s = -r, the share of r that is left, and the steps it took: conjugate gradients
    in the metric of K [S, S], M being the Hessian of the cross-entropy for probabilities pi [N, S]."""
    shares = pi / pi.shape[1]
    s, s_image = np.zeros_like(r), np.zeros_like(r)
    residual, residual_image = -r, -r_image
    p, p_image = residual, residual_image
    rho = first = _dot(residual, residual_image)
    goal, steps = rho * tolerance**2, 0
    while steps < most and rho > 0:
        d = shares * p_image
        h = p + d - shares * (pi * p_image).sum(0)
        curvature = _dot(h, p_image)
        if not curvature > 0:
            break
        steps += 1
        length = rho / curvature
        s = s + length * p
        s_image = s_image + length * p_image
        residual = residual - length * h
        residual_image = residual @ k
        new = _dot(residual, residual_image)
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
    curvature = _dot(s, s_image)
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
        h = curvature + (_dot(weighted, s_image) - float(sums @ sums)) / size
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


def _dot(a: Array, b: Array) -> float:
    return float(np.vdot(a, b))


@dataclass
class SingleNetwork:
    """One episode of a `DualSpace`: the same coordinates, metric and objective; all [P] numbers in one array."""

    kernel_2: Array  # [S, S]
    kernel_3: Array  # [S, S]
    gram: Array  # [S, S]
    precision: Array  # [H+1]
    hidden_0: Array  # [H, S]
    skip_0: Array  # [N, S]
    target: Array  # [N, S]
    rest: Array  # [S]
    centres: Array  # [N, H+1]

    @staticmethod
    def of(space: DualSpace, i: int) -> SingleNetwork:
        def one(x: Tensor, *shape: int) -> Array:
            return x[i].numpy() if not shape else x.expand(len(space.gram), *shape)[i].numpy()

        ways = space.objective.ways
        return SingleNetwork(
            one(space.kernel_2), one(space.kernel_3), one(space.gram), (1 / space.inverse_1).numpy(),
            one(space.hidden_0), one(space.skip_0, ways, -1), one(space.target),
            one(space.args.rest), one(space.args.output_centres, ways, -1),
        )  # fmt: skip

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
        value = _dot(z, image) / 2 - _dot(f - np.log(total), self.target)
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
        square = _dot(duals, duals @ self.gram) + _dot(ones, ones) + _dot(large, large)
        return value, g, sqrt(max(square, 0.0)) if isfinite(square) else inf


def lbfgs(solver: LBFGS, tolerance: float, space: SingleNetwork, z: Array) -> tuple[Array, bool, int, float, float]:
    """The point reached, whether it is a minimum, accepted steps, gradient norm in the large form, and value; see
    `LBFGS`, whose rules these are, but one: where half the squared gradient is a small share of the value, the next
    step is short."""
    image = space.image(z)
    value, g, norm = space.evaluate(z, image)
    if norm == 0:
        z = z + aside(torch.from_numpy(z)[None])[0].numpy()
        image = space.image(z)
        value, g, norm = space.evaluate(z, image)
    goal = tolerance * norm
    steps = trials = 0
    if norm == 0 or not (isfinite(value) and isfinite(norm)):
        return z, False, steps, norm, value
    g_image = space.image(g)
    d, d_image, slope = -g, -g_image, -_dot(g, g_image)
    t, low, high = 1 / max(sqrt(max(-slope, 0.0)), 1.0), 0.0, inf
    pairs: deque[tuple[Array, Array, Array, Array, float]] = deque(maxlen=solver.history)
    scale = 1.0
    for _ in range(solver.max_steps):
        step, step_image = t * d, t * d_image
        there, there_image = z + step, image + step_image
        new_value, new_g, new_norm = space.evaluate(there, there_image)
        new_slope = _dot(new_g, d_image)
        near = new_value <= value + 16 * EPS * (1 + abs(value)) and new_slope <= -0.8 * slope
        low_enough = (new_value <= value + 1e-4 * t * slope or near) and isfinite(new_norm)
        if not (low_enough and new_slope >= 0.9 * slope):
            trials += 1
            if trials >= solver.max_trials:
                break
            low, high = (t, high) if low_enough else (low, t)
            if high == inf:
                t = 3 * t
            elif low_enough:
                t = low + 0.5 * (high - low)
            else:
                above = 2 * (new_value - value - slope * t)
                parabola = -slope * t**2 / above if above and isfinite(above) else low
                t = min(max(parabola, low + 0.1 * (high - low)), low + 0.6 * (high - low))
            continue
        new_g_image = space.image(new_g)
        y, y_image = new_g - g, new_g_image - g_image
        curvature, length = _dot(step, y_image), _dot(y, y_image)
        if curvature > EPS * length > 0:
            pairs.append((step, y, step_image, y_image, 1 / curvature))
            scale = curvature / length
        z, image, value, norm, g, g_image = there, there_image, new_value, new_norm, new_g, new_g_image
        steps += 1
        trials, low, high, t = 0, 0.0, inf, min(2 * t, 1.0)
        d = _two_loops(pairs, scale, g)
        slope = _dot(d, g_image)
        if not slope < 0:
            pairs.clear()
            d, slope = -g, -_dot(g, g_image)
            t = 1 / max(sqrt(max(-slope, 0.0)), 1.0)
        d_image = space.image(d)
        if norm <= goal and _dot(g, g_image) <= 2 * solver.gap * abs(value):
            value, _, norm = space.evaluate(z, space.image(z))  # images were added up step by step
            return z, norm <= 10 * goal, steps, norm, value
    return z, False, steps, norm, value


def _two_loops(pairs: deque[tuple[Array, Array, Array, Array, float]], scale: float, g: Array) -> Array:
    """-H g (Nocedal & Wright, Numerical Optimization, algorithm 7.4), inner products being those of the metric."""
    q, shares = g.copy(), []
    for _, y, s_image, _, rho in reversed(pairs):
        shares.append(share := rho * _dot(s_image, q))
        q -= share * y
    q *= -scale
    for (s, _, _, y_image, rho), share in zip(pairs, reversed(shares), strict=True):
        q -= (share + rho * _dot(y_image, q)) * s
    return q
