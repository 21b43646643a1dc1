"""Quasi-Newton directions from a few past steps, each episode with its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.solvers.iterate import State


@dataclass
class History(State):
    """The latest pairs (s, y), differences of points and of gradients, oldest first.

    All episodes write in the same turn; one whose step was not good writes zeros, which say nothing. The pairs are a
    window that slides along a longer memory.
    """

    common: ClassVar = ("large", "size", "end")

    pairs: Tensor  # [E, 4m, 2, P]
    scale: Tensor  # [E, 1] the inverse Hessian before the pairs have their say
    noise: Tensor  # [E, 1] a pair with <s, y> below so much of <y, y> is rounding
    large: Tensor  # [] the curvature of a pair that plays no part
    size: int  # m
    end: int  # the window ends before this slot

    @staticmethod
    def empty(z: Tensor, m: int, unit: Tensor) -> History:
        """The history of a search at points z [E, P]; unit [E] is what the inverse Hessian is measured in."""
        noise = torch.finfo(z.dtype).eps * unit[:, None]
        pairs = z.new_zeros(len(z), 4 * m, 2, z.shape[1])
        return History(pairs, torch.ones_like(noise), noise, noise.new_full((), 1e30), m, 2 * m)

    def remember(self, new: Tensor, old: Tensor) -> None:
        """Takes points and gradients side by side, [E, 2P]: now, and before the latest step."""
        if self.end == 4 * self.size:
            self.end = 2 * self.size
            self.pairs[:, : self.end] = self.pairs[:, self.end :]
        torch.sub(new, old, out=self.pairs[:, self.end].flatten(1))
        self.end += 1

    def direction(self, g: Tensor, longer: bool = False) -> tuple[Tensor, Tensor]:
        """-H g for gradients g [E, P], with H in its compact form (Byrd, Nocedal & Schnabel 1994, eq. 3.1) of the m
        latest pairs, or of twice as many; and whether the latest of them is one [E]."""
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
