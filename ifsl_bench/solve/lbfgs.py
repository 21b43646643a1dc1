"""Batched L-BFGS: every episode with its own line search, history and end.

One evaluation of all running episodes per turn. An episode whose trial step is accepted gets a new direction, one
whose step is not gets a shorter or longer one, so no evaluation is made for an episode that does not need it.
Episodes that are done leave the batch once half of it is (where the arguments can be split), and do not move until
then. Very few episodes are solved one by one instead, where there is a way to (`single`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from .checks import check_options
from .objective import Objective, Space
from .outcome import Outcome, relative_tolerance
from .tree import Tree, column, dot, doubled, tree_map


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS with a weak-Wolfe line search by bracketing and interpolation.

    Stops at |grad L| <= tolerance |grad L at the start| (one or [E], default 1e-5 in float32, 1e-8 in float64), given
    that the next step would also be short beside |v|: an objective that falls for ever passes the first test and not
    the second, and is reported as not converged. A start without a gradient may be a saddle, or flat: it is left by a
    small random step, and where there is still no gradient nothing has converged.

    Works in the objective's own coordinates (`Objective.space`) where v0 is None. Where their metric is that of the
    penalty, 1/2 |grad L|^2 <= gap L is asked as well, which bounds L - L* around a minimum: with a weak penalty the
    first test says little. What float32 cannot solve there is solved again in float64. On a CPU that is done one by
    one, and so are up to `alone` episodes (default `single.FEW`) from the beginning, which is faster.

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
    alone: int | None = None

    def __post_init__(self) -> None:
        check_options(self, positive=("tolerance", "gap"), counts=("max_steps", "history", "max_trials"))

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        from ifsl_bench.learners.network_space import DualSpace
        from ifsl_bench.learners.single import few

        space = objective.space(v0, args)
        if not isinstance(space, DualSpace):
            return self._all_at_once(objective, v0, args)
        if few(args.features, self.alone):
            return self._one_by_one(space.objective, args)
        found = self._all_at_once(objective, None, args)
        rows = (~found.converged & found.objective.isfinite()).nonzero()[:, 0]
        if args.features.dtype == torch.float64 or len(rows) == 0:
            return found
        relative = torch.as_tensor(self._relative(args.features.dtype))
        solver = replace(self, tolerance=relative[rows] if relative.dim() else relative)
        part = replace(space.objective, begin=tree_map(lambda leaf: leaf[rows], space.objective.begin))
        hard = doubled(objective.take(args, rows))
        alone = args.features.device.type == "cpu"
        return found.put(rows, solver._one_by_one(part, hard) if alone else solver._all_at_once(part, None, hard))

    def _all_at_once(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        from ifsl_bench.learners.network_space import DualSpace
        from ifsl_bench.learners.single import aside

        space = objective.space(v0, args)
        z = space.initial()  # [E, P]
        s = _begin(space, z, self.history)
        if bool((still := s.norm == 0).any()):
            z = torch.where(still[:, None], z + aside(z), z)
            s = _begin(space, z, self.history)
        s.goal = self._relative(z.dtype) * s.norm
        s.gap = torch.full_like(s.norm, self.gap if isinstance(space, DualSpace) else torch.inf)
        s.active = (s.norm > 0) & s.value.isfinite()
        everyone, where = s, torch.arange(z.shape[0], device=z.device)
        splits = z.shape[0] > 1
        for _ in range(self.max_steps):
            running = int(s.active.sum())
            if running == 0:
                break
            if splits and 2 * running <= s.active.shape[0]:
                smaller = space.take(s.active.nonzero()[:, 0])
                splits = smaller is not None
                if smaller is not None:
                    everyone = everyone.put(where, s)
                    keep = s.active.nonzero()[:, 0]
                    space, s, where = smaller, s.select(keep), where[keep]
            s = _turn(space, s, self.max_trials)
        everyone = everyone.put(where, s)
        # Images were added up step by step; what counts is where z is.
        space, z = objective.space(v0, args), everyone.z
        value, _, norm = space.evaluate(z, space.image(z))
        converged = everyone.converged & (norm <= 10 * everyone.goal)
        return Outcome(space.expand(z), converged, everyone.steps, norm, value)

    def _relative(self, dtype: torch.dtype) -> float | Tensor:
        return relative_tolerance(None, dtype, 1e-5, 1e-8) if self.tolerance is None else self.tolerance

    def _one_by_one(self, objective: Objective, args: Tree) -> Outcome:
        from ifsl_bench.learners.network_space import DualSpace
        from ifsl_bench.learners.single import SingleNetwork, lbfgs

        like = args.features
        space = objective.space(None, doubled(args))
        assert isinstance(space, DualSpace)
        start = space.initial().numpy()
        goals = torch.as_tensor(self._relative(like.dtype)).expand(len(start)).tolist()
        found = [lbfgs(self, goals[i], SingleNetwork.of(space, i), z) for i, z in enumerate(start)]
        z, converged, steps, norm, value = zip(*found, strict=True)
        v = tree_map(lambda part: part.to(like.dtype), space.expand(torch.from_numpy(np.stack(z))))
        numbers = torch.tensor([norm, value], dtype=like.dtype)
        return Outcome(v, torch.tensor(converged), torch.tensor(steps), *numbers)


@dataclass
class _State:
    """All of it has a leading dimension E, so that episodes can be selected and put back."""

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
    pairs: Tensor  # [E, 2m, P] differences of points, then of gradients; rings that begin at `head`
    sy: Tensor  # [E, m, m] <s_i, y_j>, known where s_i is not younger than y_j
    yy: Tensor  # [E, m, m] <y_i, y_j>
    head: Tensor  # [E] the oldest slot, overwritten next
    scale: Tensor  # [E] the inverse Hessian before the pairs have their say
    steps: Tensor  # [E] accepted steps
    goal: Tensor  # [E] what the norm is to come down to
    gap: Tensor  # [E] half the squared gradient is to be at most so much of the value
    late: Tensor  # [E] accepted steps since the gradient was first small enough
    active: Tensor  # [E] bool
    converged: Tensor  # [E] bool

    def select(self, index: Tensor) -> _State:
        return _State(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def put(self, index: Tensor, part: _State) -> _State:
        """What the outcome is read from, with the episodes of `part` brought up to date."""
        if part is self:
            return self
        names = ("z", "value", "norm", "steps", "converged")
        return replace(self, **{n: getattr(self, n).index_copy(0, index, getattr(part, n)) for n in names})


def _begin(space: Space, z: Tensor, m: int) -> _State:
    image = space.image(z)
    value, g, norm = space.evaluate(z, image)
    g_image = space.image(g)
    episodes, size = z.shape
    zero = torch.zeros_like(value)
    count = torch.zeros(episodes, dtype=torch.long, device=z.device)
    length = dot(g, g_image).clamp_min(0).sqrt()
    return _State(
        z=z, image=image, g=g, g_image=g_image, value=value, norm=norm,
        d=-g, d_image=-g_image, slope=-(length**2),
        t=1 / length.clamp_min(1), low=zero, high=torch.full_like(zero, torch.inf), trials=count,
        pairs=z.new_zeros(episodes, 2 * m, size), sy=z.new_zeros(episodes, m, m), yy=z.new_zeros(episodes, m, m),
        head=count, scale=torch.ones_like(zero), steps=count, goal=zero, gap=zero, late=count,
        active=count > 0, converged=count > 0,
    )  # fmt: skip


def _turn(space: Space, s: _State, max_trials: int) -> _State:
    """One evaluation at each episode's trial step, and what follows from it."""
    eps = torch.finfo(s.z.dtype).eps
    zero, one = s.t.new_zeros(()), s.t.new_ones(())
    step = column(torch.where(s.active, s.t, zero), s.z)
    z, image = torch.addcmul(s.z, step, s.d), torch.addcmul(s.image, step, s.d_image)
    value, g, norm = space.evaluate(z, image)
    slope = dot(g, s.d_image)
    # Where rounding hides the decrease, the slope decides (Hager & Zhang 2005, the approximate Wolfe conditions).
    hidden = (value <= s.value + 16 * eps * (1 + s.value.abs())) & (slope <= -0.8 * s.slope)
    low_enough = (value <= s.value + 1e-4 * s.t * s.slope) | hidden
    flat_enough = slope >= 0.9 * s.slope
    finite = norm.isfinite()
    accepted = s.active & low_enough & flat_enough & finite

    # Not accepted: bracket. Too high: interpolate a parabola, away from the ends; still steep: go further.
    too_high = ~(low_enough & finite)
    high, low = torch.where(too_high, s.t, s.high), torch.where(too_high, s.low, s.t)
    parabola = -s.slope * s.t**2 / (2 * (value - s.value - s.slope * s.t))
    width = high - low
    inside = torch.where(parabola.isfinite(), parabola, low).clamp(low + 0.1 * width, low + 0.6 * width)
    t = torch.where(high.isinf(), 3 * s.t, torch.where(too_high, inside, low + 0.5 * width))
    trials = (s.trials + 1) * ~accepted
    count = int(accepted.sum())
    if count == 0:
        return replace(s, t=t, low=low, high=high, trials=trials, active=s.active & (trials < max_trials))

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return new if count == accepted.shape[0] else torch.where(column(accepted, new), new, old)

    # Accepted: a new pair for the history, a new direction.
    g_image = space.image(g)
    ds, dy, dy_image = step * s.d, g - s.g, g_image - s.g_image
    curvature, length = dot(ds, dy_image), dot(dy, dy_image)
    fresh = accepted & (curvature > eps * length) & (length > 0)
    head = _remember(s, fresh, ds, dy)
    scale = torch.where(fresh, curvature / length, s.scale)
    products = torch.stack([dy_image, g_image], 1) @ s.pairs.mT  # [E, 2, 2m]
    _fill(s, fresh, products[:, 0])
    d = _direction(s, head, scale, g, products[:, 1])
    descent = dot(d, g_image)
    # A direction that does not descend (rounding): the gradient, and the history begins anew.
    lost = accepted & ~(descent < 0)
    # Steps that had to be short stay short for a while: a saturating loss bends more than its past says.
    first = (2 * s.t).clamp_max(1)
    if bool(lost.any()):
        for memory in (s.pairs, s.sy, s.yy):
            memory[lost] = 0
        d = torch.where(column(lost, d), -g, d)
        descent = torch.where(lost, -dot(g, g_image), descent)
        first = torch.where(lost, 1 / (-descent).sqrt().clamp_min(1), first)
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
        head=head, scale=scale, steps=s.steps + accepted, late=late, converged=converged,
        active=s.active & ~converged & (late < 50) & (trials < max_trials),
    )  # fmt: skip


def _remember(s: _State, fresh: Tensor, ds: Tensor, dy: Tensor) -> Tensor:
    """Write the pairs of the episodes marked fresh over their oldest ones; the new heads."""
    m = s.sy.shape[1]
    rows = fresh.nonzero()[:, 0]
    everybody = rows.shape[0] == fresh.shape[0]
    slots = s.head if everybody else s.head[rows]
    s.pairs[rows, slots] = ds if everybody else ds[rows]
    s.pairs[rows, slots + m] = dy if everybody else dy[rows]
    return torch.where(fresh, (s.head + 1) % m, s.head)


def _fill(s: _State, fresh: Tensor, products: Tensor) -> None:
    """Inner products of the newest y with all s and y, products [E, 2m], into the two small matrices."""
    m = s.sy.shape[1]
    rows = fresh.nonzero()[:, 0]
    slots = s.head[rows]
    s.sy[rows, :, slots] = products[rows, :m]
    s.yy[rows, :, slots] = products[rows, m:]
    s.yy[rows, slots, :] = products[rows, m:]


def _direction(s: _State, head: Tensor, scale: Tensor, g: Tensor, q: Tensor) -> Tensor:
    """-H g with H in its compact form (Byrd, Nocedal & Schnabel 1994, eq. 3.1); empty slots are zeros and change
    nothing.

    q [E, 2m]: inner products of g with the pairs.
    """
    m = s.sy.shape[1]
    order = (head[:, None] + torch.arange(m, device=head.device)) % m  # [E, m], oldest first
    back = order.argsort(1)
    square = order[:, :, None].expand(-1, -1, m), order[:, None, :].expand(-1, m, -1)
    r = s.sy.gather(1, square[0]).gather(2, square[1])  # [E, m, m], read above the diagonal alone
    diagonal = r.diagonal(dim1=1, dim2=2)
    diagonal.add_((diagonal == 0).to(r.dtype))
    yy = s.yy.gather(1, square[0]).gather(2, square[1])
    q_s, q_y = q[:, :m].gather(1, order)[..., None], q[:, m:].gather(1, order)[..., None]
    k = scale[:, None, None]
    a = torch.linalg.solve_triangular(r, q_s, upper=True)  # [E, m, 1]
    b = torch.linalg.solve_triangular(r.mT, diagonal[..., None] * a + k * (yy @ a - q_y), upper=False)
    weights = torch.cat([b[..., 0].gather(1, back), -(k * a)[..., 0].gather(1, back)], 1)  # [E, 2m]
    return -torch.addcmul((weights[:, None] @ s.pairs)[:, 0], scale[:, None], g)
