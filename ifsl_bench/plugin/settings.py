"""A method's settings: what tables call them, and which are tried where some are chosen on validation episodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ifsl_bench.common.wording import short
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import accepts, defaults, grid_of, space_of
from ifsl_bench.plugin.search import Point, later_rounds, next_round
from ifsl_bench.plugin.space import RATE, Space
from ifsl_bench.protocol.task import Task


def searched(method: type[Method], given: Container[str], trials: int) -> list[str]:
    """What is chosen on validation episodes: of the method's grid, or with ``trials`` of its space, what is not given.

    Names of options, and ``train.rate`` for the learning rate of meta-training.
    """
    return [key for key in (method.space if trials else method.grid) if key not in given]


def points(
    method: type[Method],
    given: Container[str],
    trials: int,
    default: Mapping[str, Any],
    rounds: Sequence[Sequence[tuple[Point, float]]] = (),
) -> list[Point]:
    """The values of :func:`searched` to try in the next round; one empty point where it is empty.

    The product of the grid's values, all in one round; or a round of :func:`ifsl_bench.plugin.search.next_round`.

    Args:
        rounds: the earlier ones, with accuracies.
    """
    free = searched(method, given, trials)
    if free and trials:
        return next_round(_space(method, free), default, trials, rounds)
    grid = grid_of(method)
    product = itertools.product(*(grid[key] for key in free))
    return [] if rounds else [dict(zip(free, values, strict=True)) for values in product]


def rounds_after_first(method: type[Method], given: Container[str], trials: int) -> int:
    """How many rounds a search has at most after its first."""
    free = searched(method, given, trials)
    return later_rounds(_space(method, free), trials) if free and trials else 0


def _space(method: type[Method], keys: Sequence[str]) -> Space:
    """A part of the method's space."""
    space = space_of(method)
    return {key: space[key] for key in keys}


def at_edge(method: type[Method], options: Mapping[str, Any], point: Point, offered: Sequence[Point]) -> list[str]:
    """The numbers in a point that are the smallest or the largest offered, but for those at the end of what the option
    takes: nothing lies beyond them.

    Args:
        options: the method's other options.
    """
    edges = []
    for key, value in point.items():
        values = [one[key] for one in offered]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        ends = [end for end, extreme in ((-math.inf, min(values)), (math.inf, max(values))) if value == extreme]
        if any(key == RATE or accepts(method, {**options, **point, key: _beyond(value, end)}) for end in ends):
            edges.append(key)
    return edges


def _beyond(value: float, end: float) -> float:
    """The next value towards an end."""
    return value + int(math.copysign(1, end)) if isinstance(value, int) else math.nextafter(value, end)


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
