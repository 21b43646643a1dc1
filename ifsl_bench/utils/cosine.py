"""Unit vectors, cosines and other products of queries and weights, for logits and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ifsl_bench.utils.errors import UserError

MIN_WEIGHTS_FOR_OUTER_PRODUCT = 16  # weights from which their side of a product is better the outer one


def normalise_with_epsilon(v: Tensor) -> Tensor:
    """Return ``v / (|v| + 1e-5)`` along the last dimension, the normalisation of Ren et al.'s released code."""
    v, length, scale = _rescale_to_safe_square(v)
    return v / (length + 1e-5 / scale)


def normalise_exactly(v: Tensor) -> Tensor:
    """Return ``v / |v|`` along the last dimension; 0 of a zero vector."""
    v, length, _ = _rescale_to_safe_square(v)
    return v / length.clamp_min(torch.finfo(v.dtype).tiny)


def _rescale_to_safe_square(v: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return v / s, its length, and s: 1 for vectors whose squares fit their type, else the largest element.

    On an accelerator s is 1 always: it would have to be waited for, or compute all twice. Feature files whose squares
    do not fit are refused when they are read.
    """
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    if v.device.type != "cpu":
        return v, length, 1.0
    fits = (length > _smallest_safe_square(v) ** 0.5) & (length < torch.inf)
    if bool(fits.all()):
        return v, length, 1.0
    largest = v.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    scale = torch.where(fits, 1.0, largest)
    return v / scale, torch.linalg.vector_norm(v / scale, dim=-1, keepdim=True), scale


def _smallest_safe_square(v: Tensor) -> float:
    """Return the square of a length below which squares of single elements lose their digits."""
    info = torch.finfo(v.dtype)
    return info.tiny / info.eps


def check_squares_are_finite(means: Tensor, method: str) -> None:
    """Raise an error if features are too large or small for a method that squares them.

    Args:
        means: of the base classes, [K, D].
        method: its name, for the error.

    Raises:
        UserError: squared lengths overflow, or lose their digits.
    """
    largest = float(means.abs().max())
    square = float(means.square().sum(-1).max())
    if largest > 0 and not _smallest_safe_square(means) < square < float("inf"):
        raise UserError(
            f"{method} squares features, and the means of the base classes go up to {largest:.1e}: their squares are "
            f"beyond {str(means.dtype).removeprefix('torch.')}; multiply all features by {1 / largest:.0e}"
        )


def cosine_similarities(h: Tensor, weight: Tensor) -> Tensor:
    """Return cos(h, w) of every feature h and weight w, [E, Q, K] or [E, Q, N]; 0 of a zero vector.

    Args:
        h: features [E, Q, D].
        weight: [K, D] or [E, N, D].
    """
    return normalise_exactly(h) @ normalise_exactly(weight).mT


def linear_logits(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return h . w + b of every feature h and weight w, [E, Q, N].

    Products with many weights lie in memory weight by weight: with few columns BLAS takes half as long again, and a
    maximum over some of the weights then runs along the queries.

    Args:
        h: features [E, Q, D].
        weight: [E, N, D].
        bias: [E, N]; 0 if None.
    """
    if weight.shape[-2] < MIN_WEIGHTS_FOR_OUTER_PRODUCT:
        return h @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
    return (weight @ h.mT if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, h.mT)).mT
