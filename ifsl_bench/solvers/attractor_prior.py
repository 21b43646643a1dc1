"""R, the attractor, as the centres and precisions that episodic objectives take; the parts that centres are made of.

    R = (1/M) sum_k sum_d exp(log_gamma_d) (V_kd - u_kd)^2        over the M rows of V: novel classes, or hidden units

Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks, NeurIPS 2019; the mean
over rows is the released code's, the paper writes a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ifsl_bench.utils.cosine import normalise_with_epsilon


class QuadraticPrior(NamedTuple):
    """1/2 sum_kd p_d (V_kd - c_kd)^2, the regulariser of fast weights V."""

    centres: Tensor  # c [(E,) rows or 1, size]
    precisions: Tensor  # p [size]


def to_prior(u: Tensor, log_gamma: Tensor, weight_decay: float, rows: int) -> QuadraticPrior:
    """Return R + weight_decay/2 |V|^2 as a quadratic prior, which differs from it by a constant.

    Args:
        u: attractors, [..., N, D+1] with any leading shape.
        log_gamma: logarithms of the strengths, [D+1].
        weight_decay: of V.
        rows: M, over which R is a mean.
    """
    strength = 2 / rows * log_gamma.exp()
    precisions = strength + weight_decay
    return QuadraticPrior(u * (strength / precisions), precisions)


def ridge_prior(rows: int, size: int, weight_decay: float, like: Tensor) -> QuadraticPrior:
    """Return the prior without an attractor: weight decay alone.

    Args:
        rows: of the centres 0, [rows, size].
        size: numbers in a row.
        weight_decay: the precision of each of them, [size].
        like: a tensor of the same type, on the same device.
    """
    return QuadraticPrior(like.new_zeros(rows, size), like.new_full((size,), weight_decay))


def attention_weights(queries: Tensor, keys: Tensor, tau: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return the shares softmax_j(tau unit(query) . unit(key_j)), [E, M, K].

    Args:
        queries: [E, M, D].
        keys: [K, D].
        tau: the inverse temperature, one or [M, 1].
        hidden: [E, K] bool, base classes with no share in the episode's attention.
    """
    logits = tau * (normalise_with_epsilon(queries) @ normalise_with_epsilon(keys).mT)
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
    return logits.softmax(-1)


class AttractorMLP(nn.Module):
    """f_phi: base weights [K, D] -> one attractor for each base class and output size, through one tanh layer.

    Weights truncated normal with deviation 0.01, biases zero, as in the released code.
    """

    def __init__(self, features: int, outputs: tuple[int, ...], hidden: int = 50) -> None:
        super().__init__()
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.ModuleList(nn.Linear(hidden, size) for size in outputs)
        for layer in (self.inner, *self.outer):
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.01, a=-0.02, b=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, weight: Tensor) -> list[Tensor]:
        h = torch.tanh(self.inner(weight))  # [K, hidden]
        return [layer(h) for layer in self.outer]
