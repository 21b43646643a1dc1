"""Unit vectors and cosines, for logits and attention that compare by angle."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(v: Tensor) -> Tensor:
    """``v / (|v| + 1e-5)`` along the last dimension, the normalisation of Ren et al.'s released code."""
    return v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True) + 1e-5)


def cosines(h: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """cos(h, w) of features h [E, Q, D] and every weight w, side by side: [E, Q, K + N].

    weights: those of base classes [K, D], then those of novel classes [E, N, D]. The cosine of a zero vector is 0.
    """
    h = F.normalize(h, dim=-1, eps=1e-30)
    return torch.cat([h @ F.normalize(w, dim=-1, eps=1e-30).mT for w in weights], -1)
