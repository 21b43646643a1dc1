"""Lists, settings and p-values as text."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def format_numbers(numbers: Iterable[int], least: int = 4) -> str:
    """Format whole numbers in order, each once: "0 to 4, 7, 9".

    Args:
        numbers: in any order.
        least: the number of neighbours from which on they are a range.
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) >= least else ", ".join(map(str, run)) for run in runs)


def join_or(words: Iterable[str]) -> str:
    """Join words, each once: "episodes", "episodes or orders"."""
    return " or ".join(sorted(set(words)))


def format_count(number: int, noun: str) -> str:
    """Format a number of things: "1 row", "2 classes", "1,000 rows".

    Args:
        number: how many.
        noun: the word for one of them.
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_seeds(seeds: Collection[int]) -> str:
    """Format seeds: "seed 0", "seeds 0, 1, 2", "seeds 0 to 4"."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {format_numbers(seeds)}"


def format_options(point: Mapping[str, Any]) -> str:
    """Format options: ``a=1, b=2``."""
    return ", ".join(f"{key}={format_value(value)}" for key, value in point.items())


def format_value(value: Any) -> str:
    """Format a value for a label; different values never look alike."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def format_p_value(value: float) -> str:
    """Format a p-value as in "p = 0.01"; smaller ones than 1e-15 rest on tails that no test has checked."""
    if math.isnan(value):
        return "unknown"
    return f"= {value:.2g}" if value >= 1e-15 else "< 1e-15"
