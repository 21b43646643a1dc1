"""Kernels over many episodes, on as many threads as torch may use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ifsl_bench.solvers import numba_code_cache as store
from ifsl_bench.solvers.numba_compiling import FOLDER
from ifsl_bench.utils.threads import check_wanted, wanted

PIECES = 8  # for each thread: episodes take longer or shorter, and nobody should wait long for the last
ALONE = 16  # episodes of the first piece on one thread: between two pieces Ctrl-C is heard
QUICK = 0.05  # seconds; a piece on one thread that takes less is followed by one of twice as many episodes
_signatures: dict[Any, int] = {}  # kernel -> for how many kinds of arguments it is there


def each(kernel: Any, count: int, threads: int, *arguments: Any) -> None:
    """kernel(begin, end, *arguments) for all of 0 to `count` - 1. What it finds does not depend on the threads.

    Raises:
        KeyboardInterrupt: nobody wants it any more, see :func:`ifsl_bench.utils.threads.stoppable`.
    """
    new = kernel not in _signatures
    pieces = min(count, PIECES * threads) if threads > 1 else -(-count // ALONE)
    bounds = [count * i // pieces for i in range(pieces + 1)] if pieces else []
    todo = list(pairwise(bounds))
    stop = wanted()  # of this thread: others do not know

    def call(piece: tuple[int, int]) -> None:
        check_wanted(stop)
        _call(kernel, piece, arguments)

    if new and todo:  # alone: the first call compiles, or loads what another process has compiled by then
        with store.alone(FOLDER):
            _call(kernel, todo.pop(0), arguments)
            _record(kernel)
    if threads > 1 and len(todo) > 1:
        list(_pool(threads).map(call, todo))
    elif todo:
        _one_after_the_other(call, todo[0][0], count)
    _record(kernel)


def _one_after_the_other(call: Callable[[tuple[int, int]], None], begin: int, count: int) -> None:
    """call((begin, end)) for all up to `count`, in pieces that are short enough to be interrupted between them."""
    size = ALONE
    while begin < count:
        start, end = time.perf_counter(), min(begin + size, count)
        call((begin, end))
        begin = end
        size *= 1 + (time.perf_counter() - start < QUICK)


def _record(kernel: Any) -> None:
    if len(kernel.overloads) != _signatures.get(kernel):
        _signatures[kernel] = len(kernel.overloads)
        if FOLDER is not None and kernel.stats.cache_misses:
            store.record(FOLDER)


def _call(kernel: Any, piece: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    try:
        kernel(*piece, *arguments)
    except OSError:  # the disk is full: what was compiled is there, for this process
        kernel(*piece, *arguments)


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ifsl_bench")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
