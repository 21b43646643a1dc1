"""Rows of feature banks, put together to episodes."""

from __future__ import annotations

from typing import Any

from ifsl_bench.solvers.numba_compiling import Array, compiled, inlined

Indices = Any  # int64 [E, ...]
Flags = Any  # bool [E, ...]


@inlined
def copy(bank: Array, row: int, out: Array) -> bool:
    """Returns whether there is such a row; then it is in `out`."""
    if not 0 <= row < bank.shape[0]:
        return False
    for d in range(out.shape[0]):
        out[d] = bank[row, d]
    return True


@compiled
def gather(
    begin: int, end: int, rows: Indices, second: Flags, bank: Array, second_bank: Array, out: Array, there: Flags
) -> None:  # fmt: skip
    """out [E, R, D] = bank[rows [E, R]], or second_bank[rows] where `second` [E, R]; there [E]: whether the banks have
    all these rows."""
    for e in range(begin, end):
        good = True
        for i in range(rows.shape[1]):
            if second[e, i]:
                good &= copy(second_bank, rows[e, i], out[e, i])
            else:
                good &= copy(bank, rows[e, i], out[e, i])
        there[e] = good
