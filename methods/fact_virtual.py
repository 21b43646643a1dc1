"""FACT's classifier, which also goes by the rows of virtual classes (Zhou, Wang, Ye, Ma, Pu and Zhan, CVPR 2022)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.method import Base, Method, Prediction, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.errors import UserError

N_NEAREST_VIRTUAL_ROWS = 40  # virtual rows that speak for a query


class FactVirtual(Method):
    """Nearest class mean by angle, mixed with a vote of virtual classes that resemble a query.

    Virtual rows v_1 ... v_m are of the recipe, which kept room for classes to come by them. With p_i the mean feature
    of class i, base or novel, and s_j = cos(h, v_j) where v_j is among the 40 nearest of a query h, 0 elsewhere,

        logits = log(eta softmax_i(sum_j s_j a_ji) + (1 - eta) softmax_i(temperature cos(h, p_i)))

    As the paper has it, a_ji is the cosine of v_j and p_i; the released code takes v_j . q_i, q being p with each of
    its D rows divided by its length over all classes. Before the first session logits are temperature cos(h, p_i).
    Zhou, Wang, Ye, Ma, Pu & Zhan, Forward Compatible Few-Shot Class-Incremental Learning (CVPR 2022); the formulas are
    facts of ``test_intergrate`` in the released code, which has no licence and was not run. Nothing is learned after
    pretraining.

    Options:
        eta: the share of the vote; 0.1 in their code.
        temperature: of the cosines; 16 in their code.
        vote: "released" or "written" as above.
    """

    name = "fact-virtual"
    display: ClassVar = {"fact-virtual": ("FACT", "class means and a vote of virtual classes")}
    needs: ClassVar = ("virtual",)
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {"eta": Range(0.0, 1.0), "temperature": Range(1.0, 100.0, log=True)}

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        eta: float = 0.1,
        temperature: float = 16.0,
        vote: Literal["released", "written"] = "released",
    ) -> None:
        super().__init__(base, ways)
        if not 0 <= eta <= 1:
            raise UserError(f"eta must be between 0 and 1, not {eta}")
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature must be positive and finite, not {temperature}")
        self.eta, self.temperature, self.vote = eta, temperature, vote

    @classmethod
    def example_extras(cls, classes: int, features: int) -> dict[str, Tensor]:
        return {"virtual": torch.randn(classes, features)}

    def base_logits(self, query: Query) -> Tensor:
        return self.temperature * F.normalize(query.features, dim=-1) @ F.normalize(self.base.prototypes, dim=-1).T

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        means = support.class_means(self.ways)  # [E, N, D]
        if isinstance(before, dict):
            means = torch.cat([before["means"], means], 1)
        return SessionOutput({"means": means, "hidden": support.hidden})

    def answer(self, state: State, query: Query) -> Prediction:
        assert isinstance(state, dict)
        novel = state["means"]
        means = torch.cat([self.base.prototypes.expand(len(novel), -1, -1), novel], 1)  # [E, M, D]
        out = F.pad(state["hidden"], (0, novel.shape[1])).unsqueeze(1)  # [E, 1, M]
        h, virtual = F.normalize(query.features, dim=-1), F.normalize(self.base.extras["virtual"], dim=-1)
        shares = [
            (self.virtual_class_votes(h, virtual, means, out), self.eta),
            (self.temperature * h @ F.normalize(means, dim=-1).mT, 1 - self.eta),
        ]
        parts = [logits.masked_fill(out, -torch.inf).log_softmax(-1) + math.log(share)
                 for logits, share in shares if share]  # fmt: skip
        return Prediction(torch.logsumexp(torch.stack(parts), 0))

    def virtual_class_votes(self, h: Tensor, virtual: Tensor, means: Tensor, out: Tensor) -> Tensor:
        """Return sum_j s_j a_ji, [E, Q, M].

        Args:
            h: queries of length one, [E, Q, D].
            virtual: virtual rows of length one, [m, D].
            means: of all classes met, [E, M, D].
            out: [E, 1, M] bool, hidden classes.
        """
        if self.vote == "released":  # hidden classes have no share in the lengths
            rows = F.normalize(means.masked_fill(out.mT, 0.0), dim=1)
        else:
            rows = F.normalize(means, dim=-1)
        cosines = h @ virtual.T  # [E, Q, m]
        nearest, at = cosines.topk(min(N_NEAREST_VIRTUAL_ROWS, len(virtual)), -1)
        return torch.zeros_like(cosines).scatter(-1, at, nearest) @ (virtual @ rows.mT)
