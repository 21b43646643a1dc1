"""CIFAR-FS (Bertinetto et al., ICLR 2019): CIFAR-100 as 64 base, 16 + 20 novel classes of 600 images, 32x32.

The classes' sides are in ``tasks/cifar-fs.csv``. A class has the 500 images that CIFAR-100 calls training images and
then its 100 test images, in the order of the files. The authors divide classes alone; which images of a base class
are held out for base/val and base/test is drawn by a hash here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from ifsl_bench.data.image_pools import ListItem, note_duplicates
from ifsl_bench.data.pickle_pools import copy_pools, images_array, labels_of, load_dict, names_of, rows_by_class
from ifsl_bench.data.published_splits import PublishedData, check_pools, columns, divided
from ifsl_bench.data.read.archive import Entry, FileTree, first_few
from ifsl_bench.data.source import BuildContext, Count, Downloadable, Layout
from ifsl_bench.utils.errors import UserError

CLASSES = "cifar-fs.csv"
SHAPE = (32, 32, 3)
COUNTS = {
    "base/train": Count(64, 64 * 480),
    "base/val": Count(64, 64 * 60),
    "base/test": Count(64, 64 * 60),
    "novel/val": Count(16, 16 * 600),
    "novel/test": Count(20, 20 * 600),
}
PARTS, META = ("train", "test"), "meta"  # the files of images, and the one that names the classes
_FOLDER = "cifar-100-python"
sides = partial(columns, CLASSES, "class", "split")  # class -> train, val or test


class Cifar100(Layout):
    title: ClassVar[str] = "the Python version of CIFAR-100 (cifar-100-python: train, test, meta)"

    def matches(self, tree: FileTree) -> bool:
        return bool(_folders(tree))

    def build(self, context: BuildContext) -> None:
        entries = _entries(context.files)
        where = context.files.where(entries[META])
        names = names_of(load_dict(context.files, entries[META], ("fine_label_names",))["fine_label_names"],
                         "'fine_label_names'", where)  # fmt: skip
        if strange := sorted(set(names) - sides().keys()):
            raise UserError(f"{where} names a class {strange[0]!r}, which is none of CIFAR-100's")
        if len(set(names)) < len(names):
            raise UserError(f"{where} gives two labels one name")
        arrays, labels = [], []
        for entry in (entries[part] for part in PARTS):
            where = context.files.where(entry)
            value = load_dict(context.files, entry, ("data", "fine_labels"))
            arrays.append(images_array(value["data"], "'data'", where, (32 * 32 * 3,)))
            labels.append(labels_of(value["fine_labels"], "'fine_labels'", len(arrays[-1]), where))
            rows_by_class(labels[-1], dict(enumerate(names)), where)
        pools = self.pools(context, names, *labels)
        images = np.concatenate(arrays).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # channels come first in the files
        copy_pools(context, pools, dict.fromkeys(pools, images), digests=True)
        items = [ListItem(part, row) for part, array in zip(PARTS, arrays, strict=True) for row in range(len(array))]
        named = {pool: {name: [items[row] for row in rows] for name, rows in pools[pool].items()} for pool in pools}
        note_duplicates(context, named)  # by file, and the row there

    def pools(
        self, context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray
    ) -> dict[str, dict[str, Sequence[int]]]:
        """Pool -> class -> rows of both files, one after the other; ``names`` are those of their labels."""
        labels = np.concatenate([train, test])
        rows = {name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)}
        pools: dict[str, dict[str, Sequence[int]]] = divided(rows, sides(), "cifar-fs")
        check_pools(context, "CIFAR-FS", COUNTS, pools)
        return pools


def _folders(tree: FileTree) -> dict[str, dict[str, Entry]]:
    """Folder -> name -> file, of folders that hold some of the three files under the archive's name, or its class
    names and images under any."""
    folders: dict[str, dict[str, Entry]] = {}
    for entry in tree.entries:
        if entry.name in (*PARTS, META):
            folders.setdefault(entry.path[: -len(entry.name)], {})[entry.name] = entry
    return {
        folder: files
        for folder, files in folders.items()
        if folder.rstrip("/").rpartition("/")[2] == _FOLDER or (META in files and len(files) > 1)
    }


def _entries(tree: FileTree) -> dict[str, Entry]:
    """The three files, by name; raises :class:`UserError` where one is missing, or there are several of each."""
    folders = _folders(tree)
    if len(folders) > 1:
        raise UserError(
            f"{tree.path} holds CIFAR-100 {len(folders)} times ({first_few(sorted(folders))}); give one of them"
        )
    (files,) = folders.values()
    if missing := [name for name in (*PARTS, META) if name not in files]:
        raise UserError(
            f"{tree.path} lacks {' and '.join(missing)}, a part of {Cifar100.title}; get cifar-100-python.tar.gz again"
        )
    return {name: files[name] for name in (*PARTS, META)}


class CifarFS(PublishedData, Downloadable):
    """The classes of Bertinetto et al. (2019), with base images held out."""

    name = "cifar-fs"
    summary: ClassVar[str] = "CIFAR-FS, 64+16+20 classes, 32x32; from CIFAR-100's cifar-100-python.tar.gz"
    layouts = (Cifar100(),)
    shape, counts, lists = SHAPE, COUNTS, (CLASSES,)

    @property
    def address(self) -> str:
        from torchvision.datasets import CIFAR100  # with torch

        return CIFAR100.url

    def fetch(self, folder: Path) -> Path:
        from torchvision.datasets import CIFAR100
        from torchvision.datasets.utils import download_url

        download_url(CIFAR100.url, folder, CIFAR100.filename, CIFAR100.tgz_md5)
        return folder / CIFAR100.filename
