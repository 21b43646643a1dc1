"""ProtoNet (Snell, Swersky and Zemel, NeurIPS 2017), adapted to incremental few-shot learning by Ren et al. (2019)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Query, SessionOutput, State, Support
from ifsl_bench.utils.cosine import check_squares_are_finite, linear_logits


class ProtoNet(AdditiveClassifier):
    """Nearest class mean under the squared Euclidean distance: logits ``-|h - c|^2``.

    A base class's prototype c is the mean feature of all its base/train images, a novel class's that of its support
    images. Nothing is learned after pretraining (linear head).
    """

    name = "protonet"
    display: ClassVar = {"protonet": ("ProtoNet", "nearest class mean, by Euclidean distance")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    uses_earlier_logits = False

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__(base, ways)
        check_squares_are_finite(base.prototypes, self.name)

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        return SessionOutput(support.class_means(self.ways))  # [E, N, D]

    def base_logits(self, query: Query) -> Tensor:
        base = self.base.prototypes  # [K, D]
        h = query.features  # [E, Q, D]
        return -(h.square().sum(-1, keepdim=True) - 2 * h @ base.T + base.square().sum(-1))

    def class_logits(self, state: State, query: Query) -> Tensor:
        lengths = state.square().sum(-1).unsqueeze(1)
        return linear_logits(query.features, 2 * state).sub_(query.base_logits).sub_(lengths)

    def transform_query(self, query: Query) -> Query:
        """Put |h|^2 [E, Q, 1] where the base logits were, which no class here needs."""
        return Query(query.features, query.features.square().sum(-1, keepdim=True))
