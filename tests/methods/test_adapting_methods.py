"""The suite's methods that see images or maps, against plain loops in double precision on a small network."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.adapting import make_small_base_for_checks
from ifsl_bench.plugin.adapting_contract import check_adapting_rules, make_random_learner
from ifsl_bench.plugin.method import Query, Support, masked_logits
from ifsl_bench.plugin.options import make_method
from ifsl_bench.plugin.rules import EPISODE_RULES, check_contract, make_random_probe
from ifsl_bench.utils.errors import UserError

K, N = 6, 3
BASE = make_small_base_for_checks().to(dtype=torch.float64)


def sessions(hide: tuple[int, ...] = ()) -> list[Support]:
    """Two sessions of three classes of made-up images."""
    made = make_random_learner("any", registry.get_method("fine-tune"), {}).support_of_both_sessions
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


@pytest.mark.parametrize("name", ["fine-tune", "warp"])
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


@pytest.mark.parametrize(("name", "options"), [("fine-tune", {"steps": 0}), ("warp", {"keep": 1.0})])
def test_with_nothing_to_tune_they_are_nearest_class_mean(name, options):
    ours = answered(name, sessions(), **options) / 16
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
    ("warp", {"keep": 1.1}, "keep must be between 0 and 1"),
])  # fmt: skip
def test_options_out_of_range_are_refused(name, option, message):
    with pytest.raises(UserError, match=message):
        make_method(registry.get_method(name), BASE, N, option)


# -- WaRP


def patches(x: torch.Tensor, kernel: int, stride: int, padding: int) -> np.ndarray:
    """All patches of images [B, C, H, W] that a convolution sees, one in a row."""
    x = F.pad(x, (padding,) * 4)
    places = range(0, x.shape[2] - kernel + 1, stride)
    return np.array([image[:, i : i + kernel, j : j + kernel].flatten().tolist()
                     for image in x for i in places for j in places])  # fmt: skip


def gradients_of_coefficients(network, coefficients, bases, images, labels, rows, shown) -> list[np.ndarray]:
    """dL/dA, by weights A U' in the place of the network's."""
    free = [torch.tensor(a, requires_grad=True) for a in coefficients]
    weights = {
        name: (a @ torch.tensor(basis).T).view_as(network.get_parameter(name))
        for a, (name, basis) in zip(free, bases.items(), strict=True)
    }
    loss = torch.zeros((), dtype=torch.float64)
    for image, label in zip(images, labels, strict=True):
        h = torch.func.functional_call(network, weights, (image[None],))[0]
        cosines = {j: 16 * (h @ w) / h.norm() / w.norm() for j, w in enumerate(rows) if j in shown}
        loss = loss - (cosines[label] - torch.logsumexp(torch.stack(list(cosines.values())), 0)) / len(images)
    return [g.numpy() for g in torch.autograd.grad(loss, free)]


def largest(importances: list[np.ndarray], share: float) -> list[np.ndarray]:
    flat = np.sort(np.concatenate([x.ravel() for x in importances]))[::-1]
    return [x >= flat[round(share * len(flat)) - 1] for x in importances]


def test_warp_tunes_coefficients_of_weights_in_the_basis_of_their_inputs():
    """Against patches one by one, NumPy's singular vectors, and coefficients in place of weights."""
    steps, rate, keep, hide = 2, 0.05, 0.3, (1, 4)
    network = copy.deepcopy(BASE.network.network)
    rows_of_base, labels = BASE.network.images()
    images = rows_of_base.double().view(-1, 1, 8, 8) / 128 - 1
    stem, last = network.stem[0], network.last[0]
    with torch.no_grad():
        inputs = [patches(images, 3, 1, 1), patches(network.stem(images), 3, 2, 0)]
        means = [network(images)[labels == k].mean(0) for k in range(K)]
    names = ("stem.0.weight", "last.0.weight")
    bases = {name: np.linalg.svd(x.T @ x)[0] for name, x in zip(names, inputs, strict=True)}
    coefficients = [
        layer.weight.detach().flatten(1).numpy() @ basis
        for layer, basis in zip((stem, last), bases.values(), strict=True)
    ]
    importances = [np.zeros_like(a) for a in coefficients]
    batch = gradients_of_coefficients(network, coefficients, bases, images, labels.tolist(), means, range(K))
    importances = [a + abs(g) for a, g in zip(importances, batch, strict=True)]  # 60 images are one batch
    kept, rows = largest(importances, keep), list(BASE.prototypes)

    def features(images: torch.Tensor) -> torch.Tensor:
        weights = [torch.tensor(a @ basis.T) for a, basis in zip(coefficients, bases.values(), strict=True)]
        named = {name: w.view_as(network.get_parameter(name)) for name, w in zip(names, weights, strict=True)}
        with torch.no_grad():
            return torch.func.functional_call(network, named, (images,))

    for support in sessions(hide):
        images = support.features[0].double().view(-1, 1, 8, 8) / 128 - 1
        labels = [len(rows) + y for y in support.labels[0].tolist()]
        rows += [features(images)[torch.tensor(labels) == y].mean(0) for y in sorted(set(labels))]
        shown = [j for j in range(len(rows)) if j not in hide]
        speeds = [np.zeros_like(a) for a in coefficients]
        for _ in range(steps):
            found = gradients_of_coefficients(network, coefficients, bases, images, labels, rows, shown)
            speeds = [0.9 * v + np.where(mask, 0, g) for v, g, mask in zip(speeds, found, kept, strict=True)]
            coefficients = [a - rate * v for a, v in zip(coefficients, speeds, strict=True)]
        importances = [np.zeros_like(a) for a in coefficients]
        for image, label in zip(images, labels, strict=True):
            one = gradients_of_coefficients(network, coefficients, bases, image[None], [label], rows, shown)
            importances = [a + abs(g) for a, g in zip(importances, one, strict=True)]
        kept = [mask | new for mask, new in zip(kept, largest(importances, keep), strict=True)]
    assert keep < np.concatenate([mask.ravel() for mask in kept]).mean() < 0.95, "some were free in the last session"
    ours = answered("warp", sessions(hide), steps=steps, rate=rate, keep=keep)
    for row, h in zip(ours, features(queries().features[0].double().view(-1, 1, 8, 8) / 128 - 1), strict=True):
        cosines = [float((h @ w) / h.norm() / w.norm()) for w in rows]
        assert row.tolist() == pytest.approx(
            [-math.inf if j in hide else 16 * c for j, c in enumerate(cosines)], abs=1e-8
        )


# -- TapNet and XtarNet


def layers(parameters: dict[str, np.ndarray], prefix: str) -> list[tuple[np.ndarray, np.ndarray]]:
    names = [name.removesuffix("weight") for name in parameters if name.startswith(prefix) and name.endswith("weight")]
    return [(parameters[f"{name}weight"], parameters[f"{name}bias"]) for name in names]


def both_features(method, rows: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """The feature of the network, and that of a copy with the method's own weights, of each image."""
    first = method.base.network.network
    second = copy.deepcopy(first)
    with torch.no_grad():
        for name, value in zip(method.names, method.second_stage, strict=True):
            second.get_parameter(name).add_(0.03 * value)
        images = (row.double().view(1, 1, 8, 8) / 128 - 1 for row in rows)
        return [(first(image)[0].numpy(), second(image)[0].numpy()) for image in images]


def merged(layers, c):
    for number, (weight, bias) in enumerate(layers):
        c = weight @ c + bias
        c = np.maximum(c, 0) if number < 3 else 1 / (1 + np.exp(-c))
    return c


def skipping(layers, x, skips):
    for (weight, bias), skip in zip(layers, skips, strict=True):
        x = np.maximum(weight @ x + bias + skip * x, 0)
    return x


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("name", ["tapnet", "xtarnet"])
def test_xtarnet_is_its_formulas_with_a_full_singular_value_decomposition(name, hide):
    probe = make_random_probe(name, registry.get_method(name), {}, 3, hide, False)
    method, support, query = probe.method, probe.support, probe.query
    with torch.no_grad():
        for number, parameter in enumerate(method.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            parameter += 0.05 * noise
    own = {key: value.detach().numpy() for key, value in method.named_parameters()}
    ours = probe.logits().detach().numpy()
    for e in range(len(ours)):
        rows, labels = [*support.features[e], *query.features[e]], support.labels[e].tolist()
        classes = sorted(set(labels))
        if name == "xtarnet":
            both = both_features(method, torch.stack(rows))
            means = [np.mean([np.concatenate(both[i]) for i, y in enumerate(labels) if y == k], 0) for k in classes]
            c = np.mean(means, 0)
            h1, h2 = (merged(layers(own, part), c) for part in ("first_share", "second_share"))
            z = [h1 * f + h2 * g for f, g in both]
        else:
            z = [row.numpy() for row in rows]
        z = [np.exp(own["log_unit"]) * x for x in z]
        means = [np.mean([z[i] for i, y in enumerate(labels) if y == k], 0) for k in classes]
        whole = np.mean(means, 0)
        gamma, beta = (skipping(layers(own, part), whole, (1, 1, 1)) for part in ("gamma", "beta"))
        prototypes = np.exp(own["log_unit"]) * method.base.prototypes.numpy()
        base = [(1 + 0.1 * gamma) * w + 0.1 * beta for w in prototypes]
        shown = [i for i in range(len(base)) if not support.hidden[e, i]]
        novel, errors = [], []
        for k, mean in enumerate(means):
            s = np.array([mean @ w if i in shown else 0.0 for i, w in enumerate(base)])
            r = np.exp(skipping(layers(own, "relation"), s, (0, 1, 1)))
            novel.append(own["phi"][k] - sum(r[i] * base[i] for i in shown) / sum(r[i] for i in shown))
            errors.append(novel[-1] / np.linalg.norm(novel[-1]) - mean / np.linalg.norm(mean))
        null_space = np.linalg.svd(np.array(errors), full_matrices=True)[2][len(classes) :]
        for x, row in zip(z[len(labels) :], ours[e], strict=True):
            for i, w in enumerate([*base, *novel]):
                expected = -np.sum((null_space @ (x - w)) ** 2) if i >= len(base) or i in shown else -np.inf
                assert row[i] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_xtarnet_keeps_every_rule_of_episodes_on_images():
    kind = registry.get_method("xtarnet")
    broken = dict(check_contract("xtarnet", kind, {}))
    assert len(broken) == len(EPISODE_RULES) - 1, "copies are for classes that allow them"
    assert not any(broken.values()), broken


def test_answers_that_depend_on_labels_are_refused_unless_declared(call):
    kind = registry.get_method("tapnet")
    assert kind.flags({}) == ["answers depend on the order of labels"]
    undeclared = type("Undeclared", (kind,), {"label_slots": False})
    broken = [found for found in dict(check_contract("undeclared", undeclared, {})).values() if found]
    assert broken == ["the answers about a class depend on which label it has"]
    status, _, err = call("plan", "--method", "tapnet", "--task", "glyphs-sessions")
    assert (status, err.count("\n")) == (2, 1)
    assert "tapnet has parameters for the labels of an episode, and glyphs-sessions is in sessions" in err
