"""Lists of few-shot class-incremental learning: which session brings a class, and which of its images are for what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.data.datasets import dataset_source
from ifsl_bench.data.published_splits import LISTED, Image, Pools, PublishedData, shuffled
from ifsl_bench.data.source import Count
from ifsl_bench.plugin import registry
from ifsl_bench.utils.errors import UserError

SESSION_POOLS = ("base/train", "base/val", "base/test", "novel/support", "novel/test")
HELD_OUT = 50  # training images of a base class in base/val, of the 500 in CIFAR-100 and mini-ImageNet
COUNTS_60_40 = {  # of both data sets: 60 base and 40 novel classes
    "base/train": Count(60, 60 * 450),
    "base/val": Count(60, 60 * HELD_OUT),
    "base/test": Count(60, 60 * 100),
    "novel/support": Count(40, 40 * 500),
    "novel/test": Count(40, 40 * 100),
}


@dataclass(frozen=True)
class ListedImage:
    """One row of a list: an image, in whatever way it is named, of a class that comes in a session, 0 the base one."""

    image: str
    name: str
    session: int
    test: bool


def session_pools(
    what: str, listed: Iterable[ListedImage], images: Mapping[str, Mapping[str, Image]], held_out: int, salt: str
) -> Pools[Image]:
    """Pool -> class -> images, in the list's order.

    Args:
        what: the list, as errors call it.
        images: class -> name in the list -> image, of all that are there. Those of novel classes that the list does not
            name follow the listed supports.
        held_out: so many training images of each base class are base/val, drawn by a hash of ``salt`` and class.

    Raises:
        UserError: a class comes in two sessions, or an image is for training and for testing, or twice for one.
    """
    sessions: dict[str, int] = {}
    names: dict[tuple[str, bool], list[str]] = {}
    role: dict[str, bool] = {}
    for row in listed:
        if (session := sessions.setdefault(row.name, row.session)) != row.session:
            both = "both base and novel" if 0 in (session, row.session) else "in two sessions"
            raise UserError(f"{what}: class {row.name} is {both} (sessions {session} and {row.session})")
        if row.image in role:
            twice = "there twice" if role[row.image] is row.test else "both for training and for testing"
            raise UserError(f"{what}: image {row.image} is {twice}")
        role[row.image] = row.test
        names.setdefault((row.name, row.test), []).append(row.image)
    pools: Pools[Image] = {pool: {} for pool in SESSION_POOLS}
    for name, session in sessions.items():
        train, test, present = names.get((name, False), []), names.get((name, True), []), images.get(name, {})
        if session:
            listed_names = {*train, *test}
            others = [image for image in present if image not in listed_names]
            parts = {"novel/support": [*train, *others], "novel/test": test}
        else:
            drawn = set(shuffled(train, f"{salt}:{name}")[:held_out])
            parts = {
                "base/train": [image for image in train if image not in drawn],
                "base/val": [image for image in train if image in drawn],
                "base/test": test,
            }
        for pool, part in parts.items():
            pools[pool][name] = [present[image] for image in part if image in present]
    return pools


class SessionSource(PublishedData):
    """A data set whose classes come in the sessions of a published list."""

    @abstractmethod
    def sessions(self) -> Mapping[str, int]:
        """Class -> the session that brings it, in the list's order; the listed supports come first in novel/support."""


def order_of(data: str, classes: Sequence[str]) -> np.ndarray:
    """The novel classes of a data set in the order in which they come, as their places in ``classes``; int64 [T N].

    Raises:
        UserError: the data set has no published list, or lacks a class of it.
    """
    source = dataset_source(data) if data in registry.names(registry.DATASETS) else None
    if not isinstance(source, SessionSource):
        raise UserError(f"data set {data!r} has no published list of sessions; leave out published = true")
    sessions = source.sessions()
    novel = sorted((name for name in sessions if sessions[name]), key=sessions.__getitem__)
    if missing := [name for name in novel if name not in classes]:
        raise UserError(f"data set {data!r} lacks {len(missing):,} of the {len(novel):,} novel classes of its list "
                        f"({', '.join(missing[:LISTED])}); prepare it from all images")  # fmt: skip
    return np.array([classes.index(name) for name in novel], np.int64)
