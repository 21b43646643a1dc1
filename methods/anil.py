"""ANIL: almost no inner loop (Raghu, Raghu, Bengio and Vinyals, ICLR 2020), with learn2learn's MAML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.plugin.learn2learn import REQUIRED_MODULES, load_learn2learn
from ifsl_bench.plugin.method import AdditiveClassifier, Base, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.solvers import fixed_logsumexp
from ifsl_bench.utils.errors import UserError


class ClassifierHeadPerEpisode(nn.Module):
    """Linear classifiers of E episodes side by side, [E, rows, D] -> [E, rows, N]; E is 1 for the learned initial one.

    Initially uniform(-1, 1)/sqrt(D), as PyTorch's linear layers.
    """

    def __init__(self, ways: int, like: Tensor) -> None:
        super().__init__()
        bound = like.shape[-1] ** -0.5
        self.weight = nn.Parameter(like.new_empty(1, ways, like.shape[-1]).uniform_(-bound, bound))  # [E, N, D]
        self.bias = nn.Parameter(like.new_empty(1, ways).uniform_(-bound, bound))  # [E, N]

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def repeat_for_episodes(self, episodes: int) -> None:
        """Give each episode a copy; for clones, whose "parameters" are tensors that know where they came from."""
        for name, value in self._parameters.items():
            assert value is not None
            self._parameters[name] = value.expand(episodes, *value.shape[1:])  # type: ignore[assignment]


class ANIL(AdditiveClassifier):
    """The novel classes' head [W, b], adapted in each episode by a few gradient steps from meta-learned initial values.

    On the frozen features, ``inner_steps`` gradient steps of size ``inner_rate`` are made from the initial [W, b] on

        mean_i CE([W_a x_i + b_a ; W x_i + b], y_i)

    of the support set, over all base and novel classes; the base classifier stays as it is. The query loss reaches the
    initial values through the steps. ANIL of Raghu, Raghu, Bengio & Vinyals, Rapid Learning or Feature Reuse? (ICLR
    2020): MAML (Finn, Abbeel & Levine, ICML 2017) whose inner loop adapts the head alone. Differences: the features are
    not meta-learned, as in all methods here, and the softmax has the base classes too. Cloning and steps are those of
    learn2learn's ``algorithms.MAML``, all episodes of a batch at once: their losses are summed, and each has a head of
    its own. Hidden base classes are left out of the softmax.

    Options:
        inner_steps: gradient steps in an episode, in training and evaluation alike.
        inner_rate: their size; a good value depends on the scale of the features.
        first_order: whether meta-gradients treat the steps as constants (FOMAML).
    """

    name = "anil"
    display: ClassVar = {"anil": ("ANIL", "a few gradient steps from a learned start")}
    label_slots: ClassVar[bool] = True  # each has initial weights of its own
    parallel_copies: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {
        "inner_rate": Range(0.01, 10.0, log=True),
        LEARNING_RATE_OPTION: Range(1e-5, 1e-1, log=True),
    }
    requires: ClassVar[Mapping[str, str]] = REQUIRED_MODULES

    def __init__(
        self, base: Base, ways: int, *, inner_steps: int = 5, inner_rate: float = 0.3, first_order: bool = False
    ) -> None:
        super().__init__(base, ways)
        if inner_steps < 1:
            raise UserError(f"inner_steps must be at least 1, not {inner_steps}")
        if not 0 < inner_rate < math.inf:
            raise UserError(f"inner_rate must be positive and finite, not {inner_rate}")
        self.inner_steps = inner_steps
        self.maml = load_learn2learn().algorithms.MAML(
            ClassifierHeadPerEpisode(ways, base.weight), lr=inner_rate, first_order=first_order
        )

    def adapt_heads(self, support: Support, second_order: bool, earlier: Tensor | None = None) -> nn.Module:
        """Return heads adapted to each of the E episodes.

        Args:
            support: support images of the episodes.
            second_order: whether gradients through the steps are wanted.
            earlier: logits of the earlier sessions' classes, [E, S, (t - 1) N]; None if there are none.
        """
        base_logsumexp = fixed_logsumexp(support.base_logits, support.hidden, earlier).unsqueeze(-1)  # [E, S, 1]
        learner = self.maml.clone(first_order=self.maml.first_order or not second_order)
        learner.module.repeat_for_episodes(len(base_logsumexp))
        for _ in range(self.inner_steps):
            logits = torch.cat([base_logsumexp, learner(support.features)], -1)  # [E, S, 1 + N]
            loss = F.cross_entropy(logits.mT, support.labels + 1, reduction="none").mean(1)  # [E]
            learner.adapt(loss.sum())
        return learner

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():  # the steps need gradients also where nothing is learned from them
            heads = self.adapt_heads(support, wanted, earlier)
        return SessionOutput({"weight": heads.weight, "bias": heads.bias})

    def class_logits(self, state: State, query: Query) -> Tensor:
        return torch.baddbmm(state["bias"].unsqueeze(1), query.features, state["weight"].mT)
