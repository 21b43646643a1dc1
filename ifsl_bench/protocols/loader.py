"""What is found in episodes or sequences, and the interface of the loaders that find it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.plugin.method import Query, Support
from ifsl_bench.protocols import calibration
from ifsl_bench.protocols.calibration import Bias, Calibrated, Margins
from ifsl_bench.protocols.metrics import HitCounts, estimate

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

CPU_BYTES = 1 << 25  # on the CPU, where more at once are no faster: features and logits of a block
SEQUENCE_BYTES = 51 << 20  # likewise, of sequences: they take more small steps
MOST_UNCONVERGED = 0.001  # share of episodes above which a run says that solves failed


@dataclass(frozen=True)
class Evaluated:
    """Counts, statistics and margins of n episodes.

    Attributes:
        counts: hits; with the hits of a bias, where one was given.
        statistics: the method's own numbers, name -> [n].
        margins: of the queries, four bytes each; None in regular few-shot learning, where a bias was given, and where
            they are not kept.
        calibrated: the hits with the bias that was given.
    """

    counts: HitCounts
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
        """Yield a line where more than ``MOST_UNCONVERGED`` of the inner solves did not converge."""
        if self.unconverged > MOST_UNCONVERGED * len(self.counts):
            yield f"the inner solve of {self.unconverged} of {len(self.counts)} episodes did not converge"

    def described(self) -> dict[str, dict[str, float]]:
        """Return for each statistic mean, maximum and sum over finite values, and the number of others."""
        return {name: _describe(values) for name, values in self.statistics.items()}


def _describe(values: np.ndarray) -> dict[str, float]:
    finite = values[np.isfinite(values)].astype(np.float64)
    return {
        "mean": float(finite.mean()) if len(finite) else 0.0,
        "max": float(finite.max()) if len(finite) else 0.0,
        "total": float(finite.sum()),
        "episodes": len(values),
        "not_finite": len(values) - len(finite),
    }


def joined(parts: Sequence[Evaluated]) -> Evaluated:
    """Return the findings of ranges that follow one another, as one; none has margins, or all have."""
    first = parts[0]
    columns = [part.counts.columns() for part in parts]
    counts: dict[str, Any] = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    statistics: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for name, values in part.statistics.items():
            statistics.setdefault(name, []).append(values)
    margins = [part.margins for part in parts if part.margins is not None]
    calibrated = [part.calibrated for part in parts if part.calibrated is not None]
    return Evaluated(
        replace(first.counts, **counts),  # type: ignore[type-var]
        {name: np.concatenate(values) for name, values in statistics.items()},
        Margins(*(np.concatenate([getattr(m, side) for m in margins]) for side in ("base", "novel")))
        if margins
        else None,
        calibration.joined(calibrated) if calibrated else None,
    )


Evaluator = Callable[["Method", Any, slice], Evaluated]  # of those episodes of a batch that are asked for


@dataclass(frozen=True)
class Batch:
    """E episodes: the method sees ``support`` and ``query``; the labels stay with the harness.

    Attributes:
        labels: [E, Q] joint labels.
        novel: [E, Q] bool, which queries are of a novel class.
        joint: whether base classes are in the softmax; not in regular few-shot learning.
    """

    support: Support
    query: Query
    labels: Tensor
    novel: Tensor
    joint: bool = True

    @property
    def masked(self) -> Tensor:
        """[E, K] bool, base classes that have no logit: the hidden ones, or all."""
        return self.support.hidden if self.joint else torch.ones_like(self.support.hidden)

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> Batch:
        """Return episodes ``start`` to ``stop - 1`` of the batch.

        Args:
            start: the first episode.
            stop: the end, not included.
        """
        s, q, at = self.support, self.query, slice(start, stop)
        return Batch(
            Support(s.features[at], s.labels[at], s.hidden[at], s.base_logits[at]),
            Query(q.features[at], q.base_logits[at]),
            self.labels[at],
            self.novel[at],
            self.joint,
        )


class Loader(ABC):
    """Batches of a stream of episodes or sequences, with features; it has a method answer them, and counts.

    Attributes:
        sampler: draws the indices.
        ways: novel classes of an episode or a session.
        classes: base classes.
        novel_classes: of an episode or sequence, in all.
        device: of the features.
        cpu_bytes: on the CPU, where more at once are no faster: features and logits of a block.
    """

    cpu_bytes: ClassVar[int] = CPU_BYTES
    sampler: Any
    ways: int
    classes: int

    @property
    def novel_classes(self) -> int:
        """Novel classes of an episode or sequence, in all."""
        return self.ways

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the features."""

    @property
    @abstractmethod
    def each(self) -> int:
        """Bytes, roughly, of an episode or sequence: features and logits."""

    @abstractmethod
    def batch(self, start: int, count: int) -> Any:
        """Return episodes or sequences ``start`` to ``start + count - 1``.

        Args:
            start: the first episode or sequence.
            count: how many.
        """

    @abstractmethod
    def episodes(self, count: int) -> Batch:
        """Return the first episodes, or session 1 of the first sequences as episodes, to check a contract on."""

    @abstractmethod
    def evaluator(self, method: Method, name: str, bias: Bias | None, keep_margins: bool) -> Evaluator:
        """Return what evaluates batches, for a method or copies of it.

        Args:
            method: that answers.
            name: what errors call it.
            bias: on the novel logits, to count hits with it too; then no margins are kept.
            keep_margins: of the queries.
        """

    @abstractmethod
    def joint_answers(
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
