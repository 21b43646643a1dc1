"""Hits of joint logits, in one look at them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import njit

from ifsl_bench.solvers.numba_compiling import Array, Decorator, compiled, inlined
from ifsl_bench.solvers.numba_gathering import Flags, Indices

# A maximum by vectors: for that NaN must not matter, and who has NaN says so (`bad`).
maximal: Decorator = cast(Any, njit(nogil=True, error_model="numpy", fastmath={"nnan", "nsz"}))


@maximal
def largest(x: Array) -> float:
    """The largest of a flat array; anything where it has NaN."""
    value = x[0]
    for i in range(x.shape[0]):
        value = max(value, x[i])
    return value


@inlined
def bad(x: Array) -> bool:
    """Returns whether a flat array has NaN or +inf."""
    any_bad = 0
    for i in range(x.shape[0]):
        any_bad |= not x[i] < np.inf
    return any_bad != 0


@inlined
def first(x: Array, value: float, place: int) -> bool:
    """Returns whether `place` is the first one with this value, so that an argmax would answer it."""
    if not 0 <= place < x.shape[0] or x[place] != value:
        return False
    for i in range(place):  # noqa: SIM110
        if x[i] == value:
            return False
    return True


@compiled
def count(
    begin: int, end: int, logits: Array, masked: Flags, labels: Indices, of_novel: Flags, hits: Indices,
    base_margins: Array, novel_margins: Array, pairs: Indices, wrong: Flags,
) -> None:  # fmt: skip
    """Counts hits in episodes with joint logits [E, Q, K + N], in which base classes `masked` [E, K] are at -inf.

    hits [4, E]: base queries right among all classes, among base classes; novel queries likewise. The margins [E, B]
    and [E, Q - B] of base and novel queries, their `pairs` [E] as `ifsl_bench.protocols.calibration` defines them, and
    whether an episode has logits that are none [E].
    """
    queries, classes = logits.shape[1], masked.shape[1]
    shown = np.empty(classes, logits.dtype)
    for e in range(begin, end):
        none = False
        base_at = novel_at = base_joint = base_alone = novel_joint = novel_alone = 0
        for q in range(queries):
            row = logits[e, q]
            none |= bad(row)
            for k in range(classes):
                shown[k] = -np.inf if masked[e, k] else row[k]
            base, novel, label = largest(shown), largest(row[classes:]), labels[e, q]
            margin = np.float32(np.inf) if novel == -np.inf else np.float32(base - novel)
            if of_novel[e, q]:
                right = first(row[classes:], novel, label - classes)
                novel_alone += right
                novel_joint += right and novel > base
                novel_margins[e, novel_at] = margin if right else np.float32(np.nan)
                novel_at += 1
            else:
                right = first(shown, base, label)
                base_alone += right
                base_joint += right and base >= novel
                base_margins[e, base_at] = margin if right else np.float32(np.nan)
                base_at += 1
        hits[0, e], hits[1, e], hits[2, e], hits[3, e] = base_joint, base_alone, novel_joint, novel_alone
        total = 0
        for i in range(base_margins.shape[1]):
            for j in range(novel_margins.shape[1]):
                total += base_margins[e, i] > novel_margins[e, j]
                total += base_margins[e, i] >= novel_margins[e, j]
        pairs[e], wrong[e] = total, none
