"""Stage 1 with a backbone from elsewhere: its weights are found, its features computed once, its classifier trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbone.base_head import fit_head
from ifsl_bench.backbone.contract import Card, Frozen
from ifsl_bench.backbone.device import choose_precision, describe_device
from ifsl_bench.backbone.features import centred, compute_features
from ifsl_bench.backbone.given_weights import as_tensor, read_weights, weights_file
from ifsl_bench.backbone.networks import CosineHead, FrozenNetwork, LinearHead, channels_last, make_head
from ifsl_bench.backbone.preprocess import Preprocess, enlarged
from ifsl_bench.backbone.pretrain import HeadKind, Pretrained, at_chance, features_key, pretraining_key
from ifsl_bench.backbone.registered import corpora_of, frozen_backbone
from ifsl_bench.common.checkpoint import CheckpointFolder, State
from ifsl_bench.common.errors import CorruptFile, UserError, one_line
from ifsl_bench.common.files import Home, set_aside, sha256_file
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocol.contamination import seen
from ifsl_bench.protocol.task import CENTRED, Task

MEAN = "features.mean"  # the tensor's name
CLASSIFIER = 2  # tensors of one: weight and bias


def pretrain_frozen(
    home: Home, task: Task, dataset: Dataset, head: HeadKind, device: torch.device, reporter: Reporter, place: str = ""
) -> Pretrained:
    """The backbone of a task whose weights are from elsewhere, and its base classifier, from the cache or trained.

    Args:
        place: what is recorded of where features are computed.

    Raises:
        UserError: the weights cannot be got, or do not fit; or the data are no images.
        CorruptFile: the images to train on are not what was written.
    """
    spec = task.pretraining
    found = frozen_backbone(spec.backbone)
    assert found is not None
    plugin, model = found
    card = plugin.card(model, spec.weights is not None)
    if len(dataset.shape) != 3 or dataset.shape[2] not in (1, 3):
        raise UserError(f"{spec.backbone} is for images of one or three channels, not for data {dataset.shape}")
    file = weights_file(home, spec, plugin, model, card, reporter)
    digest = sha256_file(file)
    try:
        network = _filled(plugin, model, file, device, reporter)
    except UserError:
        if spec.weights is not None:  # a copy, which nothing can be made with
            file.unlink(missing_ok=True)
        raise
    key = pretraining_key(task, dataset.fingerprint, head, 0)
    corpora = corpora_of(spec) or ()
    facts = {
        "weights": digest,
        "backbone": spec.backbone,
        "pretrained_on": list(corpora),
        "seen": seen(corpora, task.novel_data),
        "features": features_key(task, dataset.fingerprint, head, 0),
        "centre": spec.centre or CENTRED,
    }

    def made(classifier: LinearHead | CosineHead, info: Mapping[str, Any], mean: Tensor | None = None) -> Pretrained:
        classifier.requires_grad_(False)
        of_base = None if mean is None else mean.numpy()
        return Pretrained(key, network, classifier.to(device), Preprocess(card, device), {**info, **facts}, of_base)

    def finished(classifier: LinearHead | CosineHead, info: Mapping[str, Any], mean: Tensor | None) -> Pretrained:
        if told := at_chance(info["accuracy"], dataset, f"whether {spec.backbone} is for such images"):
            reporter.warn(told)
        return made(classifier, info, mean)

    def loaded(state: State) -> Pretrained:
        return finished(_classifier(state, head, network.features, classes), state.info, state.tensors.get(MEAN))

    folder, classes = home.pretrained / key, len(dataset.manifest["pools"]["base/train"]["classes"])
    with suppress(CorruptFile):  # before the lock, which a read-only folder does not grant
        if (state := _finished(folder, digest)) is not None:
            return loaded(state)
    with locked(folder, reporter.warn):
        try:
            if (state := _finished(folder, digest)) is not None:
                return loaded(state)
        except CorruptFile as error:
            reporter.warn(f"{error}; it is trained again, the damaged files are in {set_aside(folder)}")
        _announce(card, dataset, spec.backbone, reporter)
        bare = made(make_head(head, network.features, classes), {"tensors": {"sha256": digest}})
        trained, mean, info = _trained(home, task, dataset, bare, head, device, reporter, place)
        tensors = {f"head.{k}": v.cpu() for k, v in trained.state_dict().items()}
        if mean is not None:
            tensors[MEAN] = mean
        # The checksum of the backbone is one of the tensors: theirs then says which backbone they are for.
        kept = CheckpointFolder(folder).save({**tensors, "backbone.sha256": as_tensor(digest)}, {**info, **facts})
        return finished(trained, kept, mean)


def _filled(plugin: Frozen, model: str, file: Path, device: torch.device, reporter: Reporter) -> FrozenNetwork:
    """The network with the weights of a file."""
    weights = read_weights(file)
    with torch.random.fork_rng(devices=[]):
        body, width = plugin.network(model)
        try:
            plugin.fill(model, body, weights)
        except Exception as error:  # a library's own, of many kinds
            why = one_line(str(error)).strip()[:200]
            named = in_order(weights, body.state_dict())
            if named is None:
                raise UserError(
                    f"{file.name} holds the weights of another network than {model}: {why}; the network begins with "
                    f"{_first(body.state_dict())}, the file with {_first(weights)}"
                ) from error
            plugin.fill(model, body, named)
            reporter.warn(
                f"the tensors of {file.name} have other names than those of {model}, and fit in their order, from "
                f"{_first(weights)} as {_first(named)} on: the base classifier's accuracy shows whether they belong"
            )
    network = channels_last(FrozenNetwork(body, width), device)
    assert isinstance(network, FrozenNetwork)
    return network


def _first(tensors: Mapping[str, Tensor]) -> str:
    name = next(iter(tensors))
    return f"{name} {list(tensors[name].shape)}"


def in_order(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensors of a file under the names that a network has for them, where they come in the same order.

    Args:
        wanted: the network's, without a classifier, whose tensors come last in the file.

    Returns:
        None where their kinds (the last part of their names) or their shapes differ somewhere, or names are shared.
    """
    pairs = list(zip(weights, wanted, strict=False))
    alike = all(a.rpartition(".")[2] == b.rpartition(".")[2] and weights[a].shape == wanted[b].shape for a, b in pairs)
    whole = 0 <= len(weights) - len(wanted) <= CLASSIFIER
    if not alike or not whole or weights.keys() & wanted.keys():
        return None
    return {b: weights[a] for a, b in pairs}


def _announce(card: Card, dataset: Dataset, name: str, reporter: Reporter) -> None:
    """What becomes of the images on their way into the network."""
    (height, width), (h, w) = dataset.shape[:2], card.size
    said = f"{name}: images of {height} x {width}, as the data set keeps them, are seen at {h} x {w}"
    if enlarged(card, dataset.shape):
        reporter.warn(f"{said}: enlarged, so that they show less detail than what the network was trained on")
    else:
        reporter.say(said)


def _finished(folder: Path, digest: str) -> State | None:
    """The classifier on these weights, None where there is none.

    Raises:
        CorruptFile: damaged.
    """
    state = CheckpointFolder(folder).load()
    return state if state and state.info.get("finished") is True and state.info.get("weights") == digest else None


def _classifier(state: State, kind: HeadKind, width: int, classes: int) -> LinearHead | CosineHead:
    head = make_head(kind, width, classes)
    try:
        head.load_state_dict({k.removeprefix("head."): v for k, v in state.tensors.items() if k.startswith("head.")})
    except RuntimeError as error:
        raise CorruptFile(f"the classifier does not fit the network: {error}") from error
    return head


def _trained(
    home: Home, task: Task, dataset: Dataset, bare: Pretrained, kind: HeadKind, device: torch.device,
    reporter: Reporter, place: str,
) -> tuple[LinearHead | CosineHead, Tensor | None, dict[str, Any]]:  # fmt: skip
    """The base classifier on the features of base/train, their mean where it is subtracted, and what is recorded."""
    start, spec = time.perf_counter(), task.pretraining

    def features(pool: str) -> np.ndarray:
        return compute_features(home, task, dataset, bare, pool, device, reporter, 1, place)

    pool = dataset.pool("base/train")
    classes = len(pool.starts) - 1
    rows, labels = features("base/train"), pool.labels.astype(np.int64)
    mean = None if spec.centre == "none" else rows.mean(0, dtype=np.float64).astype(np.float32)
    rows = centred(rows, mean)
    head, solve = fit_head(kind, rows, labels, classes, spec.weight_decay, device)
    title = f"base classifier on {spec.backbone}, {kind} head"
    if not solve["converged"]:
        reporter.warn(f"{title}: not converged after {solve['steps']} steps, gradient {solve['gradient']:.1e}")
    accuracy = {}
    for name in ("base/val", "base/test"):
        if dataset.has(name):
            with torch.inference_mode():
                logits = head.cpu()(_tensor(centred(features(name), mean)))
            accuracy[name] = float((logits.argmax(1).numpy() == dataset.pool(name).labels).mean())
    shown = ", ".join(f"{name} {100 * value:.2f}%" for name, value in accuracy.items())
    reporter.say(f"{title}: {solve['steps']} steps of L-BFGS, {shown}")
    precision = choose_precision(device) if device.type != "cpu" else None
    bf16 = precision is not None and precision.bf16
    return (
        head,
        None if mean is None else torch.from_numpy(mean),
        {
            "key": bare.key,
            "finished": True,
            "epoch": 0,
            "seconds": time.perf_counter() - start,
            "seed": 0,
            "bf16": bf16,
            "precision": f"{'bf16 autocast' if bf16 else 'float32'}; classifier in float32, by L-BFGS",
            "device": describe_device(device),
            "processes": [1],
            "accuracy": accuracy,
            "solve": solve,
        },
    )


def _tensor(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(rows))
