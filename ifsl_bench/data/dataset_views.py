"""Views of data sets: fewer or other base classes, or novel classes of another data set; nothing is copied.

Which base classes stay is drawn, since files often list classes by kind, and depends on no training seed; a smaller
number takes a subset of a larger one's, so that figures over it (Ren et al. 2019, last figure) change the number alone.

Other base classes of a list of sessions are drawn among all of its classes, as many as the list has; the rest are
novel. A class takes its training images along, to base/train and base/val or to novel/support, and its test images.

With novel classes of another data set, novel/val and novel/test are that one's, called ``DATASET:CLASS``, and all else
is the first one's, as in the cross-domain setting of Chen et al. (ICLR 2019). Grey images beside coloured ones get
three equal channels.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ifsl_bench.data.pools import SUPPORT_POOL_NAME, Dataset, Pool
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.utils.errors import UserError

BASE_POOLS = ("base/train", "base/val", "base/test")


def choose_kept_base_classes(count: int, classes: int) -> np.ndarray:
    """Return the base classes that stay, the first in the order of a hash; [count], ascending.

    Args:
        count: Number of classes that stay.
        classes: Number of all base classes.
    """
    order = sorted(range(classes), key=lambda label: derive_seed("base class", label))
    return np.sort(np.array(order[:count], dtype=np.int64))


class _ConcatenatedImages:
    """Rows of several memory maps [n, H, W, C], as if concatenated, with ``channels`` equal channels for one."""

    def __init__(self, parts: Sequence[np.ndarray], rows: np.ndarray, channels: int = 1) -> None:
        self.parts, self.rows, self.channels = parts, rows, channels
        self.starts = np.cumsum([0, *map(len, parts)])
        self.shape = (len(rows), *parts[0].shape[1:-1], channels * parts[0].shape[-1])
        self.ndim, self.dtype = parts[0].ndim, parts[0].dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> np.ndarray:
        rows = self.rows[at]
        images = np.empty((*np.shape(rows), *self.parts[0].shape[1:]), self.dtype)
        of = np.searchsorted(self.starts, rows, "right") - 1
        for number, part in enumerate(self.parts):
            images[of == number] = part[rows[of == number] - self.starts[number]]
        return images if self.channels == 1 else np.repeat(images, self.channels, -1)


TRAIN_POOLS, TEST_POOLS = ("base/train", "base/val", SUPPORT_POOL_NAME), ("base/test", "novel/test")


def draw_base_class_names(classes: Sequence[str], count: int, number: int) -> frozenset[str]:
    """Return the base classes of draw ``number`` among the classes of a list.

    Args:
        classes: Of the list.
        count: Number of base classes.
        number: Of the draw.
    """
    return frozenset(sorted(classes, key=lambda name: derive_seed("base order", number, name))[:count])


@dataclass(frozen=True)
class RegroupedDataset(Dataset):
    """The data set ``whole`` with classes or images in other pools.

    The fingerprint is the whole data set's; the change is in the task's definition.

    Attributes:
        rows_by_pool_and_class: Pool -> class -> rows of its :attr:`original_pools_by_pool`, as if concatenated.
        original_pools_by_pool: Pool -> pools of the whole data set with its images.
    """

    original_dataset: Dataset
    rows_by_pool_and_class: Mapping[str, Mapping[str, np.ndarray]]
    original_pools_by_pool: Mapping[str, Sequence[str]]

    def pool(self, name: str) -> Pool:
        if name not in self.rows_by_pool_and_class:
            return self.original_dataset.pool(name)
        parts = [self.original_dataset.pool(pool).images for pool in self.original_pools_by_pool[name]]
        rows, counts = (
            np.concatenate([*self.rows_by_pool_and_class[name].values()]),
            [*map(len, self.rows_by_pool_and_class[name].values())],
        )
        # Features are small, and are used as an array; images stay on the disk.
        images = (
            np.concatenate(parts)[rows] if parts[0].ndim == 2 else cast(np.ndarray, _ConcatenatedImages(parts, rows))
        )
        labels, starts = np.repeat(np.arange(len(counts), dtype=np.int64), counts), np.cumsum([0, *counts])
        return Pool(name, images, labels, tuple(self.rows_by_pool_and_class[name]), starts)

    def check_image_checksum(self, pool: str) -> None:
        for name in self.original_pools_by_pool.get(pool, [pool]):
            self.original_dataset.check_image_checksum(name)


def _make_regrouped_dataset(
    dataset: Dataset, rows: Mapping[str, Mapping[str, np.ndarray]], sources: Mapping[str, Sequence[str]]
) -> RegroupedDataset:
    pools = dict(dataset.manifest["pools"])
    for name, by_class in rows.items():
        entry = {key: value for key, value in pools[name].items() if key != "statistics"}  # of the whole
        shape = [sum(map(len, by_class.values())), *entry["shape"][1:]]
        pools[name] = entry | {"classes": [*by_class], "shape": shape}
    return RegroupedDataset(dataset.name, dataset.folder, {**dataset.manifest, "pools": pools}, dataset, rows, sources)


def with_other_base_classes(dataset: Dataset, number: int) -> RegroupedDataset:
    """Return a data set of a published list with the base classes of draw ``number``.

    The share of base/val among the training images stays; a hash of the class draws which ones.

    Args:
        dataset: Of a published list.
        number: Of the draw.
    """
    train, test = (_group_rows_by_class([dataset.pool(name) for name in names]) for names in (TRAIN_POOLS, TEST_POOLS))
    base = dataset.manifest["pools"]["base/train"]["classes"]
    chosen = draw_base_class_names([*train], len(base), number)
    val, rest = (len(dataset.pool(name)) for name in ("base/val", "base/train"))
    rows: dict[str, dict[str, np.ndarray]] = {name: {} for name in (*TRAIN_POOLS, *TEST_POOLS)}
    for name, images in train.items():
        if name in chosen:
            places = sorted(range(len(images)), key=lambda place: derive_seed("held out", name, place))
            held_out = np.isin(np.arange(len(images)), places[: round(len(images) * val / (val + rest))])
            rows["base/train"][name], rows["base/val"][name] = images[~held_out], images[held_out]
            rows["base/test"][name] = test[name]
        else:
            rows[SUPPORT_POOL_NAME][name], rows["novel/test"][name] = images, test[name]
    sources = dict.fromkeys(TRAIN_POOLS, TRAIN_POOLS) | dict.fromkeys(TEST_POOLS, TEST_POOLS)
    return _make_regrouped_dataset(dataset, rows, sources)


def _group_rows_by_class(pools: Sequence[Pool]) -> dict[str, np.ndarray]:
    """Return class -> rows of the pools, as if concatenated."""
    rows: dict[str, list[np.ndarray]] = {}
    first = 0
    for pool in pools:
        for name, a, b in zip(pool.class_names, pool.class_starts, pool.class_starts[1:], strict=False):
            rows.setdefault(name, []).append(np.arange(first + a, first + b))
        first += len(pool)
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def check_base_classes(name: str, count: int, classes: int) -> None:
    """Raise UserError if a data set has too few base classes.

    Args:
        name: Of the data set.
        count: Base classes of a task.
        classes: Base classes of the data set.
    """
    if count >= classes:
        raise UserError(
            f"data set {name!r} has {classes} base classes: a task of {count} cannot be made of it"
            + ("; that is the task without base-classes" if count == classes else "")
        )


def with_fewer_base_classes(dataset: Dataset, count: int) -> Dataset:
    """Return a data set with fewer base classes.

    Args:
        dataset: The data set.
        count: Number of base classes.

    Raises:
        UserError: It has no more than ``count``.
    """
    classes = dataset.manifest["pools"]["base/train"]["classes"]
    check_base_classes(dataset.name, count, len(classes))
    names = [classes[label] for label in choose_kept_base_classes(count, len(classes))]
    there = {name: _group_rows_by_class([dataset.pool(name)]) for name in BASE_POOLS if dataset.has_pool(name)}
    rows = {pool: {name: by_class[name] for name in names} for pool, by_class in there.items()}
    return _make_regrouped_dataset(dataset, rows, {pool: [pool] for pool in rows})


NOVEL_POOLS = ("novel/val", "novel/test")  # the pools of the other data set


@dataclass(frozen=True)
class CrossDomainDataset(Dataset):
    """The data set ``base_dataset`` with the pools :data:`NOVEL_POOLS` of ``novel_dataset``.

    Name, folder and fingerprint are those of ``base_dataset``, so that pretrainings on its pools serve both.
    """

    base_dataset: Dataset
    novel_dataset: Dataset

    @property
    def novel_fingerprint(self) -> str:
        return self.novel_dataset.fingerprint

    @property
    def is_partial(self) -> bool:
        return self.base_dataset.is_partial or self.novel_dataset.is_partial

    def fingerprint_prefix_of_pool(self, pool: str) -> str:
        return shorten_fingerprint(self.novel_dataset.fingerprint) if pool in NOVEL_POOLS else ""

    def pool(self, name: str) -> Pool:
        if name not in NOVEL_POOLS:
            return self.base_dataset.pool(name)
        pool = replace(self.novel_dataset.pool(name), class_names=tuple(self.manifest["pools"][name]["classes"]))
        if has_grey_version_shape(self.base_dataset.shape, self.novel_dataset.shape):
            images = _ConcatenatedImages([pool.images], np.arange(len(pool)), channels=3)
            return replace(pool, images=cast(np.ndarray, images))
        return pool

    def check_image_checksum(self, pool: str) -> None:
        (self.novel_dataset if pool in NOVEL_POOLS else self.base_dataset).check_image_checksum(pool)


def has_grey_version_shape(shape: Sequence[int], grey: Sequence[int]) -> bool:
    """Return whether images are grey and of the size of coloured ones.

    Args:
        shape: [H, W, C] of the coloured images.
        grey: [H, W, C] of the grey images.
    """
    return len(shape) == 3 and tuple(grey) == (*shape[:2], 1) and shape[2] == 3


def shorten_fingerprint(fingerprint: str) -> str:
    """Return the part of a fingerprint in names of files."""
    return fingerprint[:12]


def check_cross_domain(
    base: str, base_shape: Sequence[int], novel: str, novel_shape: Sequence[int], pools: Container[str]
) -> None:
    """Raise UserError if novel classes of one data set do not fit base classes of another.

    Args:
        base: Name of the data set of the base classes.
        base_shape: Of its images [H, W, C], or features [D].
        novel: Name of the data set of the novel classes.
        novel_shape: Of its images or features.
        pools: Pools of the data set of the novel classes.
    """
    if tuple(base_shape) != tuple(novel_shape) and not has_grey_version_shape(base_shape, novel_shape):
        sizes = ["x".join(map(str, sides)) for sides in (novel_shape, base_shape)]
        raise UserError(
            f"novel classes of {novel!r} do not fit base classes of {base!r}: {sizes[0]} beside {sizes[1]}; both need "
            f"images of one size, or features of one length"
        )
    for pool in NOVEL_POOLS:
        if pool not in pools:
            raise UserError(f"novel classes cannot come from data set {novel!r}: it has no pool {pool}")


def make_cross_domain(base: Dataset, novel: Dataset) -> CrossDomainDataset:
    """Return a data set with the novel classes of another.

    Args:
        base: Data set of the base classes.
        novel: Data set of the novel classes.

    Raises:
        UserError: Their images differ in size, or ``novel`` lacks a pool.
    """
    pools, others = base.manifest["pools"], novel.manifest["pools"]
    check_cross_domain(base.name, base.shape, novel.name, novel.shape, others)
    taken = {
        pool: {
            **others[pool],
            "shape": [*others[pool]["shape"][:1], *base.shape],
            "classes": [f"{novel.name}:{name}" for name in others[pool]["classes"]],
        }
        for pool in NOVEL_POOLS
    }
    return CrossDomainDataset(base.name, base.folder, {**base.manifest, "pools": {**pools, **taken}}, base, novel)
