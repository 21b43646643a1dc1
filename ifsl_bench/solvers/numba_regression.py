"""Softmax regression, one episode after the other: the solve, and the linear solves of its gradients.

The rules come from `ifsl_bench.solvers.dual` and the formulas from docs/solve.md. Everything is computed in
double precision, whatever the precision of the features, and from the support set of one episode alone: its numbers
stay in the cache, no episode waits for another, and none is changed by its neighbours.

An episode's arguments are x [S, D], labels [S], base_logsumexp [S], centres [P] and precisions [P] of the unknowns
V [N, D+1], a flat array of P = N (D+1) numbers. Functions of many episodes have them with a leading dimension E, which
is 1 where all share the centres, and write to their last arguments. There x, base_logsumexp and centres are of either
precision, as `numba_softmax.words_to_float64` reads them.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import EPS, TINY, Array, helper_jit, kernel_jit
from ifsl_bench.solvers.numba_linear import make_hessian_kernels, make_krylov_methods
from ifsl_bench.solvers.numba_softmax import (
    add_fixed_logit_gradient,
    add_scaled_array,
    append_ones,
    apply_cross_entropy_hessian,
    copy_array_into,
    inner_product,
    max_absolute,
    mean_cross_entropy,
    multiply_columns,
    sum_elements,
    words_to_float64,
    write_cross_entropy_gradient,
    write_softmax_with_base,
)

SCORE_TOLERANCE = 1e-6  # a tenth of how far a support score may be from its value at the minimum


@helper_jit
def _apply_newton_operator(system: tuple, d: Array, image: Array, out: Array) -> None:
    """Write (1 + M K) d to out, for image = d K, all flat [N S].

    Args:
        system: K, the probabilities and a workspace [S].
        d: [N S].
        image: d K, [N S].
        out: written to, [N S].
    """
    _, p, scratch = system
    ways, size = p.shape[0] - 1, p.shape[1]
    apply_cross_entropy_hessian(p, image.reshape(ways, size), out.reshape(ways, size), scratch)
    add_scaled_array(out, 1.0, d)


@helper_jit
def _multiply_by_kernel_matrix(system: tuple, d: Array, out: Array) -> None:
    """Write d K to out."""
    k, p, _ = system
    ways, size = p.shape[0] - 1, p.shape[1]
    np.dot(d.reshape(ways, size), k, out.reshape(ways, size))


solve_system, _ = make_krylov_methods(_apply_newton_operator, _multiply_by_kernel_matrix)


@helper_jit
def search_dual_step_length(
    f: Array,
    base_logsumexp: Array,
    labels: Array,
    a: Array,
    d: Array,
    d_image: Array,
    slope: float,
    p: Array,
    moved: Array,
    gains: Array,
    scratch: Array,
) -> float:
    """Return a step length where the slope has fallen to a tenth.

    Args:
        f: scores, [N, S].
        base_logsumexp: [S].
        labels: [S].
        a: dual numbers, [N, S].
        d: the direction, [N, S].
        d_image: d K, [N, S].
        slope: along d, at the start.
        p: written to: the probabilities after the step, [N+1, S].
        moved: written to: the scores after the step, [N, S].
        gains: a workspace, [N+1, S].
        scratch: a workspace, [2, S].
    """
    ways, size = f.shape
    workspace, sums = scratch[0], scratch[1]
    reach = 0.0
    for i in range(size):
        workspace[i], sums[i] = 0.0, 0.0
    for k in range(ways):
        for i in range(size):
            workspace[i] = d_image[k, i] if d_image[k, i] > workspace[i] else workspace[i]
            sums[i] = d_image[k, i] if d_image[k, i] < sums[i] else sums[i]
    for i in range(size):
        reach = max(reach, workspace[i] - sums[i])
    t = 1.0 if reach < 1 else math.log1p(reach) / reach
    fixed_slope, fixed_curvature = (
        inner_product(a.reshape(-1), d_image.reshape(-1)),
        inner_product(d.reshape(-1), d_image.reshape(-1)),
    )
    # How much further the label's score goes than another: what the labels and the probabilities have in common in the
    # slope is gone before it is added up.
    for i in range(size):
        gains[ways, i] = d_image[labels[i], i]
    for k in range(ways):
        for i in range(size):
            gains[k, i] = gains[ways, i] - d_image[k, i]
    low, high, g_low = 0.0, math.inf, 0.0
    for trial in range(31):
        for k in range(ways):
            for i in range(size):
                moved[k, i] = f[k, i] + t * d_image[k, i]
        write_softmax_with_base(moved, base_logsumexp, p, workspace)
        if trial == 30:
            break
        for i in range(size):
            sums[i], workspace[i] = 0.0, 0.0
        for k in range(ways + 1):
            for i in range(size):
                part = p[k, i] * gains[k, i]
                sums[i] += part
                workspace[i] += part * gains[k, i]
        g = fixed_slope + t * fixed_curvature - sum_elements(sums) / size
        if abs(g) <= -0.1 * slope and (g * (t - low) <= -g_low * low or t * reach <= 1):
            break
        h = fixed_curvature + (sum_elements(workspace) - inner_product(sums, sums)) / size
        if g < 0:
            low, g_low = t, g
        else:
            high = t
        new = t - g / h if h != 0 else math.inf
        bound = 16 * t if high == math.inf else high
        if trial % 3 == 2 or not (low < new and new < bound):
            if high == math.inf:
                new = 4 * t
            elif high < 4 * low:
                new = (low + high) / 2
            else:
                new = math.sqrt(low * high) if low > 0 else high / 4
        t = low if trial == 29 else new
    return t


@helper_jit
def solve_by_dual_newton(
    k: Array,
    start: Array,
    base_logsumexp: Array,
    labels: Array,
    tolerance: float,
    max_steps: int,
    inner_steps: int,
    a: Array,
    f: Array,
    p: Array,
) -> tuple[bool, int, float]:
    """Find dual numbers, scores and probabilities at the minimum.

    See `ifsl_bench.solvers.regression.DualNewton`.

    Args:
        k: the kernel K, [S, S].
        start: scores at the centres, [N, S].
        base_logsumexp: [S].
        labels: [S].
        tolerance: on the gradient in the norm of P^-1, relative to its length at the centres.
        max_steps: Newton steps.
        inner_steps: conjugate gradient steps in each of them.
        a: written to: dual numbers, [N, S].
        f: written to: scores, [N, S].
        p: written to: probabilities, [N+1, S].

    Returns:
        Whether they are at the minimum, the steps, and the square of a length that the gradient certainly lost.
    """
    ways, size = start.shape
    workspace, cg = np.empty((6, ways, size)), np.empty((3, ways * size))
    gains, scratch = np.empty((ways + 1, size)), np.empty((2, size))
    r, r_image, s, s_image, moved = workspace[0], workspace[1], workspace[2], workspace[3], workspace[4]
    flat, flat_image, duals, step, step_image = (
        r.reshape(-1),
        r_image.reshape(-1),
        a.reshape(-1),
        s.reshape(-1),
        s_image.reshape(-1),
    )
    minus, minus_image = np.empty(ways * size), np.empty(ways * size)
    system = (k, p, scratch[0])
    for i in range(ways):
        copy_array_into(start[i], f[i])
    duals[:] = 0.0
    write_softmax_with_base(f, base_logsumexp, p, scratch[0])
    write_cross_entropy_gradient(p, labels, r, scratch[0])
    np.dot(r, k, r_image)
    first = length = best = inner_product(flat, flat_image)
    widest, across = 0.0, 0.0
    for i in range(size):
        widest = max(widest, k[i, i])
        for j in range(size):
            if labels[i] == labels[j]:
                across += k[i, j]
    # A start that is already a solution up to rounding has no gradient to shrink.
    share = tolerance**2 * max(first, EPS**2 * across / size**2)
    close = SCORE_TOLERANCE**2 / max(widest, TINY)
    steps = idle = 0
    converged = length <= min(share, close)
    while not converged and steps < max_steps and idle < 3 and math.isfinite(length):
        # Superlinear forcing; the first direction is the gradient: the Hessian at the centres is far from the last.
        force = 0.3 * min(1.0, 3 * min(length / first, 1.0) ** 0.25)
        for i in range(ways * size):
            minus[i], minus_image[i] = -flat[i], -flat_image[i]
        remainder, _, _ = solve_system(
            system, minus, minus_image, force, inner_steps if steps else 1, False, step, step_image, cg
        )
        t = search_dual_step_length(
            f, base_logsumexp, labels, a, s, s_image, inner_product(flat, step_image), p, moved, gains, scratch
        )
        for i in range(ways):
            copy_array_into(moved[i], f[i])
        add_scaled_array(duals, t, step)
        write_cross_entropy_gradient(p, labels, r, scratch[0])
        add_scaled_array(flat, 1.0, duals)
        np.dot(r, k, r_image)
        length = inner_product(flat, flat_image)
        steps += 1
        went = t * max_absolute(step_image)
        converged = length <= share and (length <= close or (went <= SCORE_TOLERANCE and remainder <= 0.3))
        if steps > 8:
            # Rounding may end progress before the tolerance does. (Early on the gradient may grow while L falls.)
            heaviest = 0.0
            for i in range(ways):
                total = 0.0
                for j in range(size):
                    total += abs(a[i, j])
                heaviest = max(heaviest, total)
            still = went <= 4 * EPS * widest * heaviest
            idle = idle + 1 if still and length >= 0.25 * best else 0
            best = min(best, length)
    return converged, steps, max(1e4 * share, 1e-8 * first)


@kernel_jit
def solve(
    begin: int, end: int, problems: tuple, tolerance: float, max_steps: int, inner_steps: int, out: tuple
) -> None:
    """Find the minimum of each episode from `begin` to `end` - 1.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.KernelProblems`.
        tolerance: on the gradient in the norm of P^-1, relative to its length at the centres.
        max_steps: Newton steps of each episode.
        inner_steps: conjugate gradient steps in each of them.
        out: the minima [E, P]; the gradient's norm and the value there, the steps and whether they are minima, [E]
            each.
    """
    x, labels, base_logsumexp, centres, precisions, ways = problems
    v, norm, value, steps, converged = out
    size, features = x.shape[1], precisions.shape[0] // ways
    inverse = 1.0 / precisions[:features]
    a, f, p = np.empty((ways, size)), np.empty((ways, size)), np.empty((ways + 1, size))
    k, image, start, scores = (
        np.empty((size, size)),
        np.empty((ways, size)),
        np.empty((ways, size)),
        np.empty((ways, size)),
    )
    duals, both = np.empty((2 * ways, size)), np.empty((2 * ways, features))
    base_row, two, there = np.empty(size), np.empty(size), np.empty((ways, features))
    for e in range(begin, end):
        rows = append_ones(x[e], features)
        np.dot(multiply_columns(rows, inverse), rows.T, k)
        words_to_float64(centres[e if centres.shape[0] > 1 else 0], there.reshape(-1))
        np.dot(there, rows.T, start)
        words_to_float64(base_logsumexp[e], base_row)
        good, steps[e], goal = solve_by_dual_newton(
            k, start, base_row, labels[e], tolerance, max_steps, inner_steps, a, f, p
        )
        # A search adds its scores up step by step. What counts is where V is, so this looks afresh.
        np.dot(a, k, image)
        for i in range(ways):
            for j in range(size):
                start[i, j] += image[i, j]
        write_softmax_with_base(start, base_row, p, two)
        write_cross_entropy_gradient(p, labels[e], duals[ways:], two)
        for i in range(ways):
            for j in range(size):
                duals[i, j] = a[i, j]
                duals[ways + i, j] += a[i, j]
        np.dot(duals, rows, both)
        square = remainder = 0.0
        for i in range(ways):
            for d in range(features):
                there[i, d] += inverse[d] * both[i, d]
                v[e, i * features + d] = there[i, d]
                square += both[ways + i, d] ** 2
                remainder += both[ways + i, d] ** 2 * inverse[d]
        np.dot(there, rows.T, scores)
        off = far = 0.0
        for i in range(ways):
            for j in range(size):
                off, far = max(off, abs(scores[i, j] - f[i, j])), max(far, abs(a[i, j]))
        loss = mean_cross_entropy(start, base_row, labels[e], p)
        norm[e], value[e] = math.sqrt(square), loss + inner_product(a.reshape(-1), image.reshape(-1)) / 2
        # Infinitely off are dual numbers that no minimum has: there |a| = |target - pi / S| <= 1 / S.
        converged[e] = good and remainder <= goal and off <= 10 * SCORE_TOLERANCE and far <= 2.0 / size


@helper_jit
def _open_episode(problems: tuple, e: int, centres: Array) -> tuple:
    """Return the data of an episode; `make_hessian_kernels` describes this function and the next ones."""
    x, labels, base_logsumexp, _, precisions, ways = problems
    size = x.shape[1]
    wide = np.empty((4, ways, size))  # scores, the misfit, scores of a direction, and these weighed
    fixed = np.empty(size)
    words_to_float64(base_logsumexp[e], fixed)
    rows, p = append_ones(x[e], precisions.shape[0] // ways), np.empty((ways + 1, size))
    return rows, fixed, labels[e], centres, precisions, wide, p, np.empty(size)


@helper_jit
def _write_gradient(data: tuple, v: Array, gradient: Array) -> None:
    """Write the gradient at v, and the probabilities for what follows."""
    rows, base_logsumexp, labels, centres, precisions, wide, p, scratch = data
    ways = wide.shape[1]
    shape = (ways, rows.shape[1])
    np.dot(v.reshape(shape), rows.T, wide[0])
    write_softmax_with_base(wide[0], base_logsumexp, p, scratch)
    write_cross_entropy_gradient(p, labels, wide[1], scratch)
    np.dot(wide[1], rows, gradient.reshape(shape))
    for i in range(v.shape[0]):
        gradient[i] += precisions[i] * (v[i] - centres[i])


@helper_jit
def _write_hessian_product(data: tuple, d: Array, out: Array) -> None:
    """Write the Hessian times d."""
    rows, _, _, _, precisions, wide, p, scratch = data
    shape = (wide.shape[1], rows.shape[1])
    np.dot(d.reshape(shape), rows.T, wide[2])
    apply_cross_entropy_hessian(p, wide[2], wide[3], scratch)
    np.dot(wide[3], rows, out.reshape(shape))
    for i in range(d.shape[0]):
        out[i] += precisions[i] * d[i]


@helper_jit
def _add_base_logsumexp_gradient(data: tuple, out: Array) -> None:
    add_fixed_logit_gradient(data[6], data[5][2], out)


neumann_series, largest_eigenvalue, descend, descend_backward = make_hessian_kernels(
    "numba_regression", _open_episode, _write_gradient, _write_hessian_product, _add_base_logsumexp_gradient
)


@kernel_jit
def solve_hessian(
    begin: int, end: int, problems: tuple, v: Array, rhs: Array, tolerance: float, max_steps: int, out: tuple
) -> None:
    """Solve H u = rhs, H being the Hessian at v.

    u = P^-1 (rhs - X^T w) with (1 + M K) w = M X P^-1 rhs, by conjugate gradients in the metric of K.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.KernelProblems`.
        v: the unknowns, [E, P].
        rhs: [E, P].
        tolerance: on the residual, relative, in the metric of K.
        max_steps: steps of each episode.
        out: u [E, P]; the residual, as a bound of u's error relative to u in the norm of the precisions; the steps, and
            False, since the problem is convex, [E] each.
    """
    x, _, _, _, precisions, ways = problems
    u, share, steps, indefinite = out
    size, features = x.shape[1], precisions.shape[0] // ways
    count = ways * features
    reciprocal = 1.0 / precisions
    k, workspace, slope = np.empty((size, size)), np.empty((5, ways * size)), np.empty(count)
    for e in range(begin, end):
        data = _open_episode(problems, e, precisions)  # the centres play no part
        rows, _, _, _, _, wide, p, scratch = data
        _write_gradient(data, v[e], slope)
        np.dot(multiply_columns(rows, reciprocal[:features]), rows.T, k)
        for i in range(count):
            slope[i] = reciprocal[i] * rhs[e, i]
        np.dot(slope.reshape(ways, features), rows.T, wide[2])
        apply_cross_entropy_hessian(p, wide[2], wide[3], scratch)
        b, b_image, w, w_image = wide[3].reshape(-1), wide[1].reshape(-1), workspace[0], workspace[1]
        system = (k, p, scratch)
        _multiply_by_kernel_matrix(system, b, b_image)
        _, steps[e], _ = solve_system(system, b, b_image, tolerance, max_steps, False, w, w_image, workspace[2:])
        np.dot(w.reshape(ways, size), rows, slope.reshape(ways, features))
        for i in range(count):
            u[e, i] = reciprocal[i] * (rhs[e, i] - slope[i])
        # The residual of H u = rhs bounds u's error.
        np.dot(u[e].reshape(ways, features), rows.T, wide[2])
        apply_cross_entropy_hessian(p, wide[2], wide[3], scratch)
        add_scaled_array(wide[3].reshape(-1), -1.0, w)
        np.dot(wide[3], rows, slope.reshape(ways, features))
        wrong, own = 0.0, 0.0
        for i in range(count):
            wrong += reciprocal[i] * slope[i] ** 2
            own += precisions[i] * u[e, i] ** 2
        share[e], indefinite[e] = math.sqrt(wrong / max(own, TINY)), False
