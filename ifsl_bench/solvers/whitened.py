"""The dual numbers of a tanh network in coordinates whose metric is the Euclidean one, for the search of many episodes.

With kernels K = L L^T, B L and beta L stand for B and beta, and [W b] P_1^(1/2) for [W b]. Then a point needs no image
under the metric, and an evaluation is a few large operations. One more hidden unit, which is always 1, stands for the
bias, and one more class for the fixed one: their rows of numbers are zero, and so are those of every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ifsl_bench.solvers.softmax import one_hot
from ifsl_bench.solvers.tree import dot

ALWAYS_ON = 20.0  # tanh of it is 1


@dataclass(frozen=True)
class WhitenedNetwork:
    """w [E, P] = hidden units [H+1, S] and classes [N+1, S + H+1] side by side; see `network_space.DualSpace`."""

    root_2: Tensor  # [E, S, S] L of the kernels of the hidden and of the skip layer
    root_3: Tensor
    gram: Tensor  # [E, S, S] over X X^T
    hidden_0: Tensor  # [E, H+1, S] hidden inputs at the centre
    scores_0: Tensor  # [E, N+1, S] skip scores at the centre, and the fixed class
    weights_0: Tensor  # [E, N+1, S + H+1] zeros, and [W b] at the centre
    labels: Tensor  # [E, 1, S]
    hot: Tensor  # [E, N+1, S] labels as ones
    others: Tensor  # [E, N+1, S] -inf for the label, 0 elsewhere
    nothing: Tensor  # [E, S + H+1] zeros
    scale: Tensor  # [S + H+1] ones, and P_1^(-1/2)

    @staticmethod
    def of(
        kernels: tuple[Tensor, Tensor],
        gram: Tensor,
        hidden_0: Tensor,
        skip_0: Tensor,
        base_logsumexp: Tensor,
        labels: Tensor,
        centres: Tensor,
        inverse: Tensor,
    ) -> WhitenedNetwork:
        """Coordinates for kernels and gram [E, S, S], hidden_0 [E, H, S], skip_0 [(E,) N, S], base_logsumexp and labels
        [E, S], centres [(E,) N, H+1] and inverse precisions [H+1] of [W b]."""
        episodes, size = base_logsumexp.shape
        ways, units = skip_0.shape[-2], inverse.shape[0]
        hot = one_hot(labels, ways + 1)
        return WhitenedNetwork(
            triangular_root(kernels[0]),
            triangular_root(kernels[1]),
            gram,
            pad(hidden_0, (0, 0, 0, 1), value=ALWAYS_ON),
            torch.cat([skip_0.expand(episodes, -1, -1), base_logsumexp[:, None]], 1),
            pad(centres, (size, 0, 0, 1)).expand(episodes, -1, -1),
            labels[:, None],
            hot.to(base_logsumexp.dtype),
            torch.zeros_like(skip_0[..., :1, :1]).masked_fill(hot, -torch.inf),
            base_logsumexp.new_zeros(episodes, size + units),
            pad(inverse.sqrt(), (size, 0), value=1.0),
        )

    def into(self, z: Tensor) -> Tensor:
        (_, units, size), ways = self.hidden_0.shape, self.hot.shape[1] - 1
        b, beta, output = z.split([(units - 1) * size, ways * size, ways * units], 1)
        hidden = pad(b.unflatten(1, (-1, size)) @ self.root_2, (0, 0, 0, 1))
        classes = torch.cat(
            [beta.unflatten(1, (-1, size)) @ self.root_3, output.unflatten(1, (-1, units)) / self.scale[size:]], 2
        )
        return torch.cat([hidden.flatten(1), classes.flatten(1), self.nothing], 1)

    def back(self, w: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in self._dual(w)], 1)

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        hidden, classes = self._parts(w)
        size = hidden.shape[2]
        t = torch.baddbmm(self.hidden_0, hidden, self.root_2.mT).tanh()  # [E, H+1, S]
        inputs = torch.cat([self.root_3.mT, t], 1)  # [E, S + H+1, S]
        weights = torch.addcmul(self.weights_0, classes, self.scale)
        f = torch.baddbmm(self.scores_0, weights, inputs)  # [E, N+1, S], the fixed class last
        # The loss is log(1 + exp(x)), x being the logsumexp of the other classes' margins, and its slope sigmoid(x):
        # both keep the digits that are small beside 1.
        margins = f - f.gather(1, self.labels) + self.others
        x = margins.logsumexp(1)  # [E, S]
        fit = softplus(x, threshold=35).mean(1)
        value = torch.baddbmm(fit[:, None, None], w[:, None], w[:, :, None], alpha=0.5)[:, 0, 0]
        df = (margins.softmax(1) - self.hot) * x.sigmoid()[:, None]  # [E, N+1, S]
        da = torch.ops.aten.tanh_backward(weights[..., size:].mT @ df, t)  # [E, H+1, S]: times 1 - t^2
        g_hidden = torch.baddbmm(hidden, da, self.root_2, alpha=1 / size)
        g_classes = torch.addcmul(classes[:, :-1], df[:, :-1] @ inputs.mT, self.scale, value=1 / size)
        return value, (g_hidden.flatten(1), g_classes.flatten(1), self.nothing)

    def norm(self, g: Tensor) -> Tensor:
        b, beta, output = self._dual(g)
        ones, large = b.sum(2), output / self.scale[self.gram.shape[1] :].square()
        square = dot(b, b @ self.gram) + dot(ones, ones) + dot(beta, beta @ self.gram) + dot(large, large)
        return square.clamp_min(0).sqrt()

    def take(self, index: Tensor) -> WhitenedNetwork:
        some = {f.name: getattr(self, f.name).index_select(0, index) for f in fields(self) if f.name != "scale"}
        return replace(self, **some)

    def _parts(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """w [E, P] as [E, H+1, S] and [E, N+1, S + H+1]."""
        _, units, size = self.hidden_0.shape
        hidden, classes = w[:, : units * size], w[:, units * size :]
        return hidden.unflatten(1, (units, size)), classes.unflatten(1, (-1, size + units))

    def _dual(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w [E, P] as B [E, H, S], beta [E, N, S] and [W b] - centre [E, N, H+1]."""
        hidden, classes = self._parts(w)
        beta, output = classes[:, :-1].split([self.gram.shape[1], hidden.shape[1]], 2)
        b, beta = (
            torch.linalg.solve_triangular(root, part, upper=False, left=False)
            for root, part in ((self.root_2, hidden[:, :-1]), (self.root_3, beta))
        )
        return b, beta, output * self.scale[self.gram.shape[1] :]


def triangular_root(k: Tensor) -> Tensor:
    """L with L L^T = k [E, S, S], up to rounding: of its size is what is added for kernels that equal rows make
    singular."""
    least = k.shape[1] * torch.finfo(k.dtype).eps * k.diagonal(dim1=1, dim2=2).amax(1)
    return torch.linalg.cholesky_ex(k + torch.diag_embed(least[:, None].expand(-1, k.shape[1])))[0]
