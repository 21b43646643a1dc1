"""Compilation of Python functions of arrays. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic

from ifsl_bench.solvers.numba_code_cache import KernelCache, announce_compilation, make_code_folder

Array = np.ndarray[Any, np.dtype[np.float64]]
EPS, TINY = float(np.finfo(np.float64).eps), float(np.finfo(np.float64).tiny)
Kernel = Callable[..., Any]
DecoratedT = TypeVar("DecoratedT", bound=Callable[..., Any])

COMPILED_CODE_FOLDER = make_code_folder()


class _CompilationAnnouncer(event.Listener):
    """Announces compilations, not the loading of cached code."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("ifsl_bench."):
            announce_compilation(COMPILED_CODE_FOLDER is not None)

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _CompilationAnnouncer())

Decorator = Callable[[DecoratedT], DecoratedT]
_exact_options: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract"},
    "no_cfunc_wrapper": True,
}


def kernel_jit(function: DecoratedT, name: str = "") -> DecoratedT:
    """Compile a function that Python calls, and cache its machine code.

    Args:
        function: a Python function of arrays and numbers.
        name: unlike the name of any other kernel; by default the names of its module and its own.
    """
    kernel = njit(**_exact_options)(function)
    if COMPILED_CODE_FOLDER is not None:
        name = name or f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        kernel._cache = KernelCache(COMPILED_CODE_FOLDER, name)  # in the place where `njit(cache=True)` puts Numba's
    return cast(DecoratedT, kernel)


# For parts of compiled functions. Operations stay in their order; only a product and a sum may become one.
inline_jit: Decorator = cast(Any, njit(**_exact_options))
# The same for parts with many arguments, without what lets Python call them, which takes a while to compile: a call
# from Python would end the process.
helper_jit: Decorator = cast(Any, njit(**_exact_options | {"no_cpython_wrapper": True}))
# For sums over elements, which may be added up in any order, and so by vectors.
reduction_jit: Decorator = cast(Any, njit(**_exact_options | {"fastmath": {"contract", "reassoc", "nsz"}}))


@cast(Any, intrinsic)
def power_of_two(typing: Any, bits: Any) -> Any:
    """Return 2^k from the bits of k + 1.5 * 2^52, for k from -1022 to 1023.

    Args:
        typing: Numba's typing context.
        bits: the type of the number.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = ir.IntType(64)
        number = builder.bitcast(arguments[0], whole)
        shifted = builder.shl(number, ir.Constant(whole, 52))
        return builder.bitcast(builder.add(shifted, ir.Constant(whole, 1023 << 52)), ir.DoubleType())

    return types.float64(types.float64), generate
