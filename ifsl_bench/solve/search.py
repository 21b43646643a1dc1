"""Line searches, every episode with its own step t [E]: how far to go along a direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LEAST = 1e-4  # a good step takes off so much of what the slope promised


def backtrack(
    evaluate: Callable[[Tensor], tuple[Tensor, T]], value: Tensor, slope: Tensor, trials: int = 40
) -> tuple[Tensor, Tensor, Tensor, T]:
    """The first t of 1, 1/2, 1/4 ... with a sufficient decrease of the value [E], given its slope [E] at t = 0.

    evaluate(t) is the value there and anything else. Returns t, whether it is not good enough, and what was there.
    """
    eps = torch.finfo(value.dtype).eps
    t = torch.ones_like(value)
    for _ in range(trials):
        there, more = evaluate(t)
        bad = ~(there <= value + LEAST * t * slope + 4 * eps * value.abs())
        if not bool(bad.any()):
            break
        t = torch.where(bad, t / 2, t)
    return t, bad, there, more


def first_step(value: Tensor, length: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """How far to go at first along -g, |g| = length [E] in the metric; and the unit of such steps, [E].

    No further than a length of 1, and then the unit is 1. But an objective that is nowhere negative cannot fall by more
    than its value [E]: where a step of length 1 would have to, to be good (`weak_wolfe`), it says nothing of the scale
    of the problem, and the unit is the step to the minimum of a parabola that touches zero.
    """
    t = 1 / length.clamp_min(1)
    square = length.square()
    far = (value > 0) & (value < LEAST * t * square) & nonnegative
    unit = torch.where(far, 2 * value / square, 1)
    return torch.where(far, unit, t), unit


class Bracket(NamedTuple):
    """Where a weak-Wolfe search stands: the next trial step between two others, and how many there were, [E] each."""

    t: Tensor
    low: Tensor
    high: Tensor
    trials: Tensor


def weak_wolfe(
    s: Bracket, value: Tensor, slope: Tensor, there: Tensor, slope_there: Tensor, finite: Tensor, active: Tensor
) -> tuple[Tensor, Bracket]:
    """Whether the trial steps are good [E], and the brackets after them, by bisection and interpolation.

    value, slope: at t = 0; there, slope_there: at the trial, where everything is `finite` or not.
    """
    eps = torch.finfo(value.dtype).eps
    # Where rounding hides the decrease, the slope decides (Hager & Zhang 2005, the approximate Wolfe conditions).
    hidden = (there <= value + 16 * eps * (1 + value.abs())) & (slope_there <= -0.8 * slope)
    low_enough = (there <= value + LEAST * s.t * slope) | hidden
    flat_enough = slope_there >= 0.9 * slope
    good = active & low_enough & flat_enough & finite
    # Too high: interpolate a parabola, away from the ends; still steep: go further.
    too_high = ~(low_enough & finite)
    high, low = torch.where(too_high, s.t, s.high), torch.where(too_high, s.low, s.t)
    parabola = -slope * s.t**2 / (2 * (there - value - slope * s.t))
    width = high - low
    inside = torch.where(parabola.isfinite(), parabola, low).clamp(low + 0.1 * width, low + 0.6 * width)
    t = torch.where(high.isinf(), 3 * s.t, torch.where(too_high, inside, low + 0.5 * width))
    return good, Bracket(t, low, high, (s.trials + 1) * ~good)


class Line(Protocol):
    """A convex function along a line."""

    def move(self, t: Tensor, done: Tensor | None) -> None:
        """To t [E]; episodes that are done (None: there are none) stay where they were."""

    def slope(self, t: Tensor) -> Tensor:
        """Its derivative there, [E]."""

    def curvature(self) -> Tensor:
        """Its second derivative there, [E]."""


def root_of_slope(line: Line, slope: Tensor, reach: Tensor, active: Tensor, trials: int = 30) -> Tensor:
    """t [E] where the slope along a line has fallen to a tenth of what it is at t = 0, and the line moved there.

    Safeguarded Newton from a step short enough to be safe: the logarithm of the second derivative changes at most as
    fast as `reach` [E] (Bach 2010). Where the slope is positive, the value may have risen: by convexity it has not if
    g (t - low) <= -g_low low, nor can it over a move in which the curvature is nearly constant. Out of trials, the
    largest step known to descend.
    """
    t = torch.where(reach < 1, torch.ones_like(reach), reach.log1p() / reach)
    low, high, g_low = torch.zeros_like(t), torch.full_like(t, torch.inf), torch.zeros_like(t)
    accept = -0.1 * slope
    done, some_done = ~active, not bool(active.all())
    for trial in range(trials + 1):
        line.move(t, done if some_done else None)
        if trial == trials:
            break
        g = line.slope(t)
        done = done | ((g.abs() <= accept) & ((g * (t - low) <= -g_low * low) | (t * reach <= 1)))
        if bool(done.all()):
            break
        some_done = True
        h = line.curvature()
        descends = g < 0
        low, high, g_low = (
            torch.where(descends, t, low),
            torch.where(descends, high, t),
            torch.where(descends, g, g_low),
        )
        new = t - g / h
        # The root may be orders of magnitude away: the slope of saturated scores says nothing of where they cross.
        middle = torch.where(low > 0, (low * high).sqrt(), high / 4)
        middle = torch.where(high.isinf(), 4 * t, torch.where(high < 4 * low, (low + high) / 2, middle))
        if trial % 3 == 2:  # Newton's steps alone may creep
            new = middle
        new = torch.where((new > low) & (new < torch.where(high.isinf(), 16 * t, high)), new, middle)
        if trial == trials - 1:
            new = low
        t = torch.where(done, t, new)
    return t


def aside(z: Tensor) -> Tensor:
    """Small steps [E, P] off z, the same for equal z: off a saddle."""
    draw = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z)
    return 1e-3 * (1 + z.abs().amax(1, keepdim=True)) * draw
