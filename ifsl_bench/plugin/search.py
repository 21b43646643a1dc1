"""The search for options: which settings are tried next, given how those tried so far did on validation episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ifsl_bench.plugin.space import Space

Point = dict[str, Any]  # option -> value
PAIR = 2  # settings of a later round: below the best one and above it
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
    tried = [point for one in rounds for point, _ in one]
    best, _ = max((pair for one in rounds for pair in one), key=lambda pair: pair[1])
    reach = 0.5 * first ** (-1 / len(space)) * 0.5 ** ((len(rounds) - 1) // len(space))  # first half as far as they lie
    names = list(space)
    for turn in range(len(space)):  # an option that has nothing new beside the best leaves its turn to the next
        key = names[(len(rounds) - 1 + turn) % len(space)]
        points = _each_once([best | {key: value} for value in space[key].beside(best[key], reach)])
        if new := [point for point in points if point not in tried]:
            return new
    return []


def later_rounds(space: Space, trials: int) -> int:
    """How many rounds follow the first: half of the trials are in them, but for searches of many."""
    return min(trials // 2 // PAIR, HALVINGS * len(space))


def spread(space: Space, count: int) -> list[Point]:
    """``count`` points that fill the space evenly: multiples of an irrational number for each option, modulo 1
    (Richtmyer's sequence, 1951); of the golden section for the first option, for which they are most even."""
    steps = [(math.sqrt(5) - 1) / 2, *(math.sqrt(prime) % 1 for prime in _primes(len(space)))]
    shares = [[(0.5 + i * step) % 1 for step in steps] for i in range(count)]
    return [{key: space[key].at(u) for key, u in zip(space, row, strict=False)} for row in shares]


def _primes(count: int) -> list[int]:
    """The first so many primes without 5, whose root is that of the golden section."""
    found: list[int] = []
    number = 2
    while len(found) < count:
        if number != 5 and all(number % prime for prime in (*found, 5) if prime < number):
            found.append(number)
        number += 1
    return found


def _each_once(points: Sequence[Point]) -> list[Point]:
    return [point for i, point in enumerate(points) if point not in points[:i]]
