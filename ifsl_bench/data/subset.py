"""A data set with fewer base classes, as a view: nothing is copied on the disk.

Which classes stay does not depend on the training seed, and a smaller number takes a subset of a larger one's: figures
over the number of base classes (Ren et al. 2019, last figure) then change the number alone. The classes are drawn, not
the first ones, because files often list classes by kind.
"""

from __future__ import annotations

from dataclasses import dataclass
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


class _Rows:
    """Some rows of a memory map, read when asked for."""

    def __init__(self, images: np.ndarray, rows: np.ndarray) -> None:
        self.images, self.rows = images, rows
        self.shape = (len(rows), *images.shape[1:])
        self.ndim, self.dtype = images.ndim, images.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> np.ndarray:
        return cast(np.ndarray, self.images[self.rows[at]])


@dataclass(frozen=True)
class BaseSubset(Dataset):
    """The data set ``whole`` with its base pools cut down to the classes ``kept`` (its labels, [count], ascending).

    The fingerprint is the whole data set's; the number of base classes is in the task's definition.
    """

    whole: Dataset
    kept: np.ndarray

    def pool(self, name: str) -> Pool:
        pool = self.whole.pool(name)
        if name not in BASE_POOLS:
            return pool
        rows = np.concatenate([np.arange(pool.starts[label], pool.starts[label + 1]) for label in self.kept])
        # Features are small, and are used as an array; images stay on the disk.
        images = pool.images[rows] if pool.images.ndim == 2 else cast(np.ndarray, _Rows(pool.images, rows))
        counts = np.diff(pool.starts)[self.kept]
        return Pool(
            name,
            images,
            np.repeat(np.arange(len(self.kept), dtype=np.int64), counts),
            tuple(pool.classes[label] for label in self.kept),
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
    """The data set with ``count`` of its base classes.

    Raises:
        UserError: it has no more than so many.
    """
    pools = dict(dataset.manifest["pools"])
    classes = len(pools["base/train"]["classes"])
    check_fewer(dataset.name, count, classes)
    kept = chosen_classes(count, classes)
    for name in (name for name in BASE_POOLS if name in pools):
        images = dataset.pool(name).starts
        entry = {key: value for key, value in pools[name].items() if key != "statistics"}  # of all classes
        entry["classes"] = [entry["classes"][label] for label in kept]
        pools[name] = entry | {"shape": [int(np.diff(images)[kept].sum()), *entry["shape"][1:]]}
    return BaseSubset(dataset.name, dataset.folder, {**dataset.manifest, "pools": pools}, dataset, kept)
