"""Data sets of features in the package, of images that may not, or need not, be distributed.

The features of one image under two backbones, one for each kind of base classifier, are one "image" of bytes
[2, D, 1]: each dimension has 256 levels, and its scale and offset are with the base classifier. Of base/train there is
one row for each class, the mean of its features; the other pools have every image. The folder ``embedded`` has a file
for each data set, made by ``tests/tools/embed_features.py``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.source import BuildContext, DatasetSource, PoolCounts, PoolSize
from ifsl_bench.utils.errors import CorruptFile, is_printable, is_refused_by_machine

FEATURES_FOLDER = Path(__file__).with_name("embedded")
FORMAT_VERSION = 1
METADATA_KEY = "ifsl_bench"  # the key of our metadata
HEAD_ORDER = ("linear", "cosine")  # the order of the two in an "image"


class EmbeddedFeatures(DatasetSource):
    """The features in ``embedded/NAME.safetensors``; subclasses set name and summary."""

    needs_source: ClassVar[bool] = False

    @property
    def features_file(self) -> Path:
        return FEATURES_FOLDER / f"{self.name}.safetensors"

    def recipe(self) -> str:
        return f"embedded features {FORMAT_VERSION}: {self._read_metadata_and_pools()[0]['sha256']}"

    def expected_shape_and_counts(self) -> tuple[tuple[int, ...], PoolCounts]:
        facts, _ = self._read_metadata_and_pools()
        counts = {pool: PoolSize(len(entry["counts"]), sum(entry["counts"])) for pool, entry in facts["pools"].items()}
        return tuple(facts["shape"]), counts

    def build(self, context: BuildContext) -> None:
        facts, arrays = self._read_metadata_and_pools(arrays=True)
        context.reporter.say(f"{self.name}: {facts['notice']}")
        context.about |= {
            "source": self.features_file.name,
            "notice": facts["notice"],
            "features_of": facts["features_of"],
        }
        for pool, entry in facts["pools"].items():
            labels = np.repeat(np.arange(len(entry["counts"])), entry["counts"])
            with context.writer.write_pool(pool, labels, tuple(entry["classes"]), tuple(facts["shape"])) as images:
                images[:] = arrays[pool]

    def _read_metadata_and_pools(self, arrays: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the metadata, and optionally the bytes of pools, uint8 [n, 2, D, 1]; raise CorruptFile if damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.features_file, "np") as file:
                facts: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])
                if facts["format"] != FORMAT_VERSION or not is_printable(facts["notice"]):
                    raise ValueError("of another format")
                pools = {pool: file.get_tensor(pool) for pool in facts["pools"]} if arrays else {}
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            if is_refused_by_machine(error):
                raise
            raise CorruptFile(
                f"{self.features_file} is damaged or missing ({error}); install ifsl_bench again"
            ) from error
        if arrays and compute_pools_checksum(pools) != facts["sha256"]:
            raise CorruptFile(
                f"{self.features_file} is not what was written: its checksum differs; install ifsl_bench again"
            )
        return facts, pools


def compute_pools_checksum(pools: dict[str, np.ndarray]) -> str:
    """Return a checksum over names and bytes of the pools, in the order of :data:`POOL_NAMES`."""
    digest = hashlib.sha256()
    for pool in (name for name in POOL_NAMES if name in pools):
        digest.update(f"{pool} {pools[pool].shape}\n".encode())
        digest.update(np.ascontiguousarray(pools[pool]).data)
    return digest.hexdigest()
