"""The coordinates in which the search for a tanh network runs: its dual numbers; see `network`.

`WhitenedDualCoordinates` have the Euclidean metric, for many episodes at once: with kernels K = L L^T, B L and beta L
stand for B and beta, and [W b] P_1^(1/2) for [W b]. Then a point needs no product with the metric, and an evaluation is
a few large operations. One more hidden unit, which is always 1, stands for the bias, and one more class
for the fixed one: their rows of numbers are zero, in the point and in every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ifsl_bench.solvers.softmax import (
    adjoint_of_class_scores,
    apply_cross_entropy_hessian,
    class_scores,
    cross_entropy,
    cross_entropy_gradient,
    floor_precisions,
    index_episodes,
    one_hot,
    precision_kernel_matrix,
    probabilities_of_novel_classes,
)
from ifsl_bench.solvers.tree import Tree, inner_product_by_episode, to_float64, tree_map
from ifsl_bench.utils.cosine import normalise_exactly

SATURATED_ACTIVATION = 20.0  # tanh of it is 1


@dataclass(frozen=True)
class WhitenedDualCoordinates:
    """w [E, P] = hidden units [H+1, S] and classes [N+1, S + H+1] side by side; see `DualCoordinates`."""

    cholesky_of_hidden_kernel: Tensor  # [E, S, S] L of the kernels of the hidden and of the skip layer
    cholesky_of_skip_kernel: Tensor
    gram_matrix: Tensor  # [E, S, S] over X X^T
    hidden_inputs_at_centre: Tensor  # [E, H+1, S] hidden inputs at the centre
    scores_at_centre: Tensor  # [E, N+1, S] skip scores at the centre, and the fixed class
    output_weights_at_centre: Tensor  # [E, N+1, S + H+1] zeros, and [W b] at the centre
    labels: Tensor  # [E, 1, S]
    one_hot_labels: Tensor  # [E, N+1, S] labels as ones
    negative_infinity_at_label: Tensor  # [E, N+1, S] -inf for the label, 0 elsewhere
    zero_coordinates: Tensor  # [E, S + H+1] zeros
    output_scale: Tensor  # [S + H+1] ones, and P_1^(-1/2)

    @staticmethod
    def from_dual(space: DualCoordinates) -> WhitenedDualCoordinates:
        """Return the coordinates of the episodes of a space."""
        (episodes, size), args = space.args.base_logsumexp.shape, space.args
        hot = one_hot(args.labels, space.shape.ways + 1)
        base_logsumexp = args.base_logsumexp
        return WhitenedDualCoordinates(
            cholesky_with_jitter(space.hidden_kernel),
            cholesky_with_jitter(space.skip_kernel),
            space.gram_matrix,
            pad(space.hidden_inputs_at_centre, (0, 0, 0, 1), value=SATURATED_ACTIVATION),
            torch.cat([space.skip_scores_at_centre.expand(episodes, -1, -1), base_logsumexp[:, None]], 1),
            pad(args.output_centres, (size, 0, 0, 1)).expand(episodes, -1, -1),
            args.labels[:, None],
            hot.to(base_logsumexp.dtype),
            torch.zeros_like(space.skip_scores_at_centre[..., :1, :1]).masked_fill(hot, -torch.inf),
            base_logsumexp.new_zeros(episodes, size + len(space.inverse_output_precisions)),
            pad(space.inverse_output_precisions.sqrt(), (size, 0), value=1.0),
        )

    def from_coordinates(self, z: Tensor) -> Tensor:
        (_, units, size), ways = self.hidden_inputs_at_centre.shape, self.one_hot_labels.shape[1] - 1
        b, beta, output = z.split([(units - 1) * size, ways * size, ways * units], 1)
        hidden = pad(b.unflatten(1, (-1, size)) @ self.cholesky_of_hidden_kernel, (0, 0, 0, 1))
        classes = torch.cat(
            [
                beta.unflatten(1, (-1, size)) @ self.cholesky_of_skip_kernel,
                output.unflatten(1, (-1, units)) / self.output_scale[size:],
            ],
            2,
        )
        return torch.cat([hidden.flatten(1), classes.flatten(1), self.zero_coordinates], 1)

    def to_coordinates(self, w: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in self._unwhiten(w)], 1)

    def evaluate(self, w: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        hidden, classes = self._split_coordinates(w)
        size = hidden.shape[2]
        t = torch.baddbmm(self.hidden_inputs_at_centre, hidden, self.cholesky_of_hidden_kernel.mT).tanh()  # [E, H+1, S]
        inputs = torch.cat([self.cholesky_of_skip_kernel.mT, t], 1)  # [E, S + H+1, S]
        weights = torch.addcmul(self.output_weights_at_centre, classes, self.output_scale)
        f = torch.baddbmm(self.scores_at_centre, weights, inputs)  # [E, N+1, S], the fixed class last
        # The loss is log(1 + exp(x)), x being the logsumexp of the other classes' margins, and its slope sigmoid(x):
        # both keep the digits that are small beside 1.
        margins = f - f.gather(1, self.labels) + self.negative_infinity_at_label
        x = margins.logsumexp(1)  # [E, S]
        fit = softplus(x, threshold=35).mean(1)
        value = torch.baddbmm(fit[:, None, None], w[:, None], w[:, :, None], alpha=0.5)[:, 0, 0]
        df = (margins.softmax(1) - self.one_hot_labels) * x.sigmoid()[:, None]  # [E, N+1, S]
        da = torch.ops.aten.tanh_backward(weights[..., size:].mT @ df, t)  # [E, H+1, S]: times 1 - t^2
        g_hidden = torch.baddbmm(hidden, da, self.cholesky_of_hidden_kernel, alpha=1 / size)
        g_classes = torch.addcmul(classes[:, :-1], df[:, :-1] @ inputs.mT, self.output_scale, value=1 / size)
        return value, (g_hidden.flatten(1), g_classes.flatten(1), self.zero_coordinates)

    def gradient_norm(self, g: Tensor) -> Tensor:
        b, beta, output = self._unwhiten(g)
        return gradient_norm_of_unknowns(
            b, beta, output / self.output_scale[self.gram_matrix.shape[1] :].square(), self.gram_matrix
        )

    def select_episodes(self, index: Tensor) -> WhitenedDualCoordinates:
        some = {f.name: getattr(self, f.name).index_select(0, index) for f in fields(self) if f.name != "output_scale"}
        return replace(self, **some)

    def _split_coordinates(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return w [E, P] as [E, H+1, S] and [E, N+1, S + H+1]."""
        _, units, size = self.hidden_inputs_at_centre.shape
        hidden, classes = w[:, : units * size], w[:, units * size :]
        return hidden.unflatten(1, (units, size)), classes.unflatten(1, (-1, size + units))

    def _unwhiten(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return w [E, P] as B [E, H, S], beta [E, N, S] and [W b] - centre [E, N, H+1]."""
        hidden, classes = self._split_coordinates(w)
        beta, output = classes[:, :-1].split([self.gram_matrix.shape[1], hidden.shape[1]], 2)
        b, beta = (
            torch.linalg.solve_triangular(root, part, upper=False, left=False)
            for root, part in ((self.cholesky_of_hidden_kernel, hidden[:, :-1]), (self.cholesky_of_skip_kernel, beta))
        )
        return b, beta, output * self.output_scale[self.gram_matrix.shape[1] :]


def gradient_norm_of_unknowns(b: Tensor, beta: Tensor, output: Tensor, gram: Tensor) -> Tensor:
    """Return the norm [E] in the large form of a gradient that is given in dual numbers.

    Args:
        b: B, [E, H, S].
        beta: [E, N, S].
        output: in [W b], of the large form, [E, N, H+1].
        gram: X X^T, [E, S, S].
    """
    ones = b.sum(2)
    square = (
        inner_product_by_episode(b, b @ gram)
        + inner_product_by_episode(ones, ones)
        + inner_product_by_episode(beta, beta @ gram)
        + inner_product_by_episode(output, output)
    )
    return square.clamp_min(0).sqrt()


def cholesky_with_jitter(k: Tensor) -> Tensor:
    """Return L with L L^T = k [E, S, S], up to an amount of the size of rounding.

    It is added for kernels that equal rows make singular.
    """
    least = k.shape[1] * torch.finfo(k.dtype).eps * k.diagonal(dim1=1, dim2=2).amax(1)
    return torch.linalg.cholesky_ex(k + torch.diag_embed(least[:, None].expand(-1, k.shape[1])))[0]


ActivationHessian = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class NetworkWeights(NamedTuple):
    """The unknowns."""

    output: Tensor  # [E, N, H+1] W and b
    skip: Tensor  # [E, N, D] W_3
    hidden: Tensor  # [E, H, D+1] W_2 and b_2


class NetworkArgs(NamedTuple):
    """The arguments of `TanhNetwork`.

    Centres may lack E or have a one for N or H; all but labels may receive gradients.
    """

    features: Tensor  # [E, S, D]
    labels: Tensor  # [E, S], 0..N-1
    base_logsumexp: Tensor  # [E, S] logsumexp of the fixed logits, -inf where there are none
    output_centres: Tensor  # [(E,) N, H+1]
    output_precisions: Tensor  # [H+1]
    skip_centres: Tensor  # [(E,) N, D]
    skip_precisions: Tensor  # [D]
    hidden_centres: Tensor  # [(E,) 1 or H, D+1]
    hidden_precisions: Tensor  # [D+1]

    def select_episodes(self, index: Tensor) -> NetworkArgs:
        """Return the arguments of some episodes alone."""
        features, labels, base_logsumexp, *priors = self
        centres = [index_episodes(c, index, 3) for c in priors[::2]]
        both = [part for prior in zip(centres, priors[1::2], strict=True) for part in prior]
        return NetworkArgs(features[index], labels[index], base_logsumexp[index], *both)


@dataclass(frozen=True)
class NetworkShape:
    """The size of a tanh network, and the start of a search for it; see `TanhNetwork`."""

    ways: int
    hidden: int = 40
    start_spread: float = 0.1
    seed: int = 0
    start: NetworkWeights | None = None


@dataclass(frozen=True)
class DualCoordinates:
    """Coordinates z [E, P] = (B, beta, [W b] - centre), side by side.

    In their metric (K_2, K_3, P_1) <z, z> is the penalty.
    """

    shape: NetworkShape
    args: NetworkArgs
    inverse_output_precisions: Tensor  # [H+1]
    inverse_hidden_precisions: Tensor  # [D+1]
    inverse_skip_precisions: Tensor  # [D]
    hidden_kernel: Tensor  # [E, S, S] over [X 1] P_2^-1 [X 1]^T
    skip_kernel: Tensor  # [E, S, S] over X P_3^-1 X^T
    gram_matrix: Tensor  # [E, S, S] over X X^T, for the norm of the gradient in the large form
    hidden_inputs_at_centre: Tensor  # [E, H, S] hidden inputs at the centre
    skip_scores_at_centre: Tensor  # [E, N, S] skip scores at the centre

    is_metric_penalty: ClassVar[bool] = True

    @staticmethod
    def from_arguments(shape: NetworkShape, args: NetworkArgs) -> DualCoordinates:
        x = args.features
        inverse_1, inverse_2 = (
            1 / floor_precisions(args.output_precisions),
            1 / floor_precisions(args.hidden_precisions),
        )
        inverse_3 = 1 / floor_precisions(args.skip_precisions)
        return DualCoordinates(
            shape,
            args,
            inverse_1,
            inverse_2,
            inverse_3,
            precision_kernel_matrix(x, inverse_2),
            (x * inverse_3) @ x.mT,
            x @ x.mT,
            class_scores(args.hidden_centres, x).expand(-1, shape.hidden, -1),
            args.skip_centres @ x.mT,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.gram_matrix.dtype

    def split_coordinates(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z [E, P] as B [E, H, S], beta [E, N, S] and [E, N, H+1]."""
        count, h, n = self.args.features.shape[1], self.shape.hidden, self.shape.ways
        b, beta, output = z.split([h * count, n * count, n * (h + 1)], 1)
        return b.view(-1, h, count), beta.view(-1, n, count), output.view(-1, n, h + 1)

    def join_coordinates(self, b: Tensor, beta: Tensor, output: Tensor) -> Tensor:
        return torch.cat([b.flatten(1), beta.flatten(1), output.flatten(1)], 1)

    def initial_point(self) -> Tensor:
        """Return the start, z [E, P].

        That is the point with the activations of `shape.start` on the support set and the least penalty; without one,
        fixed functions of each support row, so that the order of the support set plays no part.
        """
        args, h, n = self.args, self.shape.hidden, self.shape.ways
        x = args.features
        if (v := tree_map(lambda leaf: leaf.to(x), self.shape.start)) is not None:
            b = (class_scores(v.hidden, x) - self.hidden_inputs_at_centre) @ _pseudo_inverse(self.hidden_kernel)
            beta = (v.skip @ x.mT - self.skip_scores_at_centre) @ _pseudo_inverse(self.skip_kernel)
            return self.join_coordinates(b, beta, v.output - args.output_centres)
        tiny = torch.finfo(x.dtype).tiny
        planes, output = draw_fixed_start_numbers(h, n, x.shape[2], self.shape.seed)
        turned = planes.to(x, non_blocking=True) @ normalise_exactly(x).mT
        waves = torch.sin(3 * turned)  # [E, H+N, S], other for all but equal rows
        # Kernels have the size of 1 / precision: unscaled numbers would saturate every hidden unit.
        hidden, skip = (
            k.diagonal(dim1=1, dim2=2).mean(1).clamp_min(tiny)[:, None, None]
            for k in (self.hidden_kernel, self.skip_kernel)
        )
        size = self.shape.start_spread
        output = size * output.to(x, non_blocking=True).expand(len(x), -1, -1)
        return self.join_coordinates(size * waves[:, :h] / hidden, size * waves[:, h:] / skip, output)

    def apply_metric(self, z: Tensor) -> Tensor:
        b, beta, output = self.split_coordinates(z)
        return self.join_coordinates(
            b @ self.hidden_kernel, beta @ self.skip_kernel, output / self.inverse_output_precisions
        )

    def evaluate(self, z: Tensor, metric_z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        args = self.args
        a, skip, _ = self.split_coordinates(metric_z)
        b, beta, moved = self.split_coordinates(z)
        output = args.output_centres + moved
        t = torch.tanh(self.hidden_inputs_at_centre + a)  # [E, H, S]
        f = self.skip_scores_at_centre + skip + class_scores(output, t.mT)  # [E, N, S]
        value = inner_product_by_episode(z, metric_z) / 2 + cross_entropy(f, args.base_logsumexp, args.labels).mean(1)
        df = cross_entropy_gradient(f, args.base_logsumexp, args.labels)
        da = (output[..., :-1].mT @ df) * (1 - t.square())
        r_b, r_beta = b + da, beta + df
        r_output = moved + self.inverse_output_precisions * torch.cat([df @ t.mT, df.sum(2, keepdim=True)], 2)
        norm = gradient_norm_of_unknowns(r_b, r_beta, r_output / self.inverse_output_precisions, self.gram_matrix)
        return value, self.join_coordinates(r_b, r_beta, r_output), norm

    def hessian(self, z: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return self.add_penalty_to_hessian(_activation_hessian(*self._compute_activations(z), self.args))

    def _compute_activations(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tanh of the hidden inputs [E, H, S], scores [E, N, S] and weights [W b] at z."""
        a, skip, _ = self.split_coordinates(self.apply_metric(z))
        output = self.args.output_centres + self.split_coordinates(z)[2]
        t = torch.tanh(self.hidden_inputs_at_centre + a)
        return t, self.skip_scores_at_centre + skip + class_scores(output, t.mT), output

    def add_penalty_to_hessian(self, curvature: ActivationHessian) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the map from p and M p to (1 + C' M) p, for C the Hessian of the loss between the activations."""

        def product(p: Tensor, image: Tensor) -> Tensor:
            a, f, _ = self.split_coordinates(image)
            da, df, output = curvature(a, f, self.split_coordinates(p)[2])
            return p + self.join_coordinates(da, df, self.inverse_output_precisions * output)

        return product

    def to_whitened_coordinates(self) -> WhitenedDualCoordinates:
        return WhitenedDualCoordinates.from_dual(self)

    def select_episodes(self, index: Tensor) -> DualCoordinates:
        return DualCoordinates.from_arguments(self.shape, self.args.select_episodes(index))

    def select_in_float64(self, index: Tensor) -> DualCoordinates:
        start = tree_map(lambda leaf: leaf[index], self.shape.start)
        return DualCoordinates.from_arguments(
            replace(self.shape, start=start), to_float64(self.args.select_episodes(index))
        )

    def to_unknowns(self, z: Tensor, add_centres: bool = True) -> NetworkWeights:
        b, beta, output = self.split_coordinates(z)
        x, args = self.args.features, self.args
        skip, hidden = (
            self.inverse_skip_precisions * (beta @ x),
            self.inverse_hidden_precisions * adjoint_of_class_scores(b, x),
        )
        if not add_centres:
            return NetworkWeights(output, skip, hidden)
        return NetworkWeights(output + args.output_centres, skip + args.skip_centres, hidden + args.hidden_centres)


def compute_activations(v: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh of the hidden layer [E, H, S], and the scores [E, N, S].

    Args:
        v: the unknowns, a `NetworkWeights`.
        x: features, [E, S, D].
    """
    t = torch.tanh(class_scores(v.hidden, x))
    return t, class_scores(v.output, t.mT) + v.skip @ x.mT


def make_activation_hessian(v: Tree, args: Tree) -> ActivationHessian:
    """Return the Hessian of the mean cross-entropy between (hidden inputs, skip scores, [W b]).

    Args:
        v: the unknowns, a `NetworkWeights`.
        args: a `NetworkArgs`.
    """
    return _activation_hessian(*compute_activations(v, args.features), v.output, args)


def _activation_hessian(t: Tensor, f: Tensor, output: Tensor, args: Tree) -> ActivationHessian:
    """Return `make_activation_hessian` for activations t, scores f and weights [W b]."""
    df, pi = (
        cross_entropy_gradient(f, args.base_logsumexp, args.labels),
        probabilities_of_novel_classes(f, args.base_logsumexp),
    )
    shares, w = pi / pi.shape[2], output[..., :-1]
    slope, back = 1 - t.square(), w.mT @ df  # [E, H, S]
    bend = -2 * t * back

    def product(a: Tensor, skip: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt = slope * a
        df2 = apply_cross_entropy_hessian(pi, shares, w @ dt + class_scores(output, t.mT) + skip)  # [E, N, S]
        da = (w.mT @ df2 + output[..., :-1].mT @ df) * slope + bend * dt
        return da, df2, torch.cat([df2 @ t.mT + df @ dt.mT, df2.sum(2, keepdim=True)], 2)

    return product


@lru_cache(maxsize=8)
def draw_fixed_start_numbers(hidden: int, ways: int, features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw normal numbers [H+N, D] and half of such [N, H+1], in double precision: the same always and everywhere.

    Args:
        hidden: H, the hidden units.
        ways: N, the novel classes.
        features: D, the size of a feature.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    planes = torch.randn(hidden + ways, features, generator=generator, dtype=torch.float64)
    return planes, 0.5 * torch.randn(ways, hidden + 1, generator=generator, dtype=torch.float64)


def _pseudo_inverse(k: Tensor) -> Tensor:
    """Return pseudo-inverses of positive semidefinite matrices [E, S, S]; zero for infinite ones.

    They are singular where support rows are equal.
    """
    k = torch.where(k.isfinite().all(2).all(1)[:, None, None], k, 0)
    return torch.linalg.pinv(k, rtol=10 * k.shape[1] * torch.finfo(k.dtype).eps, hermitian=True)
