"""LwoF: Dynamic few-shot visual learning without forgetting (Gidaris and Komodakis, CVPR 2018), attention variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ifsl_bench.common.cosine import cosines, unit
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.plugin.space import RATE, Range, Space
from ifsl_bench.protocol.task import MetaTraining, Schedule


class LwoF(Method):
    """A generator writes the weights of the novel classes, attending to the base classifier.

    Support image x_i attends to base class j with ``softmax_j(tau_q unit(x_i W_q) . unit(k_j))``; the weight of novel
    class k is ``phi_1 * mean_k(x) + phi_2 * mean_k(att W_a)``, elementwise; logits are ``tau_b cos(h, [W_a ; w])``.
    Learned: W_q, the keys k, tau_q, phi_1, phi_2, tau_b, and W_a itself, from its pretrained value.

    This follows the baseline in the released code of Ren et al. (2019), which does not normalise the features and W_a
    before they are mixed, as Gidaris and Komodakis do; ``normalise=True`` does.
    """

    head: ClassVar[Literal["linear", "cosine"]] = "cosine"
    space: ClassVar[Space] = {RATE: Range(1e-4, 1e-2, log=True)}
    schedule: ClassVar[MetaTraining | None] = MetaTraining(
        steps=10_000, schedule=Schedule(rate=1e-3, drops=(6000, 8000)), validate_every=1000
    )

    def __init__(self, base: Base, ways: int, *, normalise: bool = False) -> None:
        super().__init__(base, ways)
        classes, features = base.weight.shape
        self.normalise = normalise
        self.weight = nn.Parameter(base.weight.clone())  # [K, D], W_a
        self.to_query = nn.Parameter(0.1 * torch.randn(features, features, dtype=base.weight.dtype))  # W_q
        self.keys = nn.Parameter(0.1 * torch.randn(classes, features, dtype=base.weight.dtype))
        self.phi_mean = nn.Parameter(torch.ones(features, dtype=base.weight.dtype))
        self.phi_attended = nn.Parameter(torch.ones(features, dtype=base.weight.dtype))
        self.tau_query = nn.Parameter(torch.tensor(10.0, dtype=base.weight.dtype))
        self.tau = nn.Parameter(torch.tensor(10.0, dtype=base.weight.dtype))

    def novel_weights(self, support: Support) -> torch.Tensor:
        """The generated weights [E, N, D]."""
        features = unit(support.features) if self.normalise else support.features  # [E, S, D]
        memory = unit(self.weight) if self.normalise else self.weight  # [K, D]
        scores = self.tau_query * unit(features @ self.to_query) @ unit(self.keys).T  # [E, S, K]
        attention = scores.masked_fill(support.hidden.unsqueeze(1), -torch.inf).softmax(-1)
        one_hot = F.one_hot(support.labels, self.ways).to(features.dtype)  # [E, S, N]
        share = one_hot.mT / one_hot.sum(-2).unsqueeze(-1)  # [E, N, S], averages over a class's images
        return self.phi_mean * (share @ features) + self.phi_attended * ((share @ attention) @ memory)

    def weights(self, support: Support) -> Iterator[torch.Tensor]:
        """The base weights [K, D], then the generated ones [E, N, D]."""
        yield self.weight
        yield self.novel_weights(support)

    def forward(self, support: Support, query: Query) -> Prediction:
        return Prediction(self.tau * cosines(query.features, self.weights(support)))
