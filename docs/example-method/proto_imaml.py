"""Proto-iMAML: softmax regression on an episode's support set, pulled towards the class means by a learned prior."""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench import Base, MetaTraining, Method, Prediction, Query, Schedule, Support, UserError
from ifsl_bench.solvers import LBFGS, ConjugateGradient, Implicit, Neumann, fixed_logsumexp, minimise, solve_statistics


def objective(v: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """L(V) of each episode, [E], for novel weights v [E, N, D]."""
    x, labels, base_logsumexp, centres, precision = args
    logits = torch.cat([base_logsumexp.unsqueeze(-1), x @ v.mT], -1)  # [E, S, 1 + N], all base classes as one first
    loss = F.cross_entropy(logits.mT, labels + 1, reduction="none").mean(1)  # [E]
    return loss + precision / 2 * (v - centres).square().sum((1, 2))


class ProtoIMAML(Method):
    """Novel weights learned in each episode under a Gaussian prior around the class means, itself meta-learned.

    The weights V [N, D] beside a frozen cosine classifier W_a are the minimum, for unit features x_i, of

        L(V) = mean_i CE([tau cos(x_i, W_a) - margin ; V x_i], y_i)  +  precision/2 sum_k |V_k - length unit(p_k)|^2

    over all base and novel classes, p_k being the support mean of class k. The proximal inner problem is that of iMAML
    (Rajeswaran, Finn, Kakade & Levine, Meta-Learning with Implicit Gradients, NeurIPS 2019), prototypes in place of a
    learned initial point are from Proto-MAML (Triantafillou et al., Meta-Dataset, ICLR 2020). Three numbers are learned
    by implicit differentiation: precision, length and margin. tau is the pretrained temperature, and length begins
    there. Hidden base classes are left out of the softmax.

    Options:
        gradient: ``implicit``, exact at the minimum, or ``rbp``, a damped Neumann series of 20 terms.
        precision: its initial value.
    """

    head = "cosine"
    schedule = MetaTraining(steps=1000, schedule=Schedule(rate=1e-2, drops=(750,)), validate_every=250)
    shorthands: ClassVar = {"proto-rbp": {"gradient": "rbp"}}

    def __init__(
        self, base: Base, ways: int, *, gradient: Literal["implicit", "rbp"] = "implicit", precision: float = 0.003
    ) -> None:
        super().__init__(base, ways)
        if not 0 < precision < math.inf:
            raise UserError(f"precision must be positive and finite, not {precision}")
        self.adjoint = Implicit(Neumann() if gradient == "rbp" else ConjugateGradient())
        self.log_precision = nn.Parameter(base.weight.new_tensor(math.log(precision)))
        self.log_length = nn.Parameter(base.weight.new_tensor(math.log(base.scale)))
        self.margin = nn.Parameter(base.weight.new_zeros(()))

    def base_logits(self, images: Support | Query) -> Tensor:
        lengths = images.features.norm(dim=-1, keepdim=True) * self.base.weight.norm(dim=-1)  # [E, S or Q, K]
        return self.base.scale * images.base_logits / lengths.clamp_min(1e-12)

    def forward(self, support: Support, query: Query) -> Prediction:
        x, q = F.normalize(support.features, dim=-1), F.normalize(query.features, dim=-1)
        centres = self.log_length.exp() * F.normalize(support.class_means(self.ways), dim=-1)  # [E, N, D]
        base_logsumexp = fixed_logsumexp(self.base_logits(support), support.hidden) - self.margin  # [E, S]
        args = (x, support.labels, base_logsumexp, centres, self.log_precision.exp())
        # From zero: LBFGS stops at a share of the gradient at its start, which is next to nothing at the centres.
        solution = minimise(objective, LBFGS(), torch.zeros_like(centres), args, self.adjoint)
        logits = torch.cat([self.base_logits(query) - self.margin, q @ solution.value.mT], -1)  # [E, Q, K + N]
        return Prediction(logits, solve_statistics(solution), solution.adjoint)
