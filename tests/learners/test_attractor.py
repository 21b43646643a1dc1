"""Attention, class means and the folding of attractor and ridge."""

from __future__ import annotations

import pytest
import torch

from ifsl_bench.learners import Memory, attention, fold, ridge, unit
from ifsl_bench.plugin.method import Support


@pytest.mark.parametrize("rows_of_u", [1, 7])
def test_fold_is_attractor_plus_ridge(rows_of_u):
    g = torch.Generator().manual_seed(0)
    v = torch.randn(3, 7, 4, generator=g, dtype=torch.float64)
    u = torch.randn(3, rows_of_u, 4, generator=g, dtype=torch.float64)
    log_gamma = torch.randn(4, generator=g, dtype=torch.float64)
    expected = (log_gamma.exp() * (v - u).square()).sum(2).mean(1) + 0.05 * v.square().sum((1, 2))
    c, p = fold(u, log_gamma, 0.1, 7)
    # The constant that is left out: at its minimum over V the folded form is 0.
    left_out = (log_gamma.exp() * (c - u).square()).sum(2).mean(1) + 0.05 * c.expand(3, 7, 4).square().sum((1, 2))
    found = (p * (v - c).square()).sum((1, 2)) / 2 + left_out
    torch.testing.assert_close(found, expected)
    c, p = ridge(7, 4, 0.1, v)
    torch.testing.assert_close((p * (v - c).square()).sum() / 2, 0.05 * v.square().sum())


def test_hidden_base_classes_have_no_share():
    g = torch.Generator().manual_seed(0)
    queries, keys, tau = torch.randn(2, 3, 5, generator=g), torch.randn(6, 5, generator=g), torch.tensor(2.0)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[0, 1] = hidden[0, 4] = True
    shares = attention(queries, keys, tau, hidden)
    assert bool((shares[0][:, [1, 4]] == 0).all())
    left = [0, 2, 3, 5]
    torch.testing.assert_close(shares[0][:, left], attention(queries, keys[left], tau)[0])
    torch.testing.assert_close(shares[1], attention(queries, keys, tau)[1])
    expected = (2 * unit(queries[1]) @ unit(keys).T).softmax(-1)
    torch.testing.assert_close(shares[1], expected)


def test_class_means_of_classes_of_different_size():
    x = torch.arange(12.0).view(1, 4, 3)
    none = torch.zeros(1, 0)
    found = Support(x, torch.tensor([[1, 0, 1, 1]]), none.bool(), none.expand(1, 4, 0)).class_means(2)
    torch.testing.assert_close(found, torch.stack([x[0, 1], x[0, [0, 2, 3]].mean(0)])[None])


def test_memory_starts_small_and_has_one_output_for_each_size():
    torch.manual_seed(0)
    memory = Memory(16, (17, 9), hidden=5)
    one, other = memory(torch.randn(8, 16))
    assert one.shape == (8, 17)
    assert other.shape == (8, 9)
    weights = torch.cat([p.detach().flatten() for name, p in memory.named_parameters() if name.endswith("weight")])
    assert float(weights.abs().max()) <= 0.02
    assert 0.007 < float(weights.std()) < 0.01
    assert all(bool((p == 0).all()) for name, p in memory.named_parameters() if name.endswith("bias"))
