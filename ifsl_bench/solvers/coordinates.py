"""Coordinates of a quasi-Newton method, the unknowns or an objective's own, and how to leave a saddle in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ifsl_bench.solvers.linear import conjugate_gradient
from ifsl_bench.solvers.objective import Objective, value_and_gradient
from ifsl_bench.solvers.tree import (
    Tree,
    expand_to_episode_shape,
    fixed_normal_draws,
    inner_product_by_episode,
    pack_leaves_into_rows,
    tensor_leaves,
    tree_map,
    unpack_rows_to_tree,
)


class SearchCoordinates(Protocol):
    """Coordinates z [E, P]: R^P with the metric M, so <a, b> = a . M b.

    Gradients are given as representers in that metric. The large form has M = 1; a reduced form has M = its kernels.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_metric_penalty(self) -> bool:
        """Return True where <z, z> / 2 is the penalty in the objective."""

    def initial_point(self) -> Tensor:
        """Return the start, z [E, P]."""

    def apply_metric(self, z: Tensor) -> Tensor:
        """Return the metric times z."""

    def evaluate(self, z: Tensor, metric_z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value [E], the gradient [E, P], and its norm in the large form [E].

        Args:
            z: coordinates, [E, P].
            metric_z: the metric times z, [E, P].
        """

    def hessian(self, z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the Hessian at z, a function of p and M p."""

    def to_unknowns(self, z: Tensor) -> Tree:
        """Return the unknowns in the large form."""

    def select_episodes(self, index: Tensor) -> SearchCoordinates | None:
        """Return the space of some episodes alone; None where the arguments cannot be split."""

    def to_whitened_coordinates(self) -> WhitenedCoordinates:
        """Return coordinates of the same points whose metric is the Euclidean one."""

    def select_in_float64(self, index: Tensor) -> SearchCoordinates | None:
        """Return the space of some episodes in float64; None where that is no use."""


class WhitenedCoordinates(Protocol):
    """Coordinates w [E, P] in which |w| is the length of z in the metric of its `SearchCoordinates`."""

    def from_coordinates(self, z: Tensor) -> Tensor:
        """Return w for z."""

    def to_coordinates(self, w: Tensor) -> Tensor:
        """Return z for w."""

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the value [E], and pieces that make the gradient [E, P] side by side."""

    def gradient_norm(self, g: Tensor) -> Tensor:
        """Return the norm of a gradient g [E, P] in the large form: [E]."""

    def select_episodes(self, index: Tensor) -> WhitenedCoordinates | None:
        """Return the coordinates of some episodes alone; None where the arguments cannot be split."""


def choose_search_coordinates(objective: Objective, v0: Tree, args: Tree) -> SearchCoordinates:
    """Return the coordinates to search in: the objective's own, or the large form.

    Args:
        objective: has coordinates of its own if its `search_coordinates` returns some.
        v0: the start, a tree with leading dimension E; None for the objective's own.
        args: the arguments of the objective.

    Raises:
        ValueError: no v0 where the objective has no start of its own.
    """
    if (own := objective.search_coordinates(v0, args)) is not None:
        return own
    if v0 is None:
        raise ValueError(f"{type(objective).__name__} has no start of its own: give v0")
    return EuclideanCoordinates(objective, v0, args)


@dataclass(frozen=True)
class EuclideanCoordinates:
    """The unknowns as they are, side by side, with the Euclidean metric."""

    objective: Objective
    v0: Tree
    args: Tree
    is_metric_penalty: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return tensor_leaves(self.v0)[0].dtype

    def initial_point(self) -> Tensor:
        return pack_leaves_into_rows(self.v0).detach().clone()

    def apply_metric(self, z: Tensor) -> Tensor:
        return z

    def evaluate(self, z: Tensor, metric_z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = value_and_gradient(self.objective, unpack_rows_to_tree(z, self.v0), self.args)
        flat = pack_leaves_into_rows(slope)
        return value, flat, inner_product_by_episode(flat, flat).sqrt()

    def hessian(self, z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        product = self.objective.hessian(unpack_rows_to_tree(z, self.v0), self.args).product
        return lambda p, _: pack_leaves_into_rows(product(unpack_rows_to_tree(p, self.v0)))

    def to_unknowns(self, z: Tensor) -> Tree:
        return unpack_rows_to_tree(z, self.v0)

    def select_episodes(self, index: Tensor) -> EuclideanCoordinates | None:
        if (args := self.objective.select_episodes(self.args, index)) is None:
            return None
        return EuclideanCoordinates(self.objective, tree_map(lambda leaf: leaf[index], self.v0), args)

    def to_whitened_coordinates(self) -> WhitenedCoordinates:
        return _UnchangedCoordinates(self)

    def select_in_float64(self, index: Tensor) -> None:
        return None


@dataclass(frozen=True)
class _UnchangedCoordinates:
    """`EuclideanCoordinates`, which are white as they are."""

    space: EuclideanCoordinates

    def from_coordinates(self, z: Tensor) -> Tensor:
        return z

    def to_coordinates(self, w: Tensor) -> Tensor:
        return w

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        value, slope, _ = self.space.evaluate(w, w)
        return value, (slope,)

    def gradient_norm(self, g: Tensor) -> Tensor:
        return inner_product_by_episode(g, g).sqrt()

    def select_episodes(self, index: Tensor) -> _UnchangedCoordinates | None:
        return None if (part := self.space.select_episodes(index)) is None else _UnchangedCoordinates(part)


ESCAPE_LENGTHS = tuple(2.0**k for k in range(2, -13, -2))  # steps to try, in units of 1 + |z|
MAX_ESCAPE_PRODUCTS = 200  # with the Hessian, in search of a negative curvature


def escape_saddles(space: SearchCoordinates, z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return lower points where the objective curves downwards at stationary ones.

    Args:
        space: the coordinates.
        z: stationary points, [E, P].
        value: the objective there, [E].

    Returns:
        Points [E, P], and which of them lie lower, [E] bool; the others equal z.

    Conjugate gradients for a fixed random right-hand side end where the curvature along a direction is negative, for
    the Krylov space then holds one. The step along it, forth or back, is the best of a few lengths. In float64 where
    the space has that: in float32 rounding hides the weaker curvatures.
    """
    if (
        z.dtype != torch.float64
        and (double := space.select_in_float64(torch.arange(len(z), device=z.device))) is not None
    ):
        there, lower = escape_saddles(double, z.double(), value.double())
        return there.to(z.dtype), lower
    hessian = space.hessian(z)
    b = fixed_normal_draws(z.shape[1]).to(z).expand_as(z)
    _, _, saddle, d = conjugate_gradient(
        hessian, space.apply_metric, b, space.apply_metric(b), 1e-3, MAX_ESCAPE_PRODUCTS
    )
    best, lowest = z, value
    if not bool(saddle.any()):
        return best, saddle
    image = space.apply_metric(z)
    d_image = space.apply_metric(d)
    unit = (1 + inner_product_by_episode(z, image).clamp_min(0).sqrt()) / inner_product_by_episode(
        d, d_image
    ).clamp_min(torch.finfo(z.dtype).tiny).sqrt()
    for length in ESCAPE_LENGTHS:
        for sign in (1, -1):
            t = expand_to_episode_shape(sign * length * unit, z)
            there, there_image = torch.addcmul(z, t, d), torch.addcmul(image, t, d_image)
            height = space.evaluate(there, there_image)[0]
            lower = saddle & (height < lowest)
            best, lowest = (
                torch.where(expand_to_episode_shape(lower, z), there, best),
                torch.where(lower, height, lowest),
            )
    return best, lowest < value
