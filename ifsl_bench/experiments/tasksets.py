"""Episodes as learn2learn's task data sets; see :func:`ifsl_bench.to_learn2learn`.

Imported when it is used, for the package it builds on: a class at the top of a module is one that processes can hand to
each other, as ``DataLoader`` does with workers that it spawns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ifsl_bench.data.pools import Dataset
from ifsl_bench.plugin.learn2learn import load_learn2learn
from ifsl_bench.protocols.sampling.episodes import EpisodeIndices, EpisodeSampler
from ifsl_bench.utils.errors import UserError

Taskset: Any = load_learn2learn().data.Taskset
EPISODES_DRAWN_AT_ONCE = 64  # episodes drawn at a time, in the time of one


class SideImages(TorchDataset[Any]):
    """The images of one side: from the pool of novel classes, and then the base queries, if any.

    Labels are the novel pool's, and go on with the base pool's.

    Args:
        dataset: a prepared one; a copy in another process opens it again.
        names: of one or two pools.
        convert: from uint8 [n, C, H, W], or features [n, D], to the tensors of tasks.
    """

    def __init__(self, dataset: Dataset, names: Sequence[str], convert: Callable[[Tensor], Tensor]) -> None:
        self.source, self.names, self.convert = dataset, tuple(names), convert
        self.pools = pools = [dataset.pool(name) for name in names]
        self.labels = np.concatenate([pools[0].labels, *(p.labels + len(pools[0].class_names) for p in pools[1:])])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.names, self.convert)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.batch([range(len(self))[index]])[0], int(self.labels[index])

    def batch(self, rows: Sequence[int]) -> Tensor:
        """[n, C, H, W] as ``convert`` makes them, or features [n, D]."""
        first = len(self.pools[0])  # row of the first base image
        images = [self.pools[0].images[row] if row < first else self.pools[1].images[row - first] for row in rows]
        stacked = torch.from_numpy(np.stack(images))
        return self.convert(stacked.permute(0, 3, 1, 2) if stacked.dim() == 4 else stacked)

    def indices_by_label(self) -> dict[int, list[int]]:
        """Return the images of each label, as their numbers in this data set."""
        counts = np.concatenate([np.diff(pool.class_starts) for pool in self.pools])
        rows_of_labels = np.split(np.arange(len(self)), np.cumsum(counts)[:-1])
        return {label: rows.tolist() for label, rows in enumerate(rows_of_labels)}


class EpisodeTasks(Taskset):
    """The episodes of one stream as tasks. Item i is episode i, in whatever order items are read.

    Args:
        dataset: a ``MetaDataset`` of :class:`SideImages`.
        places: where the rows of a task come from, [S + Q] numbers: below S for support and from S for query rows.
        count: how many tasks there are.
    """

    def __init__(self, dataset: Any, sampler: EpisodeSampler, places: Tensor, count: int) -> None:
        super().__init__(dataset, num_tasks=count)
        self.sampler, self.places = sampler, places
        self._block: tuple[int, EpisodeIndices] | None = None  # the last that was drawn, and its number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self.sampler, self.places, self.num_tasks)

    def _draw_episode(self, i: int) -> tuple[EpisodeIndices, int]:
        """Episodes among which number i is, and its place there."""
        block, e = divmod(range(len(self))[i], EPISODES_DRAWN_AT_ONCE)
        if self._block is None or self._block[0] != block:
            self._block = block, self.sampler.sample(block * EPISODES_DRAWN_AT_ONCE, EPISODES_DRAWN_AT_ONCE)
        return self._block[1], e

    def __getitem__(self, i: int) -> Any:
        drawn, e = self._draw_episode(i)
        images: SideImages = self.dataset.dataset
        ways, classes = drawn.classes.shape[1], drawn.hidden_classes.shape[1]
        beyond = len(images.pools[0]) if len(images.pools) > 1 else 0  # else base queries are of the same pool
        rows = torch.cat([drawn.support[e], drawn.query[e] + beyond * ~drawn.query_is_novel[e]])
        of_query = drawn.query_labels[e]
        of_query = torch.where(of_query >= classes, of_query - classes, of_query + ways)
        of_support = torch.arange(ways).repeat_interleave(drawn.support.shape[1] // ways)
        return [images.batch(rows[self.places].tolist()), torch.cat([of_support, of_query])[self.places]]

    def split(self, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Support X and y, query X and y of one of these tasks; each in our order, so support is sorted by class.

        Args:
            X: [S + Q, ...], a task's images, or a network's outputs on them.
            y: [S + Q], its labels.

        Raises:
            UserError: they have other numbers of rows, as a batch of tasks has.
        """
        if not len(X) == len(y) == len(self.places):
            raise UserError(
                f"a task has {len(self.places)} rows, X has {len(X)} and y has {len(y)}; give one task as it came"
            )
        support = self.places < self.sampler.shape.ways * self.sampler.shots
        return X[support], y[support], X[~support], y[~support]

    def hidden(self, i: int) -> Tensor:
        """Return the labels of the base classes that are out of play in task i."""
        drawn, e = self._draw_episode(i)
        return drawn.hidden_classes[e].nonzero().flatten() + drawn.classes.shape[1]
