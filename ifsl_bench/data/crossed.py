"""Base classes of one data set and novel classes of another, as a view: nothing is copied on the disk.

Pretraining and meta-training see the first data set alone, its novel/train included where it has one. The pools
novel/val and novel/test are those of the second, so episodes of validation and testing have base queries of the one and
novel classes of the other, as in the cross-domain setting of Chen et al. (ICLR 2019). Novel classes are called
``DATASET:CLASS``, so that classes of two data sets that have one name stay two.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pools import Dataset, Pool

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
        return short(self.novel.fingerprint) if pool in NOVEL else ""

    def pool(self, name: str) -> Pool:
        if name not in NOVEL:
            return self.base.pool(name)
        return replace(self.novel.pool(name), classes=tuple(self.manifest["pools"][name]["classes"]))

    def check_images(self, pool: str) -> None:
        (self.novel if pool in NOVEL else self.base).check_images(pool)


def short(fingerprint: str) -> str:
    """As much of a fingerprint as names of files have."""
    return fingerprint[:12]


def check_crossing(base: str, shape: Sequence[int], novel: str, other: Sequence[int], pools: Container[str]) -> None:
    """Raises :class:`UserError` where novel classes of one data set cannot stand beside base classes of another.

    Args:
        base, novel: their names.
        shape, other: of their images [H, W, C], or features [D].
        pools: that ``novel`` has.
    """
    if tuple(shape) != tuple(other):
        sizes = ["x".join(map(str, one)) for one in (other, shape)]
        raise UserError(
            f"novel classes of {novel!r} do not fit base classes of {base!r}: {sizes[0]} beside {sizes[1]}; both need "
            f"images of one size, or features of one length"
        )
    for pool in NOVEL:
        if pool not in pools:
            raise UserError(f"novel classes cannot come from data set {novel!r}: it has no pool {pool}")


def crossed(base: Dataset, novel: Dataset) -> Crossed:
    """The view of both.

    Raises:
        UserError: their images differ in size, or ``novel`` lacks a pool.
    """
    pools, others = base.manifest["pools"], novel.manifest["pools"]
    check_crossing(base.name, base.shape, novel.name, novel.shape, others)
    taken = {
        pool: {**others[pool], "classes": [f"{novel.name}:{name}" for name in others[pool]["classes"]]}
        for pool in NOVEL
    }
    return Crossed(base.name, base.folder, {**base.manifest, "pools": {**pools, **taken}}, base, novel)
