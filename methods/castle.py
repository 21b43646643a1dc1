"""CASTLE and ACASTLE: classifiers synthesised with a learned dictionary (Ye, Hu and Zhan, IJCV 2021)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Method, Prediction, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.utils.cosine import linear_logits, normalise_exactly
from ifsl_bench.utils.errors import UserError

ATTENTION_DROPOUT = 0.1  # of single shares, as in the released code


class _ClassifierSynthesis(Method):
    """The parameters that CASTLE and ACASTLE learn: a dictionary, and an attention to it.

    Options:
        dropout: of what attention adds, in training alone; 0.5 in their commands.
        temperature: the logits are divided by it; 1 in their commands.
    """

    space: ClassVar[SearchSpace] = {
        "dropout": Range(0.0, 0.8),
        "temperature": Range(0.1, 10.0, log=True),
        LEARNING_RATE_OPTION: Range(1e-5, 1e-2, log=True),
    }

    def __init__(self, base: Base, ways: int, *, dropout: float = 0.5, temperature: float = 1.0) -> None:
        super().__init__(base, ways)
        if not 0 <= dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {dropout}")
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature must be positive and finite, not {temperature}")
        self.dropout, self.temperature = dropout, temperature
        classes, features = base.weight.shape

        def make_normal_parameter(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, features, dtype=base.weight.dtype) / math.sqrt(features))

        self.to_query, self.to_key, self.to_value, self.to_output = (
            make_normal_parameter(features) for _ in range(4)
        )  # [D, D]
        self.dictionary = nn.Parameter(make_normal_parameter(2 * classes).detach() / math.sqrt(classes))  # [2K, D]

    def synthesise_weights(self, weight: Tensor, out: Tensor | None) -> Tensor:
        """Return unit weights [E, M, D] from weights [E, M, D] that attend to each other and to the dictionary.

        Args:
            weight: of the classes, [E, M, D].
            out: [E, M] bool, weights that are left out of the attention; None for none.
        """
        keys, values = ([weight @ m.T, self.dictionary @ m.T] for m in (self.to_key, self.to_value))
        scores = torch.cat([weight @ self.to_query.T @ key.mT for key in keys], -1)  # [E, M, M + 2K]
        if out is not None:
            scores = scores.masked_fill(F.pad(out, (0, len(self.dictionary))).unsqueeze(1), -math.inf)
        share = F.dropout((scores / math.sqrt(weight.shape[-1])).softmax(-1), ATTENTION_DROPOUT, self.training)
        near, learned = share.split([weight.shape[1], len(self.dictionary)], -1)
        added = (near @ values[0] + learned @ values[1]) @ self.to_output.T
        return normalise_exactly(weight + F.dropout(added, self.dropout, self.training))


class Castle(_ClassifierSynthesis, AdditiveClassifier):
    """A novel class's weight is its support mean plus what attention adds from a learned dictionary.

        c_k = p_k + W_o sum_j a_kj W_v m_j,    a_kj = softmax_j(W_q p_k . W_k m_j / sqrt(D))
        logits = h . [unit(W_a) ; unit(c)] / temperature

    p_k are the support means of an episode's novel classes, and m_j all of these and 2K entries of the dictionary.
    Learned: W_q, W_k, W_v, W_o and the dictionary, on the joint classification of base and novel classes. Ye, Hu &
    Zhan, Learning Adaptive Classifiers Synthesis for Generalized Few-Shot Learning (International Journal of Computer
    Vision, 2021); model, initial values and dropout are those of the released code with one head (c:
    ``MultiHeadAttention`` of model/models/castle.py, the logits: ``_forward_gfsl``). There too the base weights stay as
    pretrained, since its optimiser leaves them out.

    This is a variant of theirs. They train the encoder too, from a pretrained one, with SGD at two rates; here the
    features are frozen, and Adam trains the rest with the task's schedule. They build 256 tasks a step, in which 16
    base classes act as novel ones; here a step has the task's episodes, whose novel training classes are hidden base
    classes only where the task says so.

    Options:
        dropout: of what attention adds, in training alone; 0.5 in their commands.
        temperature: the logits are divided by it; 1 in their commands.
    """

    name = "castle"
    display: ClassVar = {"castle": ("CASTLE", "novel weights from a learned dictionary")}
    parallel_copies: ClassVar[bool] = True

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        return SessionOutput(self.synthesise_weights(support.class_means(self.ways), None))  # [E, N, D]

    def base_logits(self, query: Query) -> Tensor:
        return self.class_logits(normalise_exactly(self.base.weight), query)

    def class_logits(self, state: State, query: Query) -> Tensor:
        return linear_logits(query.features, state).div_(self.temperature)


class ACastle(_ClassifierSynthesis):
    """The weights of all classes are synthesised in each episode, those of base classes too.

    As `Castle`, whose formula, source and differences these are (``_forward_gfsl`` of model/models/acastle.py), but the
    base weights W_a, as they are, attend beside the support means and are attended to: base classifiers depend on the
    episode. Hidden base classes are attended to by nobody. In regular few-shot classification, with no base class in
    the softmax, novel classes still attend to W_a, whereas the released code leaves it out there.

    Options:
        dropout: of what attention adds, in training alone; 0.5 in their commands.
        temperature: the logits are divided by it; 1 in their commands.
    """

    name = "acastle"
    display: ClassVar = {"acastle": ("ACASTLE", "CASTLE that adapts the base classes' weights too")}
    parallel_copies: ClassVar[bool] = True

    def base_logits(self, query: Query) -> Tensor:
        return self._joint_logits(self.base.weight.unsqueeze(0), None, query)

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        means = support.class_means(self.ways)  # [E, N, D]
        if before is not None:
            means = torch.cat([before["means"], means], 1)
        return SessionOutput({"means": means, "hidden": support.hidden})

    def answer(self, state: State, query: Query) -> Prediction:
        novel = state["means"]
        every = torch.cat([self.base.weight.expand(len(novel), -1, -1), novel], 1)  # [E, K + t N, D]
        return Prediction(self._joint_logits(every, F.pad(state["hidden"], (0, novel.shape[1])), query))

    def _joint_logits(self, weight: Tensor, out: Tensor | None, query: Query) -> Tensor:
        return query.features @ self.synthesise_weights(weight, out).mT / self.temperature
