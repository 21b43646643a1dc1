"""ProtoNet (Snell, Swersky and Zemel, NeurIPS 2017), adapted to incremental few-shot learning by Ren et al. (2019)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ifsl_bench.plugin.method import Method, Prediction, Query, Support


class ProtoNet(Method):
    """Nearest class mean under the squared Euclidean distance: logits ``-|h - c|^2``.

    A base class's prototype c is the mean feature of all its base/train images, a novel class's that of its support
    images. Nothing is learned after pretraining (linear head).
    """

    parallel_copies: ClassVar[bool] = True

    def forward(self, support: Support, query: Query) -> Prediction:
        novel = support.class_means(self.ways)  # [E, N, D]
        h = query.features  # [E, Q, D]
        square = h.square().sum(-1, keepdim=True)  # [E, Q, 1]
        base = self.base.prototypes  # [K, D]
        to_base = square - 2 * h @ base.T + base.square().sum(-1)  # [E, Q, K]
        to_novel = square - 2 * h @ novel.mT + novel.square().sum(-1).unsqueeze(1)  # [E, Q, N]
        return Prediction(-torch.cat([to_base, to_novel], -1))
