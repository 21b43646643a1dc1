"""The one form in which every data set lies on disk, and how it is opened and verified; :mod:`.writer` builds it.

A data set is a folder::

    manifest.json            names, shapes, checksums, statistics, recipe, fingerprint
    base-train.images.npy    uint8 [n, H, W, C], or float32 [n, D] for features; memory-mapped, never loaded whole
    base-train.labels.npy    int64 [n], ascending, 0..C-1
    ...                      the same for the other pools

The fingerprint is a SHA-256 over the content (pool names, class names, images, labels, and whether it is partial), so
two copies with equal fingerprints give equal results, however they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import read_json, sha256_file

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
    def partial(self) -> bool:
        """Whether it was made from less than its source should hold."""
        return bool(self.manifest.get("about", {}).get("partial", False))

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
