"""Numbers of threads, which depend on the work and never on the process that happens to do it.

Sums that several threads share are added up in another order than on one, so that digits depend on their number.
Work that uses a number of threads therefore sets it where it runs. A process has two numbers:

* :func:`whole_machine_threads`, for work that takes the whole machine: OMP_NUM_THREADS, else what PyTorch finds; a
  worker gets the number of the process that hands out the work, so that both compute the same.
* :func:`max_busy_threads`, how many of them the process may keep busy with work whose digits do not depend on it: a
  part of them, where several processes share the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from threading import Event

import torch
from threadpoolctl import ThreadpoolController

EVALUATION_THREADS = 2  # threads of PyTorch around an evaluation
TORCH_FOLDER = Path(torch.__file__).resolve().parent  # has a BLAS of its own, whose threads PyTorch sets

_core_count = torch.get_num_threads()
_max_busy_threads = _core_count
_block_kernel_threads: ContextVar[int | None] = ContextVar("busy", default=None)
_cancellation_event: ContextVar[Event | None] = ContextVar("stop", default=None)


def whole_machine_threads() -> int:
    """Return the number of threads for work that takes the whole machine."""
    return _core_count


def max_busy_threads() -> int:
    """Return the number of threads that this process may keep busy at most."""
    return _max_busy_threads


def set_thread_counts(whole: int, part: int) -> None:
    """Set this process's numbers of threads; for workers, as they start.

    Args:
        whole: threads for work that takes the whole machine, see :func:`whole_machine_threads`.
        part: threads that this process may keep busy at most, see :func:`max_busy_threads`.
    """
    global _core_count, _max_busy_threads
    _core_count, _max_busy_threads = whole, part
    torch.set_num_threads(part)


@contextmanager
def limit_threads_in_block(torch_threads: int, kernel_threads: int | None = None) -> Iterator[None]:
    """Set the numbers of threads inside the block.

    Args:
        torch_threads: how many threads share a sum in PyTorch.
        kernel_threads: how many threads solve episodes, each alone; as many as ``torch_threads`` if None.
    """
    before = torch.get_num_threads()
    token = _block_kernel_threads.set(torch_threads if kernel_threads is None else kernel_threads)
    torch.set_num_threads(torch_threads)
    try:
        with _find_openblas_controller().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
        _block_kernel_threads.reset(token)


@lru_cache(maxsize=1)
def _find_openblas_controller() -> ThreadpoolController:
    """Every OpenBLAS but PyTorch's: compiled kernels call SciPy's, by default on as many threads as there are cores."""
    import scipy.linalg.cython_blas  # noqa: F401  # a library is found once it is loaded

    loaded = ThreadpoolController().select(internal_api="openblas")
    paths = [library.filepath for library in loaded.lib_controllers]
    return loaded.select(filepath=[path for path in paths if TORCH_FOLDER not in Path(path).resolve().parents])


@contextmanager
def limit_evaluation_threads() -> Iterator[None]:
    """Set the threads of the work around an evaluation inside the block; its blocks of episodes have one thread each.

    PyTorch has few, so that many workers on a machine, each with its share of it, do not get in each other's way;
    compiled kernels, which solve episodes one by one, have as many as the process may keep busy.
    """
    with limit_threads_in_block(min(EVALUATION_THREADS, whole_machine_threads()), max_busy_threads()):
        yield


def kernel_thread_count() -> int:
    """Return the number of threads on which compiled kernels solve episodes, one episode on one thread."""
    return _block_kernel_threads.get() or torch.get_num_threads()


@contextmanager
def make_cancellation_event() -> Iterator[None]:
    """Cancel threads started inside the block when it ends: each stops at its next :func:`check_cancelled`.

    It holds for contexts that are copied inside. Ctrl-C reaches the main thread alone, which would wait for all others.
    """
    stop = Event()
    token = _cancellation_event.set(stop)
    try:
        yield
    finally:
        stop.set()
        _cancellation_event.reset(token)


def cancellation_event() -> Event | None:
    """Return the event of :func:`make_cancellation_event`, set when this thread is to stop; None outside its block."""
    return _cancellation_event.get()


def check_cancelled(stop: Event | None) -> None:
    """Raise :class:`KeyboardInterrupt` where the event of :func:`cancellation_event` is set."""
    if stop is not None and stop.is_set():
        raise KeyboardInterrupt
