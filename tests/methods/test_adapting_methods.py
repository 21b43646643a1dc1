"""The suite's methods that see images or maps, against plain loops in double precision on a small network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.adapting import make_small_base
from ifsl_bench.plugin.adapting_contract import check_adapting_rules, make_random_learner
from ifsl_bench.plugin.method import Query, Support, masked_logits
from ifsl_bench.plugin.options import make_method
from ifsl_bench.utils.errors import UserError

K, N = 6, 3
BASE = make_small_base().to(dtype=torch.float64)


def sessions(hide: tuple[int, ...] = ()) -> list[Support]:
    """Two sessions of three classes of made-up images."""
    made = make_random_learner("any", registry.get_method("fine-tune"), {}).supports
    hidden = torch.zeros(1, K, dtype=torch.bool)
    hidden[:, list(hide)] = True
    return [Support(s.features, s.labels, hidden, s.base_logits.double()) for s in made]


def queries() -> Query:
    rows = torch.randint(0, 256, (1, 9, 64), generator=torch.Generator().manual_seed(3)).byte()
    return Query(rows, torch.zeros(1, 9, K, dtype=torch.float64))


def answered(name: str, supports: list[Support], **options: object) -> torch.Tensor:
    """The logits [Q, K + t N] after some sessions, -inf for hidden classes."""
    method = make_method(registry.get_method(name), BASE, N, options).eval()
    state = None
    for support in supports:
        state = method.learn(support, state).state
    return masked_logits(method.answer(state, queries()), supports[0].hidden)[0]


@pytest.mark.parametrize("name", ["fine-tune"])
def test_every_rule_is_kept(name):
    broken = dict(check_adapting_rules(name, registry.get_method(name), {}))
    assert len(broken) == 7
    assert not any(broken.values()), broken


@pytest.mark.parametrize("what", ["all", "stage", "head"])
@pytest.mark.parametrize("hide", [(), (1, 4)])
def test_fine_tuning_is_gradient_descent_on_the_supports_of_each_session(what, hide):
    """Against a loss image by image, and steps on the network itself."""
    steps, rate = 3, 0.05
    network = copy.deepcopy(BASE.network.network)
    part = {"all": network, "stage": network.last, "head": torch.nn.Module()}[what]
    rows = [p / p.norm() for p in BASE.prototypes]
    for support in sessions(hide):
        images = support.features[0].double().view(-1, 1, 8, 8) / 128 - 1
        labels = [len(rows) + y for y in support.labels[0].tolist()]
        with torch.no_grad():
            means = [network(images)[torch.tensor(labels) == y].mean(0) for y in sorted(set(labels))]
        rows = [w.detach().clone().requires_grad_() for w in (*rows, *(m / m.norm() for m in means))]
        weights = [p.requires_grad_() for p in part.parameters()]
        free = [*weights, *(w for j, w in enumerate(rows) if j not in hide)]
        speeds = [torch.zeros_like(x) for x in free]
        for _ in range(steps):
            loss = torch.zeros((), dtype=torch.float64)
            for image, y in zip(images, labels, strict=True):
                h = network(image[None])[0]
                shown = {j: 16 * (h @ w) / h.norm() / w.norm() for j, w in enumerate(rows) if j not in hide}
                loss = loss - (shown[y] - torch.logsumexp(torch.stack(list(shown.values())), 0)) / len(images)
            speeds = [0.9 * v + g for v, g in zip(speeds, torch.autograd.grad(loss, free), strict=True)]
            with torch.no_grad():
                for x, v in zip(free, speeds, strict=True):
                    x -= rate * v
    ours = answered("fine-tune", sessions(hide), what=what, steps=steps, rate=rate)
    with torch.no_grad():
        for row, h in zip(ours, network(queries().features[0].double().view(-1, 1, 8, 8) / 128 - 1), strict=True):
            expected = [
                -math.inf if j in hide else float(16 * (h @ w) / h.norm() / w.norm()) for j, w in enumerate(rows)
            ]
            assert row.tolist() == pytest.approx(expected, abs=1e-10)


def test_fine_tuning_without_steps_is_nearest_class_mean():
    ours = answered("fine-tune", sessions(), steps=0) / 16
    network, base = BASE.network, BASE
    ncm = registry.get_method("ncm")(base, N)

    def features(rows: torch.Tensor) -> torch.Tensor:
        return network.network(network.normalise(rows[0]))[None]

    state = None
    for support in sessions():
        logits = F.linear(features(support.features), base.weight, base.bias)
        state = ncm.learn(Support(features(support.features), support.labels, support.hidden, logits), state).state
    expected = ncm.answer(state, Query(features(queries().features), queries().base_logits)).logits[0]
    torch.testing.assert_close(ours, expected.detach(), rtol=1e-3, atol=1e-3)  # `unit` of ncm adds 1e-5 to lengths
    assert torch.equal(ours.argsort(-1), expected.argsort(-1))


@pytest.mark.parametrize(("name", "option", "message"), [
    ("fine-tune", {"rate": 0.0}, "rate must be positive"), ("fine-tune", {"steps": -1}, "steps must be 0 or more"),
])  # fmt: skip
def test_options_out_of_range_are_refused(name, option, message):
    with pytest.raises(UserError, match=message):
        make_method(registry.get_method(name), BASE, N, option)
