"""Episodes with features: what a method is given of them, what is kept from it, and how its answers are counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.device import copy_tensors_to_numpy
from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.plugin.method import (
    Method,
    Prediction,
    Query,
    Support,
    check_finite,
    check_prediction,
    check_shapes,
    count_nonfinite_episodes,
    masked_logits,
    predict_with_method,
)
from ifsl_bench.protocols.calibration import Margins, ValidationBias
from ifsl_bench.protocols.image_counts import ImageHits, ImageTally, PoolHits
from ifsl_bench.protocols.loader import Batch, BatchEvaluator, EvaluationResult, Loader
from ifsl_bench.protocols.metrics import EPISODE_COUNT_NAMES, EpisodeHitCounts
from ifsl_bench.protocols.sampling.episodes import EpisodeIndices, EpisodeSampler
from ifsl_bench.solvers.numba_code_cache import kernels_loaded


def predict_batch(method: Method, name: str, batch: Batch, numbers: bool = True) -> Prediction:
    """Return the method's checked answer to a batch; see :func:`check_prediction` for what is refused.

    Args:
        method: that answers.
        name: what errors call it.
        batch: of episodes.
        numbers: whether its logits are looked at too, for which an accelerator has to be waited for.
    """
    episodes, queries = batch.query_labels.shape
    prediction = predict_with_method(method, name, batch.support, batch.query)
    if numbers:
        return check_prediction(name, prediction, batch.masked_base_classes, queries, method.ways)
    return check_shapes(name, prediction, episodes, queries, batch.support.hidden.shape[1] + method.ways)


class EpisodeLoader(Loader):
    """Batches of a stream of episodes, with features.

    Args:
        sampler: draws the indices.
        novel: the pool of the novel classes.
        base: the pool of the base queries (the same object where they share one); None where there are none. Then no
            base class is in the softmax either: all base logits are -inf, though no class is hidden for that.
    """

    def __init__(self, sampler: EpisodeSampler, novel: FeaturePool, base: FeaturePool | None) -> None:
        self.sampler, self.novel, self.base = sampler, novel, base or novel
        self.joint = base is not None
        self.ways, self.n_base_classes = sampler.shape.ways, sampler.base_classes

    def with_sampler(self, sampler: EpisodeSampler) -> EpisodeLoader:
        """Return a loader of the same pools with another sampler."""
        return EpisodeLoader(sampler, self.novel, self.base if self.joint else None)

    @property
    def estimated_bytes_per_item(self) -> int:
        """Bytes of an episode: features and logits."""
        shape = self.sampler.shape
        images = shape.base_queries + shape.ways * (shape.novel_queries + self.sampler.shots)
        return 4 * images * (self.novel.features.shape[1] + 2 * self.n_base_classes + self.ways)

    @property
    def device(self) -> torch.device:
        return self.novel.features.device

    def load_first_episodes(self, count: int) -> Batch:
        return self.load_batch(0, count)

    def make_evaluator(
        self, method: Method, name: str, bias: ValidationBias | None, keep_margins: bool
    ) -> BatchEvaluator:
        return partial(self._evaluate, name, bias, keep_margins)

    def _evaluate(
        self, name: str, bias: ValidationBias | None, keep_margins: bool, method: Method, batch: Batch, asked: slice
    ) -> EvaluationResult:
        """Evaluate those episodes of a block that are asked for."""
        spec = self.sampler.shape
        outcome = count_episode_hits(name, predict_batch(method, name, batch, numbers=False), batch, spec.base_queries)
        if self.image_tally is not None:
            self._tally_image_hits(self.image_tally, batch, outcome, asked, bias)
        arrays = {key: value[asked] for key, value in outcome.counts.items()}
        counts = EpisodeHitCounts(
            **arrays, base_queries=spec.base_queries, novel_queries=spec.ways * spec.novel_queries
        )
        # A view would keep its batch.
        statistics = {key: value[asked].copy() for key, value in outcome.statistics.items()}
        if outcome.margins is None or outcome.doubled_ordered_pairs is None:
            return EvaluationResult(counts, statistics)
        margins = Margins(outcome.margins.base_margins[asked], outcome.margins.novel_margins[asked])
        counts = replace(counts, pairs=outcome.doubled_ordered_pairs[asked])
        if bias is None:
            return EvaluationResult(counts, statistics, margins if keep_margins else None)
        biased = bias.apply_to_episodes(margins)
        counts = replace(counts, calibrated_base=biased.base_joint, calibrated_novel=biased.novel_joint)
        return EvaluationResult(counts, statistics, None, biased)

    def _tally_image_hits(
        self, tally: ImageTally, batch: Batch, outcome: EpisodeHits, asked: slice, bias: ValidationBias | None
    ) -> None:
        """Count the queries of each image and its hits, apart in even and odd episodes."""
        assert batch.query_images is not None
        rows, novel = (x[asked].cpu().numpy() for x in (batch.query_images, batch.query_is_novel))
        half = (batch.first_episode_number + np.arange(len(batch)))[asked, None] % 2
        joint, alone = (right[asked] for right in outcome.is_right)
        for name, pool, of_pool in (("base", self.base, ~novel), ("novel", self.novel, novel)):
            places = (half * pool.n_images + rows)[of_pool]
            flags = {"asked": np.ones_like(places, bool), "joint": joint[of_pool], "alone": alone[of_pool]}
            if bias is not None and outcome.margins is not None:
                margins: np.ndarray = getattr(outcome.margins, f"{name}_margins")[asked].reshape(-1)
                exact = np.array([bias.bias_on_novel_logits])  # see Margins.joint_hits_with_bias
                flags["calibrated"] = margins < exact if name == "novel" else margins >= exact
            for what, which in flags.items():
                tally.add_counts_at_places(f"{name} {what}", 2 * pool.n_images, places[which])

    def collect_image_hits(self, biased: bool) -> ImageHits | None:
        if self.image_tally is None or not self.image_tally.sums:
            return None
        pools = {}
        for name, pool in (("base", self.base), ("novel", self.novel)):
            sums = {
                key.split()[1]: x.reshape(2, -1) for key, x in self.image_tally.sums.items() if key.split()[0] == name
            }
            asked = sums.pop("asked")
            if biased:
                sums["joint"] = sums["calibrated"]
            if asked.any():
                pools[name] = PoolHits(np.diff(pool.class_starts), 1, asked, sums)
        return ImageHits(pools, right_counts_are_shares=False).group_to_fit_result_file()

    def predict_joint_label_batches(
        self, method: Method, name: str, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, ...]]:
        for block in blocks:
            drawn, batch = self.sampler.sample(*block), self.load_batch(*block)
            answer = masked_logits(predict_batch(method, name, batch), batch.masked_base_classes).argmax(-1)  # [E, Q]
            yield (
                drawn.episode_numbers.unsqueeze(1),
                batch.query_labels,
                answer,
                drawn.classes,
                torch.ones_like(batch.query_is_novel),
            )

    def load_batch(self, start: int, count: int) -> Batch:
        """Return episodes ``start`` to ``start + count - 1``.

        Args:
            start: the first episode.
            count: how many episodes.
        """
        drawn = self.sampler.sample(start, count)
        support, query = self._draw_view_rows(drawn)
        labels = torch.arange(self.ways, device=support.device).repeat_interleave(self.sampler.shots)
        # A kernel gathers features in one pass, and gives the same batches.
        by_kernel = kernels_loaded(self.novel.features) and self.novel.features.dtype in KERNEL_DTYPES
        places = None if by_kernel else self._find_query_positions(drawn.query_is_novel)

        def gathered(name: str) -> tuple[Tensor, Tensor]:
            """[E, S, ...] and [E, Q, ...], each query from its own pool."""
            if places is None:
                return self._gather_by_kernel(name, support), self._gather_by_kernel(name, query, drawn.query_is_novel)
            return gather_rows(getattr(self.novel, name), support), self._gather_queries(query, name, *places)

        if self.joint:
            support_logits, query_logits = gathered("base_logits")
        else:
            nothing = self.novel.base_logits.new_full((), -torch.inf)
            support_logits, query_logits = (
                nothing.expand(*rows.shape, self.n_base_classes) for rows in (support, query)
            )
        support_features, query_features = gathered("features")
        return Batch(
            Support(support_features, labels.expand(count, -1), drawn.hidden_classes, support_logits),
            Query(query_features, query_logits),
            drawn.query_labels,
            drawn.query_is_novel,
            self.joint,
            drawn.query,
            start,
        )

    def _draw_view_rows(self, drawn: EpisodeIndices) -> tuple[Tensor, Tensor]:
        """Return rows of the banks: each image in an augmented view, drawn for each episode."""
        views = self.novel.n_views
        if views == 1:
            return drawn.support, drawn.query
        chosen = self.sampler.draw_integers(
            drawn.episode_numbers, 5, drawn.support.shape[1] + drawn.query.shape[1], views
        )
        support, query = chosen.split([drawn.support.shape[1], drawn.query.shape[1]], 1)
        images = torch.where(drawn.query_is_novel, self.novel.n_images, self.base.n_images)
        return drawn.support + support * self.novel.n_images, drawn.query + query * images

    def _gather_by_kernel(self, name: str, rows: Tensor, novel: Tensor | None = None) -> Tensor:
        """Gather [E, R, ...] from the pool of novel classes; or from both, where `novel` [E, R] bool."""
        from ifsl_bench.solvers.numba_episodes import gather_episodes, run_kernel_in_threads

        ours, theirs = (getattr(pool, name) for pool in (self.novel, self.base))
        out = np.empty((*rows.shape, ours.shape[1]), np.float32)
        at, there = rows.contiguous().numpy(), np.empty(len(rows), np.bool_)
        # On this thread alone: it is the one that gathers ahead while others compute.
        second = np.ones(rows.shape, np.bool_) if novel is None else novel.contiguous().numpy()
        run_kernel_in_threads(gather_episodes, len(out), 1, at, second, theirs.numpy(), ours.numpy(), out, there)
        if not there.all():
            raise IndexError(f"rows of episodes lie beyond the pools {self.novel.pool_name} and {self.base.pool_name}")
        return torch.from_numpy(out)

    def _gather_queries(self, rows: Tensor, name: str, base_at: Tensor, novel_at: Tensor) -> Tensor:
        """Gather queries [E, Q, ...], each from its own pool of the two."""
        ours, theirs = getattr(self.novel, name), getattr(self.base, name)
        if self.novel is self.base:
            return gather_rows(ours, rows)
        flat = rows.flatten()
        out = ours.new_empty(len(flat), ours.shape[1])
        for pool, at in ((theirs, base_at), (ours, novel_at)):
            out.index_copy_(0, at, pool.index_select(0, flat.index_select(0, at)))
        return out.view(*rows.shape, -1)

    def _find_query_positions(self, novel: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the base and the novel queries among all of a batch, [E * B] and [E * (Q - B)].

        Each episode has equally many of either, so nobody has to wait for their number, as with ``nonzero``.
        """
        base = self.sampler.shape.base_queries
        at = novel.to(torch.uint8).argsort(dim=1, stable=True)  # [E, Q], base queries first
        at = at + torch.arange(len(at), device=at.device).unsqueeze(1) * at.shape[1]
        return at[:, :base].flatten(), at[:, base:].flatten()


def gather_features_and_base_logits(pool: FeaturePool, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return features [E, R, D] and base logits [E, R, K] of images of a pool.

    Args:
        pool: of the images.
        rows: [E, R] rows of the images in the pool.
    """
    return gather_rows(pool.features, rows), gather_rows(pool.base_logits, rows)


def gather_rows(bank: Tensor, rows: Tensor) -> Tensor:
    """Return ``bank[rows]``, [E, R, ...].

    Args:
        bank: [images, ...] features or logits of a pool.
        rows: [E, R] rows of the bank.
    """
    return bank.index_select(0, rows.flatten()).view(*rows.shape, -1)


KERNEL_DTYPES = (torch.float32, torch.float64)  # of what a kernel reads; maps are float16, images uint8


class EpisodeHits(NamedTuple):
    """Hits, margins and pairs of E episodes.

    Attributes:
        counts: by the names of ``COUNTS``, int64 [E] each.
        statistics: the method's own numbers, name -> [E].
        margins: of the queries; None where there are no base queries, as are the pairs.
        doubled_ordered_pairs: [E], see :meth:`Margins.doubled_ordered_pairs`.
        is_right: bool [2, E, Q], queries that are right among all classes, and among the classes of their kind.
    """

    counts: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    margins: Margins | None
    doubled_ordered_pairs: np.ndarray | None
    is_right: np.ndarray


def count_episode_hits(name: str, prediction: Prediction, batch: Batch, base_queries: int) -> EpisodeHits:
    """Return the hits of an answer whose form has been checked.

    Args:
        name: what errors call the method.
        prediction: its answer to the batch.
        batch: of E episodes.
        base_queries: in each episode.

    Raises:
        NonFinite: logits that are NaN or infinite, but for -inf of classes out of play.
    """
    count = (
        _count_by_kernel
        if kernels_loaded(prediction.logits) and prediction.logits.dtype in KERNEL_DTYPES
        else _count_in_torch
    )
    counts, statistics, margins, pairs, right, bad = count(prediction, batch, base_queries)
    check_finite(name, int(bad.sum()), len(batch))
    by_name = (
        dict(zip(EPISODE_COUNT_NAMES, counts, strict=True)),
        dict(zip(prediction.statistics, statistics, strict=True)),
    )
    return EpisodeHits(*by_name, margins, pairs, right) if base_queries else EpisodeHits(*by_name, None, None, right)


HitArrays = tuple[list[np.ndarray], list[np.ndarray], Margins, np.ndarray, np.ndarray, np.ndarray]


def _count_by_kernel(prediction: Prediction, batch: Batch, base_queries: int) -> HitArrays:
    """Count hits in one pass over the logits, see `ifsl_bench.solvers.numba_episodes`."""
    from ifsl_bench.solvers.numba_backend import run_kernel
    from ifsl_bench.solvers.numba_episodes import count_hits as count_hits

    inputs = (prediction.logits, batch.masked_base_classes, batch.query_labels, batch.query_is_novel)
    logits, masked, labels, novel = (x.detach().contiguous().numpy() for x in inputs)
    episodes, queries = labels.shape
    if (np.count_nonzero(novel, 1) != queries - base_queries).any():  # for the kernel would write elsewhere
        raise ValueError(f"every episode needs {base_queries} base queries among its {queries}")
    counts, pairs = np.empty((4, episodes), np.int64), np.empty(episodes, np.int64)
    margins = (np.empty((episodes, size), np.float32) for size in (base_queries, queries - base_queries))
    both, bad, right = Margins(*margins), np.empty(episodes, np.bool_), np.empty((2, *labels.shape), np.bool_)
    run_kernel(
        count_hits,
        episodes,
        logits,
        masked,
        labels,
        novel,
        counts,
        both.base_margins,
        both.novel_margins,
        pairs,
        bad,
        right,
    )
    return [*counts], copy_tensors_to_numpy([*prediction.statistics.values()]), both, pairs, right, bad


def _count_in_torch(prediction: Prediction, batch: Batch, base_queries: int) -> HitArrays:
    """Count hits in torch; the host waits for an accelerator once.

    A novel class at -inf stays there with any bias, so that the margin of its queries is then +inf.
    """
    classes = batch.support.hidden.shape[1]
    logits = masked_logits(prediction, batch.masked_base_classes)  # [E, Q, K + N]
    base, base_at = logits[..., :classes].max(-1)  # [E, Q]
    novel, novel_at = logits[..., classes:].max(-1)
    alone = torch.where(batch.query_is_novel, novel_at + classes, base_at) == batch.query_labels
    joint = alone & torch.where(batch.query_is_novel, novel > base, base >= novel)
    counts = [
        (right & of_side).sum(1)
        for of_side in (~batch.query_is_novel, batch.query_is_novel)
        for right in (joint, alone)
    ]
    margin = torch.where(novel == -torch.inf, torch.inf, base - novel).float().masked_fill(~alone, torch.nan)
    right = torch.stack([joint, alone])
    values = (
        count_nonfinite_episodes(prediction, batch.masked_base_classes),
        margin,
        batch.query_is_novel,
        right,
        *counts,
        *prediction.statistics.values(),
    )
    bad, margin_values, is_novel, right_values, *rest = copy_tensors_to_numpy(values)
    sides = (margin_values[of_side].reshape(len(margin_values), -1) for of_side in (~is_novel, is_novel))
    margins = Margins(*sides)
    pairs = margins.doubled_ordered_pairs() if base_queries else bad
    return [x.astype(np.int64) for x in rest[:4]], rest[4:], margins, pairs, right_values, bad
