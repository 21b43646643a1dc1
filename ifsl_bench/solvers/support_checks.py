"""Checks of an episode's problem before it is solved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NamedPrior(NamedTuple):
    """A `QuadraticPrior` of `rows` rows of `columns` numbers, and the names of its tensors in messages."""

    name: str
    centres: Tensor
    precisions_name: str
    precisions: Tensor
    rows: int
    columns: int


def check_arguments(
    features: Tensor, labels: Tensor, base_logsumexp: Tensor, ways: int, priors: Sequence[NamedPrior]
) -> None:
    """Raise ValueError where a support set cannot be learned from, or a prior is no quadratic.

    Shapes and types first. Then one number shows whether all numbers look good, for a device waits for each that it
    reads; only where they do not are they looked at one by one, for the message.

    Args:
        features: [E, S, D].
        labels: [E, S], 0..N-1.
        base_logsumexp: [E, S].
        ways: N.
        priors: one for each group of the unknowns.

    Raises:
        ValueError: names what is wrong.
    """
    _check_support_shapes(features, labels, base_logsumexp)
    for prior in priors:
        _check_pull_shapes(prior, features)
    if not _looks_good(features, labels, base_logsumexp, ways, priors):
        _check_support(features, labels, base_logsumexp, ways)
        for prior in priors:
            _check_pull(prior)


def _looks_good(
    features: Tensor, labels: Tensor, base_logsumexp: Tensor, ways: int, priors: Sequence[NamedPrior]
) -> bool:
    """Return True where all is in order; seldom wrongly False: finite numbers may have an infinite sum."""
    total = features.sum()
    for prior in priors:
        # The root of a negative number is none.
        total = total + prior.centres.sum() + prior.precisions.sqrt().sum()
    present = (labels[:, :, None] == torch.arange(ways, device=labels.device)).any(1)  # [E, N]
    bounded = (base_logsumexp < torch.inf) & (labels >= 0) & (labels < ways)
    if ways == 1:
        bounded = bounded & (base_logsumexp > -torch.inf)
    return bool(bounded.all() & present.all() & ((total - total) == 0))


def _check_pull_shapes(prior: NamedPrior, features: Tensor) -> None:
    name, centres, precisions_name, precisions, rows, columns = prior
    episodes = features.shape[0]
    lead, shape = centres.shape[:-2], centres.shape[-2:]
    if (
        centres.dim() not in (2, 3)
        or shape[1] != columns
        or shape[0] not in (1, rows)
        or (lead and lead[0] not in (1, episodes))
    ):
        raise ValueError(
            f"{name} has shape {list(centres.shape)} and needs [{rows}, {columns}], or that for each of "
            f"{episodes} episodes"
        )
    if precisions.shape != (columns,):
        raise ValueError(f"{precisions_name} has shape {list(precisions.shape)} and needs [{columns}]")
    for label, tensor in ((name, centres), (precisions_name, precisions)):
        if tensor.dtype != features.dtype or tensor.device != features.device:
            raise ValueError(
                f"{label} is {tensor.dtype} on {tensor.device}, features are {features.dtype} on {features.device}"
            )


def _check_pull(prior: NamedPrior) -> None:
    for label, tensor in ((prior.name, prior.centres), (prior.precisions_name, prior.precisions)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{label} is not finite: meta-training has diverged, or its input has nan or inf")
    if bool((prior.precisions < 0).any()):
        raise ValueError(f"{prior.precisions_name} must not be negative: the objective would have no minimum")


def _check_support_shapes(features: Tensor, labels: Tensor, base_logsumexp: Tensor) -> None:
    if features.dim() != 3 or labels.shape != features.shape[:2] or base_logsumexp.shape != labels.shape:
        raise ValueError(
            f"features must be [E, S, D] with labels and base_logsumexp [E, S], not {list(features.shape)}, "
            f"{list(labels.shape)} and {list(base_logsumexp.shape)}"
        )
    floats = {features.dtype, base_logsumexp.dtype}
    if labels.dtype != torch.long or floats not in ({torch.float32}, {torch.float64}):
        raise ValueError(
            f"labels must be int64, features and base_logsumexp both float32 or both float64, not {labels.dtype}, "
            f"{features.dtype} and {base_logsumexp.dtype}"
        )
    if features.numel() == 0:
        raise ValueError(f"the support set is empty: features has shape {list(features.shape)}")


def _check_support(features: Tensor, labels: Tensor, base_logsumexp: Tensor, ways: int) -> None:
    if not bool(features.isfinite().all()):
        bad = (~features.isfinite()).flatten(1).any(1).nonzero()[:5, 0].tolist()
        raise ValueError(f"support features are not finite in episodes {bad}: look at the backbone or its inputs")
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low < 0 or high >= ways:
        raise ValueError(f"support labels must lie in 0..{ways - 1}, and {low}..{high} were given")
    present = (labels[:, :, None] == torch.arange(ways, device=labels.device)).any(1)  # [E, N]
    if not bool(present.all()):
        episode, label = (~present).nonzero()[0].tolist()
        raise ValueError(f"class {label} has no support image in episode {episode}: every novel class needs one")
    if not bool((base_logsumexp < torch.inf).all()):
        raise ValueError("the fixed logits are not finite (nan or +inf): look at the base classifier's logits")
    if ways == 1 and bool((base_logsumexp == -torch.inf).any()):
        raise ValueError(
            "a support set with one class and no base classes leaves nothing to tell it from: "
            "give base logits or more classes"
        )
