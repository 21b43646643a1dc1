"""Features, computed once per checkpoint and pool into a memory-mapped bank, and used by every method."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbones.device import disable_tf32
from ifsl_bench.backbones.networks import FirstStages
from ifsl_bench.backbones.pretrained import PretrainedBackbone
from ifsl_bench.backbones.recipe import RecipeBackbone
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.plugin.method import Base
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine_path, record_last_use, sha256_file, sha256_json
from ifsl_bench.utils.locks import atomic_folder, get_or_create, hold_lock
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import create_array, open_array, read_checksummed, write_checksummed

BATCH_SIZE = 256


@dataclass(frozen=True)
class FeaturePool:
    """Features of a pool in memory, with their base logits.

    Attributes:
        pool_name: the pool's name.
        features: float32 [V * n, D], view v of image i in row ``v * n + i``; of methods that see images or maps,
            their numbers, [V * n, P].
        base_logits: float32 [V * n, K] of the frozen base classifier.
        class_starts: int64 [C + 1], images of class c are ``starts[c]:starts[c + 1]``.
        n_views: V, augmented copies of each image; 1 means the plain images.
    """

    pool_name: str
    features: Tensor
    base_logits: Tensor
    class_starts: np.ndarray
    n_views: int

    @property
    def n_images(self) -> int:
        """Number n of images."""
        return int(self.class_starts[-1])


def feature_folder(
    home: Paths, key: str, pool: str, task: Task, n_views: int = 1, fingerprint_prefix: str = "", stage: int = 0
) -> Path:
    """Return the folder of the features of a pool under a pretraining.

    Args:
        home: where features are kept.
        key: see :func:`ifsl_bench.backbones.pretrained.make_features_key`.
        pool: name of the pool.
        task: defines how views are augmented.
        n_views: 1 for the plain images, more for augmented copies.
        fingerprint_prefix: of the data set that the pool comes from, which tells pools of one name apart; see
            :meth:`ifsl_bench.data.pools.Dataset.fingerprint_prefix_of_pool`.
        stage: of maps, as of :func:`compute_features`.
    """
    name = pool.replace("/", "-") + (f"-from-{fingerprint_prefix}" if fingerprint_prefix else "")
    name += f"-maps{stage}" if stage else ""
    if n_views > 1:
        spec = task.pretraining
        augmented = sha256_json([n_views, spec.crop_padding, spec.flip])[:6]
        name = f"{name}-views{n_views}-{augmented}"
    return home.features / key / name


def read_feature_record(folder: Path) -> dict[str, Any]:
    """Return the record of the features in a folder; an empty one where it is missing or damaged."""
    try:
        return read_checksummed(folder / "bank.json")
    except (OSError, CorruptFile):
        return {}


def compute_features(
    home: Paths,
    task: Task,
    dataset: Dataset,
    pretrained: PretrainedBackbone,
    name: str,
    device: torch.device,
    reporter: Reporter,
    n_views: int = 1,
    device_description: str = "",
    stage: int = 0,
) -> np.ndarray:
    """Return the features of a pool, from the cache or computed.

    Args:
        home: where features are kept.
        task: defines how views are augmented.
        dataset: has the pool.
        pretrained: network and normalisation.
        name: of the pool.
        device: where to compute.
        reporter: shows how far it is.
        n_views: 1 for the plain images; more for that many augmented views of each image (padding, crop, flip as in
            pretraining), as the released code augments in meta-training.
        device_description: description of the device, for the record.
        stage: for maps, those behind so many stages of the network; below 0, behind all but so many.

    Returns:
        float32 [views * n, D], of maps float16 [views * n, C, H, W]: a read-only memory map, checked in full.

    Raises:
        CorruptFile: the images, or features that the data set consists of, are not what was written.
        UserError: a file may not be read or written; or the network has no such stage, or maps too large for float16.
    """
    pool = dataset.pool(name)
    if pool.images.ndim == 2:
        dataset.check_image_checksum(name)
        return pool.images
    folder = feature_folder(
        home, pretrained.features_key, name, task, n_views, dataset.fingerprint_prefix_of_pool(name), stage
    )
    shape, dtype, what = (n_views * len(pool), pretrained.network.features), "float32", "features"
    if stage:
        pretrained = replace(pretrained, network=FirstStages(pretrained.network, stage))
        one = replace(pool, images=pool.images[:1], labels=pool.labels[:1])
        (first,) = _compute_batches(task, pretrained, one, device, 1)
        shape, dtype, what = (n_views * len(pool), *first.shape[1:]), "float16", "maps"

    def read_cached() -> np.ndarray | None:
        return _open_cached_features(folder, shape, dtype, pretrained.features_sha256)

    def compute() -> np.ndarray:
        if os.path.lexists(folder):
            reporter.warn(f"{folder} holds {what} of other weights; computing them again")
        dataset.check_image_checksum(name)
        with atomic_folder(folder) as partial:
            bank = create_array(partial / "features.npy", shape, dtype)
            title = f"{what} of {name}" + (f", {n_views} views" if n_views > 1 else "")
            with reporter.report_stage(title, shape[0]) as stage:
                at = 0
                for block in _compute_batches(task, pretrained, pool, device, n_views):
                    if stage and np.abs(block).max() > np.finfo(np.float16).max:
                        raise UserError(f"the maps behind stage {stage} are too large for float16; take another stage")
                    bank[at : at + len(block)] = block
                    at += len(block)
                    stage.advance(len(block))
            bank.flush()
            entry = {
                "of": f"{folder.parent.name}/{folder.name}",
                "shape": list(shape),
                "sha256": sha256_file(partial / "features.npy"),
                "pretraining_sha256": pretrained.features_sha256,
                "place": device_description,
            }
            write_checksummed(partial / "bank.json", entry)
        features = read_cached()
        assert features is not None
        return features

    return get_or_create(folder, read_cached, compute, reporter.warn, "it is computed again")


def _compute_batches(
    task: Task, pretrained: PretrainedBackbone, pool: Pool, device: torch.device, n_views: int
) -> Iterator[np.ndarray]:
    """Yield features [B, D] of batch after batch, all images in one view after the other.

    They are copied one batch late: a device computes the next while the host waits for these.
    """
    from ifsl_bench.backbones.images import apply_crops, draw_crops, load_batches

    starts = range(0, len(pool), BATCH_SIZE)
    rows = [np.arange(start, min(start + BATCH_SIZE, len(pool))) for start in starts]
    seeds = iter([derive_seed("view", pool.name, view, start) for view in range(n_views) for start in starts])

    def augment(images: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(next(seeds))
        return apply_crops(
            images, draw_crops(len(images), task.pretraining.crop_padding, task.pretraining.flip, generator)
        )

    before = None
    with closing(load_batches(pool.images, rows * n_views, device, augment if n_views > 1 else None)) as loaded:
        for images in loaded:
            with torch.inference_mode(), disable_tf32():
                features = pretrained.network(pretrained.normalise_images(images)).float()
            if before is not None:
                yield before.cpu().numpy()
            before = features
    if before is not None:
        yield before.cpu().numpy()


def _open_cached_features(folder: Path, shape: tuple[int, ...], dtype: str, pretraining: str) -> np.ndarray | None:
    """Open the features in a folder; None where there are none, or only other weights' features."""
    if not os.path.lexists(folder):
        return None
    try:
        entry = read_checksummed(folder / "bank.json")
    except FileNotFoundError:
        raise CorruptFile(f"{folder} lacks bank.json") from None
    path = folder / "features.npy"
    if entry.get("of") != f"{folder.parent.name}/{folder.name}":
        raise CorruptFile(f"{folder} holds the features of {entry.get('of')}")
    if entry.get("pretraining_sha256") != pretraining:
        return None
    array = open_array(path, shape, dtype)
    if sha256_file(path) != entry.get("sha256"):
        raise CorruptFile(f"{path} is not what was written: its checksum differs")
    record_last_use(folder / "bank.json")
    return array


def make_base_classifier(pretrained: PretrainedBackbone, moments: ClassMoments) -> Base:
    """Make the base classifier of methods, with statistics of the base classes, on the CPU, in float32.

    Args:
        pretrained: has the head, and the mean that is subtracted.
        moments: of base/train, before the mean is subtracted.
    """
    head = pretrained.base_classifier
    weight = head.weight.detach().float().cpu()
    bias = head.bias.detach().float().cpu() if head.scale is None else torch.zeros(len(weight))
    scale = 1.0 if head.scale is None else float(head.scale)
    statistics = (
        subtract_feature_mean(moments.means, pretrained.base_feature_mean),
        moments.counts,
        moments.covariance,
    )
    means, counts, covariance = (torch.from_numpy(x).float() for x in statistics)
    learned = pretrained.network.recipe.extras() if isinstance(pretrained.network, RecipeBackbone) else {}
    extras = {name: x.detach().float().cpu() for name, x in learned.items()}
    return Base(weight, bias, means, scale, counts, covariance, extras=extras)


def subtract_feature_mean(features: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
    """Subtract the mean of base/train from features; the type stays.

    Args:
        features: [n, D].
        mean: [D], or None, which leaves them as they are.
    """
    return features if mean is None else features - mean.astype(features.dtype)


def make_feature_pool(
    features: np.ndarray, pool: Pool, base: Base, device: torch.device, mean: np.ndarray | None = None
) -> FeaturePool:
    """Make a pool of features with the base logits of all rows; on the CPU they stay a memory map, without a mean.

    Args:
        features: float32 [views * n, D].
        pool: of the images.
        base: gives the logits.
        device: where the pool is used.
        mean: see :func:`subtract_feature_mean`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and so is our use of it
        rows = torch.from_numpy(subtract_feature_mean(features, mean)).to(device)
    weight, bias = base.weight.to(device), base.bias.to(device)
    logits = torch.cat([F.linear(block, weight, bias) for block in rows.split(1 << 16)])
    return FeaturePool(pool.name, rows, logits, pool.class_starts, len(features) // len(pool))


def flatten_images_to_rows(images: np.ndarray) -> Tensor:
    """Return the numbers of images or maps, [n, P]; they stay a memory map."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and so is our use of it
        return torch.from_numpy(images.reshape(len(images), -1))


def parse_seen_stage(sees: str) -> int:
    """Return N of ``maps:N``, what a method sees; 0 where it sees features or images."""
    return int(sees.removeprefix("maps:")) if sees.startswith("maps:") else 0


@dataclass(frozen=True)
class ClassMoments:
    """Statistics of the features of a pool's classes.

    Attributes:
        means: float64 [K, D], mean feature of each class.
        counts: int64 [K], images of each class.
        covariance: float64 [D, D], pooled within the classes: the mean over all images of (x - m)(x - m)^T, m being the
            mean of the image's class. Divided by the number of images, not less the number of classes.
    """

    means: np.ndarray
    counts: np.ndarray
    covariance: np.ndarray

    @staticmethod
    def from_features(features: np.ndarray, starts: np.ndarray) -> ClassMoments:
        """Compute the moments, in float64.

        Args:
            features: [n, D].
            starts: int64 [K + 1], where each class begins.
        """
        counts = np.diff(starts).astype(np.int64)
        classes = list(pairwise(starts))
        means = np.stack([features[a:b].sum(0, dtype=np.float64) for a, b in classes]) / counts[:, None]
        covariance = np.zeros((features.shape[1],) * 2)
        for (a, b), mean in zip(classes, means, strict=True):
            apart = torch.from_numpy(features[a:b] - mean)  # float64
            covariance += (apart.T @ apart).numpy()
        return ClassMoments(means, counts, covariance / counts.sum())


def compute_class_moments(folder: Path, features: np.ndarray, starts: np.ndarray, reporter: Reporter) -> ClassMoments:
    """Return the moments of features, from the cache or computed.

    Args:
        folder: of the features; where a data set consists of features there is none, and nothing is cached.
        features: float32 [n, D].
        starts: int64 [K + 1], where each class begins.
        reporter: hears of damaged files.
    """
    try:
        checksum = str(read_checksummed(folder / "bank.json")["sha256"])
    except FileNotFoundError:
        return ClassMoments.from_features(features, starts)
    store = CheckpointFolder(folder / "moments")
    try:
        state = store.load()
    except CorruptFile as error:
        reporter.warn(f"{error}; they are computed again, the old files are {quarantine_path(store.folder)}")
        state = None
    if state is not None and state.metadata.get("features_sha256") == checksum:
        return ClassMoments(**{name: values.numpy() for name, values in state.tensors.items()})
    moments = ClassMoments.from_features(features, starts)
    with suppress(UserError), hold_lock(store.folder):  # a folder that is shared to be read
        info = store.read_metadata()
        if info is None or info.get("features_sha256") != checksum:  # no other process has saved them
            tensors = {name: torch.from_numpy(values) for name, values in vars(moments).items()}
            store.write_tensors(tensors, {"features_sha256": checksum})
    return moments
