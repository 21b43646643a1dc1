"""Stage 1 as later stages find it: what a pretraining is called, what is in the home, and a finished one, opened."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.contract import Backbone, Frozen, backbone_plugin, is_frozen
from ifsl_bench.backbones.images import Normalise
from ifsl_bench.backbones.networks import CosineHead, LinearHead, channels_last, make_backbone, make_head
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.task import CENTRED, NO_BACKBONE, Task
from ifsl_bench.utils.checkpoint import CheckpointFolder, finished_info
from ifsl_bench.utils.checksummed_json import check_kinds
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.seeds import seed_of

HeadKind = Literal["linear", "cosine"]
FROM_ELSEWHERE = ("backbone", "weights", "features", "pretrained_on", "seen", "centre")  # said of such backbones alone
RECIPE = 2  # raised when training starts to give other weights from equal settings
PACKAGED = Path(__file__).parent / "weights"  # files of the package, see :mod:`ifsl_bench.backbones.weights`
DISABLED = (
    "trained-here.json"  # in the folder of a pretraining that is to be trained although it comes with the package
)


class NotIncluded(UserError):
    """Features that come with base classifiers, and a task that needs another one."""

    def __init__(self, task: Task) -> None:
        super().__init__(
            f"the base classifiers of data set {task.dataset.name!r} come with its features, as they are: there is "
            f"none for task {task.name}, and there are no images to train one on"
        )


@dataclass(frozen=True)
class Pretrained:
    """A finished pretraining.

    Attributes:
        key: identity of everything that made it.
        network: images [B, C, H, W] -> features [B, D], in evaluation mode.
        head: the base classifier.
        normalise: images of a pool, uint8 [B, H, W, C], -> what the network takes.
        mean: of the features of base/train, float32 [D], which is subtracted from all features; None where nothing is.
        info: what was recorded: accuracy on base/val and base/test, precision, device, seconds, what the weights were
            rounded to, and how many processes it was, one number after the other where a resumed one had others.
    """

    key: str
    network: Backbone
    head: LinearHead | CosineHead
    normalise: Callable[[Tensor], Tensor]
    info: dict[str, Any]
    mean: np.ndarray | None = None

    @property
    def sha256(self) -> str:
        """Checksum of the weights: a pretraining that is repeated elsewhere has the same key but other weights."""
        return str(self.info["tensors"]["sha256"])

    @property
    def features_key(self) -> str:
        """The name of its features on disk; see :func:`features_key`."""
        return str(self.info.get("features", self.key))

    @property
    def features_sha256(self) -> str:
        """Checksum of what its features depend on: of a backbone from elsewhere that of its file alone."""
        return features_checksum(self.info)

    def entry(self) -> dict[str, Any]:
        """The pretraining's entry in a result; accuracies in percent."""
        accuracy = {pool: round(100 * value, 4) for pool, value in self.info["accuracy"].items()}
        recorded = ("precision", "device", "rounded", *FROM_ELSEWHERE)
        record = {name: self.info[name] for name in recorded if name in self.info}
        if self.info["processes"] != [1]:
            record["processes"] = self.info["processes"]
        return {"key": self.key, "sha256": self.sha256, "accuracy": accuracy, **record}


def pretraining_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """Names a pretraining on disk: readable, and different whenever the weights could differ.

    Args:
        seed: of training; a task may have one pretraining for all of them.
    """
    made_of = definition(task, fingerprint, head, seed)
    return f"{_data(task)}-{task.pretraining.backbone}-{head}-seed{made_of['seed']}-{sha256_json(made_of)[:12]}"


def definition(task: Task, fingerprint: str, head: HeadKind, seed: int) -> dict[str, Any]:
    """Everything that makes the weights, as JSON has it; arguments as of :func:`pretraining_key`."""
    made_of: dict[str, Any] = {
        "recipe": RECIPE,
        "data": fingerprint,
        "images": [task.dataset.mean, task.dataset.std],
        "pretraining": task.pretraining.definition(),
        "head": head,
        "seed": 0 if is_frozen(task.pretraining) else task.pretraining_seed(seed),
    }
    if is_frozen(task.pretraining):
        made_of["centre"] = task.pretraining.centre or CENTRED
    if task.base_classes is not None:
        made_of["base_classes"] = task.base_classes
    if task.base_order is not None:
        made_of["base_order"] = task.base_order
    if shares_linear_backbone(task, head):
        made_of["backbone_of"] = "linear"
    return made_of


def shares_linear_backbone(task: Task, head: HeadKind) -> bool:
    """Returns whether a head is fitted on the features of the linear pretraining, as tasks in sessions have it."""
    own = task.pretraining.backbone == NO_BACKBONE or is_frozen(task.pretraining)
    return task.sessions is not None and head == "cosine" and not own


def features_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """Names the features under a pretraining on disk: a frozen backbone has the same for both heads."""
    spec = task.pretraining
    if not is_frozen(spec):
        return pretraining_key(task, fingerprint, "linear" if shares_linear_backbone(task, head) else head, seed)
    made_of: dict[str, Any] = {
        "data": fingerprint, "backbone": spec.backbone, "weights": spec.weights, "of": task.base_classes,
    }  # fmt: skip
    if not isinstance(backbone_plugin(spec.backbone)[0], Frozen):
        made_of["images"] = [task.dataset.mean, task.dataset.std]
    if task.base_order is not None:
        made_of["base_order"] = task.base_order
    return f"{_data(task)}-{spec.backbone}-{sha256_json(made_of)[:12]}"


def _data(task: Task) -> str:
    """The data set of a pretraining and what is changed of its base classes, as names have it."""
    changes = (("base-classes", task.base_classes), ("base-order", task.base_order))
    return task.dataset.name + "".join(f"+{key}={value}" for key, value in changes if value is not None)


class Checkpoint:
    """The network and the base classifier of a pretraining: with fresh weights, until those on disk are restored.

    Args:
        folder: where its state is kept.
        head: "linear" or "cosine".
        seed: that of the pretraining.

    Attributes:
        info: what is recorded of it; nothing while there is no state.

    Raises:
        UserError: mean and std do not fit the images, or the backbone does not.
    """

    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device
    ) -> None:
        self.folder, self.task, self.dataset, self.kind, self.seed, self.device = (
            folder, task, dataset, head, seed, device,
        )  # fmt: skip
        self.store, self.info = CheckpointFolder(folder), dict[str, Any]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("initial weights", seed))
            network = make_backbone(task.pretraining.backbone, dataset.shape, task.pretraining.norm_momentum)
            classes = len(dataset.manifest["pools"]["base/train"]["classes"])
            self.head = make_head(head, network.features, classes).to(device)
        self.network = channels_last(network, device)
        self.normalise = Normalise(task.dataset, dataset.shape, device)

    @property
    def held_out(self) -> list[str]:
        """The pools that the accuracy is measured on."""
        return [name for name in ("base/val", "base/test") if self.dataset.has(name)]

    def restore(self) -> None:
        """Reads the state on disk, if there is one.

        Raises:
            CorruptFile: it is damaged or another's; this object is of no use then.
            UserError: it may not be read.
        """
        state = self.store.load()
        if state is None:
            return
        self._check(state.info)
        try:
            self.load(state.tensors)
        except (RuntimeError, KeyError) as error:
            raise CorruptFile(f"{self.folder} does not fit the network: {error}") from error
        self.info = state.info

    def _check(self, info: dict[str, Any]) -> None:
        """Raises :class:`CorruptFile` where a state is not of this pretraining."""
        path, number = self.store.json, (int, float)
        kinds = {"epoch": int, "seconds": number, "seed": int, "bf16": bool, "precision": str, "device": str}
        check_kinds(path, info, {"finished": bool, "key": str, "processes": list, **kinds})
        if info["key"] != self.folder.name or info["seed"] != self.seed:
            raise CorruptFile(f"{path} is of another pretraining: {info['key']}, seed {info['seed']}")
        if info["finished"]:
            check_kinds(path, info, {"accuracy": dict})
            check_kinds(path, info["accuracy"], dict.fromkeys(self.held_out, number))

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Gives network and head the weights among the tensors."""
        for prefix, module in (("network.", self.network), ("head.", self.head)):
            part = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            module.load_state_dict(part)

    def finished(self, reporter: Reporter) -> Pretrained:
        """The network and head for good; warns of a base classifier that is no better than chance."""
        self.network.eval().requires_grad_(False)
        self.head.requires_grad_(False)
        if warning := at_chance(self.info["accuracy"], self.dataset):
            reporter.warn(warning)
        return Pretrained(self.folder.name, self.network, self.head, self.normalise, self.info)


def open_pretrained(
    home: Paths, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device, reporter: Reporter
) -> Pretrained | None:
    """Opens a finished pretraining of the home; None where there is none, or where it is damaged.

    It takes no lock, which a read-only folder does not grant.

    Raises:
        UserError: a file may not be read, or the images do not suit the task's mean and std.
    """
    folder = home.pretrained / pretraining_key(task, dataset.fingerprint, head, seed)
    stored = Checkpoint(folder, task, dataset, head, task.pretraining_seed(seed), device)
    try:
        stored.restore()
    except CorruptFile:
        return None
    return stored.finished(reporter) if stored.info.get("finished") else None


def packaged_file(key: str) -> Path | None:
    """The file of a pretraining that comes with the package; None where none does."""
    path = PACKAGED / f"{key}.safetensors"
    return path if path.is_file() else None


def is_offered(home: Paths, key: str) -> bool:
    """Returns whether the package has weights that the home would take: it has nothing of this pretraining."""
    begun = any(os.path.lexists(home.pretrained / key / name) for name in ("checkpoint.json", DISABLED))
    return packaged_file(key) is not None and not begun


def pretrained_sha256(home: Paths, key: str) -> str | None:
    """The checksum of the weights of a finished pretraining in the cache; None where there is none.

    There is none either where they are a head's on the backbone of another pretraining, which has other weights by now.
    """
    info = finished_info(home.pretrained / key)
    if info and "features_sha256" in info and pretrained_sha256(home, info["features"]) != info["features_sha256"]:
        return None
    return str(info["tensors"]["sha256"]) if info else None


def features_sha256(home: Paths, key: str) -> str | None:
    """The checksum of what the features of a finished pretraining depend on; None where there is none.

    It is that of the weights; of a backbone from elsewhere, that of its file alone.
    """
    info = finished_info(home.pretrained / key)
    return features_checksum(info) if info else None


def features_checksum(info: Mapping[str, Any]) -> str:
    """The features' checksum as recorded of a pretraining; of a second head, that of the backbone it is fitted on."""
    own = info["tensors"]["sha256"]
    return str(info.get("weights") or info.get("features_sha256") or own)


def in_percent(accuracy: Mapping[str, float]) -> str:
    """The accuracies in pools, as messages show them."""
    return ", ".join(f"{pool} {100 * share:.2f}%" for pool, share in accuracy.items())


DEVIATIONS = 2.0  # above what guessing gives, from which on it has


def at_chance(accuracy: Mapping[str, float], dataset: Dataset, then: str = "steps and rate of [pretraining]") -> str:
    """Warns of a base classifier that is no better than one that always guesses the commonest class.

    Args:
        accuracy: share of images labelled right, of each pool that it was measured on.
        then: what to look at besides the images.

    Returns:
        A sentence; nothing where it is better in all pools together, by :data:`DEVIATIONS` standard deviations.
    """
    hits = guessed = variance = 0.0
    for name, share in accuracy.items():
        pool = dataset.pool(name)
        chance = float(np.diff(pool.starts).max()) / len(pool)
        hits += share * len(pool)
        guessed += chance * len(pool)
        variance += chance * (1 - chance) * len(pool)
    if not accuracy or hits > guessed + DEVIATIONS * math.sqrt(variance):
        return ""
    classes = len(dataset.manifest["pools"]["base/train"]["classes"])
    first = f"Look at the images ('ifsl-bench data show {dataset.name}'), then at" if dataset.pictures else "Look at"
    return (
        f"the base classifier is at chance ({in_percent(accuracy)}, of {classes} classes): what it and its backbone "
        f"have learned does not hold for other images, and no method on them means anything. {first} {then}"
    )
