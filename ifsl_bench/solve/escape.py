"""Off a stationary point that is no minimum, along a direction in which the objective curves downwards."""

from __future__ import annotations

import torch
from torch import Tensor

from .iterate import chosen
from .krylov import conjugate_gradient
from .space import Space
from .tree import column, dot

LENGTHS = tuple(2.0**k for k in range(2, -13, -2))  # steps to try, in units of 1 + |z|
PRODUCTS = 200  # with the Hessian, in search of a negative curvature


def below(space: Space, z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where the objective curves downwards at stationary points z [E, P]: points [E, P] that lie lower, and which
    those are, [E] bool; others stay where they are.

    The step along a direction of negative curvature, forth or back, is the best of a few lengths. In float64 where the
    space has that: in float32 rounding hides the weaker curvatures.
    """
    if z.dtype != torch.float64 and (double := space.double(torch.arange(len(z), device=z.device))) is not None:
        there, lower = below(double, z.double(), value.double())
        return there.to(z.dtype), lower
    found, d = space.downwards(z) or _conjugate(space, z)
    if not (count := int(found.sum())):
        return z, found
    rows = chosen(found, count)
    if (part := space.take(rows)) is None:
        rows, part = torch.arange(len(z), device=z.device), space
    best, lowest = _lowest(part, z[rows], value[rows], d[rows])
    return z.index_copy(0, rows, best), found & (value.index_copy(0, rows, lowest) < value)


def _conjugate(space: Space, z: Tensor) -> tuple[Tensor, Tensor]:
    """Where the objective curves downwards [E], and along what [E, P]: conjugate gradients for a fixed random
    right-hand side end where the curvature along a direction is negative, for the Krylov space then holds one."""
    hessian = space.curvature(z)
    draw = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = draw.to(z).expand_as(z)
    _, _, info = conjugate_gradient(hessian, space.image, b, space.image(b), 1e-3, PRODUCTS, watch=True)
    _, _, found, d = info()
    return found, d


def _lowest(space: Space, z: Tensor, value: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest points [E, P] along directions d, or z where none is lower, and the values there [E]."""
    image, d_image = space.image(z), space.image(d)
    unit = (1 + dot(z, image).clamp_min(0).sqrt()) / dot(d, d_image).clamp_min(torch.finfo(z.dtype).tiny).sqrt()
    steps = unit.new_tensor([sign * length for length in LENGTHS for sign in (1, -1)])[:, None, None] * unit[:, None]
    there, there_image = (torch.addcmul(a, steps, b) for a, b in ((z, d), (image, d_image)))  # [trials, E, P]
    every = torch.arange(len(z), device=z.device).repeat(len(steps))
    if (trials := space.take(every)) is not None:
        heights = trials.evaluate(there.flatten(0, 1), there_image.flatten(0, 1))[0].view(len(steps), -1)
    else:
        heights = torch.stack([space.evaluate(*pair)[0] for pair in zip(there, there_image, strict=True)])
    lowest, which = torch.where(heights.isnan(), torch.inf, heights).min(0)  # [E]
    lower = lowest < value
    best = there.gather(0, which[None, :, None].expand(1, *z.shape))[0]
    return torch.where(column(lower, z), best, z), torch.where(lower, lowest, value)
