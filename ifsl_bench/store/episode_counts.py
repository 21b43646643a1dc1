"""The counts of each episode as a result file has them: numbers, or packed where there are many. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.protocols.sampling.draws import MOST_STEPS, ClassDraws
from ifsl_bench.protocols.tasks.metric_sets import CALIBRATED, COUNTS, MORE_COUNTS, SESSIONS
from ifsl_bench.protocols.tasks.task_limits import EPISODES
from ifsl_bench.store.selection_records import Hits
from ifsl_bench.utils import array_codec as packed

if TYPE_CHECKING:
    from ifsl_bench.protocols.session_metrics import SessionCounts

READABLE = 5_000  # numbers of a file that stay numbers; more are packed
MOST_NUMBERS = 1 << 23  # of a column: more do not fit into a file


class _Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of numbers, as lists or packed; see :class:`EpisodeCounts`."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()  # their names
    SHAPE: ClassVar[tuple[str, ...]] = ()  # the fields that say what all episodes have in common
    DRAWN: ClassVar[tuple[str, ...]] = ("classes",)  # the columns that are the same for all methods
    LONG: ClassVar[tuple[str, ...]] = ("classes",)  # the columns that have several numbers for each episode

    def length(self, name: str) -> int:
        """The number of numbers in a column."""
        column = getattr(self, name)
        if isinstance(column, str):
            return len(ClassDraws.parse(column)) if _is_drawn(name, column) else packed.length(column)
        return len(column)

    def column(self, name: str) -> np.ndarray:
        """The numbers of a column, int64.

        Raises:
            ValueError: a text that holds no such numbers.
            OverflowError: a number that 64 bits do not hold.
        """
        column = getattr(self, name)
        if isinstance(column, str):
            if _is_drawn(name, column):
                return ClassDraws.parse(column).array().reshape(-1)
            return packed.unpack(column, MOST_NUMBERS if name in self.LONG else EPISODES, packed.COUNTS)
        return np.asarray(column, dtype=np.int64)

    @property
    def shape(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.SHAPE}

    def same(self, columns: _Columns, names: Iterable[str]) -> bool:
        """Returns whether the columns of these names hold the same numbers, however they are written."""
        return all(
            getattr(self, name) == getattr(columns, name) or np.array_equal(self.column(name), columns.column(name))
            for name in names
        )


class EpisodeCounts(_Columns, frozen=True):
    """Integer counts of each episode; see :class:`ifsl_bench.protocols.metrics.Counts`.

    ``classes`` has the novel classes of each episode, one episode after the other, as labels of the novel test pool.

    Each is a list of numbers, or where that would be long, a text of :mod:`ifsl_bench.utils.array_codec`; ``classes``
    then says how they are drawn (:class:`ifsl_bench.protocols.sampling.draws.ClassDraws`). :meth:`column` reads all of
    these. What there is none of, in regular few-shot learning or without validation episodes, is an empty list.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*COUNTS, "classes", *MORE_COUNTS)
    SHAPE: ClassVar[tuple[str, ...]] = ("base_queries", "novel_queries")

    base_queries: Hits
    novel_queries: Hits
    base_joint: list[int] | str
    base_alone: list[int] | str
    novel_joint: list[int] | str
    novel_alone: list[int] | str
    classes: list[int] | str
    pairs: list[int] | str = []
    calibrated_base: list[int] | str = []
    calibrated_novel: list[int] | str = []

    def __len__(self) -> int:
        return self.length("base_joint")

    def counts(self) -> Counts:
        """The counts as arrays."""
        names = [*COUNTS, *(name for name in MORE_COUNTS if self.length(name))]
        arrays = {name: self.column(name) for name in names}
        return Counts(**arrays, base_queries=self.base_queries, novel_queries=self.novel_queries)


class SequenceCounts(_Columns, frozen=True):
    """Integer counts of each sequence of sessions; see :class:`ifsl_bench.protocols.session_metrics.SessionCounts`.

    Columns hold one sequence after the other; ``classes`` the novel classes of one order after the other.

    Attributes:
        supports_kept: whether the method was asked with the supports of all sessions so far.
        every_image: whether it was even given all training images of their classes.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*SESSIONS.counts, "classes", *CALIBRATED)
    SHAPE: ClassVar[tuple[str, ...]] = ("sessions", "base_classes", "ways", "supports")
    DRAWN: ClassVar[tuple[str, ...]] = ("classes", "queries")
    LONG: ClassVar[tuple[str, ...]] = COLUMNS

    sessions: Hits
    base_classes: Hits
    ways: Hits
    supports: Hits
    state_bytes: int
    supports_kept: bool
    hits: list[int] | str
    novel_as_base: list[int] | str
    base_as_novel: list[int] | str
    queries: list[int] | str
    classes: list[int] | str
    calibrated_hits: list[int] | str = []
    calibrated_novel_as_base: list[int] | str = []
    calibrated_base_as_novel: list[int] | str = []
    every_image: bool = False

    def __len__(self) -> int:
        return self.length("novel_as_base") // max(1, self.sessions)

    def counts(self) -> SessionCounts:
        """The counts as arrays; raises :class:`ValueError` where a column has other than equally many numbers."""
        from ifsl_bench.protocols.session_metrics import SessionCounts

        arrays: dict[str, Any] = {
            name: self.column(name).reshape(len(self), -1)
            for name in (*SESSIONS.counts, *CALIBRATED)
            if self.length(name)
        }
        return SessionCounts(
            **arrays,
            base_classes=self.base_classes,
            ways=self.ways,
            state_bytes=self.state_bytes,
            supports=self.supports,
        )


def _is_drawn(name: str, column: str) -> bool:
    return name == "classes" and column.startswith("drawn")


def counts_entry(
    counts: Counts | SessionCounts,
    classes: ClassDraws | np.ndarray,
    supports_kept: bool = False,
    every_image: bool = False,
) -> EpisodeCounts | SequenceCounts:
    """Counts, and the novel classes [n, N] of each episode, as a file has them: short beyond ``READABLE`` numbers."""
    drawn = classes.array() if isinstance(classes, ClassDraws) else classes
    columns = {name: values.reshape(-1) for name, values in (counts.columns() | {"classes": drawn}).items()}
    many = sum(map(len, columns.values())) > READABLE
    entries: dict[str, Any] = {n: packed.pack(values) if many else values.tolist() for n, values in columns.items()}
    if many and isinstance(classes, ClassDraws) and classes.steps <= MOST_STEPS:
        entries["classes"] = str(classes)
    if not isinstance(counts, Counts):
        fields: dict[str, Any] = {name: getattr(counts, name) for name in (*SequenceCounts.SHAPE, "state_bytes")}
        return SequenceCounts(**fields, supports_kept=supports_kept, every_image=every_image, **entries)
    shape: dict[str, Any] = {name: getattr(counts, name) for name in EpisodeCounts.SHAPE}
    return EpisodeCounts(**shape, **entries)
