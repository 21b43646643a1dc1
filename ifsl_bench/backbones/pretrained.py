"""A finished pretraining: its key, its files in the home and the package, and its network and head, opened."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.contract import Backbone, FrozenBackbone, find_backbone_and_model, is_frozen
from ifsl_bench.backbones.networks import (
    CosineHead,
    LinearHead,
    PixelNormalisation,
    make_backbone,
    make_head,
    to_channels_last,
)
from ifsl_bench.backbones.recipe import Recipe, RecipeBackbone
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, MEAN_CENTRED, NO_BACKBONE, Task
from ifsl_bench.utils.checkpoint import CheckpointFolder, read_finished_metadata
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import check_value_types

HeadKind = Literal["linear", "cosine"]
RECIPE_FIELDS = ("recipe", "steps", "passes", "knows_classes")  # recorded of backbones that a recipe trained
FROZEN_FIELDS = ("backbone", "weights", "features", "pretrained_on", "seen", "centre")  # recorded of frozen backbones
TRAINING_VERSION = 2  # raised when training starts to give other weights from equal settings
# Folders of files that come with the package, see :mod:`ifsl_bench.backbones.weights`; only a clone has the second.
PACKAGED_FOLDERS = (Path(__file__).parent / "weights", Path(str(resources.files("ifsl_bench.results"))) / "weights")
# In the folder of a pretraining that is trained although it comes with the package
PACKAGED_WEIGHTS_DISABLED_FILE = "trained-here.json"
CHANCE_DEVIATIONS = 2.0  # standard deviations by which a classifier has to be better than guessing


class HeadNotIncludedError(UserError):
    """Raised for features that come with base classifiers, where a task needs another one."""

    def __init__(self, task: Task) -> None:
        super().__init__(
            f"the base classifiers of data set {task.dataset.name!r} come with its features, as they are: there is "
            f"none for task {task.name}, and there are no images to train one on"
        )


@dataclass(frozen=True)
class PretrainedBackbone:
    """A finished pretraining.

    Attributes:
        pretraining_key: identity of everything that made it.
        network: images [B, C, H, W] -> features [B, D], in evaluation mode.
        base_classifier: the base classifier.
        normalise_images: images of a pool, uint8 [B, H, W, C], -> input of the network.
        training_record: the record: accuracy on base/val and base/test, precision, device, seconds, the type that
            weights were rounded to, and the number of processes, one after the other where a resumed one had others.
        base_feature_mean: of the features of base/train, float32 [D], which is subtracted from all features; None
            where nothing is.
    """

    pretraining_key: str
    network: Backbone
    base_classifier: LinearHead | CosineHead
    normalise_images: Callable[[Tensor], Tensor]
    training_record: dict[str, Any]
    base_feature_mean: np.ndarray | None = None

    @property
    def sha256(self) -> str:
        """Checksum of the weights, which tells two trainings with the same key apart."""
        return str(self.training_record["tensors"]["sha256"])

    @property
    def features_key(self) -> str:
        """Name of its features on disk; see :func:`make_features_key`."""
        return str(self.training_record.get("features", self.pretraining_key))

    @property
    def features_sha256(self) -> str:
        """Checksum of what its features depend on; see :func:`find_features_checksum`."""
        return find_features_checksum(self.training_record)

    def result_entry(self) -> dict[str, Any]:
        """Return the pretraining's entry in a result; accuracies in percent."""
        accuracy = {pool: round(100 * value, 4) for pool, value in self.training_record["accuracy"].items()}
        recorded = ("precision", "device", "rounded", *FROZEN_FIELDS, *RECIPE_FIELDS)
        record = {name: self.training_record[name] for name in recorded if name in self.training_record}
        if self.training_record["processes"] != [1]:
            record["processes"] = self.training_record["processes"]
        return {"key": self.pretraining_key, "sha256": self.sha256, "accuracy": accuracy, **record}


def make_pretraining_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """Return the name of a pretraining on disk: readable, and different whenever the weights could differ.

    Args:
        task: has the data set and defines how to train.
        fingerprint: of the data set.
        head: "linear" or "cosine".
        seed: of training; a task may have one pretraining for all of them.
    """
    inputs = define_pretraining(task, fingerprint, head, seed)
    trained_by = f"+{inputs['trained_by']['name']}" if "trained_by" in inputs else ""
    name = f"{_format_data_name(task)}-{task.pretraining.backbone}{trained_by}-{head}"
    return f"{name}-seed{inputs['seed']}-{sha256_json(inputs)[:12]}"


def define_pretraining(task: Task, fingerprint: str, head: HeadKind, seed: int) -> dict[str, Any]:
    """Return everything that determines the weights, for JSON.

    Args:
        task: has the data set and defines how to train.
        fingerprint: of the data set.
        head: "linear" or "cosine".
        seed: of training.
    """
    inputs: dict[str, Any] = {
        "recipe": TRAINING_VERSION,
        "data": fingerprint,
        "images": [task.dataset.mean, task.dataset.std],
        "pretraining": task.pretraining.definition_of_weights(),
        "head": head,
        "seed": 0 if is_frozen(task.pretraining) else task.pretraining_seed(seed),
    }
    if is_frozen(task.pretraining):
        inputs["centre"] = task.pretraining.centre or MEAN_CENTRED
    if task.base_classes is not None:
        inputs["base_classes"] = task.base_classes
    if task.base_order is not None:
        inputs["base_order"] = task.base_order
    if shares_linear_backbone(task, head):
        inputs["backbone_of"] = "linear"
    if task.recipe_reference is not None:
        from ifsl_bench.backbones.find_recipe import find_recipe

        inputs["trained_by"] = find_recipe(task.recipe_reference).definition(task)
    return inputs


def shares_linear_backbone(task: Task, head: HeadKind) -> bool:
    """Return whether a head is fitted on the backbone of the linear one.

    The cosine head of tasks in sessions is, and that of a recipe, which trains one backbone for both.

    Args:
        task: the task.
        head: "linear" or "cosine".
    """
    own = task.pretraining.backbone == NO_BACKBONE or is_frozen(task.pretraining)
    return (task.cosine_on_linear or task.recipe_reference is not None) and head == "cosine" and not own


def make_features_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """Return the name of the features under a pretraining on disk; a frozen backbone has the same for both heads.

    Args:
        task: has the data set and defines how to train.
        fingerprint: of the data set.
        head: "linear" or "cosine".
        seed: of training.
    """
    spec = task.pretraining
    if not is_frozen(spec):
        return make_pretraining_key(task, fingerprint, "linear" if shares_linear_backbone(task, head) else head, seed)
    inputs: dict[str, Any] = {"data": fingerprint, "backbone": spec.backbone, "weights": spec.weights}
    inputs["of"] = task.base_classes
    if not isinstance(find_backbone_and_model(spec.backbone)[0], FrozenBackbone):
        inputs["images"] = [task.dataset.mean, task.dataset.std]
    if task.base_order is not None:
        inputs["base_order"] = task.base_order
    return f"{_format_data_name(task)}-{spec.backbone}-{sha256_json(inputs)[:12]}"


def _format_data_name(task: Task) -> str:
    """Return the data set of a pretraining and the changes of its base classes, as names have them."""
    changes = (("base-classes", task.base_classes), ("base-order", task.base_order))
    return task.dataset.name + "".join(f"+{key}={value}" for key, value in changes if value is not None)


class PretrainingCheckpoint:
    """The network and classifier of a pretraining, with initial weights until :meth:`restore_from_checkpoint`.

    Args:
        folder: where its state is stored.
        task: names the backbone.
        dataset: the images.
        head: "linear" or "cosine".
        seed: of the pretraining.
        device: where network and head are.

    Attributes:
        info: the record of the state on disk; empty where there is none.

    Raises:
        UserError: mean and std do not fit the images, or the backbone does not.
    """

    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device
    ) -> None:
        self.folder, self.task, self.dataset, self.kind = folder, task, dataset, head
        self.seed, self.device, self.store = seed, device, CheckpointFolder(folder)
        self.info: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("initial weights", seed))
            network = make_backbone(task.pretraining.backbone, dataset.shape, task.pretraining.norm_momentum)
            classes = len(dataset.manifest["pools"]["base/train"]["classes"])
            if task.recipe_reference is not None:
                network = make_recipe_backbone(task, network, dataset.shape, classes)
            self.head = make_head(head, network.features, classes).to(device)
        self.network = to_channels_last(network, device)
        self.normalise = PixelNormalisation(task.dataset, dataset.shape, device)

    @property
    def held_out_pools(self) -> list[str]:
        """Names of the pools on which the accuracy is measured."""
        return [name for name in ("base/val", "base/test") if self.dataset.has_pool(name)]

    def restore_from_checkpoint(self) -> None:
        """Load the state on disk, if there is one.

        Raises:
            CorruptFile: it is damaged or of another pretraining; this object is of no use then.
            UserError: it may not be read.
        """
        state = self.store.load()
        if state is None:
            return
        self._check_info(state.metadata)
        self.info = state.metadata
        try:
            self.load_tensors(state.tensors)
        except (RuntimeError, KeyError) as error:
            raise CorruptFile(f"{self.folder} does not fit the network: {error}") from error

    def _check_info(self, info: dict[str, Any]) -> None:
        """Raise :class:`CorruptFile` where a state is not of this pretraining."""
        path, number = self.store.metadata_file, (int, float)
        kinds = {"epoch": int, "seconds": number, "seed": int, "bf16": bool, "precision": str, "device": str}
        check_value_types(path, info, {"finished": bool, "key": str, "processes": list, **kinds})
        if info["key"] != self.folder.name or info["seed"] != self.seed:
            raise CorruptFile(f"{path} is of another pretraining: {info['key']}, seed {info['seed']}")
        if info["finished"]:
            check_value_types(path, info, {"accuracy": dict})
            check_value_types(path, info["accuracy"], dict.fromkeys(self.held_out_pools, number))

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the weights of network and head from stored tensors, by name."""
        own = self.network.state_dict()
        for prefix, module in (("network.", self.network), ("head.", self.head)):
            part = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            if module is self.network and isinstance(module, RecipeBackbone) and self.info.get("finished"):
                part |= {name: own[name] for name in own if module.is_training_only(name)}
            module.load_state_dict(part)

    def to_pretrained_backbone(self, reporter: Reporter) -> PretrainedBackbone:
        """Freeze network and head and return them; warn of a base classifier that is no better than chance."""
        self.network.eval().requires_grad_(False)
        self.head.requires_grad_(False)
        warning = make_chance_warning(self.info["accuracy"], self.dataset)
        if warning:
            reporter.warn(warning)
        info = self.info
        if isinstance(self.network, RecipeBackbone):
            info = {**info, **make_recipe_record(self.task, self.network.recipe)}
        return PretrainedBackbone(self.folder.name, self.network, self.head, self.normalise, info)


def make_recipe_backbone(task: Task, network: Backbone, shape: tuple[int, ...], classes: int) -> RecipeBackbone:
    """Make the recipe of a task on a network, and return it as what turns images into features.

    Args:
        task: names the recipe.
        network: the backbone.
        shape: (H, W, C) of an image.
        classes: the number K of base classes.

    Raises:
        UserError: the data are features, or as of :func:`ifsl_bench.backbones.find_recipe.make_recipe`.
    """
    from ifsl_bench.backbones.find_recipe import (
        count_novel_classes_of_task,
        find_recipe,
        make_recipe,
        naming_recipe_errors,
    )

    assert task.recipe_reference is not None
    if len(shape) != 3 or task.pretraining.backbone == INCLUDED_BACKBONE:
        raise UserError(f"recipe {task.recipe_reference} trains on images, and the data of {task.name} are features")
    choice = find_recipe(task.recipe_reference)
    recipe = make_recipe(choice, network, classes, count_novel_classes_of_task(task))
    with naming_recipe_errors(choice):
        return RecipeBackbone(recipe, (shape[2], *shape[:2]))


def steps_and_passes(task: Task, recipe: Recipe) -> tuple[int, float]:
    """Return the number of steps of a training, and the passes of the backbone that a step takes for each image.

    All recipes have the passes of the task's own steps, or the multiple that their option ``passes`` names.

    Args:
        task: has the steps of plain cross-entropy.
        recipe: says how many passes a step takes.
    """
    from ifsl_bench.backbones.find_recipe import find_recipe

    each = recipe.passes_per_step
    multiple = 1.0 if task.recipe_reference is None else find_recipe(task.recipe_reference).passes_multiple
    return max(1, round(task.pretraining.steps * multiple / each)), each


def make_recipe_record(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Return what a result records of the recipe that trained its backbone.

    Args:
        task: names the recipe.
        recipe: the recipe itself.
    """
    from ifsl_bench.backbones.find_recipe import find_recipe

    assert task.recipe_reference is not None
    choice, (steps, each) = find_recipe(task.recipe_reference), steps_and_passes(task, recipe)
    return {"recipe": choice.label, "steps": steps, "passes": each, "knows_classes": choice.knows_classes}


def open_pretrained(
    home: Paths, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device, reporter: Reporter
) -> PretrainedBackbone | None:
    """Open a finished pretraining of the home; return None where there is none, or where it is damaged.

    It takes no lock, which a read-only folder does not grant.

    Args:
        home: where pretrainings are kept.
        task: defines how to train.
        dataset: the images.
        head: "linear" or "cosine".
        seed: of training; a task may have one pretraining for all of them.
        device: where network and head will be.
        reporter: hears of a base classifier that is at chance.

    Raises:
        UserError: a file may not be read, or the images do not suit the task's mean and std.
    """
    folder = home.pretrained / make_pretraining_key(task, dataset.fingerprint, head, seed)
    stored = PretrainingCheckpoint(folder, task, dataset, head, task.pretraining_seed(seed), device)
    try:
        stored.restore_from_checkpoint()
    except CorruptFile:
        return None
    return stored.to_pretrained_backbone(reporter) if stored.info.get("finished") else None


def find_packaged_file(home: Paths, key: str) -> Path | None:
    """Return the file of a pretraining that comes with the package, or was fetched; None where there is none.

    Args:
        home: where fetched files are.
        key: of the pretraining.
    """
    paths = (folder / f"{key}.safetensors" for folder in (home.weights, *PACKAGED_FOLDERS))
    return next((path for path in paths if path.is_file()), None)


def has_pretraining(home: Paths, key: str) -> bool:
    """Return whether a home has anything of a pretraining.

    Args:
        home: where pretrainings are kept.
        key: of the pretraining.
    """
    return any(
        os.path.lexists(home.pretrained / key / name) for name in ("checkpoint.json", PACKAGED_WEIGHTS_DISABLED_FILE)
    )


def is_package_used(home: Paths, key: str) -> bool:
    """Return whether the package has the weights of a pretraining, and the home has nothing of it.

    Args:
        home: where pretrainings are kept.
        key: of the pretraining.
    """
    return find_packaged_file(home, key) is not None and not has_pretraining(home, key)


def read_weights_sha256(home: Paths, key: str) -> str | None:
    """Return the checksum of the weights of a finished pretraining in the cache; None where there is none.

    It is None, too, of a head on the backbone of another pretraining that has other weights by now.

    Args:
        home: where pretrainings are kept.
        key: of the pretraining.
    """
    info = read_finished_metadata(home.pretrained / key)
    if info and "features_sha256" in info and read_weights_sha256(home, info["features"]) != info["features_sha256"]:
        return None
    return str(info["tensors"]["sha256"]) if info else None


def read_features_sha256(home: Paths, key: str) -> str | None:
    """Return :func:`find_features_checksum` of a finished pretraining in the cache; None where there is none.

    Args:
        home: where pretrainings are kept.
        key: of the pretraining.
    """
    info = read_finished_metadata(home.pretrained / key)
    return find_features_checksum(info) if info else None


def find_features_checksum(info: Mapping[str, Any]) -> str:
    """Return the checksum of what the features of a pretraining depend on, from its record.

    It is the weights' own; a frozen backbone has its file's, and a second head its backbone's.
    """
    own = info["tensors"]["sha256"]
    return str(info.get("weights") or info.get("features_sha256") or own)


def format_accuracies(accuracy: Mapping[str, float]) -> str:
    """Format the accuracies in pools for a message."""
    return ", ".join(f"{pool} {100 * share:.2f}%" for pool, share in accuracy.items())


def make_chance_warning(
    accuracy: Mapping[str, float], dataset: Dataset, then: str = "steps and rate of [pretraining]"
) -> str | None:
    """Return a warning of a base classifier that is no better than one that always guesses the commonest class.

    Args:
        accuracy: share of images labelled right, of each pool that it was measured on.
        dataset: has the pools.
        then: what the user should look at after the images.

    Returns:
        A sentence; None where it is better in all pools together, by :data:`CHANCE_DEVIATIONS` standard deviations.
    """
    hits = guessed = variance = 0.0
    for name, share in accuracy.items():
        pool = dataset.pool(name)
        chance = float(np.diff(pool.class_starts).max()) / len(pool)
        hits += share * len(pool)
        guessed += chance * len(pool)
        variance += chance * (1 - chance) * len(pool)
    if not accuracy or hits > guessed + CHANCE_DEVIATIONS * math.sqrt(variance):
        return None
    classes = len(dataset.manifest["pools"]["base/train"]["classes"])
    first = f"Look at the images ('ifsl-bench data show {dataset.name}'), then at" if dataset.has_images else "Look at"
    return (
        f"the base classifier is at chance ({format_accuracies(accuracy)}, of {classes} classes): what it and its "
        f"backbone have learned does not hold for other images, and no method on them means anything. {first} {then}"
    )
