"""The way from indices to features: what a method is given of an episode, and what is kept from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.plugin.method import Query, Support
from ifsl_bench.protocols.episodes import Episodes, Sampler
from ifsl_bench.solvers import numba_backend as compiled


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
        """Episodes ``start`` to ``stop - 1`` of the batch."""
        s, q, at = self.support, self.query, slice(start, stop)
        return Batch(
            Support(s.features[at], s.labels[at], s.hidden[at], s.base_logits[at]),
            Query(q.features[at], q.base_logits[at]),
            self.labels[at],
            self.novel[at],
            self.joint,
        )


class EpisodeLoader:
    """Batches of a stream of episodes, with features.

    Args:
        sampler: draws the indices.
        novel: the pool of the novel classes.
        base: the pool of the base queries (the same object where they share one); None where there are none. Then no
            base class is in the softmax either: all base logits are -inf, though no class is hidden for that.
    """

    def __init__(self, sampler: Sampler, novel: FeaturePool, base: FeaturePool | None) -> None:
        self.sampler, self.novel, self.base = sampler, novel, base or novel
        self.joint = base is not None
        self.ways, self.classes = sampler.shape.ways, sampler.base_classes

    def drawn_by(self, sampler: Sampler) -> EpisodeLoader:
        """The same pools with another sampler."""
        return EpisodeLoader(sampler, self.novel, self.base if self.joint else None)

    @property
    def each(self) -> int:
        """Bytes of an episode: features and logits."""
        shape = self.sampler.shape
        images = shape.base_queries + shape.ways * (shape.novel_queries + self.sampler.shots)
        return 4 * images * (self.novel.features.shape[1] + 2 * self.classes + self.ways)

    def batch(self, start: int, count: int) -> Batch:
        """Episodes ``start`` to ``start + count - 1``."""
        drawn = self.sampler.sample(start, count)
        support, query = self._views(drawn)
        labels = torch.arange(self.ways, device=support.device).repeat_interleave(self.sampler.shots)
        # A kernel gathers in one pass, and gives the same batches.
        places = None if compiled.kernels_loaded(self.novel.features) else self._places(drawn.query_novel)

        def gathered(name: str) -> tuple[Tensor, Tensor]:
            """[E, S, ...] and [E, Q, ...], each query from its own pool."""
            if places is None:
                return self._by_kernel(name, support), self._by_kernel(name, query, drawn.query_novel)
            return take_rows(getattr(self.novel, name), support), self._query(query, name, *places)

        if self.joint:
            support_logits, query_logits = gathered("base_logits")
        else:
            nothing = self.novel.base_logits.new_full((), -torch.inf)
            support_logits, query_logits = (nothing.expand(*rows.shape, self.classes) for rows in (support, query))
        support_features, query_features = gathered("features")
        return Batch(
            Support(support_features, labels.expand(count, -1), drawn.hidden, support_logits),
            Query(query_features, query_logits),
            drawn.query_labels,
            drawn.query_novel,
            self.joint,
        )

    def _views(self, drawn: Episodes) -> tuple[Tensor, Tensor]:
        """Rows of the banks: each image in one of its augmented views, drawn anew in each episode."""
        views = self.novel.views
        if views == 1:
            return drawn.support, drawn.query
        chosen = self.sampler.integers(drawn.index, 5, drawn.support.shape[1] + drawn.query.shape[1], views)
        support, query = chosen.split([drawn.support.shape[1], drawn.query.shape[1]], 1)
        images = torch.where(drawn.query_novel, self.novel.images, self.base.images)
        return drawn.support + support * self.novel.images, drawn.query + query * images

    def _by_kernel(self, name: str, rows: Tensor, novel: Tensor | None = None) -> Tensor:
        """[E, R, ...] of the pool of novel classes; or of both, where `novel` [E, R] bool."""
        from ifsl_bench.solvers import numba_gathering as gathering
        from ifsl_bench.solvers import numba_threads as threads

        ours, theirs = (getattr(pool, name) for pool in (self.novel, self.base))
        out = np.empty((*rows.shape, ours.shape[1]), np.float32)
        at, there = rows.contiguous().numpy(), np.empty(len(rows), np.bool_)
        # On this thread alone: it is the one that gathers ahead while others compute.
        second = np.ones(rows.shape, np.bool_) if novel is None else novel.contiguous().numpy()
        threads.each(gathering.gather, len(out), 1, at, second, theirs.numpy(), ours.numpy(), out, there)
        if not there.all():
            raise IndexError(f"rows of episodes lie beyond the pools {self.novel.name} and {self.base.name}")
        return torch.from_numpy(out)

    def _query(self, rows: Tensor, name: str, base_at: Tensor, novel_at: Tensor) -> Tensor:
        """[E, Q, ...] of the two pools, each query from its own."""
        ours, theirs = getattr(self.novel, name), getattr(self.base, name)
        if self.novel is self.base:
            return take_rows(ours, rows)
        flat = rows.flatten()
        out = ours.new_empty(len(flat), ours.shape[1])
        for pool, at in ((theirs, base_at), (ours, novel_at)):
            out.index_copy_(0, at, pool.index_select(0, flat.index_select(0, at)))
        return out.view(*rows.shape, -1)

    def _places(self, novel: Tensor) -> tuple[Tensor, Tensor]:
        """The places of the base and the novel queries among all of a batch, [E * B] and [E * (Q - B)].

        Each episode has equally many of either, so nobody has to wait for their number, as with ``nonzero``.
        """
        base = self.sampler.shape.base_queries
        at = novel.to(torch.uint8).argsort(dim=1, stable=True)  # [E, Q], base queries first
        at = at + torch.arange(len(at), device=at.device).unsqueeze(1) * at.shape[1]
        return at[:, :base].flatten(), at[:, base:].flatten()


def take_images(pool: FeaturePool, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Features and base logits of images [E, R] of a pool."""
    return take_rows(pool.features, rows), take_rows(pool.base_logits, rows)


def take_rows(bank: Tensor, rows: Tensor) -> Tensor:
    """bank[rows [E, R]], [E, R, ...]."""
    return bank.index_select(0, rows.flatten()).view(*rows.shape, -1)
