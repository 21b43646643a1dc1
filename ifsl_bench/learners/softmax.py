"""The convex case: softmax regression beside fixed extra logits, with a diagonal quadratic pull towards given centres.

    L(V) = mean_i CE([fixed logits_i ; V x_i], y_i) + 1/2 sum_kd p_d (V_kd - c_kd)^2

x_i ends in a one, the bias. Fixed logits enter through their logsumexp alone. Every vector of interest has the form
P^-1 (.) + P^-1 X^T (.), so solves and implicit gradients happen in N x S numbers; see `dual`. Activations are kept as
[E, N, S] in this package: products with the S x S kernel and sums over classes are cheap that way round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.solve.linear import conjugate_gradient
from ifsl_bench.solve.objective import ACCURATE, LinearOutcome, Objective, Operator
from ifsl_bench.solve.tree import Tree, doubled

from .checks import check_pull, check_support
from .single import few, newton_direction

TINY = torch.finfo(torch.float64).tiny


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

    def inverse(self, v: Tree, args: Tree, rhs: Tree, tolerance: float | None, max_steps: int) -> LinearOutcome:
        """u = P^-1 (rhs - X^T w) with (1 + M K) w = M X P^-1 rhs: conjugate gradients in the metric of the kernel K, in
        float64, for kernels of nearly equal rows are as good as singular."""
        k, inverse_p, pi, y = self._reduced(*doubled((v, args, rhs)))
        shares = pi / pi.shape[2]
        b = weigh(pi, shares, y)
        tolerance = tolerance or 1e-10
        if few(k):
            r = -b
            parts = [a.numpy() for a in (k, pi, r, r @ k)]
            found = [newton_direction(*episode, tolerance, max_steps) for episode in zip(*parts, strict=True)]  # type: ignore[call-arg]
            w, steps = torch.from_numpy(np.stack([s for s, *_ in found])), torch.tensor([count for *_, count in found])
        else:
            w, _, info = conjugate_gradient(
                lambda p, image: p + weigh(pi, shares, image), lambda r: r @ k, b, b @ k, tolerance, max_steps
            )
            steps = info()[1]
        return self._checked(args, rhs, w, pi, inverse_p, steps)

    def direct(self, v: Tree, args: Tree, rhs: Tree, limit: int = 2048) -> LinearOutcome:
        """The same system, factorised, in float64."""
        k, inverse_p, pi, y = self._reduced(*doubled((v, args, rhs)))
        episodes, ways, count = pi.shape
        if ways * count > limit:
            raise ValueError(f"Direct() would factorise {ways * count} x {ways * count}; use ConjugateGradient()")
        m = -pi[:, :, None] * pi[:, None] / count  # [E, N, N, S]
        m.diagonal(dim1=1, dim2=2).add_((pi / count).mT)
        mk = (m[..., None] * k[:, None, None]).transpose(2, 3).reshape(episodes, ways * count, ways * count)
        mk.diagonal(dim1=1, dim2=2).add_(1)
        b = weigh(pi, pi / count, y).flatten(1)
        w = torch.linalg.solve_ex(mk, b[:, :, None])[0].view(episodes, ways, count)
        return self._checked(args, rhs, w, pi, inverse_p, torch.zeros_like(b[:, 0]))

    def _checked(
        self, args: Tree, rhs: Tensor, w: Tensor, pi: Tensor, inverse_p: Tensor, steps: Tensor
    ) -> LinearOutcome:
        """u from w [E, N, S]; what is left of H u = rhs, in the norm of P^-1, bounds u's error in that of P."""
        x = args.features.double()
        u = inverse_p * (rhs - spread(w, x))
        left = spread(weigh(pi, pi / pi.shape[2], scores(u, x)) - w, x)
        share = ((inverse_p * left.square()).sum((1, 2)) / (u.square() / inverse_p).sum((1, 2)).clamp_min(TINY)).sqrt()
        return LinearOutcome(u.to(rhs.dtype), share, steps, ~(share <= ACCURATE))

    def take(self, args: Tree, index: Tensor) -> Tree:
        x, labels, rest, centres, precisions = args
        return Regression(x[index], labels[index], rest[index], per_episode(centres, index, 3), precisions)

    def check(self, args: Tree) -> None:
        x, centres = args.features, args.centres
        ways = centres.shape[-2] if centres.dim() > 1 else 1
        check_support(x, args.labels, args.rest, ways)
        check_pull("centres", centres, "precisions", args.precisions, x, ways, x.shape[2] + 1)

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
    """`with_rest` without the fixed class: [E, N, S]."""
    return with_rest(f, rest)[:, :-1]


def misfit(p: Tensor, hot: Tensor) -> Tensor:
    """Labels minus probabilities, [E, N, S], from the probabilities p [E, N+1, S] of all classes (the fixed one last)
    and labels as booleans, likewise. A label's own is the sum of the other probabilities: 1 - p would have lost its
    digits where scores saturate."""
    wrong = p.masked_fill(hot, 0)
    return torch.where(hot[:, :-1], wrong.sum(1, keepdim=True), -wrong[:, :-1])


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Labels [E, S] as booleans [E, classes, S]."""
    return labels[:, None] == torch.arange(classes, device=labels.device)[:, None]


def with_rest(f: Tensor, rest: Tensor) -> Tensor:
    """Softmax over the N scores f [E, N, S] and the fixed class, which comes last: [E, N+1, S]."""
    return torch.cat([f, rest[:, None]], 1).softmax(1)


def rest_probability(f: Tensor, rest: Tensor) -> Tensor:
    """What `probabilities` leaves to the fixed class: [E, S]."""
    return (rest - torch.logaddexp(f.logsumexp(1), rest)).exp()


def cross_entropy(f: Tensor, rest: Tensor, labels: Tensor) -> Tensor:
    """-log of the probability of the label: [E, S]."""
    margins = torch.cat([f, rest[:, None]], 1) - f.gather(1, labels[:, None])  # [E, N+1, S]
    # The label's own margin is zero: the logarithm of one plus the others keeps the digits of a small loss.
    others = margins.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    return torch.nn.functional.softplus(others, threshold=35)


def indicator(labels: Tensor, ways: int, dtype: torch.dtype) -> Tensor:
    """Labels [E, S] as zeros and ones [E, N, S]."""
    return one_hot(labels, ways).to(dtype)


def residual(f: Tensor, rest: Tensor, labels: Tensor) -> Tensor:
    """The derivative of the mean cross-entropy in the scores: [E, N, S]."""
    p = with_rest(f, rest)
    return misfit(p, one_hot(labels, p.shape[1])) / -f.shape[2]


def weigh(pi: Tensor, shares: Tensor, d: Tensor) -> Tensor:
    """M d, M the Hessian of the mean cross-entropy in the scores and shares = pi / S: [E, N, S]."""
    return torch.addcmul(shares * d, shares, (pi * d).sum(1, keepdim=True), value=-1)


def per_episode(tensor: Tensor, index: Tensor | slice, dims: int) -> Tensor:
    """tensor[index] where tensor has a dimension E, being of `dims` dimensions and not broadcast; else tensor."""
    return tensor[index] if tensor.dim() == dims and tensor.shape[0] > 1 else tensor
