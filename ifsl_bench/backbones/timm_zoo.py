"""The image models of timm, ``timm:MODEL.TAG``: an optional package, imported when it is used."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ifsl_bench.backbones.contract import UNKNOWN_CORPUS, BackboneInfo, FrozenBackbone
from ifsl_bench.utils.errors import UserError, unknown_name_error

# Parts of timm's tags that name images, and those that name a way of training. Others, such as a teacher's name, may
# stand for further images.
CORPUS_OF_TAG = {
    "in1k": "imagenet-1k", "in12k": "imagenet-12k", "in21k": "imagenet-21k", "inw21k": "imagenet-21k",
    "in22k": "imagenet-21k", "lvd142m": "lvd-142m", "lvd1689m": "lvd-1689m", "sat493m": "sat-493m",
    "laion2b": "laion-2b", "laion400m": "laion-400m", "merged2b": "merged-2b", "m30m": "merged-30m",
    "m38m": "merged-38m", "yfcc15m": "yfcc-100m", "yfcc100m": "yfcc-100m", "webli": "webli", "cc12m": "cc-12m",
    "datacomp1b": "datacomp-1b", "datacompxl": "datacomp-1b", "dfn2b": "dfn-2b", "dfn5b": "dfn-5b",
    "metaclip": "metaclip", "jft": "jft-300m", "ig1b": "instagram", "swag": "instagram", "seer": "instagram",
}  # fmt: skip
TRAINING_TAG = re.compile(
    "ft|[abc][123]h?|ah|am|ap|aa|bt|ch|ra[234]?|augreg2?|tv2?|tf|b[12]k|d[12]h?|sw|sbb2?|fcmae|mae|gluon|deit|rsb|"
    "timm|orig|[ers][0-9]+b?|[0-9]+e?p?|nv|lamb|rmsp|racm|cvnets|ix|clip|dinov3|2pt5b|400m|ns"
)
# Tags that name only a way of training without labels: it was on ImageNet-1k.
UNLABELLED_CORPUS_OF_METHOD = {"dino": "imagenet-1k", "fcmae": "imagenet-1k", "mae": "imagenet-1k"}
# Families that learned to predict the features of another network, DALL-E's or CLIP's: its images count too, and the
# tags do not name them.
DISTILLED_MODELS = ("beit", "eva")


class Timm(FrozenBackbone):
    """``timm:MODEL.TAG``: timm's models, frozen, with the resize, crop and normalisation of their own configuration."""

    requires: ClassVar = {"timm": 'pip install "ifsl_bench[backbones]"'}
    libraries = ("timm",)

    def describe(self, model: str, own_weights: bool = False) -> BackboneInfo:
        _check_model(model, own_weights)
        configuration = _find_configuration(model)
        (_, height, width), crop = configuration["input_size"], configuration.get("crop_pct") or 1.0
        mode = configuration.get("crop_mode") or "center"
        if mode not in ("center", "squash") and crop != 1:
            raise UserError(f"timm:{model} wants a border around its images (crop mode {mode}), which is not done here")
        if mode != "squash" and height != width:
            raise UserError(f"timm:{model} wants images of {height} x {width}; only square ones are cut out here")
        scaled = (math.floor(height / crop), math.floor(width / crop))
        return BackboneInfo(
            size=(height, width),
            resize=scaled if mode == "squash" else scaled[0],
            interpolation=configuration["interpolation"],
            mean=tuple(configuration["mean"]),
            std=tuple(configuration["std"]),
            corpora=corpora_of_tag(model),
            source=_format_source(configuration),
            endings=(".safetensors", ".bin", ".pth"),
        )

    def make_network(self, model: str) -> tuple[nn.Module, int]:
        import timm

        network: Any = timm.create_model(model, pretrained=False, num_classes=0)
        return network, int(getattr(network, "head_hidden_size", None) or network.num_features)

    def load_weights(self, model: str, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        import timm

        # timm renames the tensors of older files, and leaves out the classifier; both while it makes a network.
        overlay = {"state_dict": dict(weights), "hf_hub_id": None, "url": "", "custom_load": False}
        # Tensors that the file lacks stay random, and timm does not say so: hence two loads, from other numbers.
        states = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with _silence_timm():
                filled = timm.create_model(model, pretrained=True, num_classes=0, pretrained_cfg_overlay=dict(overlay))
            states.append(filled.state_dict())
        lacking = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
        if lacking:
            raise ValueError(f"{len(lacking)} tensors are not in it, such as {lacking[0]}")
        network.load_state_dict(states[0])

    def download_weights(self, model: str, folder: Path) -> Path:
        from urllib.request import Request, urlopen

        from huggingface_hub import hf_hub_download

        configuration = _find_configuration(model)
        if not configuration.get("hf_hub_id"):
            raise OSError("it is not on the Hugging Face hub")
        repository, file = configuration["hf_hub_id"], configuration.get("hf_hub_filename") or "model.safetensors"
        try:
            return Path(hf_hub_download(repository, file, local_files_only=True))
        except OSError:
            # One request of our own first: without a network the library tries for 23 s.
            with urlopen(Request(_format_source(configuration), method="HEAD"), timeout=10):
                return Path(hf_hub_download(repository, file))


@contextmanager
def _silence_timm() -> Iterator[None]:
    """Keep timm from listing every tensor that has no place."""
    logger = logging.getLogger("timm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def corpora_of_tag(model: str) -> tuple[str, ...]:
    """Return the sets of images that the tag of MODEL.TAG names, with "unknown" where it may not name all."""
    plain, _, tag = model.partition(".")
    if tag in UNLABELLED_CORPUS_OF_METHOD:
        return (UNLABELLED_CORPUS_OF_METHOD[tag],)
    parts = tag.split("_")
    named, rest = [CORPUS_OF_TAG[p] for p in parts if p in CORPUS_OF_TAG], [p for p in parts if p not in CORPUS_OF_TAG]
    whole = (
        bool(named) and all(TRAINING_TAG.fullmatch(part) for part in rest) and not plain.startswith(DISTILLED_MODELS)
    )
    if "clip" in rest and all(name.startswith("imagenet") for name in named):
        whole = False  # CLIP learns from captions, which ImageNet lacks
    return tuple(dict.fromkeys([*named, *([] if whole else [UNKNOWN_CORPUS])]))


def _check_model(model: str, own_weights: bool) -> None:
    """Raise :class:`UserError` for names that timm lacks, and for one without a tag unless the user gives weights."""
    import timm

    plain, _, tag = model.partition(".")
    if not timm.is_model(plain):
        raise unknown_name_error("model of timm", plain, timm.list_models(), see="timm.list_models()")
    tags = [name.partition(".")[2] for name in timm.list_models(f"{plain}.*", pretrained=True)]
    if tag and tag not in tags:
        raise unknown_name_error(f"weights of timm:{plain}", tag, tags, see=f"timm.list_pretrained('{plain}*')")
    if not tag and not own_weights:
        which = f", e.g. timm:{plain}.{tags[0]} (it has {', '.join(tags)})" if tags else ""
        raise UserError(f"timm:{model} does not say which weights{which}; or give them with --weights FILE")


@lru_cache(maxsize=64)
def _find_configuration(model: str) -> dict[str, Any]:
    from timm.models import get_pretrained_cfg

    configuration = get_pretrained_cfg(model)
    return dict(configuration.to_dict()) if configuration else {}


def _format_source(configuration: Mapping[str, Any]) -> str:
    if configuration.get("hf_hub_id"):
        from huggingface_hub import hf_hub_url

        return hf_hub_url(configuration["hf_hub_id"], configuration.get("hf_hub_filename") or "model.safetensors")
    return str(configuration.get("url") or "")
