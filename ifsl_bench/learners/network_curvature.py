"""The Hessian of a tanh network in its dual numbers, factorised: its inverse, and where it curves downwards.

docs/solve.md, "The network's Hessian, factorised". That takes some eighty operations, where conjugate gradients take
sixty for each of their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ifsl_bench.solve.iterate import State

from .softmax import residual, with_rest
from .whitened import triangular_root

FACTORISED = 256  # scores of a support set up to which its Hessian is factorised
ROOM = 2**27  # numbers that its largest matrix may have, all episodes taken together
FLAT = 1e-3  # what a step takes smaller curvatures for
WEAK = 1e-2  # curvatures of single hidden units below this, of the penalty's 1, are looked at together


class Activations(NamedTuple):
    """What the Hessian depends on, in float64."""

    kernel_2: Tensor  # [E, S, S] of the hidden and of the skip layer
    kernel_3: Tensor
    t: Tensor  # [E, H, S] tanh of the hidden inputs
    f: Tensor  # [E, N, S] scores
    output: Tensor  # [E, N, H+1] weights [W b]
    rest: Tensor  # [E, S]
    labels: Tensor  # [E, S]


def room(ways: int, units: int, size: int) -> int:
    """For how many episodes at once there is room; 0 where a Hessian is too large."""
    unknowns = units * (size + ways) + ways * size + ways
    return max(1, ROOM // (ways * size * unknowns)) if 0 < ways * size <= FACTORISED else 0


def solved(at: Activations, inverse: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """H^-1 b for b [E, P] in dual numbers, and where H curves downwards [E]; inverse [H+1]: that of the precisions of
    [W b]."""
    many, found = room(at.f.shape[1], *at.t.shape[1:]), []
    for some, *part in zip(b.split(many), *(part.split(many) for part in at), strict=True):
        hessian = factorised(Activations(*part), inverse)
        found.append((hessian.solve(some), hessian.indefinite()))
    return torch.cat([x for x, _ in found]), torch.cat([where for _, where in found])


@dataclass
class FactorisedHessian(State):
    """diag(values) + low^T low in coordinates in which the blocks of single hidden units are diagonal, where `chosen`
    has all that is not well above zero in `values`."""

    common: ClassVar = ("scale",)

    root_2: Tensor  # [E, S, S] L of the kernels of the hidden and of the skip layer
    root_3: Tensor
    scale: Tensor  # [H+1] P_1^(-1/2)
    basis: Tensor  # [E, H, S+N, S+N] eigenvectors of the blocks
    low: Tensor  # [E, N S, P]
    inverse: Tensor  # [E, P] of `values`, 0 for those chosen
    factor: Tensor  # [E, N S, N S] Cholesky's, of 1 + low diag(inverse) low^T
    chosen: Tensor  # [E, K]
    image: Tensor  # [E, N S, K] the inverse of that matrix times low's chosen columns
    columns: Tensor  # [E, K, N S] low's chosen columns, transposed
    curvatures: Tensor  # [E, K] eigenvalues, the least first, and eigenvectors of the chosen ones' Schur complement
    directions: Tensor  # [E, K, K]

    def indefinite(self) -> Tensor:
        """Where it curves downwards, beyond rounding: [E]."""
        return self.curvatures[:, 0] < -1e-12 * self.curvatures.abs().amax(1).clamp_min(1)

    def downwards(self) -> Tensor:
        """A direction [E, P], in dual numbers, along which it curves as `curvatures` begins."""
        v = self.directions[:, :, :1]
        d = -self.inverse * (self.low.mT @ (self.image @ v))[:, :, 0]
        return self.back(d.scatter(1, self.chosen, v[:, :, 0]))

    def solve(self, b: Tensor) -> Tensor:
        """Its inverse times b [E, P], both in dual numbers."""
        return self._solve(b, self.curvatures)

    def step(self, g: Tensor) -> Tensor:
        """The same for -g, with the curvatures that may be negative by their size."""
        return self._solve(-g, self.curvatures.abs().clamp_min(FLAT))

    def _solve(self, b: Tensor, curvatures: Tensor) -> Tensor:
        b = self.into(b)
        q = torch.cholesky_solve(self.low @ (self.inverse * b)[:, :, None], self.factor)  # [E, N S, 1]
        some = b.gather(1, self.chosen)[:, :, None] - self.columns @ q
        some = self.directions @ ((self.directions.mT @ some) / curvatures[:, :, None])
        x = self.inverse * (b - (self.low.mT @ (q + self.image @ some))[:, :, 0])
        return self.back(x.scatter(1, self.chosen, some[:, :, 0]))

    def into(self, z: Tensor) -> Tensor:
        """z [E, P] = (B, beta, [W b]) of a `DualSpace` in these coordinates."""
        (_, units, both, _), size = self.basis.shape, self.root_2.shape[1]
        ways = both - size
        b, beta, output = z.split([units * size, ways * size, ways * (units + 1)], 1)
        output = output.unflatten(1, (ways, -1)) / self.scale
        own = torch.cat([b.unflatten(1, (units, size)) @ self.root_2, output[..., :-1].mT], 2)  # [E, H, S+N]
        turned = (own[:, :, None] @ self.basis).flatten(1)
        return torch.cat([turned, (beta.unflatten(1, (ways, size)) @ self.root_3).flatten(1), output[..., -1]], 1)

    def back(self, w: Tensor) -> Tensor:
        """The inverse of `into`."""
        (_, units, both, _), size = self.basis.shape, self.root_2.shape[1]
        ways = both - size
        turned, beta, bias = w.split([units * both, ways * size, ways], 1)
        own = (self.basis @ turned.unflatten(1, (units, both))[..., None])[..., 0]  # [E, H, S+N]
        b, beta = (
            torch.linalg.solve_triangular(root, part, upper=False, left=False)
            for root, part in ((self.root_2, own[..., :size]), (self.root_3, beta.unflatten(1, (ways, size))))
        )
        output = torch.cat([own[..., size:].mT, bias[:, :, None]], 2) * self.scale
        return torch.cat([b.flatten(1), beta.flatten(1), output.flatten(1)], 1)


def factorised(at: Activations, inverse: Tensor, few: int | None = None) -> FactorisedHessian:
    """The episodes' Hessians; inverse [H+1]: the inverse precisions of [W b].

    few: how many curvatures are looked at together, without a look at how many are weak; others are then taken to
    be positive. An episode whose numbers are not finite gets those of no Hessian.
    """
    scale = inverse.sqrt()
    t, f, (size, ways) = at.t, at.f, (at.t.shape[2], at.f.shape[1])
    p, df = with_rest(f, at.rest), residual(f, at.rest, at.labels)
    root_2, root_3 = triangular_root(at.kernel_2), triangular_root(at.kernel_3)
    weights, slope = at.output[..., :-1], 1 - t.square()
    # What is not the Gauss-Newton part is a block for each hidden unit, of its inputs and its output weights.
    bend = -2 * t * slope * (weights.mT @ df)  # [E, H, S]
    inner = torch.cat([
        bend[..., None] * root_2[:, None], (slope * scale[:-1, None])[..., None] * df.mT[:, None]
    ], 3)  # fmt: skip
    block = pad(root_2.mT[:, None] @ inner, (0, 0, 0, ways)).nan_to_num(0, 0, 0)  # its upper triangle, without a 1
    values, basis = torch.linalg.eigh(block, UPLO="U")
    # The Gauss-Newton part, by a root of the Hessian of the cross-entropy: rows (k, i), class and support row.
    s, rest = p[:, :-1].sqrt(), p[:, -1:]
    share = s / (1 + rest.sqrt())
    eye = torch.eye(ways, dtype=f.dtype, device=f.device)
    root = (eye[:, :, None] - share[:, :, None] * s[:, None]) * (s / size**0.5)[:, :, None]  # [E, N, k, S]
    rows = root.permute(0, 2, 3, 1)  # [E, k, S, N]
    by_unit = (rows.flatten(1, 2) @ weights).unflatten(1, (ways, size)) * slope.mT[:, None]  # [E, k, S, H]
    by_output = rows[:, None] * (t * scale[:-1, None])[:, :, None, :, None]  # [E, H, k, S, N]
    low = torch.cat([by_unit.movedim(3, 1)[..., None] * root_2[:, None, None], by_output], 4).flatten(2, 3) @ basis
    low = torch.cat([
        low.transpose(1, 2).flatten(2),
        (rows[..., None] * root_3[:, None, :, None]).flatten(3).flatten(1, 2),
        rows.flatten(1, 2) * scale[-1],
    ], 2)  # fmt: skip
    values = pad(values.flatten(1) + 1, (0, ways * size + ways), value=1.0)
    return _eliminated(root_2, root_3, scale, basis, low, values, few)


def _eliminated(
    root_2: Tensor, root_3: Tensor, scale: Tensor, basis: Tensor, low: Tensor, values: Tensor, few: int | None
) -> FactorisedHessian:
    """With what is well above zero in `values` eliminated, which leaves the Schur complement of the rest."""
    count = max(1, int((values < WEAK).sum(1).amax())) if few is None else min(few, values.shape[1])
    least, chosen = values.topk(count, largest=False)
    if few is not None:
        values = values.abs().clamp_min(WEAK)
    inverse = values.reciprocal().scatter(1, chosen, 0.0)
    columns = low.gather(2, chosen[:, None].expand(-1, low.shape[1], -1)).mT
    matrix = (low * inverse[:, None]) @ low.mT
    matrix.diagonal(dim1=1, dim2=2).add_(1)
    factor = torch.linalg.cholesky_ex(matrix)[0]
    image = torch.cholesky_solve(columns.mT, factor)
    curvatures, directions = torch.linalg.eigh((torch.diag_embed(least) + columns @ image).nan_to_num(0, 0, 0))
    return FactorisedHessian(
        root_2, root_3, scale, basis, low, inverse, factor, chosen, image, columns, curvatures, directions
    )
