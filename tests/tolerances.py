"""Tolerances from their causes: how numbers are rounded, and where a solver stops."""

from __future__ import annotations

import torch


def rounding(dtype: torch.dtype, terms: int = 1, condition: float = 1.0) -> float:
    """The relative error of a sum of so many rounded terms, as a problem of this condition passes it on."""
    return torch.finfo(dtype).eps * terms * condition
