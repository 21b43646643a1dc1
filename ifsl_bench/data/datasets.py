"""Data sets by name: registered under the entry point group ``ifsl_bench.datasets``, or prepared in a home."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:
    from ifsl_bench.data.pools import Dataset
    from ifsl_bench.data.source import DatasetSource


@cache
def find_dataset_source(name: str) -> DatasetSource:
    """Return the data set plugin registered under ``name``.

    Raises:
        UserError: The name is unknown, or the plugin is broken or no :class:`DatasetSource`.
    """
    from ifsl_bench.data.source import DatasetSource

    value = registry.get_registered(registry.DATASET_GROUP, "data set", name)
    if not (isinstance(value, type) and issubclass(value, DatasetSource)):
        raise UserError(f"data set {name!r} is {value!r}, not a subclass of ifsl_bench.data.source.DatasetSource")
    return value()


def is_generated(name: str) -> bool:
    """Return whether a data set is registered, and made from nothing."""
    return (
        name in registry.registered_entry_points(registry.DATASET_GROUP) and not find_dataset_source(name).needs_source
    )


def is_prepared(home: Paths, name: str) -> bool:
    """Return whether a data set is prepared.

    Args:
        home: Folders of caches.
        name: Of the data set.
    """
    return os.path.exists(home.data / name / "manifest.json")


def open_prepared(home: Paths, name: str) -> Dataset | None:
    """Open a prepared data set; return None if it is not there, or damaged and can be made again from nothing.

    Args:
        home: Folders of caches.
        name: Of the data set.

    Raises:
        CorruptFile: It is damaged, and cannot be made again without its source.
        UserError: It may not be read.
    """
    if not is_prepared(home, name):
        return None
    from ifsl_bench.data.pools import open_dataset

    try:
        return open_dataset(home.data / name)
    except CorruptFile as error:
        if is_generated(name):
            return None
        raise CorruptFile(f"{error}; make it again with: {format_prepare_command(name)} --force") from error


def open_prepared_with_pinned_fingerprint(home: Paths, spec: DataSpec) -> Dataset | None:
    """Open a prepared data set if it has the fingerprint that a task is pinned to, else return None.

    Args:
        home: Folders of caches.
        spec: Name and fingerprint in the task.
    """
    if spec.fingerprint and is_prepared(home, spec.name):
        from ifsl_bench.data.pools import open_dataset

        with suppress(CorruptFile):
            dataset = open_dataset(home.data / spec.name)
            return dataset if dataset.fingerprint == spec.fingerprint else None
    return None


def format_prepare_command(name: str) -> str:
    """Return the command that prepares a data set."""
    plugin = (
        registry.load_plugin(registry.DATASET_GROUP, name)
        if name in registry.registered_entry_points(registry.DATASET_GROUP)
        else None
    )
    source = "" if plugin and not plugin.load_problem and not plugin.loaded_object.needs_source else " --from PATH"
    return f"ifsl-bench data prepare {name}{source}"


def not_prepared_message(home: Paths, spec: DataSpec) -> str:
    """Return the message that a data set is not prepared, and how to get it.

    Args:
        home: Folders of caches.
        spec: Name and source in the task.
    """
    then = f"Then: {format_prepare_command(spec.name)}"
    if spec.obtain and spec.name not in registry.registered_entry_points(registry.DATASET_GROUP):
        then = (
            "This version has no importer for them yet; frozen features of your own work with a task file of your own"
        )
    needs = f"It needs {spec.obtain}. {then}" if spec.obtain else then.replace("Then:", "To prepare it:")
    return f"data set {spec.name!r} is not prepared in {home.data}. {needs}"
