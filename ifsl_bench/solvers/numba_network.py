"""The tanh network, one episode after the other: the solve, and the solves of its gradients.

See `regression` for what episodes are given, and for what all functions of many episodes have in common, and
`network_space` for the order of the unknowns.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import TINY, Array, helper_jit, kernel_jit
from ifsl_bench.solvers.numba_linear import make_hessian_kernels
from ifsl_bench.solvers.numba_network_space import (
    add_input_weights,
    apply_loss_hessian,
    apply_metric,
    compute_scores_and_loss_gradient,
    escape_saddle,
    make_kernel_matrices,
    search_minimum,
    solve_definite,
    solve_indefinite,
    split_output_weights,
    stack_input_weights,
    width_of_inputs_with_bias,
    write_start_point,
)
from ifsl_bench.solvers.numba_softmax import (
    add_fixed_logit_gradient,
    add_scaled_array,
    append_ones,
    copy_array_into,
    words_to_float64,
)


@kernel_jit
def solve(begin: int, end: int, problems: tuple, starts_and_draws: tuple, options: tuple, out: tuple) -> None:
    """Find a minimum of each episode from `begin` to `end` - 1.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.KernelProblems`.
        starts_and_draws: starts [E, H S + N S + N (H+1)] to search from in dual numbers, or none of them: then from
            fixed functions of the support rows, made of planes [H+N, D] and draws [N, H+1]; a small step off
            saddles; and the spread of the hidden inputs.
        options: the options of `LBFGS`, with tolerance [E].
        out: the minima [E, P]; norm of the gradient, value, steps and whether they are stationary, [E] each.
    """
    x, labels, base_logsumexp, centres, precisions, ways, units = problems
    starts, planes, draws, aside, spread = starts_and_draws
    tolerance, gap, max_steps, history, max_trials, escapes = options
    v, norms, values, steps, converged = out
    size, outer = x.shape[1], ways * (units + 1)
    rank, width = (units + ways) * size, width_of_inputs_with_bias(v.shape[1], units, ways)
    count = rank + outer
    z, workspace, pairs, more = (
        np.empty(count),
        np.empty((8, count)),
        np.empty((4, history, count)),
        np.empty((9, count)),
    )
    act, t, f = np.empty((units + ways, size)), np.empty((units, size)), np.empty((ways, size))
    p, df, w, b = np.empty((ways + 1, size)), np.empty((ways, size)), np.empty((ways, units)), np.empty(ways)
    output, back, scratch = np.empty((ways, units + 1)), np.empty((units, size)), np.empty(size)
    fixed = np.empty(size)
    centre, matrix, start = np.empty(v.shape[1]), np.empty((units + ways, width)), np.empty((units + ways, size))
    wide, moved, dw, db = (
        np.empty((2 * (units + ways), size)), np.empty((units + ways, size)), np.empty((ways, units)), np.empty(ways),
    )  # fmt: skip
    change = np.empty((ways, units + 1))
    for e in range(begin, end):
        rows = append_ones(x[e], width)
        hidden, skip, inverse_2, inverse_3 = make_kernel_matrices(rows, precisions, units, ways)
        gram = np.dot(rows, rows.T) - 1.0
        words_to_float64(centres[e if centres.shape[0] > 1 else 0], centre)
        words_to_float64(base_logsumexp[e], fixed)
        stack_input_weights(centre, units, ways, matrix)
        np.dot(matrix, rows.T, start)
        space = (
            hidden, skip, precisions[:outer], t, p, df, gram, start, centre[:outer], fixed, labels[e], act, f, w, b,
            scratch, back, output,
        )  # fmt: skip
        if starts.shape[0] == 0:
            write_start_point(rows, planes, draws, spread, hidden, skip, z)
        else:
            copy_array_into(starts[e], z)
        good, taken, size_there, value, goal = search_minimum(
            space, z, -1.0, tolerance[e], gap, max_steps, max_trials, aside, pairs, workspace
        )
        if escapes > 0:
            net = (hidden, skip, precisions[:outer], t, p, df, w, wide, moved, change, dw, db, scratch)
            for _ in range(escapes):
                if not good or not escape_saddle(space, net, z, value, aside, more):
                    break
                good, further, size_there, value, _ = search_minimum(
                    space, z, goal, 0.0, gap, max_steps, max_trials, aside, pairs, workspace
                )
                taken += further
        converged[e], steps[e], norms[e], values[e] = good, taken, size_there, value
        np.dot(z[:rank].reshape(units + ways, size), rows, matrix)
        for k in range(units + ways):
            for d in range(width):
                matrix[k, d] *= inverse_2[d] if k < units else inverse_3[d]
        for i in range(outer):
            centre[i] += z[rank + i]
        add_input_weights(matrix, units, ways, centre)
        copy_array_into(centre, v[e])


@helper_jit
def _open_episode(problems: tuple, e: int, centres: Array) -> tuple:
    """Return the data of an episode; `make_hessian_kernels` describes this function and the next ones."""
    x, labels, base_logsumexp, _, precisions, ways, units = problems
    size, both = x.shape[1], units + ways
    width = width_of_inputs_with_bias(precisions.shape[0], units, ways)
    workspace, fixed = np.empty((6 * both, size)), np.empty(size)
    words_to_float64(base_logsumexp[e], fixed)
    return (
        append_ones(x[e], width), fixed, labels[e], centres, precisions, workspace[:both], workspace[both : 2 * both],
        workspace[2 * both : 4 * both], np.empty((units, size)), np.empty((ways, size)), np.empty((ways + 1, size)),
        np.empty((ways, size)), np.empty((ways, units)), np.empty(ways), np.empty((ways, units)), np.empty(ways),
        np.empty((ways, units + 1)), np.empty((both, width)), np.empty(size),
    )  # fmt: skip


@helper_jit
def _write_gradient(data: tuple, v: Array, gradient: Array) -> None:
    """Write the gradient at v, and what `_write_hessian_product` needs of it."""
    rows, base_logsumexp, labels, centres, precisions, act, moved, _, t, f, p, df, w, b, dw, _, _, matrix, scratch = (
        data
    )
    units, ways, size = t.shape[0], f.shape[0], f.shape[1]
    outer = ways * (units + 1)
    stack_input_weights(v, units, ways, matrix)
    np.dot(matrix, rows.T, act)
    split_output_weights(v[:outer].reshape(ways, units + 1), w, b)
    compute_scores_and_loss_gradient(act, w, b, base_logsumexp, labels, t, f, p, df, scratch)
    np.dot(w.T, df, moved[:units])
    flat, flat_t = moved[:units].reshape(-1), t.reshape(-1)
    for i in range(units * size):
        flat[i] *= 1.0 - flat_t[i] * flat_t[i]
    for k in range(ways):
        for i in range(size):
            moved[units + k, i] = df[k, i]
    np.dot(moved, rows, matrix)
    for i in range(v.shape[0]):
        gradient[i] = precisions[i] * (v[i] - centres[i])
    add_input_weights(matrix, units, ways, gradient)
    np.dot(df, t.T, dw)
    for k in range(ways):
        mass = 0.0
        for i in range(size):
            mass += df[k, i]
        for i in range(units):
            gradient[k * (units + 1) + i] += dw[k, i]
        gradient[k * (units + 1) + units] += mass


@helper_jit
def _write_hessian_product(data: tuple, d: Array, out: Array) -> None:
    """Write the Hessian times d."""
    rows, _, _, _, precisions, act, moved, workspace, t, _, p, df, w, _, dw, db, output, matrix, scratch = data
    units, ways = t.shape[0], df.shape[0]
    outer = ways * (units + 1)
    stack_input_weights(d, units, ways, matrix)
    np.dot(matrix, rows.T, act)
    split_output_weights(d[:outer].reshape(ways, units + 1), dw, db)
    apply_loss_hessian(act, dw, db, t, p, df, w, workspace, moved, output, scratch)
    np.dot(moved, rows, matrix)
    for i in range(d.shape[0]):
        out[i] = precisions[i] * d[i]
    add_input_weights(matrix, units, ways, out)
    add_scaled_array(out[:outer], 1.0, output.reshape(-1))


@helper_jit
def _add_base_logsumexp_gradient(data: tuple, out: Array) -> None:
    units, ways = data[8].shape[0], data[9].shape[0]
    add_fixed_logit_gradient(data[10], data[7][2 * units + ways :], out)


neumann_series, largest_eigenvalue, descend, descend_backward = make_hessian_kernels(
    "numba_network", _open_episode, _write_gradient, _write_hessian_product, _add_base_logsumexp_gradient
)


@kernel_jit
def solve_hessian(
    begin: int, end: int, problems: tuple, v: Array, rhs: Array, tolerance: float, max_steps: int, out: tuple
) -> None:
    """Solve H u = rhs, H being the Hessian at v.

    u = P^-1 rhs + P^-1 J^T z with (1 + C' M) z = -C' J P^-1 rhs, by conjugate gradients, or MINRES, in the metric M.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.KernelProblems`.
        v: the unknowns, [E, P].
        rhs: [E, P].
        tolerance: on the residual, relative, in the metric M.
        max_steps: steps of each episode and method.
        out: u [E, P]; the residual, as a bound of u's error relative to u in the norm of the precisions where the
            objective curves as the penalty; the steps, and whether H is indefinite, [E] each.
    """
    x, _, _, _, precisions, ways, units = problems
    u, share, steps, indefinite = out
    size, count = x.shape[1], v.shape[1]
    rank, outer = (units + ways) * size, ways * (units + 1)
    gradient, workspace = np.empty(count), np.empty((7, rank + outer))
    for e in range(begin, end):
        data = _open_episode(problems, e, precisions)  # the centres play no part
        rows, _, _, _, _, act, moved, wide, t, _, p, df, w, _, dw, db, output, matrix, scratch = data
        hidden, skip, inverse_2, inverse_3 = make_kernel_matrices(rows, precisions, units, ways)
        _write_gradient(data, v[e], gradient)
        net = (hidden, skip, precisions[:outer], t, p, df, w, wide, moved, output, dw, db, scratch)
        for i in range(count):
            u[e, i] = rhs[e, i] / precisions[i]
        stack_input_weights(u[e], units, ways, matrix)
        np.dot(matrix, rows.T, act)
        split_output_weights(u[e, :outer].reshape(ways, units + 1), dw, db)
        apply_loss_hessian(act, dw, db, t, p, df, w, wide, moved, output, scratch)
        b, b_image, z, z_image = workspace[0], workspace[1], workspace[2], workspace[3]
        for i in range(rank):
            b[i] = -moved.reshape(-1)[i]
        for i in range(outer):
            b[rank + i] = -output.reshape(-1)[i] / precisions[i]
        first = b.copy()
        apply_metric(net, b, b_image)
        _, steps[e], indefinite[e] = solve_definite(
            net, b, b_image, tolerance, max_steps, True, z, z_image, workspace[4:7]
        )
        if indefinite[e]:
            copy_array_into(first, b)
            apply_metric(net, b, b_image)
            steps[e] += solve_indefinite(net, b, b_image, tolerance, max_steps, z)
        np.dot(z[:rank].reshape(units + ways, size), rows, matrix)
        for k in range(units + ways):
            for d in range(rows.shape[1]):
                matrix[k, d] *= inverse_2[d] if k < units else inverse_3[d]
        add_scaled_array(u[e, :outer], 1.0, z[rank:])
        add_input_weights(matrix, units, ways, u[e])
        _write_hessian_product(data, u[e], gradient)
        wrong, own = 0.0, 0.0
        for i in range(count):
            wrong += (gradient[i] - rhs[e, i]) ** 2 / precisions[i]
            own += precisions[i] * u[e, i] ** 2
        share[e] = math.sqrt(wrong / max(own, TINY))
