"""A method's settings: what tables call them, which are tried where options are tuned, and where a search goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import options_of, trains
from ifsl_bench.protocol.task import Task

MOST_BEYOND = 40  # values tried beyond the end of a grid


def tuned(method: type[Method], given: Mapping[str, Any]) -> list[str]:
    """The options that are chosen on the validation episodes: those that the method tunes and nobody has set."""
    return [key for key in method.tune if key not in given]


def settings(method: type[Method], given: Mapping[str, Any], task: Task) -> list[dict[str, Any]]:
    """The options to try: one setting, or the product of the grids of :func:`tuned`."""
    fixed, free = {**method.defaults(task), **given}, tuned(method, given)
    products = itertools.product(*(method.tune[key] for key in free))
    return [{**fixed, **dict(zip(free, values, strict=True))} for values in products]


def label(method: type[Method], name: str, given: Mapping[str, Any], task: Task) -> list[str]:
    """The method's name in tables, then each given option that the name does not say, as ``key=value``."""
    default = {key: option.default for key, option in options_of(method).items()}
    called, said = name, set[str]()
    # A copy or a subclass of a registered method is another one, and says so.
    if name in registry.names(registry.METHODS) and "shorthands" in vars(method):
        called, said = method.label(name, default | settings(method, given, task)[0])
    return [called, *(f"{key}={short(value)}" for key, value in given.items() if key not in said)]


def short(value: Any) -> str:
    """A value in a label; different values never look alike."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def beyond(method: type[Method], given: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings beyond the end of the grid at which ``best`` lies, nearest first; none where it is at no end.

    For one tuned option whose grid is a geometric row of positive numbers, in steps of that row; and only for methods
    without training, since each further setting of another one costs a training.
    """
    free = tuned(method, given)
    if len(free) != 1 or trains(method, best):
        return
    (key,) = free
    grid, ratio = method.tune[key], _ratio(method.tune[key])
    if ratio is None or best[key] not in (grid[0], grid[-1]):
        return
    step = ratio if best[key] == grid[-1] else 1 / ratio
    for i in range(1, MOST_BEYOND + 1):
        yield {**best, key: float(f"{best[key] * step**i:.3g}")}


def _ratio(grid: Sequence[Any]) -> float | None:
    """What each value of a grid is multiplied by to give the next; None where there is no such number."""
    if len(grid) < 4 or not all(isinstance(value, float) and value > 0 for value in grid):
        return None
    ratio = float((grid[-1] / grid[0]) ** (1 / (len(grid) - 1)))
    steps = (b / a for a, b in itertools.pairwise(grid))
    return ratio if ratio != 1 and all(math.isclose(step, ratio, rel_tol=0.01) for step in steps) else None
