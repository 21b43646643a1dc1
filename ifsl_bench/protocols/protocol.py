"""The interface of a protocol: what a task draws, how answers are counted, and how counts are stored and shown.

:class:`~ifsl_bench.protocols.episode_protocol.EpisodeCount` and
:class:`~ifsl_bench.protocols.session_protocol.Sessions`
implement it. Another one is a subclass of either or of :class:`Protocol`, made known with
:func:`~ifsl_bench.protocols.registry.register_protocol`; a task file
chooses it by name, ``protocol = "NAME"`` under ``[evaluation]``. Imports no torch, so that tables come at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.calibration import Margins, ValidationBias, find_bias
from ifsl_bench.protocols.sampling.draws import MOST_DRAW_STEPS, ClassDraws
from ifsl_bench.protocols.tasks.task import Side, Task
from ifsl_bench.protocols.tasks.task_limits import MOST_EPISODES
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.serialization import COUNT_KINDS, pack_array, read_packed_length, unpack_array

if TYPE_CHECKING:
    import torch

    from ifsl_bench.backbones.features import FeaturePool
    from ifsl_bench.plugin.method import Method
    from ifsl_bench.protocols.loader import Loader
    from ifsl_bench.protocols.metrics import HitCounts
    from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
    from ifsl_bench.protocols.sampling.sequences import SequenceSampler

HitCount = Annotated[int, Meta(ge=0, lt=1 << 31)]  # products of two fit into 64 bits
MOST_READABLE_NUMBERS = 5_000  # numbers of a file that stay numbers; more are packed
MOST_STORED_NUMBERS = 1 << 23  # of a column: more do not fit into a file
StoredCountsT = TypeVar("StoredCountsT", bound="StoredCounts")


class StoredCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Integer counts of each episode or sequence; a protocol has a subclass of its own.

    Each column is a list of numbers, or where that would be long, a text of :mod:`ifsl_bench.utils.serialization`; the
    column ``classes``, which every subclass has, is then a text on how novel classes are drawn (:class:`.ClassDraws`).

    Attributes:
        COLUMNS: names of the columns.
        SHAPE_FIELDS: fields for what all episodes have in common.
        DRAWN_COLUMNS: columns that are the same for all methods.
        LONG_COLUMNS: columns that have several numbers for each episode.
        MARKER_FIELD: the column that distinguishes a file from the files of other protocols.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    SHAPE_FIELDS: ClassVar[tuple[str, ...]] = ()
    DRAWN_COLUMNS: ClassVar[tuple[str, ...]] = ("classes",)
    LONG_COLUMNS: ClassVar[tuple[str, ...]] = ("classes",)
    MARKER_FIELD: ClassVar[str]

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
    def to_hit_counts(self) -> HitCounts:
        """Return the counts as arrays; raises :class:`ValueError` where a column has other than equally many."""

    @classmethod
    def from_hit_counts(
        cls: type[StoredCountsT],
        counts: HitCounts,
        classes: ClassDraws | np.ndarray,
        more: dict[str, Any] | None = None,
    ) -> StoredCountsT:
        """Return the form of counts in a result file, short beyond :data:`MOST_READABLE_NUMBERS` numbers.

        Args:
            counts: as arrays.
            classes: the novel classes of each episode or order, [n, N], or how they are drawn.
            more: further fields.
        """
        drawn = classes.to_array() if isinstance(classes, ClassDraws) else classes
        columns = {name: values.reshape(-1) for name, values in (counts.count_arrays() | {"classes": drawn}).items()}
        many = sum(map(len, columns.values())) > MOST_READABLE_NUMBERS
        entries: dict[str, Any] = {
            name: pack_array(values) if many else values.tolist() for name, values in columns.items()
        }
        if many and isinstance(classes, ClassDraws) and classes.comparison_count <= MOST_DRAW_STEPS:
            entries["classes"] = str(classes)
        return cls(**{name: getattr(counts, name) for name in cls.SHAPE_FIELDS}, **entries, **(more or {}))

    def column_length(self, name: str) -> int:
        """Return the number of numbers in a column."""
        column = getattr(self, name)
        if isinstance(column, str):
            return len(ClassDraws.parse_text(column)) if _is_drawn_text(name, column) else read_packed_length(column)
        return len(column)

    def read_column(self, name: str) -> np.ndarray:
        """Return the numbers of a column, int64.

        Raises:
            ValueError: a text that holds no such numbers.
            OverflowError: a number that 64 bits do not hold.
        """
        column = getattr(self, name)
        if isinstance(column, str):
            if _is_drawn_text(name, column):
                return ClassDraws.parse_text(column).to_array().reshape(-1)
            return unpack_array(
                column, MOST_STORED_NUMBERS if name in self.LONG_COLUMNS else MOST_EPISODES, COUNT_KINDS
            )
        return np.asarray(column, dtype=np.int64)

    def drawn_classes(self) -> np.ndarray:
        """Return the novel classes of each episode or order, int64 [n, N]."""
        return self.read_column("classes").reshape(self.to_hit_counts().n_interval_units, -1)

    @property
    def shape_values(self) -> dict[str, int]:
        """What all episodes have in common."""
        return {name: getattr(self, name) for name in self.SHAPE_FIELDS}

    def has_same_numbers(self, columns: StoredCounts, names: Iterable[str]) -> bool:
        """Return whether columns hold the same numbers, however they are written.

        Args:
            columns: of another result.
            names: of the columns.
        """
        return all(
            getattr(self, name) == getattr(columns, name)
            or np.array_equal(self.read_column(name), columns.read_column(name))
            for name in names
        )


def _is_drawn_text(name: str, column: str) -> bool:
    return name == "classes" and column.startswith("drawn")


FigureOrTableName = Literal["tradeoff", "sessions", "forgetting", "variance", "episode", "lazy", "choices"]


@dataclass(frozen=True)
class MetricColumn:
    """The column of a metric in tables.

    Attributes:
        name: of the metric.
        title: its heading in all formats but LaTeX in the layout of papers.
        latex_title: its heading there; "" where it has no such column.
        is_in_short_tables: whether tables without ``--full`` have it.
        is_in_short_latex_tables: the same for LaTeX in the layout of papers.
        drop_priority: the place in the order in which a narrow terminal leaves columns out, the highest first; 0: it
            stays.
    """

    name: str
    title: str
    latex_title: str = ""
    is_in_short_tables: bool = False
    is_in_short_latex_tables: bool = False
    drop_priority: int = 0


@accept_old_names(
    curve_sessions="sessions_in_tables",
    drawn="drawn_items_noun",
    units="interval_units_noun",
    more_metrics="optional_metrics",
    fields="full_table_metrics",
    hidden_fields="data_only_metrics",
    columns="metric_columns",
    stored="stored_counts_type",
    features="figures_and_tables",
    fewest="min_test_items",
    one_task_a_table="has_latex_table_per_task",
    published_apart="has_separate_published_table",
    describe="describe_drawn_items",
    sampler="make_sampler",
    loader="make_loader",
    class_order="published_class_order",
    check_contract="check_protocol_contract",
    expected_shape="expected_counts_shape",
    contradictions="find_contradictions",
)
class Protocol(ABC):
    """A way to measure methods on a task; each has one, :func:`~ifsl_bench.protocols.registry.protocol_of_task`.

    Every protocol has a metric called ``acc``, which rows are ranked by and options are chosen by.

    Attributes:
        name: of the protocol, in messages and in the ``protocol`` of task files.
        drawn_items_noun: what a stream draws, in words and in the plural.
        interval_units_noun: what intervals are over, in words and in the plural.
        metrics: of every result.
        optional_metrics: metrics of the results that have the counts for them.
        full_table_metrics: metrics that full tables have, for readers as far as some row has them.
        data_only_metrics: metrics that all tables for programs have.
        metric_columns: of the metrics, in the order in which tables have them.
        stored_counts_type: the form of its counts in result files.
        figures_and_tables: figures and tables that apply to its results, see :data:`FigureOrTableName`.
        min_test_items: test episodes, or sequences, of a result.
        learns_sessions: whether methods learn sessions one after the other.
        has_latex_table_per_task: whether each task has a LaTeX table of its own.
        has_separate_published_table: whether published rows have a table of their own, since nobody measured on the
            same terms.
    """

    name: ClassVar[str]
    drawn_items_noun: ClassVar[str] = "episodes"
    interval_units_noun: ClassVar[str] = "episodes"
    metrics: tuple[str, ...]
    optional_metrics: tuple[str, ...] = ()
    full_table_metrics: tuple[str, ...]
    data_only_metrics: tuple[str, ...] = ()
    metric_columns: tuple[MetricColumn, ...]
    figures_and_tables: frozenset[FigureOrTableName] = frozenset()
    min_test_items: ClassVar[int] = 2
    learns_sessions: ClassVar[bool] = False
    has_latex_table_per_task: ClassVar[bool] = False
    has_separate_published_table: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    @property
    @abstractmethod
    def stored_counts_type(self) -> type[StoredCounts]:
        """The form of its counts in result files."""

    # -- words

    def format_count(self, number: int) -> str:
        """Return a number of what a stream draws, in words: "400 sequences", "1 sequence"."""
        return f"{number:,} {self.drawn_items_noun if number != 1 else self.drawn_items_noun[:-1]}"

    def shows_metric(self, metric: str, row_metrics: Collection[str]) -> bool:
        """Return whether readers are shown a metric.

        Args:
            metric: its name.
            row_metrics: the metrics that some row has.
        """
        return metric in self.metrics or (metric in self.optional_metrics and metric in row_metrics)

    def metric_column(self, metric: str) -> MetricColumn:
        """Return the column of a metric."""
        return next(column for column in self.metric_columns if column.name == metric)

    @abstractmethod
    def describe_drawn_items(self, task: Task) -> tuple[str, str]:
        """Return a heading and a text on what a task draws, for ``ifsl-bench tasks NAME``."""

    def sessions_in_tables(self, task: Task) -> range:
        """Return the sessions whose accuracies tables show one by one; empty where there are none."""
        return range(0)

    def require_feature(self, feature: FigureOrTableName, name: str, what: str, join: str = "; ") -> None:
        """Raise :class:`UserError` where a figure or table does not apply.

        Args:
            feature: of the figure or table.
            name: of the task.
            what: a sentence that names the tasks with this figure or table.
            join: text between the error and that sentence.
        """
        if feature not in self.figures_and_tables:
            raise UserError(f"{name} is in {self.name}{join}{what}")

    # -- draw and load

    def make_sampler(
        self,
        task: Task,
        side: Side,
        seed: int,
        starts: Callable[[str], np.ndarray],
        device: torch.device | str = "cpu",
        classes: Callable[[str], Sequence[str]] = lambda pool: (),
        order: np.ndarray | None = None,
    ) -> EpisodeSampler | SequenceSampler:
        """Return the sampler of a task's side, see :func:`.sampling.episodes.make_side_sampler`.

        Args:
            task: of this protocol.
            side: "train", "val" or "test".
            seed: of training; the other sides have the task's own.
            starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
            device: where the indices are made.
            classes: of a pool by name, what errors call its classes.
            order: [T N] labels of novel/test, as a published list orders them.
        """
        from ifsl_bench.protocols.sampling.episodes import make_side_sampler

        return make_side_sampler(task, side, seed, starts, device, classes, order)

    def published_class_order(self, task: Task, classes: Callable[[str], Sequence[str]]) -> np.ndarray | None:
        """Return the order of the novel classes in a published list, [T N] labels; None where they are drawn.

        Args:
            task: of this protocol.
            classes: of a pool by name.

        Raises:
            UserError: the data set has no such list, or lacks a class of it.
        """
        return None

    @abstractmethod
    def make_loader(
        self, task: Task, sampler: Any, novel: FeaturePool, base: FeaturePool | None, support: FeaturePool | None
    ) -> Loader:
        """Return the loader that makes batches of what a sampler draws, has a method answer them, and counts.

        Args:
            task: of this protocol.
            sampler: of one of its sides.
            novel: the pool of novel queries.
            base: the pool of base queries, if there are some.
            support: the pool of the supports, where it is another one.
        """

    # -- the contract and calibration

    def reason_method_cannot_run(self, task: Task, method: type[Method], options: Mapping[str, Any]) -> str | None:
        """Return why a method may not run on a task; None where it may.

        Args:
            task: of this protocol.
            method: the class.
            options: of the method.
        """
        return None

    def check_protocol_contract(self, name: str, method: Method, loader: Loader, count: int) -> None:  # noqa: B027
        """Check what the protocol asks of a method beyond the contract of single episodes.

        Args:
            name: what errors call the method.
            method: on the device of the loader.
            loader: of the test side.
            count: how many sequences to check on.

        Raises:
            UserError: the method breaks the contract.
        """

    def has_calibration(self, task: Task, method: type[Method]) -> bool:
        """Return whether a bias on the novel logits is looked for on validation episodes.

        Args:
            task: of this protocol.
            method: the class.
        """
        return task.has_base

    def find_bias(self, margins: Margins) -> ValidationBias:
        """Return the best bias on the novel logits, from the margins of validation episodes."""
        return find_bias(margins)

    # -- count, store and summarise

    def to_stored_counts(self, counts: Any, classes: Any, supports_kept: bool, every_image: bool) -> StoredCounts:
        """Return the form of counts in a result file.

        Args:
            counts: as arrays.
            classes: the novel classes of each episode or order, [n, N], or how they are drawn.
            supports_kept: whether the method was asked with the supports of all sessions so far.
            every_image: whether it was even given all training images of their classes.
        """
        return self.stored_counts_type.from_hit_counts(counts, classes)

    @abstractmethod
    def expected_counts_shape(self, task: Task, count: int) -> tuple[dict[str, int], int]:
        """Return the fields that the stored counts of a result on a task must have.

        Args:
            task: of this protocol.
            count: test episodes or sequences.

        Returns:
            Field of the stored counts -> its value; and how many novel classes they list.
        """

    def find_contradictions(self, counts: Any, result: Any) -> Iterator[str]:
        """Yield why no method has these counts, calibration and choice; the first reason counts.

        Args:
            counts: of the result, as arrays.
            result: its record, see :class:`ifsl_bench.store.schema.Result`.
        """
        yield from find_class_draw_faults(result.episodes.read_column("classes"), counts.n_interval_units)

    def resampled_counts(self, counts: Any, calibration: Any, choice: Any) -> HitCounts | None:
        """Return the counts over all test episodes that each resample of the validation episodes would have led to.

        They are as if each resample were an episode, [RESAMPLES]; None where nothing was chosen, or where an older
        result does not record it.

        Args:
            counts: of the result, as arrays.
            calibration: its record in the result, or None.
            choice: the record of the choice of options, or None.
        """
        return None

    def metric_of_resampled_counts(self, metric: str, biased: bool) -> str | None:
        """Return the metric of :meth:`resampled_counts` counts that a metric of a row follows.

        Args:
            metric: of the row.
            biased: whether the row has the bias.

        Returns:
            A metric; None where choices do not move it, or nothing is known of that.
        """
        return metric


def find_class_draw_faults(classes: np.ndarray, episodes: int) -> Iterator[str]:
    """Yield why these are not the novel classes of a number of episodes or orders.

    Args:
        classes: one episode after the other.
        episodes: how many.
    """
    ways, rest = divmod(len(classes), episodes)
    if rest or not ways:
        yield f"episodes.classes has {len(classes)} entries, not equally many for each of {episodes} episodes"
    ordered = np.sort(classes.reshape(episodes, ways), axis=1)
    if ordered[:, 0].min() < 0:
        yield "episodes.classes has classes below 0"
    if (np.diff(ordered) == 0).any():
        yield "episodes.classes has an episode with a class twice"
