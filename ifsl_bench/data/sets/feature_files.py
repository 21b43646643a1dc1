"""Frozen features of the user's own: six files, .npz, .safetensors or .pt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from ifsl_bench.data.pools import POOLS
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.arrays import npz_arrays, safetensors, torch_file
from ifsl_bench.data.source import BuildContext, Layout
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.limits import LABEL

ALIKE = 0.5  # the mean cosine of two features from which on they are said to lie on one side of the origin
_LOOKED_AT = 5000  # rows, at least, where there are so many
_WHOLE = 2.0**53  # up to which float64 tells whole numbers apart


@dataclass(frozen=True)
class _FeaturePool:
    """A pool before its features are read; ``ids`` [n] are indices into ``classes``."""

    entry: Entry
    width: int
    ids: np.ndarray
    classes: tuple[str, ...]


class FeatureFiles(Layout):
    """Files ``base-train.npz`` ..., or ``.safetensors`` or ``.pt``, with ``features`` and ``labels``.

    Features are [n, D], labels [n] any whole numbers or strings; a class is the same in two pools if its label is.
    novel-train may be missing for tasks with the shared protocol.

    Args:
        check: Raises UserError if episodes cannot be drawn, given pool -> int64 [C + 1]; images of class c are
            ``starts[c]:starts[c + 1]``.
    """

    title: ClassVar[str] = "frozen features (base-train.npz, ..., novel-test.npz, or .safetensors or .pt)"

    def __init__(self, check: Callable[[Mapping[str, np.ndarray]], None] = lambda starts: None) -> None:
        self.check = check

    def matches(self, tree: FileTree) -> bool:
        names = {f"{_stem(pool)}{suffix}" for pool in POOLS for suffix in READERS}
        return not names.isdisjoint(entry.name for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        pools = _surveyed(context.files)
        try:
            self.check({name: np.append(0, np.cumsum(np.bincount(pool.ids))) for name, pool in pools.items()})
        except UserError as error:
            context.require_complete(str(error), f"{error}; make smaller episodes, of a task file of your own")
        with context.reporter.stage(f"importing features from {context.files.path.name}", len(pools)) as stage:
            for name, pool in pools.items():
                if not context.writer.has(name):
                    features = _features(context.files, pool.entry)
                    context.bytes_read += pool.entry.size
                    order = np.argsort(pool.ids, kind="stable")
                    facts = {"mean_cosine": mean_cosine(features)} if name == "base/train" else {}
                    shape = (pool.width,)
                    with context.writer.pool(name, pool.ids[order], pool.classes, shape, "float32", facts) as out:
                        out[:] = features[order]
                stage.advance(1)
        if (cosine := context.writer.pools["base/train"].get("mean_cosine", 0.0)) >= ALIKE:
            context.reporter.warn(
                f"features of base/train have a mean pairwise cosine of {cosine:.2f}: they are not centred, as those "
                "behind a ReLU are not. A method that puts class means beside cosine weights then takes nearly every "
                "base query for one of a novel class (Delta_a near -90); subtract the mean of base/train from all files"
            )


def mean_cosine(features: np.ndarray) -> float:
    """Return the mean cosine of two different rows of features [n, D], over some of them; 0 for one row."""
    some = features[:: max(1, len(features) // _LOOKED_AT)].astype(np.float64)
    lengths = np.linalg.norm(some, axis=1, keepdims=True)
    units = some / np.where(lengths > 0, lengths, 1.0)
    count = len(units)
    return round(float((np.square(units.sum(0)).sum() - np.square(units).sum()) / max(1, count * (count - 1))), 4)


def _surveyed(tree: FileTree) -> dict[str, _FeaturePool]:
    """Reads all that the files say but the features themselves.

    Raises:
        UserError: a file is missing, is there in two formats, or does not fit the others.
    """
    pools: dict[str, _FeaturePool] = {}
    for pool in POOLS:
        entry = _file(tree, pool)
        if entry is None:
            continue
        where = tree.where(entry)
        features, labels = _read(tree, entry)
        names, ids = np.unique(_labels(labels, where), return_inverse=True)
        pools[pool] = surveyed = _FeaturePool(entry, features.shape[1], ids, tuple(map(str, names)))
        first = pools["base/train"]
        if surveyed.width != first.width:
            raise UserError(f"{where} has {surveyed.width} features a row, {first.entry.name} has {first.width}")
        if pool.startswith("base/") and surveyed.classes != first.classes:
            raise UserError(f"{where} does not have the same classes as {first.entry.name}")
        for earlier_name, earlier in pools.items():
            both = set(surveyed.classes) & set(earlier.classes)
            if both and earlier_name != pool and not (pool.startswith("base/") and earlier_name.startswith("base/")):
                raise UserError(
                    f"class {min(both)!r} is in {earlier.entry.name} and in {surveyed.entry.name}; novel "
                    f"classes must be others than base classes, and others in each file: "
                    f"their labels may begin at 1000, 2000, ..."
                )
    return pools


def _stem(pool: str) -> str:
    return pool.replace("/", "-")


def _file(tree: FileTree, pool: str) -> Entry | None:
    """The file of a pool; None where novel/train has none."""
    entries = [entry for suffix in READERS if (entry := tree.named(f"{_stem(pool)}{suffix}"))]
    if len(entries) > 1:
        raise UserError(f"{tree.path} holds {' and '.join(e.path for e in entries)}; leave one of them there")
    if not entries and pool != "novel/train":
        wanted = ", ".join(map(_stem, POOLS))
        raise UserError(
            f"{tree.where(f'{_stem(pool)}.npz')} is missing; a data set of frozen features is six files: {wanted}, "
            f"each {' or '.join(READERS)} (without novel-train, base classes are hidden in turn)"
        )
    return entries[0] if entries else None


# -- one file


Values = np.ndarray | list[Any]
READERS: dict[str, Callable[[BinaryIO, str], Mapping[str, Any]]] = {
    ".npz": lambda file, where: npz_arrays(file, where, "features", "labels"),
    ".safetensors": safetensors,
    ".pt": torch_file,
}


def _read(tree: FileTree, entry: Entry) -> tuple[np.ndarray, Values]:
    """The features [n, D] and labels [n] of a file.

    Raises:
        UserError: it is damaged, or they are not of that form.
    """
    where = tree.where(entry)
    with tree.readable(entry):
        raw = tree.open(entry)
    with raw:
        stored = READERS[f".{entry.name.rpartition('.')[2]}"](raw, where)
    if missing := [repr(name) for name in ("features", "labels") if name not in stored]:
        has = ", ".join(name[:40] for name in list(stored)[:6]) or "nothing"
        raise UserError(f"{where} lacks {', '.join(missing)}; it has {has}")
    features, labels = stored["features"], stored["labels"]
    rows = (len(labels),) if isinstance(labels, list) else labels.shape
    fits = not isinstance(features, list) and features.dtype.kind == "f" and len(features.shape) == 2
    if not fits or not all(features.shape) or features.shape[:1] != rows:
        raise UserError(
            f"{where}: expected floating features [n, D] and labels [n], found features {_shape(features)}, "
            f"labels {_shape(labels)}"
        )
    return features, labels


def _shape(values: Values) -> str:
    """Type and shape in words."""
    return f"list[{len(values)}]" if isinstance(values, list) else f"{values.dtype}{list(values.shape)}"


def _features(tree: FileTree, entry: Entry) -> np.ndarray:
    """Float32 [n, D]."""
    with np.errstate(over="ignore"):
        features = _read(tree, entry)[0].astype(np.float32)
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features)).any(1).sum())
        raise UserError(f"{tree.where(entry)}: features contain NaN or infinity (as float32) in {rows} rows")
    return features


def _labels(stored: Values, where: str) -> np.ndarray:
    """Labels [n] as whole numbers or text.

    Raises:
        UserError: they are neither; whole numbers may be written as floats.
    """
    if isinstance(stored, list):
        kinds = {type(value) for value in stored}
        if kinds not in ({int}, {str}, {float}) or (kinds == {int} and any(abs(v) >= 1 << 62 for v in stored)):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise UserError(f"{where}: labels must be integers or strings, found a list of {names}")
        if longest := max((len(value) for value in stored if isinstance(value, str)), default=0):
            LABEL.check(longest, f"a label of {where}")
        labels = np.array(stored)
    else:
        labels = stored
        if labels.dtype.kind not in "iuUf":
            raise UserError(f"{where}: labels must be integers or strings, found {labels.dtype}")
    if labels.dtype.kind == "f":
        whole = np.isfinite(labels) & (np.abs(labels) < _WHOLE)
        whole[whole] = labels[whole] == np.round(labels[whole])
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise UserError(
                f"{where}: labels must be integers or strings, found {labels.dtype} with {labels[row]} in row {row}"
            )
        labels = labels.astype(np.int64)
    try:
        if labels.dtype.kind == "U":
            "".join(np.unique(labels).tolist()).encode()
    except (ValueError, SystemError) as error:  # numbers that stand for no character
        raise UserError(f"{where}: a label is no text ({error})") from error
    return labels
