"""What is found in episodes or sequences, the interface of the loaders that find it, and the loop over their blocks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.device import free_device_memory_bytes
from ifsl_bench.plugin.method import Method, Query, Support
from ifsl_bench.protocols import calibration
from ifsl_bench.protocols.calibration import CalibratedHits, Margins, ValidationBias
from ifsl_bench.protocols.image_counts import ImageHits, ImageTally
from ifsl_bench.protocols.metrics import HitCounts, mean_with_interval
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.threads import (
    limit_evaluation_threads,
    limit_threads_in_block,
    make_cancellation_event,
    max_busy_threads,
)

EPISODE_BLOCK_BYTES = 1 << 25  # on the CPU, where more at once are no faster: features and logits of a block
SEQUENCE_BLOCK_BYTES = 51 << 20  # likewise, of sequences: they take more small steps
# Episodes at once.
POSSIBLE_BLOCK_SIZES = (
    10_000,
    5000,
    2000,
    1000,
    500,
    400,
    250,
    200,
    125,
    100,
    80,
    50,
    40,
    25,
    20,
    16,
    10,
    8,
    5,
    4,
    2,
    1,
)
MAX_BLOCK_EPISODES_ON_CPU = 1000  # episodes at once
PEAK_MEMORY_FACTOR = 4  # times as much as that a method takes at its peak
MAX_BLOCKS_IN_PARALLEL = 4  # that take a block each: Python's own part of the work is done by one at a time
FREE_MEMORY_SHARE = (
    1 / 8
)  # of an accelerator's free memory: features and logits; the methods' peaks are about twice as much
MAX_UNCONVERGED_SHARE = 0.001  # share of episodes above which a run says that solves failed


@dataclass(frozen=True)
class EvaluationResult:
    """Counts, statistics and margins of n episodes.

    Attributes:
        counts: hits; with the hits of a bias, where one was given.
        method_statistics: the method's own numbers, name -> [n].
        margins: of the queries, four bytes each; None in regular few-shot learning, where a bias was given, and where
            they are not kept.
        calibrated_hits: the hits with the bias that was given.
    """

    counts: HitCounts
    method_statistics: dict[str, np.ndarray]
    margins: Margins | None = None
    calibrated_hits: CalibratedHits | None = None

    @property
    def accuracy(self) -> float:
        """The mean over episodes, in percent."""
        return mean_with_interval(self.counts.metric_by_unit("acc")).mean

    @property
    def n_unconverged_episodes(self) -> int:
        """Episodes whose inner solve did not converge, or ended at NaN."""
        return int(np.count_nonzero(self.method_statistics.get("solver_unconverged", 0)))

    def convergence_remarks(self) -> Iterator[str]:
        """Yield a line where more than ``MAX_UNCONVERGED_SHARE`` of the inner solves did not converge."""
        if self.n_unconverged_episodes > MAX_UNCONVERGED_SHARE * len(self.counts):
            yield f"the inner solve of {self.n_unconverged_episodes} of {len(self.counts)} episodes did not converge"

    def describe_statistics(self) -> dict[str, dict[str, float]]:
        """Return for each statistic mean, maximum and sum over finite values, and the number of others."""
        return {name: _summarise_finite_values(values) for name, values in self.method_statistics.items()}


def _summarise_finite_values(values: np.ndarray) -> dict[str, float]:
    finite = values[np.isfinite(values)].astype(np.float64)
    return {
        "mean": float(finite.mean()) if len(finite) else 0.0,
        "max": float(finite.max()) if len(finite) else 0.0,
        "total": float(finite.sum()),
        "episodes": len(values),
        "not_finite": len(values) - len(finite),
    }


def join_evaluation_results(parts: Sequence[EvaluationResult]) -> EvaluationResult:
    """Return the findings of ranges that follow one another, as one; none has margins, or all have."""
    first = parts[0]
    columns = [part.counts.count_arrays() for part in parts]
    counts: dict[str, Any] = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    statistics: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for name, values in part.method_statistics.items():
            statistics.setdefault(name, []).append(values)
    margins = [part.margins for part in parts if part.margins is not None]
    calibrated = [part.calibrated_hits for part in parts if part.calibrated_hits is not None]
    return EvaluationResult(
        replace(first.counts, **counts),  # type: ignore[type-var]
        {name: np.concatenate(values) for name, values in statistics.items()},
        Margins(*(np.concatenate([getattr(m, side) for m in margins]) for side in ("base_margins", "novel_margins")))
        if margins
        else None,
        calibration.join_calibrated_hits(calibrated) if calibrated else None,
    )


BatchEvaluator = Callable[[Method, Any, slice], EvaluationResult]  # of those episodes of a batch that are asked for


@dataclass(frozen=True)
class Batch:
    """E episodes: the method sees ``support`` and ``query``; the labels stay with the harness.

    Attributes:
        query_labels: [E, Q] joint labels.
        query_is_novel: [E, Q] bool, which queries are of a novel class.
        includes_base_classes: whether base classes are in the softmax; not in regular few-shot learning.
        query_images: [E, Q] the queries' images in their pools; None for queries that are not counted by image.
        first_episode_number: the number of the first episode.
    """

    support: Support
    query: Query
    query_labels: Tensor
    query_is_novel: Tensor
    includes_base_classes: bool = True
    query_images: Tensor | None = None
    first_episode_number: int = 0

    @property
    def masked_base_classes(self) -> Tensor:
        """[E, K] bool, base classes that have no logit: the hidden ones, or all."""
        return self.support.hidden if self.includes_base_classes else torch.ones_like(self.support.hidden)

    def __len__(self) -> int:
        return len(self.query_labels)

    def select_episode_range(self, start: int, stop: int) -> Batch:
        """Return episodes ``start`` to ``stop - 1`` of the batch.

        Args:
            start: the first episode.
            stop: the end, not included.
        """
        s, q, at = self.support, self.query, slice(start, stop)
        return Batch(
            Support(s.features[at], s.labels[at], s.hidden[at], s.base_logits[at]),
            Query(q.features[at], q.base_logits[at]),
            self.query_labels[at],
            self.query_is_novel[at],
            self.includes_base_classes,
        )


class Loader(ABC):
    """Batches of a stream of episodes or sequences, with features; it has a method answer them, and counts.

    Attributes:
        sampler: draws the indices.
        ways: novel classes of an episode or a session.
        n_base_classes: base classes.
        n_novel_classes: of an episode or sequence, in all.
        device: of the features.
        cpu_block_bytes: on the CPU, where more at once are no faster: features and logits of a block.
        image_tally: adds up the hits of each test image while evaluators run; None where they are not counted.
    """

    cpu_block_bytes: ClassVar[int] = EPISODE_BLOCK_BYTES
    image_tally: ImageTally | None = None
    sampler: Any
    ways: int
    n_base_classes: int

    @property
    def n_novel_classes(self) -> int:
        """Novel classes of an episode or sequence, in all."""
        return self.ways

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the features."""

    @property
    @abstractmethod
    def estimated_bytes_per_item(self) -> int:
        """Bytes, roughly, of an episode or sequence: features and logits."""

    @abstractmethod
    def load_batch(self, start: int, count: int) -> Any:
        """Return episodes or sequences ``start`` to ``start + count - 1``.

        Args:
            start: the first episode or sequence.
            count: how many.
        """

    @abstractmethod
    def load_first_episodes(self, count: int) -> Batch:
        """Return the first episodes, or session 1 of the first sequences as episodes, to check a contract on."""

    @abstractmethod
    def make_evaluator(
        self, method: Method, name: str, bias: ValidationBias | None, keep_margins: bool
    ) -> BatchEvaluator:
        """Return a function that evaluates batches with a method or with copies of the method.

        Args:
            method: that answers.
            name: what errors call it.
            bias: on the novel logits, to count hits with it too; then no margins are kept.
            keep_margins: of the queries.
        """

    def collect_image_hits(self, biased: bool) -> ImageHits | None:
        """Return the hits of the test images of all episodes so far, from :attr:`image_tally`.

        Args:
            biased: whether the bias is part of the row, so that hits with it are its hits.

        Returns:
            None where a protocol does not count them.
        """
        return None

    @abstractmethod
    def predict_joint_label_batches(
        self, method: Method, name: str, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield answers of a method among all classes; of sequences, those after the last session.

        Args:
            method: that answers.
            name: what errors call it.
            blocks: a first episode or sequence, and how many.

        Yields:
            Unit of intervals [E, 1], joint labels [E, Q], joint answers [E, Q], novel classes as labels of their pool
            [E, N], and which queries count [E, Q].
        """


# -- the loop over blocks


def choose_block_size(loader: Loader, method: Method) -> int:
    """Return the number of episodes in a *block*: as many as stay in the cache's reach, or keep an accelerator busy.

    A method's last digits may depend on the number of episodes in a product of matrices. So blocks are of few sizes,
    which divide 10,000, and also 2,000 where they are at most 2,000; on an accelerator the free memory decides which.

    Args:
        loader: of the episodes or sequences.
        method: to evaluate.
    """
    free = free_device_memory_bytes(loader.device)
    each = loader.estimated_bytes_per_item + method.class_bytes * loader.n_novel_classes
    most = (
        min(MAX_BLOCK_EPISODES_ON_CPU, loader.cpu_block_bytes // each)
        if free is None
        else int(FREE_MEMORY_SHARE * free) // each
    )
    return next((size for size in POSSIBLE_BLOCK_SIZES if size <= most), 1)


@torch.no_grad()
@limit_evaluation_threads()
def evaluate_method(
    method: Method,
    name: str,
    loader: Loader,
    episodes: range,
    reporter: Reporter | None = None,
    title: str = "",
    whole: int | None = None,
    bias: ValidationBias | None = None,
    keep_margins: bool = True,
    at_once: bool = True,
    called: str = "accuracy",
) -> EvaluationResult:
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
    whole, size = episodes.stop if whole is None else whole, choose_block_size(loader, method)
    first = episodes.start - episodes.start % size
    blocks = [(start, min(size, whole - start)) for start in range(first, episodes.stop, size)]
    parts: list[EvaluationResult] = []
    evaluated = loader.make_evaluator(method, name, bias, keep_margins)

    def answered(method: Method, start: int, batch: Any) -> EvaluationResult:
        return evaluated(method, batch, slice(max(0, episodes.start - start), episodes.stop - start))

    with (
        (reporter or Reporter()).report_stage(title, len(episodes)) as stage,
        closing(_evaluate_blocks(method, loader, blocks, answered, at_once)) as answers,
    ):
        right = done = 0.0
        for answer in answers:
            parts.append(answer)
            right, done = right + answer.accuracy * len(answer.counts), done + len(answer.counts)
            mean = right / done  # where a block ends within an order, not yet that over orders
            if done == len(episodes):
                parts = [join_evaluation_results(parts)]
                mean = parts[0].accuracy
            stage.advance(len(answer.counts), **{called: mean})
    return parts[0]


def _evaluate_blocks(
    method: Method,
    loader: Loader,
    blocks: list[tuple[int, int]],
    answered: Callable[[Method, int, Any], EvaluationResult],
    at_once: bool,
) -> Generator[EvaluationResult]:
    """Yield ``answered(method, start, batch)`` of each block, a first episode and a length, in their order.

    On the CPU threads take a block each, with a copy of the method where its class declares that copies may run at
    once: a block is a sequence of small calls, which threads would share badly. Each computes alone, so that its digits
    do not depend on how many there are.
    """
    cpu = loader.device.type == "cpu"
    copies = _copy_method_for_threads(
        method, min(max_parallel_blocks(type(method)), len(blocks)) if cpu and at_once else 1
    )
    several, queue = len(copies), SimpleQueue[Method]()
    if several == 1:  # in this thread, where Ctrl-C ends anybody's code
        with limit_threads_in_block(1, max_busy_threads()) if cpu else nullcontext():
            for start, count in blocks:
                yield answered(method, start, loader.load_batch(start, count))
        return
    for replica in copies:
        queue.put(replica)

    @torch.no_grad()
    def take(start: int, count: int) -> EvaluationResult:
        replica = queue.get()
        try:
            return answered(replica, start, loader.load_batch(start, count))
        finally:
            queue.put(replica)

    with (
        limit_threads_in_block(1, max(1, max_busy_threads() // several)),
        ThreadPoolExecutor(several, "ifsl_bench evaluation") as pool,
        make_cancellation_event(),
    ):
        futures = [pool.submit(partial(copy_context().run, take, *block)) for block in blocks]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _copy_method_for_threads(method: Method, count: int) -> list[Method]:
    """Return the method and copies of it, ``count`` in all; it alone where it cannot be copied, as with a lock."""
    try:
        return [method, *(copy.deepcopy(method) for _ in range(count - 1))]
    except Exception:  # of anybody's code
        return [method]


def max_parallel_blocks(kind: type[Method]) -> int:
    """Return the number of blocks of a method's episodes that a CPU computes at once, at most."""
    return max(1, min(max_busy_threads(), MAX_BLOCKS_IN_PARALLEL)) if kind.may_run_in_threads() else 1


def estimate_block_bytes(kind: type[Method], in_sessions: bool) -> int:
    """Estimate the bytes that a method's blocks take on a CPU while they are evaluated.

    Args:
        kind: the method's class.
        in_sessions: whether the blocks are of sequences of sessions, not of episodes.
    """
    return (
        max_parallel_blocks(kind) * PEAK_MEMORY_FACTOR * (SEQUENCE_BLOCK_BYTES if in_sessions else EPISODE_BLOCK_BYTES)
    )
