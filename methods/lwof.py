"""LwoF: Dynamic few-shot visual learning without forgetting (Gidaris and Komodakis, CVPR 2018), attention variant."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.protocols.tasks.task import MetaTraining, Schedule
from ifsl_bench.utils.cosine import cosine_similarities, normalise_exactly, normalise_with_epsilon


class LwoF(AdditiveClassifier):
    """A generator writes the weights of the novel classes, attending to the base classifier.

    Support image x_i attends to base class j with ``softmax_j(tau_q unit(x_i W_q) . unit(k_j))``; the weight of novel
    class k is ``phi_1 * mean_k(x) + phi_2 * mean_k(att W_a)``, elementwise; logits are ``tau_b cos(h, [W_a ; w])``.
    Learned: W_q, the keys k, tau_q, phi_1, phi_2, tau_b, and W_a itself, from its pretrained value.

    This follows the baseline in the released code of Ren et al. (2019), where unit(v) = v / (|v| + 1e-5), and features
    and W_a are mixed as they are. With ``normalise`` it is the model of Gidaris and Komodakis' own code: unit(v) =
    v / |v|, x_i and W_a are made unit vectors first, and the query is x_i W_q + b_q, b_q learned from 0. (They also add
    one bias to the logits of all classes alike, which changes no softmax.) Their training is not this one:

        mini-ImageNet    their code                 here
        images           cropped and flipped, and   features, computed
                         dropout in the network     once
        queries          15 + 15                    25 + 25
        hidden classes   those of the episode       where novel training
                                                    classes are base ones
        steps            60,000                     10,000
        episodes a step  8                          1
        optimiser        SGD, Nesterov momentum     Adam
                         0.9, weight decay 5e-4
        rate             0.1, from step 20,000 on   0.001, from step
                         0.006, 40,000 on 0.0012,   6,000 on 0.0001,
                         50,000 on 0.00024          8,000 on 0.00001
        checkpoint       of one every 1,000 steps   the last one
                         the best in accuracy
                         among novel classes alone
        evaluation       600 episodes of 75 + 75    2,000 of 25 + 25

    Options:
        normalise: Gidaris and Komodakis' model, as described in the text, instead of Ren et al.'s.
        init: initial values. ``ren``: W_q and keys normal with deviation 0.1, tau_b 10. ``gidaris``: W_q the identity
            plus noise of deviation 0.001, keys normal with deviation sqrt(2/D), tau_b as pretrained. Both: phi_1 and
            phi_2 are 1, tau_q is 10.
    """

    name = "lwof"
    display: ClassVar = {"lwof": ("LwoF", "support means, and attention on base weights")}
    parallel_copies: ClassVar[bool] = True
    head: ClassVar[Literal["linear", "cosine"]] = "cosine"
    space: ClassVar[SearchSpace] = {LEARNING_RATE_OPTION: Range(1e-5, 1e-1, log=True)}
    schedule: ClassVar[MetaTraining | None] = MetaTraining(
        steps=10_000, schedule=Schedule(rate=1e-3, drops=(6000, 8000)), validate_every=1000
    )

    def __init__(
        self, base: Base, ways: int, *, normalise: bool = False, init: Literal["ren", "gidaris"] = "ren"
    ) -> None:
        super().__init__(base, ways)
        classes, features = base.weight.shape
        dtype = base.weight.dtype
        to_query = torch.randn(features, features, dtype=dtype)
        keys = torch.randn(classes, features, dtype=dtype)
        if init == "gidaris":
            to_query, keys, tau = torch.eye(features) + 0.001 * to_query, math.sqrt(2 / features) * keys, base.scale
        else:
            to_query, keys, tau = 0.1 * to_query, 0.1 * keys, 10.0
        self.weight = nn.Parameter(base.weight.clone())  # [K, D], W_a
        self.to_query = nn.Parameter(to_query)  # [D, D], W_q
        self.query_bias = nn.Parameter(torch.zeros(features, dtype=dtype)) if normalise else None  # [D], b_q
        self.keys = nn.Parameter(keys)  # [K, D]
        self.phi_mean = nn.Parameter(torch.ones(features, dtype=dtype))
        self.phi_attended = nn.Parameter(torch.ones(features, dtype=dtype))
        self.tau_query = nn.Parameter(torch.tensor(10.0, dtype=dtype))
        self.tau = nn.Parameter(torch.tensor(tau, dtype=dtype))

    def compose_novel_weights(self, support: Support) -> torch.Tensor:
        """Return the generated weights [E, N, D]."""
        memory: torch.Tensor = self.weight  # [K, D]
        if self.query_bias is None:
            features, keys = support.features, normalise_with_epsilon(self.keys)  # [E, S, D], [K, D]
            queries = normalise_with_epsilon(features @ self.to_query)
        else:
            features, memory, keys = (normalise_exactly(v) for v in (support.features, memory, self.keys))
            queries = normalise_exactly(features @ self.to_query + self.query_bias)
        scores = self.tau_query * queries @ keys.T  # [E, S, K]
        attention = scores.masked_fill(support.hidden.unsqueeze(1), -torch.inf).softmax(-1)
        one_hot = F.one_hot(support.labels, self.ways).to(features.dtype)  # [E, S, N]
        share = one_hot.mT / one_hot.sum(-2).unsqueeze(-1)  # [E, N, S], averages over a class's images
        return self.phi_mean * (share @ features) + self.phi_attended * ((share @ attention) @ memory)

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        return SessionOutput(self.compose_novel_weights(support))

    def base_logits(self, query: Query) -> Tensor:
        return self.class_logits(self.weight, query)

    def class_logits(self, state: State, query: Query) -> Tensor:
        return self.tau * cosine_similarities(query.features, state)
