"""Duties of every registered method, ours and those of other packages alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support, check_prediction, masked_logits
from ifsl_bench.plugin.options import add_example_extras, declared_options


def methods_on_features() -> list[str]:
    """The names of all methods but those that see images or maps, which have rules of their own."""
    plugins = {
        name: registry.load_plugin(registry.METHOD_GROUP, name)
        for name in registry.registered_entry_points(registry.METHOD_GROUP)
    }
    return sorted(
        name for name, plugin in plugins.items() if getattr(plugin.loaded_object, "sees", "features") == "features"
    )


METHODS = methods_on_features()
E, N, SHOTS, Q, D, K = 4, 5, 3, 8, 24, 9


def make_base(dtype=torch.float64) -> Base:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(K, D, generator=generator, dtype=torch.float64)
    bias = 0.1 * torch.randn(K, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(K, D, generator=generator, dtype=torch.float64)
    within = torch.randn(3 * D, D, generator=generator, dtype=torch.float64)
    statistics = torch.full((K,), 100.0), within.T @ within / len(within)
    noise = torch.randn(9 * K, D, generator=generator, dtype=torch.float64)
    images = prototypes.repeat_interleave(9, 0) + noise, torch.arange(K).repeat_interleave(9)
    return Base(weight, bias, prototypes, 9.0, *statistics, lambda: images).to(dtype=dtype)


def make_episodes(base: Base, hide: bool = False) -> tuple[Support, Query]:
    generator = torch.Generator().manual_seed(2)
    dtype = base.weight.dtype
    x = torch.randn(E, N * SHOTS, D, generator=generator, dtype=torch.float64).to(dtype)
    q = torch.randn(E, Q, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.arange(N).repeat_interleave(SHOTS).expand(E, -1)
    hidden = torch.zeros(E, K, dtype=torch.bool)
    if hide:
        hidden[
            torch.arange(E).unsqueeze(1), torch.stack([torch.randperm(K, generator=generator)[:3] for _ in range(E)])
        ] = True
    return (
        Support(x, labels, hidden, F.linear(x, base.weight, base.bias)),
        Query(q, F.linear(q, base.weight, base.bias)),
    )


@pytest.fixture(params=METHODS)
def method(request):
    plugin = registry.load_plugin(registry.METHOD_GROUP, request.param)
    if plugin.missing_module:
        pytest.skip(plugin.load_problem)
    assert not plugin.load_problem
    torch.manual_seed(0)
    instance = plugin.loaded_object(add_example_extras(make_base(), plugin.loaded_object), N).double().eval()
    instance.registered = request.param
    return instance


@pytest.mark.parametrize("hide", [False, True])
def test_shape_and_finiteness(method, hide):
    support, query = make_episodes(method.base, hide)
    prediction = check_prediction(method.registered, method(support, query), support.hidden, Q, N)
    logits = masked_logits(prediction, support.hidden)
    visible = torch.cat([~support.hidden, torch.ones(E, N, dtype=torch.bool)], 1).unsqueeze(1).expand_as(logits)
    assert torch.isfinite(logits[visible]).all()
    assert (logits[~visible] == -torch.inf).all()
    for value in prediction.statistics.values():
        assert value.shape == (E,)


SOLVED = (
    1e-9 * 1000
)  # the solvers' stop in float64, times a condition and logits of 30 each: where the sums' order differs


def test_hidden_features_of_a_base_class_do_not_leak(method):
    """Changing the weight of a hidden class changes no logit that is in play."""
    support, query = make_episodes(method.base, hide=True)
    hidden = torch.zeros_like(support.hidden)
    hidden[:, 2] = True
    support = Support(support.features, support.labels, hidden, support.base_logits)
    before = masked_logits(method(support, query), hidden)
    variant = copy.deepcopy(method)
    for tensor in (variant.base.weight, variant.base.prototypes):
        tensor[2] += 5.0
    with torch.no_grad():
        for parameter in variant.parameters():
            if parameter.shape == variant.base.weight.shape:
                parameter[2] += 5.0
    changed = [support.base_logits.clone(), query.base_logits.clone()]
    for tensor in changed:
        tensor[..., 2] += 5.0
    after = variant(Support(support.features, support.labels, hidden, changed[0]), Query(query.features, changed[1]))
    torch.testing.assert_close(masked_logits(after, hidden), before, rtol=SOLVED, atol=SOLVED)


def test_float32_agrees_with_float64(method):
    support, query = make_episodes(method.base)
    extras = {name: value.float() for name, value in method.base.extras.items()}
    single = type(method)(replace(make_base(torch.float32), extras=extras), N).eval()
    single.load_state_dict(method.state_dict())
    narrow = Support(support.features.float(), support.labels, support.hidden, support.base_logits.float())
    logits = single(narrow, Query(query.features.float(), query.base_logits.float())).logits
    assert logits.dtype == torch.float32
    gaps = (logits.double() - method(support, query).logits).abs().flatten(1).amax(1)  # [E]
    # Where the inner problem has several minima, rounding may lead an episode to another one; not most of them.
    assert gaps.median() < 2e-3  # float32's stop, 1e-5, of logits up to 100
    assert gaps.max() < 1


def test_works_without_gradients_and_with_other_numbers_of_ways(method):
    support, query = make_episodes(method.base)
    with torch.no_grad():
        assert not method(support, query).logits.requires_grad
    two = type(method)(add_example_extras(make_base(), type(method)), 2).double().eval()
    rows = slice(0, 2 * SHOTS)
    fewer = Support(support.features[:, rows], support.labels[:, rows], support.hidden, support.base_logits[:, rows])
    assert two(fewer, query).logits.shape == (E, Q, K + 2)


def test_options_are_declared_and_documented(method):
    for option in declared_options(type(method)).values():
        assert option.name in (type(method).__doc__ or "") + (type(method).__init__.__doc__ or ""), option.name
    assert set(type(method).space) <= set(declared_options(type(method))) | {"train.rate"}
    assert type(method).head in ("linear", "cosine")
