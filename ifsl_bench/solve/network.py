"""The one-hidden-layer tanh network of the MLP attractors, in the large form and in the form of its dual numbers.

    h(x) = W tanh(W_2 x + b_2) + W_3 x + b,  L = mean CE([fixed logits ; h(x_i)], y_i) + three diagonal quadratics

Both layers see x only through the S support rows, and their penalties are diagonal quadratics, so at every stationary
point W_3 = c_3 + P_3^-1 X^T beta and [W_2, b_2] = c_2 + P_2^-1 [X 1]^T B. The search runs in (B [H, S], beta [N, S],
[W b]): with 40 hidden units and 25 rows 1,330 numbers instead of 23,000, and no product in it touches a D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_support
from .linear import conjugate_gradient
from .objective import LargeSpace, LinearOutcome, Objective, Operator, Space
from .softmax import (
    cross_entropy,
    floored,
    indicator,
    kernel,
    per_episode,
    probabilities,
    residual,
    scores,
    spread,
    weigh,
)
from .tree import Tree, dot


class Network(NamedTuple):
    """The unknowns."""

    output: Tensor  # [E, N, H+1] W and b
    skip: Tensor  # [E, N, D] W_3
    hidden: Tensor  # [E, H, D+1] W_2 and b_2


class NetworkArgs(NamedTuple):
    """The arguments of `TanhNetwork`. Centres may lack E or have a one for N or H; all but labels may receive
    gradients."""

    features: Tensor  # [E, S, D]
    labels: Tensor  # [E, S], 0..N-1
    rest: Tensor  # [E, S] logsumexp of the fixed logits, -inf where there are none
    output_centres: Tensor  # [(E,) N, H+1]
    output_precisions: Tensor  # [H+1]
    skip_centres: Tensor  # [(E,) N, D]
    skip_precisions: Tensor  # [D]
    hidden_centres: Tensor  # [(E,) 1 or H, D+1]
    hidden_precisions: Tensor  # [D+1]


@dataclass(frozen=True)
class TanhNetwork(Objective):
    """L above for v a `Network` and args a `NetworkArgs`.

    Not convex. With v0 = None a search starts from fixed random dual numbers (from zero it would start on a saddle), so
    large that the hidden units' inputs are `spread`; the same start in every episode and on every machine.
    """

    ways: int
    hidden: int = 40
    start_spread: float = 0.1
    seed: int = 0

    def value(self, v: Tree, args: Tree) -> Tensor:
        _, f = activations(v, args.features)
        fit = cross_entropy(f, args.rest, args.labels).mean(1)
        penalty = (args.output_precisions * (v.output - args.output_centres).square()).sum((1, 2))
        penalty = penalty + (args.skip_precisions * (v.skip - args.skip_centres).square()).sum((1, 2))
        penalty = penalty + (args.hidden_precisions * (v.hidden - args.hidden_centres).square()).sum((1, 2))
        return fit + penalty / 2

    def gradient(self, v: Tree, args: Tree) -> Tree:
        t, f = activations(v, args.features)
        df = residual(f, args.rest, args.labels)  # [E, N, S]
        da = (v.output[..., :-1].mT @ df) * (1 - t.square())  # [E, H, S]
        output = torch.cat([df @ t.mT, df.sum(2, keepdim=True)], 2)
        return Network(
            output + args.output_precisions * (v.output - args.output_centres),
            df @ args.features + args.skip_precisions * (v.skip - args.skip_centres),
            spread(da, args.features) + args.hidden_precisions * (v.hidden - args.hidden_centres),
        )

    def hessian(self, v: Tree, args: Tree) -> Operator:
        x, curvature = args.features, activation_curvature(v, args)

        def product(d: Tree) -> Tree:
            da, df, output = curvature(scores(d.hidden, x), d.skip @ x.mT, d.output)
            return Network(
                output + args.output_precisions * d.output,
                df @ x + args.skip_precisions * d.skip,
                spread(da, x) + args.hidden_precisions * d.hidden,
            )

        return product

    def inverse(self, v: Tree, args: Tree, rhs: Tree, tolerance: float, max_steps: int) -> LinearOutcome:
        """u = P^-1 rhs + a correction in the dual numbers, by conjugate gradients in their metric."""
        space, curvature, x = DualSpace.of(self, args), activation_curvature(v, args), args.features

        def apply(p: Tensor, p_image: Tensor) -> Tensor:
            a, f, _ = space.parts(p_image)
            da, df, output = curvature(a, f, space.parts(p)[2])
            return p + space.join(da, df, space.inverse_1 * output)

        output, skip, hidden = space.inverse_1 * rhs.output, space.inverse_3 * rhs.skip, space.inverse_2 * rhs.hidden
        da, df, moved = curvature(scores(hidden, x), skip @ x.mT, output)
        b = -space.join(da, df, space.inverse_1 * moved)
        z, _, info = conjugate_gradient(apply, space.image, b, space.image(b), tolerance, max_steps)
        correction = space.expand(z, centred=False)
        u = Network(output + correction.output, skip + correction.skip, hidden + correction.hidden)
        return LinearOutcome(u, *info())

    def take(self, args: Tree, index: Tensor) -> Tree:
        shared = (False, False, False, True, False, True, False, True, False)
        return NetworkArgs(
            *(a[index] for a in args[:3]),
            *(per_episode(a, index, 3) if s else a for a, s in zip(args[3:], shared[3:], strict=True)),
        )

    def check(self, args: Tree) -> None:
        check_support(args.features, args.labels, args.rest, self.ways)
        for name in ("output_precisions", "skip_precisions", "hidden_precisions"):
            if bool((getattr(args, name) < 0).any()):
                raise ValueError(f"{name} must not be negative: the objective would have no minimum")

    def unbounded(self, args: Tree) -> bool:
        return any(bool((p <= 0).any()) for p in (args.output_precisions, args.skip_precisions, args.hidden_precisions))

    def space(self, v0: Tree, args: Tree) -> Space:
        return DualSpace.of(self, args) if v0 is None else LargeSpace(self, v0, args)


def activations(v: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """tanh of the hidden layer [E, H, S], and the scores [E, N, S]."""
    t = torch.tanh(scores(v.hidden, x))
    return t, scores(v.output, t.mT) + v.skip @ x.mT


def activation_curvature(v: Tree, args: Tree) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The Hessian of the mean cross-entropy between (hidden inputs, skip scores, [W b]) at v."""
    t, f = activations(v, args.features)
    df, pi = residual(f, args.rest, args.labels), probabilities(f, args.rest)
    shares, w = pi / pi.shape[2], v.output[..., :-1]
    slope, back = 1 - t.square(), w.mT @ df  # [E, H, S]
    bend = -2 * t * back

    def product(a: Tensor, skip: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt = slope * a
        df2 = weigh(pi, shares, w @ dt + scores(output, t.mT) + skip)  # [E, N, S]
        da = (w.mT @ df2 + output[..., :-1].mT @ df) * slope + bend * dt
        return da, df2, torch.cat([df2 @ t.mT + df @ dt.mT, df2.sum(2, keepdim=True)], 2)

    return product


@dataclass(frozen=True)
class DualSpace:
    """z [E, P] = (B, beta, [W b] - centre) side by side, with the metric (K_2, K_3, P_1) in which <z, z> is the
    penalty."""

    objective: TanhNetwork
    args: NetworkArgs
    inverse_1: Tensor  # [H+1]
    inverse_2: Tensor  # [D+1]
    inverse_3: Tensor  # [D]
    kernel_2: Tensor  # [E, S, S] over [X 1] P_2^-1 [X 1]^T
    kernel_3: Tensor  # [E, S, S] over X P_3^-1 X^T
    gram: Tensor  # [E, S, S] over X X^T, for the norm of the gradient in the large form
    hidden_0: Tensor  # [E, H, S] hidden inputs at the centre
    skip_0: Tensor  # [E, N, S] skip scores at the centre
    target: Tensor  # [E, N, S] labels as zeros and 1/S

    @staticmethod
    def of(objective: TanhNetwork, args: NetworkArgs) -> DualSpace:
        x = args.features
        inverse_1, inverse_2 = 1 / floored(args.output_precisions), 1 / floored(args.hidden_precisions)
        inverse_3 = 1 / floored(args.skip_precisions)
        h = objective.hidden
        return DualSpace(
            objective, args, inverse_1, inverse_2, inverse_3,
            kernel(x, inverse_2), (x * inverse_3) @ x.mT, x @ x.mT,
            scores(args.hidden_centres, x).expand(-1, h, -1),
            args.skip_centres @ x.mT,
            indicator(args.labels, objective.ways, x.dtype) / x.shape[1],
        )  # fmt: skip

    def parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z [E, P] as B [E, H, S], beta [E, N, S] and [E, N, H+1]."""
        count, h, n = self.args.features.shape[1], self.objective.hidden, self.objective.ways
        b, beta, output = z.split([h * count, n * count, n * (h + 1)], 1)
        return b.view(-1, h, count), beta.view(-1, n, count), output.view(-1, n, h + 1)

    def join(self, b: Tensor, beta: Tensor, output: Tensor) -> Tensor:
        return torch.cat([b.flatten(1), beta.flatten(1), output.flatten(1)], 1)

    def initial(self) -> Tensor:
        episodes, count, _ = self.args.features.shape
        h, n = self.objective.hidden, self.objective.ways
        generator = torch.Generator().manual_seed(self.objective.seed)
        draw = torch.rand(h * count + n * count + n * (h + 1), generator=generator, dtype=torch.float64) * 2 - 1
        b, beta, output = self.parts(draw.to(self.gram).expand(episodes, -1))
        size = self.objective.start_spread
        # Kernels have the size of 1 / precision: unscaled numbers would saturate every hidden unit.
        hidden = self.kernel_2.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(b.dtype).tiny)[:, None, None]
        skip = self.kernel_3.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(b.dtype).tiny)[:, None, None]
        return self.join(b * size / hidden, beta * size / skip, output * size)

    def image(self, z: Tensor) -> Tensor:
        b, beta, output = self.parts(z)
        return self.join(b @ self.kernel_2, beta @ self.kernel_3, output / self.inverse_1)

    def evaluate(self, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        args = self.args
        a, skip, _ = self.parts(image)
        b, beta, moved = self.parts(z)
        output = args.output_centres + moved
        t = torch.tanh(self.hidden_0 + a)  # [E, H, S]
        f = self.skip_0 + skip + scores(output, t.mT)  # [E, N, S]
        log_pi = torch.cat([f, args.rest[:, None]], 1).log_softmax(1)[:, :-1]
        value = dot(z, image) / 2 - dot(log_pi, self.target)
        df = log_pi.exp() / f.shape[2] - self.target
        da = (output[..., :-1].mT @ df) * (1 - t.square())
        r_b, r_beta = b + da, beta + df
        r_output = moved + self.inverse_1 * torch.cat([df @ t.mT, df.sum(2, keepdim=True)], 2)
        ones, large = r_b.sum(2), r_output / self.inverse_1
        square = dot(r_b, r_b @ self.gram) + dot(ones, ones) + dot(r_beta, r_beta @ self.gram) + dot(large, large)
        return value, self.join(r_b, r_beta, r_output), square.clamp_min(0).sqrt()

    def take(self, index: Tensor) -> DualSpace:
        return DualSpace.of(self.objective, self.objective.take(self.args, index))

    def expand(self, z: Tensor, centred: bool = True) -> Network:
        b, beta, output = self.parts(z)
        x, args = self.args.features, self.args
        skip, hidden = self.inverse_3 * (beta @ x), self.inverse_2 * spread(b, x)
        if not centred:
            return Network(output, skip, hidden)
        return Network(output + args.output_centres, skip + args.skip_centres, hidden + args.hidden_centres)
