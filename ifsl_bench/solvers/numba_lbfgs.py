"""L-BFGS for one problem in a metric; the rules come from `ifsl_bench.solvers.lbfgs`, with the reasons.

`metric(data, z, out)` writes the metric times z. `evaluate(data, z, z_image, gradient)` returns the value, and
`norm(data, gradient)` the length of the gradient in the large form; it is computed last, since most of the time nothing
depends on it.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import EPS, Array, Kernel, helper_jit
from ifsl_bench.solvers.numba_softmax import add_scaled_array, inner_product

SUFFICIENT_DECREASE = 1e-4  # a good step takes off so much of what the slope promised


@helper_jit
def choose_first_step_length(value: float, square: float) -> tuple[float, float]:
    """Return the first step and its unit, by the rules of `ifsl_bench.solvers.lbfgs.choose_first_step_length`.

    Args:
        value: the objective at the start, of one episode.
        square: the squared length of the gradient in the metric.
    """
    t = 1 / max(math.sqrt(max(square, 0.0)), 1.0)
    if 0 < value < SUFFICIENT_DECREASE * t * square:
        return 2 * value / square, 2 * value / square
    return t, 1.0


def make_lbfgs_kernel(metric: Kernel, evaluate: Kernel, norm: Kernel) -> Kernel:
    """Return the method in these coordinates.

    Args:
        metric: `metric(data, z, out)` writes the metric times z.
        evaluate: `evaluate(data, z, z_image, gradient)` returns the value and writes the gradient.
        norm: `norm(data, gradient)` is the length of the gradient in the large form.
    """

    @helper_jit
    def write_direction(pairs: Array, rho: Array, count: int, newest: int, scale: float, g: Array, d: Array) -> None:
        """Write -H g (Nocedal & Wright, Numerical Optimization, algorithm 7.4), with inner products in the metric.

        pairs [4, m, P]: differences of points and gradients, and their products with the metric;
        rho [2, m]: 1 / <s, y>, and a workspace.
        """
        m = pairs.shape[1]
        for i in range(g.shape[0]):
            d[i] = g[i]
        for back in range(count):
            j = (newest - back) % m
            rho[1, j] = rho[0, j] * inner_product(pairs[2, j], d)
            add_scaled_array(d, -rho[1, j], pairs[1, j])
        for i in range(g.shape[0]):
            d[i] *= -scale
        for back in range(count - 1, -1, -1):
            j = (newest - back) % m
            add_scaled_array(d, -(rho[1, j] + rho[0, j] * inner_product(pairs[3, j], d)), pairs[0, j])

    @helper_jit
    def search(
        data: tuple,
        z: Array,
        goal: float,
        tolerance: float,
        gap: float,
        max_steps: int,
        max_trials: int,
        saddle_offset: Array,
        pairs: Array,
        workspace: Array,
    ) -> tuple[bool, int, float, float, float]:
        """Search down from z [P], where the end is written.

        Returns whether that is a stationary point, the accepted steps, the norm of the gradient, the value, and the
        goal: the norm to come down to, tolerance times the first one where it is below 0.

        aside [P]: a small step off a saddle. pairs [4, m, P]; workspace [8, P].
        """
        there, there_image, new_g, new_g_image = workspace[0], workspace[1], workspace[2], workspace[3]
        z_image, g, g_image, d = workspace[4], workspace[5], workspace[6], workspace[7]
        d_image = np.empty(z.shape[0])
        n, m = z.shape[0], pairs.shape[1]
        rho = np.empty((2, m))
        metric(data, z, z_image)
        value = evaluate(data, z, z_image, g)
        size = norm(data, g)
        if size == 0:
            far = 0.0
            for i in range(n):
                far = max(far, abs(z[i]))
            add_scaled_array(z, 1e-3 * (1 + far), saddle_offset)
            metric(data, z, z_image)
            value = evaluate(data, z, z_image, g)
            size = norm(data, g)
        if goal < 0:
            goal = tolerance * size
        steps = trials = late = count = 0
        newest = -1
        converged = False
        if size == 0 or not (math.isfinite(value) and math.isfinite(size)):
            return False, 0, size, value, goal
        metric(data, g, g_image)
        for i in range(n):
            d[i], d_image[i] = -g[i], -g_image[i]
        slope = -inner_product(g, g_image)
        t, unit = choose_first_step_length(value, -slope)
        low, high, scale = 0.0, math.inf, 1.0
        for _ in range(max_steps):
            for i in range(n):
                there[i], there_image[i] = z[i] + t * d[i], z_image[i] + t * d_image[i]
            new_value = evaluate(data, there, there_image, new_g)
            new_slope = inner_product(new_g, d_image)
            # Where rounding hides the decrease, the slope decides (Hager & Zhang 2005, approximate Wolfe conditions).
            hidden = new_value <= value + 16 * EPS * (1 + abs(value)) and new_slope <= -0.8 * slope
            low_enough = (new_value <= value + SUFFICIENT_DECREASE * t * slope or hidden) and math.isfinite(new_slope)
            if not (low_enough and new_slope >= 0.9 * slope):
                trials += 1
                if trials >= max_trials:
                    break
                if low_enough:
                    low = t
                else:
                    high = t
                if high == math.inf:
                    t = 3 * t
                elif low_enough:
                    t = low + 0.5 * (high - low)
                else:
                    above = 2 * (new_value - value - slope * t)
                    parabola = -slope * t * t / above if above != 0 and math.isfinite(above) else low
                    t = min(max(parabola, low + 0.1 * (high - low)), low + 0.6 * (high - low))
                continue
            metric(data, new_g, new_g_image)
            slot = (newest + 1) % m
            s, y, s_image, y_image = pairs[0, slot], pairs[1, slot], pairs[2, slot], pairs[3, slot]
            if count == m:  # the oldest pair is overwritten below
                count = m - 1
            for i in range(n):
                s[i], s_image[i] = t * d[i], t * d_image[i]
                y[i], y_image[i] = new_g[i] - g[i], new_g_image[i] - g_image[i]
                z[i], z_image[i], g[i], g_image[i] = there[i], there_image[i], new_g[i], new_g_image[i]
            curvature, length = inner_product(s, y_image), inner_product(y, y_image)
            if curvature > EPS * unit * length and EPS * unit * length > 0:
                rho[0, slot] = 1 / curvature
                scale = curvature / length
                newest, count = slot, count + 1
            value = new_value
            steps += 1
            t = 1.0 if steps == 1 and unit < 1 else min(2 * t, 1.0)
            trials, low, high = 0, 0.0, math.inf
            write_direction(pairs, rho, count, newest, scale, g, d)
            slope = inner_product(d, g_image)
            square = inner_product(g, g_image)
            if not slope < 0:
                count = 0
                for i in range(n):
                    d[i] = -g[i]
                slope = -square
                t = choose_first_step_length(value, square)[0]
            metric(data, d, d_image)
            if square <= 2 * gap * abs(value):
                size = norm(data, g)
                if size <= goal:
                    late += 1
                    short = 1e-4 * (1 + math.sqrt(max(inner_product(z, z_image), 0.0))) ** 2
                    converged = max(inner_product(d, d_image), 0.0) <= short
                    if converged or late == 50:
                        break
        metric(data, z, z_image)  # images were added up step by step; what counts is where z is
        value = evaluate(data, z, z_image, g)
        size = norm(data, g)
        return converged and size <= 10 * goal, steps, size, value, goal

    return search
