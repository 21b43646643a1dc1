"""Gradient descent with a fixed number of steps, and Newton's method for small problems. L-BFGS is in `lbfgs`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .checks import check_options
from .iterate import State, iterate
from .objective import Objective, value_and_gradient
from .outcome import Outcome, measured, relative_tolerance
from .search import backtrack
from .tree import Tree, dot, pack, tensors, tree_map, unpack


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

        v = objective.descend(v0, args, self.rate, self.steps)
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
        args = tree_map(Tensor.detach, args)

        def evaluate(z: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = value_and_gradient(objective, unpack(z, v0), args)
            return value, pack(slope)

        def aim(s: _Descent) -> _Descent:
            """The direction from where a state is, and whether to take it."""
            h = objective.hessian(unpack(s.z, v0), args).dense(v0, self.limit)
            usable = h.isfinite().all(2).all(1) & s.g.isfinite().all(1)
            d, flat = _spectral(torch.where(usable[:, None, None], h, 0.0), s.g)
            small, short = dot(s.g, s.g).sqrt() <= goal, dot(d, d).sqrt() <= 0.01 * (1 + dot(s.z, s.z).sqrt())
            converged = s.converged | (usable & small & short & ~flat & ~s.stuck)
            late = s.late + small
            active = usable & ~converged & ~s.stuck & ~(small & flat) & (late < 10)
            return replace(s, d=d, converged=converged, late=late, active=active)

        def step(s: _Descent) -> _Descent:
            d = torch.where(s.active[:, None] & s.d.isfinite(), s.d, 0.0)
            t, bad, value, g = backtrack(lambda t: evaluate(s.z + t[:, None] * d), s.value, dot(s.g, d))
            kept = s.active & ~bad
            z, g = torch.where(kept[:, None], s.z + t[:, None] * d, s.z), torch.where(kept[:, None], g, s.g)
            value = torch.where(kept, value, s.value)
            return aim(replace(s, z=z, g=g, value=value, stuck=s.stuck | bad, steps=s.steps + kept))

        z = pack(v0)  # [E, P]
        value, g = evaluate(z)
        tolerance = relative_tolerance(self.tolerance, z.dtype, 1e-5, 1e-9)
        goal = (tolerance * dot(g, g).sqrt()).clamp_min(torch.finfo(z.dtype).tiny)
        none = torch.zeros(len(z), dtype=torch.long, device=z.device)
        begin = aim(_Descent(z, g, value, g, none, none, none > 0, none > 0, none > 0))
        s = iterate(step, begin, self.max_steps, lambda s: (s, s.active))
        return Outcome(unpack(s.z, v0), s.converged, s.steps, dot(s.g, s.g).sqrt(), s.value)


@dataclass
class _Descent(State):
    z: Tensor  # [E, P] the current point
    g: Tensor  # [E, P] the gradient
    value: Tensor  # [E]
    d: Tensor  # [E, P] the direction
    steps: Tensor  # [E]
    late: Tensor  # [E] steps since the gradient was first small enough
    stuck: Tensor  # [E] bool: no step along the direction was good
    converged: Tensor  # [E] bool
    active: Tensor  # [E] bool


def _spectral(h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """-|h|^-1 g with the eigenvalues of h [E, P, P] by their size and off zero; and where some are zero to rounding."""
    curvatures, vectors = torch.linalg.eigh(h)
    size = curvatures.abs()
    largest, info = size.amax(1, keepdim=True), torch.finfo(h.dtype)
    flat = (size <= info.eps * largest).any(1) | (largest[:, 0] == 0)
    size = size.maximum(info.eps * largest).clamp_min(info.tiny)
    return -(vectors @ ((vectors.mT @ g[:, :, None]) / size[:, :, None]))[:, :, 0], flat


def largest_curvature(objective: Objective, v: Tree, args: Tree, steps: int = 50) -> Tensor:
    """An estimate (from below) of the largest absolute eigenvalue of the Hessian at v, by power iteration: [E].

    Gradient descent on a convex objective contracts for rates below two over it.
    """
    return objective.hessian(v, tree_map(Tensor.detach, args)).largest(v, steps)
