"""Sequences of sessions, each of which adds novel classes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ifsl_bench.protocols.calibration import RESAMPLE_COUNT, Bias, Margins, find_bias
from ifsl_bench.protocols.protocol import Feature, HitCount, MetricColumn, Protocol, StoredCounts, class_draw_faults
from ifsl_bench.protocols.session_metrics import (
    ALONE_COUNT,
    CALIBRATED_COUNTS,
    SEQUENCE_COUNTS,
    SESSION_METRICS,
    SessionCounts,
    triangle_indices,
)
from ifsl_bench.protocols.tasks.task import Task

if TYPE_CHECKING:
    from ifsl_bench.backbones.features import FeaturePool
    from ifsl_bench.plugin.method import Method
    from ifsl_bench.protocols.sequence_loader import SequenceLoader

METRIC_COLUMNS = (
    MetricColumn("acc", "Avg.", r"Avg. $\uparrow$", short=True, latex_short=True),
    MetricColumn("calibrated_acc", "cal. Acc.", r"cal. Acc. $\uparrow$", short=True, drop=2),
    MetricColumn("gacc", "gAcc", r"gAcc $\uparrow$", short=True, drop=1),  # the average is mostly of base queries
    MetricColumn("first", "A_0", r"$A_0 \uparrow$", short=True, latex_short=True, drop=9),
    MetricColumn("last", "A_T", r"$A_T \uparrow$", short=True, latex_short=True, drop=5),
    MetricColumn("pd", "PD", r"PD $\downarrow$", short=True, latex_short=True, drop=10),  # the less the better
    MetricColumn("gain", "gain", r"gain $\uparrow$", short=True, latex_short=True, drop=4),
    MetricColumn("base", "base", r"base $\uparrow$", short=True, drop=3),  # one without the other misleads
    MetricColumn("novel", "novel", r"novel $\uparrow$", short=True, drop=3),
    MetricColumn("harmonic", "harmonic", r"harmonic $\uparrow$", short=True, drop=1),
    MetricColumn("learned", "just learned"),
    MetricColumn("novel_as_base", "novel as base"),
    MetricColumn("base_as_novel", "base as novel"),
    MetricColumn("novel_alone", "novel alone"),
)
BIAS_METRICS = ("acc", "last", "pd", "gain", "base", "novel", "harmonic", "gacc")  # metrics that resamples are known of


class SequenceCounts(StoredCounts, frozen=True):
    """Integer counts of each sequence of sessions; see :class:`ifsl_bench.protocols.session_metrics.SessionCounts`.

    Columns hold one sequence after the other; ``classes`` the novel classes of one order after the other.

    Attributes:
        supports_kept: whether the method was asked with the supports of all sessions so far.
        every_image: whether it was even given all training images of their classes.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*SEQUENCE_COUNTS, "classes", *CALIBRATED_COUNTS, ALONE_COUNT)
    SHAPE_FIELDS: ClassVar[tuple[str, ...]] = ("sessions", "base_classes", "ways", "supports")
    DRAWN_COLUMNS: ClassVar[tuple[str, ...]] = ("classes", "queries")
    LONG_COLUMNS: ClassVar[tuple[str, ...]] = COLUMNS
    MARKER_FIELD: ClassVar[str] = "hits"

    sessions: HitCount
    base_classes: HitCount
    ways: HitCount
    supports: HitCount
    state_bytes: int
    supports_kept: bool
    hits: list[int] | str
    novel_as_base: list[int] | str
    base_as_novel: list[int] | str
    queries: list[int] | str
    classes: list[int] | str
    calibrated_hits: list[int] | str = []  # noqa: RUF012 -- msgspec copies it
    calibrated_novel_as_base: list[int] | str = []  # noqa: RUF012 -- msgspec copies it
    calibrated_base_as_novel: list[int] | str = []  # noqa: RUF012 -- msgspec copies it
    every_image: bool = False
    novel_alone: list[int] | str = []  # noqa: RUF012 -- msgspec copies it

    @property
    def protocol(self) -> Protocol:
        """Sessions."""
        return SESSIONS_PROTOCOL

    @property
    def images_kept(self) -> str:
        return "all images" if self.every_image else "supports" if self.supports_kept else ""

    def __len__(self) -> int:
        return self.length("novel_as_base") // max(1, self.sessions)

    def counts(self) -> SessionCounts:
        """Return the counts as arrays; raises :class:`ValueError` where a column has other than equally many."""
        arrays: dict[str, Any] = {
            name: self.column(name).reshape(len(self), -1)
            for name in (*SEQUENCE_COUNTS, *CALIBRATED_COUNTS, ALONE_COUNT)
            if self.length(name)
        }
        shape = {name: getattr(self, name) for name in ("base_classes", "ways", "state_bytes", "supports")}
        return SessionCounts(**arrays, **shape)


class Sessions(Protocol):
    """Sequences of sessions after a base session; intervals are over orders of the novel classes."""

    name: ClassVar[str] = "sessions"
    drawn: ClassVar[str] = "sequences"
    units: ClassVar[str] = "orders"
    metrics = ("acc", *SESSION_METRICS)
    more_metrics = ("calibrated_acc", ALONE_COUNT)
    fields = hidden_fields = ("acc", "calibrated_acc", *SESSION_METRICS)
    columns = METRIC_COLUMNS
    stored = SequenceCounts
    features: frozenset[Feature] = frozenset(("sessions", "forgetting", "variance", "lazy"))
    fewest: ClassVar[int] = 1  # a published list is one
    learns_sessions: ClassVar[bool] = True
    one_task_a_table: ClassVar[bool] = True  # it fills the width
    published_apart: ClassVar[bool] = True

    def describe(self, task: Task) -> tuple[str, str]:
        spec = task.sessions
        assert spec is not None
        drawn = "the order and supports of the published list"
        if not spec.published:
            drawn = f"{spec.orders:,} orders of the novel classes, {spec.supports:,} support sets each"
        shots = f"{task.shots} shot{'s' * (task.shots > 1)}"
        return "sessions", f"{spec.count} sessions of {spec.ways} ways, {shots}; {drawn}"

    def sessions_in_tables(self, task: Task) -> range:
        """Return the sessions, 0 to T."""
        assert task.sessions is not None
        return range(task.sessions.count + 1)

    def class_order(self, task: Task, classes: Callable[[str], Sequence[str]]) -> np.ndarray | None:
        if not (task.sessions and task.sessions.published):
            return None
        from ifsl_bench.data.published_splits import novel_class_order

        return novel_class_order(task.novel_data, classes("novel/test"))

    def loader(
        self, task: Task, sampler: Any, novel: FeaturePool, base: FeaturePool | None, support: FeaturePool | None
    ) -> SequenceLoader:
        from ifsl_bench.protocols.sequence_loader import SequenceLoader

        return SequenceLoader(sampler, novel, base or novel, support)

    def refusal_reason(self, task: Task, method: type[Method], options: Mapping[str, Any]) -> str | None:
        if method.label_slots and method.keeps_supports(options):
            return f"has parameters for the labels of an episode, and {task.name} is in sessions; take one in episodes"
        keeps = method.uses_all_images or method.keeps_supports(options) or method.keeps != "nothing"
        if not keeps or task.sessions is None or task.sessions.memory == "supports":
            return None
        kept = (
            "is trained on every image of all classes"
            if method.uses_all_images
            else f"keeps {method.keeps.removeprefix('images:')} images of each class"
            if method.keeps != "nothing"
            else "keeps the supports of all sessions"
        )
        return f'{kept}, and {task.name} is for methods that keep none (memory = "none" in its [sessions])'

    def check_contract(self, name: str, method: Method, loader: Any, count: int) -> None:
        if loader.keeps_supports(method) or loader.sampler.shape.count < 2:
            return
        from ifsl_bench.plugin.session_contract import check_sessions

        batch = loader.batch(0, count)
        check_sessions(name, method, batch.supports, loader.episodes(count).query)

    def has_calibration(self, task: Task, method: type[Method]) -> bool:
        """Return whether a bias is looked for: not for a method that each validation sequence would fit again.

        Args:
            task: of this protocol.
            method: the class of the method.
        """
        return not method.uses_all_images

    def find_bias(self, margins: Margins) -> Bias:
        return find_bias(margins, sequences=True)

    def to_stored_counts(self, counts: Any, classes: Any, supports_kept: bool, every_image: bool) -> SequenceCounts:
        more = {"state_bytes": counts.state_bytes, "supports_kept": supports_kept, "every_image": every_image}
        return SequenceCounts.of(counts, classes, more)

    def expected_shape(self, task: Task, count: int) -> tuple[dict[str, int], int]:
        spec = task.sessions
        assert spec is not None
        shape = {"sessions": spec.count, "ways": spec.ways, "supports": spec.supports}
        return shape, -(-count // spec.supports) * spec.classes

    def contradictions(self, counts: SessionCounts, result: Any) -> Iterator[str]:
        yield from _count_faults(counts)
        yield from class_draw_faults(result.episodes.column("classes"), counts.orders)
        if (result.calibration is None) != (counts.calibrated_hits is None):
            yield "calibration and episodes.calibrated_hits are not both there"
        if result.calibration:
            yield from (f"calibration {reason}" for reason in _calibration_faults(counts, result.calibration))

    def resampled_counts(self, counts: SessionCounts, calibration: Any, choice: Any) -> SessionCounts | None:
        """Return hits over all test sequences with the bias of each resample; for :data:`BIAS_METRICS`.

        All novel hits are counted as hits of session 1.

        Args:
            counts: of the result, as arrays.
            calibration: its record in the result, or None.
            choice: the record of the choice of options, or None.
        """
        if calibration is None or not calibration.resampled_base:
            return None
        sessions, (_, group) = counts.sessions, triangle_indices(counts.sessions)
        both = calibration.resampled_base, calibration.resampled_novel
        base, novel = (np.reshape(hits, (RESAMPLE_COUNT, sessions)) for hits in both)
        hits = np.zeros((RESAMPLE_COUNT, len(group)), np.int64)
        first = np.full((RESAMPLE_COUNT, 1), counts.hits[:, 0].sum(dtype=np.int64))
        hits[:, group == 0], hits[:, group == 1] = np.concatenate([first, base], 1), novel
        queries = np.tile(counts.queries.sum(0, dtype=np.int64), (RESAMPLE_COUNT, 1))
        return SessionCounts(hits, np.zeros_like(base), np.zeros_like(base), queries, counts.base_classes, counts.ways)

    def resampled_metric(self, metric: str, biased: bool) -> str | None:
        moved = "acc" if metric == "calibrated_acc" else metric if biased else None
        return moved if moved in BIAS_METRICS else None


SESSIONS_PROTOCOL = Sessions()


def _count_faults(counts: SessionCounts) -> Iterator[str]:
    """Yield why no method has these counts."""
    sessions, n = counts.sessions, len(counts)
    widths = {"hits": (sessions + 1) * (sessions + 2) // 2, "queries": sessions + 1}
    for name, values in counts.columns().items():
        width = widths.get(name.removeprefix("calibrated_"), sessions)
        if sessions < 1 or n < 1 or values.shape != (n, width):
            yield f"episodes.{name} has {values.size} entries, {n} sequences of {sessions} sessions need {n * width}"
    if min(counts.base_classes, counts.ways, counts.supports) < 1 or (counts.queries < 1).any():
        yield "the sequences have no classes, no support sets, or a session without queries"
    queries = counts.queries.astype(np.int64)
    limits = {
        "hits": queries[:, counts.groups],
        "novel_as_base": queries[:, 1:].cumsum(1),
        "base_as_novel": queries[:, :1],
    }
    for part in (counts, *([counts.calibrated()] if counts.calibrated_hits is not None else [])):
        for name, most in limits.items():
            if ((values := getattr(part, name)) < 0).any() or (values > most).any():
                yield f"episodes.{name} has more than there are queries, or a negative number"
    if counts.novel_alone is not None and counts.novel_alone.shape == (n, sessions):
        session, group = triangle_indices(sessions)
        novel = np.stack([counts.hits[:, (session == t) & (group > 0)].sum(1) for t in range(1, sessions + 1)], 1)
        if (counts.novel_alone < novel).any() or (counts.novel_alone > novel + counts.novel_as_base).any():
            yield "episodes.novel_alone is less than the novel hits, or more than these and novel_as_base"


def _calibration_faults(counts: SessionCounts, calibration: Any) -> Iterator[str]:
    """Yield why no method has these hits with biases on the novel logits after each session."""
    for name, most in (("base", counts.queries[:, 0]), ("novel", counts.queries[:, 1:])):
        hits = getattr(calibration, f"resampled_{name}")
        if len(hits) not in (0, RESAMPLE_COUNT * counts.sessions):
            yield f"has other than {RESAMPLE_COUNT} resamples of {counts.sessions} sessions"
        elif max(hits, default=0) > most.sum(dtype=np.int64):
            yield f"has more {name} hits than there are {name} queries"
