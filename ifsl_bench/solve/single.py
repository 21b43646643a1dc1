"""L-BFGS for one episode, in NumPy and double precision: the rules are those of `lbfgs`, where the reasons are.

For few numbers a call of torch costs several times what it computes; a call of NumPy does not.
"""

from __future__ import annotations

from collections import deque
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .search import LEAST, aside

Array = np.ndarray[Any, np.dtype[np.float64]]
EPS = float(np.finfo(np.float64).eps)


class SingleSpace(Protocol):
    """One episode of a `space.Space`: z [P]."""

    def image(self, z: Array) -> Array: ...

    def evaluate(self, z: Array, image: Array) -> tuple[float, Array, float]: ...


class Pair(NamedTuple):
    """Differences of points and of gradients, their images, and 1 / <s, y>."""

    s: Array
    y: Array
    s_image: Array
    y_image: Array
    rho: float


def inner(a: Array, b: Array) -> float:
    return float(np.vdot(a, b))


def lbfgs(
    space: SingleSpace, z: Array, tolerance: float, gap: float, max_steps: int, history: int, max_trials: int
) -> tuple[Array, bool, int, float, float]:
    """The point reached from z, whether it is a minimum, accepted steps, gradient norm in the large form, and value."""
    image = space.image(z)
    value, g, norm = space.evaluate(z, image)
    if norm == 0:
        z = z + aside(torch.from_numpy(z)[None])[0].numpy()
        image = space.image(z)
        value, g, norm = space.evaluate(z, image)
    goal = tolerance * norm
    steps = trials = late = 0
    converged = False
    if norm == 0 or not (isfinite(value) and isfinite(norm)):
        return z, False, steps, norm, value
    g_image = space.image(g)
    d, d_image, slope = -g, -g_image, -inner(g, g_image)
    (t, unit), low, high = _first_step(value, -slope), 0.0, inf
    pairs: deque[Pair] = deque(maxlen=history)
    scale = 1.0
    for _ in range(max_steps):
        step, step_image = t * d, t * d_image
        there, there_image = z + step, image + step_image
        new_value, new_g, new_norm = space.evaluate(there, there_image)
        new_slope = inner(new_g, d_image)
        near = new_value <= value + 16 * EPS * (1 + abs(value)) and new_slope <= -0.8 * slope
        low_enough = (new_value <= value + LEAST * t * slope or near) and isfinite(new_norm)
        if not (low_enough and new_slope >= 0.9 * slope):
            trials += 1
            if trials >= max_trials:
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
        curvature, length = inner(step, y_image), inner(y, y_image)
        if curvature > EPS * unit * length > 0:
            pairs.append(Pair(step, y, step_image, y_image, 1 / curvature))
            scale = curvature / length
        z, image, value, norm, g, g_image = there, there_image, new_value, new_norm, new_g, new_g_image
        steps += 1
        trials, low, high, t = 0, 0.0, inf, 1.0 if steps == 1 and unit < 1 else min(2 * t, 1.0)
        d = _two_loops(pairs, scale, g)
        slope = inner(d, g_image)
        if not slope < 0:
            pairs.clear()
            d, slope = -g, -inner(g, g_image)
            t = _first_step(value, -slope)[0]
        d_image = space.image(d)
        if norm <= goal and inner(g, g_image) <= 2 * gap * abs(value):
            late += 1
            converged = max(inner(d, d_image), 0.0) <= 1e-4 * (1 + sqrt(max(inner(z, image), 0.0))) ** 2
            if converged or late == 50:
                break
    if converged:
        value, _, norm = space.evaluate(z, space.image(z))  # images were added up step by step
    return z, converged and norm <= 10 * goal, steps, norm, value


def _first_step(value: float, square: float) -> tuple[float, float]:
    """`search.first_step` for a gradient of that squared length; every single space is penalised."""
    t = 1 / max(sqrt(max(square, 0.0)), 1.0)
    if 0 < value < LEAST * t * square:
        return 2 * value / square, 2 * value / square
    return t, 1.0


def _two_loops(pairs: deque[Pair], scale: float, g: Array) -> Array:
    """-H g (Nocedal & Wright, Numerical Optimization, algorithm 7.4), inner products being those of the metric."""
    q, shares = g.copy(), []
    for _, y, s_image, _, rho in reversed(pairs):
        shares.append(share := rho * inner(s_image, q))
        q -= share * y
    q *= -scale
    for (s, _, _, y_image, rho), share in zip(pairs, reversed(shares), strict=True):
        q -= (share + rho * inner(y_image, q)) * s
    return q
