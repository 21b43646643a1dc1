"""Sequences of sessions, each of which adds novel classes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ifsl_bench.protocols.calibration import RESAMPLE_COUNT, Margins, ValidationBias, find_bias
from ifsl_bench.protocols.protocol import (
    FigureOrTableName,
    HitCount,
    MetricColumn,
    Protocol,
    StoredCounts,
    find_class_draw_faults,
)
from ifsl_bench.protocols.session_metrics import (
    CALIBRATED_COUNT_NAMES,
    NOVEL_ALONE_COUNT_NAME,
    SEQUENCE_COUNT_NAMES,
    SEQUENCE_METRIC_NAMES,
    SessionCounts,
    session_and_group_indices,
)
from ifsl_bench.protocols.tasks.task import Task

if TYPE_CHECKING:
    from ifsl_bench.backbones.features import FeaturePool
    from ifsl_bench.plugin.method import Method
    from ifsl_bench.protocols.sequence_loader import SequenceLoader

METRIC_COLUMNS = (
    MetricColumn("acc", "Avg.", r"Avg. $\uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True),
    MetricColumn("calibrated_acc", "cal. Acc.", r"cal. Acc. $\uparrow$", is_in_short_tables=True, drop_priority=2),
    MetricColumn(
        "gacc", "gAcc", r"gAcc $\uparrow$", is_in_short_tables=True, drop_priority=1
    ),  # the average is mostly of base queries
    MetricColumn(
        "first", "A_0", r"$A_0 \uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True, drop_priority=9
    ),
    MetricColumn(
        "last", "A_T", r"$A_T \uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True, drop_priority=5
    ),
    MetricColumn(
        "pd", "PD", r"PD $\downarrow$", is_in_short_tables=True, is_in_short_latex_tables=True, drop_priority=10
    ),  # the less the better
    MetricColumn(
        "gain", "gain", r"gain $\uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True, drop_priority=4
    ),
    MetricColumn(
        "base", "base", r"base $\uparrow$", is_in_short_tables=True, drop_priority=3
    ),  # one without the other misleads
    MetricColumn("novel", "novel", r"novel $\uparrow$", is_in_short_tables=True, drop_priority=3),
    MetricColumn("harmonic", "harmonic", r"harmonic $\uparrow$", is_in_short_tables=True, drop_priority=1),
    MetricColumn("learned", "just learned"),
    MetricColumn("novel_as_base", "novel as base"),
    MetricColumn("base_as_novel", "base as novel"),
    MetricColumn("novel_alone", "novel alone"),
)
METRICS_CHANGED_BY_BIAS = (
    "acc",
    "last",
    "pd",
    "gain",
    "base",
    "novel",
    "harmonic",
    "gacc",
)  # metrics that resamples are known of


class SequenceCounts(StoredCounts, frozen=True):
    """Integer counts of each sequence of sessions; see :class:`ifsl_bench.protocols.session_metrics.SessionCounts`.

    Columns hold one sequence after the other; ``classes`` the novel classes of one order after the other.

    Attributes:
        supports_kept: whether the method was asked with the supports of all sessions so far.
        every_image: whether it was even given all training images of their classes.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *SEQUENCE_COUNT_NAMES,
        "classes",
        *CALIBRATED_COUNT_NAMES,
        NOVEL_ALONE_COUNT_NAME,
    )
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
        return self.column_length("novel_as_base") // max(1, self.sessions)

    def to_hit_counts(self) -> SessionCounts:
        """Return the counts as arrays; raises :class:`ValueError` where a column has other than equally many."""
        arrays: dict[str, Any] = {
            name: self.read_column(name).reshape(len(self), -1)
            for name in (*SEQUENCE_COUNT_NAMES, *CALIBRATED_COUNT_NAMES, NOVEL_ALONE_COUNT_NAME)
            if self.column_length(name)
        }
        shape = {name: getattr(self, name) for name in ("base_classes", "ways", "state_bytes", "supports")}
        return SessionCounts(**arrays, **shape)


class Sessions(Protocol):
    """Sequences of sessions after a base session; intervals are over orders of the novel classes."""

    name: ClassVar[str] = "sessions"
    drawn_items_noun: ClassVar[str] = "sequences"
    interval_units_noun: ClassVar[str] = "orders"
    metrics = ("acc", *SEQUENCE_METRIC_NAMES)
    optional_metrics = ("calibrated_acc", NOVEL_ALONE_COUNT_NAME)
    full_table_metrics = data_only_metrics = ("acc", "calibrated_acc", *SEQUENCE_METRIC_NAMES)
    metric_columns = METRIC_COLUMNS
    stored_counts_type = SequenceCounts
    figures_and_tables: frozenset[FigureOrTableName] = frozenset(("sessions", "forgetting", "variance", "lazy"))
    min_test_items: ClassVar[int] = 1  # a published list is one
    learns_sessions: ClassVar[bool] = True
    has_latex_table_per_task: ClassVar[bool] = True  # it fills the width
    has_separate_published_table: ClassVar[bool] = True

    def describe_drawn_items(self, task: Task) -> tuple[str, str]:
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

    def published_class_order(self, task: Task, classes: Callable[[str], Sequence[str]]) -> np.ndarray | None:
        if not (task.sessions and task.sessions.published):
            return None
        from ifsl_bench.data.published_splits import published_novel_class_order

        return published_novel_class_order(task.novel_data, classes("novel/test"))

    def make_loader(
        self, task: Task, sampler: Any, novel: FeaturePool, base: FeaturePool | None, support: FeaturePool | None
    ) -> SequenceLoader:
        from ifsl_bench.protocols.sequence_loader import SequenceLoader

        return SequenceLoader(sampler, novel, base or novel, support)

    def reason_method_cannot_run(self, task: Task, method: type[Method], options: Mapping[str, Any]) -> str | None:
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

    def check_protocol_contract(self, name: str, method: Method, loader: Any, count: int) -> None:
        if loader.keeps_supports(method) or loader.sampler.shape.count < 2:
            return
        from ifsl_bench.plugin.session_contract import check_sessions

        batch = loader.load_batch(0, count)
        check_sessions(name, method, batch.supports_by_session, loader.load_first_episodes(count).query)

    def has_calibration(self, task: Task, method: type[Method]) -> bool:
        """Return whether a bias is looked for: not for a method that each validation sequence would fit again.

        Args:
            task: of this protocol.
            method: the class of the method.
        """
        return not method.uses_all_images

    def find_bias(self, margins: Margins) -> ValidationBias:
        return find_bias(margins, sequences=True)

    def to_stored_counts(self, counts: Any, classes: Any, supports_kept: bool, every_image: bool) -> SequenceCounts:
        more = {"state_bytes": counts.state_bytes, "supports_kept": supports_kept, "every_image": every_image}
        return SequenceCounts.from_hit_counts(counts, classes, more)

    def expected_counts_shape(self, task: Task, count: int) -> tuple[dict[str, int], int]:
        spec = task.sessions
        assert spec is not None
        shape = {"sessions": spec.count, "ways": spec.ways, "supports": spec.supports}
        return shape, -(-count // spec.supports) * spec.n_novel_classes

    def find_contradictions(self, counts: SessionCounts, result: Any) -> Iterator[str]:
        yield from _hit_count_faults(counts)
        yield from find_class_draw_faults(result.episodes.read_column("classes"), counts.n_orders)
        if (result.calibration is None) != (counts.calibrated_hits is None):
            yield "calibration and episodes.calibrated_hits are not both there"
        if result.calibration:
            yield from (f"calibration {reason}" for reason in _calibration_faults(counts, result.calibration))

    def resampled_counts(self, counts: SessionCounts, calibration: Any, choice: Any) -> SessionCounts | None:
        """Return hits over all test sequences with the bias of each resample; for :data:`METRICS_CHANGED_BY_BIAS`.

        All novel hits are counted as hits of session 1.

        Args:
            counts: of the result, as arrays.
            calibration: its record in the result, or None.
            choice: the record of the choice of options, or None.
        """
        if calibration is None or not calibration.resampled_base:
            return None
        sessions, (_, group) = counts.sessions, session_and_group_indices(counts.sessions)
        both = calibration.resampled_base, calibration.resampled_novel
        base, novel = (np.reshape(hits, (RESAMPLE_COUNT, sessions)) for hits in both)
        hits = np.zeros((RESAMPLE_COUNT, len(group)), np.int64)
        first = np.full((RESAMPLE_COUNT, 1), counts.hits[:, 0].sum(dtype=np.int64))
        hits[:, group == 0], hits[:, group == 1] = np.concatenate([first, base], 1), novel
        queries = np.tile(counts.queries.sum(0, dtype=np.int64), (RESAMPLE_COUNT, 1))
        return SessionCounts(hits, np.zeros_like(base), np.zeros_like(base), queries, counts.base_classes, counts.ways)

    def metric_of_resampled_counts(self, metric: str, biased: bool) -> str | None:
        moved = "acc" if metric == "calibrated_acc" else metric if biased else None
        return moved if moved in METRICS_CHANGED_BY_BIAS else None


SESSIONS_PROTOCOL = Sessions()


def _hit_count_faults(counts: SessionCounts) -> Iterator[str]:
    """Yield why no method has these counts."""
    sessions, n = counts.sessions, len(counts)
    widths = {"hits": (sessions + 1) * (sessions + 2) // 2, "queries": sessions + 1}
    for name, values in counts.count_arrays().items():
        width = widths.get(name.removeprefix("calibrated_"), sessions)
        if sessions < 1 or n < 1 or values.shape != (n, width):
            yield f"episodes.{name} has {values.size} entries, {n} sequences of {sessions} sessions need {n * width}"
    if min(counts.base_classes, counts.ways, counts.supports) < 1 or (counts.queries < 1).any():
        yield "the sequences have no classes, no support sets, or a session without queries"
    queries = counts.queries.astype(np.int64)
    limits = {
        "hits": queries[:, counts.session_of_column],
        "novel_as_base": queries[:, 1:].cumsum(1),
        "base_as_novel": queries[:, :1],
    }
    for part in (counts, *([counts.use_calibrated_counts()] if counts.calibrated_hits is not None else [])):
        for name, most in limits.items():
            if ((values := getattr(part, name)) < 0).any() or (values > most).any():
                yield f"episodes.{name} has more than there are queries, or a negative number"
    if counts.novel_alone is not None and counts.novel_alone.shape == (n, sessions):
        session, group = session_and_group_indices(sessions)
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
