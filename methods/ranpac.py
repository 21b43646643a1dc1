"""RanPAC: sums of random projections (McDonnell, Gong, Parvaneh, Abbasnejad and van den Hengel, NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.method import Base, Method, Prediction, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.errors import UserError

IMAGES_PER_BLOCK = 4096  # images projected at once


class RanPAC(Method):
    """Ridge regression of one-hot labels on randomly projected features, from sums that run on from session to session.

    With W [D, M] of standard normal numbers, the same in every run, h(x) = max(0, W^T x), and over all images so far,

        G = sum_i h(x_i) h(x_i)^T,    C = sum_i h(x_i) y_i^T,    logits(x) = h(x)^T (G + ridge 1)^-1 C

    McDonnell, Gong, Parvaneh, Abbasnejad & van den Hengel, RanPAC: Random Projections and Pre-trained Models for
    Continual Learning (NeurIPS 2023), its second phase; there is no first one, for the backbone stays as it is. The
    base session's sums are over all images of base/train, so a data set with their
    means alone is refused. Differences: M is 10,000 there, and ``ridge`` is chosen on a fifth of
    the training images. The base classes that an episode hides have no logit, but their images are in G.

    Options:
        projections: M.
        ridge: chosen from a grid of powers of ten on validation episodes unless given.
    """

    name = "ranpac"
    display: ClassVar = {"ranpac": ("RanPAC", "ridge regression on random projections")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {"ridge": Range(1e-4, 1e10, log=True)}
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"ridge": (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)}

    def __init__(self, base: Base, ways: int, *, projections: int = 1000, ridge: float = 100.0) -> None:
        super().__init__(base, ways)
        if projections < 1:
            raise UserError(f"projections must be at least 1, not {projections}")
        if not 0 < ridge < math.inf:
            raise UserError(f"ridge must be positive and finite, not {ridge}")
        if base.images is None:
            raise UserError("ranpac sums over the images of base/train, and this data set has only their means")
        features, labels = base.images()
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(features.shape[1], projections, generator=generator, dtype=torch.float64)
        gram = torch.zeros(projections, projections, dtype=torch.float64)
        sums = torch.zeros(projections, len(base.weight), dtype=torch.float64)
        for rows, of in zip(features.cpu().split(IMAGES_PER_BLOCK), labels.cpu().split(IMAGES_PER_BLOCK), strict=True):
            h = (rows.double() @ projection).relu()
            gram += h.T @ h
            sums += h.T @ F.one_hot(of, len(base.weight)).double()
        gram.diagonal().add_(ridge)
        buffers = {"projection": projection.to(base.weight.dtype), "gram": gram, "sums": sums}
        for name, value in buffers.items():
            self.register_buffer(name, value.to(base.weight.device), persistent=False)
        self.register_buffer("seen", solve_ridge(gram, sums).to(base.weight), persistent=False)

    def project_features(self, features: Tensor) -> Tensor:
        """Return h, [E, n, M]."""
        return (features @ self.get_buffer("projection")).relu()

    def base_logits(self, query: Query) -> Tensor:
        return self.project_features(query.features) @ self.get_buffer("seen")

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        h = self.project_features(support.features).double()  # [E, S, M]
        gram, sums = h.mT @ h, h.mT @ F.one_hot(support.labels, self.ways).double()  # [E, M, M], [E, M, N]
        if isinstance(before, dict):
            gram, sums = before["gram"] + gram, torch.cat([before["sums"], sums], -1)
        return SessionOutput({"gram": gram, "sums": sums})

    def answer(self, state: State, query: Query) -> Prediction:
        assert isinstance(state, dict)
        base = self.get_buffer("sums").expand(len(query.features), -1, -1)
        weight = solve_ridge(self.get_buffer("gram") + state["gram"], torch.cat([base, state["sums"]], -1))
        return Prediction(self.project_features(query.features) @ weight.to(query.features.dtype))


def solve_ridge(gram: Tensor, sums: Tensor) -> Tensor:
    """Return (G + ridge 1)^-1 C, [..., M, K]; NaN where the ridge is too small for G's rounding.

    By Cholesky factors: half the work of LU factors, which oneMKL gets wrong for batches of such size on two threads.

    Args:
        gram: G + ridge 1, [..., M, M], float64.
        sums: C, [..., M, K].
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_solve(sums, factor).masked_fill(failed[..., None, None] > 0, math.nan)
