"""torchvision's classification models, ``torchvision:MODEL.WEIGHTS``, as in ``torchvision:resnet50.IMAGENET1K_V2``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ifsl_bench.backbones.contract import UNKNOWN_CORPUS, BackboneInfo, FrozenBackbone
from ifsl_bench.utils.errors import UserError, unknown_name_error

TORCHVISION_TRAINING_PREFIX = "IMAGENET1K_V"  # other weights begin with those from elsewhere, as SWAG's do


class Torchvision(FrozenBackbone):
    """``torchvision:MODEL.WEIGHTS``: torchvision's models, frozen, without the last linear layer of each.

    Resize, crop and normalisation come with the weights.
    """

    libraries = ("torchvision",)

    def describe(self, model: str, own_weights: bool = False) -> BackboneInfo:
        weights = _find_weights(model, own_weights)
        seen = weights.transforms()
        (side,), resize = seen.crop_size, list(seen.resize_size)
        return BackboneInfo(
            size=(side, side),
            resize=resize[0] if len(resize) == 1 else (resize[0], resize[1]),
            interpolation=seen.interpolation.value,
            mean=tuple(seen.mean),
            std=tuple(seen.std),
            corpora=("imagenet-1k",)
            if model.partition(".")[2].startswith(TORCHVISION_TRAINING_PREFIX)
            else (UNKNOWN_CORPUS,),
            source=weights.url,
            endings=(".pth", ".safetensors"),
        )

    def make_network(self, model: str) -> tuple[nn.Module, int]:
        network, last = _make_network(model)
        width = network.get_submodule(last).in_features
        assert isinstance(width, int)
        parent, _, name = last.rpartition(".")
        setattr(network.get_submodule(parent), name, nn.Identity())
        return network, width

    def load_weights(self, model: str, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        _, last = _make_network(model)
        wanted = network.state_dict().keys()
        body = {k: v for k, v in weights.items() if not k.startswith(f"{last}.")}
        lacking, odd = wanted - body.keys(), body.keys() - wanted
        if lacking or odd:
            raise ValueError(f"{len(lacking)} tensors are missing and {len(odd)} have no place: {[*lacking, *odd][:3]}")
        network.load_state_dict(body)

    def download_weights(self, model: str, folder: Path) -> Path:
        from urllib.request import urlopen

        url = _find_weights(model, False).url
        with urlopen(url, timeout=10):
            path = folder / url.rpartition("/")[2]
            digest = path.stem.rpartition("-")[2]  # the name ends in the first digits of the checksum
            torch.hub.download_url_to_file(url, str(path), hash_prefix=digest, progress=False)
        return path


def _find_weights(model: str, own_weights: bool) -> Any:
    """Find the weights in torchvision's list; of a name without weights, for a user's own file, the default ones."""
    import torchvision.models as zoo

    plain, _, tag = model.partition(".")
    if plain not in zoo.list_models(module=zoo):
        raise unknown_name_error(
            "model of torchvision", plain, zoo.list_models(module=zoo), see="torchvision.models.list_models()"
        )
    entries = zoo.get_model_weights(plain)
    if tag and tag not in entries.__members__:
        raise unknown_name_error(f"weights of torchvision:{plain}", tag, entries.__members__)
    if not tag and not own_weights:
        names = list(entries.__members__)
        raise UserError(
            f"torchvision:{plain} does not say which weights, e.g. torchvision:{plain}.{names[0]} (it has "
            f"{', '.join(names)}); or give them with --weights FILE"
        )
    return entries[tag] if tag else entries["DEFAULT"]


def _make_network(model: str) -> tuple[nn.Module, str]:
    """Make a network with random weights, and name its last linear layer, which is the classifier."""
    import torchvision.models as zoo

    plain = model.partition(".")[0]
    with torch.random.fork_rng(devices=[]):
        network = zoo.get_model(plain, weights=None)
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"torchvision:{plain} has no linear classifier, so it is not clear what its features are")
    return network, linear[-1]
