"""Losses that several recipes have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cosine_logits(
    features: Tensor, weight: Tensor, scale: float, labels: Tensor | None = None, margin: float = 0.0
) -> Tensor:
    """Return ``scale * (cos(h, w) - margin [w is of the label])``, as CosFace has it (Wang et al., CVPR 2018, Eq. 4).

    Args:
        features: [B, D].
        weight: [K, D].
        scale: the temperature that multiplies cosines.
        labels: int64 [B], whose cosines lose the margin; None for no margin.
        margin: subtracted from the cosine to the label's weight; it may be negative.
    """
    cosines = F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))
    if labels is not None and margin:
        cosines = cosines - margin * F.one_hot(labels, len(weight)).to(cosines.dtype)
    return scale * cosines


def contrastive_loss(
    anchors: Tensor, keys: Tensor, is_positive: Tensor, is_compared: Tensor, temperature: float
) -> Tensor:
    """Return the mean over anchors of the supervised contrastive loss (Khosla et al., NeurIPS 2020, Eq. 2).

    For an anchor this is the mean over its positive keys p of ``-log (exp(z . p / tau) / sum over keys of exp)``.
    Anchors without a positive key do not count.

    Args:
        anchors: [A, D], of length one.
        keys: [M, D], of length one.
        is_positive: bool [A, M], the keys that belong to an anchor.
        is_compared: bool [A, M], the keys in the denominator, positive ones included; not the anchor itself.
        temperature: tau.
    """
    logits = anchors @ keys.T / temperature
    log_shares = logits - torch.where(is_compared, logits, -torch.inf).logsumexp(1, keepdim=True)
    counts = is_positive.sum(1)
    of_anchor = -torch.where(is_positive, log_shares, 0.0).sum(1) / counts.clamp_min(1)
    return of_anchor.sum() / (counts > 0).sum().clamp_min(1)


def supervised_contrastive_loss(views: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss of V views of B images: all views of all images of a class are positive.

    Args:
        views: [V, B, D], of length one.
        labels: int64 [B].
        temperature: of the cosines.
    """
    z = views.flatten(0, 1)
    of_view = labels.repeat(len(views))
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    return contrastive_loss(z, z, (of_view[:, None] == of_view) & others, others, temperature)


def simclr_loss(views: Tensor, temperature: float) -> Tensor:
    """Return the contrastive loss of V views of B images: the other views of an image are positive (Chen et al., 2020).

    Args:
        views: [V, B, D], of length one.
        temperature: of the cosines.
    """
    return supervised_contrastive_loss(views, torch.arange(views.shape[1], device=views.device), temperature)


def batch_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the share of a batch that is labelled right, as a scalar without a gradient.

    Args:
        logits: [B, K].
        labels: int64 [B].
    """
    return (logits.detach().argmax(1) == labels).float().mean()
