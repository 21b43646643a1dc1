"""Networks from images [B, C, H, W] to features [B, D], and the base classifiers on these.

``resnet10`` and ``resnet18-gn`` follow the released code of Ren et al. (NeurIPS 2019): shortcuts, norms, pooling and
the order of operations are theirs, not torchvision's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone, FrozenBackbone, find_backbone_and_model
from ifsl_bench.backbones.device import choose_precision
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE, DataSpec
from ifsl_bench.utils.cosine import normalise_with_epsilon
from ifsl_bench.utils.errors import UserError

NormFactory = Callable[[int], nn.Module]


def _make_convolution_stack(in_channels: int, out_channels: int, count: int, norm: NormFactory) -> nn.Sequential:
    """Make 3x3 convolutions with a norm each, and an activation between two."""
    layers: list[nn.Module] = []
    for width in (in_channels, *[out_channels] * (count - 1)):
        layers += [nn.Conv2d(width, out_channels, 3, padding=1, bias=False), norm(out_channels), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers[:-1])


class _PooledBlock(nn.Module):
    """1x1 shortcut + 3x3 convolutions, no activation after the sum, 2x2 max-pool that rounds up."""

    def __init__(self, in_channels: int, out_channels: int, convolutions: int, norm: NormFactory) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.body = _make_convolution_stack(in_channels, out_channels, convolutions, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.body(x) + self.shortcut(x), 2, ceil_mode=True)


class ResNet10(Backbone):
    """The mini-ImageNet backbone: 512 features, 2,572,032 parameters with 3 input channels."""

    features = 512

    def __init__(self, channels: int = 3, norm_momentum: float = 0.1) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=norm_momentum)
        self.stem = nn.Sequential(nn.Conv2d(channels, 64, 5, padding=2, bias=False), norm(64), nn.LeakyReLU(0.1))
        widths = (64, 64, 96, 128, 256)
        self.blocks = nn.Sequential(*(_PooledBlock(a, b, 3, norm) for a, b in itertools.pairwise(widths)))
        self.norm = norm(256)
        self.mix = nn.Conv2d(256, 384, 1, bias=False)
        self.mix_norm = norm(384)
        self.out = nn.Linear(384, 512)

    def _apply_stem(self, x: Tensor) -> Tensor:
        """Prepare images for the blocks."""
        return self.stem(x)

    def _maps_to_features(self, x: Tensor) -> Tensor:
        """Turn what the blocks give into features."""
        x = self.mix(F.relu(self.norm(x.mean((2, 3), keepdim=True))))
        x = F.relu(self.mix_norm(F.dropout(x, 0.1, self.training))).flatten(1)
        return F.dropout(self.out(x), 0.1, self.training)

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return split_into_stages(self._apply_stem, [[block] for block in self.blocks], self._maps_to_features)

    def forward(self, x: Tensor) -> Tensor:
        return self._maps_to_features(self.blocks(self._apply_stem(x)))


class ResNet10StemPool(ResNet10):
    """``resnet10`` with a 2x2 max-pool after the stem, so that the blocks get a quarter of the pixels.

    Not the paper's network; for CPUs, 3.5 times as fast. Parameters are the same in number and shape.
    """

    def _apply_stem(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.stem(x), 2, ceil_mode=True)


def _average_over_pixels(x: Tensor) -> Tensor:
    """Average maps [B, C, H, W] over their pixels, [B, C]."""
    return x.mean((2, 3))


def split_into_stages(
    stem: Callable[[Tensor], Tensor],
    layers: Sequence[Iterable[nn.Module]],
    maps_to_features: Callable[[Tensor], Tensor],
) -> list[Callable[[Tensor], Tensor]]:
    """Return one function for each layer of a network; the first begins with the images, the last ends with features.

    Args:
        stem: what comes before the first layer.
        layers: the modules of each layer, which follow one another.
        maps_to_features: what comes behind the last layer.
    """

    def make_stage(number: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = stem(x) if number == 0 else x
            for module in layers[number]:
                x = module(x)
            return maps_to_features(x) if number == len(layers) - 1 else x

        return run

    return [make_stage(number) for number in range(len(layers))]


class _ResNet12Block(nn.Module):
    """Three 3x3 convolutions, a normalised 1x1 shortcut, an activation after the sum, 2x2 max-pool that rounds down."""

    def __init__(self, in_channels: int, out_channels: int, norm: NormFactory) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, bias=False), norm(out_channels))
        self.conv1, self.bn1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), norm(out_channels)
        self.conv2, self.bn2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), norm(out_channels)
        self.conv3, self.bn3 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.bn1(self.conv1(x)), 0.1)
        y = F.leaky_relu(self.bn2(self.conv2(y)), 0.1)
        return F.max_pool2d(F.leaky_relu(self.bn3(self.conv3(y)) + self.downsample(x), 0.1), 2)


class ResNet12(Backbone):
    """The network of Lee et al. (CVPR 2019) without DropBlock: 640 features, 12,424,320 parameters with 3 channels.

    Its tensors have the names of the authors' code (kjunelee/MetaOptNet), which other code shares.
    """

    features = 640

    def __init__(self, channels: int = 3, norm_momentum: float = 0.1) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, momentum=norm_momentum)
        widths = (channels, 64, 160, 320, 640)
        for i, (inner, outer) in enumerate(itertools.pairwise(widths), 1):
            self.add_module(f"layer{i}", nn.Sequential(_ResNet12Block(inner, outer, norm)))

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return split_into_stages(nn.Identity(), [[layer] for layer in self.children()], _average_over_pixels)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return _average_over_pixels(x)


def _pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that the output has ceil(size / stride) pixels, the odd pixel after (TensorFlow's SAME)."""

    def padding_before_and_after(size: int) -> tuple[int, int]:
        total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
        return total // 2, total - total // 2

    top, bottom = padding_before_and_after(x.shape[2])
    left, right = padding_before_and_after(x.shape[3])
    return F.pad(x, (left, right, top, bottom), value=value)


class _GroupNormBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm; the shortcut has no parameters (average pool, channels padded by zeros)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, is_last: bool) -> None:
        super().__init__()
        self.stride, self.grown, self.last = stride, out_channels - in_channels, is_last
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, bias=False)
        self.norm1 = nn.GroupNorm(32, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, out_channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(_pad_same(x, 3, self.stride))))
        y = self.norm2(self.conv2(y))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        if self.grown:
            x = F.pad(x, (0, 0, 0, 0, self.grown // 2, self.grown - self.grown // 2))
        return y + x if self.last else F.relu(y + x)


class ResNet18GN(Backbone):
    """The tiered-ImageNet backbone: 512 features, 10,998,080 parameters with 3 input channels."""

    features = 512

    def __init__(self, channels: int = 3, norm_momentum: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 5, padding=2, bias=False)
        self.norm = nn.GroupNorm(32, 64, eps=1e-6)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        blocks = [
            _GroupNormBlock(a, b, 1 + (a < b), is_last=i == 7) for i, (a, b) in enumerate(itertools.pairwise(widths))
        ]
        self.blocks = nn.Sequential(*blocks)

    def _apply_stem(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return F.max_pool2d(_pad_same(x, 3, 2, value=-torch.inf), 3, 2)

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return split_into_stages(
            self._apply_stem, [self.blocks[i : i + 2] for i in range(0, 8, 2)], _average_over_pixels
        )

    def forward(self, x: Tensor) -> Tensor:
        return _average_over_pixels(self.blocks(self._apply_stem(x)))


class _BatchNormBlock(nn.Module):
    """Two 3x3 convolutions with batch norm; a 1x1 convolution with batch norm where the shortcut changes shape."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, momentum: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out_channels, momentum=momentum),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out_channels, momentum=momentum),
        )
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            norm = nn.BatchNorm2d(out_channels, momentum=momentum)
            self.downsample = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class _BatchNormResNet(Backbone):
    """A stem, then layers of blocks of two convolutions, each layer but the first with half the pixels."""

    widths: ClassVar[tuple[int, ...]]
    blocks_per_layer: ClassVar[int]  # of a layer
    stem_kernel_size: ClassVar[int] = 3  # of the stem; 7 halves the pixels and pools, too

    def __init__(self, channels: int = 3, norm_momentum: float = 0.1) -> None:
        super().__init__()
        self.features = self.widths[-1]
        stride = 2 if self.stem_kernel_size == 7 else 1
        self.conv1 = nn.Conv2d(
            channels, self.widths[0], self.stem_kernel_size, stride, self.stem_kernel_size // 2, bias=False
        )
        self.bn1 = nn.BatchNorm2d(self.widths[0], momentum=norm_momentum)
        inner = self.widths[0]
        for i, width in enumerate(self.widths):
            blocks = [_BatchNormBlock(inner, width, 2 if i else 1, norm_momentum)]
            blocks += [_BatchNormBlock(width, width, 1, norm_momentum) for _ in range(self.blocks_per_layer - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            inner = width

    def _apply_stem(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return F.max_pool2d(x, 3, 2, 1) if self.stem_kernel_size == 7 else x

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        layers = [[getattr(self, f"layer{i + 1}")] for i in range(len(self.widths))]
        return split_into_stages(self._apply_stem, layers, _average_over_pixels)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class ResNet20(_BatchNormResNet):
    """The CIFAR network of He et al. (CVPR 2016) as few-shot class-incremental papers have it: 64 features.

    Shortcuts that change shape are 1x1 convolutions; 271,824 parameters with 3 input channels.
    """

    widths, blocks_per_layer = (16, 32, 64), 3


class ResNet18(_BatchNormResNet):
    """ResNet-18 with a 7x7 stem and pooling: 512 features, 11,176,512 parameters with 3 input channels."""

    widths, blocks_per_layer, stem_kernel_size = (64, 128, 256, 512), 2, 7


class ResNet18Stem3(_BatchNormResNet):
    """ResNet-18 with a 3x3 stem that keeps all pixels, for small images: 512 features, 11,168,832 parameters."""

    widths, blocks_per_layer = (64, 128, 256, 512), 2


class ResNetSmall(Backbone):
    """A network for 32x32 images on a CPU: the blocks of ``resnet10`` with two convolutions, not three, 256 features.

    The stem halves the image, so that the three blocks get 16, 8 and 4 pixels.
    """

    features = 256

    def __init__(self, channels: int = 3, norm_momentum: float = 0.1) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=norm_momentum)
        self.stem = nn.Sequential(nn.Conv2d(channels, 32, 5, 2, padding=2, bias=False), norm(32), nn.LeakyReLU(0.1))
        widths = (32, 48, 96, 192)
        self.blocks = nn.Sequential(*(_PooledBlock(a, b, 2, norm) for a, b in itertools.pairwise(widths)))
        self.norm = norm(192)
        self.out = nn.Linear(192 * 4, self.features)

    def _maps_to_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x))
        return self.out(F.adaptive_avg_pool2d(x, 2).flatten(1))

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return split_into_stages(self.stem, [[block] for block in self.blocks], self._maps_to_features)

    def forward(self, x: Tensor) -> Tensor:
        return self._maps_to_features(self.blocks(self.stem(x)))


class IdentityBackbone(Backbone):
    """The features of a data set that has no images, unchanged."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x


class PrecomputedFeatures(Backbone):
    """Turns embedded features, bytes [B, 1, 2, D] / 255, into the features [B, D] of one of two backbones.

    Nothing in it is trained. Images of base/train are not included, so it has their statistics.

    Attributes:
        row: of the backbone in axis 2 of the input, 0 or 1.
        scale: of the bytes, [D].
        offset: of the bytes, [D].
        means: of the features of each class of base/train, [K, D].
        counts: images of each class, [K].
        covariance: of features within the classes, [D, D].
    """

    MOMENT_NAMES = ("means", "counts", "covariance")
    row: Tensor
    scale: Tensor
    offset: Tensor
    means: Tensor
    counts: Tensor
    covariance: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("row", torch.zeros((), dtype=torch.int64))  # of the two backbones
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("offset", torch.zeros(features))
        self.register_buffer("means", torch.zeros(0, features))  # [K, D]
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))  # [K]
        self.register_buffer("covariance", torch.zeros(features, features))

    def forward(self, x: Tensor) -> Tensor:
        levels = torch.round(x[:, 0].index_select(1, self.row.reshape(1))[:, 0] * 255)  # the bytes, exactly
        return levels * self.scale + self.offset

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        for name in ("means", "counts"):  # the number of classes is known from the values
            value = state_dict.get(prefix + name)
            if value is not None and value.shape[1:] == getattr(self, name).shape[1:]:
                setattr(self, name, torch.empty_like(value, device=self.scale.device))
        super()._load_from_state_dict(state_dict, prefix, *others)


def choose_first_stage_count(network: Backbone, number: int) -> int:
    """Return after how many stages a network is divided.

    Args:
        network: to be divided.
        number: of its stages; below 0, all but so many.

    Raises:
        UserError: nothing would be on one of the sides.
    """
    stages = len(network.stages)
    first = number % stages if -stages < number < stages else 0
    if not first:
        raise UserError(
            f"maps:{number} of a network that has {stages} stage{'s' * (stages != 1)}: its class needs `stages`, see "
            "docs/backbones.md"
        )
    return first


class FirstStages(Backbone):
    """The first stages of a network: images [B, C, H, W] to maps.

    Args:
        whole: the network.
        number: of the stages; below 0, all but so many.
    """

    def __init__(self, whole: Backbone, number: int) -> None:
        super().__init__()
        self.whole, self.features, self.number = whole, whole.features, choose_first_stage_count(whole, number)

    def forward(self, x: Tensor) -> Tensor:
        for stage in list(self.whole.stages)[: self.number]:
            x = stage(x)
        return x


class LaterStages(Backbone):
    """The stages of a network behind the first ones: maps [B, C, H, W] to features [B, D].

    Args:
        whole: the network.
        number: of the stages before; below 0, all but so many.
    """

    def __init__(self, whole: Backbone, number: int) -> None:
        super().__init__()
        self.whole, self.features, self.first = whole, whole.features, choose_first_stage_count(whole, number)

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return list(self.whole.stages)[self.first :]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class CentredNetwork(Backbone):
    """A network whose features have a mean subtracted.

    Args:
        whole: the network.
        mean: [D].
    """

    mean: Tensor

    def __init__(self, whole: Backbone, mean: Tensor) -> None:
        super().__init__()
        self.whole, self.features = whole, whole.features
        self.register_buffer("mean", mean)

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        *first, last = self.whole.stages
        return [*first, lambda x: last(x) - self.mean]

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) - self.mean


class FrozenNetwork(Backbone):
    """A network from elsewhere, in evaluation mode; float32 features, in bf16 on an accelerator that has it.

    Args:
        body: images [B, 3, H, W] to features [B, D].
        features: D.
    """

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.features = body.eval().requires_grad_(False), features

    def forward(self, x: Tensor) -> Tensor:
        with choose_precision(x.device).autocast(x.device) if x.device.type != "cpu" else nullcontext():
            return self.body(x).float()


def make_backbone(name: str, shape: tuple[int, ...], norm_momentum: float = 0.1) -> Backbone:
    """Make a backbone with initial weights; its attribute ``features`` is D.

    A frozen one has its library's initial weights. Otherwise weights are He-normal in convolutions (fan out) and
    linear layers (fan in), biases zero.

    Args:
        name: of the backbone, as tasks have it.
        shape: (H, W, C) of an image, or (D,) of a feature.
        norm_momentum: of batch norms, the weight of the new batch.

    Raises:
        UserError: no such backbone, or one that does not suit the data.
    """
    if name == INCLUDED_BACKBONE:
        if len(shape) != 3 or shape[0] != 2 or shape[2] != 1:
            raise UserError(f"pretraining.backbone {name!r} is for features that come with the package")
        return PrecomputedFeatures(shape[1])
    kind, model = (None, "") if name == NO_BACKBONE else find_backbone_and_model(name)
    if (name == NO_BACKBONE) != (len(shape) == 1):
        holds = "features" if len(shape) == 1 else "images"
        raise UserError(
            f"the data are {holds}, and pretraining.backbone is {name!r}: 'none' is for features, and only it"
        )
    if kind is None:
        return IdentityBackbone(shape[0])
    if isinstance(kind, FrozenBackbone):
        return FrozenNetwork(*kind.make_network(model))
    network = kind(channels=shape[-1], norm_momentum=norm_momentum)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="linear")
            nn.init.zeros_(module.bias)
    return network


def to_channels_last(network: Backbone, device: torch.device) -> Backbone:
    """Move a network to a device, its convolutions in the memory layout that is fast on CPUs and GPUs alike.

    Args:
        network: moved in place.
        device: where it will be used.
    """
    return network.to(device).to(memory_format=torch.channels_last)


class LinearHead(nn.Module):
    """The classifier ``W_a h + b_a``.

    Args:
        features: the number D of features.
        classes: the number K of classes.

    Example:
        >>> head = ifsl_bench.LinearHead(features=8, classes=3)
        >>> head(torch.zeros(5, 8)).shape
        torch.Size([5, 3])
    """

    scale = None

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features) / math.sqrt(features))  # [K, D]
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)


class CosineHead(nn.Module):
    """The classifier ``tau * unit(h) . unit(W_a)``; tau is learned, from 10."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features) / math.sqrt(features))  # [K, D]
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * F.linear(normalise_with_epsilon(h), normalise_with_epsilon(self.weight))


def make_head(kind: str, features: int, classes: int) -> LinearHead | CosineHead:
    """Make a base classifier with random weights.

    Args:
        kind: "linear" or "cosine".
        features: number D of features.
        classes: number K of classes.
    """
    return LinearHead(features, classes) if kind == "linear" else CosineHead(features, classes)


class PixelNormalisation:
    """``(x / 255 - mean) / std`` per channel, [B, H, W, C] uint8 -> [B, C, H, W] float32; features pass unchanged.

    Args:
        spec: the data set, whose ``mean`` and ``std`` have one value or one for each channel.
        shape: of an image [H, W, C], or features [D].
        device: where the batches are.

    Raises:
        UserError: mean and std do not fit the channels.
    """

    def __init__(self, spec: DataSpec, shape: tuple[int, ...], device: torch.device) -> None:
        channels = shape[-1] if len(shape) == 3 else 1
        if len(spec.mean) not in (1, channels):
            raise UserError(
                f"dataset.mean of {spec.name!r} has {len(spec.mean)} values, but its images have {channels} channels"
            )
        mean = torch.tensor(spec.mean, device=device).expand(channels)
        std = torch.tensor(spec.std, device=device).expand(channels)
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __call__(self, batch: Tensor) -> Tensor:
        if batch.dim() == 2:
            return batch
        return torch.addcmul(self.shift, batch.float(), self.scale).permute(0, 3, 1, 2)
