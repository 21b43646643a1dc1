"""Frozen features of the user's own: six files, .npz, .safetensors, .pt or .pth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from ifsl_bench.data.image_pools import ListItem, report_duplicates
from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.read.archive import Entry, FileTree, normalise_unicode
from ifsl_bench.data.read.arrays import read_npz_arrays, read_safetensors_arrays, read_torch_arrays
from ifsl_bench.data.read.images import digest_image
from ifsl_bench.data.source import BuildContext, Layout
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.limits import ROW_LABEL_CHARACTERS
from ifsl_bench.utils.text_format import format_count

# The mean cosine of two features from which on they are said to lie on one side of the origin
MIN_COSINE_OF_SAME_FEATURES = 0.5
_SAMPLED_ROWS = 5000  # rows, at least, where there are so many
_MAX_EXACT_INTEGER = 2.0**53  # up to which float64 tells whole numbers apart
# The largest feature of a row lies in this range or is 0: squares, and sums of a million of them, have all digits in
# float32, which ranges from 2**-126 to 2**128. Others are refused, not scaled: weight decay depends on the scale.
_SMALLEST, _LARGEST = 2.0**-50, 2.0**50
# The root mean square beyond which the base classifier, which begins at weights of one size, was seen to learn little.
_LARGE_FEATURE = 20.0


@dataclass(frozen=True)
class _FeaturePool:
    """A pool before its features are read; ``class_indices`` [n] point into ``classes``."""

    entry: Entry
    feature_width: int
    class_indices: np.ndarray
    classes: tuple[str, ...]
    labels_in_file: frozenset[str]


class FeatureFiles(Layout):
    """Files ``base-train.npz`` ..., or ``.safetensors``, ``.pt`` or ``.pth``, with ``features`` and ``labels``.

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
        return any(_parse_pool_and_suffix(entry) is not None for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        pools, rows = _read_pool_labels(context), dict[str, dict[str, list[ListItem]]]()
        try:
            self.check({name: np.append(0, np.cumsum(np.bincount(pool.class_indices))) for name, pool in pools.items()})
        except UserError as error:
            context.require_complete_unless_partial(
                str(error), f"{error}; make smaller episodes, of a task file of your own"
            )
        with context.reporter.report_stage(
            f"importing features from {context.file_tree.path.name}", len(pools)
        ) as stage:
            for name, pool in pools.items():
                order = np.argsort(pool.class_indices, kind="stable")
                rows[name] = {pool.entry.name: [ListItem(pool.entry.name, row) for row in order.tolist()]}
                if not context.writer.has_complete_pool(name):
                    features = _load_features(context.file_tree, pool.entry)
                    context.bytes_read += pool.entry.size
                    facts = {"mean_cosine": mean_cosine_similarity(features)} if name == "base/train" else {}
                    if zeros := int((~features.any(axis=1)).sum()):
                        facts["zero_rows"] = zeros
                    shape = (pool.feature_width,)
                    with context.writer.write_pool(
                        name, pool.class_indices[order], pool.classes, shape, "float32", facts
                    ) as out:
                        out[:] = features[order]
                        digests = [
                            digest_image(row) if row.any() else 0 for row in out
                        ]  # rows of zeros are counted apart
                        np.save(context.writer.side_file_path(name), np.array(digests, np.uint64))
                stage.advance(1)
        report_duplicates(context, rows, "row", "number by number")
        zero_rows = {name: context.writer.pools[name].get("zero_rows", 0) for name in pools}
        if any(zero_rows.values()):
            counts = ", ".join(f"{count:,} of {name}" for name, count in zero_rows.items() if count)
            context.reporter.warn(
                f"{counts}: rows of features that are all zero. They have no direction, so methods that compare by "
                "cosine guess their class; look for images that could not be read, or for a layer whose units are dead"
            )
        moments = context.writer.pools["base/train"]["statistics"]
        size = float(np.hypot(moments["mean"], moments["std"]).max())
        if size > _LARGE_FEATURE:
            context.reporter.warn(
                f"features of base/train have a root mean square of {size:.3g}, for which the base classifier may "
                f"learn little; multiply the features of all files by one number, such as 2.0**{-round(np.log2(size))}"
            )
        if (cosine := context.writer.pools["base/train"].get("mean_cosine", 0.0)) >= MIN_COSINE_OF_SAME_FEATURES:
            context.reporter.warn(
                f"features of base/train have a mean pairwise cosine of {cosine:.2f}: they are not centred, as those "
                "behind a ReLU are not. A method that puts class means beside cosine weights then takes nearly every "
                "base query for one of a novel class (Delta_a near -90); subtract the mean of base/train from all files"
            )


def mean_cosine_similarity(features: np.ndarray) -> float:
    """Return the mean cosine of two different rows of features [n, D], over some of them; 0 for one row."""
    some = features[:: max(1, len(features) // _SAMPLED_ROWS)].astype(np.float64)
    lengths = np.linalg.norm(some, axis=1, keepdims=True)
    units = some / np.where(lengths > 0, lengths, 1.0)
    count = len(units)
    return round(float((np.square(units.sum(0)).sum() - np.square(units).sum()) / max(1, count * (count - 1))), 4)


def _read_pool_labels(context: BuildContext) -> dict[str, _FeaturePool]:
    """Read labels and widths of all files, by pool.

    Raises:
        UserError: A file is missing, is there in two formats, or does not fit the others.
    """
    tree = context.file_tree
    pools: dict[str, _FeaturePool] = {}
    for pool in POOL_NAMES:
        entry = _find_pool_file(tree, pool)
        if entry is None:
            continue
        where = tree.format_location(entry)
        features, stored = _read_features_and_labels(tree, entry)
        values, ids = np.unique(_check_labels(stored, where), return_inverse=True)
        names = (
            np.array([normalise_unicode(value) for value in values.tolist()]) if values.dtype.kind == "U" else values
        )
        names, merged = np.unique(names, return_inverse=True)  # in order of their numbers, if they are numbers
        if len(names) < len(values):
            context.reporter.warn(
                f"{where}: {len(values) - len(names):,} of {len(values):,} labels differ from others only in how "
                "Unicode writes accents (NFC or NFD); they are taken as the same class"
            )
        pools[pool] = surveyed = _FeaturePool(
            entry, features.shape[1], merged[ids], tuple(map(str, names)), frozenset(map(str, values))
        )
        first = pools["base/train"]
        if surveyed.feature_width != first.feature_width:
            raise UserError(
                f"{where} has {surveyed.feature_width} features a row, {first.entry.name} has {first.feature_width}"
            )
        if pool.startswith("base/") and surveyed.classes != first.classes:
            lone = sorted({*surveyed.classes} ^ {*first.classes})[0]
            has = first if lone in first.classes else surveyed
            raise UserError(
                f"{where} does not have the same classes as {first.entry.name}: class {lone!r} is in {has.entry.name} "
                "alone"
            )
        for earlier_name, earlier in pools.items():
            both = set(surveyed.classes) & set(earlier.classes)
            if both and earlier_name != pool and not (pool.startswith("base/") and earlier_name.startswith("base/")):
                alike = [
                    name
                    for name in surveyed.labels_in_file & earlier.labels_in_file
                    if normalise_unicode(name) == min(both)
                ]
                form = "" if alike else " (with accents that Unicode writes in two ways, NFC and NFD)"
                raise UserError(
                    f"class {min(both)!r} is in {earlier.entry.name} and in {surveyed.entry.name}{form}; novel "
                    f"classes must be others than base classes, and others in each file: "
                    f"their labels may begin at 1000, 2000, ..."
                )
    return pools


def _file_stem(pool: str) -> str:
    return pool.replace("/", "-")


def _parse_pool_and_suffix(entry: Entry) -> tuple[str, str] | None:
    """Return the pool and the format of a file named like ``base-train.npz`` or ``Base_Train.NPZ``; None for others."""
    stem, dot, suffix = entry.name.lower().replace("_", "-").rpartition(".")
    pool = stem.replace("-", "/")
    return (pool, dot + suffix) if pool in POOL_NAMES and dot + suffix in READERS else None


def _find_pool_file(tree: FileTree, pool: str) -> Entry | None:
    """Return the file of a pool; None where novel/train has none."""
    entries = [entry for entry in tree.entries if (_parse_pool_and_suffix(entry) or ("",))[0] == pool]
    if len(entries) > 1:
        raise UserError(f"{tree.path} holds {' and '.join(e.path for e in entries)}; leave one of them there")
    if not entries and pool != "novel/train":
        wanted = ", ".join(map(_file_stem, POOL_NAMES))
        raise UserError(
            f"{tree.format_location(f'{_file_stem(pool)}.npz')} is missing; a data set of frozen features is six "
            f"files: {wanted}, each {' or '.join(READERS)} (without novel-train, base classes are hidden in turn)"
        )
    return entries[0] if entries else None


# -- one file


LabelValues = np.ndarray | list[Any]
READERS: dict[str, Callable[[BinaryIO, str], Mapping[str, Any]]] = {
    ".npz": lambda file, where: read_npz_arrays(file, where, "features", "labels"),
    ".safetensors": read_safetensors_arrays,
    ".pt": read_torch_arrays,
    ".pth": read_torch_arrays,
}


def _read_features_and_labels(tree: FileTree, entry: Entry) -> tuple[np.ndarray, LabelValues]:
    """Read the features [n, D] and labels [n] of a file.

    Raises:
        UserError: it is damaged, or they are not of that form.
    """
    where = tree.format_location(entry)
    with tree.translate_read_errors(entry):
        raw = tree.open(entry)
    with raw:
        stored = READERS[f".{entry.name.rpartition('.')[2].lower()}"](raw, where)
    if missing := [repr(name) for name in ("features", "labels") if name not in stored]:
        has = ", ".join(name[:40] for name in list(stored)[:6]) or "nothing"
        raise UserError(f"{where} lacks {', '.join(missing)}; it has {has}")
    features, labels = stored["features"], stored["labels"]
    rows = (len(labels),) if isinstance(labels, list) else labels.shape
    fits = not isinstance(features, list) and len(features.shape) == 2 and all(features.shape)
    if not fits or features.dtype.kind != "f" or features.shape[:1] != rows:
        remedy = ""
        if isinstance(features, list):
            remedy = "; save an array or a tensor of them"
        elif fits and features.shape[:1] == rows and features.dtype.kind in "iub":
            remedy = "; save features.astype('float32'), or features.float() of a tensor"
        raise UserError(
            f"{where}: expected floating-point features [n, D] and labels [n], found features "
            f"{_format_shape(features)}, "
            f"labels {_format_shape(labels)}{remedy}"
        )
    return features, labels


def _format_shape(values: LabelValues) -> str:
    """Return type and shape in words."""
    return f"list[{len(values)}]" if isinstance(values, list) else f"{values.dtype}{list(values.shape)}"


def _load_features(tree: FileTree, entry: Entry) -> np.ndarray:
    """Return the features of a file, float32 [n, D].

    Raises:
        UserError: They are not finite, or float32 cannot hold their squares.
    """
    features = _read_features_and_labels(tree, entry)[0]
    with np.errstate(over="ignore"):
        largest = np.maximum(features.max(axis=1), -features.min(axis=1)).astype(np.float64)  # [n]
    if not np.isfinite(largest).all():
        rows = format_count(int((~np.isfinite(largest)).sum()), "row")
        raise UserError(f"{tree.format_location(entry)}: features contain NaN or infinity in {rows}")
    beyond = (largest != 0) & ((largest < _SMALLEST) | (largest > _LARGEST))
    if beyond.any():
        usual = float(np.median(largest[largest != 0]))
        remedy = "Leave these rows out; the others fit"
        if not _SMALLEST <= usual <= _LARGEST:
            remedy = (
                f"Multiply the features of all files by one number, such as 2.0**{-round(np.log2(usual))}, and leave "
                "out rows that are still beyond; cosines stay what they are"
            )
        raise UserError(
            f"{tree.format_location(entry)}: in {int(beyond.sum()):,} of {len(largest):,} rows the largest feature is "
            f"from {largest[beyond].min():.1e} to {largest[beyond].max():.1e}, whose squares float32 cannot hold; "
            f"between {_SMALLEST:.0e} and {_LARGEST:.0e} it can. {remedy}"
        )
    return features.astype(np.float32)


def _check_labels(stored: LabelValues, where: str) -> np.ndarray:
    """Return labels [n] as whole numbers or text.

    Raises:
        UserError: They are neither; whole numbers may be written as floats.
    """
    if isinstance(stored, list):
        kinds = {type(value) for value in stored}
        if kinds not in ({int}, {str}, {float}) or (kinds == {int} and any(abs(v) >= 1 << 62 for v in stored)):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            remedy = "; save [label.decode() for label in labels]" if kinds == {bytes} else ""
            raise UserError(f"{where}: labels must be integers or strings, found a list of {names}{remedy}")
        if longest := max((len(value) for value in stored if isinstance(value, str)), default=0):
            ROW_LABEL_CHARACTERS.check(longest, f"a label of {where}")
        labels = np.array(stored)
    else:
        labels = stored
        if labels.dtype.kind not in "iuUf":
            remedies = {"S": "; save numpy.char.decode(labels)", "b": "; save labels.astype(int)"}
            remedy = remedies.get(labels.dtype.kind, "")
            raise UserError(f"{where}: labels must be integers or strings, found {labels.dtype}{remedy}")
    if labels.dtype.kind == "f":
        whole = np.isfinite(labels) & (np.abs(labels) < _MAX_EXACT_INTEGER)
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
