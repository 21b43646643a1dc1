"""Old names of modules that other packages may import, for one release."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def forward(old: str, new: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that takes every name from another module, with a warning.

    Args:
        old: the module's name, ``ifsl_bench.solve``.
        new: the module that has its content now.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} is now {new}; the old name goes in the next release", DeprecationWarning, stacklevel=2)
        return value

    return attribute
