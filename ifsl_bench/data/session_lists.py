"""Lists of few-shot class-incremental learning: which session brings a class, and which of its images are for what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.published_splits import shuffled
from ifsl_bench.data.source import DatasetSource

SESSION_POOLS = ("base/train", "base/val", "base/test", "novel/support", "novel/test")


@dataclass(frozen=True)
class ListedImage:
    """One row of a list: an image, in whatever way it is named, of a class that comes in a session, 0 the base one."""

    image: str
    name: str
    session: int
    test: bool


@dataclass(frozen=True)
class SessionList:
    """What a list says.

    Attributes:
        sessions: class -> its session, in the list's order.
        train: class -> its training images, in the list's order; of a novel class, its supports.
        test: likewise, its queries.
    """

    sessions: Mapping[str, int]
    train: Mapping[str, Sequence[str]]
    test: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, what: str, rows: Iterable[ListedImage]) -> SessionList:
        """Gathers rows by class.

        Args:
            what: the list, as errors call it.

        Raises:
            UserError: a class comes in two sessions, or an image is for training and for testing, or twice for one.
        """
        sessions: dict[str, int] = {}
        images: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
        role: dict[str, bool] = {}
        for row in rows:
            if (session := sessions.setdefault(row.name, row.session)) != row.session:
                both = "both base and novel" if 0 in (session, row.session) else "in two sessions"
                raise UserError(f"{what}: class {row.name} is {both} (sessions {session} and {row.session})")
            if row.image in role:
                twice = "there twice" if role[row.image] is row.test else "both for training and for testing"
                raise UserError(f"{what}: image {row.image} is {twice}")
            role[row.image] = row.test
            images[row.test].setdefault(row.name, []).append(row.image)
        return cls(sessions, images[False], images[True])

    def pools(self, others: Mapping[str, Sequence[str]], held_out: int, salt: str) -> dict[str, dict[str, list[str]]]:
        """Pool -> class -> images, in the list's order.

        Args:
            others: class -> images that the list does not name; of novel classes they follow the listed supports.
            held_out: so many training images of each base class are base/val, drawn by a hash of ``salt`` and class.
        """
        pools: dict[str, dict[str, list[str]]] = {pool: {} for pool in SESSION_POOLS}
        for name, session in self.sessions.items():
            train, side = self.train.get(name, ()), "novel" if session else "base"
            pools[f"{side}/test"][name] = list(self.test.get(name, ()))
            if session:
                pools["novel/support"][name] = [*train, *others.get(name, ())]
            else:
                out = set(shuffled(train, f"{salt}:{name}")[:held_out])
                pools["base/train"][name] = [image for image in train if image not in out]
                pools["base/val"][name] = [image for image in train if image in out]
        return pools


def order_of(sessions: Mapping[str, int], classes: Sequence[str]) -> np.ndarray:
    """The novel classes in the order in which they come, as their places in ``classes``; int64 [T N]."""
    novel = sorted((name for name in sessions if sessions[name]), key=sessions.__getitem__)
    return np.array([classes.index(name) for name in novel], np.int64)


class SessionSource(DatasetSource):
    """A data set whose classes come in the sessions of a published list."""

    @abstractmethod
    def sessions(self) -> Mapping[str, int]:
        """Class -> the session that brings it, in the list's order; the listed supports come first in novel/support."""
