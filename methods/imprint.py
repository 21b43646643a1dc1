"""Imprinted weights (Qi, Brown and Lowe, CVPR 2018)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Query, SessionOutput, State, Support
from ifsl_bench.utils.cosine import cosine_similarities, linear_logits, normalise_exactly, normalise_with_epsilon


class Imprint(AdditiveClassifier):
    """A novel class's weight is the normalised mean of its support features, beside the pretrained cosine weights.

    Logits are ``tau cos(h, w)`` with the pretrained temperature and no bias. Nothing is learned after pretraining.
    """

    name = "imprint"
    display: ClassVar = {"imprint": ("Imprint", "support means as weights of a cosine classifier")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    uses_earlier_logits = False
    head: ClassVar[Literal["linear", "cosine"]] = "cosine"

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        return SessionOutput(normalise_with_epsilon(support.class_means(self.ways)))  # [E, N, D]

    def base_logits(self, query: Query) -> Tensor:
        return self.base.scale * cosine_similarities(query.features, normalise_with_epsilon(self.base.weight))

    def class_logits(self, state: State, query: Query) -> Tensor:
        return linear_logits(query.features, normalise_exactly(state)).mul_(self.base.scale)

    def transform_query(self, query: Query) -> Query:
        return Query(normalise_exactly(query.features), query.base_logits[..., :0])
