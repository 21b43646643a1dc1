"""Builds data sets: pools are written one by one, and the whole appears at once or not at all.

The form on disk is described in :mod:`ifsl_bench.data.pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.data.pools import FORMAT, POOLS, Dataset, open_dataset, release
from ifsl_bench.errors import CorruptFile, UserError
from ifsl_bench.store import building, create_array, disk_errors, read_json, sha256_file, sha256_json, write_json

PROGRESS = "progress.json"  # in the folder of an unfinished build: the pools that are complete


class Writer:
    """Collects the pools of a data set under construction; see :func:`build`.

    Args:
        folder: where the files go.
        key: identity of what is being built, recorded with each complete pool so that an interrupted build can go on
            from it; None for one that starts anew.
    """

    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.folder, self.key = folder, key
        self.pools: dict[str, dict[str, Any]] = {}
        if key is not None:
            self._resume(key)

    def _resume(self, key: str) -> None:
        """Takes over the complete pools of an interrupted build of the same thing, and removes everything else."""
        try:
            progress = read_json(self.folder / PROGRESS)
            if progress["key"] == key:
                for name, entry in progress["pools"].items():
                    parts = [entry[part] for part in ("images", "labels")]
                    if all(sha256_file(self.folder / part["file"]) == part["sha256"] for part in parts):
                        self.pools[name] = entry
        except (CorruptFile, OSError, KeyError, TypeError, AttributeError):
            self.pools = {}
        kept = {entry[part]["file"] for entry in self.pools.values() for part in ("images", "labels")}
        kept |= {self.side_file(name).name for name in self.pools}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def has(self, pool: str) -> bool:
        """Whether a pool is complete already."""
        return pool in self.pools

    def side_file(self, pool: str) -> Path:
        """A .npy file for what the builder wants to remember of a complete pool until the data set is finished."""
        return self.folder / f"{pool.replace('/', '-')}.side.npy"

    @contextmanager
    def pool(
        self,
        name: str,
        labels: np.ndarray,
        classes: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: str = "uint8",
        facts: dict[str, Any] | None = None,
    ) -> Iterator[np.ndarray]:
        """A pool's images, to be filled inside the ``with`` block, in any order.

        Where they are many, call :func:`release` after every few hundred MB written.

        Args:
            name: one of :data:`POOLS`.
            labels: integers [n], ascending, each of ``0..len(classes)-1`` at least once.
            classes: names of the classes; the base pools must share them.
            shape: (H, W, C) of an image, or (D,) of a feature vector.
            dtype: "uint8" for images, "float32" for features.
            facts: what else the manifest is to say of this pool, JSON-able; may be added to inside the block.
        """
        labels = np.asarray(labels, dtype=np.int64)
        _check_pool(name, labels, classes)
        stem = name.replace("/", "-")
        images_file, labels_file = f"{stem}.images.npy", f"{stem}.labels.npy"
        images = create_array(self.folder / images_file, (len(labels), *shape), dtype)
        yield images
        images.flush()
        np.save(self.folder / labels_file, labels)
        release(images)
        self.pools[name] = {
            **(facts or {}),
            "shape": list(images.shape),
            "dtype": dtype,
            "classes": list(classes),
            "statistics": _statistics(images, labels),
            "images": _describe(self.folder / images_file),
            "labels": _describe(self.folder / labels_file),
        }
        del images
        if self.key is not None:
            write_json(self.folder / PROGRESS, {"key": self.key, "pools": self.pools})


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
    channels = images.shape[-1] if images.ndim == 4 else 1
    wide = images.shape[1:] if images.ndim == 4 else (images.shape[1],)
    integer = images.dtype == np.uint8
    total = np.zeros(wide, np.uint64 if integer else np.float64)
    square = np.zeros_like(total)
    for start in range(0, len(images), 256):
        # 256 squares of a byte fit into 32 bits, so sums over a block of bytes are exact.
        block = images[start : start + 256].astype(np.uint16 if integer else np.float64)
        total += block.sum(0, dtype=np.uint32 if integer else np.float64)
        square += np.square(block).sum(0, dtype=np.uint32 if integer else np.float64)
        if start % (1 << 12) == 0:
            release(images)
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


def _describe(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def build(
    folder: Path,
    name: str,
    recipe: str,
    fill: Callable[[Writer], None],
    about: dict[str, Any],
    key: str | None = None,
) -> Dataset:
    """Builds a data set into ``folder``; it appears there whole or not at all. The caller holds ``locked(folder)``.

    Args:
        recipe: identity of what ``fill`` makes; a cached copy with another recipe is out of date.
        fill: writes the pools.
        about: what else to record in the manifest (source, whether it is partial, ...); read after ``fill``, which may
            add to it.
        key: identity of recipe and source together: a build that was interrupted goes on with the pools it had
            completed if the next one has the same key. None: it starts anew.
    """
    with building(folder, resume=key is not None) as partial, disk_errors(folder):
        writer = Writer(partial, key)
        fill(writer)
        _check_sides(writer.pools)
        for pool in writer.pools:
            writer.side_file(pool).unlink(missing_ok=True)
        (partial / PROGRESS).unlink(missing_ok=True)
        content: dict[str, Any] = {
            pool: [entry["images"]["sha256"], entry["labels"]["sha256"], entry["classes"]]
            for pool, entry in writer.pools.items()
        }
        if about.get("partial"):
            content["partial"] = True
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
