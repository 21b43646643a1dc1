"""Static attractor (LR+S, MLP+S): one learned centre for all novel classes, after Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ifsl_bench.plugin.attractor_method import GAMMA, AttractorMethod
from ifsl_bench.plugin.method import Base, Support


class StaticAttractor(AttractorMethod):
    """Fast weights V learned in each episode under a meta-learned regulariser R with a centre that is always the same.

        L(V) = mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2  +  R(V)
        R(V) = (1/N) sum_k sum_d exp(log_gamma_d) (V_kd - u_d)^2

    V = [W, b] for h(x) = W x + b. For h(x) = W tanh(W_2 x + b_2) + W_3 x + b there are three such terms: on [W, b], on
    W_3, and on [W_2, b_2], the mean there being over the 40 hidden units. Learned: u and log_gamma. The static variant
    in Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS 2019); the
    mean over classes, where the paper writes a sum, is their code's. Initially u is 0 (lr) or truncated normal with
    deviation 0.01 (mlp). Hidden base classes are left out of the softmax.
    """

    name = "static-attractor"
    display: ClassVar = {
        "lr+s": ("LR+S", "LR with one learned centre for all classes"),
        "mlp+s": ("MLP+S", "MLP with learned centres, the same in all episodes"),
    }
    parallel_copies: ClassVar[bool] = True
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lr+s": {"learner": "lr"}, "mlp+s": {"learner": "mlp"}}

    def __init__(self, base: Base, ways: int, *, gamma: float = GAMMA, **shared: Any) -> None:
        super().__init__(base, ways, **shared)
        self.centre = nn.ParameterList(torch.zeros(group.size) for group in self.learner.groups)  # u
        if not self.learner.convex:
            for u in self.centre:
                nn.init.trunc_normal_(u, std=0.01, a=-0.02, b=0.02)
        self.register_log_gamma(gamma)

    def centres(self, support: Support) -> list[Tensor]:
        return [
            u.expand(1 if group.shares_centre else group.rows, -1)
            for group, u in zip(self.learner.groups, self.centre, strict=True)
        ]
