"""Imprinted weights (Qi, Brown and Lowe, CVPR 2018)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ifsl_bench.backbone.networks import unit
from ifsl_bench.plugin.method import Method, Prediction, Query, Support


class Imprint(Method):
    """A novel class's weight is the normalised mean of its support features, beside the pretrained cosine weights.

    Logits are ``tau cos(h, w)`` with the pretrained temperature and no bias. Nothing is learned after pretraining.
    """

    head: ClassVar[Literal["linear", "cosine"]] = "cosine"

    def forward(self, support: Support, query: Query) -> Prediction:
        novel = unit(support.class_means(self.ways))  # [E, N, D]
        h = F.normalize(query.features, dim=-1, eps=1e-30)  # [E, Q, D]
        to_base = h @ F.normalize(unit(self.base.weight), dim=-1, eps=1e-30).T  # [E, Q, K]
        to_novel = h @ F.normalize(novel, dim=-1, eps=1e-30).mT  # [E, Q, N]
        return Prediction(self.base.scale * torch.cat([to_base, to_novel], -1))
