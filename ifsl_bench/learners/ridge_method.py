"""A learner under a plain ridge, chosen on the validation episodes: the methods that learn nothing across episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ifsl_bench.common.errors import UserError
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support

from .attractor import ridge
from .episodic import WEIGHT_DECAYS, Converged, LinearLearner, NetworkLearner, fixed_class


class RidgeMethod(Method):
    """Fast weights V that minimise, from the support set alone,

        mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2

    over all base and novel classes; the base classifier stays as it is. A subclass says in `fast` what h is, and in its
    docstring what its one option is: ``weight_decay``, of all fast weights.
    """

    fast: ClassVar[type[LinearLearner] | type[NetworkLearner]]
    tune: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": WEIGHT_DECAYS}

    def __init__(self, base: Base, ways: int, *, weight_decay: float = 1e-3) -> None:
        super().__init__(base, ways)
        if not 0 < weight_decay < float("inf"):
            raise UserError(f"weight_decay must be positive, or the weights have no end, not {weight_decay}")
        self.weight_decay = weight_decay
        self.learner = self.fast(ways, base.weight.shape[1])

    def forward(self, support: Support, query: Query) -> Prediction:
        x, rest = support.features, fixed_class(support.base_logits, support.hidden)  # [E, S, D], [E, S]
        pulls = [ridge(1 if p.common else p.rows, p.size, self.weight_decay, x) for p in self.learner.parts]
        found = Converged().answer(self.learner, (x, support.labels, rest), pulls, query.features)
        return Prediction(torch.cat([query.base_logits, found.novel], -1), found.statistics)
