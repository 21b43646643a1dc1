"""The one form in which every data set lies on disk, and how it is built, opened and verified.

A data set is a folder::

    manifest.json            names, shapes, checksums, statistics, recipe, fingerprint
    base-train.images.npy    uint8 [n, H, W, C], or float32 [n, D] for features; memory-mapped, never loaded whole
    base-train.labels.npy    int64 [n], ascending, 0..C-1
    ...                      the same for the other pools

The fingerprint is a SHA-256 over the content (pool names, class names, images, labels), so two copies with equal
fingerprints give equal results, however they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.errors import CorruptFile, UserError
from ifsl_bench.store import building, create_array, disk_errors, read_json, sha256_file, sha256_json, write_json

POOLS = ("base/train", "base/val", "base/test", "novel/train", "novel/val", "novel/test")
FORMAT = 1


@dataclass(frozen=True)
class Pool:
    """Labelled images of one role.

    Attributes:
        images: uint8 [n, H, W, C], or float32 [n, D] for frozen features; a read-only memory map.
        labels: int64 [n], ascending.
        classes: the name of each label.
        starts: int64 [C + 1], class c is rows ``starts[c]:starts[c + 1]``.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A prepared data set, opened for reading."""

    name: str
    folder: Path
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C) of an image, or (D,) of a feature vector."""
        return tuple(next(iter(self.manifest["pools"].values()))["shape"][1:])

    def has(self, pool: str) -> bool:
        return pool in self.manifest["pools"]

    def pool(self, name: str) -> Pool:
        """Opens a pool; sizes and headers are checked, the full checksum only by :func:`verify`."""
        if not self.has(name):
            raise UserError(f"data set {self.name!r} has no pool {name}; it has {', '.join(self.manifest['pools'])}")
        entry = self.manifest["pools"][name]
        images = _open(self.folder / entry["images"]["file"], entry["images"], tuple(entry["shape"]), entry["dtype"])
        labels = _open(self.folder / entry["labels"]["file"], entry["labels"], (entry["shape"][0],), "int64")
        if (np.diff(labels) < 0).any() or labels[0] != 0 or labels[-1] != len(entry["classes"]) - 1:
            raise CorruptFile(
                f"{self.folder / entry['labels']['file']} does not hold the sorted labels that were written"
            )
        counts = np.bincount(labels, minlength=len(entry["classes"]))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Pool(name, images, np.asarray(labels), tuple(entry["classes"]), starts)


def _open(path: Path, entry: dict[str, Any], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    if size != entry["bytes"]:
        raise CorruptFile(f"{path} has {size} bytes, {entry['bytes']} were written: it is cut short or changed")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CorruptFile(f"{path} has a damaged header ({error})") from error
    if array.shape != shape or array.dtype != np.dtype(dtype):
        found = f"{array.dtype}{list(array.shape)}"
        raise CorruptFile(f"{path} holds {found}, the manifest says {dtype}{list(shape)}")
    return array


class Writer:
    """Collects the pools of a data set under construction; see :func:`build`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: dict[str, dict[str, Any]] = {}

    @contextmanager
    def pool(
        self, name: str, labels: np.ndarray, classes: tuple[str, ...], shape: tuple[int, ...], dtype: str = "uint8"
    ) -> Iterator[np.ndarray]:
        """A pool's images, to be filled inside the ``with`` block, in any order.

        Args:
            name: one of :data:`POOLS`.
            labels: integers [n], ascending, each of ``0..len(classes)-1`` at least once.
            classes: names of the classes; the base pools must share them.
            shape: (H, W, C) of an image, or (D,) of a feature vector.
            dtype: "uint8" for images, "float32" for features.
        """
        labels = np.asarray(labels, dtype=np.int64)
        _check_pool(name, labels, classes)
        stem = name.replace("/", "-")
        images_file, labels_file = f"{stem}.images.npy", f"{stem}.labels.npy"
        images = create_array(self.folder / images_file, (len(labels), *shape), dtype)
        yield images
        images.flush()
        np.save(self.folder / labels_file, labels)
        self.pools[name] = {
            "shape": list(images.shape),
            "dtype": dtype,
            "classes": list(classes),
            "statistics": _statistics(images, labels),
            "images": _describe(self.folder / images_file),
            "labels": _describe(self.folder / labels_file),
        }
        del images


def _check_pool(name: str, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    if name not in POOLS:
        raise UserError(f"no pool is called {name!r}; the pools are {', '.join(POOLS)}")
    if labels.ndim != 1 or len(labels) == 0:
        raise UserError(f"pool {name}: labels must be a list of at least one integer, found shape {labels.shape}")
    if (np.diff(labels) < 0).any():
        raise UserError(f"pool {name}: images must be sorted by label")
    present = np.unique(labels)
    if len(present) != len(classes) or present[0] != 0 or present[-1] != len(classes) - 1:
        raise UserError(f"pool {name}: {len(classes)} class names, but {len(present)} different labels")
    if len(set(classes)) != len(classes):
        raise UserError(f"pool {name}: class names are not unique")


def _statistics(images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Per-channel mean and standard deviation in the units stored (0..255 for images), and images per class."""
    axes = tuple(range(images.ndim - 1)) if images.ndim == 4 else (0,)
    total = np.zeros(images.shape[-1] if images.ndim == 4 else 1)
    square = np.zeros_like(total)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024].astype(np.float64)
        if images.ndim != 4:
            block = block.reshape(-1, 1)
            axes = (0,)
        total += block.sum(axes)
        square += (block**2).sum(axes)
    n = images.size / len(total)
    mean = total / n
    counts = np.bincount(labels)
    return {
        "mean": [round(float(v), 6) for v in mean],
        "std": [round(float(v), 6) for v in np.sqrt(np.maximum(square / n - mean**2, 0))],
        "classes": len(counts),
        "images": len(labels),
        "fewest": int(counts.min()),
        "most": int(counts.max()),
    }


def _describe(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def build(folder: Path, name: str, recipe: str, fill: Callable[[Writer], None], about: dict[str, Any]) -> Dataset:
    """Builds a data set into ``folder``; it appears there whole or not at all. The caller holds ``locked(folder)``.

    Args:
        recipe: identity of what ``fill`` makes; a cached copy with another recipe is out of date.
        fill: writes the pools.
        about: what else to record in the manifest (source, whether it is partial, ...).
    """
    with building(folder) as partial, disk_errors(folder):
        writer = Writer(partial)
        fill(writer)
        _check_sides(writer.pools)
        content = {
            pool: [entry["images"]["sha256"], entry["labels"]["sha256"], entry["classes"]]
            for pool, entry in writer.pools.items()
        }
        manifest = {
            "format": FORMAT,
            "name": name,
            "recipe": recipe,
            "fingerprint": sha256_json(content),
            "about": about,
            "pools": writer.pools,
        }
        write_json(partial / "manifest.json", manifest)
    return open_dataset(folder)


def _check_sides(pools: dict[str, dict[str, Any]]) -> None:
    base = [pools[p]["classes"] for p in POOLS[:3] if p in pools]
    if any(classes != base[0] for classes in base):
        raise UserError("the base pools must have the same classes in the same order")
    sides = [("base", set(base[0]))] if base else []
    sides += [(p, set(pools[p]["classes"])) for p in POOLS[3:] if p in pools]
    for i, (left, mine) in enumerate(sides):
        for right, other in sides[i + 1 :]:
            if both := mine & other:
                raise UserError(f"class {sorted(both)[0]!r} is in {left} and in {right}; the sides must be disjoint")


def open_dataset(folder: Path) -> Dataset:
    """Opens a prepared data set.

    Raises:
        CorruptFile: the manifest is damaged or of another format version.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise CorruptFile(f"{folder} is in format {manifest.get('format')!r}, this version reads {FORMAT}")
    if missing := {"name", "recipe", "fingerprint", "pools"} - manifest.keys():
        raise CorruptFile(f"{folder / 'manifest.json'} lacks {', '.join(sorted(missing))}")
    dataset = Dataset(manifest["name"], folder, manifest)
    try:
        if not manifest["pools"]:
            raise ValueError("it lists no pools")
        for pool in manifest["pools"]:
            dataset.pool(pool)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CorruptFile(f"{folder / 'manifest.json'} is damaged ({type(error).__name__}: {error})") from error
    return dataset


def verify(dataset: Dataset, advance: Callable[[int], None] | None = None) -> None:
    """Compares the full checksum of every file with the manifest.

    Raises:
        CorruptFile: names the first file that differs.
    """
    for entry in dataset.manifest["pools"].values():
        for part in ("images", "labels"):
            path = dataset.folder / entry[part]["file"]
            if sha256_file(path, advance) != entry[part]["sha256"]:
                raise CorruptFile(f"{path} is not what was written: its checksum differs")
