"""Batched L-BFGS: every episode with its own line search, history and end.

One evaluation of all running episodes per turn. An episode whose trial step is accepted gets a new direction, one
whose step is not gets a shorter or longer one, so no evaluation is made for an episode that does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .checks import check_options
from .escape import below
from .history import History
from .iterate import State, iterate
from .objective import Objective
from .outcome import Outcome, relative_tolerance
from .search import Bracket, aside, first_step, weak_wolfe
from .space import Space, coordinates
from .tree import Tree, column, dot

GoOn = Callable[[Space, Tensor, Tensor], Outcome]  # a space of some episodes, points, and which episodes they are


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS with a weak-Wolfe line search by bracketing and interpolation.

    Stops at |grad L| <= tolerance |grad L at the start| (one or [E], default 1e-5 in float32, 1e-8 in float64), given
    that the next step would also be short beside |v|: an objective that falls for ever passes the first test and not
    the second, and is reported as not converged. A start without a gradient may be a saddle, or flat: it is left by a
    small random step, and where there is still no gradient nothing has converged.

    Works in the objective's own coordinates where v0 is None and it has some. Where their metric is that of the
    penalty, 1/2 |grad L|^2 <= gap L is asked as well, which bounds L - L* around a minimum: with a weak penalty the
    first test says little. What float32 cannot solve there is solved again in float64. An objective may offer a search
    of its own with the same rules, `HasSearch`.

    escapes: how often an episode that has converged where the objective curves downwards, at a saddle, goes on from a
    lower point along that curvature. One that is at a saddle still counts as converged: its gradient has vanished.

    max_steps: evaluations of the objective for each episode. history: pairs kept. max_trials: evaluations in one line
    search.

    Raises:
        ValueError: an option out of range.
    """

    tolerance: float | Tensor | None = None
    max_steps: int = 1000
    history: int = 6
    max_trials: int = 25
    gap: float = 1e-6
    escapes: int = 0

    def __post_init__(self) -> None:
        check_options(self, positive=("tolerance", "gap"), counts=("max_steps", "history", "max_trials"))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        own = getattr(objective, "search", None) if v0 is None else None
        if own is not None and (outcome := own(self, args)) is not None:
            return outcome
        space = coordinates(objective, v0, args)
        found = self._all_at_once(space)
        rows = (~found.converged & found.objective.isfinite()).nonzero()[:, 0]
        if space.dtype == torch.float64 or len(rows) == 0 or (hard := space.double(rows)) is None:
            return found
        relative = torch.as_tensor(self.relative(space.dtype))
        solver = replace(self, tolerance=relative[rows] if relative.dim() else relative)
        return found.put(rows, solver._all_at_once(hard))

    def _all_at_once(self, space: Space) -> Outcome:
        z = space.initial()  # [E, P]
        begin = _begin(space, z, self.history)
        if bool((still := begin.norm == 0).any()):
            z = torch.where(still[:, None], z + aside(z), z)
            begin = _begin(space, z, self.history)
        goal = self.relative(z.dtype) * begin.norm
        found = self._search(space, z, goal, begin)
        found = self._past_saddles(space, found, lambda part, z, rows: self._search(part, z, goal[rows]))
        return replace(found, v=space.expand(found.v))

    def _past_saddles(self, space: Space, found: Outcome, go_on: GoOn) -> Outcome:
        """With the searches sent on that have stopped where the objective curves downwards, each at most `escapes`
        times; points are in the space's coordinates."""
        rows = found.converged.nonzero()[:, 0]
        for _ in range(self.escapes if len(rows) else 0):
            if (part := space.take(rows)) is None:
                rows = torch.arange(len(found.v), device=rows.device)
            z, lower = below(part or space, found.v[rows], found.objective[rows])
            if not bool(lower.any()):
                break
            if part is not None:
                z, rows = z[lower], rows[lower]
                part = space.take(rows)
            found = found.put(rows, go_on(part or space, z, rows))
        return found

    def _search(self, space: Space, z: Tensor, goal: Tensor, begin: _Search | None = None) -> Outcome:
        """Down to a gradient of norm `goal` [E] from z [E, P]; the point is in the space's coordinates."""
        s = begin or _begin(space, z, self.history)
        s.goal = goal
        s.gap = torch.full_like(s.norm, self.gap if space.penalised else torch.inf)
        s.active = (s.norm > 0) & s.value.isfinite()

        def take(index: Tensor) -> _Turn | None:
            part = space.take(index)
            return None if part is None else _Turn(part, self.max_trials)

        s = iterate(_Turn(space, self.max_trials), s, self.max_steps, lambda s: s.active, take)
        # Images were added up step by step; what counts is where z is.
        value, _, norm = space.evaluate(s.z, space.image(s.z))
        return Outcome(s.z, s.converged & (norm <= 10 * s.goal), s.steps, norm, value)

    def relative(self, dtype: torch.dtype) -> float | Tensor:
        return relative_tolerance(None, dtype, 1e-5, 1e-8) if self.tolerance is None else self.tolerance


@dataclass
class _Search(State):
    kept: ClassVar = ("z", "value", "norm", "steps", "converged")

    z: Tensor  # [E, P] the current point, its image under the metric, the gradient and its image
    image: Tensor
    g: Tensor
    g_image: Tensor
    value: Tensor  # [E]
    norm: Tensor  # [E] of the gradient in the large form
    d: Tensor  # [E, P] the direction and its image
    d_image: Tensor
    slope: Tensor  # [E]
    t: Tensor  # [E] the next trial step, between low and high
    low: Tensor
    high: Tensor
    trials: Tensor
    history: History
    steps: Tensor  # [E] accepted steps
    goal: Tensor  # [E] what the norm is to come down to
    gap: Tensor  # [E] half the squared gradient is to be at most so much of the value
    late: Tensor  # [E] accepted steps since the gradient was first small enough
    active: Tensor  # [E] bool
    converged: Tensor  # [E] bool


def _begin(space: Space, z: Tensor, m: int) -> _Search:
    image = space.image(z)
    value, g, norm = space.evaluate(z, image)
    g_image = space.image(g)
    zero = torch.zeros_like(value)
    count = torch.zeros(len(z), dtype=torch.long, device=z.device)
    length = dot(g, g_image).clamp_min(0).sqrt()
    t, unit = first_step(value, length, space.penalised)
    return _Search(
        z=z, image=image, g=g, g_image=g_image, value=value, norm=norm,
        d=-g, d_image=-g_image, slope=-(length**2),
        t=t, low=zero, high=torch.full_like(zero, torch.inf), trials=count,
        history=History.empty(z, m, unit), steps=count, goal=zero, gap=zero, late=count,
        active=count > 0, converged=count > 0,
    )  # fmt: skip


@dataclass(frozen=True)
class _Turn:
    """One evaluation at each episode's trial step, and what follows from it."""

    space: Space
    max_trials: int

    def __call__(self, s: _Search) -> _Search:
        space = self.space
        zero, one = s.t.new_zeros(()), s.t.new_ones(())
        step = column(torch.where(s.active, s.t, zero), s.z)
        z, image = torch.addcmul(s.z, step, s.d), torch.addcmul(s.image, step, s.d_image)
        value, g, norm = space.evaluate(z, image)
        trial = Bracket(s.t, s.low, s.high, s.trials)
        accepted, (t, low, high, trials) = weak_wolfe(
            trial, s.value, s.slope, value, dot(g, s.d_image), norm.isfinite(), s.active
        )
        going = s.active & (trials < self.max_trials)
        count = int(accepted.sum())
        if count == 0:
            return replace(s, t=t, low=low, high=high, trials=trials, active=going)

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return new if count == accepted.shape[0] else torch.where(column(accepted, new), new, old)

        # Accepted: a new pair for the history, a new direction.
        g_image = space.image(g)
        history, d = s.history.then(accepted, step * s.d, g - s.g, g_image - s.g_image, g, g_image)
        descent = dot(d, g_image)
        # A direction that does not descend (rounding): the gradient, and the history begins anew.
        lost = accepted & ~(descent < 0)
        # Steps that had to be short stay short for a while: a saturating loss bends more than its past says.
        # The very first is not short if it was one unit of its own: the first pair knows that unit.
        first = torch.where((s.steps == 0) & (history.unit < 1), one, (2 * s.t).clamp_max(1))
        if bool(lost.any()):
            history.forget(lost)
            d = torch.where(column(lost, d), -g, d)
            descent = torch.where(lost, -dot(g, g_image), descent)
            first = torch.where(lost, first_step(value, (-descent).sqrt(), space.penalised)[0], first)
        d = choose(d, s.d)
        d_image = space.image(d)
        z, image, norm = choose(z, s.z), choose(image, s.image), choose(norm, s.norm)
        value = choose(value, s.value)
        deep = s.gap.isinf() | (dot(g, g_image) <= 2 * s.gap * value.abs())
        small = accepted & (norm <= s.goal) & deep
        short = dot(d, d_image).clamp_min(0) <= 1e-4 * (1 + dot(z, image).clamp_min(0).sqrt()) ** 2
        late = s.late + small
        converged = s.converged | (small & short)
        return replace(
            s, z=z, image=image, g=choose(g, s.g), g_image=choose(g_image, s.g_image), value=value,
            norm=norm, d=d, d_image=d_image, slope=choose(descent, s.slope), t=choose(first, t),
            low=torch.where(accepted, zero, low), high=torch.where(accepted, one / zero, high), trials=trials,
            history=history, steps=s.steps + accepted, late=late, converged=converged,
            active=going & ~converged & (late < 50),
        )  # fmt: skip
