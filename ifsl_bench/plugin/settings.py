"""A method's settings: what tables call them, and which are tried where some are chosen on validation episodes."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any

from ifsl_bench.common.wording import short
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import defaults, grid_of, space_of
from ifsl_bench.plugin.space import halton
from ifsl_bench.protocol.task import Task


def searched(method: type[Method], given: Container[str], trials: int) -> list[str]:
    """What is chosen on validation episodes: of the method's grid, or with ``trials`` of its space, what is not given.

    Names of options, and ``train.rate`` for the learning rate of meta-training.
    """
    return [key for key in (method.space if trials else method.grid) if key not in given]


def points(
    method: type[Method], given: Container[str], trials: int, default: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The values of :func:`searched` to try; one empty point where it is empty.

    The product of the grid's values; or the default and ``trials - 1`` points of the space, see
    :func:`ifsl_bench.plugin.space.halton`.
    """
    free = searched(method, given, trials)
    if not free or not trials:
        grid = grid_of(method)
        return [dict(zip(free, values, strict=True)) for values in itertools.product(*(grid[key] for key in free))]
    return [{key: point[key] for key in free} for point in (default, *halton(space_of(method), trials - 1))]


def at_edge(method: type[Method], point: Mapping[str, Any], trials: int) -> list[str]:
    """The names in a point whose values lie on the edge of the grid, or of the space, that they were chosen from."""
    if trials:
        space = space_of(method)
        return [key for key, value in point.items() if space[key].at_edge(value)]
    return [key for key, value in point.items() if value in (method.grid[key][0], method.grid[key][-1])]


def label(method: type[Method], name: str, given: Mapping[str, Any], task: Task) -> list[str]:
    """The method's name in tables, then each given option that the name does not say, as ``key=value``."""
    called, said = name, set[str]()
    # A copy or a subclass of a registered method is another one, and says so.
    if name in registry.names(registry.METHODS) and "shorthands" in vars(method):
        called, said = method.label(name, defaults(method, task) | dict(given))
        if called != name and called not in method.shorthands:
            registry.check_free(called, name, f"label {called!r} of method {name}")
        package = name.rpartition(":")[0]  # said where others have the name too
        called = called if called.startswith(f"{package}:") or not package else f"{package}:{called}"
    return [called, *(f"{key}={short(value)}" for key, value in given.items() if key not in said)]
