"""Off a stationary point that is no minimum, along a direction in which the objective curves downwards."""

from __future__ import annotations

import torch
from torch import Tensor

from ifsl_bench.solvers.coordinates import Space
from ifsl_bench.solvers.krylov import conjugate_gradient
from ifsl_bench.solvers.tree import column, dot

LENGTHS = tuple(2.0**k for k in range(2, -13, -2))  # steps to try, in units of 1 + |z|
PRODUCTS = 200  # with the Hessian, in search of a negative curvature


def below(space: Space, z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Points [E, P] that lie lower than stationary points z [E, P] where the objective curves downwards, and which
    those are, [E] bool; others stay where they are.

    Conjugate gradients for a fixed random right-hand side end where the curvature along a direction is negative, for
    the Krylov space then holds one. The step along it, forth or back, is the best of a few lengths. In float64 where
    the space has that: in float32 rounding hides the weaker curvatures.
    """
    if z.dtype != torch.float64 and (double := space.double(torch.arange(len(z), device=z.device))) is not None:
        there, lower = below(double, z.double(), value.double())
        return there.to(z.dtype), lower
    hessian = space.curvature(z)
    draw = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = draw.to(z).expand_as(z)
    _, _, saddle, d = conjugate_gradient(hessian, space.image, b, space.image(b), 1e-3, PRODUCTS)
    best, lowest = z, value
    if not bool(saddle.any()):
        return best, saddle
    image = space.image(z)
    d_image = space.image(d)
    unit = (1 + dot(z, image).clamp_min(0).sqrt()) / dot(d, d_image).clamp_min(torch.finfo(z.dtype).tiny).sqrt()
    for length in LENGTHS:
        for sign in (1, -1):
            t = column(sign * length * unit, z)
            there, there_image = torch.addcmul(z, t, d), torch.addcmul(image, t, d_image)
            height = space.evaluate(there, there_image)[0]
            lower = saddle & (height < lowest)
            best, lowest = torch.where(column(lower, z), there, best), torch.where(lower, height, lowest)
    return best, lowest < value
