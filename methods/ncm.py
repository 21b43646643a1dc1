"""Nearest class mean (Mensink, Verbeek, Perronnin and Csurka, TPAMI 2013), by angle."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Query, SessionOutput, State, Support
from ifsl_bench.utils.cosine import cosine_similarities, linear_logits, normalise_exactly, normalise_with_epsilon


class NCM(AdditiveClassifier):
    """Every class, base or novel, is the mean of its features, and a query's logits are its cosines to these.

    Logits are ``scale cos(h, m)``: m of a base class is the mean feature of its base/train images, m of a novel class
    that of its supports. The scale, which moves no answer, is the pretrained temperature, 1 for the linear head.
    Nothing is learned after pretraining.
    """

    name = "ncm"
    display: ClassVar = {"ncm": ("NCM", "nearest class mean, by angle")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    uses_earlier_logits = False

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        return SessionOutput(normalise_with_epsilon(support.class_means(self.ways)))  # [E, N, D]

    def base_logits(self, query: Query) -> Tensor:
        return self.base.scale * cosine_similarities(query.features, normalise_with_epsilon(self.base.prototypes))

    def class_logits(self, state: State, query: Query) -> Tensor:
        return linear_logits(query.features, normalise_exactly(state)).mul_(self.base.scale)

    def transform_query(self, query: Query) -> Query:
        return Query(normalise_exactly(query.features), query.base_logits[..., :0])
