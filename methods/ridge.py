"""LR and MLP: a classifier under a plain ridge beside the base classifier, baselines of Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Base, MemoryPolicy, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.solvers import make_learner
from ifsl_bench.solvers.attractor_prior import ridge_prior
from ifsl_bench.solvers.episode_problems import STRONG_WEIGHT_DECAYS, WEIGHT_DECAYS, ConvergedSolve, fixed_logsumexp
from ifsl_bench.utils.errors import UserError


class Ridge(AdditiveClassifier):
    """Fast weights V that minimise the loss on the support set alone.

        mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2

    over all base and novel classes; the base classifier stays as it is. No meta-training: the episodic objective of
    Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS 2019), with
    R = 0. Hidden base classes are left out.

    LR has V = [W, b] and h(x) = W x + b. It is convex, and solved to the minimum by a Newton method in dual numbers.
    MLP has V = (W, b, W_2, b_2, W_3) and h(x) = W tanh(W_2 x + b_2) + W_3 x + b with 40 hidden units. It is not convex:
    L-BFGS, which searches in dual numbers, finds a minimum from a fixed small start; a search in V might find another.

    Options:
        learner: ``lr`` or ``mlp``.
        weight_decay: of all fast weights, biases included; chosen on validation episodes unless given, from a grid of
            this suite: 1e-13 to 1e-1 by half powers of ten, in sessions to 10. The authors' code has one number each:
            1e-5 for LR at 1 shot on mini-ImageNet and 0 on tiered-ImageNet, 1e-5 for MLP at 1 shot, 1e-3 at 5 shots.
        memory: in sessions, ``none`` keeps the fast weights of earlier sessions as they are; ``supports`` keeps all
            supports, and solves for all novel classes anew in each session. In episodes they are the same.
    """

    name = "ridge"
    display: ClassVar = {
        "lr": ("LR", "logistic regression in each episode"),
        "mlp": ("MLP", "a small network fitted in each episode"),
    }
    parallel_copies: ClassVar[bool] = True
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lr": {"learner": "lr"}, "mlp": {"learner": "mlp"}}
    space: ClassVar[SearchSpace] = {"weight_decay": Range(1e-14, 1.0, log=True)}
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": WEIGHT_DECAYS}
    session_grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight_decay": STRONG_WEIGHT_DECAYS}

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        learner: Literal["lr", "mlp"] = "lr",
        weight_decay: float = 1e-3,
        memory: MemoryPolicy = "none",
    ) -> None:
        super().__init__(base, ways)
        if not 0 < weight_decay < float("inf"):
            raise UserError(f"weight_decay must be positive and finite, not {weight_decay}")
        self.weight_decay = weight_decay
        self.learner = make_learner(learner, ways, base.weight.shape[1])
        self.per_class_state = learner == "lr"  # hidden units serve all classes of a session

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        x = support.features  # [E, S, D]
        base_logsumexp = fixed_logsumexp(support.base_logits, support.hidden, earlier)  # [E, S]
        priors = [
            ridge_prior(1 if p.shares_centre else p.rows, p.size, self.weight_decay, x) for p in self.learner.groups
        ]
        solved = ConvergedSolve().solve(self.learner, (x, support.labels, base_logsumexp), priors)
        return SessionOutput(solved.fast_weights, solved.statistics)

    def class_logits(self, state: State, query: Query) -> Tensor:
        return self.learner.logits(state, query.features)
