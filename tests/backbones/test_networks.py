"""The networks: sizes, parameter counts, and TensorFlow's conventions where they differ from PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ifsl_bench.backbones.networks import _pad_same, make_backbone
from ifsl_bench.utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "count", "features"),
    [("resnet10", 2_572_032, 512), ("resnet18-gn", 10_998_080, 512), ("resnet12", 12_424_320, 640)],
)
def test_parameter_counts(name, count, features):
    network = make_backbone(name, (84, 84, 3))
    assert sum(p.numel() for p in network.parameters()) == count
    assert network.features == features


@pytest.mark.parametrize("name", ["resnet10", "resnet10-stempool", "resnet12", "resnet18-gn", "resnet-small"])
@pytest.mark.parametrize("shape", [(84, 84, 3), (64, 64, 3), (32, 32, 1)])
def test_features_of_any_image_size(name, shape):
    network = make_backbone(name, shape).eval()
    height, width, channels = shape
    features = network(torch.randn(2, channels, height, width))
    assert features.shape == (2, network.features)
    assert torch.isfinite(features).all()
    assert (features < 0).any(), "no ReLU on the features"


@pytest.mark.parametrize(("name", "sizes"), [("resnet10", [84, 42, 21, 11, 6]), ("resnet12", [84, 42, 21, 10, 5])])
def test_blocks_halve_the_image_and_round_as_the_papers_do(name, sizes):
    network = make_backbone(name, (84, 84, 3)).eval()
    x = torch.randn(1, 3, 84, 84)
    outputs = [network.stem(x) if name == "resnet10" else x]
    for block in network.blocks if name == "resnet10" else network.children():
        outputs.append(block(outputs[-1]))
    assert [x.shape[-1] for x in outputs] == sizes


def test_stempool_is_resnet10_with_a_pool_after_the_stem():
    """Its blocks see 16x16 of a 32x32 image; the parameters are those of resnet10."""
    plain, pooled = (make_backbone(name, (32, 32, 3)).eval() for name in ("resnet10", "resnet10-stempool"))
    pooled.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    stem = plain.stem(x)  # [2, 64, 32, 32]
    halved = stem.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
    plain.stem = nn.Identity()
    torch.testing.assert_close(pooled(x), plain(halved))


def test_norms_are_the_papers():
    norms = [m for m in make_backbone("resnet10", (84, 84, 3), 0.001).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.001)}
    groups = [m for m in make_backbone("resnet18-gn", (84, 84, 3)).modules() if isinstance(m, nn.GroupNorm)]
    assert {(m.num_groups, m.eps) for m in groups} == {(32, 1e-6)}


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(84, 3, 2), (42, 3, 2), (21, 3, 2), (11, 3, 2), (7, 3, 1), (8, 5, 3)]
)
def test_same_padding_is_tensorflows(size, kernel, stride):
    """Output size ceil(n / s); total padding max((out - 1) s + k - n, 0), the odd pixel at the end."""
    out = int(np.ceil(size / stride))
    total = max((out - 1) * stride + kernel - size, 0)
    padded = _pad_same(torch.ones(1, 1, size, size), kernel, stride)[0, 0]
    assert padded.shape == (size + total, size + total)
    assert padded[total // 2 : total // 2 + size, total // 2 : total // 2 + size].min() == 1
    assert padded.sum() == size * size
    assert (padded.shape[0] - kernel) // stride + 1 == out


def test_shortcut_pads_channels_half_before_half_after():
    network = make_backbone("resnet18-gn", (84, 84, 3))
    block = network.blocks[2].eval()
    with torch.no_grad():
        block.norm2.weight.zero_()
        block.norm2.bias.zero_()
        x = torch.rand(1, 64, 21, 21)
        y = block(x)
    pooled = torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True)
    torch.testing.assert_close(y[:, 32:96], pooled)
    assert y[:, :32].abs().max() == y[:, 96:].abs().max() == 0


@pytest.mark.parametrize(("name", "shape"), [("none", (32, 32, 1)), ("resnet-small", (64,))])
def test_backbone_must_suit_the_data(name, shape):
    with pytest.raises(UserError, match="'none' is for features"):
        make_backbone(name, shape)
