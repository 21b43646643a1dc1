"""Where the search for a network begins: without regard to the order of the support set, or where another one ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .network import DualSpace, Network, TanhNetwork
from .objective import Space
from .softmax import scores
from .tree import Tree


@dataclass(frozen=True)
class OrderFreeNetwork(TanhNetwork):
    """`TanhNetwork` with a search in dual numbers that does not depend on the order of the support set.

    It starts from fixed functions of each support row, not of its place among them; or from `begin`, that is from the
    point with the same activations on the support set and the least penalty.
    """

    begin: Network | None = None

    def space(self, v0: Tree, args: Tree) -> Space:
        found = super().space(v0, args)
        return _OrderFree(*(getattr(found, f.name) for f in fields(found))) if isinstance(found, DualSpace) else found


class _OrderFree(DualSpace):
    def initial(self) -> Tensor:
        assert isinstance(self.objective, OrderFreeNetwork)
        if (v := self.objective.begin) is not None:
            x, args = self.args.features, self.args
            b = (scores(v.hidden, x) - self.hidden_0) @ _pseudo_inverse(self.kernel_2)
            beta = (v.skip @ x.mT - self.skip_0) @ _pseudo_inverse(self.kernel_3)
            return self.join(b, beta, v.output - args.output_centres)
        x, h, n = self.args.features, self.objective.hidden, self.objective.ways
        generator = torch.Generator().manual_seed(self.objective.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(x)

        tiny = torch.finfo(x.dtype).tiny
        directions = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(tiny)
        waves = torch.sin(3 * (draw(h + n, x.shape[2]) @ directions.mT))  # [E, H+N, S], other for all but equal rows
        # Kernels have the size of 1 / precision: unscaled numbers would saturate every hidden unit.
        hidden, skip = (
            k.diagonal(dim1=1, dim2=2).mean(1).clamp_min(tiny)[:, None, None] for k in (self.kernel_2, self.kernel_3)
        )
        output = (0.5 * draw(n, h + 1)).expand(len(x), -1, -1)
        size = self.objective.start_spread
        return self.join(size * waves[:, :h] / hidden, size * waves[:, h:] / skip, size * output)


def _pseudo_inverse(k: Tensor) -> Tensor:
    """Of positive semidefinite matrices [E, S, S], which equal support rows make singular."""
    return torch.linalg.pinv(k, rtol=10 * k.shape[1] * torch.finfo(k.dtype).eps, hermitian=True)
