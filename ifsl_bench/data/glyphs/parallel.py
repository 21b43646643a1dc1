"""Filling a pool, in this process or in several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import numpy.typing as npt

from ifsl_bench.data.glyphs import IMAGE_SHAPE, SEED, GlyphPool, Letter, render

_AT_LEAST = 20_000  # images that are worth a process of their own
_TASK = 512  # images per message between processes, about


def fill(pool: GlyphPool, out: npt.NDArray[np.uint8], advance: Callable[[int], None], workers: int | None) -> None:
    """See `ifsl_bench.data.glyphs.fill`."""
    images = len(pool.letters) * pool.per_class
    if out.shape != (images, *IMAGE_SHAPE) or out.dtype != np.uint8:
        raise ValueError(f"pool {pool.name} needs uint8 {(images, *IMAGE_SHAPE)}, but out is {out.dtype} {out.shape}")
    if workers is None:
        workers = min(_cores(), images // _AT_LEAST)
    start = 0
    for block in _blocks(pool, workers):
        out[start : start + len(block)] = block
        start += len(block)
        advance(len(block))


def _blocks(pool: GlyphPool, workers: int) -> Iterator[npt.NDArray[np.uint8]]:
    at_once = max(1, _TASK // pool.per_class)
    tasks = [
        (pool.letters[start : start + at_once], pool.first, pool.per_class)
        for start in range(0, len(pool.letters), at_once)
    ]
    if workers <= 1:
        yield from map(_render_classes, tasks)
        return
    with ProcessPoolExecutor(min(workers, len(tasks))) as executor:
        yield from executor.map(_render_classes, tasks)


def _render_classes(task: tuple[tuple[Letter, ...], int, int]) -> npt.NDArray[np.uint8]:
    """The images of some classes: (letters, first index, images per class) to [n, 32, 32, 1]."""
    letters, first, per_class = task
    indices = np.tile(np.arange(first, first + per_class, dtype=np.int64), len(letters))
    return render([letter for letter in letters for _ in range(per_class)], indices, SEED)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
