"""The data of a task, and their metadata, which are known before the data are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ifsl_bench.data import datasets
from ifsl_bench.data.dataset_views import (
    BASE_POOLS,
    NOVEL_POOLS,
    check_base_classes,
    check_cross_domain,
    make_cross_domain,
    with_fewer_base_classes,
    with_other_base_classes,
)
from ifsl_bench.data.datasets import (
    is_prepared,
    not_prepared_message,
    open_prepared,
    open_prepared_with_pinned_fingerprint,
)
from ifsl_bench.data.pools import Dataset
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec, Task
from ifsl_bench.protocols.tasks.task_files import own_tasks, packaged_tasks
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import Paths, record_last_use
from ifsl_bench.utils.progress import Reporter


@dataclass(frozen=True)
class DatasetMetadata:
    """Shapes, sizes and fingerprint of a task's data, as far as they are known.

    Attributes:
        fingerprint: Of the data set; None if it is neither prepared nor pinned.
        shape: Of an image [H, W, C] or of features [D]; empty if unknown.
        class_starts_by_pool: Pool -> int64 [C + 1], images of class c are ``starts[c]:starts[c + 1]``; of equal
            classes if the data set is not prepared, and empty if unknown.
        is_prepared: Whether the data set is prepared.
        class_names_by_pool: Pool -> names of its classes, if it is prepared.
        reason_supports_unknown: As of :class:`~ifsl_bench.data.pools.Dataset`.
    """

    fingerprint: str | None
    shape: tuple[int, ...]
    class_starts_by_pool: Mapping[str, np.ndarray]
    is_prepared: bool
    class_names_by_pool: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reason_supports_unknown: str = ""

    def count_images_of_pool(self, pool: str) -> int:
        return int(self.class_starts_by_pool[pool][-1]) if pool in self.class_starts_by_pool else 0

    @property
    def n_base_classes(self) -> int:
        return len(self.class_starts_by_pool["base/train"]) - 1 if self.class_starts_by_pool else 0


_fingerprint_cache: ContextVar[dict[tuple[Path, str], str | None] | None] = ContextVar("fingerprints", default=None)


@contextmanager
def cache_fingerprints() -> Iterator[None]:
    """Read the fingerprint of each prepared data set only once within the block."""
    token = _fingerprint_cache.set({})
    try:
        yield
    finally:
        _fingerprint_cache.reset(token)


def find_novel_fingerprint(task: Task, home: Paths) -> str:
    """Return the fingerprint of the data set of the novel classes; "" if it is the task's own, or unknown.

    Args:
        task: The task.
        home: Folders of caches.
    """
    return next((find_dataset_fingerprint(spec, home) or "" for spec in data_specs_of_task(task, home)[1:]), "")


def find_dataset_fingerprint(spec: DataSpec, home: Paths) -> str | None:
    """Return the fingerprint of the prepared data set, or the one that the task is pinned to.

    Args:
        spec: Name and fingerprint in the task.
        home: Folders of caches.
    """
    fingerprints, key = _fingerprint_cache.get(), (home.data, spec.name)
    if fingerprints is None:
        fingerprints = {}
    if key not in fingerprints:
        dataset = open_prepared(home, spec.name)
        fingerprints[key] = dataset.fingerprint if dataset else None
    return fingerprints[key] or spec.fingerprint


def load_task_metadata(task: Task, home: Paths, published_counts: bool = False) -> DatasetMetadata:
    """Return the metadata of a task's data, prepared or not; nothing is made.

    Args:
        task: The task.
        home: Folders of caches.
        published_counts: Use published counts of data that have to be obtained first.

    Raises:
        UserError: The data have to be obtained first, have too few base classes, or do not fit those of the novel
            classes.
    """
    first, *others = data_specs_of_task(task, home)
    mine = _collect_metadata(first, home, published_counts, task.base_classes, task.base_order)
    if not others:
        return mine
    novel = _collect_metadata(others[0], home, published_counts)
    if not (mine.shape and novel.shape):
        return DatasetMetadata(mine.fingerprint, mine.shape, {}, False)
    check_cross_domain(task.dataset.name, mine.shape, str(task.novel_from), novel.shape, novel.class_starts_by_pool)
    starts = {**mine.class_starts_by_pool, **{pool: novel.class_starts_by_pool[pool] for pool in NOVEL_POOLS}}
    classes = {
        **mine.class_names_by_pool,
        **{pool: novel.class_names_by_pool[pool] for pool in NOVEL_POOLS if pool in novel.class_names_by_pool},
    }
    return DatasetMetadata(mine.fingerprint, mine.shape, starts, mine.is_prepared and novel.is_prepared, classes)


def _collect_metadata(
    spec: DataSpec, home: Paths, published_counts: bool, base_classes: int | None = None, base_order: int | None = None
) -> DatasetMetadata:
    name = spec.name
    if (dataset := open_prepared(home, name)) is not None:
        dataset = _with_base_classes(dataset, base_classes, base_order)
        starts = {pool: dataset.pool(pool).class_starts for pool in dataset.manifest["pools"]}
        classes = {pool: entry["classes"] for pool, entry in dataset.manifest["pools"].items()}
        return DatasetMetadata(
            dataset.fingerprint, dataset.shape, starts, True, classes, dataset.reason_supports_unknown
        )
    source = (
        datasets.find_dataset_source(name) if name in registry.registered_entry_points(registry.DATASET_GROUP) else None
    )
    if source is None or (source.needs_source and not (published_counts and source.expected_shape_and_counts())):
        raise UserError(not_prepared_message(home, spec))
    shape, counts = source.expected_shape_and_counts() or ((), {})
    if counts and base_classes is not None:
        check_base_classes(name, base_classes, counts["base/train"].n_classes)
    starts = {}
    for pool, count in counts.items():
        classes_left = base_classes if base_classes is not None and pool in BASE_POOLS else count.n_classes
        starts[pool] = np.arange(classes_left + 1, dtype=np.int64) * count.n_images // count.n_classes
    return DatasetMetadata(spec.fingerprint, shape, starts, False)


def data_specs_of_task(task: Task, home: Paths) -> tuple[DataSpec, ...]:
    """Return the data sets that a task needs: its own, and the novel classes' if it is another.

    Args:
        task: The task.
        home: Folders of caches.

    Raises:
        UserError: There is no data set of that name.
    """
    name = task.novel_from
    if name is None:
        return (task.dataset,)
    specs = {task.dataset.name: task.dataset for task in packaged_tasks().values()}
    if name not in specs:
        specs |= {task.dataset.name: task.dataset for task in own_tasks(home).values()}
    names = registry.registered_entry_points(registry.DATASET_GROUP)
    if name not in specs and name not in names and not is_prepared(home, name):
        raise unknown_name_error(
            "data set",
            name,
            {*names, *specs},
            where=f"that {task.name!r} takes novel classes from",
            see="ifsl-bench data list",
        )
    return task.dataset, specs.get(name, DataSpec(name=name))


def open_data(task: Task, home: Paths, reporter: Reporter) -> Dataset:
    """Return the data of a task; they are built now if they are not there and need no files.

    Args:
        task: The task.
        home: Folders of caches.
        reporter: Takes messages and progress.

    Raises:
        UserError: As :func:`ifsl_bench.data.preparing.prepare.open_or_build`; or there are too few base classes, the
            novel classes come from a data set that does not fit, or published supports are unknown.
    """
    first, *novel = (_ensure_dataset(spec, home, reporter) for spec in data_specs_of_task(task, home))
    check_supports_known(task, first.reason_supports_unknown)
    base = _with_base_classes(first, task.base_classes, task.base_order)
    return make_cross_domain(base, *novel) if novel else base


def check_supports_known(task: Task, unknown_because: str) -> None:
    """Raise UserError if a task has the supports of a published list, and its data do not say which these are.

    Args:
        task: The task.
        unknown_because: The reason, of its data; empty if they do.
    """
    if unknown_because and task.sessions is not None and task.sessions.published:
        raise UserError(
            f"{task.name} has the supports of a published list, which this copy of data set {task.dataset.name!r} "
            f"cannot tell: {unknown_because}, with: {datasets.format_prepare_command(task.dataset.name)} --force"
        )


def _with_base_classes(dataset: Dataset, base_classes: int | None, base_order: int | None) -> Dataset:
    if base_order is not None:
        dataset = with_other_base_classes(dataset, base_order)
    return dataset if base_classes is None else with_fewer_base_classes(dataset, base_classes)


def _ensure_dataset(spec: DataSpec, home: Paths, reporter: Reporter) -> Dataset:
    if (dataset := open_prepared_with_pinned_fingerprint(home, spec)) is not None:
        record_last_use(dataset.folder / "manifest.json")
        return dataset
    from ifsl_bench.data.preparing.prepare import open_or_build

    return open_or_build(home, spec, reporter)
