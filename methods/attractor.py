"""Attention attractor networks (LR+A, MLP+A; Ren, Liao, Fetaya and Zemel, NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.plugin.attractor_method import GAMMA, AttractorMethod
from ifsl_bench.plugin.method import Base, Support
from ifsl_bench.solvers.attractor_prior import AttractorMLP, attention_weights
from ifsl_bench.utils.errors import UserError


class Attractor(AttractorMethod):
    """Fast weights V learned in each episode under a meta-learned regulariser R that attends to the base classes.

        L(V) = mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2  +  R(V)
        R(V) = (1/N) sum_k sum_d exp(log_gamma_d) (V_kd - u_kd)^2
        u_k  = sum_j a_kj f_phi(W_a,j) + U_0,    a_kj = softmax_j(tau unit(p_k) . unit(W_a,j))

    p_k is the support mean of class k, f_phi has one hidden tanh layer. V = [W, b] for h(x) = W x + b. For
    h(x) = W tanh(W_2 x + b_2) + W_3 x + b there are three such terms: on [W, b] and on W_3 for each class, and on
    [W_2, b_2], where one centre serves all 40 hidden units, attends with the mean of all support features and a
    temperature of its own, and the mean is over the units; the three share f_phi's hidden layer. Learned: phi, U_0, tau
    and log_gamma. Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS
    2019). As in their code, and not in the paper, R is a mean over classes and p_k has dropout. Unlike in their code,
    hidden base classes are left out of the attention and the softmax altogether, and no "dummy step" (one more gradient
    step of size 1, which changes nothing at a minimum) follows the solve. Initially tau is 2, biases are 0, weights and
    U_0 truncated normal with deviation 0.01 (mlp: U_0 0.1).

    Options:
        hidden: units of f_phi's hidden layer.
        dropout: on p_k, in training alone, drawn once an episode.
    """

    name = "attractor"
    display: ClassVar = {
        "lr+a": ("LR+A", "LR with centres from attention on base classes"),
        "mlp+a": ("MLP+A", "MLP with centres from attention on base classes"),
    }
    parallel_copies: ClassVar[bool] = True
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lr+a": {"learner": "lr"}, "mlp+a": {"learner": "mlp"}}

    def __init__(
        self, base: Base, ways: int, *, hidden: int = 50, dropout: float = 0.1, gamma: float = GAMMA, **shared: Any
    ) -> None:
        super().__init__(base, ways, **shared)
        if hidden < 1:
            raise UserError(f"hidden must be at least 1, not {hidden}")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {dropout}")
        self.dropout = dropout
        groups = self.learner.groups
        self.common = any(group.shares_centre for group in groups)
        self.memory = AttractorMLP(base.weight.shape[1], tuple(group.size for group in groups), hidden)  # f_phi
        self.offset = nn.ParameterList(torch.empty(group.size) for group in groups)  # U_0
        std = 0.01 if self.learner.convex else 0.1
        for offset in self.offset:
            nn.init.trunc_normal_(offset, std=std, a=-2 * std, b=2 * std)
        self.tau = nn.Parameter(torch.full((1 + self.common,), 2.0))
        self.register_log_gamma(gamma)

    def centres(self, support: Support) -> list[Tensor]:
        means = F.dropout(support.class_means(self.ways), self.dropout, self.training)  # [E, N, D]
        tau: Tensor = self.tau
        if self.common:  # one more row attends: the mean of all support features
            means = torch.cat([means, support.features.mean(1, keepdim=True)], 1)  # [E, N+1, D]
            tau = torch.cat([tau[:1].expand(self.ways), tau[1:]])[:, None]
        hidden = support.hidden if bool(support.hidden.any()) else None
        shares = attention_weights(means, self.base.weight, tau, hidden)  # [E, N(+1), K]
        # Shares sum to one, so f_phi's last layer may as well come after them: [E, N(+1), hidden] is the smaller.
        mixed = shares @ torch.tanh(self.memory.inner(self.base.weight))
        return [
            layer(mixed[:, self.ways :] if group.shares_centre else mixed[:, : self.ways]) + offset
            for group, layer, offset in zip(self.learner.groups, self.memory.outer, self.offset, strict=True)
        ]
