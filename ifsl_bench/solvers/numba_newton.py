"""Methods on the unknowns as they are, flat arrays [P], of any problem that can say two things of itself.

`at(data, v, gradient)` writes the gradient at v, and leaves in `data` what `product(data, d, out)` needs, which is the
Hessian there.
"""

from __future__ import annotations

import math

from ifsl_bench.solvers.numba_compiling import TINY, Array, Kernel, part
from ifsl_bench.solvers.numba_vectors import add, inner


def neumann(product: Kernel) -> Kernel:
    """See `ifsl_bench.solvers.linear.Neumann`."""

    @part
    def series(data: tuple, rhs: Array, steps: int, damping: float, rate: float, u: Array, room: Array) -> bool:
        """u for the right-hand side; whether the last term is longer than the one before it, or not finite.

        room [2, P].
        """
        term, h = room[0], room[1]
        n = rhs.shape[0]
        for i in range(n):
            term[i] = u[i] = rhs[i]
        before = length = inner(term, term)
        for step in range(steps):
            product(data, term, h)
            for i in range(n):
                term[i] = (1.0 - damping) * term[i] - rate * h[i]
                u[i] += term[i]
            if step >= steps - 2:
                before, length = length, inner(term, term)
        for i in range(n):
            u[i] *= rate
        return not math.isfinite(length) or (length > before and steps > 1)

    return series


def power_iteration(product: Kernel) -> Kernel:
    """See `ifsl_bench.solvers.gradient_descent.largest_curvature`."""

    @part
    def curvature(data: tuple, start: Array, steps: int, room: Array) -> float:
        """An estimate from below of the largest absolute eigenvalue; room [2, P]."""
        d, h = room[0], room[1]
        n = start.shape[0]
        for i in range(n):
            d[i] = start[i]
        size = 1.0
        for _ in range(steps):
            over = 1.0 / max(math.sqrt(inner(d, d)), TINY)
            for i in range(n):
                d[i] *= over
            product(data, d, h)
            # Not d . h: where eigenvalues come as +-lambda, d is a mixture of both and the quotient means nothing.
            size = math.sqrt(inner(h, h))
            for i in range(n):
                d[i] = h[i]
        return size

    return curvature


def descent(at: Kernel) -> Kernel:
    """Gradient steps of a fixed size."""

    @part
    def descend(data: tuple, rate: float, path: Array, gradient: Array) -> None:
        """Descends from the first row of path [steps + 1, P] to the last."""
        for step in range(path.shape[0] - 1):
            at(data, path[step], gradient)
            for i in range(gradient.shape[0]):
                path[step + 1, i] = path[step, i] - rate * gradient[i]

    return descend


def ascent(at: Kernel, product: Kernel, add_base_gradient: Kernel) -> Kernel:
    """Back through gradient steps.

    add_base_gradient(data, out) adds to out [S] what -<u, gradient> changes with the fixed logits, u being what
    `product` was last asked about.
    """

    @part
    def ascend(
        data: tuple,
        rate: float,
        path: Array,
        slope: Array,
        centres: Array,
        precisions: Array,
        grads: Array,
        room: Array,
    ) -> None:
        """slope [P], a cotangent of the last row of the path [steps + 1, P], becomes one of the first.

        grads [3, max(P, S)]: what it is in the centres, in the precisions of each unknown, and in the fixed logits [S].
        room [3, P].
        """
        u, h, moved = room[0], room[1], room[2]
        n = slope.shape[0]
        grads[:] = 0.0
        for back in range(path.shape[0] - 2, -1, -1):
            v = path[back]
            at(data, v, moved)
            for i in range(n):
                u[i] = rate * slope[i]
                grads[0, i] += precisions[i] * u[i]
                grads[1, i] += u[i] * (centres[i] - v[i])
            product(data, u, h)
            add_base_gradient(data, grads[2])
            add(slope, -1.0, h)

    return ascend
