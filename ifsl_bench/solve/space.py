"""The coordinates that a quasi-Newton method works in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .objective import Objective, value_and_gradient
from .tree import Tree, dot, pack, tensors, tree_map, unpack


class Space(Protocol):
    """Coordinates z [E, P]: R^P with the metric M, so <a, b> = a . M b.

    Gradients are given as representers in that metric. The large form has M = 1; a reduced form has M = its kernels.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def penalised(self) -> bool:
        """Whether <z, z> / 2 is the penalty in the objective."""

    def initial(self) -> Tensor:
        """z [E, P] to start from."""

    def image(self, z: Tensor) -> Tensor:
        """M z."""

    def evaluate(self, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value [E], gradient [E, P], and the norm of the gradient in the large form [E]."""

    def curvature(self, z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """The Hessian at z: p, M p -> the change of the gradient."""

    def expand(self, z: Tensor) -> Tree:
        """z in the large form."""

    def take(self, index: Tensor) -> Space | None:
        """The same space for some episodes alone, or None where the arguments cannot be split."""

    def whitened(self) -> Whitened:
        """The same point by point, in coordinates whose metric is the Euclidean one."""

    def double(self, index: Tensor) -> Space | None:
        """The same for some episodes in float64, or None where that is no use."""


class Whitened(Protocol):
    """Coordinates w [E, P] in which |w| is the length of z in the metric of its `Space`."""

    def into(self, z: Tensor) -> Tensor:
        """w for z."""

    def back(self, w: Tensor) -> Tensor:
        """z for w."""

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Value [E], and the gradient [E, P] in pieces, side by side."""

    def norm(self, g: Tensor) -> Tensor:
        """Of a gradient g [E, P] in the large form: [E]."""

    def take(self, index: Tensor) -> Whitened | None:
        """The same for some episodes alone, or None where the arguments cannot be split."""


class HasSpace(Protocol):
    """An objective that has coordinates of its own."""

    def space(self, v0: Tree, args: Tree) -> Space:
        """Those to search in from v0, or from a start of their own if it is None."""


def coordinates(objective: Objective, v0: Tree, args: Tree) -> Space:
    """The objective's own, or the large form."""
    if (own := getattr(objective, "space", None)) is not None:
        return own(v0, args)
    if v0 is None:
        raise ValueError(f"{type(objective).__name__} has no start of its own: give v0")
    return LargeSpace(objective, v0, args)


@dataclass(frozen=True)
class LargeSpace:
    """The unknowns as they are, side by side, with the Euclidean metric."""

    objective: Objective
    v0: Tree
    args: Tree
    penalised: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return tensors(self.v0)[0].dtype

    def initial(self) -> Tensor:
        return pack(self.v0).detach().clone()

    def image(self, z: Tensor) -> Tensor:
        return z

    def evaluate(self, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = value_and_gradient(self.objective, unpack(z, self.v0), self.args)
        flat = pack(slope)
        return value, flat, dot(flat, flat).sqrt()

    def curvature(self, z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        product = self.objective.hessian(unpack(z, self.v0), self.args).product
        return lambda p, _: pack(product(unpack(p, self.v0)))

    def expand(self, z: Tensor) -> Tree:
        return unpack(z, self.v0)

    def take(self, index: Tensor) -> LargeSpace | None:
        if (own := getattr(self.objective, "take", None)) is None or (args := own(self.args, index)) is None:
            return None
        return LargeSpace(self.objective, tree_map(lambda leaf: leaf[index], self.v0), args)

    def whitened(self) -> Whitened:
        return _Plain(self)

    def double(self, index: Tensor) -> None:
        return None


@dataclass(frozen=True)
class _Plain:
    """A `LargeSpace`, which is white as it is."""

    space: LargeSpace

    def into(self, z: Tensor) -> Tensor:
        return z

    def back(self, w: Tensor) -> Tensor:
        return w

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        value, slope, _ = self.space.evaluate(w, w)
        return value, (slope,)

    def norm(self, g: Tensor) -> Tensor:
        return dot(g, g).sqrt()

    def take(self, index: Tensor) -> _Plain | None:
        return None if (part := self.space.take(index)) is None else _Plain(part)


class HasSearch(Protocol):
    """An objective with a search of its own, which follows the solver's rules."""

    def search(self, solver: Any, args: Tree) -> Any | None:
        """The `Outcome` from a start of its own, or None where the solver is to do it."""
