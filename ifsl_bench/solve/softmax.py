"""The convex case: softmax regression beside fixed extra logits, with a diagonal quadratic pull towards given centres.

    L(V) = mean_i CE([fixed logits_i ; V x_i], y_i) + 1/2 sum_kd p_d (V_kd - c_kd)^2

x_i ends in a one, the bias. Fixed logits enter through their logsumexp alone. Every vector of interest has the form
P^-1 (.) + P^-1 X^T (.), so solves and implicit gradients happen in N x S numbers; see `dual`. Activations are kept as
[E, N, S] in this package: products with the S x S kernel and sums over classes are cheap that way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_support
from .linear import conjugate_gradient
from .objective import LinearOutcome, Objective, Operator
from .tree import Tree


class Regression(NamedTuple):
    """The arguments of `SoftmaxRegression`. All but `labels` may receive gradients."""

    features: Tensor  # [E, S, D]
    labels: Tensor  # [E, S], 0..N-1
    rest: Tensor  # [E, S] logsumexp of the fixed logits, -inf where there are none
    centres: Tensor  # [N, D+1] or [E, N, D+1], the bias last
    precisions: Tensor  # [D+1]


class SoftmaxRegression(Objective):
    """L above for V [E, N, D+1] (the bias last) and args a `Regression`."""

    def value(self, v: Tree, args: Tree) -> Tensor:
        f = scores(v, args.features)  # [E, N, S]
        penalty = (args.precisions * (v - args.centres).square()).sum((1, 2))
        return cross_entropy(f, args.rest, args.labels).mean(1) + penalty / 2

    def gradient(self, v: Tree, args: Tree) -> Tree:
        r = residual(scores(v, args.features), args.rest, args.labels)  # [E, N, S]
        return args.precisions * (v - args.centres) + spread(r, args.features)

    def hessian(self, v: Tree, args: Tree) -> Operator:
        pi = probabilities(scores(v, args.features), args.rest)  # [E, N, S]
        shares = pi / pi.shape[2]
        x = torch.nn.functional.pad(args.features, (0, 1), value=1.0)  # [E, S, D+1]
        transposed = x.mT

        def product(d: Tree) -> Tree:
            return torch.addcmul(weigh(pi, shares, d @ transposed) @ x, args.precisions, d)

        return product

    def pullback(self, v: Tree, args: Tree, u: Tree, needed: list[bool]) -> list[Tensor | None]:
        x, labels, rest, centres, precisions = args
        grads: list[Tensor | None] = [None] * 5
        if needed[3]:
            grads[3] = (precisions * u).sum_to_size(centres.shape)
        if needed[4]:
            grads[4] = (u * (centres - v)).sum((0, 1))
        if needed[0] or needed[2]:
            count = x.shape[1]
            f = scores(v, x)
            pi, pi_rest = probabilities(f, rest), rest_probability(f, rest)
            xu = scores(u, x)  # [E, N, S]
            if needed[2]:
                grads[2] = (xu * pi).sum(1) * pi_rest / count
            if needed[0]:
                moved = weigh(pi, pi / count, xu)
                grads[0] = -(residual(f, rest, labels).mT @ u[..., :-1] + moved.mT @ v[..., :-1])
        return grads

    def inverse(self, v: Tree, args: Tree, rhs: Tree, tolerance: float, max_steps: int) -> LinearOutcome:
        """u = P^-1 (rhs - X^T w) with (1 + M K) w = M X P^-1 rhs: conjugate gradients in the metric of the kernel K."""
        k, inverse_p, pi, y = self._reduced(v, args, rhs)
        shares = pi / pi.shape[2]
        b = weigh(pi, shares, y)
        w, _, info = conjugate_gradient(
            lambda p, image: p + weigh(pi, shares, image), lambda r: r @ k, b, b @ k, tolerance, max_steps
        )
        return LinearOutcome(inverse_p * (rhs - spread(w, args.features)), *info())

    def direct(self, v: Tree, args: Tree, rhs: Tree, limit: int = 2048) -> Tree:
        """The same system, factorised."""
        k, inverse_p, pi, y = self._reduced(v, args, rhs)
        episodes, ways, count = pi.shape
        if ways * count > limit:
            raise ValueError(f"Direct() would factorise {ways * count} x {ways * count}; use ConjugateGradient()")
        m = -pi[:, :, None] * pi[:, None] / count  # [E, N, N, S]
        m.diagonal(dim1=1, dim2=2).add_((pi / count).mT)
        mk = (m[..., None] * k[:, None, None]).transpose(2, 3).reshape(episodes, ways * count, ways * count)
        mk.diagonal(dim1=1, dim2=2).add_(1)
        b = weigh(pi, pi / count, y).flatten(1)
        w = torch.linalg.solve(mk, b[:, :, None]).view(episodes, ways, count)
        return inverse_p * (rhs - spread(w, args.features))

    def take(self, args: Tree, index: Tensor) -> Tree:
        x, labels, rest, centres, precisions = args
        return Regression(x[index], labels[index], rest[index], per_episode(centres, index, 3), precisions)

    def check(self, args: Tree) -> None:
        ways = args.centres.shape[-2]
        if args.precisions.shape != (args.features.shape[2] + 1,):
            raise ValueError(
                f"precisions has shape {list(args.precisions.shape)}, and {args.features.shape[2]} features and a bias "
                f"need [{args.features.shape[2] + 1}]"
            )
        check_support(args.features, args.labels, args.rest, ways)
        if bool((args.precisions < 0).any()):
            raise ValueError("precisions must not be negative: the objective would have no minimum")

    def unbounded(self, args: Tree) -> bool:
        return bool((args.precisions <= 0).any())

    def _reduced(self, v: Tree, args: Tree, rhs: Tree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = args.features
        inverse_p = 1 / floored(args.precisions)
        pi = probabilities(scores(v, x), args.rest)
        return kernel(x, inverse_p), inverse_p, pi, scores(inverse_p * rhs, x)


def scores(v: Tensor, x: Tensor) -> Tensor:
    """V x for v [(E,) N, D+1], the bias last, and x [E, S, D]: [E, N, S]."""
    return v[..., :-1] @ x.mT + v[..., -1:]


def spread(r: Tensor, x: Tensor) -> Tensor:
    """r X with the column of ones: r [E, N, S], x [E, S, D] -> [E, N, D+1]."""
    return torch.cat([r @ x, r.sum(2, keepdim=True)], 2)


def kernel(x: Tensor, inverse_p: Tensor) -> Tensor:
    """X P^-1 X^T with the column of ones: [E, S, S]."""
    if x.device.type != "cpu" or x.shape[0] <= 16:
        return (x * inverse_p[:-1]) @ x.mT + inverse_p[-1]
    # A few episodes at a time, so that the scaled features are read back from the cache.
    k = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for out, part in zip(k.split(16), x.split(16), strict=True):
        torch.bmm(part * inverse_p[:-1], part.mT, out=out)
    return k.add_(inverse_p[-1])


def floored(precisions: Tensor) -> Tensor:
    """Precisions fit to be divided by; zeros (a flagged solve) become small against the largest."""
    return precisions.clamp_min(1e-6 * float(precisions.max()) or 1e-6) if float(precisions.min()) <= 0 else precisions


def probabilities(f: Tensor, rest: Tensor) -> Tensor:
    """Softmax over the N scores f [E, N, S] and the fixed class, without the latter: [E, N, S]."""
    return torch.cat([f, rest[:, None]], 1).softmax(1)[:, :-1]


def rest_probability(f: Tensor, rest: Tensor) -> Tensor:
    """What `probabilities` leaves to the fixed class: [E, S]."""
    return (rest - torch.logaddexp(f.logsumexp(1), rest)).exp()


def cross_entropy(f: Tensor, rest: Tensor, labels: Tensor) -> Tensor:
    """-log of the probability of the label: [E, S]."""
    return torch.logaddexp(f.logsumexp(1), rest) - f.gather(1, labels[:, None])[:, 0]


def indicator(labels: Tensor, ways: int, dtype: torch.dtype) -> Tensor:
    """Labels [E, S] as zeros and ones [E, N, S]."""
    return (labels[:, None] == torch.arange(ways, device=labels.device)[:, None]).to(dtype)


def residual(f: Tensor, rest: Tensor, labels: Tensor) -> Tensor:
    """The derivative of the mean cross-entropy in the scores: [E, N, S]."""
    return (probabilities(f, rest) - indicator(labels, f.shape[1], f.dtype)) / f.shape[2]


def weigh(pi: Tensor, shares: Tensor, d: Tensor) -> Tensor:
    """M d, M the Hessian of the mean cross-entropy in the scores and shares = pi / S: [E, N, S]."""
    return torch.addcmul(shares * d, shares, (pi * d).sum(1, keepdim=True), value=-1)


def per_episode(tensor: Tensor, index: Tensor | slice, dims: int) -> Tensor:
    """tensor[index] where tensor has a dimension E, being of `dims` dimensions and not broadcast; else tensor."""
    return tensor[index] if tensor.dim() == dims and tensor.shape[0] > 1 else tensor
