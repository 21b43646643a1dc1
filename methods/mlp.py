"""MLP: a small network on the support set beside the base classifier, the baseline of Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ifsl_bench.common.errors import UserError
from ifsl_bench.learners import WEIGHT_DECAYS, Converged, NetworkLearner, fixed_class, ridge
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support


class MLP(Method):
    """Novel logits h(x) = W tanh(W_2 x + b_2) + W_3 x + b with 40 hidden units, V = (W, b, W_2, b_2, W_3) minimising

        mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2

    from the support set alone, over all base and novel classes; the base classifier stays as it is. No meta-training:
    the episodic objective of Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks
    (NeurIPS 2019), with R = 0. Not convex: a batched L-BFGS finds a minimum from a fixed small start; ours searches in
    dual numbers, so it may find another than a search in V would. Hidden base classes are left out.

    Options: ``weight_decay`` of all fast weights; chosen on the validation episodes unless given.
    """

    tune: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": WEIGHT_DECAYS}

    def __init__(self, base: Base, ways: int, *, weight_decay: float = 1e-3) -> None:
        super().__init__(base, ways)
        if not 0 < weight_decay < float("inf"):
            raise UserError(f"weight_decay must be positive, or the weights have no end, not {weight_decay}")
        self.weight_decay = weight_decay
        self.learner = NetworkLearner(ways, base.weight.shape[1])

    def forward(self, support: Support, query: Query) -> Prediction:
        rest = fixed_class(support.base_logits, support.hidden)  # [E, S]
        x = support.features
        pulls = [ridge(1 if p.common else p.rows, p.size, self.weight_decay, x) for p in self.learner.parts]
        found = Converged().answer(self.learner, (x, support.labels, rest), pulls, query.features)
        return Prediction(torch.cat([query.base_logits, found.novel], -1), found.statistics)
