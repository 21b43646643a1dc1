"""The variance of rows in sessions, and of differences of two rows: the tables of ``ifsl-bench variance``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate, having, names_of
from ifsl_bench.analysis.comparison import overall
from ifsl_bench.analysis.ranking import Difference
from ifsl_bench.analysis.session_variance import PARTS, Variance, WrongSign, split, wrong_sign
from ifsl_bench.analysis.task_results import TaskResults, nothing_stored
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.reporting.columns import heading_of, plus_minus, rounded
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.utils.errors import UserError, unknown

ONE = "one"  # a single value: one order, support set and seed
NOTES = [
    "Standard deviations in points, with 95% intervals: of a single value (one order of the classes, one support set, "
    "one seed), and of what it is made of. docs/statistics.md has the model."
]
SIGN = (
    "wrong sign: how likely a comparison on one order, one support set and one seed has another sign than the mean of "
    "A - B, with its 95% interval; made here: the share of such comparisons among these results whose sign differs."
)
EMPTY = (
    "Empty: not known, or nothing varies over seeds. With one seed, a single one leaves out how much seeds vary; with "
    "one support set an order, that of supports is counted in that of orders."
)
NO_SIGN = "No wrong sign is given where the mean of A - B is 0, as of equal rows: it has no sign."


@dataclass(frozen=True, eq=False)
class VarianceSplit:
    """A row, or the difference a - b of two, with the variance of its parts."""

    a: SeedAggregate
    b: SeedAggregate | None
    mean: Estimate | Difference  # with its 95% interval: of a row over orders, of a difference over orders and seeds
    parts: Mapping[str, Variance]  # by PARTS and "one"; what the design cannot tell is left out
    seeds: int  # how many it is over; 1 where all are the same by construction
    sign: WrongSign | None = None  # of a difference that is not 0


def variance_tables(board: TaskResults, metric: str = "acc") -> list[Table[VarianceSplit]]:
    """Return tables of how rows vary, the best first; and of how their differences do, the better one first.

    Args:
        board: the results of the task.
        metric: the metric that is split.

    Raises:
        UserError: the task is in episodes, has one order, or no row has the metric.
    """
    rows = splits_of_rows(board, metric)
    heading = heading_of(metric, board.task).text
    one_backbone = [row.a for row in rows if row.a.one_pretraining]
    notes = [*NOTES, *(["Seeds are of meta-training alone: the backbone is held fixed."] if one_backbone else [])]
    fixed = [row.a.label for row in rows if row.a.fixed]
    notes += [f"The same for every seed, of which one counts: {', '.join(fixed)}."] if fixed else []
    notes += _empty(rows)
    names = dict(zip((row.a for row in rows), names_of([row.a for row in rows]), strict=True))
    tables = [
        Table([*_named(names, "method", "a"), *_columns(board, heading)], rows, f"{board.name}, {heading}", notes)
    ]
    if differences := splits_of_differences(board, metric):
        columns = [*_named(names, "A", "a"), *_named(names, "B", "b"), *_columns(board, f"A - B, {heading}"), *_sign()]
        signs = [SIGN, *_empty(differences), *([NO_SIGN] if any(entry.sign is None for entry in differences) else [])]
        tables.append(Table(columns, differences, f"{board.name}, differences of two rows", signs))
    return tables


def _empty(splits: Sequence[VarianceSplit]) -> list[str]:
    return [EMPTY] if any(part not in entry.parts for entry in splits for part in PARTS) else []


def splits_of_rows(board: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of each row, the best first; raise as :func:`variance_tables`.

    Args:
        board: the results of the task.
        metric: the metric that is split.
    """
    if not board.task.sessions:
        raise UserError(f"{board.name} is in episodes; variance splits that of tasks in sessions")
    if not board.rows:
        raise nothing_stored(board)
    rows = having((place.row for place in board.places), metric)
    if not rows:
        metrics = {name for row in board.rows for name in row.metrics}
        raise unknown("metric", metric, metrics, where=f"of the measured rows of {board.name}")
    return [split_of(row, metric) for row in rows]


def split_of(row: SeedAggregate, metric: str) -> VarianceSplit:
    """Return the split of a row; raise :class:`UserError` where there is one order of the classes.

    Args:
        row: the row.
        metric: the metric that is split.
    """
    x = _values(row, metric, row.seeds, row.fixed)
    return VarianceSplit(row, None, row.summary()[metric], split(x), len(x))


def splits_of_differences(board: TaskResults, metric: str) -> list[VarianceSplit]:
    """Return the split of the difference of every two rows that have a seed in common, the better one first.

    Args:
        board: the results of the task.
        metric: the metric that is split.
    """
    rows = having((place.row for place in board.places), metric)
    splits = []
    for a, b in itertools.combinations(rows, 2):
        if seeds := [seed for seed in a.seeds if seed in b.seeds]:
            fixed = a.fixed and b.fixed
            x = _values(a, metric, seeds, fixed) - _values(b, metric, seeds, fixed)
            gap = overall(a, b, board.compared, metric)
            splits.append(VarianceSplit(a, b, gap, split(x), len(x), wrong_sign(x)))
    return splits


def _values(row: SeedAggregate, metric: str, seeds: Sequence[int], fixed: bool) -> np.ndarray:
    """Return [seeds, orders, supports] of a row; of the first seed where all are the same."""
    return row.by_sequence(metric, seeds[:1] if fixed else seeds)


def _named(names: Mapping[SeedAggregate, str], heading: str, which: str) -> list[Column[VarianceSplit]]:
    def name(entry: VarianceSplit) -> str:
        row = entry.a if which == "a" else entry.b
        return names[row] if row else ""

    return [Column(heading, name, lambda entry: {heading.lower(): name(entry)}, fold=14)]


def _columns(board: TaskResults, heading: str) -> list[Column[VarianceSplit]]:
    def deviation(part: str) -> Column[VarianceSplit]:
        def text(entry: VarianceSplit) -> str:
            if part not in entry.parts:
                return ""
            value, low, high = _deviations(entry.parts[part])
            return f"{value:.2f} ({low:.2f}-{high:.2f})"

        def fields(entry: VarianceSplit) -> dict[str, float | None]:
            name = f"sd_{'single' if part == ONE else part.replace(' ', '_')}"
            values = _deviations(entry.parts[part]) if part in entry.parts else (math.nan,) * 3
            return {name + end: rounded(v) for end, v in zip(("", "_low", "_high"), values, strict=True)}

        return Column("a single one" if part == ONE else part, text, fields, drop=(*PARTS, ONE)[::-1].index(part))

    def mean(entry: VarianceSplit) -> dict[str, float | int | str | None]:
        return {
            "task": board.name,
            "mean": rounded(entry.mean.mean),
            "interval": rounded(entry.mean.interval),
            "seeds": entry.seeds,
        }

    sign = "+" if " - " in heading else ""
    return [
        Column(heading, lambda entry: plus_minus(entry.mean, sign), mean),
        *map(deviation, (ONE, *PARTS)),
        Column("seeds", lambda entry: str(entry.seeds)),
    ]


def _deviations(variance: Variance) -> tuple[float, float, float]:
    return math.sqrt(variance.value), math.sqrt(variance.low), math.sqrt(variance.high)


def _sign() -> list[Column[VarianceSplit]]:
    def text(entry: VarianceSplit) -> str:
        if entry.sign is None:
            return ""
        chance, low, high = (100 * value for value in (entry.sign.chance, entry.sign.low, entry.sign.high))
        return f"{chance:.0f}% ({low:.0f}-{high:.0f}%)"

    def fields(entry: VarianceSplit) -> dict[str, float | None]:
        sign = entry.sign or WrongSign(math.nan, math.nan, math.nan, math.nan)
        return {
            "wrong_sign": rounded(sign.chance),
            "wrong_sign_low": rounded(sign.low),
            "wrong_sign_high": rounded(sign.high),
            "wrong_sign_made": rounded(sign.observed),
        }

    return [
        Column("wrong sign", text, fields),
        Column("made here", lambda entry: f"{100 * entry.sign.observed:.0f}%" if entry.sign else ""),
    ]
