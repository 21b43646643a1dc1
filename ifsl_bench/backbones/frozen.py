"""Pretraining with a frozen backbone: its weights are found, its features computed once, its classifier fitted."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ifsl_bench.backbones.contract import (
    BackboneInfo,
    FrozenBackbone,
    check_backbone,
    find_backbone_and_model,
    pretraining_corpora,
)
from ifsl_bench.backbones.device import choose_precision, describe_device
from ifsl_bench.backbones.features import compute_features, subtract_feature_mean
from ifsl_bench.backbones.heads import fit_head_with_facts, load_head, measure_accuracies
from ifsl_bench.backbones.networks import FrozenNetwork, PixelNormalisation, make_backbone, make_head, to_channels_last
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    PretrainedBackbone,
    format_accuracies,
    make_chance_warning,
    make_features_key,
    make_pretraining_key,
)
from ifsl_bench.backbones.weights import WEIGHTS_SUFFIXES, read_tensors
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.contamination import seen_state_in_pretraining
from ifsl_bench.protocols.tasks.task import MEAN_CENTRED, WEIGHTS_CHECKSUM_DIGITS, Pretraining, Task
from ifsl_bench.utils.checkpoint import CheckpointFolder, CheckpointState, read_finished_metadata
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.files import Paths, sha256_file, translate_disk_errors, write_bytes
from ifsl_bench.utils.locks import get_or_create
from ifsl_bench.utils.progress import Reporter

MEAN_TENSOR_NAME = "features.mean"  # the tensor's name


class FrozenPreprocessing:
    """[B, H, W, C] uint8 -> [B, 3, h, w] float32, where (h, w) is the network's size.

    8-bit images are resized with antialiasing, as Pillow does it. Grey images get three equal channels.

    Args:
        backbone_info: has size, resize, interpolation, mean and standard deviation.
        device: where the batches are.
    """

    def __init__(self, backbone_info: BackboneInfo, device: torch.device) -> None:
        from torchvision.transforms import InterpolationMode  # takes a second, and most commands need none of it

        self.backbone_info, self.mode = backbone_info, InterpolationMode(backbone_info.interpolation)
        self.mean, self.std = (
            torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (backbone_info.mean, backbone_info.std)
        )

    def __call__(self, batch: Tensor) -> Tensor:
        from torchvision.transforms import functional as F

        images = batch.permute(0, 3, 1, 2)
        resize = self.backbone_info.resize
        size = [resize] if isinstance(resize, int) else list(resize)
        images = F.center_crop(F.resize(images, size, self.mode, antialias=True), list(self.backbone_info.size))
        # The repeated channels are copied only by the arithmetic.
        return ((images / 255).expand(-1, 3, -1, -1) - self.mean) / self.std


def pretrain_frozen(
    home: Paths,
    task: Task,
    dataset: Dataset,
    head: HeadKind,
    device: torch.device,
    reporter: Reporter,
    device_description: str = "",
) -> PretrainedBackbone:
    """Return a frozen backbone and its base classifier, from the cache or fitted.

    Args:
        home: where they are kept.
        task: names the backbone.
        dataset: the images.
        head: "linear" or "cosine".
        device: where to compute.
        reporter: shows how far it is.
        device_description: description of the device, for the record of features.

    Raises:
        UserError: the weights cannot be downloaded, or do not fit; or the data are no images.
        CorruptFile: the images to train on are not what was written.
    """
    spec = task.pretraining
    about = check_backbone(spec)  # None: the network of a registered Backbone
    if about and (len(dataset.shape) != 3 or dataset.shape[2] not in (1, 3)):
        raise UserError(f"{spec.backbone} is for images of one or three channels, not for data {dataset.shape}")
    normalise = FrozenPreprocessing(about, device) if about else PixelNormalisation(task.dataset, dataset.shape, device)
    file = find_weights_file(home, spec, about, reporter)
    digest = sha256_file(file)
    try:
        network = _load_network(spec.backbone, dataset.shape, file, device)
    except UserError:
        used = any(read_finished_metadata(folder, weights=digest) for folder in home.pretrained.glob("*"))
        if spec.weights is not None and not used:  # a copy, which nothing was made with
            file.unlink(missing_ok=True)
        raise
    key, classes = (
        make_pretraining_key(task, dataset.fingerprint, head, 0),
        len(dataset.pool("base/train").class_starts) - 1,
    )
    folder, corpora = home.pretrained / key, pretraining_corpora(spec) or ()
    facts = {
        "weights": digest,
        "backbone": spec.backbone,
        "pretrained_on": list(corpora),
        "seen": seen_state_in_pretraining(corpora, task.novel_data, task.base_order),
        "features": make_features_key(task, dataset.fingerprint, head, 0),
        "centre": spec.centre or MEAN_CENTRED,
    }
    info = {"tensors": {"sha256": digest}, **facts}
    bare = PretrainedBackbone(key, network, make_head(head, network.features, classes), normalise, info)

    def read_cached() -> PretrainedBackbone | None:
        """Read the classifier on these weights; None where there is none."""
        state = CheckpointFolder(folder).load()
        return restore(state) if state and state.metadata.get("weights") == digest else None

    def restore(state: CheckpointState) -> PretrainedBackbone:
        named = {name.removeprefix("head."): x for name, x in state.tensors.items() if name.startswith("head.")}
        classifier = load_head(named, head, network.features, classes, folder).to(device)
        mean = state.tensors[MEAN_TENSOR_NAME].numpy() if MEAN_TENSOR_NAME in state.tensors else None
        warning = make_chance_warning(
            state.metadata["accuracy"], dataset, f"whether {spec.backbone} is for such images"
        )
        if warning:
            reporter.warn(warning)
        return replace(
            bare, base_classifier=classifier, training_record={**state.metadata, **facts}, base_feature_mean=mean
        )

    def train() -> PretrainedBackbone:
        _report_preprocessing(about, task, dataset, reporter)
        tensors, info = _fit_classifier(home, task, dataset, bare, head, device, reporter, device_description)
        # The checksum of the backbone is one of the tensors: their checksum then tells which backbone they are for.
        tensors["backbone.sha256"] = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
        return restore(CheckpointState(tensors, CheckpointFolder(folder).write_tensors(tensors, {**info, **facts})))

    return get_or_create(folder, read_cached, train, reporter.warn, "it is trained again")


def _load_network(name: str, shape: tuple[int, ...], file: Path, device: torch.device) -> FrozenNetwork:
    """Make the network with the weights of a file."""
    weights, (plugin, model) = read_tensors(file), find_backbone_and_model(name)
    with torch.random.fork_rng(devices=[]):
        network = make_backbone(name, shape)
        body = network.body if isinstance(network, FrozenNetwork) else network
        try:
            if isinstance(plugin, FrozenBackbone):
                plugin.load_weights(model, body, weights)
            else:
                body.load_state_dict(match_tensors_to_network(body, weights))
        except Exception as error:  # a library's own, of many kinds
            raise UserError(
                f"{file.name} holds the weights of another network than {name}: "
                f"{escape_controls(str(error)).strip()[:200]}; "
                f"the network begins with {_describe_first_tensor(body.state_dict())}, "
                f"the file with {_describe_first_tensor(weights)}"
            ) from error
    frozen = to_channels_last(FrozenNetwork(body, network.features), device)
    assert isinstance(frozen, FrozenNetwork)
    return frozen


def match_tensors_to_network(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find a network's tensors among a file's, where all names may have a prefix such as ``encoder.``.

    Args:
        network: whose tensors they are.
        weights: the tensors of the file, by name.

    Raises:
        ValueError: the file has several such networks, or tensors are missing, of another shape or of a larger network.
    """
    own_tensors, parts = network.state_dict(), {name for name, _ in network.named_children()}
    needed = [name for name in own_tensors if not name.endswith(".num_batches_tracked")]  # older files lack these
    pairs = ((name, name.removesuffix(own)) for own, name in itertools.product(needed, weights))
    counts = Counter(start for name, start in pairs if start != name and f".{start}".endswith("."))
    whole = [start for start, count in counts.items() if count == len(needed)]
    if len(whole) > 1:
        raise ValueError(f"it has the network {len(whole)} times, under {' and '.join(map(repr, whole))}")
    start = max(counts, key=counts.__getitem__, default="")
    inside = {name.removeprefix(start): x for name, x in weights.items() if name.startswith(start)}
    taken = {name: x for name, x in inside.items() if name in own_tensors}
    for fault, faulty in (
        ("missing", [name for name in needed if name not in taken]),
        ("of another shape", [name for name, x in taken.items() if x.shape != own_tensors[name].shape]),
        ("too many", [name for name in inside if name not in taken and name.partition(".")[0] in parts]),
    ):
        if faulty:
            raise ValueError(f"tensors {fault}: {len(faulty)}, such as {faulty[0]}")
    return taken


def _describe_first_tensor(tensors: Mapping[str, Tensor]) -> str:
    name = next(iter(tensors))
    return f"{name} {list(tensors[name].shape)}"


def enlarges_images(backbone_info: BackboneInfo, shape: tuple[int, ...]) -> bool:
    """Return whether images have to be enlarged for a network.

    Args:
        backbone_info: gives the size that enters the network.
        shape: (H, W, C) of the images.
    """
    return min(shape[:2]) < min(backbone_info.size)


def _report_preprocessing(backbone_info: BackboneInfo | None, task: Task, dataset: Dataset, reporter: Reporter) -> None:
    """Report how the images enter the network."""
    name, data = task.pretraining.backbone, task.dataset
    if backbone_info is None:
        mean, std = list(data.mean), list(data.std)
        reporter.say(f"{name}: images enter as (x / 255 - {mean}) / {std}; the weights should have learned from such")
        return
    (height, width), (h, w) = dataset.shape[:2], backbone_info.size
    text = f"{name}: images of {height} x {width}, as the data set keeps them, are seen at {h} x {w}"
    if enlarges_images(backbone_info, dataset.shape):
        reporter.warn(f"{text}: enlarged, so that they show less detail than what the network was trained on")
    else:
        reporter.say(text)


def _fit_classifier(
    home: Paths,
    task: Task,
    dataset: Dataset,
    pretrained: PretrainedBackbone,
    kind: HeadKind,
    device: torch.device,
    reporter: Reporter,
    device_description: str,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Fit the base classifier on base/train; return its tensors, with the mean if it is subtracted, and the record."""
    start, spec, pool = time.perf_counter(), task.pretraining, dataset.pool("base/train")

    def features_of_pool(pool: str) -> np.ndarray:
        return compute_features(home, task, dataset, pretrained, pool, device, reporter, 1, device_description)

    rows = features_of_pool("base/train")
    mean = None if spec.centre == "none" else rows.mean(0, dtype=np.float64).astype(np.float32)
    labels, classes = pool.labels.astype(np.int64), len(pool.class_starts) - 1
    head, solve = fit_head_with_facts(
        kind, subtract_feature_mean(rows, mean), labels, classes, spec.weight_decay, device
    )
    title = f"base classifier on {spec.backbone}, {kind} head"
    if not solve["converged"]:
        reporter.warn(f"{title}: not converged after {solve['steps']} steps, gradient {solve['gradient']:.1e}")
    accuracy = measure_accuracies(head.cpu(), dataset, lambda name: subtract_feature_mean(features_of_pool(name), mean))
    reporter.say(f"{title}: {solve['steps']} steps of L-BFGS, {format_accuracies(accuracy)}")
    bf16 = device.type != "cpu" and choose_precision(device).bf16
    tensors = {f"head.{name}": value.detach() for name, value in head.state_dict().items()}
    return tensors | ({} if mean is None else {MEAN_TENSOR_NAME: torch.from_numpy(mean)}), {
        "key": pretrained.pretraining_key,
        "finished": True,
        "epoch": 0,
        "seconds": time.perf_counter() - start,
        "seed": 0,
        "bf16": bf16,
        "precision": f"{'bf16 autocast' if bf16 else 'float32'}; classifier in float64, by L-BFGS",
        "device": describe_device(device),
        "processes": [1],
        "accuracy": accuracy,
        "solve": solve,
    }


def copy_weights_to_home(home: Paths, file: Path) -> str:
    """Copy a file of weights into the home; return the first digits of its checksum, which name it there.

    Args:
        home: where weights are kept.
        file: the user's.

    Raises:
        UserError: no such file, one that holds no weights, or a full disk.
    """
    read_tensors(file)
    digest = sha256_file(file)[:WEIGHTS_CHECKSUM_DIGITS]
    target = home.weights / f"{digest}{file.suffix}"
    if not target.exists():
        write_bytes(target, file.read_bytes())
    return digest


def find_weights_file(home: Paths, spec: Pretraining, backbone_info: BackboneInfo | None, reporter: Reporter) -> Path:
    """Find the file of a frozen backbone's weights in the home, or download it.

    Args:
        home: where weights are kept.
        spec: names the backbone, and the user's file if there is one.
        backbone_info: the description of a :class:`FrozenBackbone` backbone; None for another.
        reporter: hears of a download.

    Raises:
        UserError: it cannot be downloaded; the message names the file and where to put it.
    """
    name = spec.weights or spec.backbone
    for ending in dict.fromkeys([*(backbone_info.endings if backbone_info else ()), *WEIGHTS_SUFFIXES]):
        path = home.weights / f"{name}{ending}"
        if os.path.isfile(path):
            return path
    if spec.weights is not None or backbone_info is None:
        raise UserError(
            f"the weights {spec.weights} of {spec.backbone} are not in {home.weights}; give the file once more with "
            f"--weights FILE"
        )
    plugin, model = find_backbone_and_model(spec.backbone)
    assert isinstance(plugin, FrozenBackbone)
    target = home.weights / f"{name}{backbone_info.endings[0]}"
    reporter.say(f"weights of {spec.backbone}: {backbone_info.source}")
    with translate_disk_errors(home.weights):
        home.weights.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".partial-", dir=home.weights)
    with scratch as folder:
        try:
            got = plugin.download_weights(model, Path(folder))
        except Exception as error:
            why = escape_controls(str(getattr(error, "reason", error))).strip()[:120] or type(error).__name__
            raise UserError(
                f"the weights of {spec.backbone} cannot be downloaded here ({why}); get "
                f"{backbone_info.source or 'them'} elsewhere, and put it at {target}"
            ) from error
        write_bytes(target, got.read_bytes())
    return target
