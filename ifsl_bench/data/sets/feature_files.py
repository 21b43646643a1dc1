"""Frozen features of the user's own: six .npz files."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pickle_pools import opened
from ifsl_bench.data.pools import POOLS
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.npz import Npz
from ifsl_bench.data.source import Form, Import


class FeatureFiles(Form):
    """Six files ``base-train.npz`` ... ``novel-test.npz`` with ``features`` [n, D] and ``labels`` [n] each.

    Labels may be any integers or strings; a class is the same in two pools if its label is. novel-train may be missing
    for tasks with the shared protocol, where it is base/train.
    """

    title: ClassVar[str] = "frozen features (base-train.npz, ..., novel-test.npz)"

    def recognises(self, tree: FileTree) -> bool:
        return not {_file(pool) for pool in POOLS}.isdisjoint(entry.name for entry in tree.entries)

    def build(self, to: Import) -> None:
        tree = to.files
        width = None
        base_classes: list[str] | None = None
        with to.reporter.stage(f"importing features from {tree.path.name}", len(POOLS)) as stage:
            for pool in POOLS:
                entry = tree.named(_file(pool))
                if entry is None:
                    if pool == "novel/train":
                        continue
                    wanted = ", ".join(_file(p) for p in POOLS)
                    raise UserError(
                        f"{tree.where(_file(pool))} is missing; a data set of frozen features is six files: {wanted}"
                    )
                if to.writer.has(pool):
                    ready = to.writer.pools[pool]
                    width, base_classes = ready["shape"][1], base_classes or ready["classes"]
                    stage.advance(1)
                    continue
                features, labels = _read_npz(tree, entry)
                path = tree.where(entry)
                to.bytes_read += entry.size
                if width is not None and features.shape[1] != width:
                    raise UserError(f"{path} has {features.shape[1]} features a row, the files before it have {width}")
                width = features.shape[1]
                names, ids = np.unique(labels, return_inverse=True)
                classes = [str(n) for n in names]
                if pool.startswith("base/"):
                    if base_classes is not None and classes != base_classes:
                        raise UserError(f"{path} does not have the same classes as base-train.npz")
                    base_classes = classes
                order = np.argsort(ids, kind="stable")
                with to.writer.pool(pool, ids[order], tuple(classes), (width,), "float32") as out:
                    out[:] = features[order]
                stage.advance(1)


def _file(pool: str) -> str:
    return f"{pool.replace('/', '-')}.npz"


def _read_npz(tree: FileTree, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    path = tree.where(entry)
    with opened(tree, entry) as raw:
        file = Npz(raw, path)
        file.need("features", "labels")
        stored = {name: file.array(name) for name in ("features", "labels")}
        found = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in stored.items())
        if len(stored["features"].shape) != 2 or stored["labels"].shape != stored["features"].shape[:1] or (
            stored["features"].dtype.kind != "f" or not all(stored["features"].shape)
        ):  # fmt: skip
            raise UserError(f"{path}: expected floating features [n, D] and labels [n], found {found}")
        if (kind := stored["labels"].dtype).kind not in "iuU":
            raise UserError(f"{path}: labels must be integers or strings, found {kind}")
        features, labels = stored["features"].read(), stored["labels"].read()
    if labels.dtype.kind == "U":
        _check_text(labels, path)
    with np.errstate(over="ignore"):
        features = features.astype(np.float32)
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features)).any(1).sum())
        raise UserError(f"{path}: features contain NaN or infinity (as float32) in {rows} rows")
    return features, labels


def _check_text(labels: np.ndarray, path: str) -> None:
    """Raises :class:`UserError` where labels, str [n], hold numbers that stand for no character."""
    codes = np.ascontiguousarray(labels).view(np.dtype("u4").newbyteorder(labels.dtype.byteorder))
    wrong = (codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0]) // (len(codes) // len(labels))
        raise UserError(f"{path}: the label of row {row} is no text (it holds the code {int(codes[wrong][0]):#x})")
