"""Whether compiled kernels are used, and their cache: a file for each kernel, types and processor, with a checksum.

Numba's own cache (`cache=True` and NUMBA_CACHE_DIR) was tried, and is not used. It does for processes that compile at
once (30 pairs) and for one that is killed meanwhile (10), since it writes each file by a rename. But after an index or
machine code was cut in half, every later process ended with an UnpicklingError until the file was deleted by hand.
Machine code has no checksum: of 25 copies with one bit flipped, 16 did no harm, one returned a wrong number, and 8
ended the process, half of these without a Python error. Numba looks at the time stamp of a kernel's own file, while a
kernel is made of functions from six. And it counts machine code from 1 in each process: where two compile a kernel for
different processors in a shared home, the index of one may name the other's code.

Here a folder is named after the source of all kernels, and a file after its kernel and types. A file that is damaged or
cannot be read is compiled again and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, record_last_use, source_sha256, write_bytes
from ifsl_bench.utils.locks import hold_lock

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM_BYTES = 32  # bytes in front of the code
_cache_folder: Path | None = None
_report: Callable[[str], None] = lambda text: None  # noqa: E731
_compilation_is_announced = False
_enabled: ContextVar[bool] = ContextVar("kernels", default=os.environ.get("IFSL_BENCH_KERNELS", "1") != "0")


def kernels_enabled(like: Tensor) -> bool:
    """Return True where kernels solve problems with tensors like this one: on a CPU, unless that is switched off."""
    import torch

    # torch.func hands in tensors that have no data.
    return like.device.type == "cpu" and _enabled.get() and not torch._C._are_functorch_transforms_active()


def kernels_loaded(like: Tensor) -> bool:
    """Return True where kernels are enabled and loaded: what solves nothing should neither load nor compile them."""
    return "ifsl_bench.solvers.numba_compiling" in sys.modules and kernels_enabled(like)


@contextlib.contextmanager
def use_batched_solvers(batched: bool = True) -> Iterator[None]:
    """Have a CPU solve all episodes at once in torch, as other devices do; or, with False, by kernels."""
    token = _enabled.set(not batched)
    try:
        yield
    finally:
        _enabled.reset(token)


def set_cache_folder(folder: Path, report: Callable[[str], None]) -> None:
    """Keep compiled code in a folder from now on; too late for kernels that are loaded already.

    Args:
        folder: of the code of all versions; NUMBA_CACHE_DIR comes first.
        report: is called with a line of text when something is compiled.
    """
    global _cache_folder, _report
    _cache_folder, _report = folder, report


def make_code_folder() -> Path | None:
    """Return the folder of today's kernels, which is made; None where it cannot be written: every process compiles."""
    try:
        chosen = os.environ.get("NUMBA_CACHE_DIR")
        folder = (Path(chosen) if chosen else _cache_folder or Paths.locate().cache / "compiled") / code_folder_name()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None
    except (OSError, UserError):
        return None
    record_last_use(folder)
    return folder


def code_folder_name() -> str:
    """Return the name of the folder of today's kernels, made from the source of all of them."""
    return source_sha256(Path(__file__).parent)[:16]


class KernelCache:
    """The cache of one kernel, in the place of Numba's `FunctionCache`.

    Args:
        folder: where its files are.
        name: of the kernel, unlike the name of any other.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.cache_path, self._name = folder, name

    def load_overload(self, signature: Any, context: Any) -> Any | None:
        """Return the code for these types and this processor; None where it is missing or damaged.

        Args:
            signature: the types of the arguments.
            context: Numba's target context, with the processor.
        """
        from numba.core.compiler import CompileResult

        context.refresh()
        path = self._code_path(signature, context.codegen())
        with contextlib.suppress(OSError):
            content = path.read_bytes() if path.is_file() else b""  # a pipe would be waited for
            if hashlib.sha256(content[CHECKSUM_BYTES:]).digest() == content[:CHECKSUM_BYTES]:
                return CompileResult._rebuild(context, *pickle.loads(content[CHECKSUM_BYTES:]))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store the code; a full disk is no reason to stop, since this process has it.

        Args:
            signature: the types of the arguments.
            result: Numba's `CompileResult`.
        """
        from numba.core.serialize import dumps

        content = dumps(result._reduce())
        with contextlib.suppress(OSError, UserError):
            write_bytes(self._code_path(signature, result.codegen), hashlib.sha256(content).digest() + content)

    def _code_path(self, signature: Any, codegen: Any) -> Path:
        import numba

        made_for = repr((numba.__version__, sys.implementation.cache_tag, signature, codegen.magic_tuple()))
        return self.cache_path / f"{self._name}.{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.code"


@contextlib.contextmanager
def hold_compile_lock(folder: Path | None) -> Iterator[None]:
    """Let no other process compile for the same folder meanwhile, where there are locks."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(OSError, UserError):
                stack.enter_context(hold_lock(folder))
        yield


def announce_compilation(on_disk: bool) -> None:
    """Report once that kernels are compiled, and whether the machine code is stored."""
    global _compilation_is_announced
    if not _compilation_is_announced:
        _compilation_is_announced = True
        often = "once" if on_disk else "and again in every process, for the home folder cannot be written"
        with contextlib.suppress(ValueError):  # the stream may have been closed since
            _report(f"compiling the solvers for this processor, {often}: 10 to 30 seconds")
