"""Gradient descent with a fixed number of steps, and Newton's method for small problems. L-BFGS is in `lbfgs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .checks import check_options
from .objective import Objective, dense_hessian, value_and_gradient
from .outcome import Outcome, measured, relative_tolerance
from .tree import Tree, column, dot, pack, rebuild, tensors, tree_map, unpack


@dataclass(frozen=True)
class GradientDescent:
    """`steps` steps of size `rate`, one or [E]: with `Unroll()`, truncated back-propagation through time.

    The result is defined by the number of steps, so an episode counts as converged when it stayed finite and did not
    end above where it began; give a `tolerance` to ask for |grad| <= tolerance |grad at v0| instead, without which
    `Implicit` refuses it. See `largest_curvature` for rates that are safe.

    Raises:
        ValueError: an option out of range, or no v0.
    """

    rate: float | Tensor = 1.0
    steps: int = 20
    tolerance: float | None = None
    unrolls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, positive=("rate", "tolerance"), counts=("steps",))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if v0 is None:
            raise ValueError("gradient descent needs v0: where a fixed number of steps ends depends on where it starts")
        v = v0
        for _ in range(self.steps):
            slope = tensors(objective.gradient(v, args))
            v = rebuild(v, [old - _scaled(self.rate, g) for old, g in zip(tensors(v), slope, strict=True)])
        end, fixed = tree_map(Tensor.detach, v), tree_map(Tensor.detach, args)
        count = tensors(v)[0].shape[0]
        steps = torch.full((count,), self.steps, device=tensors(v)[0].device)
        found = measured(objective, end, fixed, torch.ones_like(steps, dtype=torch.bool), steps)
        value, slope0 = value_and_gradient(objective, tree_map(Tensor.detach, v0), fixed)
        if self.tolerance is None:
            converged = found.converged & (found.objective <= value)
        else:
            flat = pack(slope0)
            converged = found.converged & (found.gradient_norm <= self.tolerance * dot(flat, flat).sqrt())
        return Outcome(v, converged, steps, found.gradient_norm, found.objective)


def _scaled(rate: float | Tensor, g: Tensor) -> Tensor:
    return column(rate, g) * g if isinstance(rate, Tensor) and rate.dim() else rate * g


@dataclass(frozen=True)
class Newton:
    """Damped Newton with dense Hessians (P x P for each episode), for problems of some tens of unknowns.

    The eigenvalues of the Hessian are taken by their size and kept off zero, so the step descends where the objective
    is not convex. Stops at |grad| <= tolerance |grad at v0| (default 1e-5 in float32, 1e-9 in float64), given that
    the next step is short beside |v|; where the Hessian is singular to rounding an episode counts as flat, not as
    converged.

    Raises:
        ValueError: an option out of range, no v0, or more unknowns than `limit`.
    """

    tolerance: float | None = None
    max_steps: int = 50
    limit: int = 512

    def __post_init__(self) -> None:
        check_options(self, positive=("tolerance",), counts=("max_steps", "limit"))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if v0 is None:
            raise ValueError(f"Newton needs v0: {type(objective).__name__} has no start of its own")
        v, args = v0, tree_map(Tensor.detach, args)
        value, slope = value_and_gradient(objective, v, args)
        z, g = pack(v), pack(slope)  # [E, P]
        eps = torch.finfo(z.dtype).eps
        tolerance = relative_tolerance(self.tolerance, z.dtype, 1e-5, 1e-9)
        goal = (tolerance * dot(g, g).sqrt()).clamp_min(torch.finfo(z.dtype).tiny)
        steps = torch.zeros(z.shape[0], dtype=torch.long, device=z.device)
        late, stuck, converged = torch.zeros_like(steps), steps > 0, steps > 0
        for step in range(self.max_steps + 1):
            h = dense_hessian(objective, unpack(z, v), args, self.limit)
            usable = h.isfinite().all(2).all(1) & g.isfinite().all(1)
            curvatures, vectors = torch.linalg.eigh(torch.where(usable[:, None, None], h, 0.0))
            size = curvatures.abs()
            largest = size.amax(1, keepdim=True)
            flat = (size <= eps * largest).any(1) | (largest[:, 0] == 0)
            size = size.maximum(eps * largest).clamp_min(torch.finfo(z.dtype).tiny)
            d = -(vectors @ ((vectors.mT @ g[:, :, None]) / size[:, :, None]))[:, :, 0]  # [E, P]
            small, short = dot(g, g).sqrt() <= goal, dot(d, d).sqrt() <= 0.01 * (1 + dot(z, z).sqrt())
            converged |= usable & small & short & ~flat & ~stuck
            late = late + small
            active = usable & ~converged & ~stuck & ~(small & flat) & (late < 10)
            if step == self.max_steps or not bool(active.any()):
                break
            d = torch.where(active[:, None] & d.isfinite(), d, 0.0)
            slope_d = dot(g, d)
            t = torch.ones_like(value)
            for _ in range(40):
                trial_value, trial_slope = value_and_gradient(objective, unpack(z + t[:, None] * d, v), args)
                bad = ~(trial_value <= value + 1e-4 * t * slope_d + 4 * eps * value.abs())
                if not bool(bad.any()):
                    break
                t = torch.where(bad, t / 2, t)
            stuck |= bad
            kept = active & ~bad
            z = torch.where(kept[:, None], z + t[:, None] * d, z)
            g = torch.where(kept[:, None], pack(trial_slope), g)
            value = torch.where(kept, trial_value, value)
            steps += kept
        return Outcome(unpack(z, v), converged, steps, dot(g, g).sqrt(), value)


def largest_curvature(objective: Objective, v: Tree, args: Tree, steps: int = 50) -> Tensor:
    """An estimate (from below) of the largest absolute eigenvalue of the Hessian at v, by power iteration: [E].

    Gradient descent on a convex objective contracts for rates below two over it.
    """
    args = tree_map(Tensor.detach, args)
    product = objective.hessian(v, args)
    z = pack(v)
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(z.shape[1], generator=generator, dtype=z.dtype).to(z.device).expand_as(z)
    size = torch.ones_like(z[:, 0])
    for _ in range(steps):
        d = d / d.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
        h = pack(product(unpack(d, v))).detach()
        # Not d . h: where eigenvalues come as +-lambda, d is a mixture of both and the quotient means nothing.
        size, d = h.norm(dim=1), h
    return size
