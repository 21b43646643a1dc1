"""Scores, probabilities and losses of support sets, and the arguments of softmax regression.

Features [E, S, D] stand for rows x_i that end in a one, the bias. Activations have the shape [E, N, S] in this package:
products with the S x S kernel and sums over classes are cheap that way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_NORMAL_FLOAT64 = torch.finfo(torch.float64).tiny


class RegressionArgs(NamedTuple):
    """The arguments of `SoftmaxRegression`. All but `labels` may receive gradients."""

    features: Tensor  # [E, S, D]
    labels: Tensor  # [E, S], 0..N-1
    base_logsumexp: Tensor  # [E, S] logsumexp of the fixed logits, -inf where there are none
    centres: Tensor  # [N, D+1] or [E, N, D+1], the bias last
    precisions: Tensor  # [D+1]

    def select_episodes(self, index: Tensor | slice) -> RegressionArgs:
        """Return the arguments of some episodes alone."""
        x, labels, base_logsumexp, centres, precisions = self
        return RegressionArgs(
            x[index], labels[index], base_logsumexp[index], index_episodes(centres, index, 3), precisions
        )


def class_scores(v: Tensor, x: Tensor) -> Tensor:
    """Return the scores V x, [E, N, S].

    Args:
        v: weights, the bias last, [(E,) N, D+1].
        x: features, [E, S, D].
    """
    return v[..., :-1] @ x.mT + v[..., -1:]


def adjoint_of_class_scores(r: Tensor, x: Tensor) -> Tensor:
    """Return r X with the column of ones, [E, N, D+1].

    Args:
        r: [E, N, S].
        x: features, [E, S, D].
    """
    return torch.cat([r @ x, r.sum(2, keepdim=True)], 2)


def precision_kernel_matrix(x: Tensor, inverse_p: Tensor) -> Tensor:
    """Return X P^-1 X^T with the column of ones, [E, S, S].

    Args:
        x: features, [E, S, D].
        inverse_p: inverse precisions, [D+1].
    """
    if x.device.type != "cpu" or x.shape[0] <= 16:
        return (x * inverse_p[:-1]) @ x.mT + inverse_p[-1]
    # A few episodes at a time, so that the scaled features are read back from the cache.
    k = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for out, part in zip(k.split(16), x.split(16), strict=True):
        torch.bmm(part * inverse_p[:-1], part.mT, out=out)
    return k.add_(inverse_p[-1])


def floor_precisions(precisions: Tensor) -> Tensor:
    """Return precisions fit to be divided by; zeros (a flagged solve) become small against the largest."""
    largest = precisions.max()
    least = torch.where(largest > 0, 1e-6 * largest, torch.full_like(largest, 1e-6))
    return torch.where(precisions > 0, precisions, least)


def probabilities_of_novel_classes(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """Return `softmax_with_base` without the fixed class, [E, N, S].

    Args:
        f: scores, [E, N, S].
        base_logsumexp: the score of the fixed class, [E, S].
    """
    return softmax_with_base(f, base_logsumexp)[:, :-1]


def labels_minus_probabilities(p: Tensor, hot: Tensor) -> Tensor:
    """Return labels minus probabilities, [E, N, S].

    A label's own is the sum of the other probabilities: 1 - p would have lost its digits where scores saturate.

    Args:
        p: probabilities of all classes, the fixed one last, [E, N+1, S].
        hot: labels as booleans, likewise.
    """
    wrong = p.masked_fill(hot, 0)
    return torch.where(hot[:, :-1], wrong.sum(1, keepdim=True), -wrong[:, :-1])


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels as booleans, [E, classes, S].

    Args:
        labels: [E, S].
        classes: how many.
    """
    return labels[:, None] == torch.arange(classes, device=labels.device)[:, None]


def softmax_with_base(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """Return the softmax over the N scores and the fixed class, which comes last: [E, N+1, S].

    Args:
        f: scores, [E, N, S].
        base_logsumexp: the score of the fixed class, [E, S].
    """
    return torch.cat([f, base_logsumexp[:, None]], 1).softmax(1)


def probability_of_fixed_class(f: Tensor, base_logsumexp: Tensor) -> Tensor:
    """Return the probability of the fixed class, [E, S].

    Args:
        f: scores, [E, N, S].
        base_logsumexp: the score of the fixed class, [E, S].
    """
    return (base_logsumexp - torch.logaddexp(f.logsumexp(1), base_logsumexp)).exp()


def cross_entropy(f: Tensor, base_logsumexp: Tensor, labels: Tensor) -> Tensor:
    """Return -log of the probability of the label, [E, S].

    Args:
        f: scores, [E, N, S].
        base_logsumexp: the score of the fixed class, [E, S].
        labels: [E, S].
    """
    margins = torch.cat([f, base_logsumexp[:, None]], 1) - f.gather(1, labels[:, None])  # [E, N+1, S]
    # The label's own margin is zero: the logarithm of one plus the others keeps the digits of a small loss.
    others = margins.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    return torch.nn.functional.softplus(others, threshold=35)


def cross_entropy_gradient(f: Tensor, base_logsumexp: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of the mean cross-entropy in the scores, [E, N, S].

    Args:
        f: scores, [E, N, S].
        base_logsumexp: the score of the fixed class, [E, S].
        labels: [E, S].
    """
    p = softmax_with_base(f, base_logsumexp)
    return labels_minus_probabilities(p, one_hot(labels, p.shape[1])) / -f.shape[2]


def apply_cross_entropy_hessian(pi: Tensor, shares: Tensor, d: Tensor) -> Tensor:
    """Return M d, M being the Hessian of the mean cross-entropy in the scores: [E, N, S].

    Args:
        pi: probabilities, [E, N, S].
        shares: pi / S.
        d: [E, N, S].
    """
    return torch.addcmul(shares * d, shares, (pi * d).sum(1, keepdim=True), value=-1)


def index_episodes(tensor: Tensor, index: Tensor | slice, dims: int) -> Tensor:
    """Return tensor[index] where tensor has a dimension E and is not broadcast in it; else tensor.

    Args:
        tensor: with or without the dimension E.
        index: the episodes.
        dims: the dimensions of a tensor with E.
    """
    return tensor[index] if tensor.dim() == dims and tensor.shape[0] > 1 else tensor
