"""The form of counts in result files: columns of numbers, packed where there are many. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.sampling.draws import MOST_STEPS, ClassDraws
from ifsl_bench.protocols.tasks.task_limits import EPISODES
from ifsl_bench.utils.serialization import COUNT_KINDS, pack_array, packed_length, unpack_array

if TYPE_CHECKING:
    from ifsl_bench.protocols.metrics import HitCounts
    from ifsl_bench.protocols.protocol import Protocol

Hits = Annotated[int, Meta(ge=0, lt=1 << 31)]  # products of two fit into 64 bits
READABLE = 5_000  # numbers of a file that stay numbers; more are packed
MOST_NUMBERS = 1 << 23  # of a column: more do not fit into a file
Form = TypeVar("Form", bound="StoredCounts")


class StoredCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Integer counts of each episode or sequence; a protocol has a subclass of its own.

    Each column is a list of numbers, or where that would be long, a text of :mod:`ifsl_bench.utils.serialization`; the
    column ``classes``, which every subclass has, then says how novel classes are drawn (:class:`.ClassDraws`).

    Attributes:
        COLUMNS: names of the columns.
        SHAPE: fields that say what all episodes have in common.
        DRAWN: columns that are the same for all methods.
        LONG: columns that have several numbers for each episode.
        MARK: the column by which a file is told from those of other protocols.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    SHAPE: ClassVar[tuple[str, ...]] = ()
    DRAWN: ClassVar[tuple[str, ...]] = ("classes",)
    LONG: ClassVar[tuple[str, ...]] = ("classes",)
    MARK: ClassVar[str]

    @property
    @abstractmethod
    def protocol(self) -> Protocol:
        """The protocol that these are counts of."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of episodes or sequences."""

    @property
    def images_kept(self) -> str:
        """The images of all sessions that the method was asked with: "supports", "all images", or ""."""
        return ""

    @abstractmethod
    def counts(self) -> HitCounts:
        """Return the counts as arrays; raises :class:`ValueError` where a column has other than equally many."""

    @classmethod
    def of(
        cls: type[Form], counts: HitCounts, classes: ClassDraws | np.ndarray, more: dict[str, Any] | None = None
    ) -> Form:
        """Return the form of counts in a result file, short beyond :data:`READABLE` numbers.

        Args:
            counts: as arrays.
            classes: the novel classes of each episode or order, [n, N], or how they are drawn.
            more: further fields.
        """
        drawn = classes.array() if isinstance(classes, ClassDraws) else classes
        columns = {name: values.reshape(-1) for name, values in (counts.columns() | {"classes": drawn}).items()}
        many = sum(map(len, columns.values())) > READABLE
        entries: dict[str, Any] = {
            name: pack_array(values) if many else values.tolist() for name, values in columns.items()
        }
        if many and isinstance(classes, ClassDraws) and classes.steps <= MOST_STEPS:
            entries["classes"] = str(classes)
        return cls(**{name: getattr(counts, name) for name in cls.SHAPE}, **entries, **(more or {}))

    def length(self, name: str) -> int:
        """Return the number of numbers in a column."""
        column = getattr(self, name)
        if isinstance(column, str):
            return len(ClassDraws.parse(column)) if _is_drawn(name, column) else packed_length(column)
        return len(column)

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a column, int64.

        Raises:
            ValueError: a text that holds no such numbers.
            OverflowError: a number that 64 bits do not hold.
        """
        column = getattr(self, name)
        if isinstance(column, str):
            if _is_drawn(name, column):
                return ClassDraws.parse(column).array().reshape(-1)
            return unpack_array(column, MOST_NUMBERS if name in self.LONG else EPISODES, COUNT_KINDS)
        return np.asarray(column, dtype=np.int64)

    def classes_drawn(self) -> np.ndarray:
        """Return the novel classes of each episode or order, int64 [n, N]."""
        return self.column("classes").reshape(self.counts().unit_count, -1)

    @property
    def shape(self) -> dict[str, int]:
        """What all episodes have in common."""
        return {name: getattr(self, name) for name in self.SHAPE}

    def same(self, columns: StoredCounts, names: Iterable[str]) -> bool:
        """Return whether columns hold the same numbers, however they are written.

        Args:
            columns: of another result.
            names: of the columns.
        """
        return all(
            getattr(self, name) == getattr(columns, name) or np.array_equal(self.column(name), columns.column(name))
            for name in names
        )


def _is_drawn(name: str, column: str) -> bool:
    return name == "classes" and column.startswith("drawn")
