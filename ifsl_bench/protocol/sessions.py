"""The shape of a task in sessions: how many, of how many classes, how often they are dealt anew. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``count`` sessions of ``ways`` novel classes each, after a base session.

    An *order* deals ``count * ways`` classes into sessions; there are ``orders`` of them, and ``supports`` support sets
    for each. Sequence ``i`` has order ``i // supports``.

    ``queries`` are those of each novel class, from images that are not its supports. None: as many as a base class has
    on average, rounded down. Where supports have a pool of their own, queries are all images of the other pool.

    ``listed``: the classes are those of a published list. Supports come from a pool of their own, novel/support; no
    class is left for validation, so that its sequences are of base classes, hidden as such, and of base/val's images.
    ``published``: the list to the letter, its order and its supports.
    ``memory``: "none" refuses methods that keep the supports of earlier sessions.
    """

    count: int
    ways: int
    orders: int = 100
    supports: int = 4
    queries: int | None = None
    listed: bool = False
    published: bool = False
    memory: Literal["none", "supports"] = "supports"

    @property
    def classes(self) -> int:
        """Novel classes of a sequence."""
        return self.count * self.ways

    @property
    def sequences(self) -> int:
        return self.orders * self.supports

    def within(self, classes: int) -> SessionSpec:
        """The same with as many sessions as so many novel classes suffice for; for validation."""
        return msgspec.structs.replace(self, count=min(self.count, classes // self.ways))

    def hiding(self, base_classes: int) -> SessionSpec:
        """The same with so many sessions that novel classes, hidden among the base classes, have their share of all.

        For validation where every class is either a base class or one of the test: K base and C novel classes become
        K - C' base and C' novel ones with C' at most K C / (K + C).
        """
        return self.within(base_classes * self.classes // (base_classes + self.classes))
