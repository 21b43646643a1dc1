"""Checks of solvers' options."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor


def check_options(owner: Any, positive: tuple[str, ...] = (), counts: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a solver's option that is not positive and finite, or a count below one; None passes."""
    for name in positive + counts:
        value = getattr(owner, name)
        where = f"{type(owner).__name__}({name}={value})"
        if isinstance(value, Tensor):
            if not bool((value.isfinite() & (value > 0)).all()):
                raise ValueError(f"{type(owner).__name__}: every {name} must be positive and finite")
        elif name in counts:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{where}: it must be a whole number, at least 1")
        elif value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"{where}: it must be positive and finite")
