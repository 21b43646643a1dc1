"""Stage 3: hit counts of a method over a stream of episodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ifsl_bench.backbones.device import free_memory
from ifsl_bench.plugin.method import Method, Prediction, ask, check_form, check_prediction
from ifsl_bench.protocols import calibration
from ifsl_bench.protocols.calibration import Bias, Calibrated, Margins
from ifsl_bench.protocols.episode_loader import Batch, EpisodeLoader, hits
from ifsl_bench.protocols.metrics import Counts, estimate
from ifsl_bench.protocols.tasks.task import EpisodeSpec
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.threads import evaluating, share, stoppable, threads

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ifsl_bench.protocols.sequence_loader import SequenceBatch, SequenceLoader
    from ifsl_bench.protocols.session_answers import Sessions
    from ifsl_bench.protocols.session_metrics import SessionCounts

MOST_UNCONVERGED = 0.001  # share of episodes above which a run says that solves failed
# Episodes at once.
BLOCKS = (10_000, 5000, 2000, 1000, 500, 400, 250, 200, 125, 100, 80, 50, 40, 25, 20, 16, 10, 8, 5, 4, 2, 1)
CPU_BYTES = 1 << 25  # on the CPU, where more is no faster: features and logits
SEQUENCE_BYTES = 51 << 20  # likewise, of sequences: they take more small steps
MOST_ON_CPU = 1000  # episodes at once
PEAK = 4  # times as much as that a method takes at its peak
MOST_THREADS = 4  # that take a block each: Python's own part of the work is done by one at a time
SHARE = 1 / 8  # of an accelerator's free memory: features and logits; the methods' peaks are about twice as much


@dataclass(frozen=True)
class Evaluated:
    """Counts, statistics and margins of n episodes.

    Attributes:
        counts: hits; with those of a bias, where one was given.
        statistics: the method's own numbers, name -> [n].
        margins: of the queries, four bytes each; None in regular few-shot learning, and where a bias was given.
        calibrated: what the bias that was given makes of them.
    """

    counts: Counts | SessionCounts
    statistics: dict[str, np.ndarray]
    margins: Margins | None = None
    calibrated: Calibrated | None = None

    @property
    def accuracy(self) -> float:
        """The mean over episodes, in percent."""
        return estimate(self.counts.value("acc")).mean

    @property
    def unconverged(self) -> int:
        """Episodes whose inner solve did not converge, or ended at NaN."""
        return int(np.count_nonzero(self.statistics.get("solver_unconverged", 0)))

    def remarks(self) -> Iterator[str]:
        """A line where more than ``MOST_UNCONVERGED`` of the inner solves did not converge."""
        if self.unconverged > MOST_UNCONVERGED * len(self.counts):
            yield f"the inner solve of {self.unconverged} of {len(self.counts)} episodes did not converge"

    def described(self) -> dict[str, dict[str, float]]:
        """Statistic -> mean, maximum and sum over the episodes where it is finite, and in how many it is not."""
        return {name: _describe(values) for name, values in self.statistics.items()}


def joined(parts: Sequence[Evaluated]) -> Evaluated:
    """Joins the counts of ranges that follow one another; none has margins, or all have."""
    first = parts[0]
    columns = [part.counts.columns() for part in parts]
    counts: dict[str, Any] = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    statistics: dict[str, list[np.ndarray]] = {}
    for name, values in (item for part in parts for item in part.statistics.items()):
        statistics.setdefault(name, []).append(values)
    margins = [part.margins for part in parts if part.margins is not None]
    calibrated = [part.calibrated for part in parts if part.calibrated is not None]
    return Evaluated(
        replace(first.counts, **counts),
        {name: np.concatenate(values) for name, values in statistics.items()},
        Margins(*(np.concatenate([getattr(m, side) for m in margins]) for side in ("base", "novel")))
        if margins
        else None,
        calibration.joined(calibrated) if calibrated else None,
    )


def _describe(values: np.ndarray) -> dict[str, float]:
    finite = values[np.isfinite(values)].astype(np.float64)
    return {
        "mean": float(finite.mean()) if len(finite) else 0.0,
        "max": float(finite.max()) if len(finite) else 0.0,
        "total": float(finite.sum()),
        "episodes": len(values),
        "not_finite": len(values) - len(finite),
    }


def has_sessions(loader: EpisodeLoader | SequenceLoader) -> TypeIs[SequenceLoader]:
    """Tells whether a loader has sequences of sessions."""
    return not isinstance(loader, EpisodeLoader)


def batch_size(loader: EpisodeLoader | SequenceLoader, method: Method) -> int:
    """Episodes at once, a *block*: as many as stay in the cache's reach, or keep an accelerator busy.

    A method's last digits may depend on how many episodes a product of matrices is of. So blocks are of few sizes,
    which divide 10,000, and 2,000 where they are no more; on an accelerator the free memory says which.
    """
    free = free_memory(loader.novel.features.device)
    each = loader.each + method.class_bytes * (loader.sampler.shape.classes if has_sessions(loader) else loader.ways)
    on_cpu = SEQUENCE_BYTES if has_sessions(loader) else CPU_BYTES
    most = min(MOST_ON_CPU, on_cpu // each) if free is None else int(SHARE * free) // each
    return next((size for size in BLOCKS if size <= most), 1)


def predict(method: Method, name: str, batch: Batch, numbers: bool = True) -> Prediction:
    """The method's checked answer to a batch; see :func:`check_prediction` for what is refused.

    Args:
        numbers: whether its logits are looked at too, for which an accelerator has to be waited for.
    """
    episodes, queries = batch.labels.shape
    classes = batch.support.hidden.shape[1] + method.ways
    prediction = ask(method, name, batch.support, batch.query)
    return (check_prediction if numbers else check_form)(name, prediction, episodes, queries, classes)


@torch.no_grad()
@evaluating()
def evaluate(
    method: Method,
    name: str,
    loader: EpisodeLoader | SequenceLoader,
    episodes: range,
    reporter: Reporter | None = None,
    title: str = "",
    whole: int | None = None,
    bias: Bias | None = None,
    keep_margins: bool = True,
    at_once: bool = True,
    called: str = "accuracy",
) -> Evaluated:
    """Counts hits over these episodes of the loader's stream, or these sequences.

    Episodes are computed in blocks, which begin at multiples of their size, so that what is found in an episode does
    not depend on the range that it is asked for in. Those of a block that were not asked for are left out.

    Args:
        title: what the reporter calls it.
        whole: the end of the stream, where the last block is cut; that of the episodes by default.
        bias: on the novel logits, to count the hits with it too; then no margins are kept.
        keep_margins: of the queries; those of many episodes would take most of the memory.
        at_once: take several blocks at once, where that is faster: not worth copies of the method and threads where few
            episodes are looked at often.
        called: what the reporter calls the accuracy so far.
    """
    method.eval()
    whole, size = episodes.stop if whole is None else whole, batch_size(loader, method)
    first = episodes.start - episodes.start % size
    blocks = [(start, min(size, whole - start)) for start in range(first, episodes.stop, size)]
    parts: list[Evaluated] = []
    evaluated: Callable[[Method, Any, slice], Evaluated]
    if has_sessions(loader):
        from ifsl_bench.protocols.session_answers import Sessions

        sessions = Sessions(method, name, loader, method.keeps_supports(method.__dict__.get("_made_with", {})))
        evaluated = partial(_of_sequences, sessions, bias=bias, keep_margins=keep_margins)
    else:
        evaluated = partial(_evaluated, name, loader.sampler.shape, bias=bias, keep_margins=keep_margins)

    def answered(method: Method, start: int, batch: Batch | SequenceBatch) -> Evaluated:
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


def _evaluated(
    name: str, spec: EpisodeSpec, method: Method, batch: Batch, asked: slice, bias: Bias | None, keep_margins: bool
) -> Evaluated:
    """Evaluates those episodes of a block that were asked for."""
    prediction = predict(method, name, batch, numbers=False)
    outcome = hits(name, prediction, batch, spec.base_queries)
    counts: dict[str, Any] = {key: value[asked] for key, value in outcome.counts.items()}
    statistics = {key: value[asked].copy() for key, value in outcome.statistics.items()}  # a view would keep its batch
    plain = Counts(**counts, base_queries=spec.base_queries, novel_queries=spec.ways * spec.novel_queries)
    if outcome.margins is None or outcome.pairs is None:
        return Evaluated(plain, statistics)
    margins = Margins(outcome.margins.base[asked], outcome.margins.novel[asked])
    plain = replace(plain, pairs=outcome.pairs[asked])
    if bias is None:
        return Evaluated(plain, statistics, margins if keep_margins else None)
    with_bias = bias.applied(margins)
    plain = replace(plain, calibrated_base=with_bias.base_joint, calibrated_novel=with_bias.novel_joint)
    return Evaluated(plain, statistics, None, with_bias)


def _of_sequences(
    sessions: Sessions, method: Method, batch: SequenceBatch, asked: slice, bias: Bias | None, keep_margins: bool
) -> Evaluated:
    """Evaluates those sequences of a block that were asked for."""
    from ifsl_bench.protocols.session_answers import Answers, count

    answered = sessions.answered(method, batch)
    answers = Answers(*(part[asked] for part in answered.answers))
    counts = replace(
        count(answers, sessions.classes, sessions.ways),
        state_bytes=answered.state_bytes,
        supports=sessions.loader.sampler.shape.supports,
    )
    statistics = {key: value[asked].cpu().numpy() for key, value in answered.statistics.items()}
    if bias is None:
        return Evaluated(counts, statistics, answers.margins() if keep_margins else None)
    counts = counts.with_bias(count(answers, sessions.classes, sessions.ways, bias.value))
    return Evaluated(counts, statistics, None, bias.applied_to_sequences(answers.margins(), sessions.sessions))


def _answers(
    method: Method,
    loader: EpisodeLoader | SequenceLoader,
    blocks: list[tuple[int, int]],
    answered: Callable[[Method, int, Any], Evaluated],
    at_once: bool,
) -> Generator[Evaluated]:
    """Yields ``answered(method, start, batch)`` of each block, a first episode and a length, in their order.

    On the CPU threads take a block each, with a copy of the method where its class declares that copies may run at
    once: a block is a sequence of small calls, which threads would share badly. Each computes alone, so that its digits
    do not depend on how many there are.
    """
    cpu = loader.novel.features.device.type == "cpu"
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
    """Makes so many of the method; one, where it holds what cannot be copied, such as a lock or an open file."""
    try:
        return [method, *(copy.deepcopy(method) for _ in range(count - 1))]
    except Exception:  # of anybody's code
        return [method]


def blocks_at_once(kind: type[Method]) -> int:
    """The number of blocks of a method's episodes that a CPU computes at once, at most."""
    return max(1, min(share(), MOST_THREADS)) if kind.may_run_in_threads() else 1


def block_bytes(kind: type[Method], in_sessions: bool) -> int:
    """Bytes, roughly, that blocks of a method's episodes or sequences take on a CPU while they are evaluated."""
    return blocks_at_once(kind) * PEAK * (SEQUENCE_BYTES if in_sessions else CPU_BYTES)
