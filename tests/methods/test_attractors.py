"""LR, MLP and the attractors, through `forward`: against the authors' numbers and the contract."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ifsl_bench.methods.attractor import Attractor
from ifsl_bench.methods.ridge import Ridge
from ifsl_bench.methods.static_attractor import StaticAttractor
from torch import Tensor

from ifsl_bench.plugin.episode_contract import ContractProbe
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.plugin.rules import EPISODE_RULES, find_hidden_class_fault
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.solvers import LBFGS, NetworkLearner, NetworkWeights, evaluate_outcome, ridge_prior, to_prior
from ifsl_bench.solvers.network import compute_activations
from ifsl_bench.solvers.tree import tree_map
from ifsl_bench.utils.errors import UserError
from tests.methods import test_methods_contract as contract
from tests.tolerances import rounding

D, K, N = 64, 12, 5  # of the stored episodes
CLASSES = {"static": StaticAttractor, "attn": Attractor}


def with_options(method, **options):
    """A class whose defaults are these options, as `type(method)(base, ways)` wants it."""
    return type(method.__name__, (method,), {"__init__": functools.partialmethod(method.__init__, **options)})


VARIANTS = {  # none of them what a registered name stands for
    "mlp": with_options(Ridge, learner="mlp"),
    **{f"{name}-lr": with_options(c, learner="lr") for name, c in CLASSES.items()},
    "attn-lr-t-bptt": with_options(Attractor, learner="lr", gradient="t-bptt", converge=False),
    "attn-mlp-t-bptt": with_options(Attractor, learner="mlp", gradient="t-bptt", converge=False),
}


@pytest.fixture(params=VARIANTS)
def method(request):
    torch.manual_seed(0)
    variant = VARIANTS[request.param](contract.make_base(), contract.N).double().eval()
    variant.registered = request.param
    return variant


# The tests of every registered method, on every variant here.
globals().update({k: v for k, v in vars(contract).items() if k.startswith("test_") and "options" not in k})


@torch.no_grad()
def test_the_rules_that_runs_check_hold(method):
    support, query = contract.make_episodes(method.base, hide=True)
    case = ContractProbe(method.registered, method, support, query, support.hidden).with_search_flag()
    broken = [rule(case) for rule in EPISODE_RULES if rule is not find_hidden_class_fault]
    assert not any(broken), broken


def stored_episode(z) -> tuple[Base, Support, Query, Tensor]:
    weight, bias = z["in/w_class_a"].T.contiguous(), z["in/b_class_a"]
    labels = z["in/y_support"].long()
    labels = (labels - (K if int(labels.max()) >= N else 0))[None]
    x, q = z["in/x_support"][None], z["in/x_query"][None]
    hidden = torch.zeros(1, K, dtype=torch.bool)
    support = Support(x, labels, hidden, F.linear(x, weight, bias))
    return Base(weight, bias, weight), support, Query(q, F.linear(q, weight, bias)), z["in/y_query"].long()


def pieces(kind: str, learner: str, z, prefix: str) -> dict[str, Tensor]:
    """Stored values of the meta-parameters, or of their gradients, by our names.

    W_3's last entry, which faces a constant, is left out.
    """
    get = lambda name: z[f"{prefix}/{name}"]  # noqa: E731
    tensors = {"log_gamma.0": get("log_gamma")}
    if learner == "mlp":
        tensors |= {"log_gamma.1": get("log_gamma3")[:-1], "log_gamma.2": get("log_gamma2")}
    if kind == "static":
        tensors["centre.0"] = get("attr")
        return tensors | ({"centre.1": get("attr3")[:-1], "centre.2": get("attr2")} if learner == "mlp" else {})
    tensors |= {
        "memory.inner.weight": get("w_kb").T,
        "memory.inner.bias": get("b_kb"),
        "offset.0": get("h_attend_bias"),
    }
    outputs = [("kb2", slice(None))]
    tensors["tau"] = get("tau_qq").reshape(1)
    if learner == "mlp":
        tensors |= {"offset.1": get("h_attend_bias3")[:-1], "offset.2": get("h_attend_bias2")}
        outputs = [("kb21", slice(None)), ("kb22", slice(D + 1, 2 * D + 1)), ("kb22", slice(0, D + 1))]
        tensors["tau"] = torch.stack([get("tau_qq"), get("tau_qq2")])
    for i, (name, part) in enumerate(outputs):
        tensors |= {f"memory.outer.{i}.weight": get(f"w_{name}")[:, part].T}
        tensors |= {f"memory.outer.{i}.bias": get(f"b_{name}")[part]}
    return tensors


class Stay(NetworkLearner):
    """Takes a stored point for the solution, since the problem has several."""

    def make_solver(self, dtype, training=False):
        return self

    def run(self, objective, v0, args):
        return evaluate_outcome(objective, self.point, args, torch.tensor([True]), torch.zeros(1, dtype=torch.long))


def point(z, learner: str, key: str) -> Tensor | NetworkWeights:
    """Stored fast weights: [1, N, D+1] of LR, or those of the network."""
    rows = lambda s: torch.cat([z[f"{key}/w_class_b{s}"], z[f"{key}/b_class_b{s}"][None]]).T[None]  # noqa: E731
    if learner == "lr":
        return rows("")
    return NetworkWeights(rows(""), z[f"{key}/w_class_b3"].T[None].contiguous(), rows("2"))


def stay(z) -> Stay:
    learner = Stay(N, D)
    object.__setattr__(learner, "point", point(z, "mlp", "tight/w"))
    return learner


def arguments(method, support: Support):
    """The arguments of a method's inner problem, where no base class is hidden."""
    learner, decay = method.learner, method.weight_decay
    if isinstance(method, Ridge):
        priors = [
            ridge_prior(1 if part.shares_centre else part.rows, part.size, decay, support.features)
            for part in learner.groups
        ]
    else:
        of_parts = zip(learner.groups, method.centres(support), method.log_gamma, strict=True)
        priors = [to_prior(u, log_gamma, decay, part.rows) for part, u, log_gamma in of_parts]
    return learner.make_arguments((support.features, support.labels, support.base_logits.logsumexp(-1)), priors)


SOLVED = {torch.float64: 1e-9 * 1000, torch.float32: 1e-3}  # the solver's stop, times the condition of the problems
FORMULA = rounding(torch.float64, 20 * 25 * 64)  # up to 20 steps of sums over 25 rows of 64 features


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.detach() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-12))


@pytest.mark.parametrize(
    ("gradient", "dtype"), [("rbp", torch.float64), ("implicit", torch.float64), ("rbp", torch.float32)]
)
@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", ["static", "attn"])
def test_stored_logits_and_meta_gradients(oracle, kind, learner, gradient, dtype):
    z = oracle(f"{learner}_{kind}_s5_nomask")
    z = {key: x.to(dtype) if x.is_floating_point() else x for key, x in z.items()}
    base, support, query, target = stored_episode(z)
    method = CLASSES[kind](base, N, learner=learner, gradient=gradient).eval()
    assert method.load_state_dict(pieces(kind, learner, z, "meta"))
    if learner == "mlp":
        method.learner = stay(z)
    logits = method(support, query).logits
    assert relative(logits[0].detach(), z["tight/query_logits_no_dummy_step"]) < SOLVED[dtype]
    F.cross_entropy(logits[0], target).backward()
    expected = pieces(kind, learner, z, "tight/meta_grad" if gradient == "rbp" else "tight/exact_meta_grad")
    assert {name for name, _ in method.named_parameters()} == set(expected)
    for name, parameter in method.named_parameters():
        assert relative(parameter.grad, expected[name]) < SOLVED[dtype], name


def test_stored_unrolled_logits_and_meta_gradients(oracle):
    z = oracle("bptt20_lr_attn_s5_nomask")
    base, support, query, target = stored_episode(z)
    method = Attractor(base, N, learner="lr", gradient="t-bptt", converge=False, dropout=0.0)
    method.load_state_dict(pieces("attn", "lr", z, "meta"))
    method.start_0 = torch.cat([z["init/w/w_class_b"], z["init/w/b_class_b"][None]]).T
    for training in (False, True):
        method.train(training).zero_grad()
        prediction = method(support, query)
        assert relative(prediction.logits[0].detach(), z["query_logits"]) < FORMULA
        assert prediction.statistics["step_rate"].item() == 1
        F.cross_entropy(prediction.logits[0], target).backward()
        for name, expected in pieces("attn", "lr", z, "meta_grad").items():
            assert relative(method.get_parameter(name).grad, expected) < 10 * FORMULA, name  # backwards and forwards


@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_stored_baselines(oracle, learner):
    z = oracle(f"{learner}_none_s5_nomask")
    base, support, query, _ = stored_episode(z)
    method = Ridge(base, N, learner=learner, weight_decay=float(np.float32(1e-3)))
    if learner == "mlp":
        method.learner = stay(z)
    assert relative(method(support, query).logits[0], z["tight/query_logits_no_dummy_step"]) < SOLVED[torch.float64]


def test_dropout_is_drawn_once_an_episode_in_training_alone(monkeypatch):
    base = contract.make_base()
    support, query = contract.make_episodes(base)
    twice = Support(*(t[:1].expand(2, *t.shape[1:]) for t in vars(support).values()))
    same = Query(query.features[:1].expand(2, -1, -1), query.base_logits[:1].expand(2, -1, -1))
    calls = []
    dropout = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p, training: calls.append(x.shape) or dropout(x, p, training))
    torch.manual_seed(0)
    for gradient in ("rbp", "t-bptt"):
        calls.clear()
        method = Attractor(base, N, learner="lr", gradient=gradient, dropout=0.5)
        with torch.no_grad():  # attention that differs between prototypes
            method.tau.fill_(20.0)
            method.memory.outer[0].weight.normal_()
        first, second = method(twice, same).logits
        assert calls == [(2, N, contract.D)]
        assert relative(first.detach(), second.detach()) > 1e-6
        torch.manual_seed(3)
        first = method(twice, same).logits
        torch.manual_seed(3)
        assert torch.equal(first, method(twice, same).logits)
        method.eval()
        state = torch.get_rng_state()
        torch.testing.assert_close(*method(twice, same).logits)
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_initial_values(learner):
    """What ``test_methods_numbers.py``, which pins what methods compute from them, does not see."""

    def make(seed: int, **options):
        torch.manual_seed(seed)
        return Attractor(contract.make_base(), N, learner=learner, **options)

    a, b = make(0, gradient="t-bptt"), make(1, gradient="t-bptt")
    starts = list(a.buffers())
    assert [s.shape for s in starts] == [(p.rows, p.size) for p in a.learner.groups]
    assert all(torch.equal(s, t) for s, t in zip(starts, b.buffers(), strict=True))
    assert all(0.008 < float(s.abs().max()) <= 0.01 for s in starts)
    assert not any("start" in key for key in a.state_dict())
    assert not list(make(0).buffers())
    assert not torch.equal(a.offset[0], b.offset[0])
    for plugin in (Attractor, StaticAttractor):
        first, second = (
            plugin.defaults(task) for name in ("glyphs-1shot", "glyphs-5shot") for task in load_tasks(name)
        )
        assert (first, second) == ({"gamma": 0.1}, {})


@pytest.mark.parametrize("converge", [False, True])
@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_statistics_say_how_it_went(learner, converge):
    base = contract.make_base()
    support, query = contract.make_episodes(base)
    far = Support(10 * support.features, support.labels, support.hidden, support.base_logits)
    method = Attractor(base, N, learner=learner, gradient="t-bptt", steps=9, converge=converge).eval()
    with torch.no_grad():
        stats = method(far, query).statistics
        near_stats = method(support, query).statistics
    assert bool((near_stats["step_rate"] == 1).all())
    assert bool((stats["step_rate"] < 1).any())
    assert stats.keys() == {"solver_steps", "solver_unconverged", "gradient_norm", "step_rate"}
    assert bool((stats["solver_steps"] == 9).all()) != converge
    assert bool((near_stats["solver_unconverged"] == 0).all())
    if converge:
        assert bool((near_stats["gradient_norm"] < 1e-6).all())  # the solver's stop, of gradients up to 100
    if learner == "lr":  # 1.8 over the largest eigenvalue of the Hessian at the start
        args = method.learner.make_arguments(
            (far.features, far.labels, far.base_logits.logsumexp(-1)),
            [(torch.zeros(N, contract.D + 1).double(), 0.4 * method.log_gamma[0].detach().exp() + 1e-5)],
        )
        start = method.start_0.expand(contract.E, -1, -1)
        objective = method.learner.objective
        h = torch.autograd.functional.hessian(lambda v: objective.value(v, args)[0], start)[0, :, :, 0].flatten(2)
        largest = torch.linalg.eigvalsh(h.flatten(0, 1).flatten(1))[-1]
        assert float(stats["step_rate"][0] * largest) == pytest.approx(1.8, rel=1e-2)  # an estimate by power iteration


def test_a_solve_that_needs_more_steps_is_flagged():
    base = contract.make_base()
    support, query = contract.make_episodes(base)
    method = Ridge(base, N, learner="mlp")
    method.learner = type("Hurried", (NetworkLearner,), {"solver": lambda self, *_: LBFGS(1e-12, max_steps=3)})(
        N, contract.D
    )
    assert bool((method(support, query).statistics["solver_unconverged"] == 1).all())


def test_a_search_that_goes_on_starts_at_the_same_activations_with_no_more_penalty():
    base = contract.make_base()
    support, _ = contract.make_episodes(base)
    method = Attractor(base, N, gradient="t-bptt").double()
    args = tree_map(torch.detach, arguments(method, support))
    net = NetworkWeights(*(s.expand(contract.E, -1, -1) for s in method.buffers()))
    with torch.no_grad():
        objective, solver = method.learner.continue_search(args, net, net)
    assert bool((solver.tolerance > 0).all())
    space = objective.search_coordinates(None, args)
    z = space.initial_point()
    start = space.to_unknowns(z)
    for result, expected in zip(
        compute_activations(start, support.features), compute_activations(net, support.features), strict=True
    ):
        torch.testing.assert_close(result, expected)
    value = objective.value(start, args)
    torch.testing.assert_close(value, space.evaluate(z, space.apply_metric(z))[0])
    assert bool((value < objective.value(net, args)).all())
    # A start in the large form stays as it is.
    large = objective.search_coordinates(net, args)
    for weights, expected in zip(large.to_unknowns(large.initial_point()), net, strict=True):
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(  # both attractors have these of one base class
    ("options", "message"),
    [
        ({"gradient": "implicit", "steps": 30}, "steps has no effect with gradient=implicit"),
        ({"gradient": "t-bptt", "damping": 0.2}, "damping has no effect"),
        ({"converge": False}, "converge has no effect with gradient=rbp"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"damping": 1.0}, "damping must be"),
        ({"rate": float("inf")}, "rate must be"),
        ({"gamma": 0.0}, "gamma must be"),
        ({"hidden": 0}, "hidden"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(UserError, match=message):
        Attractor(contract.make_base(), N, **options)


def test_weight_decays_of_the_baselines():
    with pytest.raises(UserError, match="weight_decay"):
        Ridge(contract.make_base(), N, weight_decay=0.0)
    grid = Ridge.grid["weight_decay"]
    assert len(grid) == 25
    assert (grid[0], grid[-1]) == (1e-13, 1e-1)
    grid = [*grid, *Ridge.session_grid["weight_decay"]]
    np.testing.assert_allclose(np.diff(np.log10(grid)), 0.5, atol=1e-3)  # values have three digits
