"""Nested tuples, named tuples, lists and dicts of tensors, flattened and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any  # a Tensor, None, or a tuple / named tuple / list / dict of trees


def leaves(tree: Tree) -> list[Tensor | None]:
    """The leaves of a tree from left to right."""
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
    """The tree `like` with its leaves replaced by `new`, in the order of `leaves`."""
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
    """Trees of one form with leaves [E, N, ...] each, as one with all their columns."""
    columns = zip(*map(leaves, trees), strict=True)
    return rebuild(trees[0], [None if parts[0] is None else torch.cat(parts, 1) for parts in columns])


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Applies `function` to every leaf that is a tensor."""
    return rebuild(tree, [None if leaf is None else function(leaf) for leaf in leaves(tree)])


def doubled(tree: Tree) -> Tree:
    """The tree with its floating-point numbers in double precision."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def tensors(tree: Tree) -> list[Tensor]:
    """The leaves of a tree of unknowns, in which None has no place."""
    parts = leaves(tree)
    if any(leaf is None for leaf in parts):
        raise TypeError("the unknowns must all be tensors, and one of them is None")
    return [leaf for leaf in parts if leaf is not None]


def pack(tree: Tree) -> Tensor:
    """All leaves of a tree with leading dimension E side by side: [E, P]."""
    parts = [leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None] for leaf in tensors(tree)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpack(flat: Tensor, like: Tree) -> Tree:
    """The inverse of `pack`: flat [E, P] cut into the shapes of `like` (whose own E may differ)."""
    shapes = [leaf.shape[1:] for leaf in tensors(like)]
    parts = flat.split([shape.numel() for shape in shapes], 1)
    return rebuild(like, [part.reshape(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)])


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each episode: [E, ...] x [E, ...] -> [E]."""
    a, b = a.flatten(1), b.flatten(1)
    if a.device.type == "cpu":  # two operations, but several times as fast there as the one of a device
        return torch.linalg.vecdot(a, b)
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def column(a: Tensor, like: Tensor) -> Tensor:
    """Shapes a [E] so that it scales the episodes of like [E, ...]."""
    return a.view(-1, *([1] * (like.dim() - 1)))
