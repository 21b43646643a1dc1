"""Stage 1: the backbone and the base classifier, trained on base/train by cross-entropy, then frozen for good."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbone.contract import Backbone
from ifsl_bench.backbone.networks import CosineHead, LinearHead
from ifsl_bench.backbone.processes import ALONE, World
from ifsl_bench.backbone.registered import frozen_backbone
from ifsl_bench.backbone.trainer import Trainer
from ifsl_bench.backbone.weights import adopt, features_checksum
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, set_aside, sha256_json
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocol.task import CENTRED, INCLUDED, NO_BACKBONE, Task

HeadKind = Literal["linear", "cosine"]
FROM_ELSEWHERE = ("backbone", "weights", "features", "pretrained_on", "seen", "centre")  # said of such backbones alone
RECIPE = 2  # raised when the code below starts to give other weights from equal settings


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
        """What its features are called on disk; see :func:`features_key`."""
        return str(self.info.get("features", self.key))

    @property
    def features_sha256(self) -> str:
        """Checksum of what its features depend on: of a backbone from elsewhere that of its file alone."""
        return features_checksum(self.info)

    def entry(self) -> dict[str, Any]:
        """What a result says of the pretraining; accuracies in percent."""
        accuracy = {pool: round(100 * value, 4) for pool, value in self.info["accuracy"].items()}
        recorded = ("precision", "device", "rounded", *FROM_ELSEWHERE)
        said = {name: self.info[name] for name in recorded if name in self.info}
        if self.info["processes"] != [1]:
            said["processes"] = self.info["processes"]
        return {"key": self.key, "sha256": self.sha256, "accuracy": accuracy, **said}


def pretraining_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """What a pretraining is called on disk: readable, and different whenever the weights could differ.

    Args:
        seed: of training; a task may have one pretraining for all of them.
    """
    made_of = definition(task, fingerprint, head, seed)
    data = task.dataset.name
    if task.base_classes is not None:
        data += f"+base-classes={task.base_classes}"
    return f"{data}-{task.pretraining.backbone}-{head}-seed{made_of['seed']}-{sha256_json(made_of)[:12]}"


def definition(task: Task, fingerprint: str, head: HeadKind, seed: int) -> dict[str, Any]:
    """Everything that makes the weights, as JSON has it; arguments as of :func:`pretraining_key`."""
    made_of: dict[str, Any] = {
        "recipe": RECIPE,
        "data": fingerprint,
        "images": [task.dataset.mean, task.dataset.std],
        "pretraining": task.pretraining.definition(),
        "head": head,
        "seed": 0 if frozen_backbone(task.pretraining.backbone) else task.pretraining_seed(seed),
    }
    if frozen_backbone(task.pretraining.backbone):
        made_of["centre"] = task.pretraining.centre or CENTRED
    if task.base_classes is not None:
        made_of["base_classes"] = task.base_classes
    if on_linear(task, head):
        made_of["backbone_of"] = "linear"
    return made_of


def on_linear(task: Task, head: HeadKind) -> bool:
    """Whether a head is fitted on the features of the linear pretraining, as tasks in sessions have it."""
    own = task.pretraining.backbone == NO_BACKBONE or frozen_backbone(task.pretraining.backbone) is not None
    return task.sessions is not None and head == "cosine" and not own


def features_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """What the features under a pretraining are called on disk: a frozen backbone has the same for both heads."""
    if frozen_backbone(task.pretraining.backbone) is None:
        return pretraining_key(task, fingerprint, "linear" if on_linear(task, head) else head, seed)
    spec = task.pretraining
    made_of = {"data": fingerprint, "backbone": spec.backbone, "weights": spec.weights, "of": task.base_classes}
    data = task.dataset.name + (f"+base-classes={task.base_classes}" if task.base_classes is not None else "")
    return f"{data}-{spec.backbone}-{sha256_json(made_of)[:12]}"


def pretrain(
    home: Home,
    task: Task,
    dataset: Dataset,
    head: HeadKind,
    seed: int,
    device: torch.device,
    reporter: Reporter,
    world: World = ALONE,
    compiled: bool = False,
) -> Pretrained:
    """Loads the pretraining from the cache, takes it from the package where that has it, resumes it, or starts it.

    One that is damaged, or is another's, is set aside with a warning, and starts anew.

    Args:
        world: the processes that share each batch, all of which call this; the first one writes and takes the lock.
        compiled: let torch.compile make the network's kernels; for devices.

    Raises:
        UserError: the loss became infinite or NaN, a file may not be read or written, or the processes cannot share
            this pretraining.
        CorruptFile: the images to train on are not what was written.
    """
    key = pretraining_key(task, dataset.fingerprint, head, seed)
    folder = home.pretrained / key

    def new() -> Trainer:
        return Trainer(folder, task, dataset, head, task.pretraining_seed(seed), device, world)

    with ExitStack() as held:
        trainer = _restored(new, home, key, held, reporter) if world.first else new()
        trainer.agree()
        if not trainer.info["finished"]:
            if task.pretraining.backbone == INCLUDED:
                raise UserError(
                    f"the base classifiers of data set {dataset.name!r} come with its features, as they are: there is "
                    f"none for task {task.name}, and there are no images to train one on"
                )
            trainer.train(reporter, compiled)
    trainer.network.eval().requires_grad_(False)
    trainer.head.requires_grad_(False)
    if world.first and (told := at_chance(trainer.info["accuracy"], dataset)):
        reporter.warn(told)
    return Pretrained(key, trainer.network, trainer.head, trainer.normalise, trainer.info)


def _restored(new: Callable[[], Trainer], home: Home, key: str, held: ExitStack, reporter: Reporter) -> Trainer:
    """The training as far as it has come; one that is not finished, with its folder's lock, which ``held`` keeps."""
    trainer, folder = new(), home.pretrained / key
    with suppress(CorruptFile):  # before the lock, which a read-only folder does not grant
        trainer.restore()
        if trainer.info["finished"]:
            return trainer
    held.enter_context(locked(folder, reporter.warn))
    adopt(home, key, reporter)
    trainer = new()
    try:
        trainer.restore()
    except CorruptFile as error:
        reporter.warn(f"{error}; training starts anew, the damaged files are in {set_aside(folder)}")
        trainer = new()
    return trainer


DEVIATIONS = 2.0  # above what guessing gives, from which on it has


def at_chance(accuracy: Mapping[str, float], dataset: Dataset, then: str = "steps and rate of [pretraining]") -> str:
    """What to tell someone whose base classifier is no better than one that always guesses the commonest class.

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
    shown = ", ".join(f"{name} {100 * share:.2f}%" for name, share in accuracy.items())
    classes = len(dataset.manifest["pools"]["base/train"]["classes"])
    first = (
        f"Look at the images ('ifsl-bench data show {dataset.name}'), then at" if len(dataset.shape) == 3 else "Look at"
    )
    return (
        f"the base classifier is at chance ({shown}, of {classes} classes): what it and its backbone have learned does "
        f"not hold for other images, and no method on them means anything. {first} {then}"
    )
