"""Scores, probabilities and losses of support sets, and the arguments of softmax regression.

Features [E, S, D] stand for rows x_i that end in a one, the bias. Activations are kept as [E, N, S] in this package:
products with the S x S kernel and sums over classes are cheap that way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny


class Regression(NamedTuple):
    """The arguments of `SoftmaxRegression`. All but `labels` may receive gradients."""

    features: Tensor  # [E, S, D]
    labels: Tensor  # [E, S], 0..N-1
    base_logsumexp: Tensor  # [E, S] logsumexp of the fixed logits, -inf where there are none
    centres: Tensor  # [N, D+1] or [E, N, D+1], the bias last
    precisions: Tensor  # [D+1]

    def take(self, index: Tensor | slice) -> Regression:
        """Return the arguments of some episodes alone."""
        x, labels, base_logsumexp, centres, precisions = self
        return Regression(x[index], labels[index], base_logsumexp[index], per_episode(centres, index, 3), precisions)


def scores(v: Tensor, x: Tensor) -> Tensor:
    """V x for v [(E,) N, D+1], the bias last, and x [E, S, D]: [E, N, S]."""
    return v[..., :-1] @ x.mT + v[..., -1:]


def spread(r: Tensor, x: Tensor) -> Tensor:
    """Return r X with the column of ones: r [E, N, S], x [E, S, D] -> [E, N, D+1]."""
    return torch.cat([r @ x, r.sum(2, keepdim=True)], 2)


def kernel(x: Tensor, inverse_p: Tensor) -> Tensor:
    """X P^-1 X^T with the column of ones: [E, S, S]."""
    if x.device.type != "cpu" or x.shape[0] <= 16:
        return (x * inverse_p[:-1]) @ x.mT + inverse_p[-1]
    # A few episodes at a time, so that the scaled features are read back from the cache.
    k = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for out, part in zip(k.split(16), x.split(16), strict=True):
        torch.bmm(part * inverse_p[:-1], part.mT, out=out)
    return k.add_(inverse_p[-1])


def floored(precisions: Tensor) -> Tensor:
    """Precisions fit to be divided by; zeros (a flagged solve) become small against the largest."""
    largest = precisions.max()
    least = torch.where(largest > 0, 1e-6 * largest, torch.full_like(largest, 1e-6))
    return torch.where(precisions > 0, precisions, least)


def probabilities(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """`with_base` without the fixed class: [E, N, S]."""
    return with_base(f, base_logsumexp)[:, :-1]


def misfit(p: Tensor, hot: Tensor) -> Tensor:
    """Return labels minus probabilities, [E, N, S].

    From the probabilities p [E, N+1, S] of all classes, the fixed one last, and labels as booleans, likewise. A label's
    own is the sum of the other probabilities: 1 - p would have lost its digits where scores saturate.
    """
    wrong = p.masked_fill(hot, 0)
    return torch.where(hot[:, :-1], wrong.sum(1, keepdim=True), -wrong[:, :-1])


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Labels [E, S] as booleans [E, classes, S]."""
    return labels[:, None] == torch.arange(classes, device=labels.device)[:, None]


def with_base(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """Softmax over the N scores f [E, N, S] and the fixed class, which comes last: [E, N+1, S]."""
    return torch.cat([f, base_logsumexp[:, None]], 1).softmax(1)


def base_probability(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """Return the probability of the fixed class: [E, S]."""
    return (base_logsumexp - torch.logaddexp(f.logsumexp(1), base_logsumexp)).exp()


def cross_entropy(f: Tensor, base_logsumexp: Tensor, labels: Tensor) -> Tensor:
    """-log of the probability of the label: [E, S]."""
    margins = torch.cat([f, base_logsumexp[:, None]], 1) - f.gather(1, labels[:, None])  # [E, N+1, S]
    # The label's own margin is zero: the logarithm of one plus the others keeps the digits of a small loss.
    others = margins.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    return torch.nn.functional.softplus(others, threshold=35)


def indicator(labels: Tensor, ways: int, dtype: torch.dtype) -> Tensor:
    """Labels [E, S] as zeros and ones [E, N, S]."""
    return one_hot(labels, ways).to(dtype)


def residual(f: Tensor, base_logsumexp: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of the mean cross-entropy in the scores: [E, N, S]."""
    p = with_base(f, base_logsumexp)
    return misfit(p, one_hot(labels, p.shape[1])) / -f.shape[2]


def weigh(pi: Tensor, shares: Tensor, d: Tensor) -> Tensor:
    """M d, M the Hessian of the mean cross-entropy in the scores and shares = pi / S: [E, N, S]."""
    return torch.addcmul(shares * d, shares, (pi * d).sum(1, keepdim=True), value=-1)


def per_episode(tensor: Tensor, index: Tensor | slice, dims: int) -> Tensor:
    """tensor[index] where tensor has a dimension E, being of `dims` dimensions and not broadcast; else tensor."""
    return tensor[index] if tensor.dim() == dims and tensor.shape[0] > 1 else tensor
