"""Features, computed once per checkpoint and pool into a memory-mapped bank, and used by every method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbone.images import batches, crop_and_flip
from ifsl_bench.backbone.pretrain import Pretrained
from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import (
    Home,
    building,
    create_array,
    locked,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
)
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.plugin.method import Base
from ifsl_bench.protocol.task import Task

FORMAT = 1
BATCH = 256


@dataclass(frozen=True)
class FeaturePool:
    """Features of a pool.

    Attributes:
        name: the pool's name.
        features: float32 [V * n, D], view v of image i in row ``v * n + i``.
        base_logits: float32 [V * n, K] of the frozen base classifier.
        starts: int64 [C + 1], images of class c are ``starts[c]:starts[c + 1]``.
        views: V, augmented copies of each image; 1 means the plain images.
    """

    name: str
    features: Tensor
    base_logits: Tensor
    starts: np.ndarray
    views: int

    @property
    def images(self) -> int:
        return int(self.starts[-1])


def bank_folder(home: Home, key: str, pool: str, task: Task, views: int = 1) -> Path:
    """Where the features of a pool under a pretraining are kept."""
    name = pool.replace("/", "-")
    if views > 1:
        spec = task.pretraining
        augmented = sha256_json([views, spec.crop_padding, spec.flip])[:6]
        name = f"{name}-views{views}-{augmented}"
    return home.features / key / name


def is_computed(folder: Path, pretraining_sha256: str | None) -> bool:
    """Whether features of a pretraining with these weights are there."""
    try:
        return bool(read_json(folder / "bank.json").get("pretraining_sha256") == pretraining_sha256)
    except (OSError, CorruptFile):
        return False


def compute_features(
    home: Home,
    task: Task,
    dataset: Dataset,
    pretrained: Pretrained,
    name: str,
    device: torch.device,
    reporter: Reporter,
    views: int = 1,
) -> np.ndarray:
    """Features of a pool, from the bank or into it.

    Args:
        views: 1 for the plain images; more for that many augmented views of each image (padding, crop, flip as in
            pretraining), as the released code augments in meta-training.

    Returns:
        float32 [views * n, D], a read-only memory map.
    """
    pool = dataset.pool(name)
    if pool.images.ndim == 2:
        return pool.images
    folder = bank_folder(home, pretrained.key, name, task, views)
    shape = (views * len(pool), pretrained.network.features)
    with locked(folder, reporter.say):
        if (folder / "bank.json").exists():
            try:
                return _open(folder, shape, pretrained.sha256)
            except CorruptFile as error:
                reporter.warn(f"{error}; computing it again")
        with building(folder) as partial:
            bank = create_array(partial / "features.npy", shape, "float32")
            title = f"features of {name}" + (f", {views} views" if views > 1 else "")
            with reporter.stage(title, shape[0]) as stage:
                at = 0
                for block in _forward(task, pretrained, pool, device, views):
                    bank[at : at + len(block)] = block
                    at += len(block)
                    stage.advance(len(block))
            bank.flush()
            del bank
            entry = {
                "format": FORMAT,
                "shape": list(shape),
                "sha256": sha256_file(partial / "features.npy"),
                "pretraining_sha256": pretrained.sha256,
            }
            write_json(partial / "bank.json", entry)
        return _open(folder, shape, pretrained.sha256)


def _forward(task: Task, pretrained: Pretrained, pool: Pool, device: torch.device, views: int) -> Iterator[np.ndarray]:
    """Features [B, D] of batch after batch, all images in one view after the other."""
    starts = range(0, len(pool), BATCH)
    rows = [np.arange(start, min(start + BATCH, len(pool))) for start in starts]
    seeds = iter([seed_of("view", pool.name, view, start) for view in range(views) for start in starts])

    def augment(images: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(next(seeds))
        return crop_and_flip(images, task.pretraining.crop_padding, task.pretraining.flip, generator)

    with closing(batches(pool.images, rows * views, device, augment if views > 1 else None)) as loaded:
        for images in loaded:
            with torch.inference_mode():
                features = pretrained.network(pretrained.normalise(images)).float()
            yield features.cpu().numpy()


def _open(folder: Path, shape: tuple[int, int], pretraining: str) -> np.ndarray:
    entry = read_json(folder / "bank.json")
    path = folder / "features.npy"
    if entry.get("format") != FORMAT:
        raise CorruptFile(f"{folder} is in format {entry.get('format')!r}, this version reads {FORMAT}")
    if entry.get("pretraining_sha256") != pretraining:
        raise CorruptFile(f"{folder} holds features of other weights than the checkpoint's: it was trained again")
    if not path.exists() or sha256_file(path) != entry["sha256"]:
        raise CorruptFile(f"{path} is not what was written: it is cut short or changed")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != np.float32:
        raise CorruptFile(f"{path} holds {array.dtype}{list(array.shape)}, expected float32{list(shape)}")
    return array


def base_classifier(pretrained: Pretrained, features: np.ndarray, pool: Pool) -> Base:
    """The frozen classifier and the base prototypes, on the CPU.

    Args:
        features: [n, D] of base/train.
        pool: base/train.
    """
    sums = np.stack(
        [features[a:b].sum(0, dtype=np.float64) for a, b in zip(pool.starts, pool.starts[1:], strict=False)]
    )
    prototypes = torch.from_numpy(sums / np.diff(pool.starts)[:, None]).float()  # [K, D]
    head = pretrained.head
    weight = head.weight.detach().float().cpu()
    bias = head.bias.detach().float().cpu() if head.scale is None else torch.zeros(len(weight))
    scale = 1.0 if head.scale is None else float(head.scale)
    return Base(weight, bias, prototypes, scale)


def feature_pool(features: np.ndarray, pool: Pool, base: Base, device: torch.device) -> FeaturePool:
    """A pool's features with the base logits of all its rows; stays a memory map on the CPU."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and so is our use of it
        rows = torch.from_numpy(features).to(device)
    weight, bias = base.weight.to(device), base.bias.to(device)
    logits = torch.cat([F.linear(block, weight, bias) for block in rows.split(1 << 16)])
    return FeaturePool(pool.name, rows, logits, pool.starts, len(features) // len(pool))
