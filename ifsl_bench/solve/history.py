"""The quasi-Newton direction: what a few past steps tell of the Hessian, each episode with its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .iterate import State
from .tree import dot


@dataclass
class History(State):
    """The m latest pairs (s, y), differences of points and of gradients, and their inner products in the metric."""

    pairs: Tensor  # [E, 2m, P] all s, then all y; rings that begin at `head`
    sy: Tensor  # [E, m, m] <s_i, y_j>, known where s_i is not younger than y_j
    yy: Tensor  # [E, m, m] <y_i, y_j>
    head: Tensor  # [E] the oldest slot, overwritten next
    scale: Tensor  # [E] the inverse Hessian before the pairs have their say
    unit: Tensor  # [E] its size at the start: a pair that shows far less is rounding

    @staticmethod
    def empty(z: Tensor, m: int, unit: Tensor) -> History:
        episodes, size = z.shape
        head = torch.zeros(episodes, dtype=torch.long, device=z.device)
        sy, yy = z.new_zeros(episodes, m, m), z.new_zeros(episodes, m, m)
        return History(z.new_zeros(episodes, 2 * m, size), sy, yy, head, z.new_ones(episodes), unit)

    def then(
        self, taken: Tensor, s: Tensor, y: Tensor, y_image: Tensor, g: Tensor, g_image: Tensor
    ) -> tuple[History, Tensor]:
        """After steps s [E, P] in the episodes `taken` that changed the gradient by y and made it g: what is known then
        (in the same memory), and the direction -H g."""
        curvature, length = dot(s, y_image), dot(y, y_image)
        fresh = taken & (curvature > torch.finfo(s.dtype).eps * self.unit * length) & (length > 0)
        head = self._remember(fresh, s, y)
        scale = torch.where(fresh, curvature / length, self.scale)
        products = torch.stack([y_image, g_image], 1) @ self.pairs.mT  # [E, 2, 2m]
        self._fill(fresh, products[:, 0])
        after = replace(self, head=head, scale=scale)
        return after, after._direction(g, products[:, 1])

    def forget(self, rows: Tensor) -> None:
        for memory in (self.pairs, self.sy, self.yy):
            memory[rows] = 0

    def _remember(self, fresh: Tensor, s: Tensor, y: Tensor) -> Tensor:
        """Write the pairs of the episodes marked fresh over their oldest ones; the new heads."""
        m = self.sy.shape[1]
        rows = fresh.nonzero()[:, 0]
        everybody = rows.shape[0] == fresh.shape[0]
        slots = self.head if everybody else self.head[rows]
        self.pairs[rows, slots] = s if everybody else s[rows]
        self.pairs[rows, slots + m] = y if everybody else y[rows]
        return torch.where(fresh, (self.head + 1) % m, self.head)

    def _fill(self, fresh: Tensor, products: Tensor) -> None:
        """Inner products of the newest y with all s and y, products [E, 2m], into the two small matrices."""
        m = self.sy.shape[1]
        rows = fresh.nonzero()[:, 0]
        slots = self.head[rows]
        self.sy[rows, :, slots] = products[rows, :m]
        self.yy[rows, :, slots] = products[rows, m:]
        self.yy[rows, slots, :] = products[rows, m:]

    def _direction(self, g: Tensor, q: Tensor) -> Tensor:
        """-H g with H in its compact form (Byrd, Nocedal & Schnabel 1994, eq. 3.1); empty slots are zeros and change
        nothing.

        q [E, 2m]: inner products of g with the pairs.
        """
        m = self.sy.shape[1]
        order = (self.head[:, None] + torch.arange(m, device=g.device)) % m  # [E, m], oldest first
        back = order.argsort(1)
        square = order[:, :, None].expand(-1, -1, m), order[:, None, :].expand(-1, m, -1)
        r = self.sy.gather(1, square[0]).gather(2, square[1])  # [E, m, m], read above the diagonal alone
        diagonal = r.diagonal(dim1=1, dim2=2)
        diagonal.add_((diagonal == 0).to(r.dtype))
        yy = self.yy.gather(1, square[0]).gather(2, square[1])
        q_s, q_y = q[:, :m].gather(1, order)[..., None], q[:, m:].gather(1, order)[..., None]
        k = self.scale[:, None, None]
        a = torch.linalg.solve_triangular(r, q_s, upper=True)  # [E, m, 1]
        b = torch.linalg.solve_triangular(r.mT, diagonal[..., None] * a + k * (yy @ a - q_y), upper=False)
        weights = torch.cat([b[..., 0].gather(1, back), -(k * a)[..., 0].gather(1, back)], 1)  # [E, 2m]
        return -torch.addcmul((weights[:, None] @ self.pairs)[:, 0], self.scale[:, None], g)
