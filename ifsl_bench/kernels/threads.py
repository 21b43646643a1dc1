"""Kernels over many episodes, on as many threads as torch may use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from . import store
from .compiling import FOLDER

PIECES = 8  # for each thread: episodes take longer or shorter, and nobody should wait long for the last
_known: dict[Any, int] = {}  # kernel -> for how many kinds of arguments it is there


def each(kernel: Any, count: int, threads: int, *arguments: Any) -> None:
    """kernel(begin, end, *arguments) for all of 0 to `count` - 1. What it finds does not depend on the threads."""
    if kernel not in _known:
        module = kernel.__module__.rpartition(".")[2]
        store.announce(FOLDER, f"{module}.{kernel.__name__}")
    pieces = min(count, PIECES * threads) if threads > 1 else 1
    bounds = [count * i // pieces for i in range(pieces + 1)]
    kernel(bounds[0], bounds[1], *arguments)  # alone: the first call compiles
    if len(kernel.overloads) != _known.get(kernel):
        _known[kernel] = len(kernel.overloads)
        if FOLDER is not None and kernel.stats.cache_misses:
            store.record(FOLDER)
    if pieces > 1:
        list(_pool(threads).map(lambda i: kernel(bounds[i], bounds[i + 1], *arguments), range(1, pieces)))


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ifsl_bench")
