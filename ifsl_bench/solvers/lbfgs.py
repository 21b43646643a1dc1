"""Batched L-BFGS: every episode with its own line search, history and end.

One evaluation of all running episodes per turn. An episode whose trial step is accepted gets a new direction, one
whose step is not gets a shorter or longer one. A turn is some fifty operations, however many episodes there are, and
none that the host waits for: it looks at them every LOOK turns. Objectives that have kernels for a CPU are
solved one by one there (`Objective.search_minimum`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.solvers.coordinates import (
    SearchCoordinates,
    WhitenedCoordinates,
    choose_search_coordinates,
    escape_saddles,
)
from ifsl_bench.solvers.linear import check_solver_options
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Outcome, relative_tolerance
from ifsl_bench.solvers.tree import (
    IterationState,
    Tree,
    fixed_normal_draws,
    indices_of_marked_episodes,
    inner_product_by_episode,
    iterate_until_finished,
)


@dataclass
class CurvaturePairs(IterationState):
    """The latest pairs (s, y), differences of points and of gradients, oldest first.

    All episodes write in the same turn; one whose step was not good writes zeros, which have no effect. The pairs are a
    window that slides along a longer memory.
    """

    fields_common_to_episodes: ClassVar = ("curvature_of_ignored_pair", "n_pairs", "window_end_slot")

    pairs: Tensor  # [E, 4m, 2, P]
    initial_inverse_hessian_scale: Tensor  # [E, 1] the inverse Hessian without any pairs
    rounding_noise_level: Tensor  # [E, 1] a pair with <s, y> below so much of <y, y> is rounding
    curvature_of_ignored_pair: Tensor  # [] the curvature of a pair that plays no part
    n_pairs: int  # m
    window_end_slot: int  # the window ends before this slot

    @staticmethod
    def make_empty_history(z: Tensor, m: int, unit: Tensor) -> CurvaturePairs:
        """Return the history before the first step.

        Args:
            z: the points of the search, [E, P].
            m: the number of pairs.
            unit: the unit of the inverse Hessian, [E].
        """
        noise = torch.finfo(z.dtype).eps * unit[:, None]
        pairs = z.new_zeros(len(z), 4 * m, 2, z.shape[1])
        return CurvaturePairs(pairs, torch.ones_like(noise), noise, noise.new_full((), 1e30), m, 2 * m)

    def add_pair(self, new: Tensor, old: Tensor) -> None:
        """Add the differences of the latest step; each argument is a point and its gradient side by side.

        Args:
            new: after the step, [E, 2P].
            old: before it, [E, 2P].
        """
        if self.window_end_slot == 4 * self.n_pairs:
            self.window_end_slot = 2 * self.n_pairs
            self.pairs[:, : self.window_end_slot] = self.pairs[:, self.window_end_slot :]
        torch.sub(new, old, out=self.pairs[:, self.window_end_slot].flatten(1))
        self.window_end_slot += 1

    def descent_direction(self, g: Tensor, doubled: bool = False) -> tuple[Tensor, Tensor]:
        """Return -H g, and whether the latest pair is sound [E].

        H is in its compact form (Byrd, Nocedal & Schnabel 1994, eq. 3.1).

        Args:
            g: gradients, [E, P].
            doubled: H has twice as many as the m latest pairs.
        """
        m = self.n_pairs * (1 + doubled)
        window = self.pairs[:, self.window_end_slot - m : self.window_end_slot].flatten(
            1, 2
        )  # [E, 2m, P], s and y in turns
        products, q = window @ window.mT, window @ g[:, :, None]  # [E, 2m, 2m], [E, 2m, 1]
        r, yy = products[:, ::2, 1::2], products[:, 1::2, 1::2]  # [E, m, m]; r is read above its diagonal alone
        curvature = r.diagonal(dim1=1, dim2=2)  # [E, m]
        ratio = curvature / yy.diagonal(dim1=1, dim2=2)
        sound = ratio > self.rounding_noise_level
        curvature.copy_(torch.where(sound, curvature, self.curvature_of_ignored_pair))
        self.initial_inverse_hessian_scale = torch.where(
            sound[:, -1:], ratio[:, -1:], self.initial_inverse_hessian_scale
        )
        k = self.initial_inverse_hessian_scale[:, :, None]
        a = torch.linalg.solve_triangular(r, q[:, ::2], upper=True)  # [E, m, 1]
        b = torch.addcmul(k * torch.baddbmm(q[:, 1::2], yy, a, alpha=-1), curvature[:, :, None], a, value=-1)
        b = torch.linalg.solve_triangular(r.mT, b, upper=False)
        weights = torch.stack([b, k * a], 2).view(-1, 1, 2 * m)
        return torch.baddbmm((self.initial_inverse_hessian_scale * g)[:, None], weights, window, beta=-1)[:, 0], sound[
            :, -1
        ]


SUFFICIENT_DECREASE = 1e-4  # a good step takes off so much of what the slope promised


def choose_first_step_length(value: Tensor, length: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Return the first step along -g, and the unit of such steps, [E].

    No further than a length of 1, and then the unit is 1. But an objective that is nowhere negative cannot fall by more
    than its value: where a step of length 1 would have to, to be good (`check_weak_wolfe_and_next_step`), it does not
    show the scale of the problem, and the unit is the step to the minimum of a parabola that touches zero.

    Args:
        value: the objective, [E].
        length: |g| in the metric, [E].
        nonnegative: the objective is nowhere negative.
    """
    t = 1 / length.clamp_min(1)
    square = length.square()
    far = (value > 0) & (value < SUFFICIENT_DECREASE * t * square) & nonnegative
    unit = torch.where(far, 2 * value / square, 1)
    return torch.where(far, unit, t), unit


def estimate_rounding_error(value: Tensor) -> Tensor:
    """Return the rise [E] of a value [E] that may be rounding."""
    return 16 * torch.finfo(value.dtype).eps * (1 + value.abs())


def is_sufficient_decrease(t: Tensor, value: Tensor, slope: Tensor, there: Tensor, slack: Tensor) -> Tensor:
    """Mark steps that take off enough of the value, or miss that by no more than rounding; NaN never does.

    Args:
        t: the steps, [E].
        value: at t = 0, [E].
        slope: at t = 0, [E].
        there: the value at the step, [E].
        slack: see `estimate_rounding_error`, [E].
    """
    return there <= torch.addcmul(value, t, slope, value=SUFFICIENT_DECREASE) + slack


def check_weak_wolfe_and_next_step(
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
        slack: see `estimate_rounding_error`, [E].
    """
    low_enough = is_sufficient_decrease(t, value, slope, there, slack)
    good = low_enough & (slope_there >= 0.9 * slope)
    # Too high: interpolate a parabola, away from the ends; still steep: go further.
    high, low = torch.where(low_enough, high, t), torch.where(low_enough, t, low)
    linear, width = t * slope, high - low
    parabola = 0.5 * t * linear / (value + linear - there)
    inside = torch.fmin(torch.fmax(parabola, low + 0.1 * width), low + 0.6 * width)
    return good, torch.where(high.isinf(), 3 * t, torch.where(low_enough, low + 0.5 * width, inside)), low, high


def make_saddle_offset(z: Tensor) -> Tensor:
    """Return small steps [E, P] off z, the same for equal z: off a saddle."""
    return 1e-3 * (1 + z.abs().amax(1, keepdim=True)) * fixed_normal_draws(z.shape[1]).to(z)


TURNS_BEFORE_FIRST_CHECK, TURNS_BETWEEN_CHECKS = (
    20,
    10,
)  # turns before the first look at how far the episodes have come, and between two
STEPS_BEFORE_LONG_MEMORY = 60  # turns after which few episodes are left, for which twice as many pairs are stored
CAREFUL_STEPS = 16  # turns with a line search that also goes further: what minimum is found is decided here


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
    of its own with the same rules, `Objective.search_minimum`.

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
        check_solver_options(self, positive=("tolerance", "gap"), counts=("max_steps", "history", "max_trials"))
        if not isinstance(self.escapes, int) or self.escapes < 0:
            raise ValueError(f"LBFGS(escapes={self.escapes}): it must be a whole number, at least 0")

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        if v0 is None and (outcome := objective.search_minimum(self, args)) is not None:
            return outcome
        space = choose_search_coordinates(objective, v0, args)
        outcome = self._solve_batch(space)
        wrong = ~outcome.converged & outcome.objective.isfinite()
        if space.dtype == torch.float64 or (count := int(wrong.sum())) == 0:
            return outcome
        if (hard := space.select_in_float64(rows := indices_of_marked_episodes(wrong, count))) is None:
            return outcome
        relative = torch.as_tensor(self.relative_tolerance(space.dtype))
        solver = replace(self, tolerance=relative[rows] if relative.dim() else relative)
        return outcome.replace_episodes(rows, solver._solve_batch(hard))

    def _solve_batch(self, space: SearchCoordinates) -> Outcome:
        z = space.initial_point()  # [E, P]
        begin = _start_search(space, z, self.history)
        if bool((still := begin.gradient_norm == 0).any()):
            z = torch.where(still[:, None], z + make_saddle_offset(z), z)
            begin = _start_search(space, z, self.history)
        goal = self.relative_tolerance(z.dtype) * begin.gradient_norm
        outcome = self._search(space, goal, begin)
        if self.escapes:
            outcome = self._escape_saddles(space, goal, outcome)
        return replace(outcome, unknowns=space.to_unknowns(outcome.unknowns))

    def _escape_saddles(self, space: SearchCoordinates, goal: Tensor, outcome: Outcome) -> Outcome:
        """Send on the searches that have stopped where the objective curves downwards, each at most `escapes` times.

        Points are in the space's coordinates.
        """
        rows = outcome.converged.nonzero()[:, 0]
        for _ in range(self.escapes if len(rows) else 0):
            if (part := space.select_episodes(rows)) is None:
                rows = torch.arange(len(outcome.unknowns), device=rows.device)
            z, lower = escape_saddles(part or space, outcome.unknowns[rows], outcome.objective[rows])
            if not bool(lower.any()):
                break
            if part is not None:
                z, rows = z[lower], rows[lower]
                part = space.select_episodes(rows)
            begin = _start_search(part or space, z, self.history)
            outcome = outcome.replace_episodes(rows, self._search(part or space, goal[rows], begin))
        return outcome

    def _search(self, space: SearchCoordinates, goal: Tensor, begin: _SearchState) -> Outcome:
        """Search down to a gradient of norm `goal` [E]; the point is in the space's coordinates."""
        begin.goal_gradient_norm = goal
        whitened = space.to_whitened_coordinates()
        turn = _LineSearchEvaluation(whitened)

        def select_turn(index: Tensor) -> _LineSearchEvaluation | None:
            nonlocal turn
            if (part := turn.space.select_episodes(index)) is None:
                return None
            turn = _LineSearchEvaluation(part)
            return turn

        def finish_episodes(s: _SearchState) -> tuple[_SearchState, Tensor]:
            return turn.finish_episodes(s, self.gap if space.is_metric_penalty else torch.inf, 0.25**self.max_trials)

        s = iterate_until_finished(
            turn, begin, self.max_steps, finish_episodes, select_turn, TURNS_BETWEEN_CHECKS, TURNS_BEFORE_FIRST_CHECK
        )
        z = whitened.to_coordinates(s.point_and_gradient[:, : s.search_direction.shape[1]])
        # Here it was in other coordinates; what counts is where z is.
        value, _, norm = space.evaluate(z, space.apply_metric(z))
        return Outcome(z, s.converged & (norm <= 10 * goal), s.steps, norm, value)

    def relative_tolerance(self, dtype: torch.dtype) -> float | Tensor:
        return relative_tolerance(None, dtype, 1e-5, 1e-8) if self.tolerance is None else self.tolerance


@dataclass
class _SearchState(IterationState):
    fields_put_back: ClassVar = ("point_and_gradient", "steps", "converged")
    fields_common_to_episodes: ClassVar = (
        "unit_step_length",
        "step_growth_factor",
        "step_shrink_factor",
        "evaluation_number",
        "last_check_evaluation",
    )

    point_and_gradient: Tensor  # [E, 2P] where it stands, and the gradient there
    objective_value: Tensor  # [E]
    gradient_norm: Tensor  # [E] of the gradient in the large form, as it was looked at last
    search_direction: Tensor  # [E, P] the direction
    slope_along_direction: Tensor  # [E]
    step_length: Tensor  # [E] the next trial step, between low and high; 0 for episodes that are done
    bracket_low: Tensor
    bracket_high: Tensor
    first_step_length_unit: Tensor  # [E] of the first steps
    rounding_slack: Tensor  # [E] see `estimate_rounding_error`
    unit_step_length: Tensor  # []
    step_growth_factor: Tensor  # [] what the next step is multiplied by where one was good, and where not
    step_shrink_factor: Tensor
    curvature_pairs: CurvaturePairs
    accepted_steps: Tensor  # [E] steps, also those after an episode is done
    steps: Tensor  # [E] accepted steps
    goal_gradient_norm: Tensor  # [E] what the norm is to come down to
    evaluations_near_goal: Tensor  # [E] turns since the gradient was first small enough
    episode_is_active: Tensor  # [E] bool
    converged: Tensor  # [E] bool
    evaluation_number: int = 0
    last_check_evaluation: int = 0  # the turn of the latest look


def _start_search(space: SearchCoordinates, z: Tensor, n_pairs: int) -> _SearchState:
    whitened = space.to_whitened_coordinates()
    w = whitened.from_coordinates(z)
    value, pieces = whitened.evaluate(w)
    g = torch.cat([*pieces], 1)
    norm, square = whitened.gradient_norm(g), inner_product_by_episode(g, g)
    t, unit = choose_first_step_length(value, square.sqrt(), space.is_metric_penalty)
    active = (norm > 0) & value.isfinite()
    zero, count = torch.zeros_like(value), torch.zeros(len(z), dtype=torch.long, device=z.device)
    return _SearchState(
        point_and_gradient=torch.cat([w, g], 1),
        objective_value=value,
        gradient_norm=norm,
        search_direction=-g,
        slope_along_direction=-square,
        step_length=torch.where(active, t, zero),
        bracket_low=zero,
        bracket_high=torch.full_like(zero, torch.inf),
        first_step_length_unit=unit,
        rounding_slack=estimate_rounding_error(value),
        unit_step_length=zero.new_full((), 1.0),
        step_growth_factor=zero.new_full((), 2.0),
        step_shrink_factor=zero.new_full((), 0.25),
        curvature_pairs=CurvaturePairs.make_empty_history(w, n_pairs, unit),
        accepted_steps=count,
        steps=count,
        goal_gradient_norm=zero,
        evaluations_near_goal=count,
        episode_is_active=active,
        converged=count > 0,
    )


@dataclass(frozen=True)
class _LineSearchEvaluation:
    """One evaluation at each episode's trial step, and what follows from it."""

    space: WhitenedCoordinates

    def __call__(self, s: _SearchState) -> _SearchState:
        size = s.search_direction.shape[1]
        there = torch.addcmul(s.point_and_gradient[:, :size], s.step_length[:, None], s.search_direction)
        value, pieces = self.space.evaluate(there)
        new = torch.cat([there, *pieces], 1)  # [E, 2P]
        careful, low, high = s.evaluation_number < CAREFUL_STEPS, s.bracket_low, s.bracket_high
        if careful:
            slope = inner_product_by_episode(new[:, size:], s.search_direction)
            good, again, low, high = check_weak_wolfe_and_next_step(
                s.step_length, low, high, s.objective_value, s.slope_along_direction, value, slope, s.rounding_slack
            )
        else:
            good = is_sufficient_decrease(
                s.step_length, s.objective_value, s.slope_along_direction, value, s.rounding_slack
            )
        point = torch.where(good[:, None], new, s.point_and_gradient)
        s.curvature_pairs.add_pair(point, s.point_and_gradient)
        g = point[:, size:]
        d, curved = s.curvature_pairs.descent_direction(g, doubled=s.evaluation_number >= STEPS_BEFORE_LONG_MEMORY)
        if careful:
            # Steps that had to be short stay short for a while: a saturating loss bends more than it did before.
            # The very first is not short if it was one unit of its own: the first pair knows that unit.
            first = (
                torch.where(s.first_step_length_unit < 1, 1, (2 * s.step_length).clamp_max(1))
                if s.evaluation_number == 0
                else (2 * s.step_length).clamp_max(1)
            )
            t, d = torch.where(good, first, again), torch.where(good[:, None], d, s.search_direction)
            low, high = low.masked_fill(good, 0), high.masked_fill(good, torch.inf)
        else:
            # Where the objective curves downwards no pair is known, nor how long a step should be.
            t = torch.minimum(
                s.step_length * torch.where(good, s.step_growth_factor, s.step_shrink_factor),
                s.unit_step_length / curved,
            )
        return replace(
            s,
            point_and_gradient=point,
            objective_value=torch.where(good, value, s.objective_value),
            search_direction=d,
            slope_along_direction=inner_product_by_episode(d, g),
            step_length=t,
            bracket_low=low,
            bracket_high=high,
            accepted_steps=s.accepted_steps + good,
            evaluation_number=s.evaluation_number + 1,
        )

    def finish_episodes(self, s: _SearchState, gap: float, least: float) -> tuple[_SearchState, Tensor]:
        """Decide from how far they have come which episodes go on [E]; the others make steps of 0 from now on."""
        size = s.search_direction.shape[1]
        w, g = s.point_and_gradient[:, :size], s.point_and_gradient[:, size:]
        norm = self.space.gradient_norm(g)
        small = s.episode_is_active & (norm <= s.goal_gradient_norm)
        if gap < torch.inf:
            small = small & (inner_product_by_episode(g, g) <= 2 * gap * s.objective_value.abs())
        short = (
            inner_product_by_episode(s.search_direction, s.search_direction)
            <= 1e-4 * (1 + inner_product_by_episode(w, w).sqrt()) ** 2
        )
        late = s.evaluations_near_goal + small * (s.evaluation_number - s.last_check_evaluation)
        converged = s.converged | (small & short)
        active = s.episode_is_active & ~converged & (late < 50) & (s.step_length > least * s.first_step_length_unit)
        return replace(
            s,
            gradient_norm=norm,
            steps=torch.where(s.episode_is_active, s.accepted_steps, s.steps),
            step_length=torch.where(active, s.step_length, 0),
            evaluations_near_goal=late,
            episode_is_active=active,
            converged=converged,
            last_check_evaluation=s.evaluation_number,
        ), active
