"""What is minimised: one value per episode, and whatever closed forms the author cares to give.

A plugin author needs `value` alone; gradients, Hessian products and the derivative of the gradient with respect to the
arguments then come from autograd. Each closed form given instead makes the solve cheaper and changes nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .tree import Tree, dot, leaves, pack, rebuild, tensors, tree_map, unpack

ACCURATE = 1e-3  # a linear solve has failed if its relative residual is larger in the norm that bounds the error
Operator = Callable[[Tree], Tree]


@dataclass(frozen=True)
class LinearOutcome:
    """The answer of a linear solve and how it went, episode by episode."""

    value: Tree
    residual: Tensor  # [E], measured at the answer: relative to the right-hand side, or where that says little to u
    steps: Tensor  # [E]
    failed: Tensor  # [E] bool: the residual is too large


class Space(Protocol):
    """The coordinates z [E, P] a quasi-Newton method works in: R^P with the metric M, so <a, b> = a . M b.

    Gradients are given as representers in that metric. The large form has M = 1; a reduced form has M = its kernels.
    """

    def initial(self) -> Tensor:
        """z [E, P] to start from."""

    def image(self, z: Tensor) -> Tensor:
        """M z."""

    def evaluate(self, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value [E], gradient [E, P], and the norm of the gradient in the large form [E]."""

    def take(self, index: Tensor) -> Space | None:
        """The same space for some episodes alone, or None where the arguments cannot be split."""

    def expand(self, z: Tensor) -> Tree:
        """z in the large form."""


class Objective(ABC):
    """L(v; args) [E]. v: a tree of tensors with leading dimension E. args: a tree of everything else L depends on.

    Whatever should receive a gradient must be in `args`: a tensor captured by the objective is a constant.
    """

    @abstractmethod
    def value(self, v: Tree, args: Tree) -> Tensor:
        """The objective of each episode, [E]. An episode's value must not depend on other episodes' unknowns."""

    def gradient(self, v: Tree, args: Tree) -> Tree:
        """dL/dv, differentiable in v and args while gradients are enabled."""
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            point = tree_map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), v)
            value = self.value(point, args)
            if value.dim() != 1:
                raise ValueError(f"an objective returns one value per episode, shape [E], not {list(value.shape)}")
            found = derivative([value.sum()], tensors(point), None, create_graph=recorded)
        return rebuild(v, found)

    def hessian(self, v: Tree, args: Tree) -> Operator:
        """d -> d^2L/dv^2 d at v, each episode with its own."""
        with torch.enable_grad():
            point = tree_map(lambda leaf: leaf.detach().requires_grad_(), v)
            slope = tensors(self.gradient(point, tree_map(Tensor.detach, args)))

        def product(d: Tree) -> Tree:
            return rebuild(v, derivative(slope, tensors(point), tensors(d), retain_graph=True))

        return product

    def pullback(self, v: Tree, args: Tree, u: Tree, needed: list[bool]) -> list[Tensor | None]:
        """-u^T d(dL/dv)/dargs for the leaves of args marked in `needed`."""
        found = leaves(args)
        with torch.enable_grad():
            inputs = [
                leaf.detach().requires_grad_() if need and leaf is not None else leaf
                for leaf, need in zip(found, needed, strict=True)
            ]
            slope = tensors(self.gradient(tree_map(Tensor.detach, v), rebuild(args, inputs)))
            wanted = [leaf for leaf, need in zip(inputs, needed, strict=True) if need and leaf is not None]
            parts = [-part for part in tensors(u)]
            grads = iter(derivative(slope, wanted, parts))
        return [next(grads) if need and leaf is not None else None for leaf, need in zip(found, needed, strict=True)]

    def inverse(self, v: Tree, args: Tree, rhs: Tree, tolerance: float | None, max_steps: int) -> LinearOutcome:
        """H^-1 rhs by conjugate gradients; override where H has structure. tolerance: None for the best there is."""
        from .linear import conjugate_gradient

        product = self.hessian(v, args)
        b = pack(rhs)
        if tolerance is None:
            tolerance = 1e-10 if b.dtype == torch.float64 else 1e-5
        x, _, info = conjugate_gradient(
            lambda p, _: pack(product(unpack(p, rhs))), lambda r: r, b, b, tolerance, max_steps
        )
        left = dot(wrong := b - pack(product(unpack(x, rhs))), wrong)
        share = (left / dot(b, b).clamp_min(torch.finfo(b.dtype).tiny)).sqrt()
        return LinearOutcome(unpack(x, rhs), share, info()[1], ~(share <= max(10 * tolerance, 1e-12)))

    def direct(self, v: Tree, args: Tree, rhs: Tree, limit: int = 512) -> LinearOutcome:
        """H^-1 rhs from a factorisation; override where H has structure."""
        b = pack(rhs)
        h = dense_hessian(self, v, args, limit)
        x = torch.linalg.solve_ex(h, b[:, :, None])[0]
        wrong = (h @ x)[:, :, 0] - b
        share = (dot(wrong, wrong) / dot(b, b).clamp_min(torch.finfo(b.dtype).tiny)).sqrt()
        return LinearOutcome(unpack(x[:, :, 0], rhs), share, torch.zeros_like(share), ~(share <= ACCURATE))

    def take(self, args: Tree, index: Tensor) -> Tree:
        """args for the episodes in `index`; None (the default) where nobody said which of them have a dimension E."""
        return None

    def check(self, args: Tree) -> None:  # noqa: B027
        """Raise ValueError for arguments that no solve can make sense of."""

    def unbounded(self, args: Tree) -> bool:
        """True where the arguments alone show that there may be no minimum: no episode then counts as converged."""
        return False

    def space(self, v0: Tree, args: Tree) -> Space:
        """The coordinates for quasi-Newton methods: the large form, from v0."""
        if v0 is None:
            raise ValueError(f"{type(self).__name__} has no start of its own: give v0")
        return LargeSpace(self, v0, args)


class FunctionObjective(Objective):
    """A plain function (v, args) -> [E] as an objective."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function

    def value(self, v: Tree, args: Tree) -> Tensor:
        return self.function(v, args)


@dataclass(frozen=True)
class LargeSpace:
    """The unknowns as they are, side by side, with the Euclidean metric."""

    objective: Objective
    v0: Tree
    args: Tree

    def initial(self) -> Tensor:
        return pack(self.v0).detach().clone()

    def image(self, z: Tensor) -> Tensor:
        return z

    def evaluate(self, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = unpack(z, self.v0)
        value, slope = value_and_gradient(self.objective, v, self.args)
        flat = pack(slope)
        return value, flat, dot(flat, flat).sqrt()

    def take(self, index: Tensor) -> LargeSpace | None:
        args = self.objective.take(self.args, index)
        return None if args is None else LargeSpace(self.objective, tree_map(lambda leaf: leaf[index], self.v0), args)

    def expand(self, z: Tensor) -> Tree:
        return unpack(z, self.v0)


def derivative(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> list[Tensor]:
    """weights^T d outputs / d inputs, with zeros where there is no dependence (which autograd calls an error)."""
    kept = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not kept:
        return [torch.zeros_like(leaf) for leaf in inputs]
    found = torch.autograd.grad(
        [outputs[i] for i in kept],
        list(inputs),
        None if weights is None else [weights[i] for i in kept],
        create_graph=create_graph,
        retain_graph=create_graph or retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def value_and_gradient(objective: Objective, v: Tree, args: Tree) -> tuple[Tensor, Tree]:
    """Both without a graph, in one pass where the gradient comes from autograd."""
    if type(objective).gradient is not Objective.gradient:
        with torch.no_grad():
            return objective.value(v, args), objective.gradient(v, args)
    with torch.enable_grad():
        point = tree_map(lambda leaf: leaf.detach().requires_grad_(), v)
        value = objective.value(point, args)
        if value.dim() != 1:
            raise ValueError(f"an objective returns one value per episode, shape [E], not {list(value.shape)}")
        found = derivative([value.sum()], tensors(point), None)
    return value.detach(), rebuild(v, found)


def dense_hessian(objective: Objective, v: Tree, args: Tree, limit: int) -> Tensor:
    """H [E, P, P] column by column, for small problems."""
    flat = pack(v)
    size = flat.shape[1]
    if size > limit:
        raise ValueError(
            f"{type(objective).__name__} has {size} unknowns and no structured solve; a dense Hessian is formed up to "
            f"{limit}. Use ConjugateGradient(), or override `direct`"
        )
    product = objective.hessian(v, args)
    unit = torch.eye(size, dtype=flat.dtype, device=flat.device)
    columns = [pack(product(unpack(unit[i].expand_as(flat), v))) for i in range(size)]
    return torch.stack(columns, 2)
