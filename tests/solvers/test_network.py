"""The MLP in its dual numbers: its derivatives, its agreement with the large form, and the exact adjoint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize

from ifsl_bench.solvers import (
    LBFGS,
    ConjugateGradient,
    ConvergedSolve,
    Implicit,
    LinearLearner,
    NetworkArgs,
    NetworkLearner,
    NetworkWeights,
    Neumann,
    TanhNetwork,
    UnrolledSolve,
    estimate_largest_curvature,
    fixed_logsumexp,
    minimise,
    numba_code_cache,
    ridge_prior,
)
from ifsl_bench.solvers.lbfgs import TURNS_BETWEEN_CHECKS
from ifsl_bench.solvers.tree import pack_leaves_into_rows, unpack_rows_to_tree

RESIDUAL = 1e-12 * 1000  # what is asked of an inverse in dual numbers, times what the kernels make of it
UNMOVED = 1e-3  # float32's stop, 1e-5 of the first gradient, over a ridge of 1e-3 and features of 4


@pytest.fixture(params=[True, False], ids=["batched", "compiled"])
def way(request):
    """All at once in torch, as on a device, or one by one by compiled kernels."""
    with numba_code_cache.use_batched_solvers(request.param):
        yield "batched" if request.param else "compiled"


def problem(ways=3, shots=2, hidden=4, features=6, episodes=2, gamma=0.1, base=5, shared=False, norm=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x = normal(episodes, ways, features).repeat_interleave(shots, 1) + 0.5 * normal(episodes, ways * shots, features)
    x = norm * x / x.norm(dim=-1, keepdim=True)
    labels = torch.arange(ways).repeat_interleave(shots).expand(episodes, -1)
    base_logsumexp = 1 + 0.3 * normal(*labels.shape) if base else torch.full(labels.shape, -math.inf).double()
    lead = () if shared else (episodes,)
    sizes = ((ways, hidden + 1, ways), (ways, features, ways), (1 if shared else hidden, features + 1, hidden))
    parts = []
    for rows, size, mean in sizes:
        parts += [0.3 * normal(*lead, rows, size), 1e-5 + 2 * gamma / mean * (0.3 * normal(size)).exp()]
    return TanhNetwork(ways, hidden), NetworkArgs(x, labels, base_logsumexp, *parts)


CASES = [{}, {"base": 0}, {"shared": True}, {"ways": 1}, {"shots": 1}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_closed_forms_against_autograd(case):
    objective, args = problem(**case)
    v = minimise(objective, LBFGS(1e-2), None, args).value
    v = NetworkWeights(*(w + 0.1 for w in v))
    point = [w.clone().requires_grad_() for w in v]
    expected = torch.autograd.grad(objective.value(NetworkWeights(*point), args).sum(), point, create_graph=True)
    for part, reference in zip(objective.gradient(v, args), expected, strict=True):
        torch.testing.assert_close(part, reference.detach())
    d = [torch.randn_like(w) for w in v]
    products = torch.autograd.grad(expected, point, d)
    for part, reference in zip(objective.hessian(v, args).product(NetworkWeights(*d)), products, strict=True):
        torch.testing.assert_close(part, reference)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_solution_in_dual_numbers_is_a_stationary_point_of_the_large_form(case):
    objective, args = problem(**case)
    solution = minimise(objective, LBFGS(1e-10), None, args)
    assert bool(solution.converged.all())
    gradient = pack_leaves_into_rows(objective.gradient(solution.value, args))
    start = pack_leaves_into_rows(
        objective.gradient(
            objective.search_coordinates(None, args).to_unknowns(
                objective.search_coordinates(None, args).initial_point()
            ),
            args,
        )
    )
    assert bool((gradient.norm(dim=1) <= 1.01e-10 * start.norm(dim=1) + 1e-14).all())
    # Of a gradient that is 1e-10 of the first, rounding is a percent.
    torch.testing.assert_close(gradient.norm(dim=1), solution.gradient_norm, rtol=1e-2, atol=1e-12)
    torch.testing.assert_close(solution.objective, objective.value(solution.value, args))
    large = minimise(objective, LBFGS(), NetworkWeights(*(w + 1e-3 for w in solution.value)), args)
    for part, reference in zip(large.value, solution.value, strict=True):
        torch.testing.assert_close(part, reference, rtol=1e-3, atol=1e-4)  # L-BFGS: 1e-8, over curvatures from 1e-5 on


@pytest.mark.usefixtures("way")
def test_no_worse_than_scipy_from_the_same_start():
    objective, args = problem(ways=5, shots=5, hidden=40, features=64, gamma=0.05, norm=12.0)
    solution = minimise(objective, LBFGS(), None, args)
    space = objective.search_coordinates(None, args)
    start = space.to_unknowns(space.initial_point())
    for i in range(2):
        episode = objective.select_episodes(args, torch.tensor([i]))
        like = NetworkWeights(*(w[i : i + 1] for w in start))

        def value(flat, episode=episode, like=like):
            v = unpack_rows_to_tree(torch.as_tensor(flat)[None], like)
            return float(objective.value(v, episode)), pack_leaves_into_rows(objective.gradient(v, episode))[0].numpy()

        peer = minimize(
            value,
            pack_leaves_into_rows(like)[0].numpy(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 9999},
        )
        # Both end in some minimum: neither must be much the worse.
        assert float(solution.objective[i]) <= peer.fun * 1.05


def loss_of(objective, args, solver, adjoint, v0=None):
    solution = minimise(objective, solver, v0, args, adjoint)
    return sum((w * torch.linspace(-1, 1, w[0].numel(), dtype=w.dtype).view(w[0].shape)).sum() for w in solution.value)


@pytest.mark.slow("hundreds of solves")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", [{}, {"base": 0}, {"shared": True}], ids=str)
def test_gradcheck_of_the_solved_loss(case):
    objective, args = problem(gamma=0.5, ways=2, hidden=3, features=4, **case)
    chosen = [i for i, a in enumerate(args) if a.is_floating_point() and bool(a.isfinite().all())]

    def loss(*leaves):
        filled = list(args)
        for i, leaf in zip(chosen, leaves, strict=True):
            filled[i] = leaf
        return loss_of(
            objective, NetworkArgs(*filled), LBFGS(1e-13, max_steps=3000), Implicit(ConjugateGradient(1e-13))
        )

    leaves = [args[i].clone().requires_grad_() for i in chosen]
    # Central differences: the solver's 1e-13 over eps, and eps squared.
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-5, atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.usefixtures("way")
def test_the_reduced_inverse_is_the_inverse_of_the_hessian():
    objective, args = problem(ways=5, shots=5, hidden=8, features=20, norm=10.0, gamma=0.05)
    v = minimise(objective, LBFGS(), None, args).value
    rhs = NetworkWeights(*(torch.randn_like(w) for w in v))
    operator = objective.hessian(v, args)
    inverse = operator.solve(rhs, 1e-12, 3000)
    assert not bool(inverse.failed.any())
    for part, reference in zip(operator.product(inverse.value), rhs, strict=True):
        torch.testing.assert_close(part, reference, rtol=RESIDUAL, atol=RESIDUAL)


@pytest.mark.parametrize("shots", [1, 5])
def test_one_by_one_is_the_search_that_all_at_once_is(shots):
    objective, args = problem(ways=5, shots=shots, hidden=40, features=32, episodes=4, norm=12.0)
    solutions = []
    for every in (True, False):
        with numba_code_cache.use_batched_solvers(every):
            solutions.append(minimise(objective, LBFGS(1e-10), None, args))
    batch, alone = solutions
    assert bool(batch.converged.all())
    assert bool(alone.converged.all())
    # Who is one of many makes a few steps more until somebody looks, and later searches lines in another way: at five
    # shots that may be the way to another minimum, which must not be much the worse.
    assert int((alone.steps - batch.steps).abs().max()) <= 0.2 * int(alone.steps.max()) + TURNS_BETWEEN_CHECKS
    if shots == 5:
        assert int((batch.objective <= alone.objective * (1 + 1e-6)).sum()) >= 3
        assert bool((batch.objective <= alone.objective * 1.1).all())
        return
    torch.testing.assert_close(batch.objective, alone.objective)
    for a, b in zip(batch.value, alone.value, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-6
        )  # 1e-10 of the first gradient, over curvatures from 1e-5 on


def curvatures(objective, args, v):
    """The eigenvalues of each episode's Hessian, from all of its columns: [E, P]."""
    v, args = (type(t)(*(a.double() if a.is_floating_point() else a for a in t)) for t in (v, args))
    product, (count, size) = objective.hessian(v, args).product, pack_leaves_into_rows(v).shape
    columns = [
        pack_leaves_into_rows(product(unpack_rows_to_tree(row.expand(count, -1), v)))
        for row in torch.eye(size, dtype=torch.float64)
    ]
    return torch.linalg.eigvalsh(torch.stack(columns, 2))


def test_largest_curvature_at_a_small_start():
    # There the Hessian has eigenvalues in pairs +-lambda, from the products of output and hidden weights.
    objective, args = problem(norm=12.0, gamma=0.01)
    g = torch.Generator().manual_seed(3)
    sizes = ((3, 5), (3, 6), (4, 7))
    v = NetworkWeights(*((0.02 * torch.rand(2, *s, generator=g, dtype=torch.float64) - 0.01) for s in sizes))
    curvature = estimate_largest_curvature(objective, v, args)
    expected = curvatures(objective, args, v).abs().amax(1)
    torch.testing.assert_close(curvature, expected, rtol=0.05, atol=0)  # what its default of steps comes to


def weak(decay, norm=20.0, dtype=torch.float64, episodes=4):
    """Nothing pulls but a small ridge: where it ends is far from where the gradient first looks small."""
    objective, args = problem(ways=5, shots=3, hidden=20, features=32, norm=norm, episodes=episodes)
    still = {n: torch.zeros_like(getattr(args, n)) for n in args._fields if n.endswith("centres")}
    ridge_prior = {n: torch.full_like(getattr(args, n), decay) for n in args._fields if n.endswith("precisions")}
    return objective, NetworkArgs(
        *(a.to(dtype) if a.is_floating_point() else a for a in args._replace(**still, **ridge_prior))
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("decay", "dtype"), [(1e-6, torch.float64), (1e-3, torch.float32), (1e-6, torch.float32)])
def test_a_weak_ridge_is_followed_to_its_minimum(decay, dtype):
    objective, args = weak(decay, dtype=dtype)
    solution = minimise(objective, LBFGS(gap=1e-8), None, args)
    assert bool(solution.converged.all())
    double = NetworkArgs(*(a.double() if a.is_floating_point() else a for a in args))
    start = NetworkWeights(*(w.double() for w in solution.value))
    on = minimise(replace(objective, start=start), LBFGS(1e-2, 9999, gap=1e-13), None, double)
    assert bool(on.converged.all())
    assert bool((solution.objective.double() <= on.objective * (1 + 1e-4)).all())


def saddles(dtype=torch.float64):
    """From where the hidden units do nothing, the search ends where they still do nothing: in softmax regression's
    minimum, which is a saddle of the network where the linear weights have a singular value above 1. The first of three
    pulls is too strong for that."""
    objective, args = weak(1e-3, norm=3.0, dtype=dtype, episodes=3)
    still = NetworkWeights(*(torch.zeros(3, rows, size, dtype=dtype) for rows, size in ((5, 21), (5, 32), (20, 33))))
    x = args.features * torch.tensor([8.0, 1.0, 0.7], dtype=dtype)[:, None, None]
    return replace(objective, start=still), args._replace(features=x)


@pytest.mark.slow("hundreds of solves")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_escapes_from_saddles_is_a_minimum_and_lower(dtype):
    objective, args = saddles(dtype)
    stays = minimise(objective, LBFGS(gap=1e-4), None, args)
    minimum = minimise(objective, LBFGS(gap=1e-4, escapes=20), None, args)
    assert bool(minimum.converged.all())
    before, after = (curvatures(objective, args, solution.value)[:, 0] for solution in (stays, minimum))
    assert (before < 0).tolist() == [False, True, True]
    assert bool((after > 0).all())
    assert bool((minimum.objective[before < 0] < stays.objective[before < 0]).all())
    torch.testing.assert_close(minimum.objective[before > 0], stays.objective[before > 0], rtol=0, atol=0)


@pytest.mark.usefixtures("way")
def test_the_gradient_at_a_saddle_is_the_inverse_all_the_same_and_is_counted():
    objective, args = saddles()
    v = minimise(objective, LBFGS(1e-9), None, args).value
    rhs = NetworkWeights(*(torch.randn_like(w) for w in v))
    operator = objective.hessian(v, args)
    inverse = operator.solve(rhs, 1e-12, 3000)
    assert inverse.indefinite.tolist() == (curvatures(objective, args, v)[:, 0] < 0).tolist()
    assert inverse.indefinite.tolist() == [False, True, True]
    assert not bool(inverse.failed.any())
    for part, reference in zip(operator.product(inverse.value), rhs, strict=True):
        torch.testing.assert_close(part, reference, rtol=RESIDUAL, atol=RESIDUAL)


@pytest.mark.parametrize(("linear", "training", "left"), [
    (ConjugateGradient(), True, True), (Neumann(), True, False), (ConjugateGradient(), False, False),
])  # fmt: skip
def test_saddles_are_left_where_training_asks_for_the_gradient_of_a_minimum(linear, training, left):
    escapes = []

    class Spy(NetworkLearner):
        def with_saddle_escapes(self, solver):
            escapes.append(super().with_saddle_escapes(solver).escapes)
            return super().with_saddle_escapes(solver)

    _, args = saddles(torch.float32)
    learner, rows = Spy(5, 32, 20), (args.features, args.labels, args.base_logsumexp)
    priors = [ridge_prior(1 if p.shares_centre else p.rows, p.size, 1e-3, args.features) for p in learner.groups]
    ConvergedSolve(linear).solve(learner, rows, priors, training=training)
    assert escapes == ([8] if left else [])


def loss_in_v(v, x, labels, base_logits, hidden, decay):
    """MLP's objective as its docstring has it, over all base and novel classes, from nothing of ours: [E]."""
    novel = torch.tanh(x @ v.hidden[..., :-1].mT + v.hidden[:, None, :, -1]) @ v.output[..., :-1].mT
    novel = novel + v.output[:, None, :, -1] + x @ v.skip.mT
    logits = torch.cat([base_logits.masked_fill(hidden[:, None], -torch.inf), novel], 2)
    fit = torch.nn.functional.cross_entropy(logits.mT, labels + base_logits.shape[2], reduction="none").mean(1)
    return fit + decay / 2 * sum(w.square().sum((1, 2)) for w in v)


@pytest.mark.parametrize(("dtype", "hide"), [(torch.float64, 20), (torch.float32, 20), (torch.float32, 100)])
@pytest.mark.parametrize("meta", [ConvergedSolve(), UnrolledSolve()], ids=["converged", "t-bptt"])
def test_however_weak_the_decay_a_minimum_is_found(dtype, meta, hide, way):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 64, generator=g).repeat_interleave(5, 1) + 0.7 * torch.randn(6, 25, 64, generator=g)
    base = 1.5 * torch.nn.functional.normalize(torch.randn(100, 64, generator=g), dim=1)
    x = (8 * torch.nn.functional.normalize(x, dim=2)).to(dtype)
    labels = torch.arange(5).repeat_interleave(5).expand(6, -1)
    base_logits, hidden = x @ base.to(dtype).T, (torch.arange(100) < hide).expand(6, -1)
    learner = NetworkLearner(5, 64)
    start = [part.to(dtype) for part in learner.draw_start()]
    for decay in (1e-12, 1e-14):
        priors = [ridge_prior(1 if p.shares_centre else p.rows, p.size, decay, x) for p in learner.groups]
        rows = (x, labels, fixed_logsumexp(base_logits, hidden))
        solved = meta.solve(
            learner, rows, priors, start, training=way == "compiled" and isinstance(meta, ConvergedSolve)
        )
        assert not bool(solved.statistics["solver_unconverged"].any())
        assert float(solved.statistics["solver_steps"].mean()) < 120
        v = NetworkWeights(*(w.double().requires_grad_() for w in solved.fast_weights))
        value = loss_in_v(v, x.double(), labels, base_logits.double(), hidden, decay)
        slope = torch.autograd.grad(value.sum(), v)
        # Of each objective this share at most is still to gain, in the metric of the penalty.
        gap = sum(part.square().sum((1, 2)) for part in slope) / (2 * decay)
        assert bool((gap <= 2e-4 * value).all())
        assert bool((value < 1e3 * decay).all())  # and no mere point where scores saturate


def test_what_single_precision_cannot_solve_is_solved_in_double():
    objective, args = weak(1e-3, dtype=torch.float32)
    single_precision = LBFGS(1e-11, gap=1e-14)
    with numba_code_cache.use_batched_solvers():
        assert not bool(single_precision._solve_batch(objective.search_coordinates(None, args)).converged.all())
    assert bool(single_precision.run(objective, None, args).converged.all())


@pytest.mark.parametrize("learner", [LinearLearner(5, 32), NetworkLearner(5, 32, 20)], ids=["lr", "mlp"])
def test_an_answer_does_not_depend_on_how_many_others_there_are(learner, way):
    g = torch.Generator().manual_seed(4)
    x, query = 4 * torch.randn(9, 10, 32, generator=g), 4 * torch.randn(9, 6, 32, generator=g)
    labels, base_logsumexp = (torch.arange(10) % 5).expand(9, -1), 3 * torch.randn(9, 10, generator=g)
    priors = [ridge_prior(1 if p.shares_centre else p.rows, p.size, 1e-3, x) for p in learner.groups]
    meta = ConvergedSolve()
    whole = learner.logits(meta.solve(learner, (x, labels, base_logsumexp), priors).fast_weights, query)
    last = learner.logits(meta.solve(learner, (x[7:], labels[7:], base_logsumexp[7:]), priors).fast_weights, query[7:])
    if way == "compiled":  # but for the products that follow the solve
        torch.testing.assert_close(last, whole[7:], rtol=1e-5, atol=1e-5)  # float32's rounding of sums over 32 features
    torch.testing.assert_close(last, whole[7:], rtol=UNMOVED, atol=UNMOVED)
    # In training a solve may be less exact, and ends in the same minimum where there is but one.
    solved = meta.solve(learner, (x[7:], labels[7:], base_logsumexp[7:]), priors, training=True)
    assert not bool(solved.statistics["solver_unconverged"].any())
    if learner.convex:
        torch.testing.assert_close(
            learner.logits(solved.fast_weights, query[7:]), whole[7:], rtol=UNMOVED, atol=UNMOVED
        )
