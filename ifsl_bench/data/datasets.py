"""Data sets by name: those that are registered under the entry point group ``ifsl_bench.datasets``, and those that are
prepared in a home."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from ifsl_bench.data.pools import Dataset, open_dataset
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:  # what has been prepared is opened without its source
    from ifsl_bench.data.source import DatasetSource


@cache
def dataset_source(name: str) -> DatasetSource:
    """The data set plugin registered under ``name``.

    Raises:
        UserError: unknown name (with the nearest ones), a broken plugin, or one that is no :class:`DatasetSource`.
    """
    from ifsl_bench.data.source import DatasetSource

    value = registry.get(registry.DATASETS, "data set", name)
    if not (isinstance(value, type) and issubclass(value, DatasetSource)):
        raise UserError(f"data set {name!r} is {value!r}, not a subclass of ifsl_bench.data.source.DatasetSource")
    return value()


def is_made_here(name: str) -> bool:
    """Returns whether a data set is registered, and made from nothing."""
    return name in registry.names(registry.DATASETS) and not dataset_source(name).needs_source


def is_prepared(home: Paths, name: str) -> bool:
    return os.path.exists(home.data / name / "manifest.json")


def prepared(home: Paths, name: str) -> Dataset | None:
    """The data set as it was prepared; None where it is not there, or damaged and made again when it is needed.

    Raises:
        CorruptFile: it is damaged, and cannot be made again without its source.
        UserError: it may not be read.
    """
    if not is_prepared(home, name):
        return None
    try:
        return open_dataset(home.data / name)
    except CorruptFile as error:
        if is_made_here(name):
            return None
        raise CorruptFile(f"{error}; make it again with: {command(name)} --force") from error


def pinned(home: Paths, spec: DataSpec) -> Dataset | None:
    """The prepared data set, whatever made it, if its fingerprint is the one that a task is pinned to."""
    if spec.fingerprint and is_prepared(home, spec.name):
        with suppress(CorruptFile):
            dataset = open_dataset(home.data / spec.name)
            return dataset if dataset.fingerprint == spec.fingerprint else None
    return None


def rough_seconds(name: str) -> float | None:
    """About how long a data set takes to make here; None where nobody knows."""
    return dataset_source(name).rough_seconds() if name in registry.names(registry.DATASETS) else None


def command(name: str) -> str:
    """The command that prepares a data set."""
    plugin = registry.load(registry.DATASETS, name) if name in registry.names(registry.DATASETS) else None
    source = "" if plugin and not plugin.problem and not plugin.value.needs_source else " --from PATH"
    return f"ifsl-bench data prepare {name}{source}"


def not_prepared(home: Paths, spec: DataSpec) -> str:
    """A message for someone who lacks a data set: how to get it, and what to do then."""
    then = f"Then: {command(spec.name)}"
    if spec.obtain and spec.name not in registry.names(registry.DATASETS):
        then = (
            "This version has no importer for them yet; frozen features of your own work with a task file of your own"
        )
    needs = f"It needs {spec.obtain}. {then}" if spec.obtain else then.replace("Then:", "To prepare it:")
    return f"data set {spec.name!r} is not prepared in {home.data}. {needs}"
