"""Linear systems with an operator that is self-adjoint in a metric, and what else a Hessian product gives.

The rules come from `ifsl_bench.solvers.linear`. In the Krylov methods `apply(data, d, d_image, out)` is the operator
and `metric(data, d, out)` the metric, on flat arrays [P]; data is whatever these two need.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ifsl_bench.solvers.numba_compiling import EPS, TINY, Array, Kernel, helper_jit, inline_jit, kernel_jit
from ifsl_bench.solvers.numba_softmax import add_scaled_array, copy_array_into, inner_product, words_to_float64


def make_krylov_methods(apply: Kernel, metric: Kernel) -> tuple[Kernel, Kernel]:
    """Return conjugate gradients and MINRES with this operator and this metric.

    Args:
        apply: `apply(data, d, d_image, out)` writes the operator times d.
        metric: `metric(data, d, out)` writes the metric times d.
    """

    @inline_jit
    def conjugate_gradient(
        data: Any,
        rhs: Array,
        rhs_image: Array,
        tolerance: float,
        most: int,
        watch: bool,
        x: Array,
        x_image: Array,
        workspace: Array,
    ) -> tuple[float, int, bool]:
        """Solve A x = rhs for x and its image.

        Returns the share of rhs that is left, the steps, and whether A curves downwards.

        Afterwards rhs and its image hold the residual, and the first row of the workspace [3, P] the latest
        direction, along which A curves downwards if it does. watch: look for that.
        """
        d, d_image, h = workspace[0], workspace[1], workspace[2]
        n = rhs.shape[0]
        for i in range(n):
            x[i], x_image[i] = 0.0, 0.0
            d[i], d_image[i] = rhs[i], rhs_image[i]
        rho = first = inner_product(rhs, rhs_image)
        goal = rho * tolerance**2
        steps, size = 0, 0.0
        while steps < most and rho > 0:
            apply(data, d, d_image, h)
            curvature = inner_product(h, d_image)
            if watch:
                # Beyond what its rounding could be; and where A is semidefinite, zero means that A d is zero too.
                own, square = inner_product(h, h), inner_product(d, d)
                size = max(size, own / max(square, TINY))  # of A, squared, from below
                noise = 4 * EPS * math.sqrt(size * square * inner_product(d_image, d_image))
                if curvature < -noise or (curvature <= noise and own > 64 * EPS * size * square):
                    return math.sqrt(abs(rho) / max(first, TINY)), steps, True
            if not curvature > 0:
                break
            steps += 1
            length = rho / curvature
            for i in range(n):
                x[i] += length * d[i]
                x_image[i] += length * d_image[i]
                rhs[i] -= length * h[i]
            metric(data, rhs, rhs_image)
            new = inner_product(rhs, rhs_image)
            ratio = new / rho
            rho = new
            if not new > goal:
                break
            for i in range(n):
                d[i] = rhs[i] + ratio * d[i]
                d_image[i] = rhs_image[i] + ratio * d_image[i]
        return math.sqrt(abs(rho) / max(first, TINY)), steps, False

    @inline_jit
    def minres(data: Any, rhs: Array, rhs_image: Array, tolerance: float, most: int, x: Array) -> int:
        """Solve for x with A x = rhs, A definite or not, and return the steps (Paige & Saunders 1975)."""
        n = rhs.shape[0]
        workspace = np.zeros((8, n))
        w, w_before, v, v_before, v_image, h, h_image = (
            workspace[0],
            workspace[1],
            workspace[2],
            workspace[3],
            workspace[4],
            workspace[5],
            workspace[6],
        )
        beta = math.sqrt(max(inner_product(rhs, rhs_image), 0.0))
        goal, residual, c, s, d, e = tolerance * beta, beta, -1.0, 0.0, 0.0, 0.0
        over = 1.0 / max(beta, TINY)
        for i in range(n):
            x[i] = 0.0
            v[i], v_image[i] = rhs[i] * over, rhs_image[i] * over
        beta, steps = 0.0, 0
        while steps < most and residual > goal:
            # Lanczos: A v = beta v_before + alpha v + beta_next v_next.
            apply(data, v, v_image, h)
            alpha = inner_product(h, v_image)
            for i in range(n):
                h[i] -= alpha * v[i] + beta * v_before[i]
            metric(data, h, h_image)
            beta = math.sqrt(max(inner_product(h, h_image), 0.0))
            # One more column of the tridiagonal matrix, rotated to triangular form.
            above, diagonal = c * d + s * alpha, s * d - c * alpha
            far_above, e, d = e, s * beta, -c * beta
            length = max(math.sqrt(diagonal * diagonal + beta * beta), TINY)
            c, s = diagonal / length, beta / length
            for i in range(n):
                new = (v[i] - far_above * w_before[i] - above * w[i]) / length
                w_before[i], w[i] = w[i], new
                x[i] += c * residual * new
            steps += 1
            residual = s * residual
            over = 1.0 / max(beta, TINY)
            for i in range(n):
                v_before[i], v[i], v_image[i] = v[i], h[i] * over, h_image[i] * over
        return steps

    return conjugate_gradient, minres


def make_hessian_kernels(
    module: str, open_episode: Kernel, write_gradient: Kernel, write_hessian_product: Kernel, add_base_gradient: Kernel
) -> tuple[Kernel, ...]:
    """Return the kernels of a problem that need only these functions.

    They are `neumann_series`, `largest_eigenvalue`, `descend` and `descend_backward`. In all of them `problems`
    are the arguments of `numba_backend.KernelProblems`, v and rhs are [E, P], and results are written to the last
    argument.

    Args:
        module: the name of the problem's module, under which the machine code is stored.
        open_episode: `open_episode(problems, e, centres)`, the data of episode e, for centres [P].
        write_gradient: `write_gradient(data, v, gradient)` writes the gradient at v [P], and leaves in the data
            what `write_hessian_product` needs.
        write_hessian_product: `write_hessian_product(data, d, out)` writes the Hessian times d [P], at
            the v of the last call of `write_gradient`.
        add_base_gradient: `add_base_gradient(data, out)` adds to out [S] the derivative of -<u, gradient> in the fixed
            logits, u being the d of the last call of `write_hessian_product`.
    """

    def neumann_series(
        begin: int, end: int, problems: tuple, v: Array, rhs: Array, steps: int, damping: float, rate: float, out: tuple
    ) -> None:
        """Return the Neumann series u [E, P], and whether it grew [E]; see `ifsl_bench.solvers.linear.Neumann`."""
        u, diverged = out
        n = v.shape[1]
        term, h = np.empty(n), np.empty(n)
        for e in range(begin, end):
            data = open_episode(problems, e, problems[4])  # the centres play no part
            write_gradient(data, v[e], h)
            for i in range(n):
                term[i] = u[e, i] = rhs[e, i]
            before = length = inner_product(term, term)
            for step in range(steps):
                write_hessian_product(data, term, h)
                for i in range(n):
                    term[i] = (1.0 - damping) * term[i] - rate * h[i]
                    u[e, i] += term[i]
                if step >= steps - 2:
                    before, length = length, inner_product(term, term)
            for i in range(n):
                u[e, i] *= rate
            diverged[e] = not math.isfinite(length) or (length > before and steps > 1)

    def largest_eigenvalue(
        begin: int, end: int, problems: tuple, v: Array, start: Array, steps: int, sizes: Array
    ) -> None:
        """Return the largest absolute eigenvalues [E], from below; see `gradient_descent.largest_curvature`."""
        n = v.shape[1]
        d, h = np.empty(n), np.empty(n)
        for e in range(begin, end):
            data = open_episode(problems, e, problems[4])  # the centres play no part
            write_gradient(data, v[e], h)
            copy_array_into(start, d)
            sizes[e] = 1.0
            for _ in range(steps):
                over = 1.0 / max(math.sqrt(inner_product(d, d)), TINY)
                for i in range(n):
                    d[i] *= over
                write_hessian_product(data, d, h)
                # Not d . h: where eigenvalues come as +-lambda, d is a mixture of both and the quotient means nothing.
                sizes[e] = math.sqrt(inner_product(h, h))
                copy_array_into(h, d)

    @helper_jit
    def descend_path(data: tuple, rate: float, path: Array, gradient: Array) -> None:
        """Make gradient steps from the first row of path [steps + 1, P] to the last."""
        for step in range(path.shape[0] - 1):
            write_gradient(data, path[step], gradient)
            for i in range(gradient.shape[0]):
                path[step + 1, i] = path[step, i] - rate * gradient[i]

    def descend(begin: int, end: int, problems: tuple, v: Array, rate: Array, steps: int, ends: Array) -> None:
        """Make `steps` gradient steps of size rate [E] from v to ends, both [E, P]."""
        path, gradient, centre = np.empty((steps + 1, v.shape[1])), np.empty(v.shape[1]), np.empty(v.shape[1])
        for e in range(begin, end):
            words_to_float64(problems[3][e if problems[3].shape[0] > 1 else 0], centre)
            copy_array_into(v[e], path[0])
            descend_path(open_episode(problems, e, centre), rate[e], path, gradient)
            copy_array_into(path[steps], ends[e])

    def descend_backward(
        begin: int, end: int, problems: tuple, v: Array, rate: Array, steps: int, slopes: Array, grads: Array
    ) -> None:
        """Carry cotangents slopes [E, P] of its end back through `descend`.

        grads [E, 3, max(P, S)]: what they are in the centres, in the precisions of each unknown, and in the fixed
        logits [S].
        """
        n, precisions = v.shape[1], problems[4]
        path, workspace, centre = np.empty((steps + 1, n)), np.empty((3, n)), np.empty(n)
        u, h, moved = workspace[0], workspace[1], workspace[2]
        for e in range(begin, end):
            words_to_float64(problems[3][e if problems[3].shape[0] > 1 else 0], centre)
            data = open_episode(problems, e, centre)
            copy_array_into(v[e], path[0])
            descend_path(data, rate[e], path, u)
            slope = slopes[e].copy()
            grads[e] = 0.0
            for back in range(steps - 1, -1, -1):
                write_gradient(data, path[back], moved)
                for i in range(n):
                    u[i] = rate[e] * slope[i]
                    grads[e, 0, i] += precisions[i] * u[i]
                    grads[e, 1, i] += u[i] * (centre[i] - path[back, i])
                write_hessian_product(data, u, h)
                add_base_gradient(data, grads[e, 2])
                add_scaled_array(slope, -1.0, h)

    return tuple(
        kernel_jit(kernel, f"{module}.{kernel.__name__}")
        for kernel in (neumann_series, largest_eigenvalue, descend, descend_backward)
    )
