"""The loop of every solver: step after step until all episodes are done, or a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

S = TypeVar("S")


@dataclass
class State:
    """The variables that an iteration changes, so that episodes can be taken out and put back: tensors with the leading
    dimension E, states again, and what all episodes have in common."""

    outputs: ClassVar[tuple[str, ...]] = ()  # what a result is read from: all that is put back
    common: ClassVar[tuple[str, ...]] = ()  # what all episodes have in common

    def select(self, index: Tensor) -> Any:
        """The state of the episodes in `index`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: x if n in self.common else _some(x, index) for n, x in values.items()})

    def put(self, index: Tensor, part: Any) -> Any:
        """The state with `kept` of the episodes in `index` replaced by those of `part`."""
        return replace(self, **{n: getattr(self, n).index_copy(0, index, getattr(part, n)) for n in self.outputs})


def _some(x: Any, index: Tensor) -> Any:
    return x.select(index) if isinstance(x, State) else x.index_select(0, index)


def chosen(rows: Tensor, count: int) -> Tensor:
    """The indices [count] of the `count` episodes marked in rows [E] bool, without a look at which they are."""
    return rows.to(torch.uint8).argsort(descending=True, stable=True)[:count]


def patience(like: Tensor) -> int:
    """Steps between two looks at whether all are done, where those that are stay as they are: a look costs a CPU
    nothing, and a device waits."""
    return 1 if like.device.type == "cpu" else 8


def iterate(
    step: Callable[[S], S],
    state: S,
    limit: int,
    settle: Callable[[S], tuple[S, Tensor]] | None = None,
    take: Callable[[Tensor], Callable[[S], S] | None] | None = None,
    every: int = 1,
    first: int = 1,
) -> S:
    """The state after `limit` steps, or earlier where no episode has far to go.

    settle(state): a state in which the episodes that are done will stay as they are, and which are not [E]. A look at
    that makes a device wait. So it is taken after `first` steps and then after every `every`, which become more as time
    goes on: when does not depend on the episodes.

    With `take`, for states that are a `State`, episodes then leave the batch once they are half of it: take(index) is
    the step for some of the episodes that there are, or None where they cannot be separated.
    """
    whole: Any = None  # the last state of all episodes, where only `rows` go on
    rows: Any = None
    look = first
    for count in range(1, limit + 1):
        state = step(state)
        if settle is None or (count < look and count < limit):
            continue
        look = count + max(every, every * count // 250)
        state, going = settle(state)
        if (count_going := int(going.sum())) == 0:
            break
        if take is not None and 2 * count_going <= len(going):
            here = chosen(going, count_going)
            if (smaller := take(here)) is None:
                take = None
            else:
                whole, rows = (state, here) if whole is None else (whole.put(rows, state), rows[here])
                step, state = smaller, state.select(here)  # type: ignore[attr-defined]
    return state if whole is None else whole.put(rows, state)
