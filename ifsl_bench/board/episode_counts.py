"""The counts of each episode as a result file has them: numbers, or packed where there are many. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from ifsl_bench.common import packed
from ifsl_bench.protocol.class_draws import MOST_STEPS, ClassDraws
from ifsl_bench.protocol.limits import EPISODES
from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.task_kind import COUNTS, MORE_COUNTS

COLUMNS = (*COUNTS, "classes", *MORE_COUNTS)
READABLE = 5_000  # numbers of a file that stay numbers; more are packed
MOST_CLASSES = 1 << 23  # of all episodes: more do not fit into a file


class EpisodeCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Integer counts of each episode; see :class:`ifsl_bench.protocol.metrics.Counts`.

    ``classes`` has the novel classes of each episode, one episode after the other, as labels of the novel test pool.

    Each is a list of numbers, or where that would be long, a text of :mod:`ifsl_bench.common.packed`; ``classes`` then
    says how they are drawn (:class:`ifsl_bench.protocol.class_draws.ClassDraws`). :meth:`column` reads all of these.
    What there is none of, in regular few-shot learning or without validation episodes, is an empty list.
    """

    base_queries: int
    novel_queries: int
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

    def length(self, name: str) -> int:
        """How many numbers a column has."""
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
            return packed.unpack(column, MOST_CLASSES if name == "classes" else EPISODES, packed.COUNTS)
        return np.asarray(column, dtype=np.int64)

    def same(self, other: EpisodeCounts, names: Iterable[str]) -> bool:
        """Whether the columns of these names hold the same numbers, however they are written."""
        return all(
            getattr(self, name) == getattr(other, name) or np.array_equal(self.column(name), other.column(name))
            for name in names
        )


def _is_drawn(name: str, column: str) -> bool:
    return name == "classes" and column.startswith("drawn")


def counts_entry(counts: Counts, classes: ClassDraws | np.ndarray) -> EpisodeCounts:
    """Counts, and the novel classes [n, N] of each episode, as a file has them: short beyond ``READABLE`` numbers."""
    drawn = classes.array() if isinstance(classes, ClassDraws) else classes
    columns = counts.columns() | {"classes": drawn.reshape(-1)}
    many = sum(map(len, columns.values())) > READABLE
    entries = {name: packed.pack(values) if many else values.tolist() for name, values in columns.items()}
    if many and isinstance(classes, ClassDraws) and classes.steps <= MOST_STEPS:
        entries["classes"] = str(classes)
    return EpisodeCounts(base_queries=counts.base_queries, novel_queries=counts.novel_queries, **entries)
