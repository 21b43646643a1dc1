"""Line searches, every episode with its own step t [E]: how far to go along a direction."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-4  # a good step takes off so much of what the slope promised


def first_step(value: Tensor, length: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """The first step along -g, |g| = length [E] in the metric, and the unit of such steps, [E].

    No further than a length of 1, and then the unit is 1. But an objective that is nowhere negative cannot fall by more
    than its value [E]: where a step of length 1 would have to, to be good (`weak_wolfe`), it says nothing of the scale
    of the problem, and the unit is the step to the minimum of a parabola that touches zero.
    """
    t = 1 / length.clamp_min(1)
    square = length.square()
    far = (value > 0) & (value < LEAST * t * square) & nonnegative
    unit = torch.where(far, 2 * value / square, 1)
    return torch.where(far, unit, t), unit


def rounding(value: Tensor) -> Tensor:
    """The rise [E] of a value [E] that may be rounding."""
    return 16 * torch.finfo(value.dtype).eps * (1 + value.abs())


def falls(t: Tensor, value: Tensor, slope: Tensor, there: Tensor, slack: Tensor) -> Tensor:
    """Marks steps t [E] that take off enough of the value, or miss that by no more than rounding; NaN never does."""
    return there <= torch.addcmul(value, t, slope, value=LEAST) + slack


def weak_wolfe(
    t: Tensor, low: Tensor, high: Tensor, value: Tensor, slope: Tensor, there: Tensor, slope_there: Tensor,
    slack: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Marks the good trial steps t [E], and returns the next ones and their brackets, by bisection and interpolation.

    low, high: the bracket of t; value, slope: at t = 0; there, slope_there: at the trial; slack: see `rounding`. A step
    of 0 stays one.
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
    """Small steps [E, P] off z, the same for equal z: off a saddle."""
    draw = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z)
    return 1e-3 * (1 + z.abs().amax(1, keepdim=True)) * draw
