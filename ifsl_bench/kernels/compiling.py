"""What makes a Python function of arrays a compiled one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, np.dtype[np.float64]]
EPS, TINY = float(np.finfo(np.float64).eps), float(np.finfo(np.float64).tiny)
Kernel = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """For loops over elements: no operation is taken out of its order but for fused multiplication and addition."""
    made: F = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})(function)
    return made


def summing(function: F) -> F:
    """For sums over elements, which may be added up in any order, and so by vectors."""
    made: F = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})(function)
    return made


def inlined(function: F) -> F:
    """For what is part of other compiled functions alone."""
    made: F = njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return made


@intrinsic
def power_of_two(typing: Any, bits: Any) -> Any:
    """2^k from the bits of k + 1.5 * 2^52, for k from -1022 to 1023."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = ir.IntType(64)
        number = builder.bitcast(arguments[0], whole)
        shifted = builder.shl(number, ir.Constant(whole, 52))
        return builder.bitcast(builder.add(shifted, ir.Constant(whole, 1023 << 52)), ir.DoubleType())

    return types.float64(types.float64), generate
