"""Kinds of tasks: what is counted, which metrics follow from it, and which of them tables show. Imports no NumPy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Part = Literal["base", "novel"]

COUNTS = ("base_joint", "base_alone", "novel_joint", "novel_alone")
MORE_COUNTS = ("pairs", "calibrated_base", "calibrated_novel")  # of episodes with base classes
METRICS = ("acc", "base_joint", "base_alone", "novel_joint", "novel_alone", "delta_a", "delta_b", "delta")
BALANCE = ("harmonic", "ausuc", "calibrated_acc", "calibrated_delta")  # what joint accuracy hides


@dataclass(frozen=True)
class Kind:
    """The counts, metrics and columns of tasks that are measured alike."""

    parts: tuple[Part, ...]  # of the classes that queries are of, novel ones first
    counts: tuple[str, ...]  # of each episode, in every result
    more_counts: tuple[str, ...]  # those that a result has where they can be had
    metrics: tuple[str, ...]  # of every result
    more_metrics: tuple[str, ...]  # those that a result has where its counts are there
    fields: tuple[str, ...]  # metrics that tables for programs have, the same for tasks that stand in one table
    drawn: str = "episodes"  # what a stream draws, in words
    units: str = "episodes"  # what intervals are over, in words

    @property
    def has_base(self) -> bool:
        """Returns whether queries are told apart from base classes too, so that a bias may weigh them."""
        return "base" in self.parts

    def counted(self, number: int) -> str:
        """So many of what a stream draws: "400 sequences", "1 sequence"."""
        return f"{number:,} {self.drawn if number != 1 else self.drawn[:-1]}"

    def shows(self, metric: str, row_metrics: Collection[str]) -> bool:
        """Returns whether readers are shown a metric, where ``row_metrics`` are those that some row has."""
        return metric in self.metrics or (metric in self.more_metrics and metric in row_metrics)

    def metrics_of(self, counts: Collection[str]) -> tuple[str, ...]:
        """The metrics of a result that has these of its counts."""
        calibrated = {"calibrated_base", "calibrated_novel"} & set(self.more_counts) or {"calibrated_hits"}
        needs = {"ausuc": {"pairs"}, "calibrated_acc": calibrated, "calibrated_delta": calibrated}
        return (*self.metrics, *(name for name in self.more_metrics if needs.get(name, set()).issubset(counts)))


JOINT = Kind(("novel", "base"), COUNTS, MORE_COUNTS, METRICS, BALANCE, (*METRICS, *BALANCE))
REGULAR = Kind(("novel",), COUNTS, (), ("acc",), (), JOINT.fields)
"""Regular few-shot learning: without base classes joint and alone are one, and there is nothing to lose."""

OF_SESSIONS = (
    "first", "last", "pd", "gain", "base", "novel", "harmonic", "gacc", "learned", "novel_as_base", "base_as_novel"
)  # fmt: skip
CALIBRATED = ("calibrated_hits", "calibrated_novel_as_base", "calibrated_base_as_novel")  # where there is a bias
SESSIONS = Kind(
    ("novel", "base"),
    ("hits", "novel_as_base", "base_as_novel", "queries"),
    ("calibrated_hits",),
    ("acc", *OF_SESSIONS),
    ("calibrated_acc",),
    ("acc", "calibrated_acc", *OF_SESSIONS),
    "sequences",
    "orders",
)
"""Sequences of sessions: see :mod:`ifsl_bench.protocols.session_metrics`. ``acc`` is the mean over all sessions."""


def kind_of(base_queries: int) -> Kind:
    """The kind of tasks whose episodes have so many base queries."""
    return JOINT if base_queries else REGULAR
