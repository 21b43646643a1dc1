"""A method's settings: the search for the best on validation episodes, in rounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ifsl_bench.plugin.find_method import searched_options
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import accepts, grid_of, space_of
from ifsl_bench.plugin.space import RATE, Space


def points(
    method: type[Method],
    fixed_options: Container[str],
    trials: int,
    default: Mapping[str, Any],
    rounds: Sequence[Sequence[tuple[Point, float]]] = (),
    sessions: bool = False,
) -> list[Point]:
    """The values of what is searched to try in the next round; one empty point where nothing is.

    The product of the grid's values, all in one round; or a round of
    :func:`ifsl_bench.plugin.search_points.next_round`.

    Args:
        rounds: the earlier ones, with accuracies.
        sessions: whether the grid is that of sessions.
    """
    free = searched_options(method, fixed_options, trials)
    if free and trials:
        return next_round(_space(method, free), default, trials, rounds)
    grid = grid_of(method, sessions)
    product = itertools.product(*(grid[key] for key in free))
    return [] if rounds else [dict(zip(free, values, strict=True)) for values in product]


def rounds_after_first(method: type[Method], fixed_options: Container[str], trials: int) -> int:
    """The number of rounds that a search has at most after its first."""
    free = searched_options(method, fixed_options, trials)
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
        values = [candidate[key] for candidate in offered if _is_number(candidate[key])]
        if not _is_number(value):
            continue
        ends = [end for end, extreme in ((-math.inf, min(values)), (math.inf, max(values))) if value == extreme]
        if any(key == RATE or accepts(method, {**options, **point, key: _beyond(value, end)}) for end in ends):
            edges.append(key)
    return edges


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beyond(value: float, end: float) -> float:
    """The next value towards an end."""
    return value + int(math.copysign(1, end)) if isinstance(value, int) else math.nextafter(value, end)


Point = dict[str, Any]  # option -> value
PAIR = 2  # settings of a later round: below the best one and above it
# Without 5, whose root is that of the golden section; 95, more than any method has options.
PRIMES = [number for number in range(2, 500) if number != 5 and all(number % n for n in range(2, number))]
HALVINGS = 4  # of the distance between these and the best, for each option


def next_round(
    space: Space, default: Mapping[str, Any], trials: int, rounds: Sequence[Sequence[tuple[Point, float]]]
) -> list[Point]:
    """The settings of a search's next round; none after the last one.

    The first round is the default and points spread over the whole space. Each later one is the best setting so far
    with one option changed, to a value below and one above. Options take turns, and each time that an option's turn
    comes again its two values are half as far from the best. Every trial is a whole one: the search costs as much as
    any other choice among ``trials`` settings.

    Args:
        rounds: the settings of each earlier round, with their accuracies; -inf for one that cannot be chosen.
    """
    pairs = later_rounds(space, trials)
    first = trials - PAIR * pairs
    if not rounds:
        return _each_once([{key: default[key] for key in space}, *spread(space, first)])[:first]  # which may hold it
    if len(rounds) > pairs:
        return []
    tried = [point for results in rounds for point, _ in results]
    best, _ = max((pair for results in rounds for pair in results), key=lambda pair: pair[1])
    reach = 0.5 * first ** (-1 / len(space)) * 0.5 ** ((len(rounds) - 1) // len(space))  # first half as far as they lie
    names = list(space)
    for turn in range(len(space)):  # an option that has nothing new beside the best leaves its turn to the next
        key = names[(len(rounds) - 1 + turn) % len(space)]
        points = _each_once([best | {key: value} for value in space[key].beside(best[key], reach)])
        if new := [point for point in points if point not in tried]:
            return new
    return []


def later_rounds(space: Space, trials: int) -> int:
    """The number of rounds that follow the first: half of the trials are in them, but for searches of many."""
    return min(trials // 2 // PAIR, HALVINGS * len(space))


def spread(space: Space, count: int) -> list[Point]:
    """``count`` points that fill the space evenly: multiples of an irrational number for each option, modulo 1
    (Richtmyer's sequence, 1951); of the golden section for the first option, for which they are most even."""
    steps = [(math.sqrt(5) - 1) / 2, *(math.sqrt(prime) % 1 for prime in PRIMES)]
    shares = [[(0.5 + i * step) % 1 for step in steps] for i in range(count)]
    return [{key: space[key].at(u) for key, u in zip(space, row, strict=False)} for row in shares]


def _each_once(points: Sequence[Point]) -> list[Point]:
    return [point for i, point in enumerate(points) if point not in points[:i]]
