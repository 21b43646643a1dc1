"""Batched Krylov methods: A x = b for self-adjoint A, by its products alone, each episode by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ifsl_bench.solvers.iterate import patience
from ifsl_bench.solvers.tree import column, dot

Apply = Callable[[Tensor, Tensor], Tensor]  # p, M p -> A p
Metric = Callable[[Tensor], Tensor]  # p -> M p


def self_adjoint_solve(
    apply: Apply, metric: Metric, rhs: Tensor, rhs_image: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves A x = rhs: x, the steps [E], and where A has turned out to be indefinite [E].

    There MINRES solves, elsewhere conjugate gradients, which are cheaper and end at the first negative curvature.
    """
    x, steps, indefinite, _ = conjugate_gradient(apply, metric, rhs, rhs_image, tolerance, max_steps)
    if bool(indefinite.any()):
        by_minres, more = minres(apply, metric, rhs, rhs_image, tolerance, max_steps, indefinite)
        x, steps = torch.where(column(indefinite, x), by_minres, x), steps + more
    return x, steps, indefinite


def conjugate_gradient(
    apply: Apply, metric: Metric, rhs: Tensor, rhs_image: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solves A x = rhs [E, ...] for A self-adjoint and positive in the metric M: x, the steps [E], where A curves
    downwards [E], and along which direction [E, ...].

    `apply(p, M p)` is A p. Vectors and their images are carried side by side, so a step costs one product with the
    metric. Stops at |residual|_M <= tolerance |rhs|_M, each episode by itself, or where A shows no positive curvature.
    The residual is that of the recurrence: whether x is a solution is for the caller to measure.
    """
    x, residual, residual_image = torch.zeros_like(rhs), rhs, rhs_image
    p, p_image = rhs, rhs_image
    rho = dot(rhs, rhs_image)  # [E]
    goal = rho * tolerance**2
    active = rho > 0
    steps, zero = torch.zeros_like(rho), rho.new_zeros(())
    indefinite, direction = torch.zeros_like(rho, dtype=torch.bool), torch.zeros_like(rhs)
    eps, size = torch.finfo(rhs.dtype).eps, torch.zeros_like(rho)
    often = patience(rhs)
    for step in range(1, max_steps + 1):
        h = apply(p, p_image)
        curvature = dot(h, p_image)
        own, square = dot(h, h), dot(p, p)
        size = size.maximum(own / square.clamp_min(torch.finfo(rhs.dtype).tiny))  # of A, squared, from below
        # Beyond what its rounding could be; and where A is semidefinite, zero means that A p is zero too.
        noise = 4 * eps * (size * square * dot(p_image, p_image)).sqrt()
        down = active & ((curvature < -noise) | ((curvature <= noise) & (own > 64 * eps * size * square)))
        indefinite = indefinite | down
        direction = torch.where(column(down, p), p, direction)
        active = active & ~down & (curvature > 0)
        length = column(torch.where(active, rho / curvature, zero), rhs)
        x = torch.addcmul(x, length, p)
        residual = torch.addcmul(residual, length, h, value=-1)
        residual_image = metric(residual)
        steps += active
        new = dot(residual, residual_image)
        ratio = column(torch.where(active, new / rho, zero), rhs)
        rho = torch.where(active, new, rho)
        active = active & (new > goal)
        if step % often == 0 and not bool(active.any()):
            break
        p = torch.addcmul(residual, ratio, p)
        p_image = torch.addcmul(residual_image, ratio, p_image)
    return x, steps.long(), indefinite, direction


def minres(
    apply: Apply, metric: Metric, rhs: Tensor, rhs_image: Tensor, tolerance: float, max_steps: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Solves A x = rhs in the episodes `active` [E], for A self-adjoint in the metric M: x [E, ...] and the steps [E].

    A may be indefinite. Paige & Saunders (Solution of sparse indefinite systems of linear equations, 1975):
    |rhs - A x|_M is the least over the Krylov space and never grows. Stops at tolerance |rhs|_M. Arguments as in
    `conjugate_gradient`.
    """
    tiny = torch.finfo(rhs.dtype).tiny
    beta = dot(rhs, rhs_image).clamp_min(0).sqrt()  # [E]
    goal = tolerance * beta
    active = active & (beta > 0)
    zero, unit = torch.zeros_like(beta), torch.ones_like(beta)

    def over(vector: Tensor, length: Tensor) -> Tensor:
        return vector / column(length.clamp_min(tiny), vector)

    x, w, w_before, v_before = (torch.zeros_like(rhs) for _ in range(4))
    v, v_image = over(rhs, beta), over(rhs_image, beta)
    # The residual, the last rotation, what it left of the next columns.
    remaining, c, s, d, e = beta, -unit, zero, zero, zero
    beta = zero
    steps = torch.zeros_like(beta)
    often = patience(rhs)
    for step in range(1, max_steps + 1):
        # Lanczos: A v = beta v_before + alpha v + beta_next v_next.
        h = apply(v, v_image)
        alpha = dot(h, v_image)
        h = h - column(alpha, h) * v - column(beta, h) * v_before
        h_image = metric(h)
        beta = dot(h, h_image).clamp_min(0).sqrt()
        # One more column of the tridiagonal matrix, rotated to triangular form.
        above, diagonal = c * d + s * alpha, s * d - c * alpha
        far_above, e, d = e, s * beta, -c * beta
        length = (diagonal.square() + beta.square()).sqrt().clamp_min(tiny)
        c, s = diagonal / length, beta / length
        w_before, w = w, over(v - column(far_above, v) * w_before - column(above, v) * w, length)
        x = torch.addcmul(x, column(torch.where(active, c * remaining, zero), x), w)
        steps += active
        remaining = s * remaining
        active = active & (remaining > goal)
        if step % often == 0 and not bool(active.any()):
            break
        v_before, v, v_image = v, over(h, beta), over(h_image, beta)
    return x, steps.long()
