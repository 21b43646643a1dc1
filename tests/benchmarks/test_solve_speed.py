"""The speed of the episodic solvers: ratios to SciPy, and in meta-training to a step in plain PyTorch (`plain`), are in
the report's extra_info.

    pytest tests/benchmarks/test_solve_speed.py --benchmark-enable -n 0

on as many cores as OMP_NUM_THREADS says, or all.

Shapes of the attractor paper: 512 features, 5 novel beside 200 base classes, 50 queries. Timed for evaluation:
kernels, the solve, and the queries' joint logits, given features and base logits. Timed for meta-training: a whole step
of the shipped method, as in `solve_table.py`.
"""

from __future__ import annotations

import math
import time

import numpy as np
import plain
import pytest
import threadpoolctl
import torch
import torch.nn.functional as F
from paper_shapes import D, Episodes, H, K, N, Q
from scipy.optimize import minimize
from solve_table import Row, training

from ifsl_bench.solvers import LBFGS, AttractorMLP, DualNewton, RegressionArgs, SoftmaxRegression, TanhNetwork, minimise
from ifsl_bench.solvers.network import compute_activations
from ifsl_bench.solvers.softmax import class_scores

SAME_OPTIMUM = {"ftol": 1e-12, "gtol": 1e-7, "maxiter": 10000, "maxfun": 10000}


def scipy_rate(
    args: RegressionArgs, base_logits: torch.Tensor, count: int, **options: float
) -> tuple[float, np.ndarray]:
    """Episodes a second of SciPy's L-BFGS, one by one on one thread, and its objectives.

    options: SciPy's; with its defaults it stops some 1e-7 above the minimum, with `SAME_OPTIMUM` where we do.
    """
    x = np.concatenate([args.features[:count].numpy(), np.ones((count, args.features.shape[1], 1), np.float32)], 2)
    x, base, c, p = (
        a.astype(np.float64) for a in (x, base_logits.numpy(), args.centres.numpy(), args.precisions.numpy())
    )
    rows, values = np.arange(x.shape[1]), []
    labels = args.labels.numpy()
    with threadpoolctl.threadpool_limits(1, "blas"):
        begin = time.perf_counter()
        for i in range(count):

            def value(flat: np.ndarray, i: int = i) -> tuple[float, np.ndarray]:
                v = flat.reshape(c[i].shape)
                f = np.concatenate([x[i] @ v.T, base[i]], 1)
                top = f.max(1, keepdims=True)
                e = np.exp(f - top)
                total = e.sum(1, keepdims=True)
                loss = (np.log(total) + top)[:, 0].mean() - f[rows, labels[i]].mean() + (p * (v - c[i]) ** 2).sum() / 2
                pi = e[:, : len(v)] / total
                pi[rows, labels[i]] -= 1
                return loss, (pi.T @ x[i] / len(rows) + p * (v - c[i])).ravel()

            values.append(minimize(value, c[i].ravel(), jac=True, method="L-BFGS-B", options=options).fun)
        elapsed = time.perf_counter() - begin
    return count / elapsed, np.array(values)


@pytest.mark.slow("a benchmark")
@pytest.mark.parametrize("shots", [5, 1])
def test_lr_evaluation(benchmark, shots):
    count, few = (32, 2) if benchmark.disabled else (2048, 24)  # fewer where nothing is timed
    episodes = Episodes(count, shots)
    args = episodes.regression()

    def evaluate():
        solution = minimise(SoftmaxRegression(), DualNewton(), None, args)
        novel = class_scores(solution.value, episodes.query).mT
        return solution, torch.cat([episodes.query_base_logits, novel], 2)

    solution, logits = benchmark.pedantic(evaluate, rounds=8, warmup_rounds=1)
    assert logits.shape == (count, Q, K + N)
    assert bool(solution.converged.all())
    rate, values = scipy_rate(args, episodes.base_logits, few)
    same, exact = scipy_rate(args, episodes.base_logits, few, **SAME_OPTIMUM)
    double = RegressionArgs(
        *(
            a.double() if a.is_floating_point() else a
            for a in SoftmaxRegression().select_episodes(args, torch.arange(few))
        )
    )
    ours = SoftmaxRegression().value(solution.value[:few].double(), double).numpy()
    assert (ours <= values + 1e-7).all()
    assert abs(ours - exact).max() <= 1e-7
    report(
        benchmark, count, scipy_episodes_per_second=rate, scipy_same_optimum=same,
        scipy_excess=float((values - ours).mean()), scipy_same_optimum_excess=float((exact - ours).mean()),
    )  # fmt: skip


@pytest.mark.slow("a benchmark")
@pytest.mark.parametrize("shots", [5, 1])
def test_mlp_evaluation(benchmark, shots):
    count, few = (4, 1) if benchmark.disabled else (128, 4)
    episodes = Episodes(count, shots)
    args = episodes.network()

    def evaluate():
        solution = minimise(TanhNetwork(N), LBFGS(1e-4), None, args)
        return solution, torch.cat(
            [episodes.query_base_logits, compute_activations(solution.value, episodes.query)[1].mT], 2
        )

    solution, _ = benchmark.pedantic(evaluate, rounds=3, warmup_rounds=1)
    assert bool(solution.converged.all())
    space = TanhNetwork(N).search_coordinates(None, args)
    with plain.one_thread():
        rate, values = plain.scipy_network(args, space.to_unknowns(space.initial_point()), episodes.base_logits, few)
    report(
        benchmark, count, mean_steps=float(solution.steps.float().mean()), scipy_episodes_per_second=rate,
        scipy_excess=float((values - solution.objective[:few].double().numpy()).mean()),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("gradient", ["rbp", "implicit", "t-bptt"])
@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_meta_training(benchmark, learner, gradient, batch):
    step = training(Row("", learner, 5, gradient), batch, torch.device("cpu"))
    benchmark.pedantic(step, rounds=30 if learner == "lr" else 10, warmup_rounds=2)
    episodes = Episodes(batch, 5)
    sizes = (D + 1,) if learner == "lr" else (H + 1, D + 1, D)
    memory = AttractorMLP(D, sizes)
    tau = torch.full((2,), 2.0, requires_grad=True)
    gammas = [torch.full((size,), math.log(0.01), requires_grad=True) for size in sizes]
    optimiser = torch.optim.Adam([*memory.parameters(), tau, *gammas], 1e-3)

    def plain_step(i):
        """A like step on one episode without the library: RBP, no U_0 and no dropout."""
        outputs = memory(episodes.weight)
        x, labels = episodes.figures_and_tables[i], episodes.labels[i]
        means = torch.stack([x[labels == n].mean(0) for n in range(N)])
        shares = (tau[0] * F.normalize(means, dim=1) @ F.normalize(episodes.weight, dim=1).T).softmax(1)
        centres = [shares @ outputs[0]]
        if learner == "mlp":
            mean = x.mean(0, keepdim=True)
            share = (tau[1] * F.normalize(mean, dim=1) @ F.normalize(episodes.weight, dim=1).T).softmax(1)
            centres += [shares @ outputs[2], (share @ outputs[1]).expand(H, -1)]
        chosen = gammas if learner == "lr" else [gammas[0], gammas[2], gammas[1]]
        # gamma enters as a mean over rows; the centres of `to_prior` differ from u by the weight decay's share.
        priors = [(u, 1e-5 + 2 * g.exp() / len(u)) for u, g in zip(centres, chosen, strict=True)]

        def inner(v):
            return plain.objective(v, x, labels, episodes.base_logits[i], priors)

        v = plain.solved(lambda v: inner(v), [torch.zeros_like(u) if learner == "lr" else u.detach() for u in centres])
        point = [w.requires_grad_() for w in v]
        joint = torch.cat([episodes.query_base_logits[i], plain.logits(point, episodes.query[i])], 1)
        optimiser.zero_grad()
        cotangents = torch.autograd.grad(F.cross_entropy(joint, episodes.target[i]), point)
        plain.recurrent_back_propagation(inner, v, cotangents)
        optimiser.step()

    with plain.one_thread():
        if not benchmark.disabled:
            plain_step(0)
        begin = time.perf_counter()
        for i in range(count := 1 if benchmark.disabled else 8):
            plain_step(i % batch)
        rate = count / (time.perf_counter() - begin)
    report(benchmark, batch, plain_rbp_episodes_per_second=rate)


def report(benchmark, episodes: int, **extra: float) -> None:
    benchmark.extra_info.update(extra, threads=torch.get_num_threads())
    if benchmark.stats is None:  # run as a plain test
        return
    rate = episodes / benchmark.stats.stats.median
    benchmark.extra_info["episodes_per_second"] = rate
    for peer, ratio in (
        ("scipy_episodes_per_second", "ratio_to_scipy"),
        ("plain_rbp_episodes_per_second", "ratio_to_plain_rbp"),
    ):
        if peer in extra:
            benchmark.extra_info[ratio] = rate / extra[peer]
    if "scipy_same_optimum" in extra:
        benchmark.extra_info["ratio_to_scipy_at_same_optimum"] = rate / extra["scipy_same_optimum"]
