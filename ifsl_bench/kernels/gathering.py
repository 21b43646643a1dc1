"""Rows of feature banks, put together to episodes."""

from __future__ import annotations

from typing import Any

from .compiling import Array, compiled, inlined

Indices = Any  # int64 [E, ...]
Flags = Any  # bool [E, ...]


@inlined
def copy(row: Array, out: Array) -> None:
    for d in range(row.shape[0]):
        out[d] = row[d]


@compiled
def gather(begin: int, end: int, rows: Indices, bank: Array, out: Array) -> None:
    """out [E, R, D] = bank[rows [E, R]]."""
    for e in range(begin, end):
        for i in range(rows.shape[1]):
            copy(bank[rows[e, i]], out[e, i])


@compiled
def gather_from_two(
    begin: int, end: int, rows: Indices, second: Flags, bank: Array, other: Array, out: Array
) -> None:  # fmt: skip
    """out [E, R, D] = bank[rows [E, R]], or other[rows] where `second` [E, R]."""
    for e in range(begin, end):
        for i in range(rows.shape[1]):
            if second[e, i]:
                copy(other[rows[e, i]], out[e, i])
            else:
                copy(bank[rows[e, i]], out[e, i])
