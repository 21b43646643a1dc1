"""Unit vectors and cosines, for logits and attention that compare by angle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(v: Tensor) -> Tensor:
    """``v / (|v| + 1e-5)`` along the last dimension, the normalisation of Ren et al.'s released code."""
    return v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True) + 1e-5)


def direction(v: Tensor) -> Tensor:
    """``v / |v|`` along the last dimension; 0 of a zero vector."""
    return F.normalize(v, dim=-1, eps=1e-30)


def cosines(h: Tensor, weight: Tensor) -> Tensor:
    """cos(h, w) of features h [E, Q, D] and every weight w of [K, D] or [E, N, D]; 0 of a zero vector."""
    return direction(h) @ direction(weight).mT
