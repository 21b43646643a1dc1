"""The way from indices to features: what a method is given of a sequence of sessions, and what is kept from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.plugin.method import Method, Query, Support
from ifsl_bench.protocols.calibration import Bias
from ifsl_bench.protocols.episode_loader import take_images
from ifsl_bench.protocols.loader import SEQUENCE_BYTES, Batch, Evaluator, Loader
from ifsl_bench.protocols.sampling.sequences import SequenceSampler

BASE_QUERIES, NOVEL_QUERIES = 25, 5  # of the episodes that stand for session 1: in all, and of each class


@dataclass(frozen=True)
class SequenceBatch:
    """E sequences of T sessions: a method sees supports and queries; the labels stay with the harness.

    Attributes:
        pool: of the novel queries.
        support_pool: of the supports.
        support_rows: [E, T, S], those of each session's supports in their pool.
        labels: [S], of a session's supports.
        base: base queries, [1, B, D]: those of all sequences.
        base_labels: [B].
        base_there: [E, B] bool; queries of hidden classes do not count.
        novel_rows: [E, T N q], those of the queries of the novel classes, in the order of the classes.
        novel_there: [E, T N q] bool; false beyond the last query of a class that has fewer than others.
        hidden: [E, K] bool.
    """

    pool: FeaturePool
    support_pool: FeaturePool
    support_rows: Tensor
    labels: Tensor
    base: Query
    base_labels: Tensor
    base_there: Tensor
    novel_rows: Tensor
    novel_there: Tensor
    hidden: Tensor

    @cached_property
    def novel(self) -> Query:
        """Queries of the novel classes, [E, T N q, D]."""
        return Query(*take_images(self.pool, self.novel_rows))

    @cached_property
    def supports(self) -> list[Support]:
        """The support sets of sessions 1 to T."""
        return [self._supports(rows, self.hidden) for rows in self.support_rows.unbind(1)]

    def at_once(self) -> Support:
        """The sessions of all sequences as E T episodes, those of a sequence behind one another."""
        sessions = self.support_rows.shape[1]
        return self._supports(self.support_rows.flatten(0, 1), self.hidden.repeat_interleave(sessions, 0))

    def _supports(self, rows: Tensor, hidden: Tensor) -> Support:
        features, base_logits = take_images(self.support_pool, rows)
        return Support(features, self.labels.expand(len(rows), -1), hidden, base_logits)

    def __len__(self) -> int:
        return len(self.hidden)

    def together(self, sessions: int) -> Support:
        """The supports of the first so many sessions, as those of one episode of all their classes."""
        parts = self.supports[:sessions]
        labels = [part.labels + index * (int(part.labels.max()) + 1) for index, part in enumerate(parts)]
        columns = [[p.features for p in parts], labels, [p.base_logits for p in parts]]
        features, joint, base_logits = (torch.cat(column, 1) for column in columns)
        return Support(features, joint, self.hidden, base_logits)

    def every_image(self, at: int) -> Support:
        """All training images of the novel classes of one sequence, as the supports of one episode.

        They are those of the pool of supports, but for the sequence's queries where these are of the same pool.
        """
        starts = torch.from_numpy(self.support_pool.starts).to(self.support_rows.device)
        shots = int((self.labels == 0).sum())
        first = self.support_rows[at].flatten()[::shots].contiguous()  # one image of each class
        classes = torch.searchsorted(starts, first, right=True) - 1
        bounds = self.support_pool.starts.tolist()
        rows = [torch.arange(bounds[c], bounds[c + 1], device=starts.device) for c in classes.tolist()]
        if self.support_pool is self.pool:
            queries = self.novel_rows[at][self.novel_there[at]]
            rows = [of[~torch.isin(of, queries)] for of in rows]
        counts = torch.tensor(list(map(len, rows)), device=starts.device)
        labels = torch.arange(len(rows), device=starts.device).repeat_interleave(counts)
        features, base_logits = take_images(self.support_pool, torch.cat(rows)[None])
        return Support(features, labels[None], self.hidden[at : at + 1], base_logits)

    def queries(self, sessions: int) -> Query:
        """Base queries, and those of the novel classes of the first so many sessions: [E, B + t N q, D]."""
        base, novel = self.base.features.shape[1], self.novel_rows.shape[1]
        count = base + novel * sessions // self.support_rows.shape[1]
        return Query(self._queries.features[:, :count], self._queries.base_logits[:, :count])

    @cached_property
    def _queries(self) -> Query:
        """Those of all sessions; a session's are the first of them, so that none is copied twice."""
        pairs = ((self.base.features, self.novel.features), (self.base.base_logits, self.novel.base_logits))
        return Query(*(torch.cat([b.expand(len(self), -1, -1), n], 1) for b, n in pairs))


class SequenceLoader(Loader):
    """Batches of a stream of sequences, with features.

    Args:
        sampler: draws the indices.
        novel: the pool of the novel queries, and of the supports where these have no pool of their own.
        base: the pool of the base queries.
        support: the pool of the supports.
    """

    def __init__(
        self, sampler: SequenceSampler, novel: FeaturePool, base: FeaturePool, support: FeaturePool | None = None
    ) -> None:
        self.sampler, self.novel, self.support = sampler, novel, support or novel
        self.ways, self.classes = sampler.shape.ways, sampler.base_classes
        rows = sampler.base_query
        self.base = Query(base.features[rows].unsqueeze(0), base.base_logits[rows].unsqueeze(0))

    cpu_bytes: ClassVar[int] = SEQUENCE_BYTES

    @property
    def novel_classes(self) -> int:
        return self.sampler.shape.classes

    @property
    def device(self) -> torch.device:
        return self.novel.features.device

    @staticmethod
    def keeps_supports(method: Method) -> bool:
        """Return whether each session is learned from the supports of all sessions so far."""
        return method.keeps_supports(method.__dict__.get("_made_with", {}))

    def evaluator(self, method: Method, name: str, bias: Bias | None, keep_margins: bool) -> Evaluator:
        from ifsl_bench.protocols.session_answers import SessionEvaluator

        return partial(SessionEvaluator(method, name, self).evaluate, bias=bias, keep_margins=keep_margins)

    def joint_answers(
        self, method: Method, name: str, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, ...]]:
        from ifsl_bench.protocols.session_answers import SessionEvaluator

        evaluator, spec = SessionEvaluator(method, name, self), self.sampler.shape
        for block in blocks:
            batch, drawn = self.batch(*block), self.sampler.sample(*block)
            answer = evaluator.last(method, batch)
            novel = torch.arange(spec.classes, device=answer.device).repeat_interleave(self.sampler.queries)
            labels = torch.cat([batch.base_labels, self.classes + novel]).expand_as(answer)
            order = (drawn.index // spec.supports).unsqueeze(1)
            yield order, labels, answer, drawn.classes, torch.cat([batch.base_there, batch.novel_there], 1)

    @property
    def each(self) -> int:
        """Bytes, roughly, of a sequence: queries with their logits, of which there are some copies."""
        shape, width = self.sampler.shape, self.novel.features.shape[1]
        novel = shape.classes * self.sampler.queries
        return 4 * (novel * (width + 2 * self.classes) + 2 * (novel + len(self.sampler.base_query)) * shape.classes)

    def batch(self, start: int, count: int) -> SequenceBatch:
        """Sequences ``start`` to ``start + count - 1``."""
        drawn, shape = self.sampler.sample(start, count), self.sampler.shape
        device = drawn.classes.device
        query = drawn.query.flatten(1)
        return SequenceBatch(
            self.novel,
            self.support,
            drawn.support.reshape(count, shape.count, -1),
            torch.arange(self.ways, device=device).repeat_interleave(self.sampler.shots),
            self.base,
            self.sampler.base_labels,
            ~drawn.hidden[:, self.sampler.base_labels],
            query.clamp_min(0),
            query >= 0,
            drawn.hidden,
        )

    def episodes(self, count: int) -> Batch:
        """Session 1 of the first sequences as episodes, with a few of its queries."""
        batch = self.batch(0, count)
        of_class = min(NOVEL_QUERIES, self.sampler.queries)
        novel = torch.arange(self.ways * self.sampler.queries, device=batch.hidden.device)
        novel = novel.view(self.ways, -1)[:, :of_class].flatten()
        base = torch.linspace(0, len(batch.base_labels) - 1, BASE_QUERIES).long().to(novel.device)
        pairs = ((batch.base.features, batch.novel.features), (batch.base.base_logits, batch.novel.base_logits))
        query = Query(*(torch.cat([b[:, base].expand(count, -1, -1), n[:, novel]], 1) for b, n in pairs))
        ways = torch.arange(self.ways, device=novel.device).repeat_interleave(of_class) + self.classes
        labels = torch.cat([batch.base_labels[base], ways]).expand(count, -1)
        return Batch(batch.supports[0], query, labels, labels >= self.classes)
