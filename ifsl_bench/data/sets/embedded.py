"""Data sets of features that come with the package: those of images which may not, or need not, be handed on.

The features of one image under two backbones, one for each kind of base classifier, are one "image" of bytes
[2, D, 1]: each dimension has 256 levels, and its scale and offset are with the base classifier. Of base/train there is
one row for each class, the mean of its features; the other pools have every image. The folder ``embedded`` beside this
file has a file for each data set, made by ``tests/tools/embed_features.py``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ifsl_bench.common.errors import CorruptFile, is_printable
from ifsl_bench.data.pools import POOLS
from ifsl_bench.data.source import Count, Counts, DatasetSource, Import

FOLDER = Path(__file__).with_name("embedded")
FORM = 1
OURS = "ifsl_bench"  # the key of our metadata
HEADS = ("linear", "cosine")  # the order of the two in an "image"


class EmbeddedFeatures(DatasetSource):
    """The features in ``embedded/NAME.safetensors``; subclasses say the name and a line about them."""

    needs_source: ClassVar[bool] = False

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.safetensors"

    def recipe(self) -> str:
        return f"embedded features {FORM}: {self._said()['sha256']}"

    def outline(self) -> tuple[tuple[int, ...], Counts]:
        said = self._said()
        counts = {pool: Count(len(entry["counts"]), sum(entry["counts"])) for pool, entry in said["pools"].items()}
        return tuple(said["shape"]), counts

    def rough_seconds(self) -> float:
        return 1.0

    def build(self, to: Import) -> None:
        said = self._said()
        to.reporter.say(f"{self.name}: {said['notice']}")
        to.about |= {"source": self.file.name, "notice": said["notice"], "features_of": said["features_of"]}
        arrays = self._arrays(said)
        for pool, entry in said["pools"].items():
            labels = np.repeat(np.arange(len(entry["counts"])), entry["counts"])
            with to.writer.pool(pool, labels, tuple(entry["classes"]), tuple(said["shape"])) as images:
                images[:] = arrays[pool]

    def _said(self) -> dict[str, Any]:
        """Reads the metadata of the file.

        Raises:
            CorruptFile: it is missing or damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, "np") as file:
                said: dict[str, Any] = json.loads(file.metadata()[OURS])
                if said["format"] != FORM or not is_printable(said["notice"]):
                    raise ValueError("of another format")
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            raise CorruptFile(f"{self.file} is damaged or missing ({error}); install ifsl_bench again") from error
        return said

    def _arrays(self, said: dict[str, Any]) -> dict[str, np.ndarray]:
        """The bytes of each pool, uint8 [n, 2, D, 1], checked."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, "np") as file:
                found = {pool: file.get_tensor(pool) for pool in said["pools"]}
        except (OSError, SafetensorError) as error:
            raise CorruptFile(f"{self.file} is damaged ({error}); install ifsl_bench again") from error
        if checksum(found) != said["sha256"]:
            raise CorruptFile(f"{self.file} is not what was written: its checksum differs; install ifsl_bench again")
        return found


def checksum(pools: dict[str, np.ndarray]) -> str:
    """Over names and bytes of the pools, in the order of :data:`POOLS`."""
    digest = hashlib.sha256()
    for pool in (name for name in POOLS if name in pools):
        digest.update(f"{pool} {pools[pool].shape}\n".encode())
        digest.update(np.ascontiguousarray(pools[pool]).data)
    return digest.hexdigest()
