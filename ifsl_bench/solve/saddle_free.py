"""Newton's method past saddles, near a stationary point, for Hessians that can be factorised.

Steps are -|H|^-1 g, as by Dauphin et al. (Identifying and attacking the saddle point problem in high-dimensional
non-convex optimization, 2014), or along a direction of negative curvature, whichever leads further down.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from .escape import LENGTHS
from .iterate import State, iterate
from .outcome import Outcome
from .search import falls, rounding
from .space import Space
from .tree import dot

TURNS = 100  # factorisations at most
STEPS = 2  # with each of them
HALVES = 12  # lengths of a Newton step that are tried, 1, 1/2, 1/4 ...


class Factorised(Protocol):
    """Hessians H at some points, in the metric of a space; a `State`."""

    def step(self, g: Tensor) -> Tensor:
        """-|H|^-1 g for g [E, P], with small and negative eigenvalues replaced by positive ones: downhill."""

    def indefinite(self) -> Tensor:
        """Where H curves downwards: [E]."""

    def downwards(self) -> Tensor:
        """Along what it does, [E, P]; anything elsewhere."""


class Factorising(Space, Protocol):
    """A space whose Hessians are small enough for that."""

    @property
    def at_once(self) -> int:
        """For how many episodes there is room."""

    def factorised(self, z: Tensor) -> Factorised:
        """The Hessians at z [E, P]."""

    def values(self, z: Tensor, image: Tensor) -> Tensor:
        """Values [T, E] at points [T, E, P]."""


def saddle_free(space: Factorising, z: Tensor, goal: Tensor, gap: float, escapes: int) -> Outcome:
    """From z [E, P] down to a gradient of norm `goal` [E] where nothing curves downwards, or where that leads no
    further down, or has been followed from a stationary point `escapes` times. The outcome's point is in the space's
    coordinates."""
    rows = torch.arange(len(z), device=z.device).split(space.at_once)
    if len(rows) == 1:
        return _search(space, z, goal, gap, escapes)
    parts = [_search(_take(space, some), z[some], goal[some], gap, escapes) for some in rows]
    return Outcome(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Outcome)))


def _take(space: Factorising, rows: Tensor) -> Factorising:
    return cast(Factorising, space.take(rows))


def _search(space: Factorising, z: Tensor, goal: Tensor, gap: float, escapes: int) -> Outcome:
    count, zero = torch.arange(HALVES, device=z.device)[:, None], torch.zeros_like(goal)
    halves = torch.pow(0.5, count).to(z.dtype)
    lengths = LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** count[: len(LENGTHS)].to(z.dtype)
    turn = _Turn(space, gap if space.penalised else torch.inf, halves, torch.cat([lengths, -lengths]))
    begin = turn.at(z, space.image(z), goal, torch.full_like(goal, escapes), zero, zero == 0, zero == 0)

    def take(index: Tensor) -> _Turn:
        nonlocal turn
        turn = _Turn(_take(turn.space, index), turn.gap, turn.halves, turn.lengths)
        return turn

    s = iterate(turn, begin, TURNS, lambda s: (s, s.active), take)
    return Outcome(s.z, s.converged, s.steps.long(), s.norm, s.value)


@dataclass
class _Newton(State):
    kept: ClassVar = ("z", "steps", "converged", "norm", "value")

    z: Tensor  # [E, P] and its image
    image: Tensor
    value: Tensor  # [E]
    g: Tensor  # [E, P] the gradient
    norm: Tensor  # [E] its norm in the large form
    p: Tensor  # [E, P] the Newton step
    hessian: Any
    indefinite: Tensor  # [E] bool
    goal: Tensor  # [E]
    left: Tensor  # [E] how often a saddle may still be left
    steps: Tensor  # [E]
    converged: Tensor  # [E] bool
    active: Tensor  # [E] bool


@dataclass(frozen=True)
class _Turn:
    """A few steps with one Hessian, and the next Hessian."""

    space: Factorising
    gap: float
    halves: Tensor  # [T, 1] lengths that are tried: of Newton steps
    lengths: Tensor  # [T, 1] and along a negative curvature, forth and back, in units of 1 + |z|

    def at(
        self, z: Tensor, image: Tensor, goal: Tensor, left: Tensor, steps: Tensor, active: Tensor, moved: Tensor
    ) -> _Newton:  # fmt: skip
        """What is known at points z, and who goes on from there: nobody who has not `moved` [E]."""
        value, g, norm = self.space.evaluate(z, image)
        hessian = self.space.factorised(z)
        p, indefinite = hessian.step(g), hessian.indefinite()
        converged = norm <= torch.where(moved, goal, 10 * goal)
        converged = converged & (dot(g, self.space.image(g)) <= 2 * self.gap * value.abs())
        converged = converged & (dot(p, self.space.image(p)) <= 1e-4 * (1 + dot(z, image).clamp_min(0).sqrt()) ** 2)
        active = active & moved & (~converged | (indefinite & (left > 0)))
        return _Newton(z, image, value, g, norm, p, hessian, indefinite, goal, left, steps, converged, active)

    def __call__(self, s: _Newton) -> _Newton:
        z, image, value, g, p, steps, halves = s.z, s.image, s.value, s.g, s.p, s.steps, self.halves[:, :, None]
        for again in range(STEPS):
            if again:
                value, g, _ = self.space.evaluate(z, image)
                p = s.hessian.step(g)
            p_image = self.space.image(p)
            there, there_image = torch.addcmul(z, halves, p), torch.addcmul(image, halves, p_image)  # [T, E, P]
            if not again:
                aside, aside_image = self._along(s)
                there, there_image = torch.cat([there, aside]), torch.cat([there_image, aside_image])
            heights = self.space.values(there, there_image).nan_to_num(torch.inf, torch.inf)  # [T, E]
            good = falls(self.halves, value, dot(g, p_image), heights[:HALVES], rounding(value))
            t, which = (good * self.halves).max(0)  # [E]
            ok = t > 0
            if not again:
                reached = torch.where(ok, heights.gather(0, which[None])[0], value)
                least, lowest = heights[HALVES:].min(0)
                lower = s.indefinite & (least < reached)
                ok, which = ok | lower, torch.where(lower, lowest + HALVES, which)
            ok, which = (ok & s.active)[:, None], which[None, :, None].expand(1, *z.shape)
            z, image = (torch.where(ok, b.gather(0, which)[0], a) for a, b in ((z, there), (image, there_image)))
            steps = steps + ok[:, 0]
        left = s.left - (s.converged & s.indefinite).to(s.left)
        return self.at(z, image, s.goal, left, steps, s.active, steps > s.steps)

    def _along(self, s: _Newton) -> tuple[Tensor, Tensor]:
        """Points along the negative curvature, and their images: [T, E, P]."""
        d = s.hessian.downwards()
        d_image = self.space.image(d)
        square = dot(d, d_image).clamp_min(torch.finfo(d.dtype).tiny)
        unit = (1 + dot(s.z, s.image).clamp_min(0).sqrt()) / square.sqrt()
        steps = (self.lengths * unit)[:, :, None]
        return torch.addcmul(s.z, steps, d), torch.addcmul(s.image, steps, d_image)
