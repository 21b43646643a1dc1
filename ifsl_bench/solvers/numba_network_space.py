"""One episode of the tanh network in dual numbers: the coordinates its search and its linear solves run in.

The formulas stand in docs/solve.md, the rules in `ifsl_bench.solvers.network_space`. The unknowns themselves
are a flat array of P numbers: W and b [N, H+1], W_3 [N, D], W_2 and b_2 [H, D+1]. Inside, W_2 and W_3 are one matrix
[H+N, D+1], W_3 with a last column of zeros: activations are one product.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import TINY, Array, helper_jit
from ifsl_bench.solvers.numba_lbfgs import make_lbfgs_kernel
from ifsl_bench.solvers.numba_linear import make_krylov_methods
from ifsl_bench.solvers.numba_softmax import (
    add_scaled_array,
    apply_cross_entropy_hessian,
    copy_array_into,
    inner_product,
    mean_cross_entropy,
    multiply_columns,
    write_cross_entropy_gradient,
    write_softmax_with_base,
    write_tanh,
)

ESCAPE_LENGTHS = (
    4.0,
    1.0,
    0.25,
    2.0**-4,
    2.0**-6,
    2.0**-8,
    2.0**-10,
    2.0**-12,
)  # as in `ifsl_bench.solvers.coordinates`
MAX_ESCAPE_PRODUCTS = 200


@helper_jit
def width_of_inputs_with_bias(n_unknowns: int, units: int, ways: int) -> int:
    """Return D + 1 from the number of unknowns.

    The output has N (H + 1) of them, the skip N D and the hidden layer H (D + 1).

    Args:
        n_unknowns: P.
        units: H.
        ways: N.
    """
    return (n_unknowns - ways * units) // (units + ways)


@helper_jit
def stack_input_weights(flat: Array, units: int, ways: int, out: Array) -> None:
    """Write W_2, b_2 and W_3 of a flat array to one matrix.

    Args:
        flat: the unknowns, [P].
        units: H.
        ways: N.
        out: written to, [H+N, D+1].
    """
    width = out.shape[1]
    skip, hidden = ways * (units + 1), ways * (units + width)
    for i in range(units):
        for d in range(width):
            out[i, d] = flat[hidden + i * width + d]
    for k in range(ways):
        for d in range(width - 1):
            out[units + k, d] = flat[skip + k * (width - 1) + d]
        out[units + k, width - 1] = 0.0


@helper_jit
def add_input_weights(matrix: Array, units: int, ways: int, flat: Array) -> None:
    """Add a matrix to W_2, b_2 and W_3 in a flat array.

    Args:
        matrix: [H+N, D+1].
        units: H.
        ways: N.
        flat: the unknowns, [P]; added to.
    """
    width = matrix.shape[1]
    skip, hidden = ways * (units + 1), ways * (units + width)
    for i in range(units):
        for d in range(width):
            flat[hidden + i * width + d] += matrix[i, d]
    for k in range(ways):
        for d in range(width - 1):
            flat[skip + k * (width - 1) + d] += matrix[units + k, d]


@helper_jit
def split_output_weights(output: Array, w: Array, b: Array) -> None:
    """Write [W b] as W and b.

    Args:
        output: [N, H+1].
        w: written to, [N, H].
        b: written to, [N].
    """
    for k in range(w.shape[0]):
        for i in range(w.shape[1]):
            w[k, i] = output[k, i]
        b[k] = output[k, w.shape[1]]


@helper_jit
def compute_scores_and_loss_gradient(
    act: Array,
    w: Array,
    b: Array,
    base_logsumexp: Array,
    labels: Array,
    t: Array,
    f: Array,
    p: Array,
    df: Array,
    scratch: Array,
) -> None:
    """Go from activations to the derivative of the mean cross-entropy in the scores.

    Args:
        act: activations, hidden inputs above skip scores, [H+N, S].
        w: W, [N, H].
        b: [N].
        base_logsumexp: [S].
        labels: [S].
        t: written to: tanh of the hidden inputs, [H, S].
        f: written to: scores, [N, S].
        p: written to: probabilities, [N+1, S].
        df: written to: the derivative, [N, S].
        scratch: a workspace, [S].
    """
    units, ways, size = t.shape[0], f.shape[0], f.shape[1]
    write_tanh(act[:units].reshape(-1), t.reshape(-1))
    np.dot(w, t, f)
    for k in range(ways):
        for i in range(size):
            f[k, i] += act[units + k, i] + b[k]
    write_softmax_with_base(f, base_logsumexp, p, scratch)
    write_cross_entropy_gradient(p, labels, df, scratch)


@helper_jit
def apply_loss_hessian(
    moved: Array,
    dw: Array,
    db: Array,
    t: Array,
    p: Array,
    df: Array,
    w: Array,
    workspace: Array,
    out: Array,
    output: Array,
    scratch: Array,
) -> None:
    """Apply the Hessian of the mean cross-entropy between activations and [W b].

    Args:
        moved: a change of the activations, [H+N, S].
        dw: a change of W, [N, H].
        db: a change of b, [N].
        t: tanh of the hidden inputs, [H, S].
        p: probabilities, [N+1, S].
        df: the derivative in the scores, [N, S].
        w: W, [N, H].
        workspace: [2 H + 2 N, S]; its last N rows then hold the change of the scores.
        out: written to: the result for the activations, [H+N, S].
        output: written to: the result for [W b], [N, H+1].
        scratch: a workspace, [S].
    """
    units, size, ways = t.shape[0], t.shape[1], df.shape[0]
    dt, back, more, ds = (
        workspace[:units],
        workspace[units : 2 * units],
        workspace[2 * units : 2 * units + ways],
        workspace[2 * units + ways :],
    )
    flat_t, flat_dt, flat_move = t.reshape(-1), dt.reshape(-1), moved[:units].reshape(-1)
    for i in range(units * size):
        flat_dt[i] = (1.0 - flat_t[i] * flat_t[i]) * flat_move[i]
    np.dot(w, dt, ds)
    np.dot(dw, t, more)
    for k in range(ways):
        for i in range(size):
            ds[k, i] += more[k, i] + moved[units + k, i] + db[k]
    df2 = out[units:]
    apply_cross_entropy_hessian(p, ds, df2, scratch)
    first, second = np.empty((ways, units)), np.empty((ways, units))
    np.dot(df2, t.T, first)
    np.dot(df, dt.T, second)
    for k in range(ways):
        mass = 0.0
        for i in range(size):
            mass += df2[k, i]
        for i in range(units):
            output[k, i] = first[k, i] + second[k, i]
        output[k, units] = mass
    above = out[:units]
    np.dot(w.T, df2, above)
    np.dot(dw.T, df, back)
    flat, flat_back = above.reshape(-1), back.reshape(-1)
    for i in range(units * size):
        flat[i] = (flat[i] + flat_back[i]) * (1.0 - flat_t[i] * flat_t[i])
    np.dot(w.T, df, back)
    for i in range(units * size):
        flat[i] -= 2.0 * flat_t[i] * flat_back[i] * flat_dt[i]


# The search: z holds B [H, S], beta [N, S] and o [N, H+1], in the metric (K_2, K_3, P_1).


@helper_jit
def apply_metric(data: tuple, d: Array, out: Array) -> None:
    """Write M d.

    Args:
        data: of a search (`evaluate_objective_and_gradient`) or of the Hessian (`apply_newton_operator`); both begin
            with K_2, K_3, P_1, t, p, df.
        d: dual numbers, flat.
        out: written to, likewise.
    """
    hidden, skip, precisions = data[0], data[1], data[2]
    units, ways, size = data[3].shape[0], data[5].shape[0], hidden.shape[0]
    middle, end = units * size, (units + ways) * size
    np.dot(d[:middle].reshape(units, size), hidden, out[:middle].reshape(units, size))
    np.dot(d[middle:end].reshape(ways, size), skip, out[middle:end].reshape(ways, size))
    for i in range(precisions.shape[0]):
        out[end + i] = precisions[i] * d[end + i]


@helper_jit
def evaluate_objective_and_gradient(space: tuple, z: Array, metric_z: Array, gradient: Array) -> float:
    """Return the value, and write the gradient as a representer in the metric.

    Args:
        space: the data of a search.
        z: dual numbers, flat.
        metric_z: M z.
        gradient: written to, likewise.
    """
    _, _, precisions, t, p, df, _, start, centres, base_logsumexp, labels, act, f, w, b, scratch, back, output = space
    units, ways, size = t.shape[0], f.shape[0], f.shape[1]
    end = (units + ways) * size
    flat, begin = act.reshape(-1), start.reshape(-1)
    for i in range(end):
        flat[i] = begin[i] + metric_z[i]
    flat = output.reshape(-1)
    for i in range(flat.shape[0]):
        flat[i] = centres[i] + z[end + i]
    split_output_weights(output, w, b)
    compute_scores_and_loss_gradient(act, w, b, base_logsumexp, labels, t, f, p, df, scratch)
    value = mean_cross_entropy(f, base_logsumexp, labels, p) + inner_product(z, metric_z) / 2
    np.dot(w.T, df, back)
    above, flat_t = back.reshape(-1), t.reshape(-1)
    for i in range(units * size):
        gradient[i] = z[i] + above[i] * (1.0 - flat_t[i] * flat_t[i])
    below = df.reshape(-1)
    for i in range(ways * size):
        gradient[units * size + i] = z[units * size + i] + below[i]
    np.dot(df, t.T, w)
    for k in range(ways):
        mass = 0.0
        for i in range(size):
            mass += df[k, i]
        at = k * (units + 1)
        for i in range(units):
            gradient[end + at + i] = z[end + at + i] + w[k, i] / precisions[at + i]
        gradient[end + at + units] = z[end + at + units] + mass / precisions[at + units]
    return value


@helper_jit
def gradient_norm_of_unknowns(space: tuple, gradient: Array) -> float:
    """Return the norm of the gradient in the large form.

    Args:
        space: the data of a search, as `evaluate_objective_and_gradient` has left them.
        gradient: a representer in the metric, flat.
    """
    precisions, t, gram, f = space[2], space[3], space[6], space[12]
    units, ways, size = t.shape[0], f.shape[0], f.shape[1]
    rows, end = units + ways, (units + ways) * size
    duals = gradient[:end].reshape(rows, size)
    square = inner_product(gradient[:end], np.dot(duals, gram).reshape(-1))
    for k in range(units):
        mass = 0.0
        for i in range(size):
            mass += duals[k, i]
        square += mass * mass
    for i in range(precisions.shape[0]):
        square += (gradient[end + i] * precisions[i]) ** 2
    return math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.inf


@helper_jit
def apply_newton_operator(net: tuple, d: Array, d_image: Array, out: Array) -> None:
    """Write (1 + C' M) d.

    Args:
        net: the metric's kernels and precisions [N (H+1)], where the Hessian is (t, p, df, W), workspace.
        d: dual numbers, flat.
        d_image: M d.
        out: written to, likewise.
    """
    _, _, precisions, t, p, df, w, workspace, moved, output, dw, db, scratch = net
    units, ways, size = t.shape[0], df.shape[0], df.shape[1]
    end = (units + ways) * size
    split_output_weights(d[end:].reshape(ways, units + 1), dw, db)
    apply_loss_hessian(
        d_image[:end].reshape(units + ways, size), dw, db, t, p, df, w, workspace, moved, output, scratch
    )
    flat, last = moved.reshape(-1), output.reshape(-1)
    for i in range(end):
        out[i] = d[i] + flat[i]
    for i in range(precisions.shape[0]):
        out[end + i] = d[end + i] + last[i] / precisions[i]


search_minimum = make_lbfgs_kernel(apply_metric, evaluate_objective_and_gradient, gradient_norm_of_unknowns)
solve_definite, solve_indefinite = make_krylov_methods(apply_newton_operator, apply_metric)


@helper_jit
def make_kernel_matrices(rows: Array, precisions: Array, units: int, ways: int) -> tuple[Array, Array, Array, Array]:
    """Return K_2, K_3 [S, S], and the inverse precisions [D+1] of one unit's [W_2 b_2] and one class's [W_3 0].

    Args:
        rows: features with a column of ones, [S, D+1].
        precisions: [P].
        units: H.
        ways: N.
    """
    width = rows.shape[1]
    skip, hidden = ways * (units + 1), ways * (units + width)
    inverse_2, inverse_3 = np.empty(width), np.zeros(width)
    for d in range(width):
        inverse_2[d] = 1.0 / precisions[hidden + d]
    for d in range(width - 1):
        inverse_3[d] = 1.0 / precisions[skip + d]
    return (
        np.dot(multiply_columns(rows, inverse_2), rows.T),
        np.dot(multiply_columns(rows, inverse_3), rows.T),
        inverse_2,
        inverse_3,
    )


@helper_jit
def write_start_point(
    rows: Array, planes: Array, draws: Array, spread: float, hidden: Array, skip: Array, z: Array
) -> None:
    """Write fixed functions of each support row, so that their order plays no part.

    See `DualCoordinates.initial_point`.

    Args:
        rows: features with a column of ones, [S, D+1].
        planes: fixed numbers, [H+N, D].
        draws: fixed numbers, [N, H+1].
        spread: of the hidden inputs.
        hidden: K_2, [S, S].
        skip: K_3, [S, S].
        z: written to: dual numbers, flat.
    """
    size, width, units = rows.shape[0], rows.shape[1], planes.shape[0] - draws.shape[0]
    direction = np.empty((size, width - 1))
    for i in range(size):
        square = 0.0
        for d in range(width - 1):
            square += rows[i, d] ** 2
        over = 1.0 / max(math.sqrt(square), TINY)
        for d in range(width - 1):
            direction[i, d] = rows[i, d] * over
    waves = np.dot(planes, direction.T)
    first, second = 0.0, 0.0
    for i in range(size):
        first, second = first + hidden[i, i] / size, second + skip[i, i] / size
    for k in range(planes.shape[0]):
        # Kernels have the size of 1 / precision: unscaled numbers would saturate every hidden unit.
        factor = spread / max(first if k < units else second, TINY)
        for i in range(size):
            z[k * size + i] = factor * math.sin(3 * waves[k, i])
    at = planes.shape[0] * size
    for k in range(draws.shape[0]):
        for i in range(draws.shape[1]):
            z[at + k * draws.shape[1] + i] = spread * draws[k, i]


@helper_jit
def escape_saddle(space: tuple, net: tuple, z: Array, value: float, draw: Array, workspace: Array) -> bool:
    """Move z to where the objective is lower, if it curves downwards at this stationary point; return whether it did.

    See `ifsl_bench.solvers.coordinates.escape_saddles`.

    Args:
        space: the data of a search.
        net: the data of the Hessian at z, as `apply_newton_operator` takes them.
        z: dual numbers of a stationary point, flat; changed.
        value: the objective there.
        draw: the right-hand side of the linear solve, fixed random numbers, flat.
        workspace: [9, P].
    """
    z_image, b, b_image, x, x_image, best = (
        workspace[0],
        workspace[1],
        workspace[2],
        workspace[3],
        workspace[4],
        workspace[5],
    )
    n = z.shape[0]
    apply_metric(space, z, z_image)
    evaluate_objective_and_gradient(space, z, z_image, b)
    split_output_weights(space[17], space[13], space[14])  # W, where the evaluation has left something else
    copy_array_into(draw, b)
    apply_metric(net, b, b_image)
    _, _, down = solve_definite(net, b, b_image, 1e-3, MAX_ESCAPE_PRODUCTS, True, x, x_image, workspace[6:9])
    if not down:
        return False
    d, d_image = workspace[6], workspace[7]
    apply_metric(net, d, d_image)
    unit = (1 + math.sqrt(max(inner_product(z, z_image), 0.0))) / math.sqrt(max(inner_product(d, d_image), TINY))
    lowest, at = value, 0.0
    for length in ESCAPE_LENGTHS:
        for sign in (1.0, -1.0):
            t = sign * length * unit
            for i in range(n):
                x[i], x_image[i] = z[i] + t * d[i], z_image[i] + t * d_image[i]
            height = evaluate_objective_and_gradient(space, x, x_image, best)
            if height < lowest:
                lowest, at = height, t
    add_scaled_array(z, at, d)
    return lowest < value
