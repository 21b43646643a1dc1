"""A method's settings: what tables call them, and which are tried where options are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import options_of
from ifsl_bench.protocol.task import Task


def searched(method: type[Method], given: Mapping[str, Any]) -> list[str]:
    """The options that are chosen on validation episodes: those that the method tunes and nobody has set."""
    return [key for key in method.tune if key not in given]


def points(method: type[Method], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of :func:`searched` to try: the product of their grids, which is one empty point without any."""
    free = searched(method, given)
    return [dict(zip(free, values, strict=True)) for values in itertools.product(*(method.tune[key] for key in free))]


def label(method: type[Method], name: str, given: Mapping[str, Any], task: Task) -> list[str]:
    """The method's name in tables, then each given option that the name does not say, as ``key=value``."""
    default = {key: option.default for key, option in options_of(method).items()}
    called, said = name, set[str]()
    # A copy or a subclass of a registered method is another one, and says so.
    if name in registry.names(registry.METHODS) and "shorthands" in vars(method):
        called, said = method.label(name, default | method.defaults(task) | dict(given))
    return [called, *(f"{key}={short(value)}" for key, value in given.items() if key not in said)]


def spelled(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """Some options in words, ``a=1, b=2``."""
    return ", ".join(f"{name}={short(values[name])}" for name in names)


def short(value: Any) -> str:
    """A value in a label; different values never look alike."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
