"""Imprinted weights (Qi, Brown and Lowe, CVPR 2018)."""

from __future__ import annotations

from typing import ClassVar, Literal

from ifsl_bench.common.cosine import cosines, unit
from ifsl_bench.plugin.method import Method, Prediction, Query, Support


class Imprint(Method):
    """A novel class's weight is the normalised mean of its support features, beside the pretrained cosine weights.

    Logits are ``tau cos(h, w)`` with the pretrained temperature and no bias. Nothing is learned after pretraining.
    """

    parallel_copies: ClassVar[bool] = True
    head: ClassVar[Literal["linear", "cosine"]] = "cosine"

    def forward(self, support: Support, query: Query) -> Prediction:
        novel = unit(support.class_means(self.ways))  # [E, N, D]
        return Prediction(self.base.scale * cosines(query.features, [unit(self.base.weight), novel]))
