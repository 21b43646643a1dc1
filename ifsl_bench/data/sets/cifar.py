"""CIFAR-100 as CIFAR-FS (Bertinetto et al., ICLR 2019) and for few-shot class-incremental learning.

CIFAR-FS has 64 base, 16 + 20 novel classes of 600 images, 32x32; their sides are in ``tasks/cifar-fs.csv``. A class
has its 500 training images and then its 100 test images, in the order of the files. The authors divide classes alone;
a hash draws the images of base classes for base/val and base/test.

The session lists (see :mod:`ifsl_bench.data.published_splits`) have 60 base and 40 novel classes, in the order of their
labels. They name all 500 training images of a base class, of which 50 are for base/val, and all 100 test images. Of a
novel class they name five training images, by their rows in the Python version, which PNG files have lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from ifsl_bench.data.image_pools import ListItem, import_images, report_duplicates
from ifsl_bench.data.pickle_pools import (
    group_rows_by_class,
    load_pickled_dict,
    to_class_names,
    to_image_array,
    to_integer_array,
    write_pools_from_arrays,
)
from ifsl_bench.data.published_splits import (
    COUNTS_60_40,
    HELD_OUT_PER_CLASS,
    ListedImage,
    PublishedData,
    SessionSource,
    check_pool_counts,
    divide_into_pools,
    find_image_paths_by_class,
    read_mapping_of_columns,
    read_rows,
    report_missing_images,
    session_pools,
)
from ifsl_bench.data.read.archive import Entry, FileTree, format_first_names, natural_sort_key
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, Downloadable, Layout, PoolSize
from ifsl_bench.utils.errors import UserError

CLASSES_FILE = "cifar-fs.csv"
IMAGE_SHAPE = (32, 32, 3)
POOL_COUNTS = {
    "base/train": PoolSize(64, 64 * 480),
    "base/val": PoolSize(64, 64 * 60),
    "base/test": PoolSize(64, 64 * 60),
    "novel/val": PoolSize(16, 16 * 600),
    "novel/test": PoolSize(20, 20 * 600),
}
PARTS, META = ("train", "test"), "meta"  # the files of images, and the one that names the classes
IMAGES_PER_CLASS_OF_FILE = {"train": 500, "test": 100}  # images of a class in each part
_ARCHIVE_FOLDER_NAME = "cifar-100-python"
# A class's folder in the folder of a part, which some call training or val, or below the folder of its superclass.
_PNG_PATH_PATTERN = re.compile(r"(?:.*/)?(train|test|val)[a-z]*/(?:[^/]+/)?([^/]+)/([^/]+\.png)", re.IGNORECASE)
read_side_of_class = partial(read_mapping_of_columns, CLASSES_FILE, "class", "split")  # class -> train, val or test


class Cifar100(Layout):
    """The Python version of CIFAR-100."""

    title: ClassVar[str] = "the Python version of CIFAR-100 (cifar-100-python: train, test, meta)"

    def matches(self, tree: FileTree) -> bool:
        return bool(_find_archive_folders(tree))

    def build(self, context: BuildContext) -> None:
        entries = _find_archive_entries(context.file_tree)
        where = context.file_tree.format_location(entries[META])
        names = to_class_names(
            load_pickled_dict(context.file_tree, entries[META], ("fine_label_names",))["fine_label_names"],
            "'fine_label_names'",
            where,
        )
        if strange := sorted(set(names) - read_side_of_class().keys()):
            raise UserError(f"{where} names a class {strange[0]!r}, which is none of CIFAR-100's")
        if len(set(names)) < len(names):
            raise UserError(f"{where} gives two labels one name")
        arrays, labels = [], []
        for entry in (entries[part] for part in PARTS):
            where = context.file_tree.format_location(entry)
            value = load_pickled_dict(context.file_tree, entry, ("data", "fine_labels"))
            arrays.append(to_image_array(value["data"], "'data'", where, (32 * 32 * 3,)))
            labels.append(to_integer_array(value["fine_labels"], "'fine_labels'", where, len(arrays[-1])))
            group_rows_by_class(labels[-1], dict(enumerate(names)), where)
        pools = self.divide_into_pools(context, names, *labels)
        images = np.concatenate(arrays).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # channels come first in the files
        write_pools_from_arrays(context, pools, dict.fromkeys(pools, images), digests=True)
        items = [ListItem(part, row) for part, array in zip(PARTS, arrays, strict=True) for row in range(len(array))]
        named = {pool: {name: [items[row] for row in group] for name, group in pools[pool].items()} for pool in pools}
        report_duplicates(context, named)  # by file, and the row there

    def divide_into_pools(
        self, context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray
    ) -> dict[str, dict[str, Sequence[int]]]:
        """Return pool -> class -> rows of both files, as if concatenated.

        Args:
            context: State of the build.
            names: Names of the labels.
            train: Labels of the training images, int64 [n].
            test: Labels of the test images, int64 [m].
        """
        labels = np.concatenate([train, test])
        groups = {name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)}
        pools: dict[str, dict[str, Sequence[int]]] = divide_into_pools(groups, read_side_of_class(), "cifar-fs")
        check_pool_counts(context, "CIFAR-FS", POOL_COUNTS, pools)
        return pools


def _find_archive_folders(tree: FileTree) -> dict[str, dict[str, Entry]]:
    """Return folder -> name -> file, of folders with the archive's name, or with the class names and some images."""
    folders: dict[str, dict[str, Entry]] = {}
    for entry in tree.entries:
        if entry.name in (*PARTS, META):
            folders.setdefault(entry.path[: -len(entry.name)], {})[entry.name] = entry
    return {
        folder: files
        for folder, files in folders.items()
        if folder.rstrip("/").rpartition("/")[2] == _ARCHIVE_FOLDER_NAME or (META in files and len(files) > 1)
    }


def _find_archive_entries(tree: FileTree) -> dict[str, Entry]:
    """Return the three files by name; raise UserError if one is missing, or there are several of each."""
    folders = _find_archive_folders(tree)
    if len(folders) > 1:
        raise UserError(
            f"{tree.path} holds CIFAR-100 {len(folders)} times ({format_first_names(sorted(folders))}); give one of "
            "them"
        )
    (files,) = folders.values()
    if missing := [name for name in (*PARTS, META) if name not in files]:
        raise UserError(
            f"{tree.path} lacks {' and '.join(missing)}, a part of {Cifar100.title}; get cifar-100-python.tar.gz again"
        )
    return {name: files[name] for name in (*PARTS, META)}


class CifarFolders(Layout):
    """CIFAR-100 as PNG files, in a folder for each class; a class's images are in the order of their names."""

    title: ClassVar[str] = "CIFAR-100 as PNG files (train/apple/*.png, ..., test/apple/*.png, ...)"

    def matches(self, tree: FileTree) -> bool:
        return any(
            (match := _PNG_PATH_PATTERN.fullmatch(entry.path)) and _class_name_of_match(match) in read_side_of_class()
            for entry in tree.entries
        )

    def build(self, context: BuildContext) -> None:
        whole = {
            f"{part}/{name}": count
            for part, count in IMAGES_PER_CLASS_OF_FILE.items()
            for name in sorted(read_side_of_class())
        }

        def named(match: re.Match[str]) -> tuple[str, str]:
            part = "train" if match[1].lower() == "train" else "test"
            return f"{part}/{_class_name_of_match(match)}", match[3]

        found = find_image_paths_by_class(context.file_tree, _PNG_PATH_PATTERN, named, whole, "CIFAR-100")
        images = {
            group: [paths[name] for name in sorted(paths, key=natural_sort_key)] for group, paths in found.items()
        }
        missing = {group: max(0, count - len(images.get(group, ()))) for group, count in whole.items()}
        if lacking := sum(missing.values()):
            which = format_first_names([f"{count} of {group}" for group, count in missing.items() if count])
            lacks = f"{lacking:,} of CIFAR-100's {sum(whole.values()):,} images: {which}"
            context.require_complete_unless_partial(
                f"missing are {lacks}", f"{context.origin} lacks {lacks}. Get the whole"
            )
        by_part = {
            part: {name: images.get(f"{part}/{name}", []) for name in sorted(read_side_of_class())} for part in PARTS
        }
        import_images(context, self.divide_into_pools(context, by_part), ImageSpec(IMAGE_SHAPE[0]))

    def divide_into_pools(
        self, context: BuildContext, images: Mapping[str, Mapping[str, Sequence[str]]]
    ) -> dict[str, dict[str, Sequence[str]]]:
        """Return pool -> class -> paths.

        Args:
            context: State of the build.
            images: Part (train or test) -> class -> paths, in order.
        """
        groups = {name: [*paths, *images["test"][name]] for name, paths in images["train"].items()}
        pools: dict[str, dict[str, Sequence[str]]] = divide_into_pools(groups, read_side_of_class(), "cifar-fs")
        check_pool_counts(context, "CIFAR-FS", POOL_COUNTS, pools)
        return pools


def _class_name_of_match(match: re.Match[str]) -> str:
    return re.sub("[ -]", "_", match[2].lower())


class CifarFS(PublishedData, Downloadable):
    """The classes of Bertinetto et al. (2019), with base images held out."""

    name = "cifar-fs"
    summary: ClassVar[str] = "CIFAR-FS, 64+16+20 classes, 32x32; from CIFAR-100's cifar-100-python.tar.gz or PNGs"
    layouts = (Cifar100(), CifarFolders())
    image_shape, pool_counts, packaged_list_names = IMAGE_SHAPE, POOL_COUNTS, (CLASSES_FILE,)

    @property
    def archive_url(self) -> str:
        from torchvision.datasets import CIFAR100  # with torch

        return CIFAR100.url

    def download_archive(self, folder: Path) -> Path:
        from torchvision.datasets import CIFAR100
        from torchvision.datasets.utils import download_url

        download_url(CIFAR100.url, folder, CIFAR100.filename, CIFAR100.tgz_md5)
        return folder / CIFAR100.filename


SESSION_LISTS_FILE = "cifar100-fscil.csv.xz"
SESSION_LISTS_TITLE = "CIFAR-100's session lists"


class SessionArrays(Cifar100):
    """The Python version of CIFAR-100, divided by the session lists."""

    def divide_into_pools(
        self, context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray
    ) -> dict[str, dict[str, Sequence[int]]]:
        images: dict[str, dict[str, int]] = {name: {} for name in names}
        for start, part, labels in ((0, PARTS[0], train), (len(train), PARTS[1], test)):
            for row, label in enumerate(labels):
                images[names[label]][f"{part}[{row}]"] = start + row
        pools: dict[str, dict[str, Sequence[int]]] = session_pools(
            SESSION_LISTS_TITLE,
            _iterate_listed_images(context, names, train, test),
            images,
            HELD_OUT_PER_CLASS,
            "cifar100-sessions",
        )
        check_pool_counts(context, SESSION_LISTS_TITLE, COUNTS_60_40, pools)
        return pools


def _iterate_listed_images(
    context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray
) -> Iterator[ListedImage]:
    """Yield the rows of the list that the files have; raise UserError if a label of the files is another."""
    labels, missing = {PARTS[0]: train, PARTS[1]: test}, []
    session_of = {row["fine_label"]: row["session"] for row in read_rows(SESSION_LISTS_FILE) if row["role"] == PARTS[1]}
    for row in read_rows(SESSION_LISTS_FILE):
        part, index, session = row["role"], int(row["index"]), row["session"]
        if index >= len(labels[part]):
            missing.append(f"{part}[{index}]")
            continue
        label = str(labels[part][index])
        if session_of.get(label) != session or row["fine_label"] not in ("", label):
            raise UserError(
                f"{context.origin}: {part}[{index}] is of class {names[int(label)]!r}, in {SESSION_LISTS_TITLE} it is "
                f"of another; get cifar-100-python.tar.gz again"
            )
        yield ListedImage(f"{part}[{index}]", names[int(label)], int(session), part == PARTS[1])
    if missing:
        report_missing_images(context, missing, f"images of {SESSION_LISTS_TITLE}")


class SessionFolders(CifarFolders):
    """CIFAR-100 as PNG files, divided by the session lists; which supports they name is not known."""

    def divide_into_pools(
        self, context: BuildContext, images: Mapping[str, Mapping[str, Sequence[str]]]
    ) -> dict[str, dict[str, Sequence[str]]]:
        listed = [
            ListedImage(path, name, session, part == "test")
            for part in PARTS
            for name, session in _read_session_of_class().items()
            for path in images[part][name]
            if part == "test" or session == 0
        ]
        by_class = {
            name: {path: path for part in PARTS for path in images[part][name]} for name in read_side_of_class()
        }
        pools: dict[str, dict[str, Sequence[str]]] = session_pools(
            SESSION_LISTS_TITLE, listed, by_class, HELD_OUT_PER_CLASS, "cifar100-sessions"
        )
        check_pool_counts(context, SESSION_LISTS_TITLE, COUNTS_60_40, pools)
        context.about["supports_unknown"] = (
            "the list names the supports by their rows in CIFAR-100's Python version, and PNG files do not say what "
            "rows they were; make the data set from cifar-100-python.tar.gz"
        )
        return pools


def _read_session_of_class() -> dict[str, int]:
    """Return class -> session, in the order of the list."""
    names = sorted(read_side_of_class())  # a class's label is its place
    return {
        names[int(row["fine_label"])]: int(row["session"]) for row in read_rows(SESSION_LISTS_FILE) if row["fine_label"]
    }


class CifarSessions(CifarFS, SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "cifar100-sessions"
    summary: ClassVar[str] = (
        "CIFAR-100, 60 base and 40 novel classes of the session lists; from cifar-100-python.tar.gz or PNGs"
    )
    layouts = (SessionArrays(), SessionFolders())
    pool_counts, packaged_list_names = COUNTS_60_40, (SESSION_LISTS_FILE,)

    def session_of_class(self) -> dict[str, int]:
        return _read_session_of_class()
