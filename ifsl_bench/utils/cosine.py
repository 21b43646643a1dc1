"""Unit vectors, cosines and other products of queries and weights, for logits and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MANY = 16  # weights from which their side of a product is better the outer one


def unit(v: Tensor) -> Tensor:
    """Return ``v / (|v| + 1e-5)`` along the last dimension, the normalisation of Ren et al.'s released code."""
    return v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True) + 1e-5)


def direction(v: Tensor) -> Tensor:
    """Return ``v / |v|`` along the last dimension; 0 of a zero vector."""
    return F.normalize(v, dim=-1, eps=1e-30)


def cosines(h: Tensor, weight: Tensor) -> Tensor:
    """Return cos(h, w) of every feature h and weight w, [E, Q, K] or [E, Q, N]; 0 of a zero vector.

    Args:
        h: features [E, Q, D].
        weight: [K, D] or [E, N, D].
    """
    return direction(h) @ direction(weight).mT


def products(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return h . w + b of every feature h and weight w, [E, Q, N].

    Products with many weights lie in memory weight by weight: with few columns BLAS takes half as long again, and a
    maximum over some of the weights then runs along the queries.

    Args:
        h: features [E, Q, D].
        weight: [E, N, D].
        bias: [E, N]; 0 if None.
    """
    if weight.shape[-2] < MANY:
        return h @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
    return (weight @ h.mT if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, h.mT)).mT
