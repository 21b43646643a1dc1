"""Data sets on disk: how they are opened and verified; :mod:`.writer` builds them.

A data set is a folder::

    manifest.json            names, shapes, checksums, statistics, recipe, fingerprint
    base-train.images.npy    uint8 [n, H, W, C], or float32 [n, D] for features; memory-mapped, never loaded whole
    base-train.labels.npy    int64 [n], ascending, 0..C-1
    ...                      the same for the other pools

The fingerprint is a SHA-256 over the content (pool names, class names, images, labels, and whether it is partial), so
two copies with equal fingerprints give equal results, however they were made. Images are checked by
:meth:`Dataset.check_image_checksum` when something is computed from them, and by :func:`verify_checksums`; all
else, on opening.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import open_file, sha256_file, sha256_json, translate_read_errors
from ifsl_bench.utils.serialization import check_value_types, open_array, read_checksummed

POOL_NAMES = ("base/train", "base/val", "base/test", "novel/train", "novel/val", "novel/test")
# The supports of the novel test classes, where they are apart from the queries.
SUPPORT_POOL_NAME = "novel/support"
ALL_POOL_NAMES = (*POOL_NAMES, SUPPORT_POOL_NAME)
_MISSING_POOL_HINTS = {  # of a pool that is missing
    "novel/train": '; a task without it needs protocol = "shared"',
    SUPPORT_POOL_NAME: "; without a published list of sessions leave out listed = true",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Pool:
    """Labelled images of one role.

    Attributes:
        images: uint8 [n, H, W, C], or float32 [n, D] for frozen features; a read-only memory map.
        labels: int64 [n], ascending.
        class_names: Names of the labels.
        class_starts: int64 [C + 1]; class c is rows ``starts[c]:starts[c + 1]``.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    class_starts: np.ndarray

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
    def novel_fingerprint(self) -> str:
        """Fingerprint of the data set of novel classes, "" where it is this one; see :mod:`.dataset_views`."""
        return ""

    def fingerprint_prefix_of_pool(self, pool: str) -> str:
        """Return the prefix of the fingerprint of the data set that a pool comes from; "" for this one."""
        return ""

    @property
    def is_partial(self) -> bool:
        """Whether it was made from less than its source should hold."""
        return bool(self.manifest.get("about", {}).get("partial", False))

    @property
    def reason_supports_unknown(self) -> str:
        """The reason why it is not known which supports its published list names, or an empty string."""
        return str(self.manifest.get("about", {}).get("supports_unknown", ""))

    @property
    def has_images(self) -> bool:
        """Whether it holds images, not features."""
        return len(self.shape) == 3 and "features_of" not in self.manifest.get("about", {})

    @property
    def item_noun(self) -> str:
        """The word for what it holds: images, or features."""
        return "images" if self.has_images else "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C) of an image, or (D,) of a feature vector."""
        return tuple(next(iter(self.manifest["pools"].values()))["shape"][1:])

    def has_pool(self, pool: str) -> bool:
        return pool in self.manifest["pools"]

    def pool(self, name: str) -> Pool:
        """Open a pool.

        Raises:
            UserError: There is no such pool, or its files may not be read.
            CorruptFile: The labels, or the size or header of the images, are not what was written.
        """
        entry = find_pool_entry(self.manifest["pools"], name, self.name)
        images = open_array(self.folder / entry["images"]["file"], tuple(entry["shape"]), entry["dtype"])
        labels = _read_labels(self.folder / entry["labels"]["file"], entry["labels"]["sha256"], entry["shape"][0])
        starts = np.append(0, np.cumsum(np.bincount(labels, minlength=len(entry["classes"])))).astype(np.int64)
        return Pool(name, images, labels, tuple(entry["classes"]), starts)

    def check_image_checksum(self, pool: str) -> None:
        """Raise CorruptFile if a pool's images are not what was written; reads them all."""
        try:
            _check_file_checksum(self.folder, self.manifest["pools"][pool]["images"])
        except CorruptFile as error:
            made_from = self.manifest["about"].get("made_from", {})
            source = " --from PATH" if "names" in made_from else ""
            again = f"ifsl-bench data prepare {self.name}{source} --force"
            again = "the same call and force=True" if made_from and not source else again  # of objects in memory
            raise CorruptFile(f"{error}; make it again with {again}") from error


def find_pool_entry(pools: Mapping[str, T], name: str, data: str) -> T:
    """Return the entry of a pool.

    Args:
        pools: Pool -> entry.
        name: Of the pool.
        data: Name of the data set in messages.

    Raises:
        UserError: There is no such pool.
    """
    if name not in pools:
        raise UserError(
            f"data set {data!r} has no pool {name}; it has {', '.join(pools)}{_MISSING_POOL_HINTS.get(name, '')}"
        )
    return pools[name]


def _read_labels(path: Path, sha256: str, count: int) -> np.ndarray:
    """Return labels, int64 [count]; they are small enough to be checked whenever they are read."""
    try:
        with open_file(path) as file, translate_read_errors(path):
            content = file.read()
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CorruptFile(f"{path} does not hold the labels that were written: its checksum differs")
    labels: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
    if labels.shape != (count,) or labels.dtype != np.int64:
        raise CorruptFile(f"{path} holds {labels.dtype}{list(labels.shape)}, not the manifest's int64[{count}]")
    return labels


def compute_content_fingerprint(pools: Mapping[str, dict[str, Any]], partial: bool) -> str:
    """Return the identity of the content.

    Args:
        pools: Pool -> entry of the manifest.
        partial: Whether the data set is partial.
    """
    content: dict[str, Any] = {
        pool: [entry["images"]["sha256"], entry["labels"]["sha256"], entry["classes"]] for pool, entry in pools.items()
    }
    if partial:
        content["partial"] = True
    return sha256_json(content)


def open_dataset(folder: Path) -> Dataset:
    """Open a prepared data set.

    Raises:
        CorruptFile: A file is damaged or missing, or the manifest has an unknown format version.
        UserError: A file may not be read.
    """
    path = folder / "manifest.json"
    try:
        manifest = read_checksummed(path)
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    check_value_types(path, manifest, {"name": str, "recipe": str, "fingerprint": str, "about": dict, "pools": dict})
    dataset = Dataset(manifest["name"], folder, manifest)
    try:
        if not manifest["pools"]:
            raise ValueError("it lists no pools")
        if compute_content_fingerprint(manifest["pools"], dataset.is_partial) != dataset.fingerprint:
            raise ValueError("its fingerprint is not that of the pools")
        for pool in manifest["pools"]:
            dataset.pool(pool)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise CorruptFile(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return dataset


def verify_checksums(dataset: Dataset, advance: Callable[[int], None] | None = None) -> None:
    """Compare the checksum of every file with the manifest.

    Args:
        dataset: The data set.
        advance: Called with numbers of bytes that were read.

    Raises:
        CorruptFile: Names the first file that differs.
    """
    for entry in dataset.manifest["pools"].values():
        for part in ("images", "labels"):
            _check_file_checksum(dataset.folder, entry[part], advance)


def _check_file_checksum(folder: Path, entry: dict[str, Any], advance: Callable[[int], None] | None = None) -> None:
    path = folder / entry["file"]
    if sha256_file(path, advance) != entry["sha256"]:
        raise CorruptFile(f"{path} is not what was written: its checksum differs")
