"""Elementary functions of arrays, support rows, and the softmax over novel classes and the fixed one.

The formulas stand in docs/solve.md. S support rows, N novel classes, D features. Probabilities p [N+1, S] have the
fixed class last. `scratch` [S] is a workspace. Loops are written so that a compiler makes vector instructions.
"""

from __future__ import annotations

import math

import numpy as np

from ifsl_bench.solvers.numba_compiling import Array, inline_jit, power_of_two, reduction_jit

ROUNDING_SHIFT = 6755399441055744.0  # 1.5 * 2^52: a small number added to it is rounded to a whole one
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93145751953125e-1, 1.42860682030941723212e-6


@inline_jit
def copy_array_into(source: Array, out: Array) -> None:
    """Copy x into out, both flat.

    `out[:] = x` would do the same, and have Numba compile the text of an error for arrays of different shapes, which
    takes it four seconds.

    Args:
        source: copied.
        out: written to.
    """
    for i in range(source.shape[0]):
        out[i] = source[i]


@inline_jit
def words_to_float64(words: Array, out: Array) -> None:
    """Copy numbers of either precision into out, in double precision; all flat.

    Numbers of double precision come as twice as many words of single precision, so that kernels are compiled once and
    not for each kind of numbers.

    Args:
        words: of single precision, [P] or [2P].
        out: written to, [P].
    """
    if words.shape[0] == out.shape[0]:
        copy_array_into(words, out)
    else:
        copy_array_into(words.view(np.float64), out)


@inline_jit
def fast_exponential(x: float) -> float:
    """Return e^x, to two units in the last place; below -708 it stays at e^-708, above 709 at e^709.

    2^k e^r with |r| <= ln(2) / 2 and the Taylor series of e^r, whose first term left out is below 5e-18.
    """
    if x > 709.0:
        x = 709.0
    if x < -708.0:
        x = -708.0
    shifted = x * LOG2E + ROUNDING_SHIFT
    k = shifted - ROUNDING_SHIFT
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = 1.6059043836821613e-10  # 1 / 13!
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 0.0001984126984126984
    p = p * r + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * power_of_two(shifted)


@inline_jit
def write_tanh(x: Array, out: Array) -> None:
    """Write the hyperbolic tangent of a flat array: 1 - 2 / (e^2x + 1), to some 3e-16.

    Args:
        x: flat.
        out: written to, likewise.
    """
    for i in range(x.shape[0]):
        out[i] = 1.0 - 2.0 / (fast_exponential(2.0 * x[i]) + 1.0)


@reduction_jit
def inner_product(a: Array, b: Array) -> float:
    """Return the inner product of flat arrays.

    Args:
        a: flat.
        b: likewise.
    """
    total = 0.0
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@reduction_jit
def sum_elements(a: Array) -> float:
    """Return the sum of a flat array."""
    value = 0.0
    for i in range(a.shape[0]):
        value += a[i]
    return value


@reduction_jit
def max_absolute(a: Array) -> float:
    """Return the largest absolute value in a flat array; NaN does not count."""
    value = 0.0
    for i in range(a.shape[0]):
        value = max(value, abs(a[i]))
    return value


@inline_jit
def add_scaled_array(a: Array, factor: float, b: Array) -> None:
    """Add factor * b to a, for flat arrays.

    Args:
        a: added to.
        factor: a number.
        b: flat.
    """
    for i in range(a.shape[0]):
        a[i] += factor * b[i]


@inline_jit
def append_ones(x: Array, width: int) -> Array:
    """Return x with a column of ones, [S, width] in double precision.

    Args:
        x: features of either precision, [S, D].
        width: D + 1.
    """
    size = x.shape[0]
    out = np.empty((size, width))
    for i in range(size):
        words_to_float64(x[i], out[i, : width - 1])
        out[i, width - 1] = 1.0
    return out


@inline_jit
def multiply_columns(x: Array, factors: Array) -> Array:
    """Return x with its columns multiplied by factors.

    Args:
        x: [S, D+1].
        factors: [D+1].
    """
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for d in range(x.shape[1]):
            out[i, d] = x[i, d] * factors[d]
    return out


@inline_jit
def write_softmax_with_base(f: Array, base_logsumexp: Array, p: Array, scratch: Array) -> None:
    """Write the softmax over the N scores and the fixed class, which comes last.

    Args:
        f: scores, [N, S].
        base_logsumexp: the score of the fixed class, [S].
        p: written to, [N+1, S].
        scratch: a workspace, [S].
    """
    ways, size = f.shape
    for i in range(size):
        scratch[i] = base_logsumexp[i]
    for k in range(ways):
        for i in range(size):
            scratch[i] = f[k, i] if f[k, i] > scratch[i] else scratch[i]
    for k in range(ways):
        for i in range(size):
            p[k, i] = fast_exponential(f[k, i] - scratch[i])
    for i in range(size):
        p[ways, i] = fast_exponential(base_logsumexp[i] - scratch[i])
        scratch[i] = p[ways, i]
    for k in range(ways):
        for i in range(size):
            scratch[i] += p[k, i]
    for i in range(size):
        scratch[i] = 1.0 / scratch[i]
    for k in range(ways + 1):
        for i in range(size):
            p[k, i] *= scratch[i]


@inline_jit
def write_cross_entropy_gradient(p: Array, labels: Array, out: Array, scratch: Array) -> None:
    """Write (pi - y) / S.

    A label's own is the sum of the other probabilities: 1 - p would have lost its digits where scores saturate.

    Args:
        p: probabilities, [N+1, S].
        labels: [S].
        out: written to, [N, S].
        scratch: a workspace, [S].
    """
    ways, size = out.shape
    share = 1.0 / size
    for i in range(size):
        scratch[i] = p[ways, i]
    for k in range(ways):
        for i in range(size):
            scratch[i] += 0.0 if k == labels[i] else p[k, i]
            out[k, i] = p[k, i] * share
    for i in range(size):
        out[labels[i], i] = -scratch[i] * share


@inline_jit
def apply_cross_entropy_hessian(p: Array, d: Array, out: Array, scratch: Array) -> None:
    """Write M d, M being the Hessian of the mean cross-entropy in the scores.

    Args:
        p: probabilities, [N+1, S].
        d: [N, S].
        out: written to, [N, S].
        scratch: a workspace, [S].
    """
    ways, size = d.shape
    share = 1.0 / size
    for i in range(size):
        scratch[i] = p[0, i] * d[0, i]
    for k in range(1, ways):
        for i in range(size):
            scratch[i] += p[k, i] * d[k, i]
    for k in range(ways):
        for i in range(size):
            out[k, i] = share * p[k, i] * (d[k, i] - scratch[i])


@inline_jit
def mean_cross_entropy(f: Array, base_logsumexp: Array, labels: Array, p: Array) -> float:
    """Return the mean cross-entropy over rows.

    Args:
        f: scores, [N, S].
        base_logsumexp: the score of the fixed class, [S].
        labels: [S].
        p: the probabilities of these scores, [N+1, S].
    """
    ways, size = f.shape
    loss = 0.0
    for i in range(size):
        others = p[ways, i]
        for k in range(ways):
            if k != labels[i]:
                others += p[k, i]
        if others < 0.5:
            loss -= math.log1p(-others)  # which keeps the digits of a small loss
        elif p[labels[i], i] > 1e-290:
            loss -= math.log(p[labels[i], i])
        else:
            top = base_logsumexp[i]
            for k in range(ways):
                top = max(top, f[k, i])
            total = math.exp(base_logsumexp[i] - top)
            for k in range(ways):
                total += math.exp(f[k, i] - top)
            loss += top - f[labels[i], i] + math.log(total)
    return loss / size


@inline_jit
def add_fixed_logit_gradient(p: Array, moved: Array, out: Array) -> None:
    """Add what -<u, gradient> changes with the fixed logits.

    Args:
        p: probabilities, [N+1, S].
        moved: the change of the scores with u, [N, S].
        out: added to, [S].
    """
    ways, size = moved.shape
    for k in range(ways):
        for i in range(size):
            out[i] += p[k, i] * moved[k, i] * p[ways, i] / size
