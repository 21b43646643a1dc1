"""How many operations an accelerator would start, and how often the host would wait for it, counted on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ifsl_bench.methods.attractor import Attractor
from torch.utils._python_dispatch import TorchDispatchMode

from ifsl_bench.learners import compiled, dual, regression
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.solve import krylov

N, D, K, SHOTS, Q = 5, 512, 200, 5, 50
FREE = {"aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::lift_fresh"}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_linalg_eigh"}


class Counted(TorchDispatchMode):
    """Launches: operations that are no views. Waits: what the host needs an answer for."""

    def __init__(self):
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, returns = func._schema.name, func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.launches += not view and name not in FREE
        by = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        self.waits += name in WAITS or any(i is not None and i.dtype == torch.bool for i in by)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """No kernels, looks cost something, and an inner product is one operation."""
    monkeypatch.setattr(torch.linalg, "vecdot", lambda a, b: torch.bmm(a[:, None], b[:, :, None])[:, 0, 0])
    for module in (krylov, dual, regression):
        monkeypatch.setattr(module, "patience", lambda like: 8)
    with compiled.batched():
        yield


def episodes(count):
    g = torch.Generator().manual_seed(0)

    def unit(*shape):
        return F.normalize(torch.randn(*shape, generator=g), dim=-1)

    weight, means, common = unit(K, D), unit(count, N, D), unit(D)
    y, t = torch.arange(N).repeat_interleave(SHOTS), torch.arange(Q) % N
    x, q = (
        12 * F.normalize(0.75 * means[:, of] + 0.65 * unit(count, len(of), D) + 0.3 * common, dim=-1) for of in (y, t)
    )
    support = Support(x, y.expand(count, -1).contiguous(), torch.zeros(count, K, dtype=torch.bool), x @ weight.T)
    return Base(weight, torch.zeros(K), weight), support, Query(q, q @ weight.T), (K + t).expand(count, -1)


def counted(learner, gradient, count):
    """Of one evaluation, or of the forward and the backward pass of one step of meta-training."""
    torch.manual_seed(0)
    base, support, query, target = episodes(count)
    method = Attractor(base, N, learner=learner, gradient=gradient or "rbp").train(bool(gradient))
    with torch.set_grad_enabled(bool(gradient)), Counted() as seen:
        prediction = method(support, query)
        if gradient:
            F.cross_entropy(prediction.logits.flatten(0, 1), target.flatten()).backward()
    assert not bool(prediction.statistics["solver_unconverged"].any())
    return seen


@pytest.mark.parametrize(("learner", "gradient", "count", "launches", "waits"), [
    ("lr", "", 256, 1500, 12), ("lr", "rbp", 64, 1500, 12), ("lr", "implicit", 64, 1500, 12),
    ("mlp", "", 64, 10_000, 40), ("mlp", "rbp", 64, 10_000, 40),
])  # fmt: skip
def test_a_device_is_given_few_operations_and_seldom_waited_for(learner, gradient, count, launches, waits):
    seen = counted(learner, gradient, count)
    assert seen.launches < launches
    assert seen.waits <= waits


def test_waits_do_not_grow_with_the_number_of_episodes():
    assert abs(counted("lr", "", 16).waits - counted("lr", "", 256).waits) <= 3
