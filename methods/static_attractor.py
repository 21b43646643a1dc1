"""Static attractor (LR+S, MLP+S): one learned centre for all novel classes, after Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ifsl_bench.common.errors import UserError
from ifsl_bench.learners import WEIGHT_DECAY, LinearLearner, NetworkLearner, fixed_class, fold, meta
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.protocol.task import Task


class StaticAttractor(Method):
    """Fast weights V learned in each episode under a meta-learned regulariser R with a centre that is always the same:

        L(V) = mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  1e-5/2 |V|^2  +  R(V)
        R(V) = (1/N) sum_k sum_d exp(log_gamma_d) (V_kd - u_d)^2

    V = [W, b] for h(x) = W x + b. For h(x) = W tanh(W_2 x + b_2) + W_3 x + b there are three such terms: on [W, b], on
    W_3, and on [W_2, b_2], the mean there being over the 40 hidden units. Learned: u and log_gamma. The static variant
    in Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS 2019); the
    mean over classes, where the paper writes a sum, is their code's. Initially u is 0 (lr) or truncated normal with
    deviation 0.01 (mlp). Hidden base classes are left out of the softmax.

    Options:
        learner: ``lr``, convex and solved by Newton's method in dual numbers, or ``mlp``, solved by L-BFGS.
        gradient: how query losses reach u and log_gamma. ``rbp``: solved to convergence, then a damped Neumann series
            of ``steps`` terms for F(V) = V - rate grad L(V), as in the paper. ``implicit``: the exact gradient at the
            solution. ``t-bptt``: ``steps`` gradient steps from fixed initial values, differentiated through.
        steps: terms of the series (rbp), gradient steps (t-bptt).
        damping: of the series (rbp).
        rate: step size in F (rbp), or of the gradient steps (t-bptt), there no more than 1.8 over the largest
            curvature at an episode's start; the rate used is among the statistics.
        converge: whether t-bptt goes on to the minimum in evaluation, or stops after ``steps`` steps there too.
        gamma: initial exp(log_gamma); in tasks of one shot the default is 0.1.
    An option that ``gradient`` does not read is refused unless it has its default.
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lr+s": {"learner": "lr"}, "mlp+s": {"learner": "mlp"}}

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
        gamma: float = 0.01,
    ) -> None:
        super().__init__(base, ways)
        try:
            self.meta = meta(gradient, steps, damping, rate, converge)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not 0 < gamma < float("inf"):
            raise UserError(f"gamma must be positive and finite, not {gamma}")
        self.learner = (LinearLearner if learner == "lr" else NetworkLearner)(ways, base.weight.shape[1])
        parts = self.learner.parts
        self.centre = nn.ParameterList(torch.zeros(part.size) for part in parts)  # u
        self.log_gamma = nn.ParameterList(torch.full((part.size,), math.log(gamma)) for part in parts)
        if learner == "mlp":
            for u in self.centre:
                nn.init.trunc_normal_(u, std=0.01, a=-0.02, b=0.02)
        for i, start in enumerate(self.learner.start() if self.meta.needs_start else ()):
            self.register_buffer(f"start_{i}", start, persistent=False)
        self.to(base.weight)

    @classmethod
    def defaults(cls, task: Task) -> dict[str, Any]:
        return {"gamma": 0.1} if task.shots == 1 else {}

    def forward(self, support: Support, query: Query) -> Prediction:
        rest = fixed_class(support.base_logits, support.hidden)  # [E, S]
        pulls = [
            fold(u.expand(1 if part.common else part.rows, -1), log_gamma, WEIGHT_DECAY, part.rows)
            for part, u, log_gamma in zip(self.learner.parts, self.centre, self.log_gamma, strict=True)
        ]
        rows = (support.features, support.labels, rest)
        start = list(self.buffers())
        found = self.meta.answer(self.learner, rows, pulls, query.features, start, self.training)
        return Prediction(torch.cat([query.base_logits, found.novel], -1), found.statistics, found.adjoint)
