"""The loop of every solver: step after step until all episodes are done, or a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

S = TypeVar("S")


@dataclass
class State:
    """What an iteration changes: tensors with the leading dimension E, or states again, so that episodes can be taken
    out and put back."""

    kept: ClassVar[tuple[str, ...]] = ()  # what a result is read from: all that is put back

    def select(self, index: Tensor) -> Any:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: x.select(index) if isinstance(x, State) else x[index] for n, x in found.items()})

    def put(self, index: Tensor, part: Any) -> Any:
        return replace(self, **{n: getattr(self, n).index_copy(0, index, getattr(part, n)) for n in self.kept})


def iterate(
    step: Callable[[S], S],
    state: S,
    limit: int,
    active: Callable[[S], Tensor] | None = None,
    take: Callable[[Tensor], Callable[[S], S] | None] | None = None,
) -> S:
    """The state after `limit` steps, or earlier where `active` [E] says that no episode has far to go.

    A step is made for all episodes at once and leaves those as they are that are done. With `take`, for states that
    are a `State`, they leave the batch once they are half of it: take(index) is the step for some of the first state's
    episodes alone, or None where they cannot be separated.
    """
    whole: Any = None  # the last state of all episodes, where only `rows` go on
    rows: Any = None
    for _ in range(limit):
        if active is not None:
            going = active(state)
            left = int(going.sum())
            if left == 0:
                break
            if take is not None and 2 * left <= len(going):
                here = going.nonzero()[:, 0]
                there = here if rows is None else rows[here]
                if (smaller := take(there)) is None:
                    take = None
                else:
                    whole = state if whole is None else whole.put(rows, state)
                    step, rows, state = smaller, there, state.select(here)  # type: ignore[attr-defined]
        state = step(state)
    return state if whole is None else whole.put(rows, state)
