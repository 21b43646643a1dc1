"""Numbers of threads, which depend on the work and never on the process that happens to do it.

Sums that several threads share are added up in another order than on one, so that digits depend on their number.
Work that uses a number of threads therefore sets it where it runs. A process has two numbers:

* :func:`core_count`, for work that takes the whole machine: OMP_NUM_THREADS, else what PyTorch finds; a worker gets the
  number of the process that hands out the work, so that both compute the same.
* :func:`thread_share`, how many of them the process may keep busy with work whose digits do not depend on it: a part of
  them, where several processes share the machine.
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

_cores = torch.get_num_threads()
_share = _cores
_busy: ContextVar[int | None] = ContextVar("busy", default=None)
_stop: ContextVar[Event | None] = ContextVar("stop", default=None)


def core_count() -> int:
    """Return the number of threads for work that takes the whole machine."""
    return _cores


def thread_share() -> int:
    """Return the number of threads that this process may keep busy at most."""
    return _share


def limit_threads(whole: int, part: int) -> None:
    """Set this process's numbers of threads; for workers, as they start.

    Args:
        whole: threads for work that takes the whole machine, see :func:`core_count`.
        part: threads that this process may keep busy at most, see :func:`thread_share`.
    """
    global _cores, _share
    _cores, _share = whole, part
    torch.set_num_threads(part)


@contextmanager
def thread_limits(torch_threads: int, kernel_threads: int | None = None) -> Iterator[None]:
    """Set the numbers of threads inside the block.

    Args:
        torch_threads: how many threads share a sum in PyTorch.
        kernel_threads: how many threads solve episodes, each alone; as many as ``torch_threads`` if None.
    """
    before = torch.get_num_threads()
    token = _busy.set(torch_threads if kernel_threads is None else kernel_threads)
    torch.set_num_threads(torch_threads)
    try:
        with _openblas_controller().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
        _busy.reset(token)


@lru_cache(maxsize=1)
def _openblas_controller() -> ThreadpoolController:
    """Every OpenBLAS but PyTorch's: compiled kernels call SciPy's, by default on as many threads as there are cores."""
    import scipy.linalg.cython_blas  # noqa: F401  # a library is found once it is loaded

    loaded = ThreadpoolController().select(internal_api="openblas")
    paths = [library.filepath for library in loaded.lib_controllers]
    return loaded.select(filepath=[path for path in paths if TORCH_FOLDER not in Path(path).resolve().parents])


@contextmanager
def evaluation_threads() -> Iterator[None]:
    """Set the threads of the work around an evaluation inside the block; its blocks of episodes have one thread each.

    PyTorch has few, so that many workers on a machine, each with its share of it, do not get in each other's way;
    compiled kernels, which solve episodes one by one, have as many as the process may keep busy.
    """
    with thread_limits(min(EVALUATION_THREADS, core_count()), thread_share()):
        yield


def kernel_thread_count() -> int:
    """Return the number of threads on which compiled kernels solve episodes, one episode on one thread."""
    return _busy.get() or torch.get_num_threads()


@contextmanager
def cancel_at_exit() -> Iterator[None]:
    """Cancel threads started inside the block when it ends: each stops at its next :func:`check_cancelled`.

    It holds for contexts that are copied inside. Ctrl-C reaches the main thread alone, which would wait for all others.
    """
    stop = Event()
    token = _stop.set(stop)
    try:
        yield
    finally:
        stop.set()
        _stop.reset(token)


def cancellation_event() -> Event | None:
    """Return the event that is set when this thread's work is no longer wanted; None outside :func:`cancel_at_exit`."""
    return _stop.get()


def check_cancelled(stop: Event | None) -> None:
    """Raise :class:`KeyboardInterrupt` where the event of :func:`cancellation_event` is set."""
    if stop is not None and stop.is_set():
        raise KeyboardInterrupt
