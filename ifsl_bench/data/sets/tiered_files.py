"""The files in which tiered-ImageNet was released: labels by class name, images as a list of PNGs or as one array."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pickle_pools import images_array, integers, load_dict, required, text
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.npz import npz_arrays

NAMES, SYNSETS = "class_names.txt", "synsets.txt"


def class_names(tree: FileTree, wanted: Mapping[str, str], what: str) -> dict[str, str]:
    """Class name -> wnid, from two lists that belong to the release, line by line.

    Args:
        wanted: the wnids of the data set; some names belong to two classes of ILSVRC-2012, but to one of these.

    Raises:
        UserError: a list is missing, or they do not go together.
    """
    lists = []
    for name in (NAMES, SYNSETS):
        entry = required(tree, name, f"{what}, by which classes are known")
        lists.append([line.strip() for line in tree.read(entry).decode("utf-8", "replace").rstrip().splitlines()])
    names, wnids = lists
    if len(names) != len(wnids):
        raise UserError(f"{tree.path}: {NAMES} has {len(names):,} lines, {SYNSETS} has {len(wnids):,}; get both again")
    known: dict[str, str] = {}
    for name, wnid in zip(names, wnids, strict=True):
        if wnid in wanted and known.setdefault(name, wnid) != wnid:
            raise UserError(f"{tree.path}: {NAMES} calls two classes {name!r}, {known[name]} and {wnid}")
    return known


def read_labels(tree: FileTree, entry: Entry, names: Mapping[str, str]) -> tuple[np.ndarray, dict[str, list[int]]]:
    """The label of each image, int64 [n], and wnid -> rows.

    Raises:
        UserError: the file is not as it should be, or has a class of another name.
    """
    where = tree.where(entry)
    value = load_dict(tree, entry, ("label_specific", "label_specific_str"))
    labels = integers(value["label_specific"], "'label_specific'", where)
    written = value["label_specific_str"]
    if not isinstance(written, (list, tuple, np.ndarray)):
        raise UserError(f"'label_specific_str' of {where} is a {type(written).__name__}, expected a list of names")
    called = [text(name) for name in (np.atleast_1d(written) if isinstance(written, np.ndarray) else written)]
    present = np.unique(labels).tolist()
    if present and not 0 <= present[0] <= present[-1] < len(called):
        raise UserError(f"{where} has labels {present[0]} to {present[-1]} and {len(called):,} class names")
    groups: dict[str, list[int]] = {}
    order = np.argsort(labels, kind="stable")
    for label, rows in zip(present, np.split(order, np.flatnonzero(np.diff(labels[order])) + 1), strict=False):
        wnid = names.get(called[label])
        if wnid is None:
            raise UserError(f"{where} has a class {called[label]!r}, which is none of tiered-ImageNet's in {NAMES}")
        if wnid in groups:
            raise UserError(f"{where} has two classes called {called[label]!r}")
        groups[wnid] = rows.tolist()
    return labels, groups


def images_entry(tree: FileTree, prefix: str, what: str) -> Entry:
    """The images of a pair of files: as PNGs if they are there, else decompressed."""
    return tree.named(f"{prefix}_images_png.pkl") or tree.named(f"{prefix}_images.npz") or required(
        tree, f"{prefix}_images_png.pkl", what)  # fmt: skip


def is_npz(entry: Entry) -> bool:
    return entry.name.endswith(".npz")


def npz_images(tree: FileTree, entry: Entry, count: int) -> np.ndarray:
    """The images of an .npz file, uint8 [``count``, 84, 84, 3]; OpenCV read them, so they are blue, green, red."""
    where = tree.where(entry)
    with tree.readable(entry), tree.open(entry) as file:
        images = images_array(npz_arrays(file, where, "images")["images"], "'images'", where)
    if len(images) != count:
        raise UserError(f"{where} has {len(images):,} images, the labels beside it are {count:,}")
    return images
