"""LR under the subspace regulariser (Akyürek, Akyürek, Wijaya and Andreas, ICLR 2022), base weights fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Base, MemoryPolicy, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.solvers import (
    STRONG_WEIGHT_DECAYS,
    WEIGHT_DECAYS,
    DualNewton,
    RegressionArgs,
    SoftmaxRegression,
    fixed_logsumexp,
    solve_statistics,
)
from ifsl_bench.solvers.solve import minimise
from ifsl_bench.utils.cosine import linear_logits
from ifsl_bench.utils.errors import UserError


class Subspace(AdditiveClassifier):
    """Novel weights V = [W, b] that stay near the span of the base weights, from the support set alone.

        L(V) = mean_i CE([W_a x_i + b_a ; W x_i + b], y_i) + gamma sum_k |w_k - P w_k|^2 + weight_decay/2 |V|^2

    over all base and novel classes, P being the projection on the span of the base weights W_a that are in play. No
    meta-training. Akyürek, Akyürek, Wijaya & Andreas, Subspace Regularizers for Few-Shot Class Incremental Learning
    (ICLR 2022), projection and penalty as in the released code (``get_projected_weight`` and ``loss1`` of
    models/resnet_language.py; the sum of the losses: eval/language_eval.py). This is a variant of theirs: base
    weights are fixed, so there is no penalty on how far they move; the objective is solved to its minimum, where theirs
    takes steps of SGD until the loss hardly changes; there are no images of base classes in memory, and all novel
    classes come at once; novel classes have a bias, under weight decay alone.

    It is convex. The quadratic form A, the same for every w_k, has the inverse

        A^-1 = 1/s 1 + (1/weight_decay - 1/s) U U^T,    s = weight_decay + 2 gamma,

    with an orthonormal basis U of the span. So with U^T x beside x for features, and a diagonal penalty on each, it is
    LR: the minimum is at w = v_1 + U v_2, and the Newton method in dual numbers is LR's.

    Where the base weights span all features nothing is left to regularise, and the method is refused: it would be LR.

    Options:
        gamma: of the distance from the span; in their script for five shots, 1 in the loop over seeds and 0.03 in the
            single command below it.
        weight_decay: of W and b; chosen from the grid of LR on validation episodes unless given.
        memory: in sessions, ``none`` keeps the fast weights of earlier sessions as they are; ``supports`` keeps all
            supports, and solves for all novel classes anew in each session. In episodes they are the same.
    """

    name = "subspace"
    display: ClassVar = {"subspace": ("Subspace", "LR held near the span of the base classes' weights")}
    parallel_copies: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {"weight_decay": Range(1e-14, 1.0, log=True), "gamma": Range(1e-6, 100.0, log=True)}
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": WEIGHT_DECAYS}
    session_grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": STRONG_WEIGHT_DECAYS}

    def __init__(
        self, base: Base, ways: int, *, gamma: float = 0.03, weight_decay: float = 1e-3, memory: MemoryPolicy = "none"
    ) -> None:
        super().__init__(base, ways)
        for name, value in (("gamma", gamma), ("weight_decay", weight_decay)):
            if not 0 < value < math.inf:
                raise UserError(f"{name} must be positive and finite, not {value}")
        classes, features = base.weight.shape
        span = orthonormal_basis(base.weight)  # [D, r], r at most the smaller of K and D
        rank = int((span != 0).any(0).sum())
        if rank == features:
            raise UserError(
                f"the weights of {classes} base classes span all {features} features: nothing is left to "
                f"regularise, and this would be LR (--method lr)"
            )
        self.register_buffer("span", span[:, :rank].contiguous(), persistent=False)
        strong = weight_decay + 2 * gamma
        inside = weight_decay * strong / (2 * gamma)  # 1 / (1/weight_decay - 1/strong)
        self.precisions = (strong, inside, weight_decay)  # of v_1, v_2 and b

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        x, span = support.features, self.get_buffer("span")
        if bool(support.hidden.any()):  # a span for each episode
            span = orthonormal_basis(self.base.weight.masked_fill(support.hidden.unsqueeze(-1), 0))  # [E, D, r]
        features, rank = span.shape[-2:]
        strong, inside, decay = self.precisions
        precisions = torch.cat([x.new_full((features,), strong), x.new_full((rank,), inside), x.new_full((1,), decay)])
        base_logsumexp = fixed_logsumexp(support.base_logits, support.hidden, earlier)
        centres = x.new_zeros(self.ways, len(precisions))
        args = RegressionArgs(torch.cat([x, x @ span], -1), support.labels, base_logsumexp, centres, precisions)
        solution = minimise(SoftmaxRegression(), DualNewton(), None, args)
        v_1, v_2, bias = solution.value.split([features, rank, 1], -1)  # [E, N, D], [E, N, r], [E, N, 1]
        return SessionOutput({"weight": v_1 + v_2 @ span.mT, "bias": bias}, solve_statistics(solution))

    def class_logits(self, state: State, query: Query) -> Tensor:
        return linear_logits(query.features, state["weight"], state["bias"].squeeze(-1))


def orthonormal_basis(weight: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows of weight [..., K, D], the columns of [..., D, min(K, D)].

    Columns beyond the rank are 0.
    """
    _, lengths, rows = torch.linalg.svd(weight.double(), full_matrices=False)
    least = lengths[..., :1] * max(weight.shape[-2:]) * torch.finfo(weight.dtype).eps
    return (rows * (lengths > least).unsqueeze(-1)).mT.to(weight.dtype)
