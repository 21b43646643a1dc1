"""Kernels over many episodes, on as many threads as torch may use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

PIECES = 8  # for each thread: episodes take longer or shorter, and nobody should wait long for the last


def each(kernel: Callable[..., None], count: int, threads: int, *arguments: Any) -> None:
    """kernel(begin, end, *arguments) for all of 0 to `count` - 1. What it finds does not depend on the threads."""
    if threads <= 1 or count <= 1:
        kernel(0, count, *arguments)
        return
    pieces = min(count, PIECES * threads)
    bounds = [count * i // pieces for i in range(pieces + 1)]
    kernel(bounds[0], bounds[0], *arguments)  # compiled, or loaded, once and before there are several
    list(_pool(threads).map(lambda i: kernel(bounds[i], bounds[i + 1], *arguments), range(pieces)))


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ifsl_bench")
