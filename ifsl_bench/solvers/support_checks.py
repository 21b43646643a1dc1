"""Checks of an episode's problem before it is solved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NamedPrior(NamedTuple):
    """A `QuadraticPrior` of `rows` rows of `columns` numbers, and the names of its tensors in messages."""

    name_in_errors: str
    centres: Tensor
    precisions_name: str
    precisions: Tensor
    expected_rows: int
    expected_columns: int


def check_support_sets_and_priors(
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
        ValueError: a shape, a type or a number is wrong; it is named.
    """
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
    for prior in priors:
        _check_prior(prior, features)

    present = (labels[:, :, None] == torch.arange(ways, device=labels.device)).any(1)  # [E, N]
    bounded = (base_logsumexp < torch.inf) & (labels >= 0) & (labels < ways)
    if ways == 1:
        bounded = bounded & (base_logsumexp > -torch.inf)
    total = features.sum()
    for prior in priors:
        total = total + prior.centres.sum() + prior.precisions.sqrt().sum()  # a negative number has no root
    if bool(bounded.all() & present.all() & ((total - total) == 0)):
        return

    # Finite numbers may have an infinite sum, so nothing need be wrong.
    if not bool(features.isfinite().all()):
        bad = (~features.isfinite()).flatten(1).any(1).nonzero()[:5, 0].tolist()
        raise ValueError(f"support features are not finite in episodes {bad}: look at the backbone or its inputs")
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low < 0 or high >= ways:
        raise ValueError(f"support labels must lie in 0..{ways - 1}, and {low}..{high} were given")
    if not bool(present.all()):
        episode, label = (~present).nonzero()[0].tolist()
        raise ValueError(f"class {label} has no support image in episode {episode}: every novel class needs one")
    if not bool((base_logsumexp < torch.inf).all()):
        raise ValueError("the fixed logits are not finite (nan or +inf): look at the base classifier's logits")
    if not bool(bounded.all()):
        raise ValueError(
            "a support set with one class and no base classes leaves nothing to tell it from: "
            "give base logits or more classes"
        )
    for prior in priors:
        for name, tensor in ((prior.name_in_errors, prior.centres), (prior.precisions_name, prior.precisions)):
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} is not finite: meta-training has diverged, or its input has nan or inf")
        if bool((prior.precisions < 0).any()):
            raise ValueError(f"{prior.precisions_name} must not be negative: the objective would have no minimum")


def _check_prior(prior: NamedPrior, features: Tensor) -> None:
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
