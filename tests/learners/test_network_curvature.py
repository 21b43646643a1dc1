"""The factorised Hessian of the tanh network, against dense eigenvalues and plain products."""

from __future__ import annotations

import math

import pytest
import torch
from paper_shapes import Episodes

from ifsl_bench.learners import Network, NetworkArgs, TanhNetwork, compiled, network_curvature
from ifsl_bench.learners.network_curvature import factorised
from ifsl_bench.solve import LBFGS, Implicit, minimise
from ifsl_bench.solve.tree import dot, pack

E, N, S, D, H = 3, 3, 7, 9, 4


@pytest.fixture(autouse=True)
def as_on_a_device():
    with compiled.batched():
        yield


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def problem(rest=True, equal_rows=False, weak=1.0):
    x = 3 * normal(E, S, D)
    if equal_rows:
        x[:, 1] = x[:, 0]
    labels = (torch.arange(S) % N).expand(E, -1)
    fixed = normal(E, S) if rest else torch.full((E, S), -math.inf).double()
    pulls = []
    for rows, size in ((N, H + 1), (N, D), (1, D + 1)):
        pulls += [0.3 * normal(E, rows, size), weak * (0.05 + normal(size).square())]
    return TanhNetwork(N, H), NetworkArgs(x, labels, fixed, *pulls)


def somewhere(space, size=1.0):
    """Points off the start by about `size` times 3 in the metric of the penalty."""
    white = space.whitened()
    w = white.into(space.initial())
    return white.back(w + 0.2 * size * normal(*w.shape))


def hessians(space, z):
    """Dense, in coordinates of unit metric, [E, P, P]; and what takes dual numbers into them."""
    roots = (
        torch.linalg.cholesky(space.kernel_2), torch.linalg.cholesky(space.kernel_3), space.inverse_1.rsqrt().diag()
    )  # fmt: skip
    found, into = [], []
    for e in range(E):
        root = torch.block_diag(*[roots[0][e]] * H, *[roots[1][e]] * N, *[roots[2]] * N)
        one = space.take(torch.full((len(root),), e))
        columns = torch.linalg.inv(root)  # row i: dual numbers of the i-th unit vector, root^-T e_i
        moved = one.curvature(z[e].expand(len(root), -1))(columns, one.image(columns))
        found.append(root.T @ moved.T)
        into.append(root.T)
    return torch.stack(found), torch.stack(into)


FACTORED = 1e-8  # rounding through Cholesky factors of kernels, the square roots of their condition


@pytest.mark.parametrize("rest", [True, False], ids=["base classes", "none"])
def test_the_curvatures_that_are_left_have_the_signs_of_the_eigenvalues(rest):
    objective, args = problem(rest)
    space = objective.space(None, args)
    for size, some in ((0.0, False), (1.0, True), (3.0, True)):
        z = somewhere(space, size)
        h, into = hessians(space, z)
        torch.testing.assert_close(h, h.mT, atol=FACTORED, rtol=FACTORED)
        eigenvalues = torch.linalg.eigvalsh(h)
        found = factorised(space.at(*space._activations(z)), space.inverse_1)
        assert (found.curvatures < 0).sum(1).tolist() == (eigenvalues < 0).sum(1).tolist()
        assert found.indefinite().tolist() == (eigenvalues[:, 0] < 0).tolist()
        assert bool((eigenvalues[:, 0] < 0).any()) or not some
        d = (into @ found.downwards()[:, :, None])[:, :, 0]
        curved = dot(d, (h @ d[:, :, None])[:, :, 0])
        torch.testing.assert_close(curved, found.curvatures[:, 0], rtol=1e-6, atol=1e-8)  # curvatures near 0 cancel
        b = normal(*z.shape, seed=5)
        solved = found.solve(b)
        torch.testing.assert_close(
            space.curvature(z)(solved, space.image(solved)), b, rtol=1e-5, atol=1e-6
        )  # of Hessians that are nearly singular


def test_a_step_goes_downhill_and_is_newtons_where_that_does():
    objective, args = problem()
    space = objective.space(None, args)
    for few in (1, 16, None):
        for size in (0.0, 1.0, 3.0):
            z = somewhere(space, size)
            _, g, _ = space.evaluate(z, space.image(z))
            hessian = factorised(space.at(*space._activations(z)), space.inverse_1, few)
            assert bool((dot(hessian.step(g), space.image(g)) < 0).all())
    strong, args = problem(weak=50.0)
    space = strong.space(None, args)
    z = somewhere(space, 0.1)
    _, g, _ = space.evaluate(z, space.image(z))
    hessian = factorised(space.at(*space._activations(z)), space.inverse_1, 16)
    assert not bool(hessian.indefinite().any())
    torch.testing.assert_close(hessian.step(g), -hessian.solve(g))


def test_values_of_many_points_are_those_of_one_after_the_other():
    objective, args = problem()
    space = objective.space(None, args)
    points = torch.stack([somewhere(space, size) for size in (0.0, 0.5, 2.0)])
    images = torch.stack([space.image(z) for z in points])
    expected = torch.stack([space.evaluate(z, image)[0] for z, image in zip(points, images, strict=True)])
    torch.testing.assert_close(space.values(points, images), expected)


@pytest.mark.parametrize("equal_rows", [False, True])
@pytest.mark.parametrize("limit", [{"FACTORISED": 0}, {"ROOM": 1}], ids=["conjugate gradients", "one at a time"])
def test_gradients_and_minima_are_those_of_other_ways_to_them(limit, equal_rows, monkeypatch):
    objective, args = problem(equal_rows=equal_rows)
    found = []
    for few in (False, True):
        for name, value in limit.items() if few else ():
            monkeypatch.setattr(network_curvature, name, value)
        leaves = NetworkArgs(*(a.clone().requires_grad_(a.is_floating_point()) for a in args))
        solution = minimise(objective, LBFGS(1e-11, gap=1e-12, escapes=8), None, leaves, Implicit())
        assert bool(solution.converged.all())
        sum(w.square().sum() for w in solution.value).backward()
        assert (solution.adjoint.indefinite, solution.adjoint.failed) == (0, 0)
        found.append([pack(solution.value), *(a.grad for a in leaves if a.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-7
        )  # 1e-11 of the first gradient, over curvatures from 1e-5 on


def test_an_episode_without_numbers_does_not_disturb_the_others():
    objective, args = problem()
    features = args.features.clone()
    features[1] = 1e200  # finite, unlike its kernels
    found = minimise(objective, LBFGS(escapes=8), None, args._replace(features=features))
    good = minimise(objective, LBFGS(escapes=8), None, args)
    assert found.converged.tolist() == [True, False, True]
    for a, b in zip(found.value, good.value, strict=True):
        torch.testing.assert_close(a[::2], b[::2])
    operator = objective.hessian(good.value, args._replace(features=features))
    inverse = operator.inverse(Network(*(torch.ones_like(w) for w in found.value)), None, 500)
    assert inverse.failed.tolist() == [False, True, False]


def test_newtons_method_mostly_ends_where_lbfgs_alone_would_and_never_much_higher(monkeypatch):
    objective, args = TanhNetwork(5, 40), Episodes(12, 5).network()
    solver, found = LBFGS(1e-5, gap=1e-4, escapes=8), []
    for limit in (network_curvature.FACTORISED, 0):
        monkeypatch.setattr(network_curvature, "FACTORISED", limit)
        found.append(minimise(objective, solver, None, args))
        assert bool(found[-1].converged.all())
    more = found[0].objective / found[1].objective - 1
    assert int((more.abs() < 1e-3).sum()) >= 9
    assert float(more.max()) < 0.05
    assert int(found[0].steps.max()) < int(found[1].steps.max())
