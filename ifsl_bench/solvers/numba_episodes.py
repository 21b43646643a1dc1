"""Kernels over many episodes on several threads, and two that solve nothing: gathered features and counted hits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numba import njit

from ifsl_bench.solvers.numba_code_cache import hold_compile_lock
from ifsl_bench.solvers.numba_compiling import COMPILED_CODE_FOLDER, Array, Decorator, inline_jit, kernel_jit
from ifsl_bench.utils.threads import cancellation_event, check_cancelled

CHUNKS_PER_THREAD = 8  # for each thread: episodes take longer or shorter, and no thread should wait long for the last
FIRST_CHUNK_EPISODES = 16  # episodes of the first piece on one thread: Ctrl-C works between two pieces
# Seconds; a piece on one thread that takes less is followed by one of twice as many episodes
QUICK_CHUNK_SECONDS = 0.05
_called_kernels: set[Any] = set()  # kernels that have been called


def run_kernel_in_threads(kernel: Any, count: int, threads: int, *arguments: Any) -> None:
    """Call kernel(begin, end, *arguments) for all of 0 to `count` - 1. The results do not depend on the threads.

    Args:
        kernel: a compiled function.
        count: E, the episodes.
        threads: how many may run at once.
        *arguments: what the kernel takes after its bounds.

    Raises:
        KeyboardInterrupt: the work was stopped, see :func:`ifsl_bench.utils.threads.make_cancellation_event`.
    """
    new = kernel not in _called_kernels
    pieces = min(count, CHUNKS_PER_THREAD * threads) if threads > 1 else -(-count // FIRST_CHUNK_EPISODES)
    bounds = [count * i // pieces for i in range(pieces + 1)] if pieces else []
    todo = list(pairwise(bounds))
    stop = cancellation_event()  # of this thread: others do not know

    def run_chunk(piece: tuple[int, int]) -> None:
        check_cancelled(stop)
        kernel(*piece, *arguments)

    if new and todo:  # alone: the first call compiles, or loads what another process has compiled by then
        with hold_compile_lock(COMPILED_CODE_FOLDER):
            kernel(*todo.pop(0), *arguments)
        _called_kernels.add(kernel)
    if threads > 1 and len(todo) > 1:
        list(_thread_pool(threads).map(run_chunk, todo))
    elif todo:
        _run_chunks_in_turn(run_chunk, todo[0][0], count)


def _run_chunks_in_turn(run_chunk: Callable[[tuple[int, int]], None], begin: int, count: int) -> None:
    """call((begin, end)) for all up to `count`, in pieces that are short enough to be interrupted between them."""
    size = FIRST_CHUNK_EPISODES
    while begin < count:
        start, end = time.perf_counter(), min(begin + size, count)
        run_chunk((begin, end))
        begin = end
        size *= 1 + (time.perf_counter() - start < QUICK_CHUNK_SECONDS)


@lru_cache(maxsize=4)
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ifsl_bench")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)  # threads do not come along


IndexArray = Any  # int64 [E, ...]
FlagArray = Any  # bool [E, ...]


@inline_jit
def copy_bank_row(bank: Array, row: int, out: Array) -> bool:
    """Return whether there is such a row; then it is in `out`.

    Args:
        bank: features, [rows, D].
        row: an index, which may be out of bounds.
        out: where the row goes, [D].
    """
    if not 0 <= row < bank.shape[0]:
        return False
    for d in range(out.shape[0]):
        out[d] = bank[row, d]
    return True


@kernel_jit
def gather_episodes(
    begin: int,
    end: int,
    rows: IndexArray,
    from_second: FlagArray,
    bank: Array,
    second_bank: Array,
    out: Array,
    found: FlagArray,
) -> None:
    """Put rows of two feature banks together to episodes.

    Args:
        begin: the first episode.
        end: the one after the last.
        rows: indices in a bank, [E, R].
        from_second: which of them are of the second bank, [E, R].
        bank: features, [rows, D].
        second_bank: features, [rows, D].
        out: the features of the episodes, [E, R, D].
        found: whether the banks have all these rows, [E].
    """
    for e in range(begin, end):
        good = True
        for i in range(rows.shape[1]):
            if from_second[e, i]:
                good &= copy_bank_row(second_bank, rows[e, i], out[e, i])
            else:
                good &= copy_bank_row(bank, rows[e, i], out[e, i])
        found[e] = good


# A maximum by vectors, for which NaN must not matter: `has_nan_or_inf` finds it.
maximum_jit: Decorator = cast(Any, njit(nogil=True, error_model="numpy", fastmath={"nnan", "nsz"}))


@maximum_jit
def array_maximum(x: Array) -> float:
    """Return the largest of a flat array; anything where it has NaN."""
    value = x[0]
    for i in range(x.shape[0]):
        value = max(value, x[i])
    return value


@inline_jit
def has_nan_or_inf(x: Array) -> bool:
    """Return whether a flat array has NaN or +inf."""
    any_bad = 0
    for i in range(x.shape[0]):
        any_bad |= not x[i] < np.inf
    return any_bad != 0


@inline_jit
def is_first_maximum(x: Array, value: float, place: int) -> bool:
    """Return whether `place` is the first one with this value, so that an argmax would answer it.

    Args:
        x: a flat array.
        value: the largest of x.
        place: an index, which may be out of bounds.
    """
    if not 0 <= place < x.shape[0] or x[place] != value:
        return False
    for i in range(place):  # noqa: SIM110
        if x[i] == value:
            return False
    return True


@kernel_jit
def count_hits(
    begin: int,
    end: int,
    logits: Array,
    is_masked: FlagArray,
    labels: IndexArray,
    is_novel: FlagArray,
    hits: IndexArray,
    base_margins: Array,
    novel_margins: Array,
    pairs: IndexArray,
    is_invalid: FlagArray,
    is_right: FlagArray,
) -> None:
    """Count hits in episodes with joint logits.

    Args:
        begin: the first episode.
        end: the one after the last.
        logits: joint logits, base classes first, [E, Q, K + N].
        is_masked: base classes at -inf, [E, K].
        labels: [E, Q].
        is_novel: which queries are of novel classes, [E, Q].
        hits: [4, E]: base queries right among all classes, among base classes; novel queries likewise.
        base_margins: of the B base queries, [E, B].
        novel_margins: of the novel queries, [E, Q - B].
        pairs: [E], as `ifsl_bench.protocols.calibration` defines them.
        is_invalid: whether an episode has logits that are none, [E].
        is_right: whether each query is right among all classes, and among the classes of its kind, [2, E, Q].
    """
    queries, classes = logits.shape[1], is_masked.shape[1]
    shown = np.empty(classes, logits.dtype)
    for e in range(begin, end):
        none, out_of_range = False, 0
        base_at = novel_at = base_joint = base_alone = novel_joint = novel_alone = 0
        for q in range(queries):
            row = logits[e, q]
            none |= has_nan_or_inf(row)
            for k in range(classes):
                shown[k] = -np.inf if is_masked[e, k] else row[k]
                out_of_range |= (row[k] == -np.inf) & (not is_masked[e, k])
            for n in range(classes, len(row)):
                out_of_range |= row[n] == -np.inf
            base, novel, label = array_maximum(shown), array_maximum(row[classes:]), labels[e, q]
            margin = np.float32(np.inf) if novel == -np.inf else np.float32(base - novel)
            if is_novel[e, q]:
                alone = is_first_maximum(row[classes:], novel, label - classes)
                joint = alone and novel > base
                novel_alone += alone
                novel_joint += joint
                novel_margins[e, novel_at] = margin if alone else np.float32(np.nan)
                novel_at += 1
            else:
                alone = is_first_maximum(shown, base, label)
                joint = alone and base >= novel
                base_alone += alone
                base_joint += joint
                base_margins[e, base_at] = margin if alone else np.float32(np.nan)
                base_at += 1
            is_right[0, e, q], is_right[1, e, q] = joint, alone
        hits[0, e], hits[1, e], hits[2, e], hits[3, e] = base_joint, base_alone, novel_joint, novel_alone
        total = 0
        for i in range(base_margins.shape[1]):
            for j in range(novel_margins.shape[1]):
                total += base_margins[e, i] > novel_margins[e, j]
                total += base_margins[e, i] >= novel_margins[e, j]
        pairs[e], is_invalid[e] = total, none or out_of_range != 0
