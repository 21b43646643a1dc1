"""Sequences of sessions: which classes come when, and which images are support and query, in batches.

Sequence i of a stream (task, side, seed) is a pure function of these and the sizes of the classes, like an episode.
It has order i // R of the classes, R the number of support sets for each order. Orders are drawn by their own number,
images by the sequence's: so the R sequences of an order share nothing but the order, and orders share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocols.sampling.draws import (
    CLASS_DRAW_PURPOSE,
    ClassDraws,
    admissible_base_images,
    derive_stream_key,
    describe_sufficient_value,
    describe_too_few_images,
    digest_tensors,
    draw_distinct_integers,
    draw_distinct_integers_by_shuffling,
    draw_random_words,
    to_int64_tensor,
)
from ifsl_bench.protocols.tasks.task import SUPPORT_POOL, SessionSpec, Side, Task
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_count

_IMAGE_DRAW_PURPOSE = 2  # the purpose of the words that choose images


@dataclass(frozen=True)
class SequencePoolStarts:
    """The images that a stream draws from: int64 [C + 1] each, class c is images ``starts[c]:starts[c + 1]``."""

    novel_starts: np.ndarray  # of the novel classes: queries, and supports where these have no pool of their own
    base_starts: np.ndarray  # of the base classes
    support_starts: np.ndarray | None = None  # of the novel classes' supports, where there is a pool for them
    pool_names: tuple[str, str, str] = ("novel/test", "base/test", "novel/support")  # what errors call the three
    novel_classes: Sequence[str] = ()  # what errors call the novel classes; their numbers where there is nothing
    base_classes: Sequence[str] = ()  # likewise


@dataclass(frozen=True)
class SequenceIndices:
    """Indices of a batch of E sequences, each of C = T N novel classes: session t has N from (t - 1) N on.

    Base queries are the same in all sequences, see :class:`SequenceSampler`; queries of hidden classes do not count.
    """

    classes: Tensor  # [E, C] novel classes, as labels of the novel pool. The joint label of the c-th is K + c.
    support: Tensor  # [E, C, shots] images of the support pool, or of the novel pool where there is none
    query: Tensor  # [E, C, q] images of the novel pool; -1 beyond the last one of a class that has fewer than others
    hidden_classes: Tensor  # [E, K] bool, base classes out of play
    sequence_numbers: Tensor  # [E] the sequences' numbers

    def __len__(self) -> int:
        return len(self.sequence_numbers)


class SequenceSampler:
    """Draws the sequences of one stream.

    Args:
        stream: names the stream, e.g. ("glyphs-sessions", "test", 0).
        shape: sessions, ways, orders and support sets.
        shots: support images of a novel class.
        pools: the images to draw from.
        hide: whether the novel classes are base classes and hidden as such (the two pools' labels agree).
        parity: base queries take only images of even or odd index within their class.
        order: [C or more] labels of the novel pool, the one order of a published list, of which the first C are dealt.
            Its supports are the first images of each class in the support pool.
        device: where the indices are made.

    Attributes:
        base_query: [B] images of the base pool, the same for all sequences.
        base_labels: [B] their labels.
        queries: of a novel class; of the one with most where queries are all images of the novel pool.

    Raises:
        UserError: too few classes, or too few images in a class; a class without queries, or both base and novel.
    """

    def __init__(
        self,
        stream: tuple[str | int, ...],
        shape: SessionSpec,
        shots: int,
        pools: SequencePoolStarts,
        hide: bool = False,
        parity: str | None = None,
        order: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.shots, self.hide, self.device = shape, shots, hide, torch.device(device)
        self.task, self.key = stream[0], derive_stream_key(*stream, of="sequences")
        rows, labels = admissible_base_images(pools.base_starts, parity)
        self._check_classes(pools, np.bincount(labels, minlength=len(pools.base_starts) - 1))
        self.queries = self._count_queries_per_novel_class(pools, len(labels) // (len(pools.base_starts) - 1))
        self.base_classes, self.novel_classes = len(pools.base_starts) - 1, len(pools.novel_starts) - 1
        self.apart, support = (
            pools.support_starts is not None,
            pools.novel_starts if pools.support_starts is None else pools.support_starts,
        )
        self.base_query, self.base_labels = to_int64_tensor(rows, device), to_int64_tensor(labels, device)
        self.novel_starts, self.novel_counts = (
            to_int64_tensor(pools.novel_starts[:-1], device),
            to_int64_tensor(np.diff(pools.novel_starts), device),
        )
        self.support_starts, self.support_counts = (
            to_int64_tensor(support[:-1], device),
            to_int64_tensor(np.diff(support), device),
        )
        self.order = None if order is None else to_int64_tensor(order[: shape.n_novel_classes], device)

    def _check_classes(self, pools: SequencePoolStarts, base_queries: np.ndarray) -> None:
        shape, classes, base = self.shape, len(pools.novel_starts) - 1, len(pools.base_starts) - 1
        if classes < shape.n_novel_classes:
            raise UserError(
                f"sequences of {self.task} need {shape.n_novel_classes:,} novel classes ({shape.count:,} sessions of "
                f"{shape.ways:,}), {pools.pool_names[0]} has {classes:,}"
                f"{describe_sufficient_value('sessions', classes // shape.ways)}"
            )
        if self.hide and classes != base:
            raise UserError("classes can be hidden only where novel and base classes are the same")
        if self.hide and shape.n_novel_classes >= base:
            raise UserError(
                f"sequences of {self.task} hide {shape.n_novel_classes:,} of {base:,} base classes, and none is left"
                f"{describe_sufficient_value('sessions', shape.hiding_base_classes(base).count)}"
            )
        both = set() if self.hide else set(pools.novel_classes) & set(pools.base_classes)
        if both:
            raise UserError(
                f"class {min(both)!r} of {self.task} is both a base class ({pools.pool_names[1]}) and a novel one "
                f"({pools.pool_names[0]})"
            )
        if not base_queries.all():
            raise self._missing_queries_error(int(base_queries.argmin()), pools.base_classes, pools.pool_names[1])

    def _missing_queries_error(self, label: int, classes: Sequence[str], pool: str) -> UserError:
        name = _format_class_label(label, classes)
        return UserError(f"sequences of {self.task} need queries of every class, class {name} of {pool} has none")

    def _count_queries_per_novel_class(self, pools: SequencePoolStarts, base: int) -> int:
        """Count the queries of a novel class, where a base class has ``base``; check that there are enough images."""
        counts = np.diff(pools.novel_starts if pools.support_starts is None else pools.support_starts)
        label, least = int(counts.argmin()), int(counts.min())
        if pools.support_starts is not None:
            others = np.diff(pools.novel_starts)
            if not others.all():
                raise self._missing_queries_error(int(others.argmin()), pools.novel_classes, pools.pool_names[0])
            queries, need, name, what = int(others.max()), self.shots, pools.pool_names[2], "for supports"
        else:
            queries = base if self.shape.queries is None else self.shape.queries
            if self.hide and self.shape.queries is None:  # as a base class has, but for its supports
                queries = max(1, min(queries, least - self.shots))
            need, name = self.shots + queries, pools.pool_names[0]
            what = f"({format_count(self.shots, 'shot')} + {queries:,} queries)"
        if queries < 1:
            raise UserError(f"sequences of {self.task} have no queries of novel classes; --queries must be at least 1")
        if least < need:
            apart = pools.support_starts is not None
            fewer = (
                describe_sufficient_value("shots", least)
                if apart
                else describe_too_few_images(least, self.shots, queries)
            )
            raise UserError(
                f"sequences of {self.task} need {need:,} images of a novel class {what}, class "
                f"{_format_class_label(label, pools.novel_classes)} of {name} has {least:,}{fewer}"
            )
        return queries

    def sample(self, start: int, count: int) -> SequenceIndices:
        """Draw sequences ``start`` to ``start + count - 1`` of the stream.

        Args:
            start: the first sequence.
            count: how many sequences.
        """
        index = torch.arange(start, start + count, device=self.device)
        classes = self._draw_classes(index)
        if self.apart:
            support, query = self._draw_supports(index, classes), self._list_all_queries(classes)
        else:
            each = self.shots + self.queries
            images = draw_distinct_integers_by_shuffling(
                self._random_words(index, classes.shape[1], each), self.novel_counts[classes]
            )
            images = images + self.novel_starts[classes].unsqueeze(-1)
            support, query = images[..., : self.shots], images[..., self.shots :]
        hidden = torch.zeros(count, self.base_classes, dtype=torch.bool, device=self.device)
        if self.hide:
            hidden.scatter_(1, classes, True)
        return SequenceIndices(classes, support, query, hidden, index)

    def _random_words(self, index: Tensor, classes: int, each: int) -> Tensor:
        return draw_random_words(self.key, index, _IMAGE_DRAW_PURPOSE, classes * each).view(len(index), classes, each)

    def _draw_classes(self, index: Tensor) -> Tensor:
        """Draw novel classes [E, C] of the sequences ``index`` [E]."""
        count = self.shape.n_novel_classes
        if self.order is not None:
            return self.order.expand(len(index), count)
        orders, place = (index // self.shape.supports).unique(return_inverse=True)
        total = torch.full((len(orders),), self.novel_classes, device=self.device)
        return draw_distinct_integers(draw_random_words(self.key, orders, CLASS_DRAW_PURPOSE, count), total, count)[
            place
        ]

    def _draw_supports(self, index: Tensor, classes: Tensor) -> Tensor:
        """Draw images [E, C, shots] of the support pool."""
        starts = self.support_starts[classes].unsqueeze(-1)
        if self.order is not None:
            return starts + torch.arange(self.shots, device=self.device)
        words = self._random_words(index, classes.shape[1], self.shots)
        return starts + draw_distinct_integers(words, self.support_counts[classes], self.shots)

    def _list_all_queries(self, classes: Tensor) -> Tensor:
        """Return all images [E, C, q] of the novel pool."""
        place = torch.arange(self.queries, device=self.device)
        rows = self.novel_starts[classes].unsqueeze(-1) + place
        return torch.where(place < self.novel_counts[classes].unsqueeze(-1), rows, -1)

    def describe_novel_class_draws(self, count: int) -> ClassDraws | np.ndarray:
        """Return the draws of novel classes for the orders of the first ``count`` sequences.

        A published list has one order: then these are its classes, [1, C].
        """
        if self.order is not None:
            return self.order.cpu().numpy()[None]
        orders = -(-count // self.shape.supports)
        return ClassDraws(orders, self.shape.n_novel_classes, self.novel_classes, self.key)

    def digest(self, count: int, batch: int = 100) -> str:
        """Return the SHA-256 over base queries and the first sequences: equal digests, equal sequences.

        Args:
            count: how many sequences.
            batch: sequences drawn at once, which does not change the digest.
        """

        def rows() -> Iterator[Tensor]:
            yield from (self.base_query, self.base_labels)
            for start in range(0, count, batch):
                drawn = self.sample(start, min(batch, count - start))
                yield torch.cat([drawn.classes, drawn.support.flatten(1), drawn.query.flatten(1)], 1)

        return digest_tensors(rows())


def make_sequence_sampler(
    task: Task,
    side: Side,
    shape: SessionSpec,
    starts: Callable[[str], np.ndarray],
    device: torch.device | str,
    classes: Callable[[str], Sequence[str]],
    order: np.ndarray | None,
) -> SequenceSampler:
    """Return the sampler of a side's sequences; see :func:`ifsl_bench.protocols.sampling.episodes.make_side_sampler`.

    Validation has an order for each support set, of as many sessions as there are classes for.

    Args:
        task: in sessions.
        side: "val" or "test".
        shape: of the task.
        starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
        device: where the indices are made.
        classes: of a pool by name, what errors call its classes.
        order: [T N] labels of novel/test, as a published list orders them; None where orders are drawn.

    Raises:
        UserError: the pools have too few classes or images.
    """
    names = (task.pool(side, "novel"), task.pool(side, "base"))
    novel, base = map(starts, names)
    if side == "val":
        shape = (
            shape.hiding_base_classes(len(base) - 1)
            if task.hides_base_classes(side)
            else shape.limited_to_classes(len(novel) - 1)
        )
        shape = msgspec.structs.replace(shape, count=max(1, shape.count), supports=1)
    support = starts(SUPPORT_POOL) if task.has_separate_supports(side) else None
    pools = SequencePoolStarts(novel, base, support, (*names, SUPPORT_POOL), *map(classes, names))
    parity = None if task.hides_base_classes(side) else task.base_parity(side)
    stream, published = (task.name, side, task.evaluation.seed), order if side == "test" else None
    return SequenceSampler(stream, shape, task.shots, pools, task.hides_base_classes(side), parity, published, device)


def _format_class_label(label: int, classes: Sequence[str]) -> str:
    return repr(classes[label]) if len(classes) else f"number {label}"
