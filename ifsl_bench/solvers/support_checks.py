"""Checks of an episode's problem before it is solved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pull(NamedTuple):
    """Centres [(E,) rows or 1, columns] and precisions [columns] of a quadratic, and their names in messages."""

    name: str
    centres: Tensor
    precisions_name: str
    precisions: Tensor
    rows: int
    columns: int


def check_arguments(features: Tensor, labels: Tensor, rest: Tensor, ways: int, pulls: Sequence[Pull]) -> None:
    """Raises ValueError where a support set (features [E, S, D], labels [E, S], rest [E, S]) cannot be learned from, or
    a pull is no quadratic.

    Shapes and types first. Then one number says whether all numbers look good, for a device waits for each that it
    reads; only where it says no are they looked at one by one, in order to say what is wrong.
    """
    _check_support_shapes(features, labels, rest)
    for pull in pulls:
        _check_pull_shapes(pull, features)
    if not _looks_good(features, labels, rest, ways, pulls):
        _check_support(features, labels, rest, ways)
        for pull in pulls:
            _check_pull(pull)


def _looks_good(features: Tensor, labels: Tensor, rest: Tensor, ways: int, pulls: Sequence[Pull]) -> bool:
    """True where all is in order; seldom wrongly False: finite numbers may have an infinite sum."""
    total = features.sum()
    for pull in pulls:
        # The root of a negative number is none.
        total = total + pull.centres.sum() + pull.precisions.sqrt().sum()
    present = (labels[:, :, None] == torch.arange(ways, device=labels.device)).any(1)  # [E, N]
    bounded = (rest < torch.inf) & (labels >= 0) & (labels < ways)
    if ways == 1:
        bounded = bounded & (rest > -torch.inf)
    return bool(bounded.all() & present.all() & ((total - total) == 0))


def _check_pull_shapes(pull: Pull, features: Tensor) -> None:
    name, centres, precisions_name, precisions, rows, columns = pull
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


def _check_pull(pull: Pull) -> None:
    for label, tensor in ((pull.name, pull.centres), (pull.precisions_name, pull.precisions)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{label} is not finite: meta-training has diverged, or its input has nan or inf")
    if bool((pull.precisions < 0).any()):
        raise ValueError(f"{pull.precisions_name} must not be negative: the objective would have no minimum")


def _check_support_shapes(features: Tensor, labels: Tensor, rest: Tensor) -> None:
    if features.dim() != 3 or labels.shape != features.shape[:2] or rest.shape != labels.shape:
        raise ValueError(
            f"features must be [E, S, D] with labels and rest [E, S], not {list(features.shape)}, "
            f"{list(labels.shape)} and {list(rest.shape)}"
        )
    floats = {features.dtype, rest.dtype}
    if labels.dtype != torch.long or floats not in ({torch.float32}, {torch.float64}):
        raise ValueError(
            f"labels must be int64, features and rest both float32 or both float64, not {labels.dtype}, "
            f"{features.dtype} and {rest.dtype}"
        )
    if features.numel() == 0:
        raise ValueError(f"the support set is empty: features has shape {list(features.shape)}")


def _check_support(features: Tensor, labels: Tensor, rest: Tensor, ways: int) -> None:
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
    if not bool((rest < torch.inf).all()):
        raise ValueError("the fixed logits are not finite (nan or +inf): look at the base classifier's logits")
    if ways == 1 and bool((rest == -torch.inf).any()):
        raise ValueError(
            "a support set with one class and no base classes leaves nothing to tell it from: "
            "give base logits or more classes"
        )
