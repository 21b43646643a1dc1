"""Batched Krylov methods against SciPy's and dense algebra."""

from __future__ import annotations

import pytest
import torch
from scipy.sparse.linalg import minres as scipy_minres

from ifsl_bench.solvers.linear import conjugate_gradient, minres, solve_self_adjoint

SAME = 1e-8  # the residual asked for, 1e-12, or rounding after 60 steps, through matrices of a condition up to 1e4

ALL = torch.ones(4, dtype=torch.bool)  # episodes


def matrices(episodes=4, size=30, seed=0):
    """Symmetric and indefinite [E, P, P], right-hand sides [E, P], and a metric [E, P, P]."""
    g = torch.Generator().manual_seed(seed)
    a, m = (torch.randn(episodes, size, size, generator=g, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(size, dtype=torch.float64)
    return (a + a.mT) / 2, torch.randn(episodes, size, generator=g, dtype=torch.float64), m @ m.mT / size + 0.1 * eye


def times(a):
    return lambda p: (a @ p[..., None])[..., 0]


@pytest.mark.parametrize("steps", [1, 2, 7, 25, 60])
def test_minres_is_scipys_step_by_step(steps):
    a, b, _ = matrices()
    x, count = minres(lambda p, _: times(a)(p), lambda r: r, b, b, 1e-12, steps, ALL)
    for i in range(len(a)):
        peer, _ = scipy_minres(a[i].numpy(), b[i].numpy(), maxiter=steps, rtol=1e-14)
        torch.testing.assert_close(x[i], torch.from_numpy(peer), rtol=SAME, atol=SAME)
    assert int(count.max()) <= min(steps, 45)


def test_minres_in_a_metric_has_the_least_residual_of_the_krylov_space():
    s, b, m = matrices(seed=1)
    a = s @ m  # self-adjoint in the metric, and neither symmetric nor definite
    for steps in (3, 10):
        x, _ = minres(lambda p, image: times(s)(image), times(m), b, times(m)(b), 0.0, steps, ALL)
        powers = [b]
        for _ in range(steps - 1):
            powers.append(times(a)(powers[-1]))
        basis = torch.linalg.qr(torch.stack(powers, 2)).Q  # [E, P, steps]
        root = torch.linalg.cholesky(m).mT
        best = torch.linalg.lstsq(root @ a @ basis, (root @ b[..., None])).solution
        torch.testing.assert_close(
            x, (basis @ best)[..., 0], rtol=1e-6, atol=1e-8
        )  # powers of a matrix are ill-conditioned
    x, _ = minres(lambda p, image: times(s)(image), times(m), b, times(m)(b), 1e-11, 300, ALL)
    torch.testing.assert_close(times(a)(x), b, rtol=1e-6, atol=1e-8)  # 1e-11 in the metric, whose condition is 100


def test_conjugate_gradients_end_at_a_negative_curvature_and_show_it():
    a, b, _ = matrices(2)
    a[0] = a[0] @ a[0] + torch.eye(30)
    _, _, indefinite, direction = conjugate_gradient(lambda p, _: times(a)(p), lambda r: r, b, b, 1e-10, 200)
    assert indefinite.tolist() == [False, True]
    d = direction[1]
    assert float(d @ a[1] @ d) < 0
    assert bool((direction[0] == 0).all())


def test_a_singular_matrix_is_not_taken_for_an_indefinite_one():
    _, b, m = matrices(3)
    values, vectors = torch.linalg.eigh(m)
    values[:, :5] = 0
    a = (vectors * values[:, None]) @ vectors.mT
    for dtype in (torch.float64, torch.float32):
        a, b = a.to(dtype), b.to(dtype)
        _, _, indefinite, _ = conjugate_gradient(lambda p, _, a=a: times(a)(p), lambda r: r, b, b, 1e-14, 200)
        assert not bool(indefinite.any())


def test_definite_and_indefinite_episodes_of_a_batch_are_all_solved():
    a, b, _ = matrices()
    a[1] = a[1] @ a[1] + torch.eye(30)
    x, steps, indefinite = solve_self_adjoint(lambda p, _: times(a)(p), lambda r: r, b, b, 1e-12, 300)
    assert indefinite.tolist() == [True, False, True, True]
    torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=SAME, atol=SAME)
    assert int(steps.min()) > 5
