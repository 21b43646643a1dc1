"""Code a careful author would write without a solver library: the peers of the benchmarks, one episode at a time.

Inner problem by PyTorch's own L-BFGS with its strong Wolfe search, derivatives by autograd, recurrent back-propagation
as twenty products with the Hessian by double back-propagation. For the MLP's evaluation SciPy's L-BFGS on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

from ifsl_bench.solvers import NetworkArgs

Fast = list[Tensor]  # fast weights
Inner = Callable[[Sequence[Tensor]], Tensor]  # fast weights -> value


@contextmanager
def one_thread() -> Iterator[None]:
    """For single episodes more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(v: Sequence[Tensor], x: Tensor) -> Tensor:
    """Novel logits [S, N] of x [S, D]: v is [W b] alone, or [W b], W_3 and [W_2 b_2]."""
    if len(v) == 1:
        return x @ v[0][:, :-1].T + v[0][:, -1]
    output, skip, hidden = v
    return torch.tanh(x @ hidden[:, :-1].T + hidden[:, -1]) @ output[:, :-1].T + output[:, -1] + x @ skip.T


def objective(
    v: Sequence[Tensor], x: Tensor, labels: Tensor, base: Tensor, priors: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """x [S, D], labels [S] among the novel classes, base [S, K] logits, pulls (centres, precisions) of each part."""
    joint = torch.cat([base, logits(v, x)], 1)
    penalty = torch.stack([(p * (w - c).square()).sum() for w, (c, p) in zip(v, priors, strict=True)]).sum()
    return F.cross_entropy(joint, base.shape[1] + labels) + penalty / 2


def solved(inner: Inner, start: Sequence[Tensor]) -> Fast:
    v = [w.clone().requires_grad_() for w in start]
    search = torch.optim.LBFGS(v, max_iter=200, tolerance_grad=1e-6, history_size=6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = inner(v)
        value.backward(inputs=v)
        return value

    search.step(closure)
    return [w.detach() for w in v]


def recurrent_back_propagation(inner: Inner, v: Fast, cotangents: Sequence[Tensor], steps=20, damping=0.1) -> None:
    """Adds -u^T d(grad inner)/d(meta-parameters) to their gradients, u being the damped Neumann series."""
    point = [w.requires_grad_() for w in v]
    slope = torch.autograd.grad(inner(point), point, create_graph=True)
    term, total = list(cotangents), list(cotangents)
    for _ in range(steps):
        product = torch.autograd.grad(slope, point, term, retain_graph=True)
        term = [(1 - damping) * t - h for t, h in zip(term, product, strict=True)]
        total = [a + t for a, t in zip(total, term, strict=True)]
    torch.autograd.backward(slope, [-u for u in total])


def scipy_network(
    args: NetworkArgs, start: Sequence[Tensor], base_logits: Tensor, count: int
) -> tuple[float, np.ndarray]:
    """Episodes a second of SciPy's L-BFGS on all weights of the MLP from `start` [E, ...], and its values."""
    parts = [(args.output_centres, args.output_precisions), (args.skip_centres, args.skip_precisions)]
    parts.append((args.hidden_centres, args.hidden_precisions))
    values, begin = [], perf_counter()
    for i in range(count):
        x, labels, base = args.features[i].double(), args.labels[i], base_logits[i].double()
        priors = [((c[i] if c.dim() == 3 else c).double(), p.double()) for c, p in parts]
        like = [w[i].double() for w in start]
        sizes = [w.numel() for w in like]

        def value(flat: np.ndarray, x=x, labels=labels, base=base, priors=priors, like=like, sizes=sizes):
            leaf = torch.from_numpy(flat.copy()).requires_grad_()
            v = [part.view_as(w) for part, w in zip(leaf.split(sizes), like, strict=True)]
            loss = objective(v, x, labels, base, priors)
            loss.backward()
            return float(loss.detach()), leaf.grad.numpy()

        first = np.concatenate([w.numpy().ravel() for w in like])
        values.append(minimize(value, first, jac=True, method="L-BFGS-B", options={"maxiter": 500}).fun)
    return count / (perf_counter() - begin), np.array(values)
