"""CEC: continually evolved classifiers (Zhang, Song, Lin, Zheng, Pan and Xu, CVPR 2021)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ifsl_bench.plugin.method import Base, Method, Prediction, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.utils.errors import UserError

# Queries computed at once: their numbers for each class, of which there are ten, stay in the cache
QUERIES_PER_BATCH = 1024


class CEC(Method):
    """Class means adapt to each other, and to the query, through one layer of learned attention.

    The nodes of a graph are the means p_1 ... p_M of all classes met so far, base ones of all their base/train images,
    and the features p_0 of one query. Each takes up from all of them, itself included,

        a_ij = softmax_j(W_q p_i . W_k p_j / sqrt(D))
        v_i  = norm(p_i + W_o sum_j a_ij W_v p_j + b)
        logit of class i = temperature cos(v_0, v_i)

    where norm is layer normalisation with a learned gain and bias. Learned: W_q, W_k, W_v, W_o, b, and these two.
    Zhang, Song, Lin, Zheng, Pan & Xu, Few-Shot Incremental Learning with Continually Evolved Classifiers (CVPR 2021);
    model and initial values are those of the released code (``_forward`` and ``MultiHeadAttention`` of
    models/cec/Network.py), whose dropout is never on, since its training runs in evaluation mode too.

    Since a class attends to the query, its v_i is another for each query; the code below gets all cosines from products
    of matrices. A session moves the classifiers of all classes, so logits of earlier ones change. Hidden base classes
    are attended to by nobody, but in A_0 of validation on the session lists.

    Differences: the backbone is frozen, theirs is trained on at a rate of its own; they train with SGD on tasks of 15
    base classes with one image each and 15 more that are images of these, rotated, which frozen features do not allow.
    Here a step has the task's episodes, with all base classes, some of which are hidden from the base ones and play
    novel classes where the task says so, and Adam with the task's schedule. They choose the epoch on test images of the
    last session; here it is the last step.

    Options:
        temperature: of the cosines; 16 in their code.
    """

    name = "cec"
    display: ClassVar = {"cec": ("CEC", "class means, adapted by attention to each other")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    head: ClassVar[Literal["linear", "cosine"]] = "cosine"
    space: ClassVar[SearchSpace] = {
        "temperature": Range(1.0, 100.0, log=True),
        LEARNING_RATE_OPTION: Range(1e-5, 1e-2, log=True),
    }

    def __init__(self, base: Base, ways: int, *, temperature: float = 16.0) -> None:
        super().__init__(base, ways)
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature must be positive and finite, not {temperature}")
        self.temperature = temperature
        size, like = base.weight.shape[1], base.weight.new_zeros(base.weight.shape[1])

        def make_normal_parameter() -> nn.Parameter:
            return nn.Parameter(torch.randn(size, size, dtype=base.weight.dtype) / math.sqrt(size))

        self.to_query, self.to_key, self.to_value, self.to_output = (
            make_normal_parameter() for _ in range(4)
        )  # [D, D]
        self.output_bias = nn.Parameter(torch.empty_like(like).uniform_(-1, 1) / math.sqrt(size))
        self.gain, self.bias = nn.Parameter(torch.ones_like(like)), nn.Parameter(like)

    def base_logits(self, query: Query) -> Tensor:
        means = self.base.prototypes.unsqueeze(0)
        return self.propagated_logits(means, torch.zeros_like(means[..., 0], dtype=torch.bool), query.features)

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        means = support.class_means(self.ways)  # [E, N, D]
        if isinstance(before, dict):
            means = torch.cat([before["means"], means], 1)
        return SessionOutput({"means": means, "hidden": support.hidden})

    def answer(self, state: State, query: Query) -> Prediction:
        assert isinstance(state, dict)
        novel = state["means"]
        means = torch.cat([self.base.prototypes.expand(len(novel), -1, -1), novel], 1)  # [E, M, D]
        out = nn.functional.pad(state["hidden"], (0, novel.shape[1]))  # [E, M]
        few = max(1, QUERIES_PER_BATCH // query.features.shape[1])
        logits = [
            torch.cat(
                [self.propagated_logits(means_of_some, out_of_some, h) for h in queries.split(QUERIES_PER_BATCH, 1)], 1
            )
            for means_of_some, out_of_some, queries in zip(
                *(x.split(few) for x in (means, out, query.features)), strict=True
            )
        ]
        return Prediction(torch.cat(logits))

    def propagated_logits(self, means: Tensor, out: Tensor, h: Tensor) -> Tensor:
        """Return logits [E, Q, M] of queries.

        Args:
            means: of the classes, [E, M, D].
            out: [E, M] bool, classes that are left out of the attention.
            h: the queries, [E, Q, D].
        """
        size, eps = h.shape[-1], 1e-5  # as in PyTorch's layer normalisation
        value = self.to_output @ self.to_value
        asks, keys, values = (means @ m.T for m in (self.to_query, self.to_key, value))  # of classes, [E, M, D]
        own_values = h @ value.T  # of queries, [E, Q, D]
        # A query's own node: v_0.
        of_classes = (h @ (keys @ self.to_query).mT).masked_fill(out.unsqueeze(1), -torch.inf)  # [E, Q, M]
        own = (h @ (self.to_query.T @ self.to_key) * h).sum(-1, keepdim=True)
        scores = torch.cat([of_classes, own], -1) / math.sqrt(size)
        share = scores.softmax(-1)  # [E, Q, M + 1]
        taken = share[..., :-1] @ values + share[..., -1:] * own_values
        node = nn.functional.layer_norm(h + taken + self.output_bias, (size,), self.gain, self.bias, eps)

        # A class's node before the norm, less the mean over dimensions, is c + beta (f - a): a is what it takes up from
        # classes alone, f from the query alone, and beta [E, Q, M] the query's share.
        scores = (asks @ keys.mT / math.sqrt(size)).masked_fill(out.unsqueeze(1), -torch.inf)  # [E, M, M]
        beta = (h @ (asks @ self.to_key).mT / math.sqrt(size) - scores.logsumexp(-1).unsqueeze(1)).sigmoid()
        a = scores.softmax(-1) @ values
        c, a, f = (x - x.mean(-1, keepdim=True) for x in (means + a + self.output_bias, a, own_values))

        def squared_norms(weight: Tensor) -> Tensor:
            """Return sum_d weight_d (c + beta (f - a))_d^2, [E, Q, M]."""
            wc, wa, wf = c * weight, a * weight, f * weight
            mixed = f @ wc.mT - (c * wa).sum(-1).unsqueeze(1)
            apart = (f * wf).sum(-1, keepdim=True) - 2 * f @ wa.mT + (a * wa).sum(-1).unsqueeze(1)
            return (c * wc).sum(-1).unsqueeze(1) + 2 * beta * mixed + beta**2 * apart

        def inner_products(x: Tensor) -> Tensor:
            """Return x . (c + beta (f - a)), [E, Q, M], of x [E, Q or 1, D]."""
            return x @ c.mT + beta * ((x * f).sum(-1, keepdim=True) - x @ a.mT)

        deviation = (squared_norms(torch.ones_like(self.gain)) / size + eps).sqrt()
        product = inner_products(node * self.gain) / deviation + (node @ self.bias).unsqueeze(-1)  # v_0 . v_i
        square = (
            squared_norms(self.gain**2) / deviation**2
            + 2 * inner_products((self.gain * self.bias).expand(1, 1, -1)) / deviation
        )
        length = (square + self.bias.square().sum()).clamp_min(1e-16).sqrt()  # |v_i|
        return self.temperature * product / (length * node.norm(dim=-1, keepdim=True).clamp_min(1e-8))
