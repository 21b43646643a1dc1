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


def list_leaves(tree: Tree) -> list[Tensor | None]:
    """Return the leaves of a tree from left to right."""
    if tree is None or isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in list_leaves(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for child in tree for leaf in list_leaves(child)]
    raise TypeError(
        f"a tree holds tensors, None, tuples, lists and dicts, not {type(tree).__name__}; "
        "put constants that are not tensors into the objective"
    )


def rebuild_tree(like: Tree, new: Sequence[Any]) -> Tree:
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


def concatenate_trees(trees: Sequence[Tree]) -> Tree:
    """Return trees of one form with leaves [E, N, ...] each, as one with all their columns."""
    columns = zip(*map(list_leaves, trees), strict=True)
    return rebuild_tree(trees[0], [None if parts[0] is None else torch.cat(parts, 1) for parts in columns])


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf that is a tensor.

    Args:
        function: returns the new leaf.
        tree: its leaves may be None, and then stay so.
    """
    return rebuild_tree(tree, [None if leaf is None else function(leaf) for leaf in list_leaves(tree)])


def to_float64(tree: Tree) -> Tree:
    """Return the tree with its floating-point numbers in double precision."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def tensor_leaves(tree: Tree) -> list[Tensor]:
    """Return the leaves of a tree of unknowns, in which None has no place."""
    parts = list_leaves(tree)
    if any(leaf is None for leaf in parts):
        raise TypeError("the unknowns must all be tensors, and one of them is None")
    return [leaf for leaf in parts if leaf is not None]


def pack_leaves_into_rows(tree: Tree) -> Tensor:
    """Return all leaves of a tree with leading dimension E side by side, [E, P]."""
    parts = [leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None] for leaf in tensor_leaves(tree)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpack_rows_to_tree(flat: Tensor, like: Tree) -> Tree:
    """Return the inverse of `pack`.

    Args:
        flat: [E, P].
        like: a tree with the shapes to cut it into; its own E may differ.
    """
    shapes = [leaf.shape[1:] for leaf in tensor_leaves(like)]
    parts = flat.split([shape.numel() for shape in shapes], 1)
    return rebuild_tree(like, [part.reshape(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)])


def inner_product_by_episode(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each episode, [E].

    Args:
        a: [E, ...].
        b: likewise.
    """
    a, b = a.flatten(1), b.flatten(1)
    if a.device.type == "cpu":  # two operations, but several times as fast there as the one of a device
        return torch.linalg.vecdot(a, b)
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def expand_to_episode_shape(a: Tensor, like: Tensor) -> Tensor:
    """Shape a [E] so that it scales the episodes of like [E, ...].

    Args:
        a: a number for each episode, [E].
        like: [E, ...], for its dimensions alone.
    """
    return a.view(-1, *([1] * (like.dim() - 1)))


@lru_cache(maxsize=8)
def fixed_normal_draws(count: int) -> Tensor:
    """Return standard normal numbers [count] in double precision, which are always the same."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


StateT = TypeVar("StateT")


@dataclass
class IterationState:
    """The variables that an iteration changes, so that episodes can be taken out and put back.

    They are tensors with the leading dimension E, states again, and what all episodes have in common.
    """

    fields_put_back: ClassVar[tuple[str, ...]] = ()  # what a result is read from: all that is put back
    fields_common_to_episodes: ClassVar[tuple[str, ...]] = ()  # what all episodes have in common

    def select_episodes(self, index: Tensor) -> Any:
        """Return the state of the episodes in `index`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(
            **{n: x if n in self.fields_common_to_episodes else _select_episodes(x, index) for n, x in values.items()}
        )

    def replace_episodes(self, index: Tensor, part: Any) -> Any:
        """Return the state with the `fields_put_back` of some episodes replaced.

        Args:
            index: the episodes.
            part: their state.
        """
        return replace(
            self, **{n: getattr(self, n).index_copy(0, index, getattr(part, n)) for n in self.fields_put_back}
        )


def _select_episodes(x: Any, index: Tensor) -> Any:
    return x.select_episodes(index) if isinstance(x, IterationState) else x.index_select(0, index)


def indices_of_marked_episodes(marks: Tensor, count: int) -> Tensor:
    """Return the indices of marked episodes, [count], without a look at which they are.

    Args:
        marks: the marks, [E] bool.
        count: how many are marked.
    """
    return marks.to(torch.uint8).argsort(descending=True, stable=True)[:count]


def choose_steps_between_checks(like: Tensor) -> int:
    """Return the number of steps between two checks of whether all episodes are done.

    A check costs a CPU nothing, and a device waits.
    """
    return 1 if like.device.type == "cpu" else 8


def iterate_until_finished(
    step: Callable[[StateT], StateT],
    state: StateT,
    max_steps: int,
    finish_episodes: Callable[[StateT], tuple[StateT, Tensor]] | None = None,
    select_step: Callable[[Tensor], Callable[[StateT], StateT] | None] | None = None,
    check_every: int = 1,
    first_check: int = 1,
) -> StateT:
    """Return the state after `max_steps` steps, or earlier where no episode has far to go.

    A check of which episodes are done makes a device wait. So it is made after `first_check` steps and then after every
    `check_every`, which become more as time goes on: when does not depend on the episodes.

    Args:
        step: one step, from state to state.
        state: the start.
        max_steps: how many steps at most.
        finish_episodes: `finish_episodes(state)` returns a state in which the episodes that are done will stay as they
            are, and a mark of the others [E].
        select_step: for states that are an `IterationState`: episodes then leave the batch once they are half of it.
            `select_step(index)` returns the step for some of the episodes, or None where they cannot be separated.
        check_every: steps between two checks.
        first_check: steps before the first check.
    """
    whole: Any = None  # the last state of all episodes, where only `rows` go on
    rows: Any = None
    look = first_check
    for count in range(1, max_steps + 1):
        state = step(state)
        if finish_episodes is None or (count < look and count < max_steps):
            continue
        look = count + max(check_every, check_every * count // 250)
        state, going = finish_episodes(state)
        if (count_going := int(going.sum())) == 0:
            break
        if select_step is not None and 2 * count_going <= len(going):
            here = indices_of_marked_episodes(going, count_going)
            if (smaller := select_step(here)) is None:
                select_step = None
            else:
                whole, rows = (state, here) if whole is None else (whole.replace_episodes(rows, state), rows[here])
                step, state = smaller, state.select_episodes(here)  # type: ignore[attr-defined]
    return state if whole is None else whole.replace_episodes(rows, state)
