"""Data sets by name: those that are registered under the entry point group ``ifsl_bench.datasets``."""

from __future__ import annotations

from functools import cache

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.source import DatasetSource
from ifsl_bench.plugin import registry


@cache
def dataset_source(name: str) -> DatasetSource:
    """The data set plugin registered under ``name``.

    Raises:
        UserError: unknown name (with the nearest ones), a broken plugin, or one that is no :class:`DatasetSource`.
    """
    value = registry.get(registry.DATASETS, "data set", name)
    if not (isinstance(value, type) and issubclass(value, DatasetSource)):
        raise UserError(f"data set {name!r} is {value!r}, not a subclass of ifsl_bench.data.source.DatasetSource")
    return value()


def is_made_here(name: str) -> bool:
    """Returns whether a data set is registered, and made from nothing."""
    return name in registry.names(registry.DATASETS) and not dataset_source(name).needs_source
