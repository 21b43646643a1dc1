"""Class means, and the values that an attractor's memory begins with."""

from __future__ import annotations

import torch

from ifsl_bench.learners import Memory
from ifsl_bench.plugin.method import Support


def test_class_means_of_classes_of_different_size():
    x = torch.arange(12.0).view(1, 4, 3)
    none = torch.zeros(1, 0)
    means = Support(x, torch.tensor([[1, 0, 1, 1]]), none.bool(), none.expand(1, 4, 0)).class_means(2)
    torch.testing.assert_close(means, torch.stack([x[0, 1], x[0, [0, 2, 3]].mean(0)])[None])


def test_memory_starts_small_and_has_one_output_for_each_size():
    torch.manual_seed(0)
    memory = Memory(16, (17, 9), hidden=5)
    outputs = memory(torch.randn(8, 16))
    assert [output.shape for output in outputs] == [(8, 17), (8, 9)]
    weights = torch.cat([p.detach().flatten() for name, p in memory.named_parameters() if name.endswith("weight")])
    assert float(weights.abs().max()) <= 0.02
    assert 0.007 < float(weights.std()) < 0.01
    assert all(bool((p == 0).all()) for name, p in memory.named_parameters() if name.endswith("bias"))
