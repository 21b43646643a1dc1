"""The formulas of docs/solve.md, against autograd and dense linear algebra."""

from __future__ import annotations

import torch

from ifsl_bench.solvers import NetworkArgs, RegressionArgs, SoftmaxRegression, TanhNetwork
from ifsl_bench.solvers.network_space import DualCoordinates
from ifsl_bench.solvers.softmax import (
    apply_cross_entropy_hessian,
    class_scores,
    one_hot,
    precision_kernel_matrix,
    probabilities_of_novel_classes,
)

N, S, D, H = 3, 6, 4, 5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


LABELS = (torch.arange(S) % N)[None]


def regression():
    return RegressionArgs(
        normal(1, S, D), LABELS, normal(1, S), 0.3 * normal(1, N, D + 1), 0.1 + normal(D + 1).square()
    )


def network(least=0.1):
    priors = []
    for rows, size in ((N, H + 1), (N, D), (H, D + 1)):
        priors += [0.3 * normal(1, rows, size), least + normal(size).square()]
    return NetworkArgs(normal(1, S, D), LABELS, normal(1, S), *priors)


def expand(a, args):
    """V = C + A X P^-1."""
    x = torch.nn.functional.pad(args.features, (0, 1), value=1.0)
    return args.centres + a @ x / args.precisions


def test_in_dual_numbers_scores_penalty_and_gradient_need_the_kernel_alone():
    args, a = regression(), 0.2 * normal(1, N, S)
    k, v = precision_kernel_matrix(args.features, 1 / args.precisions), expand(a, args)
    x = torch.nn.functional.pad(args.features, (0, 1), value=1.0)
    f = class_scores(args.centres, args.features) + a @ k
    torch.testing.assert_close(class_scores(v, args.features), f)
    penalty = (args.precisions * (v - args.centres).square()).sum() / 2
    torch.testing.assert_close(penalty, (a * (a @ k)).sum() / 2)
    r = a - (one_hot(LABELS, N).double() - probabilities_of_novel_classes(f, args.base_logsumexp)) / S
    point = v.clone().requires_grad_()
    (slope,) = torch.autograd.grad(SoftmaxRegression().value(point, args).sum(), point)
    torch.testing.assert_close(r @ x, slope)
    torch.testing.assert_close((r * (r @ k)).sum(), (slope.square() / args.precisions).sum())


def test_the_hessian_in_dual_numbers_is_one_plus_m_k():
    args, a, s = regression(), 0.2 * normal(1, N, S), normal(1, N, S)
    k = precision_kernel_matrix(args.features, 1 / args.precisions)

    def representer(a):
        f = class_scores(args.centres, args.features) + a @ k
        return a - (one_hot(LABELS, N).double() - probabilities_of_novel_classes(f, args.base_logsumexp)) / S

    _, moved = torch.autograd.functional.jvp(representer, a, s)
    pi = probabilities_of_novel_classes(class_scores(args.centres, args.features) + a @ k, args.base_logsumexp)
    torch.testing.assert_close(moved, s + apply_cross_entropy_hessian(pi, pi / S, s @ k))


def test_the_networks_representer_and_its_hessian_in_the_metric():
    args = network()
    space = DualCoordinates.from_arguments(TanhNetwork(N, H), args)
    size = (H + N) * S + N * (H + 1)
    z, s = 0.3 * normal(1, size), normal(1, size, seed=1)
    value, g, norm = space.evaluate(z, space.apply_metric(z))
    objective = TanhNetwork(N, H)
    large = objective.gradient(space.to_unknowns(z), args)
    torch.testing.assert_close(value, objective.value(space.to_unknowns(z), args))
    torch.testing.assert_close(norm**2, sum(part.square().sum() for part in large)[None])
    point = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.value(space.to_unknowns(point), args).sum(), point)
    torch.testing.assert_close(space.apply_metric(g), slope)
    image = space.apply_metric(s)
    penalty = sum(
        (p * (v - c).square()).sum() for v, c, p in zip(space.to_unknowns(s), args[3::2], args[4::2], strict=True)
    )
    torch.testing.assert_close((s * image).sum(), penalty)
