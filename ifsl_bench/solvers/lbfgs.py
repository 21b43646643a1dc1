"""Batched L-BFGS: every episode with its own line search, history and end.

One evaluation of all running episodes per turn. An episode whose trial step is accepted gets a new direction, one
whose step is not gets a shorter or longer one. A turn is some fifty operations, however many episodes there are, and
none that the host waits for: it looks at them every LOOK turns. Objectives that have kernels for a CPU are
solved one by one there (`Objective.search`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.solvers.coordinates import Space, Whitened, below, coordinates
from ifsl_bench.solvers.linear import check_options
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Outcome, relative_tolerance
from ifsl_bench.solvers.tree import State, Tree, chosen, dot, fixed_draw, iterate


@dataclass
class History(State):
    """The latest pairs (s, y), differences of points and of gradients, oldest first.

    All episodes write in the same turn; one whose step was not good writes zeros, which have no effect. The pairs are a
    window that slides along a longer memory.
    """

    common: ClassVar = ("large", "size", "end")

    pairs: Tensor  # [E, 4m, 2, P]
    scale: Tensor  # [E, 1] the inverse Hessian without any pairs
    noise: Tensor  # [E, 1] a pair with <s, y> below so much of <y, y> is rounding
    large: Tensor  # [] the curvature of a pair that plays no part
    size: int  # m
    end: int  # the window ends before this slot

    @staticmethod
    def empty(z: Tensor, m: int, unit: Tensor) -> History:
        """Return the history before the first step.

        Args:
            z: the points of the search, [E, P].
            m: the number of pairs.
            unit: the unit of the inverse Hessian, [E].
        """
        noise = torch.finfo(z.dtype).eps * unit[:, None]
        pairs = z.new_zeros(len(z), 4 * m, 2, z.shape[1])
        return History(pairs, torch.ones_like(noise), noise, noise.new_full((), 1e30), m, 2 * m)

    def remember(self, new: Tensor, old: Tensor) -> None:
        """Add the differences of the latest step; each argument is a point and its gradient side by side.

        Args:
            new: after the step, [E, 2P].
            old: before it, [E, 2P].
        """
        if self.end == 4 * self.size:
            self.end = 2 * self.size
            self.pairs[:, : self.end] = self.pairs[:, self.end :]
        torch.sub(new, old, out=self.pairs[:, self.end].flatten(1))
        self.end += 1

    def direction(self, g: Tensor, longer: bool = False) -> tuple[Tensor, Tensor]:
        """Return -H g, and whether the latest pair is sound [E].

        H is in its compact form (Byrd, Nocedal & Schnabel 1994, eq. 3.1).

        Args:
            g: gradients, [E, P].
            longer: H has twice as many as the m latest pairs.
        """
        m = self.size * (1 + longer)
        window = self.pairs[:, self.end - m : self.end].flatten(1, 2)  # [E, 2m, P], s and y in turns
        products, q = window @ window.mT, window @ g[:, :, None]  # [E, 2m, 2m], [E, 2m, 1]
        r, yy = products[:, ::2, 1::2], products[:, 1::2, 1::2]  # [E, m, m]; r is read above its diagonal alone
        curvature = r.diagonal(dim1=1, dim2=2)  # [E, m]
        ratio = curvature / yy.diagonal(dim1=1, dim2=2)
        sound = ratio > self.noise
        curvature.copy_(torch.where(sound, curvature, self.large))
        self.scale = torch.where(sound[:, -1:], ratio[:, -1:], self.scale)
        k = self.scale[:, :, None]
        a = torch.linalg.solve_triangular(r, q[:, ::2], upper=True)  # [E, m, 1]
        b = torch.addcmul(k * torch.baddbmm(q[:, 1::2], yy, a, alpha=-1), curvature[:, :, None], a, value=-1)
        b = torch.linalg.solve_triangular(r.mT, b, upper=False)
        weights = torch.stack([b, k * a], 2).view(-1, 1, 2 * m)
        return torch.baddbmm((self.scale * g)[:, None], weights, window, beta=-1)[:, 0], sound[:, -1]


LEAST = 1e-4  # a good step takes off so much of what the slope promised


def first_step(value: Tensor, length: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Return the first step along -g, and the unit of such steps, [E].

    No further than a length of 1, and then the unit is 1. But an objective that is nowhere negative cannot fall by more
    than its value: where a step of length 1 would have to, to be good (`weak_wolfe`), it does not show the scale of the
    problem, and the unit is the step to the minimum of a parabola that touches zero.

    Args:
        value: the objective, [E].
        length: |g| in the metric, [E].
        nonnegative: the objective is nowhere negative.
    """
    t = 1 / length.clamp_min(1)
    square = length.square()
    far = (value > 0) & (value < LEAST * t * square) & nonnegative
    unit = torch.where(far, 2 * value / square, 1)
    return torch.where(far, unit, t), unit


def rounding(value: Tensor) -> Tensor:
    """Return the rise [E] of a value [E] that may be rounding."""
    return 16 * torch.finfo(value.dtype).eps * (1 + value.abs())


def falls(t: Tensor, value: Tensor, slope: Tensor, there: Tensor, slack: Tensor) -> Tensor:
    """Mark steps that take off enough of the value, or miss that by no more than rounding; NaN never does.

    Args:
        t: the steps, [E].
        value: at t = 0, [E].
        slope: at t = 0, [E].
        there: the value at the step, [E].
        slack: see `rounding`, [E].
    """
    return there <= torch.addcmul(value, t, slope, value=LEAST) + slack


def weak_wolfe(
    t: Tensor,
    low: Tensor,
    high: Tensor,
    value: Tensor,
    slope: Tensor,
    there: Tensor,
    slope_there: Tensor,
    slack: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mark the good trial steps, and return the next ones and their brackets, by bisection and interpolation.

    A step of 0 stays one.

    Args:
        t: the trial steps, [E].
        low: the lower end of their bracket, [E].
        high: the upper end, [E].
        value: at t = 0, [E].
        slope: at t = 0, [E].
        there: the value at the trial, [E].
        slope_there: the slope at the trial, [E].
        slack: see `rounding`, [E].
    """
    low_enough = falls(t, value, slope, there, slack)
    good = low_enough & (slope_there >= 0.9 * slope)
    # Too high: interpolate a parabola, away from the ends; still steep: go further.
    high, low = torch.where(low_enough, high, t), torch.where(low_enough, t, low)
    linear, width = t * slope, high - low
    parabola = 0.5 * t * linear / (value + linear - there)
    inside = torch.fmin(torch.fmax(parabola, low + 0.1 * width), low + 0.6 * width)
    return good, torch.where(high.isinf(), 3 * t, torch.where(low_enough, low + 0.5 * width, inside)), low, high


def aside(z: Tensor) -> Tensor:
    """Return small steps [E, P] off z, the same for equal z: off a saddle."""
    return 1e-3 * (1 + z.abs().amax(1, keepdim=True)) * fixed_draw(z.shape[1]).to(z)


FIRST_LOOK, LOOK = 20, 10  # turns before the first look at how far the episodes have come, and between two
LATE = 60  # turns after which few episodes are left, for which twice as many pairs are stored
CAREFUL = 16  # turns with a line search that also goes further: what minimum is found is decided here


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS with a weak-Wolfe line search by bracketing and interpolation.

    Stops at |grad L| <= tolerance |grad L at the start| (one or [E], default 1e-5 in float32, 1e-8 in float64), given
    that the next step would also be short against |v|: an objective that falls for ever passes the first test and not
    the second, and is reported as not converged. A start without a gradient may be a saddle, or flat: it is left by a
    small random step, and where there is still no gradient nothing has converged.

    Works in the objective's own coordinates where v0 is None and it has some. Where <z, z> / 2 in their metric is
    the penalty, 1/2 |grad L|^2 <= gap L must hold too, which bounds L - L* around a minimum: with a weak penalty the
    first test shows little. What float32 cannot solve there is solved again in float64. An objective may offer a search
    of its own with the same rules, `Objective.search`.

    escapes: how often an episode that has converged where the objective curves downwards, at a saddle, goes on from a
    lower point along that curvature. One that is at a saddle still counts as converged: its gradient has vanished.

    max_steps: evaluations of the objective for each episode. history: pairs in memory, twice as many in long searches.
    max_trials: evaluations in one line search.

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
        if not isinstance(self.escapes, int) or self.escapes < 0:
            raise ValueError(f"LBFGS(escapes={self.escapes}): it must be a whole number, at least 0")

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if v0 is None and (outcome := objective.search(self, args)) is not None:
            return outcome
        space = coordinates(objective, v0, args)
        outcome = self._all_at_once(space)
        wrong = ~outcome.converged & outcome.objective.isfinite()
        if space.dtype == torch.float64 or (count := int(wrong.sum())) == 0:
            return outcome
        if (hard := space.double(rows := chosen(wrong, count))) is None:
            return outcome
        relative = torch.as_tensor(self.relative(space.dtype))
        solver = replace(self, tolerance=relative[rows] if relative.dim() else relative)
        return outcome.put(rows, solver._all_at_once(hard))

    def _all_at_once(self, space: Space) -> Outcome:
        z = space.initial()  # [E, P]
        begin = _begin(space, z, self.history)
        if bool((still := begin.norm == 0).any()):
            z = torch.where(still[:, None], z + aside(z), z)
            begin = _begin(space, z, self.history)
        goal = self.relative(z.dtype) * begin.norm
        outcome = self._search(space, goal, begin)
        if self.escapes:
            outcome = self._past_saddles(space, goal, outcome)
        return replace(outcome, v=space.expand(outcome.v))

    def _past_saddles(self, space: Space, goal: Tensor, outcome: Outcome) -> Outcome:
        """Send on the searches that have stopped where the objective curves downwards, each at most `escapes` times.

        Points are in the space's coordinates.
        """
        rows = outcome.converged.nonzero()[:, 0]
        for _ in range(self.escapes if len(rows) else 0):
            if (part := space.take(rows)) is None:
                rows = torch.arange(len(outcome.v), device=rows.device)
            z, lower = below(part or space, outcome.v[rows], outcome.objective[rows])
            if not bool(lower.any()):
                break
            if part is not None:
                z, rows = z[lower], rows[lower]
                part = space.take(rows)
            begin = _begin(part or space, z, self.history)
            outcome = outcome.put(rows, self._search(part or space, goal[rows], begin))
        return outcome

    def _search(self, space: Space, goal: Tensor, begin: _Search) -> Outcome:
        """Search down to a gradient of norm `goal` [E]; the point is in the space's coordinates."""
        begin.goal = goal
        whitened = space.whitened()
        turn = _Turn(whitened)

        def take(index: Tensor) -> _Turn | None:
            nonlocal turn
            if (part := turn.space.take(index)) is None:
                return None
            turn = _Turn(part)
            return turn

        def settle(s: _Search) -> tuple[_Search, Tensor]:
            return turn.settle(s, self.gap if space.penalised else torch.inf, 0.25**self.max_trials)

        s = iterate(turn, begin, self.max_steps, settle, take, LOOK, FIRST_LOOK)
        z = whitened.back(s.point[:, : s.d.shape[1]])
        # Here it was in other coordinates; what counts is where z is.
        value, _, norm = space.evaluate(z, space.image(z))
        return Outcome(z, s.converged & (norm <= 10 * goal), s.steps, norm, value)

    def relative(self, dtype: torch.dtype) -> float | Tensor:
        return relative_tolerance(None, dtype, 1e-5, 1e-8) if self.tolerance is None else self.tolerance


@dataclass
class _Search(State):
    outputs: ClassVar = ("point", "steps", "converged")
    common: ClassVar = ("unity", "longer", "shorter", "turn", "seen")

    point: Tensor  # [E, 2P] where it stands, and the gradient there
    value: Tensor  # [E]
    norm: Tensor  # [E] of the gradient in the large form, as it was looked at last
    d: Tensor  # [E, P] the direction
    slope: Tensor  # [E]
    t: Tensor  # [E] the next trial step, between low and high; 0 for episodes that are done
    low: Tensor
    high: Tensor
    unit: Tensor  # [E] of the first steps
    slack: Tensor  # [E] see `rounding`
    unity: Tensor  # []
    longer: Tensor  # [] what the next step is multiplied by where one was good, and where not
    shorter: Tensor
    history: History
    accepted: Tensor  # [E] steps, also those after an episode is done
    steps: Tensor  # [E] accepted steps
    goal: Tensor  # [E] what the norm is to come down to
    late: Tensor  # [E] turns since the gradient was first small enough
    active: Tensor  # [E] bool
    converged: Tensor  # [E] bool
    turn: int = 0
    seen: int = 0  # the turn of the latest look


def _begin(whole: Space, z: Tensor, m: int) -> _Search:
    space = whole.whitened()
    w = space.into(z)
    value, pieces = space.evaluate(w)
    g = torch.cat([*pieces], 1)
    norm, square = space.norm(g), dot(g, g)
    t, unit = first_step(value, square.sqrt(), whole.penalised)
    active = (norm > 0) & value.isfinite()
    zero, count = torch.zeros_like(value), torch.zeros(len(z), dtype=torch.long, device=z.device)
    return _Search(
        point=torch.cat([w, g], 1),
        value=value,
        norm=norm,
        d=-g,
        slope=-square,
        t=torch.where(active, t, zero),
        low=zero,
        high=torch.full_like(zero, torch.inf),
        unit=unit,
        slack=rounding(value),
        unity=zero.new_full((), 1.0),
        longer=zero.new_full((), 2.0),
        shorter=zero.new_full((), 0.25),
        history=History.empty(w, m, unit),
        accepted=count,
        steps=count,
        goal=zero,
        late=count,
        active=active,
        converged=count > 0,
    )


@dataclass(frozen=True)
class _Turn:
    """One evaluation at each episode's trial step, and what follows from it."""

    space: Whitened

    def __call__(self, s: _Search) -> _Search:
        size = s.d.shape[1]
        there = torch.addcmul(s.point[:, :size], s.t[:, None], s.d)
        value, pieces = self.space.evaluate(there)
        new = torch.cat([there, *pieces], 1)  # [E, 2P]
        careful, low, high = s.turn < CAREFUL, s.low, s.high
        if careful:
            slope = dot(new[:, size:], s.d)
            good, again, low, high = weak_wolfe(s.t, low, high, s.value, s.slope, value, slope, s.slack)
        else:
            good = falls(s.t, s.value, s.slope, value, s.slack)
        point = torch.where(good[:, None], new, s.point)
        s.history.remember(point, s.point)
        g = point[:, size:]
        d, curved = s.history.direction(g, longer=s.turn >= LATE)
        if careful:
            # Steps that had to be short stay short for a while: a saturating loss bends more than it did before.
            # The very first is not short if it was one unit of its own: the first pair knows that unit.
            first = torch.where(s.unit < 1, 1, (2 * s.t).clamp_max(1)) if s.turn == 0 else (2 * s.t).clamp_max(1)
            t, d = torch.where(good, first, again), torch.where(good[:, None], d, s.d)
            low, high = low.masked_fill(good, 0), high.masked_fill(good, torch.inf)
        else:
            # Where the objective curves downwards no pair is known, nor how long a step should be.
            t = torch.minimum(s.t * torch.where(good, s.longer, s.shorter), s.unity / curved)
        return replace(
            s,
            point=point,
            value=torch.where(good, value, s.value),
            d=d,
            slope=dot(d, g),
            t=t,
            low=low,
            high=high,
            accepted=s.accepted + good,
            turn=s.turn + 1,
        )

    def settle(self, s: _Search, gap: float, least: float) -> tuple[_Search, Tensor]:
        """Decide from how far they have come which episodes go on [E]; the others make steps of 0 from now on."""
        size = s.d.shape[1]
        w, g = s.point[:, :size], s.point[:, size:]
        norm = self.space.norm(g)
        small = s.active & (norm <= s.goal)
        if gap < torch.inf:
            small = small & (dot(g, g) <= 2 * gap * s.value.abs())
        short = dot(s.d, s.d) <= 1e-4 * (1 + dot(w, w).sqrt()) ** 2
        late = s.late + small * (s.turn - s.seen)
        converged = s.converged | (small & short)
        active = s.active & ~converged & (late < 50) & (s.t > least * s.unit)
        return replace(
            s,
            norm=norm,
            steps=torch.where(s.active, s.accepted, s.steps),
            t=torch.where(active, s.t, 0),
            late=late,
            active=active,
            converged=converged,
            seen=s.turn,
        ), active
