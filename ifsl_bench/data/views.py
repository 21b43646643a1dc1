"""Views of data sets: fewer base classes, or novel classes of another data set. Nothing is copied on the disk.

Which base classes stay is drawn, since files often list classes by kind, and depends on no training seed; a smaller
number takes a subset of a larger one's, so that figures over it (Ren et al. 2019, last figure) change the number alone.

With novel classes of another data set, novel/val and novel/test are that one's, called ``DATASET:CLASS``, and all else
is the first one's, as in the cross-domain setting of Chen et al. (ICLR 2019). Grey images beside coloured ones get
three equal channels.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.pools import Dataset, Pool

BASE_POOLS = ("base/train", "base/val", "base/test")


def chosen_classes(count: int, classes: int) -> np.ndarray:
    """The ``count`` of 0..classes-1 that stay, [count], ascending: those that come first in the order of a hash."""
    order = sorted(range(classes), key=lambda label: seed_of("base class", label))
    return np.sort(np.array(order[:count], dtype=np.int64))


class _View:
    """Some rows of a memory map, [n, H, W, C], or its grey images with three equal channels, made when asked for."""

    def __init__(self, images: np.ndarray, rows: np.ndarray | None = None, channels: int = 1) -> None:
        self.images, self.rows, self.channels = images, rows, channels
        count = len(images if rows is None else rows)
        self.shape = (count, *images.shape[1:-1], channels * images.shape[-1])
        self.ndim, self.dtype = images.ndim, images.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> np.ndarray:
        images = self.images[at if self.rows is None else self.rows[at]]
        return cast(np.ndarray, images if self.channels == 1 else np.repeat(images, self.channels, -1))


@dataclass(frozen=True)
class BaseSubset(Dataset):
    """The data set ``whole`` with its base pools cut down to the classes ``labels`` ([count], ascending).

    The fingerprint is the whole data set's; the number of base classes is in the task's definition.
    """

    whole: Dataset
    labels: np.ndarray

    def pool(self, name: str) -> Pool:
        pool = self.whole.pool(name)
        if name not in BASE_POOLS:
            return pool
        rows = np.concatenate([np.arange(pool.starts[label], pool.starts[label + 1]) for label in self.labels])
        # Features are small, and are used as an array; images stay on the disk.
        images = pool.images[rows] if pool.images.ndim == 2 else cast(np.ndarray, _View(pool.images, rows))
        counts = np.diff(pool.starts)[self.labels]
        return Pool(
            name,
            images,
            np.repeat(np.arange(len(self.labels), dtype=np.int64), counts),
            tuple(pool.classes[label] for label in self.labels),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )


def check_fewer(name: str, count: int, classes: int) -> None:
    """Raises :class:`UserError` where ``count`` is no part of a data set's ``classes`` base classes."""
    if count >= classes:
        raise UserError(
            f"data set {name!r} has {classes} base classes: a task of {count} cannot be made of it"
            + ("; that is the task without base-classes" if count == classes else "")
        )


def some_base_classes(dataset: Dataset, count: int) -> Dataset:
    """The data set with ``count`` of its base classes; raises :class:`UserError` where it has no more than so many."""
    pools = dict(dataset.manifest["pools"])
    classes = len(pools["base/train"]["classes"])
    check_fewer(dataset.name, count, classes)
    labels = chosen_classes(count, classes)
    for name in (name for name in BASE_POOLS if name in pools):
        images = dataset.pool(name).starts
        entry = {key: value for key, value in pools[name].items() if key != "statistics"}  # of all classes
        entry["classes"] = [entry["classes"][label] for label in labels]
        pools[name] = entry | {"shape": [int(np.diff(images)[labels].sum()), *entry["shape"][1:]]}
    return BaseSubset(dataset.name, dataset.folder, {**dataset.manifest, "pools": pools}, dataset, labels)


NOVEL = ("novel/val", "novel/test")  # the pools of the other data set


@dataclass(frozen=True)
class Crossed(Dataset):
    """The data set ``base`` with the pools :data:`NOVEL` of ``novel``.

    Name, folder and fingerprint are those of ``base``: what is made of its pools alone, like a pretraining, is the same
    for both.
    """

    base: Dataset
    novel: Dataset

    @property
    def novel_fingerprint(self) -> str:
        return self.novel.fingerprint

    @property
    def partial(self) -> bool:
        return self.base.partial or self.novel.partial

    def origin(self, pool: str) -> str:
        return prefix_of(self.novel.fingerprint) if pool in NOVEL else ""

    def pool(self, name: str) -> Pool:
        if name not in NOVEL:
            return self.base.pool(name)
        pool = replace(self.novel.pool(name), classes=tuple(self.manifest["pools"][name]["classes"]))
        if grey_beside_colour(self.base.shape, self.novel.shape):
            return replace(pool, images=cast(np.ndarray, _View(pool.images, channels=3)))
        return pool

    def check_images(self, pool: str) -> None:
        (self.novel if pool in NOVEL else self.base).check_images(pool)


def grey_beside_colour(shape: Sequence[int], grey: Sequence[int]) -> bool:
    """Returns whether ``grey`` [H, W, C] is of grey images of the size of these coloured ones."""
    return len(shape) == 3 and tuple(grey) == (*shape[:2], 1) and shape[2] == 3


def prefix_of(fingerprint: str) -> str:
    """The part of a fingerprint that names of files have."""
    return fingerprint[:12]


def check_crossing(
    base: str, base_shape: Sequence[int], novel: str, novel_shape: Sequence[int], pools: Container[str]
) -> None:
    """Raises :class:`UserError` where novel classes of one data set cannot stand beside base classes of another.

    Args:
        base, novel: their names.
        base_shape, novel_shape: of their images [H, W, C], or features [D].
        pools: that ``novel`` has.
    """
    if tuple(base_shape) != tuple(novel_shape) and not grey_beside_colour(base_shape, novel_shape):
        sizes = ["x".join(map(str, sides)) for sides in (novel_shape, base_shape)]
        raise UserError(
            f"novel classes of {novel!r} do not fit base classes of {base!r}: {sizes[0]} beside {sizes[1]}; both need "
            f"images of one size, or features of one length"
        )
    for pool in NOVEL:
        if pool not in pools:
            raise UserError(f"novel classes cannot come from data set {novel!r}: it has no pool {pool}")


def crossed(base: Dataset, novel: Dataset) -> Crossed:
    """The view of both; raises :class:`UserError` where their images differ in size, or ``novel`` lacks a pool."""
    pools, others = base.manifest["pools"], novel.manifest["pools"]
    check_crossing(base.name, base.shape, novel.name, novel.shape, others)
    taken = {
        pool: {
            **others[pool],
            "shape": [*others[pool]["shape"][:1], *base.shape],
            "classes": [f"{novel.name}:{name}" for name in others[pool]["classes"]],
        }
        for pool in NOVEL
    }
    return Crossed(base.name, base.folder, {**base.manifest, "pools": {**pools, **taken}}, base, novel)
