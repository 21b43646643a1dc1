"""Attention attractor networks (LR+A, MLP+A; Ren, Liao, Fetaya and Zemel, NeurIPS 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.common.errors import UserError
from ifsl_bench.learners import WEIGHT_DECAY, LinearLearner, Memory, NetworkLearner, attention, fixed_class, fold, meta
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.protocol.task import Task


class Attractor(Method):
    """Fast weights V learned in each episode under a meta-learned regulariser R that attends to the base classes:

        L(V) = mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  1e-5/2 |V|^2  +  R(V)
        R(V) = (1/N) sum_k sum_d exp(log_gamma_d) (V_kd - u_kd)^2
        u_k  = sum_j a_kj f_phi(W_a,j) + U_0,    a_kj = softmax_j(tau unit(p_k) . unit(W_a,j))

    p_k is the support mean of class k, f_phi has one hidden tanh layer. V = [W, b] for h(x) = W x + b. For
    h(x) = W tanh(W_2 x + b_2) + W_3 x + b there are three such terms: on [W, b] and on W_3 for each class, and on
    [W_2, b_2], where one centre serves all 40 hidden units, attends with the mean of all support features and a
    temperature of its own, and the mean is over the units; the three share f_phi's hidden layer. Learned: phi, U_0, tau
    and log_gamma. Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS
    2019). As in their code, and not in the paper, R is a mean over classes and p_k has dropout; unlike in their code, a
    hidden base class leaves no trace in the attention, and nothing of it in the softmax. Initially tau is 2, biases are
    0, weights and U_0 truncated normal with deviation 0.01 (mlp: U_0 0.1).

    Options:
        learner: ``lr``, convex and solved by Newton's method in dual numbers, or ``mlp``, solved by L-BFGS.
        gradient: how query losses reach what is learned. ``rbp``: solved to convergence, then a damped Neumann series
            of ``steps`` terms for F(V) = V - rate grad L(V), as in the paper. ``implicit``: the exact gradient at the
            solution. ``t-bptt``: ``steps`` gradient steps from fixed initial values, differentiated through.
        steps: terms of the series (rbp), gradient steps (t-bptt).
        damping: of the series (rbp).
        rate: step size in F (rbp), or of the gradient steps (t-bptt), there no more than 1.8 over the largest
            curvature at an episode's start; the rate used is among the statistics.
        converge: whether t-bptt goes on to the minimum in evaluation, or stops after ``steps`` steps there too.
        hidden: units of f_phi's hidden layer.
        dropout: on p_k, in training alone, drawn once an episode.
        gamma: initial exp(log_gamma); in tasks of one shot the default is 0.1.
    An option that ``gradient`` does not read is refused unless it has its default.
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lr+a": {"learner": "lr"}, "mlp+a": {"learner": "mlp"}}

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        learner: Literal["lr", "mlp"] = "mlp",
        gradient: Literal["rbp", "implicit", "t-bptt"] = "rbp",
        steps: int = 20,
        damping: float = 0.1,
        rate: float = 1.0,
        converge: bool = True,
        hidden: int = 50,
        dropout: float = 0.1,
        gamma: float = 0.01,
    ) -> None:
        super().__init__(base, ways)
        try:
            self.meta = meta(gradient, steps, damping, rate, converge)
        except ValueError as error:
            raise UserError(str(error)) from error
        if hidden < 1:
            raise UserError(f"hidden must be at least 1, not {hidden}")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {dropout}")
        if not 0 < gamma < float("inf"):
            raise UserError(f"gamma must be positive and finite, not {gamma}")
        features = base.weight.shape[1]
        self.dropout = dropout
        self.learner = (LinearLearner if learner == "lr" else NetworkLearner)(ways, features)
        parts = self.learner.parts
        self.common = any(part.common for part in parts)
        self.memory = Memory(features, tuple(part.size for part in parts), hidden)  # f_phi
        self.offset = nn.ParameterList(torch.empty(part.size) for part in parts)  # U_0
        std = 0.01 if learner == "lr" else 0.1
        for offset in self.offset:
            nn.init.trunc_normal_(offset, std=std, a=-2 * std, b=2 * std)
        self.log_gamma = nn.ParameterList(torch.full((part.size,), math.log(gamma)) for part in parts)
        self.tau = nn.Parameter(torch.full((1 + self.common,), 2.0))
        for i, start in enumerate(self.learner.start() if self.meta.needs_start else ()):
            self.register_buffer(f"start_{i}", start, persistent=False)
        self.to(base.weight)

    def centres(self, support: Support) -> list[Tensor]:
        """u of each part: [E, N, size], or [E, 1, size] where one centre serves all rows."""
        means = F.dropout(support.class_means(self.ways), self.dropout, self.training)  # [E, N, D]
        tau: Tensor = self.tau
        if self.common:  # one more row attends: the mean of all support features
            means = torch.cat([means, support.features.mean(1, keepdim=True)], 1)  # [E, N+1, D]
            tau = torch.cat([tau[:1].expand(self.ways), tau[1:]])[:, None]
        hidden = support.hidden if bool(support.hidden.any()) else None
        shares = attention(means, self.base.weight, tau, hidden)  # [E, N(+1), K]
        # Shares sum to one, so f_phi's last layer may as well come after them: [E, N(+1), hidden] is the smaller.
        mixed = shares @ torch.tanh(self.memory.inner(self.base.weight))
        return [
            layer(mixed[:, self.ways :] if part.common else mixed[:, : self.ways]) + offset
            for part, layer, offset in zip(self.learner.parts, self.memory.outer, self.offset, strict=True)
        ]

    @classmethod
    def defaults(cls, task: Task) -> dict[str, Any]:
        return {"gamma": 0.1} if task.shots == 1 else {}

    def forward(self, support: Support, query: Query) -> Prediction:
        rest = fixed_class(support.base_logits, support.hidden)  # [E, S]
        pulls = [
            fold(u, log_gamma, WEIGHT_DECAY, part.rows)
            for part, u, log_gamma in zip(self.learner.parts, self.centres(support), self.log_gamma, strict=True)
        ]
        rows = (support.features, support.labels, rest)
        start = list(self.buffers())
        found = self.meta.answer(self.learner, rows, pulls, query.features, start, self.training)
        return Prediction(torch.cat([query.base_logits, found.novel], -1), found.statistics, found.adjoint)
