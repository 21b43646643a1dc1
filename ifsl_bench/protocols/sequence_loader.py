"""The way from indices to features: what a method is given of a sequence of sessions, and what is kept from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.plugin.method import (
    AdditiveClassifier,
    Method,
    Prediction,
    Query,
    SessionOutput,
    State,
    Support,
    call_method,
    check_finite,
    check_shapes,
    count_nonfinite_episodes,
    masked_logits,
    name_method_in_errors,
)
from ifsl_bench.plugin.options import remake_method_for_ways
from ifsl_bench.protocols.calibration import Margins, ValidationBias
from ifsl_bench.protocols.episode_loader import gather_features_and_base_logits, gather_rows
from ifsl_bench.protocols.image_counts import ImageHits, ImageTally, make_session_image_hits
from ifsl_bench.protocols.loader import SEQUENCE_BLOCK_BYTES, Batch, BatchEvaluator, EvaluationResult, Loader
from ifsl_bench.protocols.sampling.sequences import SequenceSampler
from ifsl_bench.protocols.session_metrics import SessionCounts, session_and_group_indices
from ifsl_bench.solvers.tree import concatenate_trees, list_leaves, rebuild_tree, tree_map

FIRST_SESSION_BASE_QUERIES, FIRST_SESSION_NOVEL_QUERIES = (
    25,
    5,
)  # of the episodes that stand for session 1: in all, and of each class


@dataclass(frozen=True)
class SequenceBatch:
    """E sequences of T sessions: a method sees supports and queries; the labels stay with the harness.

    Attributes:
        novel_pool: of the novel queries.
        support_pool: of the supports.
        support_rows: [E, T, S] rows of each session's supports in their pool.
        support_labels: [S], of a session's supports.
        base_queries: base queries, [1, B, D], the same for all sequences.
        base_labels: [B].
        base_query_is_counted: [E, B] bool; queries of hidden classes do not count.
        novel_rows: [E, T N q] rows of the queries of the novel classes, in the order of the classes.
        novel_query_is_counted: [E, T N q] bool; false beyond the last query of a class that has fewer than others.
        hidden_classes: [E, K] bool.
    """

    novel_pool: FeaturePool
    support_pool: FeaturePool
    support_rows: Tensor
    support_labels: Tensor
    base_queries: Query
    base_labels: Tensor
    base_query_is_counted: Tensor
    novel_rows: Tensor
    novel_query_is_counted: Tensor
    hidden_classes: Tensor

    @cached_property
    def novel_queries(self) -> Query:
        """Queries of the novel classes, [E, T N q, D]."""
        return Query(*gather_features_and_base_logits(self.novel_pool, self.novel_rows))

    @cached_property
    def supports_by_session(self) -> list[Support]:
        """The support sets of sessions 1 to T."""
        return [self._gather_support(rows, self.hidden_classes) for rows in self.support_rows.unbind(1)]

    def sessions_as_episodes(self) -> Support:
        """Return the sessions of all sequences as E T episodes, the sessions of a sequence one after the other."""
        sessions = self.support_rows.shape[1]
        return self._gather_support(self.support_rows.flatten(0, 1), self.hidden_classes.repeat_interleave(sessions, 0))

    def _gather_support(self, rows: Tensor, hidden: Tensor) -> Support:
        features, base_logits = gather_features_and_base_logits(self.support_pool, rows)
        return Support(features, self.support_labels.expand(len(rows), -1), hidden, base_logits)

    def __len__(self) -> int:
        return len(self.hidden_classes)

    def join_supports(self, sessions: int) -> Support:
        """Return the supports of the first ``sessions`` sessions, as one episode of all their classes."""
        parts = self.supports_by_session[:sessions]
        labels = [part.labels + index * (int(part.labels.max()) + 1) for index, part in enumerate(parts)]
        columns = [[p.features for p in parts], labels, [p.base_logits for p in parts]]
        features, joint, base_logits = (torch.cat(column, 1) for column in columns)
        return Support(features, joint, self.hidden_classes, base_logits)

    def all_training_images(self, at: int) -> Support:
        """Return all training images of the novel classes of one sequence, as the supports of one episode.

        They are all images of these classes in the pool of supports, but for the sequence's queries where these are of
        the same pool.
        """
        starts = torch.from_numpy(self.support_pool.class_starts).to(self.support_rows.device)
        shots = int((self.support_labels == 0).sum())
        first = self.support_rows[at].flatten()[::shots].contiguous()  # one image of each class
        classes = torch.searchsorted(starts, first, right=True) - 1
        bounds = self.support_pool.class_starts.tolist()
        rows = [torch.arange(bounds[c], bounds[c + 1], device=starts.device) for c in classes.tolist()]
        if self.support_pool is self.novel_pool:
            queries = self.novel_rows[at][self.novel_query_is_counted[at]]
            rows = [of[~torch.isin(of, queries)] for of in rows]
        counts = torch.tensor(list(map(len, rows)), device=starts.device)
        labels = torch.arange(len(rows), device=starts.device).repeat_interleave(counts)
        features, base_logits = gather_features_and_base_logits(self.support_pool, torch.cat(rows)[None])
        return Support(features, labels[None], self.hidden_classes[at : at + 1], base_logits)

    def queries_after_sessions(self, sessions: int) -> Query:
        """Return the base queries, then the queries of the novel classes of the first t sessions: [E, B + t N q, D]."""
        base, novel = self.base_queries.features.shape[1], self.novel_rows.shape[1]
        count = base + novel * sessions // self.support_rows.shape[1]
        return Query(
            self._queries_of_all_sessions.features[:, :count], self._queries_of_all_sessions.base_logits[:, :count]
        )

    @cached_property
    def _queries_of_all_sessions(self) -> Query:
        """Queries of all sessions; a session's are the first of them, so that none is copied twice."""
        pairs = (
            (self.base_queries.features, self.novel_queries.features),
            (self.base_queries.base_logits, self.novel_queries.base_logits),
        )
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
        self.ways, self.n_base_classes = sampler.shape.ways, sampler.base_classes
        rows = sampler.base_query
        self.base = Query(base.features[rows].unsqueeze(0), base.base_logits[rows].unsqueeze(0))

    cpu_block_bytes: ClassVar[int] = SEQUENCE_BLOCK_BYTES

    @property
    def n_novel_classes(self) -> int:
        return self.sampler.shape.n_novel_classes

    @property
    def device(self) -> torch.device:
        return self.novel.features.device

    @staticmethod
    def keeps_supports(method: Method) -> bool:
        """Return whether each session is learned from the supports of all sessions so far."""
        return method.keeps_supports(method.__dict__.get("_made_with", {}))

    def make_evaluator(
        self, method: Method, name: str, bias: ValidationBias | None, keep_margins: bool
    ) -> BatchEvaluator:
        return partial(SessionEvaluator(method, name, self).evaluate, bias=bias, keep_margins=keep_margins)

    def collect_image_hits(self, biased: bool) -> ImageHits | None:
        if self.image_tally is None or not self.image_tally.sums:
            return None
        base_sizes = np.bincount(self.sampler.base_labels.cpu().numpy(), minlength=self.n_base_classes)
        return make_session_image_hits(
            self.image_tally.sums, biased, base_sizes, np.diff(self.novel.class_starts), self.ways
        )

    def predict_joint_label_batches(
        self, method: Method, name: str, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, ...]]:
        evaluator, spec = SessionEvaluator(method, name, self), self.sampler.shape
        for block in blocks:
            batch, drawn = self.load_batch(*block), self.sampler.sample(*block)
            answer = evaluator.predict_last_joint_labels(method, batch)
            novel = torch.arange(spec.n_novel_classes, device=answer.device).repeat_interleave(self.sampler.queries)
            labels = torch.cat([batch.base_labels, self.n_base_classes + novel]).expand_as(answer)
            order = (drawn.sequence_numbers // spec.supports).unsqueeze(1)
            yield (
                order,
                labels,
                answer,
                drawn.classes,
                torch.cat([batch.base_query_is_counted, batch.novel_query_is_counted], 1),
            )

    @property
    def estimated_bytes_per_item(self) -> int:
        """Bytes, roughly, of a sequence: queries with their logits, of which there are some copies."""
        shape, width = self.sampler.shape, self.novel.features.shape[1]
        novel = shape.n_novel_classes * self.sampler.queries
        return 4 * (
            novel * (width + 2 * self.n_base_classes)
            + 2 * (novel + len(self.sampler.base_query)) * shape.n_novel_classes
        )

    def load_batch(self, start: int, count: int) -> SequenceBatch:
        """Return sequences ``start`` to ``start + count - 1``.

        Args:
            start: the first sequence.
            count: how many sequences.
        """
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
            ~drawn.hidden_classes[:, self.sampler.base_labels],
            query.clamp_min(0),
            query >= 0,
            drawn.hidden_classes,
        )

    def load_first_episodes(self, count: int) -> Batch:
        """Return session 1 of the first sequences as episodes, with a few of its queries."""
        batch = self.load_batch(0, count)
        of_class = min(FIRST_SESSION_NOVEL_QUERIES, self.sampler.queries)
        novel = torch.arange(self.ways * self.sampler.queries, device=batch.hidden_classes.device)
        novel = novel.view(self.ways, -1)[:, :of_class].flatten()
        base = torch.linspace(0, len(batch.base_labels) - 1, FIRST_SESSION_BASE_QUERIES).long().to(novel.device)
        pairs = (
            (batch.base_queries.features, batch.novel_queries.features),
            (batch.base_queries.base_logits, batch.novel_queries.base_logits),
        )
        query = Query(*(torch.cat([b[:, base].expand(count, -1, -1), n[:, novel]], 1) for b, n in pairs))
        ways = torch.arange(self.ways, device=novel.device).repeat_interleave(of_class) + self.n_base_classes
        labels = torch.cat([batch.base_labels[base], ways]).expand(count, -1)
        return Batch(batch.supports_by_session[0], query, labels, labels >= self.n_base_classes)


UNCONVERGED_STATISTIC = "solver_unconverged"  # of a sequence: in any session; other statistics are means over sessions
# Base queries at once on a CPU, and novel ones of one sequence: a product then stays in a core's cache
QUERIES_PER_MATRIX_PRODUCT = 400


class SequenceAnswers(NamedTuple):
    """Answers to the queries of E sequences, whatever is added to novel logits.

    The *margin* of a query after a session is its best base logit less its best logit among the novel classes met so
    far. Novel queries are by the session g that brings their class, M of each; after a session t < g they do not count.

    Attributes:
        base_right_before_sessions: [E, B] bool, base queries that are right in session 0.
        base_margins: [E, T, B] margins of base queries after sessions 1 to T.
        base_is_right_alone: [E, T, B] or [E, 1, B] bool, whether they are right among the base classes.
        base_query_is_counted: [E, B] bool; base queries of hidden classes do not count.
        novel_margins: [E, T, T, M] margins of novel queries, by t and g.
        novel_is_right_alone: [E, T, T, M] bool, whether they are right among the novel classes met so far.
        novel_query_is_counted: [E, T, M] bool; false beyond the last query of a class that has fewer than others.
    """

    base_right_before_sessions: Tensor
    base_margins: Tensor
    base_is_right_alone: Tensor
    base_query_is_counted: Tensor
    novel_margins: Tensor
    novel_is_right_alone: Tensor
    novel_query_is_counted: Tensor

    def to_margins(self) -> Margins:
        """Return margins that a bias on novel logits may move, after sessions 1 to T: [E, T B] and [E, T T M]."""
        base = self.base_margins.masked_fill(
            ~(self.base_is_right_alone & self.base_query_is_counted.unsqueeze(1)), torch.nan
        )
        counted = (
            self.novel_is_right_alone
            & self.novel_query_is_counted.unsqueeze(1)
            & _session_is_learned(self.novel_margins).unsqueeze(-1)
        )
        novel = self.novel_margins.masked_fill(~counted, torch.nan)
        return Margins(*(part.flatten(1).cpu().numpy() for part in (base, novel)))


def _session_is_learned(novel: Tensor) -> Tensor:
    """Return which sessions' classes have been met, [t, g] bool, of margins [E, t, g, M]."""
    return torch.ones(novel.shape[1:3], dtype=torch.bool, device=novel.device).tril()


def count_session_hits(answers: SequenceAnswers, base_classes: int, ways: int, bias: float = 0.0) -> SessionCounts:
    """Count hits with a bias on all novel logits; of equal logits the base class is the answer.

    Args:
        answers: to the queries of E sequences.
        base_classes: K.
        ways: novel classes of a session.
        bias: added to all novel logits.
    """
    limit = _round_up_to_single(bias)
    base_taken = (answers.base_margins >= limit) & answers.base_query_is_counted.unsqueeze(
        1
    )  # [E, t, B], answered with a base class
    novel_is_present = answers.novel_query_is_counted.unsqueeze(1)
    novel_taken = (answers.novel_margins >= limit) & novel_is_present  # [E, t, g, M]
    right = (answers.novel_margins < limit) & answers.novel_is_right_alone & novel_is_present
    sessions = answers.novel_margins.shape[1]
    square = answers.base_margins.new_zeros(
        len(answers.base_margins), sessions + 1, sessions + 1, dtype=torch.int64
    )  # [E, t, g]
    square[:, 0, 0] = (answers.base_right_before_sessions & answers.base_query_is_counted).sum(1)
    square[:, 1:, 0] = (base_taken & answers.base_is_right_alone).sum(2)
    square[:, 1:, 1:] = right.sum(3)
    there = [answers.base_query_is_counted.sum(1, keepdim=True), answers.novel_query_is_counted.sum(2)]
    queries = torch.cat(there, 1)  # [E, T + 1]

    counts = {
        "hits": square[:, *session_and_group_indices(sessions)],
        "novel_as_base": (novel_taken.sum(3) * _session_is_learned(answers.novel_margins)).sum(2),
        "base_as_novel": queries[:, :1] - base_taken.sum(2),
        "queries": queries,
        "novel_alone": (
            answers.novel_is_right_alone & novel_is_present & _session_is_learned(answers.novel_margins).unsqueeze(-1)
        ).sum((2, 3)),
    }
    widths = [part.shape[1] for part in counts.values()]
    columns = np.split(torch.cat([*counts.values()], 1).cpu().numpy(), np.cumsum(widths)[:-1], 1)  # waited for once
    named: dict[str, Any] = dict(zip(counts, columns, strict=True))
    return SessionCounts(
        **named,
        base_classes=base_classes,
        ways=ways,
    ).to_smallest_dtypes()


def _round_up_to_single(bias: float) -> float:
    """The least single-precision number that is no less: single-precision margins are on the same side of both."""
    rounded = np.float32(bias)
    return float(rounded if rounded >= bias else np.nextafter(rounded, np.float32(np.inf)))


@dataclass(frozen=True)
class SequenceEvaluation:
    """The answers to E sequences.

    Attributes:
        statistics: the method's own numbers, name -> [E].
        state_bytes: of the state after the last session, of one sequence.
    """

    sequence_answers: SequenceAnswers
    statistics: dict[str, Tensor]
    state_bytes: int


class SessionEvaluator:
    """Has a method learn the sessions of a loader's sequences, and answer.

    Args:
        method: that learns, or a copy of it.
        name: what errors call the method.
        loader: of the sequences.
        supports_kept: whether each session is learned from the supports of all sessions so far; None: as the method
            declares.
    """

    def __init__(self, method: Method, name: str, loader: SequenceLoader, supports_kept: bool | None = None) -> None:
        self.name, self.loader = name, loader
        self.supports_kept = loader.keeps_supports(method) if supports_kept is None else supports_kept
        self.sessions, self.ways, self.classes = loader.sampler.shape.count, loader.ways, loader.n_base_classes
        pool = Query(loader.novel.features.unsqueeze(0), loader.novel.base_logits.unsqueeze(0))
        with name_method_in_errors(name, method, loader.base, pool, method.base):
            self._whole = (
                remake_method_for_ways(method, self.sessions * self.ways) if method.uses_all_images else method
            )
            self._base = method.base_logits(loader.base)[0]  # [B, K]
            if isinstance(method, AdditiveClassifier):
                self._novel = method.base_logits(pool)[0]  # [images, K]
                self._best = self._novel.max(-1).values
                self._queries, self._pool = method.transform_query(loader.base), method.transform_query(pool)
        self._cpu = self._base.device.type == "cpu"

    def evaluate(
        self, method: Method, batch: SequenceBatch, asked: slice, bias: ValidationBias | None, keep_margins: bool
    ) -> EvaluationResult:
        """Evaluate those sequences of a block that are asked for.

        Args:
            method: that answers.
            batch: of sequences.
            asked: which of them.
            bias: on the novel logits, to count hits with it too.
            keep_margins: of the queries, where there is no bias.
        """
        answered = self.predict_all_sessions(method, batch)
        answers = SequenceAnswers(*(part[asked] for part in answered.sequence_answers))
        statistics = {key: value[asked].cpu().numpy() for key, value in answered.statistics.items()}
        supports = self.loader.sampler.shape.supports
        tally = self.loader.image_tally
        if tally is not None:
            self._tally_image_hits(tally, answers, batch.novel_rows[asked], bias)
        counts = count_session_hits(answers, self.classes, self.ways)
        counts = replace(counts, state_bytes=answered.state_bytes, supports=supports)
        if bias is None:
            return EvaluationResult(counts, statistics, answers.to_margins() if keep_margins else None)
        counts = counts.with_calibrated_counts_of(
            count_session_hits(answers, self.classes, self.ways, bias.bias_on_novel_logits)
        )
        return EvaluationResult(counts, statistics, None, bias.apply_to_sequences(answers.to_margins(), self.sessions))

    def _tally_image_hits(
        self, tally: ImageTally, answers: SequenceAnswers, rows: Tensor, bias: ValidationBias | None
    ) -> None:
        """Count the queries of each image and its hits after each session; ``rows`` [E, T N q] are the novel ones."""
        images, there = self.loader.novel.n_images, answers.novel_query_is_counted  # [E, T, M]
        session, row = torch.arange(self.sessions).view(-1, 1), rows.unflatten(1, there.shape[1:]).cpu()
        tally.add_to_sum("base asked", answers.base_query_is_counted.sum(0).cpu().numpy())
        tally.add_counts_at_places("novel asked", self.sessions * images, (session * images + row)[there.cpu()].numpy())
        counted = _session_is_learned(answers.novel_margins).unsqueeze(-1) & there.unsqueeze(1)  # [E, T, T, M]
        for kind, value in [("", 0.0), *([("calibrated ", bias.bias_on_novel_logits)] if bias else [])]:
            limit = _round_up_to_single(value)
            base = (answers.base_margins >= limit) & answers.base_is_right_alone
            base = torch.cat(
                [answers.base_right_before_sessions.unsqueeze(1), base], 1
            ) & answers.base_query_is_counted.unsqueeze(1)
            tally.add_to_sum(f"{kind}base", base.sum(0, dtype=torch.int32).cpu().numpy())  # [T + 1, B]
            right = ((answers.novel_margins < limit) & answers.novel_is_right_alone & counted).flatten(2)  # [E, T, T M]
            sums = rows.new_zeros(images, self.sessions, dtype=torch.int32)
            sums.index_add_(0, rows.flatten(), right.mT.flatten(0, 1).int())
            tally.add_to_sum(f"{kind}novel", sums.mT.cpu().numpy())  # [T, images]

    def predict_all_sessions(self, method: Method, batch: SequenceBatch) -> SequenceEvaluation:
        """Return the method's answers after all sessions of a batch of sequences.

        Args:
            method: that answers.
            batch: of sequences.

        Raises:
            UserError: the method breaks its contract.
            NonFinite: logits that are NaN or +inf.
        """
        if isinstance(method, AdditiveClassifier) and not self.supports_kept and not method.uses_all_images:
            return self._predict_with_additive_classifier(method, batch)
        return self._predict_session_by_session(method, batch)

    def predict_last_joint_labels(self, method: Method, batch: SequenceBatch) -> Tensor:
        """Return the joint labels that are answered after the last session, [E, B + T N q]: base queries first.

        Args:
            method: that answers.
            batch: of sequences.

        Raises:
            UserError, NonFinite: as :meth:`predict_all_sessions`.
        """
        ((prediction, _),) = self._predictions_by_session(method, batch, self.sessions)
        bad = int(count_nonfinite_episodes(prediction, batch.hidden_classes).sum())
        check_finite(self.name, bad, len(batch), "sequences of a batch")
        return masked_logits(prediction, batch.hidden_classes).argmax(-1)

    def _best_base_logits(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the best base logits [E, B] before any session, and whether these are of the queries' own classes."""
        if not self.loader.sampler.hide:
            value, at = self._base.max(-1)
            return value.expand(len(batch), -1), (at == batch.base_labels).expand(len(batch), -1)
        value, at = (
            self._base.expand(len(batch), -1, -1).masked_fill(batch.hidden_classes.unsqueeze(1), -torch.inf).max(-1)
        )
        return value, at == batch.base_labels

    def _best_base_logits_of_novel(self, batch: SequenceBatch) -> Tensor:
        """Return the best base logits of the novel queries, [E, T N q]."""
        if not self.loader.sampler.hide:
            return self._best[batch.novel_rows]
        logits = gather_rows(self._novel, batch.novel_rows)
        return logits.masked_fill(batch.hidden_classes.unsqueeze(1), -torch.inf).max(-1).values

    def _predict_with_additive_classifier(self, method: AdditiveClassifier, batch: SequenceBatch) -> SequenceEvaluation:
        count, sessions = len(batch), self.sessions
        supports = batch.supports_by_session if method.uses_earlier_logits else [batch.sessions_as_episodes()]
        with name_method_in_errors(self.name, method, *supports, self._queries, self._pool, method.base):
            learned = _learn_sessions(method, supports, (count, sessions))
            states = [session.state for session in learned]
            logits, base = self._novel_logits(method, states, batch)
        own = torch.arange(self.ways, device=logits.device).repeat_interleave(self.loader.sampler.queries)
        place = torch.arange(sessions, device=logits.device)
        value, at = logits.unflatten(-1, (sessions, -1))[:, place, :, place].max(2)  # of the own session
        highest = _running_maximum(logits.amax(2)).unflatten(-1, (sessions, -1))  # [E, T, T, N q]
        before = torch.cat([torch.full_like(value[:1], -torch.inf), highest[:, place[:-1], place[1:]].movedim(0, 1)])
        right = ((at == own) & (value > before)).movedim(0, 1).unsqueeze(1)  # [E, 1, T, N q]
        first, base_right = self._best_base_logits(batch)
        novel_base = self._best_base_logits_of_novel(batch).unflatten(1, (sessions, -1))
        base = _running_maximum(base)
        self._check_finite((base[:, -1], highest[:, -1], first, novel_base), count)  # the best so far keep a NaN
        self._check_finite((base[:, 0], highest[:, 0]), count)  # and lose a -inf
        answers = SequenceAnswers(
            base_right,
            _margins_in_single_precision(first.unsqueeze(1), base),
            base_right.unsqueeze(1),
            batch.base_query_is_counted,
            _margins_in_single_precision(novel_base.unsqueeze(1), highest),
            right & (value.movedim(0, 1).unsqueeze(1) == highest),
            batch.novel_query_is_counted.unflatten(1, (sessions, -1)),
        )
        return SequenceEvaluation(
            answers,
            _join_statistics([session.statistics for session in learned]),
            _state_bytes_per_sequence(states, count),
        )

    def _novel_logits(
        self, method: AdditiveClassifier, states: Sequence[State], batch: SequenceBatch
    ) -> tuple[Tensor, Tensor]:
        """Logits of novel queries [E, T, N, T N q]; the best of each session's classes of base queries [E, T, B]."""
        count, classes = len(batch), (self.sessions, self.ways)
        if not method.per_class_state:
            parts = (self._queries.features, self._queries.base_logits)
            base, novel = (
                Query(*(part.expand(count, -1, -1) for part in parts)),
                self._transform_query_rows(batch.novel_rows),
            )
            best = torch.stack([method.class_logits(state, base).amax(-1) for state in states], 1)
            return torch.stack([method.class_logits(state, novel).mT for state in states], 1), best
        every = concatenate_trees(states)
        flat = tree_map(lambda x: x.flatten(0, 1).unsqueeze(0), every)
        few, each = (
            (QUERIES_PER_MATRIX_PRODUCT, 1) if self._cpu else (len(self._base), count)
        )  # base queries, sequences
        best_of_base, of_novel = [], []
        for parts in zip(self._queries.features.split(few, 1), self._queries.base_logits.split(few, 1), strict=True):
            of_base = method.class_logits(flat, Query(*parts))[0].mT  # [E T N, few]
            best_of_base.append(of_base.unflatten(0, (count, *classes)).amax(2))
        for part in (slice(at, at + each) for at in range(0, count, each)):
            state, novel = tree_map(itemgetter(part), every), self._transform_query_rows(batch.novel_rows[part])
            of_novel.append(method.class_logits(state, novel).mT)
        return torch.cat(of_novel).unflatten(1, classes), torch.cat(best_of_base, -1)

    def _transform_query_rows(self, rows: Tensor) -> Query:
        """Return the novel queries [E, R] as the method transforms them."""
        return Query(gather_rows(self._pool.features[0], rows), gather_rows(self._pool.base_logits[0], rows))

    def _predictions_by_session(
        self, method: Method, batch: SequenceBatch, first: int = 1
    ) -> Iterator[tuple[Prediction, State]]:
        """Return the answers after each session from ``first`` on to queries of classes met so far, and the state."""
        whole = self._predict_from_all_images(method, batch) if method.uses_all_images else None
        step_by_step = whole is None and not self.supports_kept
        state: State = None
        for t in range(1, self.sessions + 1):
            support, query = batch.supports_by_session[t - 1], batch.queries_after_sessions(t)
            queries, classes = query.features.shape[1], self.classes + t * self.ways
            with name_method_in_errors(self.name, method, support, query, method.base):
                if step_by_step:
                    learned = call_method(SessionOutput, method.learn, support, state)
                    state = learned.state
                if t < first:
                    continue
                if whole is not None:
                    prediction = Prediction(whole.logits[:, :queries, :classes], whole.statistics)
                elif self.supports_kept:
                    prediction = remake_method_for_ways(method, t * self.ways)(batch.join_supports(t), query)
                else:
                    answer = call_method(Prediction, method.answer, state, query)
                    prediction = Prediction(answer.logits, {**learned.statistics, **answer.statistics})
            yield check_shapes(self.name, prediction, len(batch), queries, classes), state

    def _predict_session_by_session(self, method: Method, batch: SequenceBatch) -> SequenceEvaluation:
        count, sessions, each = len(batch), self.sessions, batch.novel_queries.features.shape[1] // self.sessions
        base, base_right, novel, novel_right = [], [], [], []
        statistics: list[Mapping[str, Tensor]] = []
        own = torch.arange(sessions * self.ways, device=batch.hidden_classes.device)
        own = own.repeat_interleave(self.loader.sampler.queries)
        for t, answered in enumerate(self._predictions_by_session(method, batch), 1):
            prediction, state = answered
            logits = prediction.logits
            statistics.append(prediction.statistics)
            best, at = logits[..., : self.classes].masked_fill(batch.hidden_classes.unsqueeze(1), -torch.inf).max(-1)
            best_novel, novel_at = logits[..., self.classes :].max(-1)
            self._check_finite((best, best_novel), count, f" after session {t}")
            margin, split = _margins_in_single_precision(best, best_novel), self._base.shape[0]
            base.append(margin[:, :split])
            base_right.append(at[:, :split] == batch.base_labels)
            later = (0, (sessions - t) * each)
            novel.append(torch.nn.functional.pad(margin[:, split:], later))
            novel_right.append(torch.nn.functional.pad(novel_at[:, split:] == own[: t * each], later))
        # Session 0 is the classifier that is carried on, not one that the method never uses.
        says = type(method).base_logits is not Method.base_logits
        answers = SequenceAnswers(
            self._best_base_logits(batch)[1] if says else base_right[0],
            torch.stack(base, 1),
            torch.stack(base_right, 1),
            batch.base_query_is_counted,
            torch.stack(novel, 1).unflatten(-1, (sessions, -1)),
            torch.stack(novel_right, 1).unflatten(-1, (sessions, -1)),
            batch.novel_query_is_counted.unflatten(1, (sessions, -1)),
        )
        if method.uses_all_images:
            return SequenceEvaluation(
                answers,
                _join_statistics(statistics),
                _state_bytes_per_sequence(_keep_supports_as_state(batch.all_training_images(0)), 1),
            )
        if self.supports_kept:
            state = _keep_supports_as_state(batch.join_supports(sessions))
        return SequenceEvaluation(answers, _join_statistics(statistics), _state_bytes_per_sequence(state, count))

    def _predict_from_all_images(self, method: Method, batch: SequenceBatch) -> Prediction:
        """The answers of a classifier of all classes to all queries, trained on every image: a sequence at a time."""
        query, every = batch.queries_after_sessions(self.sessions), []
        with name_method_in_errors(self.name, method, query, method.base):
            for at in range(len(batch)):
                of_one = Query(query.features[at : at + 1], query.base_logits[at : at + 1])
                every.append(self._whole(batch.all_training_images(at), of_one))
        numbers = {name: torch.cat([answer.statistics[name] for answer in every]) for name in every[0].statistics}
        return Prediction(torch.cat([answer.logits for answer in every]), numbers)

    def _check_finite(self, logits: Sequence[Tensor], count: int, when: str = "") -> None:
        """Raise :class:`NonFiniteLogitsError` where the best logits of some sequence are NaN or infinite."""
        bad = torch.stack([~part.isfinite().flatten(1).all(1) for part in logits]).any(0)
        check_finite(self.name, int(bad.sum()), count, f"sequences of a batch{when}")


def _running_maximum(best: Tensor) -> Tensor:
    """Return the running maximum over sessions of [E, T, Q], in place; a NaN stays one."""
    for t in range(1, best.shape[1]):
        torch.maximum(best[:, t - 1], best[:, t], out=best[:, t])
    return best


def _margins_in_single_precision(base: Tensor, novel: Tensor) -> Tensor:
    """Return margins in single precision; +inf where all novel classes are at -inf, wherever base classes are."""
    return torch.where(novel == -torch.inf, torch.inf, base - novel).float()


def _join_statistics(sessions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the statistics of sequences, from the statistics of their sessions."""
    columns: dict[str, list[Tensor]] = {}
    for session in sessions:
        for name, value in session.items():
            columns.setdefault(name, []).append(value)
    stacked = {name: torch.stack(values) for name, values in columns.items()}
    return {name: x.amax(0) if name == UNCONVERGED_STATISTIC else x.mean(0) for name, x in stacked.items()}


def _learn_sessions(
    method: AdditiveClassifier, supports: Sequence[Support], shape: tuple[int, int]
) -> list[SessionOutput]:
    """Learn each session of a batch of sequences.

    Args:
        method: that learns.
        supports: of each session; where earlier logits are not used, all at once.
        shape: sequences and sessions.
    """
    if not method.uses_earlier_logits:
        whole = call_method(SessionOutput, method.learn_classes, supports[0], None)
        columns = [None if x is None else x.unflatten(0, shape).unbind(1) for x in list_leaves(whole.state)]
        statistics = {name: value.unflatten(0, shape).unbind(1) for name, value in whole.statistics.items()}
        return [
            SessionOutput(
                rebuild_tree(whole.state, [None if x is None else x[t] for x in columns]),
                {name: value[t] for name, value in statistics.items()},
            )
            for t in range(shape[1])
        ]
    learned: list[SessionOutput] = []
    for support in supports:
        query = method.transform_query(Query(support.features, support.base_logits))
        states = [session.state for session in learned]
        parts = [concatenate_trees(states)] if states and method.per_class_state else states
        earlier = [method.class_logits(state, query) for state in parts]
        before = torch.cat(earlier, -1) if earlier else None
        learned.append(call_method(SessionOutput, method.learn_classes, support, before))
    return learned


def _keep_supports_as_state(support: Support) -> State:
    return support.features, support.labels


def _state_bytes_per_sequence(state: State, sequences: int) -> int:
    """Return the bytes of one sequence's state."""
    return sum(x.numel() * x.element_size() for x in list_leaves(state) if x is not None) // sequences
