"""What is refused before an episode's problem is solved."""

from __future__ import annotations

import torch
from torch import Tensor


def check_pull(
    name: str, centres: Tensor, other: str, precisions: Tensor, features: Tensor, rows: int, columns: int
) -> None:
    """Raise ValueError where a quadratic (centres [(E,) rows or 1, columns], precisions [columns]) is none."""
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
        raise ValueError(f"{other} has shape {list(precisions.shape)} and needs [{columns}]")
    for what, tensor in ((name, centres), (other, precisions)):
        if tensor.dtype != features.dtype or tensor.device != features.device:
            raise ValueError(
                f"{what} is {tensor.dtype} on {tensor.device}, features are {features.dtype} on {features.device}"
            )
        # As in `check_support`: the sum first.
        if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{what} is not finite: meta-training has diverged, or its input has nan or inf")
    if bool((precisions < 0).any()):
        raise ValueError(f"{other} must not be negative: the objective would have no minimum")


def check_support(features: Tensor, labels: Tensor, rest: Tensor, ways: int) -> None:
    """Raise ValueError where a support set (features [E, S, D], labels [E, S], rest [E, S]) cannot be learned from."""
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
    # A sum is finite only if every term is; the exact test costs more and runs when the sum looks bad.
    if not bool(features.sum().isfinite()) and not bool(features.isfinite().all()):
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
