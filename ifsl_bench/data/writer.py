"""Builds data sets on disk: pools are written one by one, and the whole appears at once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.data.pools import (
    ALL_POOL_NAMES,
    POOL_NAMES,
    SUPPORT_POOL_NAME,
    Dataset,
    compute_content_fingerprint,
    open_dataset,
)
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import sha256_file
from ifsl_bench.utils.locks import atomic_folder
from ifsl_bench.utils.serialization import create_array, read_checksummed, release_memory, write_checksummed

PROGRESS_FILE = "progress.json"  # in the folder of an unfinished build: the pools that are complete


class DatasetWriter:
    """The pools of a data set under construction in a folder; for ``keys`` see :func:`build_dataset`."""

    def __init__(self, folder: Path, keys: Sequence[str] = ()) -> None:
        self.folder, self.keys = folder, keys
        self.pools: dict[str, dict[str, Any]] = {}
        self._origins: dict[str, list[str]] = {}  # pool -> its key, and the checksum of its side file
        if keys:
            self._resume_unfinished_build()

    def _resume_unfinished_build(self) -> None:
        """Take over the complete pools of an unfinished build of the same data set, and remove everything else."""
        try:
            progress = read_checksummed(self.folder / PROGRESS_FILE)
            origins = {name: list(origin) for name, origin in progress["made"].items() if origin[0] in self.keys}
            whole = {name: progress["pools"][name] for name in origins}
            whole = {
                name: entry for name, entry in whole.items() if self._is_pool_complete(name, entry, origins[name][1])
            }
        except (CorruptFile, OSError, LookupError, TypeError, AttributeError):
            whole, origins = {}, {}
        if whole:
            self._record_complete_pools(whole, {name: origins[name] for name in whole})
        self.discard_incomplete()

    def _is_pool_complete(self, name: str, entry: dict[str, Any], side: str) -> bool:
        parts = {entry[part]["file"]: entry[part]["sha256"] for part in ("images", "labels")}
        parts[self.side_file_path(name).name] = side
        return all(self._compute_checksum(file) == checksum for file, checksum in parts.items())

    def _compute_checksum(self, file: str) -> str:
        return sha256_file(self.folder / file) if (self.folder / file).exists() else ""

    def _record_complete_pools(self, pools: dict[str, dict[str, Any]], origins: dict[str, list[str]]) -> None:
        """Record pools as complete, on the disk first."""
        if self.keys:
            write_checksummed(self.folder / PROGRESS_FILE, {"made": origins, "pools": pools})
        self.pools, self._origins = pools, origins

    def discard_incomplete(self) -> None:
        """Remove all files that belong to no complete pool."""
        names = {PROGRESS_FILE} if self.pools else set()
        for name, entry in self.pools.items():
            names |= {entry["images"]["file"], entry["labels"]["file"], self.side_file_path(name).name}
        for path in self.folder.iterdir():
            if path.name not in names and not path.name.startswith(".nfs"):
                path.unlink()

    def has_complete_pool(self, pool: str) -> bool:
        """Return whether a pool is complete."""
        return pool in self.pools

    def side_file_path(self, pool: str) -> Path:
        """Return the path of a .npy file with further facts of a pool, which exists until the data set is finished."""
        return self.folder / f"{pool.replace('/', '-')}.side.npy"

    @contextmanager
    def write_pool(
        self,
        name: str,
        labels: np.ndarray,
        classes: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: str = "uint8",
        facts: dict[str, Any] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield the images of a pool, to be filled in the block in any order.

        Call :func:`release` after every few hundred MB.

        Args:
            name: One of :data:`EVERY_POOL`.
            labels: Integers [n], ascending, each of ``0..len(classes)-1`` at least once.
            classes: Names of the classes; the base pools must share them.
            shape: (H, W, C) of an image, or (D,) of a feature vector.
            dtype: "uint8" for images, "float32" for features.
            facts: Further entries of the manifest, JSON-able; they may be added to in the block.
        """
        labels = np.asarray(labels, dtype=np.int64)
        _check_labels(name, labels, classes)
        self.pools.pop(name, None)  # if it is written again
        stem = name.replace("/", "-")
        images_file, labels_file = f"{stem}.images.npy", f"{stem}.labels.npy"
        images = create_array(self.folder / images_file, (len(labels), *shape), dtype)
        yield images
        images.flush()
        np.save(self.folder / labels_file, labels)
        release_memory(images)
        with ThreadPoolExecutor(1) as thread:  # checksums and sums over arrays release the GIL
            described = thread.submit(_measure_size_and_sha256, self.folder / images_file)
            entry = {
                **(facts or {}),
                "shape": list(images.shape),
                "dtype": dtype,
                "classes": list(classes),
                "statistics": _compute_pool_statistics(images, labels),
                "images": described.result(),
                "labels": _measure_size_and_sha256(self.folder / labels_file),
            }
        del images
        origin = [self.keys[0] if self.keys else "", self._compute_checksum(self.side_file_path(name).name)]
        self._record_complete_pools({**self.pools, name: entry}, {**self._origins, name: origin})


def _check_labels(name: str, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    if name not in ALL_POOL_NAMES:
        raise UserError(f"no pool is called {name!r}; the pools are {', '.join(ALL_POOL_NAMES)}")
    if not len(labels) or (np.diff(labels) < 0).any() or np.unique(labels).tolist() != list(range(len(classes))):
        raise UserError(f"pool {name}: labels must be 0 to {len(classes) - 1} in order, each at least once")
    if len(set(classes)) != len(classes):
        raise UserError(f"pool {name}: class names are not unique")


def _compute_pool_statistics(images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return mean and standard deviation of each channel in stored units (0..255 for images), and images per class."""
    channels = images.shape[-1] if images.ndim == 4 else 1
    integer = images.dtype == np.uint8
    total = np.zeros(images.shape[1:], np.uint64 if integer else np.float64)
    square = np.zeros_like(total)
    for start in range(0, len(images), 256):
        # 256 squares of a byte fit into 32 bits, so sums over a block of bytes are exact.
        block = images[start : start + 256].astype(np.uint16 if integer else np.float64)
        total += block.sum(0, dtype=np.uint32 if integer else np.float64)
        square += np.square(block).sum(0, dtype=np.uint32 if integer else np.float64)
        if start % (1 << 12) == 0:
            release_memory(images)
    n = images.size / channels
    mean = total.reshape(-1, channels).sum(0) / n
    variance = square.reshape(-1, channels).sum(0) / n - mean**2
    counts = np.bincount(labels)
    return {
        "mean": [round(float(v), 6) for v in mean],
        "std": [round(float(v), 6) for v in np.sqrt(np.maximum(variance, 0))],
        "classes": len(counts),
        "images": len(labels),
        "fewest": int(counts.min()),
        "most": int(counts.max()),
    }


def _measure_size_and_sha256(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def build_dataset(
    folder: Path,
    name: str,
    recipe: str,
    fill: Callable[[DatasetWriter], None],
    about: dict[str, Any],
    keys: Sequence[str] = (),
) -> Dataset:
    """Build a data set into ``folder``, whose lock is taken; it appears there whole or not at all.

    Args:
        folder: Of the data set.
        name: Of the data set.
        recipe: Identity of what ``fill`` makes; a cached copy with another recipe is out of date.
        fill: Writes the pools.
        about: Further entries of the manifest; read after ``fill``, which may add to it.
        keys: Identities of recipe and source. A build that ends early keeps its complete pools under the first key,
            and takes over those under any of its keys. Empty: it starts from nothing and leaves nothing.
    """
    with atomic_folder(folder, bool(keys)) as partial:
        writer = DatasetWriter(partial, keys)
        try:
            fill(writer)
            _check_classes(writer.pools)
            manifest = {
                "name": name,
                "recipe": recipe,
                "fingerprint": compute_content_fingerprint(writer.pools, bool(about.get("partial"))),
                "about": about,
                "pools": writer.pools,
            }
            write_checksummed(partial / "manifest.json", manifest)
        except BaseException:
            with suppress(OSError):
                writer.discard_incomplete()
            raise
    for path in (folder / PROGRESS_FILE, *(folder / writer.side_file_path(pool).name for pool in writer.pools)):
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return open_dataset(folder)


def _check_classes(pools: dict[str, dict[str, Any]]) -> None:
    base = [pools[p]["classes"] for p in POOL_NAMES[:3] if p in pools]
    if any(classes != base[0] for classes in base):
        raise UserError("the base pools must have the same classes in the same order")
    if SUPPORT_POOL_NAME in pools and pools[SUPPORT_POOL_NAME]["classes"] != pools.get("novel/test", {}).get("classes"):
        raise UserError(f"{SUPPORT_POOL_NAME} must have the classes of novel/test in the same order")
    side_of: dict[str, str] = {}
    for pool in (name for name in POOL_NAMES if name in pools):
        side = "base" if pool in POOL_NAMES[:3] else pool
        for name in pools[pool]["classes"]:
            if (earlier := side_of.setdefault(name, side)) != side:
                raise UserError(f"class {name!r} is in {earlier} and in {side}; the sides must be disjoint")
