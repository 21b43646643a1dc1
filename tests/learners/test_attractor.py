"""Class means."""

from __future__ import annotations

import torch

from ifsl_bench.plugin.method import Support


def test_class_means_of_classes_of_different_size():
    x = torch.arange(12.0).view(1, 4, 3)
    none = torch.zeros(1, 0)
    means = Support(x, torch.tensor([[1, 0, 1, 1]]), none.bool(), none.expand(1, 4, 0)).class_means(2)
    torch.testing.assert_close(means, torch.stack([x[0, 1], x[0, [0, 2, 3]].mean(0)])[None])
