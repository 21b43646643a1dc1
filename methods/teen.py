"""TEEN: training-free prototype calibration (Wang, Zhou, Zhang, Zhan and Ye, NeurIPS 2023)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.cosine import cosine_similarities, linear_logits, normalise_exactly
from ifsl_bench.utils.errors import UserError


class TEEN(AdditiveClassifier):
    """A novel class's mean is moved towards the base classes that it resembles; nearest prototype by angle.

    With c_j the unit mean feature of all base/train images of base class j, and p_k that of novel class k's support
    images:

        w_kj = softmax_j(tau p_k . c_j)
        d_k  = unit(sum_j w_kj c_j)
        q_k  = (1 - alpha) p_k + alpha d_k
        logits = scale cos(h, [c ; q])

    Nothing is learned after pretraining. Wang, Zhou, Zhang, Zhan & Ye, Few-Shot Class-Incremental Learning via
    Training-free Prototype Calibration (NeurIPS 2023), as in the released code (w, d and q: ``soft_calibration`` of
    models/teen/Network.py, the logits: its ``get_logits``): the weights of base classes are their mean features, not
    the pretrained ones. Differences: the novel classes of an episode come at once, where theirs come in sessions; a
    hidden base class has no share in w; the temperature of the logits, which moves no answer, is the pretrained one,
    theirs is 16 or 32; and our backbone is pretrained with a cosine classifier of learned temperature, theirs with a
    fixed one.

    Options:
        alpha: the share of the base classes in a prototype; their code's ``shift_weight``, 0.5 unless given, 0.1 in its
            script for CIFAR-100.
        tau: how sharply similar base classes are preferred; their code's ``softmax_t``, 16 unless given.
    """

    name = "teen"
    display: ClassVar = {"teen": ("TEEN", "support means moved towards similar base classes")}
    head: ClassVar[Literal["linear", "cosine"]] = "cosine"
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    uses_earlier_logits = False
    space: ClassVar[SearchSpace] = {"alpha": Range(0.0, 1.0), "tau": Range(1.0, 100.0, log=True)}

    def __init__(self, base: Base, ways: int, *, alpha: float = 0.5, tau: float = 16.0) -> None:
        super().__init__(base, ways)
        if not 0 <= alpha <= 1:
            raise UserError(f"alpha must be between 0 and 1, not {alpha}")
        if not 0 <= tau < math.inf:
            raise UserError(f"tau must be 0 or positive, and finite, not {tau}")
        self.alpha, self.tau = alpha, tau

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        seen = normalise_exactly(self.base.prototypes)  # [K, D]
        novel = normalise_exactly(support.class_means(self.ways))  # [E, N, D]
        scores = (self.tau * novel @ seen.T).masked_fill(support.hidden.unsqueeze(1), -math.inf)  # [E, N, K]
        alike = normalise_exactly(scores.softmax(-1) @ seen)  # [E, N, D]
        return SessionOutput((1 - self.alpha) * novel + self.alpha * alike)

    def base_logits(self, query: Query) -> Tensor:
        return self.base.scale * cosine_similarities(query.features, normalise_exactly(self.base.prototypes))

    def class_logits(self, state: State, query: Query) -> Tensor:
        return linear_logits(query.features, normalise_exactly(state)).mul_(self.base.scale)

    def transform_query(self, query: Query) -> Query:
        return Query(normalise_exactly(query.features), query.base_logits[..., :0])
