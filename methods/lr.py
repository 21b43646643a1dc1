"""LR: logistic regression on the support set beside the base classifier, the baseline of Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ifsl_bench.common.errors import UserError
from ifsl_bench.learners import WEIGHT_DECAYS, Converged, LinearLearner, fixed_class, ridge
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support


class LR(Method):
    """Novel weights [W, b] that minimise, from the support set alone,

        mean_i CE([W_a x_i + b_a ; W x_i + b], y_i)  +  weight_decay/2 |[W, b]|^2

    over all base and novel classes; the base classifier stays as it is. No meta-training: the episodic objective of
    Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS 2019), with
    R = 0. Convex, and solved to the minimum by a Newton method in dual numbers. Hidden base classes are left out.

    Options: ``weight_decay`` of the novel weights, the bias included; chosen on the validation episodes unless given.
    """

    tune: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": WEIGHT_DECAYS}

    def __init__(self, base: Base, ways: int, *, weight_decay: float = 1e-3) -> None:
        super().__init__(base, ways)
        if not 0 < weight_decay < float("inf"):
            raise UserError(f"weight_decay must be positive, or the weights have no end, not {weight_decay}")
        self.weight_decay = weight_decay
        self.learner = LinearLearner(ways, base.weight.shape[1])

    def forward(self, support: Support, query: Query) -> Prediction:
        rest = fixed_class(support.base_logits, support.hidden)  # [E, S]
        pulls = [ridge(p.rows, p.size, self.weight_decay, support.features) for p in self.learner.parts]
        rows = (support.features, support.labels, rest)
        found = Converged().answer(self.learner, rows, pulls, query.features)  # [E, Q, N]
        return Prediction(torch.cat([query.base_logits, found.novel], -1), found.statistics)
