"""Trees of tensors with a leading dimension of episodes, and the loop in which every solver changes them.

A tree is a nested tuple, named tuple, list or dict of tensors, flattened and put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

Tree = Any  # a Tensor, None, or a tuple / named tuple / list / dict of trees


def leaves(tree: Tree) -> list[Tensor | None]:
    """Return the leaves of a tree from left to right."""
    if tree is None or isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for child in tree for leaf in leaves(child)]
    raise TypeError(
        f"a tree holds tensors, None, tuples, lists and dicts, not {type(tree).__name__}; "
        "put constants that are not tensors into the objective"
    )


def rebuild(like: Tree, new: Sequence[Any]) -> Tree:
    """Return a tree with its leaves replaced.

    Args:
        like: the tree.
        new: the new leaves, in the order of `leaves`.
    """
    remaining = iter(new)

    def build(tree: Tree) -> Tree:
        if tree is None or isinstance(tree, Tensor):
            return next(remaining)
        if isinstance(tree, dict):
            return {key: build(child) for key, child in tree.items()}
        children = [build(child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)

    return build(like)


def side_by_side(trees: Sequence[Tree]) -> Tree:
    """Return trees of one form with leaves [E, N, ...] each, as one with all their columns."""
    columns = zip(*map(leaves, trees), strict=True)
    return rebuild(trees[0], [None if parts[0] is None else torch.cat(parts, 1) for parts in columns])


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf that is a tensor.

    Args:
        function: returns the new leaf.
        tree: its leaves may be None, and then stay so.
    """
    return rebuild(tree, [None if leaf is None else function(leaf) for leaf in leaves(tree)])


def doubled(tree: Tree) -> Tree:
    """Return the tree with its floating-point numbers in double precision."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def tensors(tree: Tree) -> list[Tensor]:
    """Return the leaves of a tree of unknowns, in which None has no place."""
    parts = leaves(tree)
    if any(leaf is None for leaf in parts):
        raise TypeError("the unknowns must all be tensors, and one of them is None")
    return [leaf for leaf in parts if leaf is not None]


def pack(tree: Tree) -> Tensor:
    """Return all leaves of a tree with leading dimension E side by side, [E, P]."""
    parts = [leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None] for leaf in tensors(tree)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpack(flat: Tensor, like: Tree) -> Tree:
    """Return the inverse of `pack`.

    Args:
        flat: [E, P].
        like: a tree with the shapes to cut it into; its own E may differ.
    """
    shapes = [leaf.shape[1:] for leaf in tensors(like)]
    parts = flat.split([shape.numel() for shape in shapes], 1)
    return rebuild(like, [part.reshape(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)])


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each episode, [E].

    Args:
        a: [E, ...].
        b: likewise.
    """
    a, b = a.flatten(1), b.flatten(1)
    if a.device.type == "cpu":  # two operations, but several times as fast there as the one of a device
        return torch.linalg.vecdot(a, b)
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def column(a: Tensor, like: Tensor) -> Tensor:
    """Shape a [E] so that it scales the episodes of like [E, ...].

    Args:
        a: a number for each episode, [E].
        like: [E, ...], for its dimensions alone.
    """
    return a.view(-1, *([1] * (like.dim() - 1)))


@lru_cache(maxsize=8)
def fixed_draw(count: int) -> Tensor:
    """Return standard normal numbers [count] in double precision, which are always the same."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


S = TypeVar("S")


@dataclass
class State:
    """The variables that an iteration changes, so that episodes can be taken out and put back.

    They are tensors with the leading dimension E, states again, and what all episodes have in common.
    """

    outputs: ClassVar[tuple[str, ...]] = ()  # what a result is read from: all that is put back
    common: ClassVar[tuple[str, ...]] = ()  # what all episodes have in common

    def select(self, index: Tensor) -> Any:
        """Return the state of the episodes in `index`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: x if n in self.common else _some(x, index) for n, x in values.items()})

    def put(self, index: Tensor, part: Any) -> Any:
        """Return the state with the `outputs` of some episodes replaced.

        Args:
            index: the episodes.
            part: their state.
        """
        return replace(self, **{n: getattr(self, n).index_copy(0, index, getattr(part, n)) for n in self.outputs})


def _some(x: Any, index: Tensor) -> Any:
    return x.select(index) if isinstance(x, State) else x.index_select(0, index)


def chosen(rows: Tensor, count: int) -> Tensor:
    """Return the indices of marked episodes, [count], without a look at which they are.

    Args:
        rows: the marks, [E] bool.
        count: how many are marked.
    """
    return rows.to(torch.uint8).argsort(descending=True, stable=True)[:count]


def patience(like: Tensor) -> int:
    """Return the steps between two looks at whether all are done, where those that are stay as they are.

    A look costs a CPU nothing, and a device waits.
    """
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
    """Return the state after `limit` steps, or earlier where no episode has far to go.

    A look at which episodes are done makes a device wait. So it is taken after `first` steps and then after every
    `every`, which become more as time goes on: when does not depend on the episodes.

    Args:
        step: one step, from state to state.
        state: the start.
        limit: how many steps at most.
        settle: `settle(state)` is a state in which the episodes that are done will stay as they are, and which are not
            [E].
        take: for states that are a `State`: episodes then leave the batch once they are half of it. `take(index)` is
            the step for some of the episodes that there are, or None where they cannot be separated.
        every: steps between two looks.
        first: steps before the first look.
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
