"""The tanh network, one episode after the other: the solve, and the solves of its gradients.

See `regression` for what episodes are given, and for what all functions of many episodes have in common, and
`network_space` for the order of the unknowns.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import TINY, Array, compiled, part
from ifsl_bench.solvers.numba_linear import hessian_kernels
from ifsl_bench.solvers.numba_network_space import (
    add_stacked,
    begin_at,
    below,
    curve,
    forward,
    kernels,
    metric,
    search,
    solve_definite,
    solve_indefinite,
    split,
    stacked,
    width_of,
)
from ifsl_bench.solvers.numba_softmax import add, add_base_gradient_of, doubled, put, rows_of


@compiled
def solve(begin: int, end: int, problems: tuple, start_from: tuple, options: tuple, out: tuple) -> None:
    """Find a minimum of each episode from `begin` to `end` - 1.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.Problems`.
        start_from: starts [E, H S + N S + N (H+1)] to search from in dual numbers, or none of them: then from fixed
            functions of the support rows, made of planes [H+N, D] and draws [N, H+1]; a small step off saddles; and the
            spread of the hidden inputs.
        options: the options of `LBFGS`, with tolerance [E].
        out: the minima [E, P]; norm of the gradient, value, steps and whether they are stationary, [E] each.
    """
    x, labels, base_logsumexp, centres, precisions, ways, units = problems
    starts, planes, draws, aside, spread = start_from
    tolerance, gap, max_steps, history, max_trials, escapes = options
    v, norms, values, steps, converged = out
    size, outer = x.shape[1], ways * (units + 1)
    rank, width = (units + ways) * size, width_of(v.shape[1], units, ways)
    count = rank + outer
    z, room, pairs, more = np.empty(count), np.empty((8, count)), np.empty((4, history, count)), np.empty((9, count))
    act, t, f = np.empty((units + ways, size)), np.empty((units, size)), np.empty((ways, size))
    p, df, w, b = np.empty((ways + 1, size)), np.empty((ways, size)), np.empty((ways, units)), np.empty(ways)
    output, back, spare = np.empty((ways, units + 1)), np.empty((units, size)), np.empty(size)
    fixed = np.empty(size)
    centre, matrix, start = np.empty(v.shape[1]), np.empty((units + ways, width)), np.empty((units + ways, size))
    wide, moved, dw, db = (
        np.empty((2 * (units + ways), size)), np.empty((units + ways, size)), np.empty((ways, units)), np.empty(ways),
    )  # fmt: skip
    change = np.empty((ways, units + 1))
    for e in range(begin, end):
        rows = rows_of(x[e], width)
        hidden, skip, inverse_2, inverse_3 = kernels(rows, precisions, units, ways)
        gram = np.dot(rows, rows.T) - 1.0
        doubled(centres[e if centres.shape[0] > 1 else 0], centre)
        doubled(base_logsumexp[e], fixed)
        stacked(centre, units, ways, matrix)
        np.dot(matrix, rows.T, start)
        space = (
            hidden, skip, precisions[:outer], t, p, df, gram, start, centre[:outer], fixed, labels[e], act, f, w, b,
            spare, back, output,
        )  # fmt: skip
        if starts.shape[0] == 0:
            begin_at(rows, planes, draws, spread, hidden, skip, z)
        else:
            put(starts[e], z)
        good, taken, size_there, value, goal = search(
            space, z, -1.0, tolerance[e], gap, max_steps, max_trials, aside, pairs, room
        )
        if escapes > 0:
            net = (hidden, skip, precisions[:outer], t, p, df, w, wide, moved, change, dw, db, spare)
            for _ in range(escapes):
                if not good or not below(space, net, z, value, aside, more):
                    break
                good, further, size_there, value, _ = search(
                    space, z, goal, 0.0, gap, max_steps, max_trials, aside, pairs, room
                )
                taken += further
        converged[e], steps[e], norms[e], values[e] = good, taken, size_there, value
        np.dot(z[:rank].reshape(units + ways, size), rows, matrix)
        for k in range(units + ways):
            for d in range(width):
                matrix[k, d] *= inverse_2[d] if k < units else inverse_3[d]
        for i in range(outer):
            centre[i] += z[rank + i]
        add_stacked(matrix, units, ways, centre)
        put(centre, v[e])


@part
def _opened(problems: tuple, e: int, centres: Array) -> tuple:
    """Return the data of an episode; `hessian_kernels` describes this function and the next ones."""
    x, labels, base_logsumexp, _, precisions, ways, units = problems
    size, both = x.shape[1], units + ways
    width = width_of(precisions.shape[0], units, ways)
    room, fixed = np.empty((6 * both, size)), np.empty(size)
    doubled(base_logsumexp[e], fixed)
    return (
        rows_of(x[e], width), fixed, labels[e], centres, precisions, room[:both], room[both : 2 * both],
        room[2 * both : 4 * both], np.empty((units, size)), np.empty((ways, size)), np.empty((ways + 1, size)),
        np.empty((ways, size)), np.empty((ways, units)), np.empty(ways), np.empty((ways, units)), np.empty(ways),
        np.empty((ways, units + 1)), np.empty((both, width)), np.empty(size),
    )  # fmt: skip


@part
def _at(data: tuple, v: Array, gradient: Array) -> None:
    """Write the gradient at v, and what `product` needs of it."""
    rows, base_logsumexp, labels, centres, precisions, act, moved, _, t, f, p, df, w, b, dw, _, _, matrix, spare = data
    units, ways, size = t.shape[0], f.shape[0], f.shape[1]
    outer = ways * (units + 1)
    stacked(v, units, ways, matrix)
    np.dot(matrix, rows.T, act)
    split(v[:outer].reshape(ways, units + 1), w, b)
    forward(act, w, b, base_logsumexp, labels, t, f, p, df, spare)
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
    add_stacked(matrix, units, ways, gradient)
    np.dot(df, t.T, dw)
    for k in range(ways):
        mass = 0.0
        for i in range(size):
            mass += df[k, i]
        for i in range(units):
            gradient[k * (units + 1) + i] += dw[k, i]
        gradient[k * (units + 1) + units] += mass


@part
def _product(data: tuple, d: Array, out: Array) -> None:
    """Write the Hessian times d."""
    rows, _, _, _, precisions, act, moved, room, t, _, p, df, w, _, dw, db, output, matrix, spare = data
    units, ways = t.shape[0], df.shape[0]
    outer = ways * (units + 1)
    stacked(d, units, ways, matrix)
    np.dot(matrix, rows.T, act)
    split(d[:outer].reshape(ways, units + 1), dw, db)
    curve(act, dw, db, t, p, df, w, room, moved, output, spare)
    np.dot(moved, rows, matrix)
    for i in range(d.shape[0]):
        out[i] = precisions[i] * d[i]
    add_stacked(matrix, units, ways, out)
    add(out[:outer], 1.0, output.reshape(-1))


@part
def _add_base_gradient(data: tuple, out: Array) -> None:
    units, ways = data[8].shape[0], data[9].shape[0]
    add_base_gradient_of(data[10], data[7][2 * units + ways :], out)


series, curvature, descend, ascend = hessian_kernels("numba_network", _opened, _at, _product, _add_base_gradient)


@compiled
def inverse(
    begin: int, end: int, problems: tuple, v: Array, rhs: Array, tolerance: float, most: int, out: tuple
) -> None:
    """Solve H u = rhs, H being the Hessian at v.

    u = P^-1 rhs + P^-1 J^T z with (1 + C' M) z = -C' J P^-1 rhs, by conjugate gradients, or MINRES, in the metric M.

    Args:
        begin: the first episode.
        end: the one after the last.
        problems: the arguments of `numba_backend.Problems`.
        v: the unknowns, [E, P].
        rhs: [E, P].
        tolerance: on the residual, relative, in the metric M.
        most: steps of each episode and method.
        out: u [E, P]; the residual, as a bound of u's error relative to u in the norm of the precisions where the
            objective curves as the penalty; the steps, and whether H is indefinite, [E] each.
    """
    x, _, _, _, precisions, ways, units = problems
    u, share, steps, indefinite = out
    size, count = x.shape[1], v.shape[1]
    rank, outer = (units + ways) * size, ways * (units + 1)
    gradient, room = np.empty(count), np.empty((7, rank + outer))
    for e in range(begin, end):
        data = _opened(problems, e, precisions)  # the centres play no part
        rows, _, _, _, _, act, moved, wide, t, _, p, df, w, _, dw, db, output, matrix, spare = data
        hidden, skip, inverse_2, inverse_3 = kernels(rows, precisions, units, ways)
        _at(data, v[e], gradient)
        net = (hidden, skip, precisions[:outer], t, p, df, w, wide, moved, output, dw, db, spare)
        for i in range(count):
            u[e, i] = rhs[e, i] / precisions[i]
        stacked(u[e], units, ways, matrix)
        np.dot(matrix, rows.T, act)
        split(u[e, :outer].reshape(ways, units + 1), dw, db)
        curve(act, dw, db, t, p, df, w, wide, moved, output, spare)
        b, b_image, z, z_image = room[0], room[1], room[2], room[3]
        for i in range(rank):
            b[i] = -moved.reshape(-1)[i]
        for i in range(outer):
            b[rank + i] = -output.reshape(-1)[i] / precisions[i]
        first = b.copy()
        metric(net, b, b_image)
        _, steps[e], indefinite[e] = solve_definite(net, b, b_image, tolerance, most, True, z, z_image, room[4:7])
        if indefinite[e]:
            put(first, b)
            metric(net, b, b_image)
            steps[e] += solve_indefinite(net, b, b_image, tolerance, most, z)
        np.dot(z[:rank].reshape(units + ways, size), rows, matrix)
        for k in range(units + ways):
            for d in range(rows.shape[1]):
                matrix[k, d] *= inverse_2[d] if k < units else inverse_3[d]
        add(u[e, :outer], 1.0, z[rank:])
        add_stacked(matrix, units, ways, u[e])
        _product(data, u[e], gradient)
        wrong, own = 0.0, 0.0
        for i in range(count):
            wrong += (gradient[i] - rhs[e, i]) ** 2 / precisions[i]
            own += precisions[i] * u[e, i] ** 2
        share[e] = math.sqrt(wrong / max(own, TINY))
