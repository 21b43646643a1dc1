"""Tensors in and out of the compiled kernels: softmax regression and the tanh network on a CPU.

Unknowns go as flat arrays [E, P] in double precision, in the order of `pack`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.solvers.linear import LinearOutcome
from ifsl_bench.solvers.outcome import Outcome
from ifsl_bench.solvers.softmax import RegressionArgs, floor_precisions
from ifsl_bench.solvers.tree import Tree, pack_leaves_into_rows, tensor_leaves, unpack_rows_to_tree
from ifsl_bench.utils.threads import kernel_thread_count

FlatArray = np.ndarray[Any, np.dtype[np.float64]]


def run_kernel(kernel: Any, count: int, *arguments: Any) -> None:
    """Call kernel(begin, end, *arguments) for all episodes, on as many threads as torch may use.

    Args:
        kernel: a compiled function.
        count: E, the episodes.
        *arguments: what the kernel takes after its bounds.
    """
    from ifsl_bench.solvers import numba_episodes

    numba_episodes.run_kernel_in_threads(kernel, count, kernel_thread_count(), *arguments)


@dataclass(frozen=True)
class KernelProblems:
    """E episodes of one kind of problem.

    Attributes:
        kernel_module: the module with `solve`, `solve_hessian`, `neumann_series`, `largest_eigenvalue`, `descend` and
            `descend_backward`.
        kernel_arguments: of all kernels, before others: x, labels, base_logsumexp, centres, precisions and the sizes.
        unknowns_template: a tree with the shapes of the unknowns.

    Raises:
        ValueError: shapes or labels with which kernels, which look at no bounds, would read or write elsewhere.
    """

    kernel_module: Any
    kernel_arguments: tuple[Any, ...]
    unknowns_template: Tree

    def __post_init__(self) -> None:
        x, labels, base_logsumexp, centres, precisions, ways, *_ = self.kernel_arguments
        unknowns = sum(leaf.shape[1:].numel() for leaf in tensor_leaves(self.unknowns_template))
        fits = labels.shape == base_logsumexp.shape == x.shape[:2] and precisions.shape == (unknowns,)
        fits = fits and x.shape[2] + 1 == tensor_leaves(self.unknowns_template)[-1].shape[-1]
        if not fits or centres.shape not in ((1, unknowns), (len(x), unknowns)):
            raise ValueError("the shapes of a support set, its centres and precisions do not fit together")
        if labels.size and not 0 <= labels.min() <= labels.max() < ways:
            raise ValueError(f"support labels must lie in 0..{ways - 1}")

    @property
    def n_episodes(self) -> int:
        return len(self.kernel_arguments[0])

    @property
    def n_unknowns(self) -> int:
        return len(self.kernel_arguments[4])

    def run_kernel(self, kernel_name: str, *arguments: Any) -> None:
        x, labels, base_logsumexp, centres, *others = self.kernel_arguments
        problems = (as_float32_words(x), labels, as_float32_words(base_logsumexp), as_float32_words(centres), *others)
        run_kernel(getattr(self.kernel_module, kernel_name), self.n_episodes, problems, *arguments)

    def solve(self, dtype: torch.dtype, *options: Any) -> Outcome:
        """Return the outcome of `solve` with these options."""
        v, (norm, value) = np.empty((self.n_episodes, self.n_unknowns)), np.empty((2, self.n_episodes))
        steps, converged = np.empty(self.n_episodes, np.int64), np.empty(self.n_episodes, np.bool_)
        self.run_kernel("solve", *options, (v, norm, value, steps, converged))
        counts = (torch.from_numpy(x) for x in (converged, steps))
        return Outcome(self.to_tree(v, dtype), *counts, *(torch.from_numpy(x).to(dtype) for x in (norm, value)))

    def solve_hessian(self, v: Tree, rhs: Tree, tolerance: float, max_steps: int, max_residual: float) -> LinearOutcome:
        """Solve H u = rhs for the Hessian at v, and return u and how the solve went.

        Args:
            v: the point of the Hessian.
            rhs: the right-hand side.
            tolerance: on the residual, relative.
            max_steps: steps of each episode.
            max_residual: a residual above this share is a failure.
        """
        u, share = np.empty((self.n_episodes, self.n_unknowns)), np.empty(self.n_episodes)
        steps, indefinite = np.empty(self.n_episodes, np.int64), np.empty(self.n_episodes, np.bool_)
        self.run_kernel(
            "solve_hessian", to_flat_array(v), to_flat_array(rhs), tolerance, max_steps, (u, share, steps, indefinite)
        )
        residual = torch.from_numpy(share)
        value = self.to_tree(u, pack_leaves_into_rows(rhs).dtype)
        failed = ~(residual <= max_residual)
        return LinearOutcome(value, residual, torch.from_numpy(steps), failed, torch.from_numpy(indefinite))

    def neumann_series(self, v: Tree, rhs: Tree, steps: int, damping: float, rate: float) -> tuple[Tree, Tensor]:
        """Return the Neumann series, and which have grown [E].

        Args:
            v: the point of the Hessian.
            rhs: the first term.
            steps: how many terms follow.
            damping: as in `Neumann`.
            rate: as in `Neumann`.
        """
        u, diverged = np.empty((self.n_episodes, self.n_unknowns)), np.empty(self.n_episodes, np.bool_)
        self.run_kernel("neumann_series", to_flat_array(v), to_flat_array(rhs), steps, damping, rate, (u, diverged))
        return self.to_tree(u, pack_leaves_into_rows(rhs).dtype), torch.from_numpy(diverged)

    def largest_eigenvalue(self, v: Tree, start: Tensor, steps: int) -> Tensor:
        largest = np.empty(self.n_episodes)
        self.run_kernel("largest_eigenvalue", to_flat_array(v), start.double().numpy(), steps, largest)
        return torch.from_numpy(largest).to(pack_leaves_into_rows(v).dtype)

    def to_tree(self, unknowns: FlatArray, dtype: torch.dtype) -> Tree:
        return unpack_rows_to_tree(torch.from_numpy(unknowns).to(dtype), self.unknowns_template)


def as_float32_words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the words in which kernels take numbers of either precision, see `numba_softmax.words_to_float64`."""
    return array if array.dtype == np.float32 else array.astype(np.float64, copy=False).view(np.float32)


def to_flat_array(tree: Tree) -> FlatArray:
    """Return the leaves side by side, [E, P], in double precision."""
    return pack_leaves_into_rows(tree).detach().double().contiguous().numpy()


def flatten_priors(centres: list[tuple[Tensor, int]], precisions: list[tuple[Tensor, int]]) -> tuple[Tensor, FlatArray]:
    """Return centres and precisions as flat arrays, [E or 1, P] and [P].

    Args:
        centres: centres [(E,) rows or 1, size] and the number of rows, for each group of the unknowns.
        precisions: precisions [size] and the number of rows, likewise.
    """
    whole = [(c if c.dim() == 3 else c[None]).expand(-1, rows, -1).flatten(1) for c, rows in centres]
    count = max(len(c) for c in whole)
    middle = whole[0] if len(whole) == 1 else torch.cat([c.expand(count, -1) for c in whole], 1)
    return middle, np.concatenate(
        [np.tile(floor_precisions(p.detach().double()).numpy(), rows) for p, rows in precisions]
    )


def make_regression_problems(args: RegressionArgs) -> KernelProblems:
    """Return the episodes of args as the kernels take them."""
    x, labels, base_logsumexp, centres, precisions = args
    ways = centres.shape[-2]
    middle, all_precisions = flatten_priors([(centres, ways)], [(precisions, ways)])
    arrays = (y.detach().contiguous().numpy() for y in (x, labels, base_logsumexp, middle))
    from ifsl_bench.solvers import numba_regression

    return KernelProblems(numba_regression, (*arrays, all_precisions, ways), x.new_empty(0, ways, x.shape[2] + 1))


def make_network_problems(args: Any, like: Any) -> KernelProblems:
    """Return the episodes of args as the kernels take them.

    Args:
        args: a `NetworkArgs`.
        like: a `NetworkWeights`, for its shapes alone.
    """
    x, labels, base_logsumexp, *parts = args
    ways, units = like.output.shape[1], like.hidden.shape[1]
    rows = (ways, ways, units)
    middle, precisions = flatten_priors(
        list(zip(parts[::2], rows, strict=True)), list(zip(parts[1::2], rows, strict=True))
    )
    arrays = (y.detach().contiguous().numpy() for y in (x, labels, base_logsumexp, middle))
    from ifsl_bench.solvers import numba_network

    return KernelProblems(numba_network, (*arrays, precisions, ways, units), like)


class _DescentFunction(torch.autograd.Function):
    """Gradient steps of a fixed size, and back through them; the trailing inputs are the leaves of args."""

    @staticmethod
    def forward(ctx: Any, problems: KernelProblems, v0: Tree, rate: FlatArray, steps: int, *args: Tensor) -> Tensor:
        start, end = to_flat_array(v0), np.empty((problems.n_episodes, problems.n_unknowns))
        problems.run_kernel("descend", start, rate, steps, end)
        ctx.problems, ctx.start, ctx.rate, ctx.steps = problems, start, rate, steps
        ctx.save_for_backward(*args)
        return torch.from_numpy(end).to(args[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        problems: KernelProblems = ctx.problems
        rows = problems.kernel_arguments[0].shape[1]
        grads = np.empty((problems.n_episodes, 3, max(problems.n_unknowns, rows)))
        problems.run_kernel(
            "descend_backward", ctx.start, ctx.rate, ctx.steps, slope.double().contiguous().numpy(), grads
        )
        centres, precisions, base_logsumexp = torch.from_numpy(grads).unbind(1)
        by_leaf: list[Tensor | None] = [None, None, base_logsumexp[:, :rows]]
        trees = (
            tensor_leaves(unpack_rows_to_tree(g[:, : problems.n_unknowns], problems.unknowns_template))
            for g in (centres, precisions)
        )
        for c, p in zip(*trees, strict=True):
            by_leaf += [c, p]
        return (None,) * 4 + tuple(
            None if g is None else (g.sum((0, 1)) if x.dim() == 1 else g.sum_to_size(x.shape)).to(x.dtype)
            for g, x in zip(by_leaf, args, strict=True)
        )


def run_gradient_descent(
    problems: KernelProblems, v0: Tree, args: Tree, rate: float | Tensor, steps: int, fallback: Callable[..., Tree]
) -> Tree:
    """Return the point `steps` gradient steps from v0, once differentiable.

    Args:
        problems: the episodes, for the kernels.
        v0: the start.
        args: the same episodes, a `RegressionArgs` or a `NetworkArgs`.
        rate: the step size, one or [E].
        steps: how many.
        fallback: `slowly(v0, args, rate, steps)` is the same in torch, for gradients in features, start or rate.
    """
    rate_learns = isinstance(rate, Tensor) and rate.requires_grad
    if rate_learns or args[0].requires_grad or any(leaf.requires_grad for leaf in tensor_leaves(v0)):
        return fallback(v0, args, rate, steps)
    rates = torch.as_tensor(rate, dtype=torch.float64).expand(problems.n_episodes).contiguous().numpy()
    return unpack_rows_to_tree(_DescentFunction.apply(problems, v0, rates, steps, *args), v0)
