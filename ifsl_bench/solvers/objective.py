"""Objectives to minimise: one value per episode, and whatever closed forms the author cares to give.

A plugin author needs `value` alone; gradients, Hessian products and the derivative of the gradient with respect to the
arguments then come from autograd. Each closed form given instead makes the solve cheaper and changes nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ifsl_bench.solvers.linear import Operator
from ifsl_bench.solvers.tree import (
    Tree,
    expand_to_episode_shape,
    iterate_until_finished,
    list_leaves,
    rebuild_tree,
    tensor_leaves,
    tree_map,
)
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes


@accept_old_names(
    take="select_episodes",
    check="check_arguments",
    unbounded="may_lack_minimum",
    space="search_coordinates",
    search="search_minimum",
)
class Objective(ABC):
    """L(v; args) [E]. v: a tree of tensors with leading dimension E. args: a tree of everything else L depends on.

    Whatever should receive a gradient must be in `args`: a tensor captured by the objective is a constant.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    @abstractmethod
    def value(self, v: Tree, args: Tree) -> Tensor:
        """Return the objective of each episode, [E]. An episode's value must not depend on other episodes' unknowns.

        Args:
            v: the unknowns, a tree with leading dimension E.
            args: everything else that the objective depends on.
        """

    def gradient(self, v: Tree, args: Tree) -> Tree:
        """Return dL/dv, differentiable in v and args while gradients are enabled.

        Args:
            v: the unknowns, a tree with leading dimension E.
            args: of the objective, a tree with leading dimension E.

        Raises:
            ValueError: `value` does not return one value per episode.
        """
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            point = tree_map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), v)
            value = self.value(point, args)
            if value.dim() != 1:
                raise ValueError(f"an objective returns one value per episode, shape [E], not {list(value.shape)}")
            slope = vector_jacobian_product([value.sum()], tensor_leaves(point), None, create_graph=recorded)
        return rebuild_tree(v, slope)

    def hessian(self, v: Tree, args: Tree) -> Operator:
        """Return d^2L/dv^2 at v, each episode with its own.

        Args:
            v: the unknowns, a tree with leading dimension E.
            args: of the objective, a tree with leading dimension E.
        """
        with torch.enable_grad():
            point = tree_map(lambda leaf: leaf.detach().requires_grad_(), v)
            slope = tensor_leaves(self.gradient(point, tree_map(Tensor.detach, args)))

        def product(d: Tree) -> Tree:
            return rebuild_tree(
                v, vector_jacobian_product(slope, tensor_leaves(point), tensor_leaves(d), retain_graph=True)
            )

        return Operator(product)

    def pullback(self, v: Tree, args: Tree, u: Tree, needed: list[bool]) -> list[Tensor | None]:
        """Return -u^T d(dL/dv)/dargs for some leaves of args, None for the others.

        Args:
            v: the unknowns, a tree with leading dimension E.
            args: of the objective, a tree with leading dimension E.
            u: a tree like v.
            needed: which leaves of args, in the order of `leaves`.
        """
        flat = list_leaves(args)
        with torch.enable_grad():
            marked = {
                i: leaf.detach().requires_grad_()
                for i, (leaf, need) in enumerate(zip(flat, needed, strict=True))
                if need and leaf is not None
            }
            inputs = [marked.get(i, leaf) for i, leaf in enumerate(flat)]
            slope = tensor_leaves(self.gradient(tree_map(Tensor.detach, v), rebuild_tree(args, inputs)))
            grads = vector_jacobian_product(slope, [*marked.values()], [-part for part in tensor_leaves(u)])
        by_place = dict(zip(marked, grads, strict=True))
        return [by_place.get(i) for i in range(len(flat))]

    def descend(self, v: Tree, args: Tree, rate: float | Tensor, steps: int) -> Tree:
        """Make gradient steps of a fixed size; differentiable in v, args and rate.

        Args:
            v: the start, a tree with leading dimension E.
            args: of the objective, a tree with leading dimension E.
            rate: the step size, one or [E].
            steps: how many.
        """

        def step(v: Tree) -> Tree:
            pairs = zip(tensor_leaves(v), tensor_leaves(self.gradient(v, args)), strict=True)
            return rebuild_tree(v, [old - _multiply_by_rate(rate, g) for old, g in pairs])

        return iterate_until_finished(step, v, steps)

    def select_episodes(self, args: Tree, index: Tensor) -> Tree | None:
        """Return the arguments of some episodes; None where it is unknown which arguments have a dimension E.

        Args:
            args: the arguments of all episodes.
            index: the episodes.
        """
        return None

    def check_arguments(self, args: Tree) -> None:  # noqa: B027 (nothing to check unless a subclass knows better)
        """Raise ValueError for arguments that no solve can make sense of."""

    def may_lack_minimum(self, args: Tree) -> bool | Tensor:
        """Return True where the arguments alone show that there may be no minimum: no episode then counts as converged.

        A tensor [] is where the arguments are, so that a device need not wait.
        """
        return False

    def search_coordinates(self, v0: Tree, args: Tree) -> Any | None:
        """Return `SearchCoordinates` of the objective's own to search in; None where it has none.

        Args:
            v0: the start; None for the objective's own.
            args: of the objective, a tree with leading dimension E.
        """
        return None

    def search_minimum(self, solver: Any, args: Tree) -> Any | None:
        """Return the `Outcome` of the objective's own search; None where it has none.

        The search follows the solver's rules and begins at the objective's own start.

        Args:
            solver: an `LBFGS`, for its options.
            args: of the objective, a tree with leading dimension E.
        """
        return None


def _multiply_by_rate(rate: float | Tensor, g: Tensor) -> Tensor:
    return expand_to_episode_shape(rate, g) * g if isinstance(rate, Tensor) and rate.dim() else rate * g


class FunctionObjective(Objective):
    """A plain function (v, args) -> [E] as an objective."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function

    def value(self, v: Tree, args: Tree) -> Tensor:
        return self.function(v, args)


def vector_jacobian_product(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> list[Tensor]:
    """Return weights^T d outputs / d inputs, with zeros where there is no dependence (which autograd calls an error).

    Args:
        outputs: tensors to differentiate.
        inputs: tensors to differentiate in.
        weights: one for each output, of its shape; None for scalar outputs.
        create_graph: make the result differentiable.
        retain_graph: keep the graph for another derivative.
    """
    dependent = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not dependent:
        return [torch.zeros_like(leaf) for leaf in inputs]
    grads = torch.autograd.grad(
        [outputs[i] for i in dependent],
        list(inputs),
        None if weights is None else [weights[i] for i in dependent],
        create_graph=create_graph,
        retain_graph=create_graph or retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(grads)


def value_and_gradient(objective: Objective, v: Tree, args: Tree) -> tuple[Tensor, Tree]:
    """Return value [E] and gradient without a graph, in one pass where the gradient comes from autograd.

    Args:
        objective: to evaluate.
        v: the unknowns, a tree with leading dimension E.
        args: of the objective, a tree with leading dimension E.

    Raises:
        ValueError: the objective does not return one value per episode.
    """
    if type(objective).gradient is not Objective.gradient:
        with torch.no_grad():
            return objective.value(v, args), objective.gradient(v, args)
    with torch.enable_grad():
        point = tree_map(lambda leaf: leaf.detach().requires_grad_(), v)
        value = objective.value(point, args)
        if value.dim() != 1:
            raise ValueError(f"an objective returns one value per episode, shape [E], not {list(value.shape)}")
        slope = vector_jacobian_product([value.sum()], tensor_leaves(point), None)
    return value.detach(), rebuild_tree(v, slope)
