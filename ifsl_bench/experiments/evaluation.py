"""Stage 3: hit counts of a method over a stream of episodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ifsl_bench.backbones.device import free_memory
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocols.calibration import Bias
from ifsl_bench.protocols.loader import CPU_BYTES, SEQUENCE_BYTES, Evaluated, Loader, joined
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.threads import evaluating, share, stoppable, threads

# Episodes at once.
BLOCKS = (10_000, 5000, 2000, 1000, 500, 400, 250, 200, 125, 100, 80, 50, 40, 25, 20, 16, 10, 8, 5, 4, 2, 1)
MOST_ON_CPU = 1000  # episodes at once
PEAK = 4  # times as much as that a method takes at its peak
MOST_THREADS = 4  # that take a block each: Python's own part of the work is done by one at a time
SHARE = 1 / 8  # of an accelerator's free memory: features and logits; the methods' peaks are about twice as much


def batch_size(loader: Loader, method: Method) -> int:
    """Return the number of episodes in a *block*: as many as stay in the cache's reach, or keep an accelerator busy.

    A method's last digits may depend on the number of episodes in a product of matrices. So blocks are of few sizes,
    which divide 10,000, and also 2,000 where they are at most 2,000; on an accelerator the free memory decides which.

    Args:
        loader: of the episodes or sequences.
        method: to evaluate.
    """
    free = free_memory(loader.device)
    each = loader.each + method.class_bytes * loader.novel_classes
    most = min(MOST_ON_CPU, loader.cpu_bytes // each) if free is None else int(SHARE * free) // each
    return next((size for size in BLOCKS if size <= most), 1)


@torch.no_grad()
@evaluating()
def evaluate(
    method: Method,
    name: str,
    loader: Loader,
    episodes: range,
    reporter: Reporter | None = None,
    title: str = "",
    whole: int | None = None,
    bias: Bias | None = None,
    keep_margins: bool = True,
    at_once: bool = True,
    called: str = "accuracy",
) -> Evaluated:
    """Count hits over these episodes of the loader's stream, or these sequences.

    Episodes are computed in blocks, which begin at multiples of their size, so that what is found in an episode does
    not depend on the range that it is asked for in. The episodes of a block that were not asked for are left out.

    Args:
        method: to evaluate; it is put in evaluation mode.
        name: of the method, for errors.
        loader: of the episodes or sequences.
        episodes: numbers in the stream.
        reporter: receives the progress.
        title: the name of this stage for the reporter.
        whole: the end of the stream, where the last block is cut; the end of ``episodes`` by default.
        bias: on the novel logits, to count the hits with it too; then no margins are kept.
        keep_margins: whether the margins of queries are kept; for many episodes they would take most of the memory.
        at_once: take several blocks at once, where that is faster: not worth copies of the method and threads where few
            episodes are looked at often.
        called: the name of the accuracy so far, for the reporter.
    """
    method.eval()
    whole, size = episodes.stop if whole is None else whole, batch_size(loader, method)
    first = episodes.start - episodes.start % size
    blocks = [(start, min(size, whole - start)) for start in range(first, episodes.stop, size)]
    parts: list[Evaluated] = []
    evaluated = loader.evaluator(method, name, bias, keep_margins)

    def answered(method: Method, start: int, batch: Any) -> Evaluated:
        return evaluated(method, batch, slice(max(0, episodes.start - start), episodes.stop - start))

    with (
        (reporter or Reporter()).stage(title, len(episodes)) as stage,
        closing(_answers(method, loader, blocks, answered, at_once)) as answers,
    ):
        right = done = 0.0
        for answer in answers:
            parts.append(answer)
            right, done = right + answer.accuracy * len(answer.counts), done + len(answer.counts)
            mean = right / done  # where a block ends within an order, not yet that over orders
            if done == len(episodes):
                parts = [joined(parts)]
                mean = parts[0].accuracy
            stage.advance(len(answer.counts), **{called: mean})
    return parts[0]


def _answers(
    method: Method,
    loader: Loader,
    blocks: list[tuple[int, int]],
    answered: Callable[[Method, int, Any], Evaluated],
    at_once: bool,
) -> Generator[Evaluated]:
    """Yields ``answered(method, start, batch)`` of each block, a first episode and a length, in their order.

    On the CPU threads take a block each, with a copy of the method where its class declares that copies may run at
    once: a block is a sequence of small calls, which threads would share badly. Each computes alone, so that its digits
    do not depend on how many there are.
    """
    cpu = loader.device.type == "cpu"
    copies = _with_copies(method, min(blocks_at_once(type(method)), len(blocks)) if cpu and at_once else 1)
    several, queue = len(copies), SimpleQueue[Method]()
    if several == 1:  # in this thread, where Ctrl-C ends anybody's code
        with threads(1, share()) if cpu else nullcontext():
            for start, count in blocks:
                yield answered(method, start, loader.batch(start, count))
        return
    for replica in copies:
        queue.put(replica)

    @torch.no_grad()
    def take(start: int, count: int) -> Evaluated:
        replica = queue.get()
        try:
            return answered(replica, start, loader.batch(start, count))
        finally:
            queue.put(replica)

    with (
        threads(1, max(1, share() // several)),
        ThreadPoolExecutor(several, "ifsl_bench evaluation") as pool,
        stoppable(),
    ):
        futures = [pool.submit(partial(copy_context().run, take, *block)) for block in blocks]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _with_copies(method: Method, count: int) -> list[Method]:
    """Return the method and copies of it, ``count`` in all; it alone where it cannot be copied, as with a lock."""
    try:
        return [method, *(copy.deepcopy(method) for _ in range(count - 1))]
    except Exception:  # of anybody's code
        return [method]


def blocks_at_once(kind: type[Method]) -> int:
    """Return the number of blocks of a method's episodes that a CPU computes at once, at most."""
    return max(1, min(share(), MOST_THREADS)) if kind.may_run_in_threads() else 1


def block_bytes(kind: type[Method], in_sessions: bool) -> int:
    """Estimate the bytes that a method's blocks take on a CPU while they are evaluated.

    Args:
        kind: the method's class.
        in_sessions: whether the blocks are of sequences of sessions, not of episodes.
    """
    return blocks_at_once(kind) * PEAK * (SEQUENCE_BYTES if in_sessions else CPU_BYTES)
