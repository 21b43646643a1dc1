"""CUB-200-2011 (Wah et al. 2011): 11,788 photographs of 200 kinds of birds.

``cub`` has 100 base, 50 + 50 novel classes, whose sides, in ``tasks/cub.csv``, are those of Chen et al. (A Closer
Look at Few-shot Classification, ICLR 2019): every second class is a base class, of the others by turns one is for
validation and one for testing. A hash draws the images of base classes for base/val and base/test. Whole images are
stretched to a square; bounding boxes are not used.

The session lists (see :mod:`ifsl_bench.data.published_splits`) have 100 base and 100 novel classes, in the order of
their numbers. They name 30 training images of a base class, of which eight are for base/val, and 11 to 30 test images
of each class; novel/support has about 30.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.published_splits import (
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
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, Layout, PoolSize

CLASSES_FILE = "cub.csv"
POOL_COUNTS = {  # of all images
    "base/train": PoolSize(100, 4_700),
    "base/val": PoolSize(100, 565),
    "base/test": PoolSize(100, 620),
    "novel/val": PoolSize(50, 2_950),
    "novel/test": PoolSize(50, 2_953),
}
_IMAGE_PATH = re.compile(r"(?:.*/)?([0-9]{3}\.[A-Za-z_-]+)/([^/]+\.jpe?g)", re.IGNORECASE)
read_side_of_class = partial(
    read_mapping_of_columns, CLASSES_FILE, "class", "split"
)  # class, "001.Black_footed_Albatross" -> train, val or test


class CubPhotographs(Layout):
    """The photographs of CUB-200-2011."""

    title: ClassVar[str] = "the photographs of CUB-200-2011 (images/001.Black_footed_Albatross/*.jpg, ...)"

    def __init__(self, size: int) -> None:
        self.size = size

    def matches(self, tree: FileTree) -> bool:
        return any(
            (match := _IMAGE_PATH.fullmatch(entry.path)) and match[1] in read_side_of_class() for entry in tree.entries
        )

    def images(self, tree: FileTree) -> dict[str, dict[str, str]]:
        """Return class -> "class/file name" -> path, both in order."""
        images = find_image_paths_by_class(
            tree, _IMAGE_PATH, lambda match: (match[1], f"{match[1]}/{match[2]}"), read_side_of_class(), "CUB-200-2011"
        )
        return {name: dict(sorted(group.items())) for name, group in images.items()}

    def build(self, context: BuildContext) -> None:
        paths = {name: list(images.values()) for name, images in self.images(context.file_tree).items()}
        pools: dict[str, dict[str, Sequence[str]]] = divide_into_pools(paths, read_side_of_class(), "cub")
        check_pool_counts(context, "CUB-200-2011", POOL_COUNTS, pools)
        import_images(context, pools, ImageSpec(self.size, fit_mode="stretch"))


class Cub(PublishedData):
    """The classes of Chen et al. (2019), with base images held out, 84x84."""

    name = "cub"
    summary: ClassVar[str] = "CUB-200-2011, 100+50+50 classes of birds, 84x84; from CUB_200_2011.tgz or its folder"
    layouts = (CubPhotographs(84),)
    image_shape, pool_counts, packaged_list_names = (84, 84, 3), POOL_COUNTS, (CLASSES_FILE,)


class Cub64(Cub):
    """The same classes and images, smaller: novel classes for tasks on images of that size."""

    name = "cub-64"
    summary: ClassVar[str] = "the same as cub, 64x64; for --novel-from, beside base classes of that size"
    layouts = (CubPhotographs(64),)
    image_shape = (64, 64, 3)


SESSION_LISTS_FILE = "cub200-fscil.csv.xz"
HELD_OUT_PER_CLASS = 8  # training images of a base class in base/val
SESSION_SIZE = 224
SESSION_LISTS_TITLE = "CUB-200-2011's session lists"
SESSION_COUNTS = {
    "base/train": PoolSize(100, 100 * 22),
    "base/val": PoolSize(100, 100 * HELD_OUT_PER_CLASS),
    "base/test": PoolSize(100, 2_864),
    "novel/support": PoolSize(100, 2_994),
    "novel/test": PoolSize(100, 2_930),
}


class CubSessionPhotographs(CubPhotographs):
    """The photographs of CUB-200-2011, divided by the session lists."""

    def build(self, context: BuildContext) -> None:
        paths = self.images(context.file_tree)
        images = [
            ListedImage(row["image"], _class_folder_of_image(row["image"]), int(row["session"]), row["role"] == "test")
            for row in read_rows(SESSION_LISTS_FILE)
        ]
        if missing := [row.image_key for row in images if row.image_key not in paths.get(row.class_name, {})]:
            report_missing_images(context, missing, f"images of {SESSION_LISTS_TITLE}")
        pools: dict[str, dict[str, Sequence[str]]] = session_pools(
            SESSION_LISTS_TITLE, images, paths, HELD_OUT_PER_CLASS, "cub-sessions"
        )
        check_pool_counts(context, SESSION_LISTS_TITLE, SESSION_COUNTS, pools)
        import_images(context, pools, ImageSpec(self.size, fit_mode="crop"))


def _class_folder_of_image(image: str) -> str:
    return image.partition("/")[0]


class CubSessions(SessionSource):
    """The classes and images of the session lists, with base/val held out of base/train; 224x224."""

    name = "cub-sessions"
    summary: ClassVar[str] = "CUB-200-2011, 100 base and 100 novel classes of the session lists; from CUB_200_2011.tgz"
    layouts = (CubSessionPhotographs(SESSION_SIZE),)
    image_shape, pool_counts, packaged_list_names = (
        (SESSION_SIZE, SESSION_SIZE, 3),
        SESSION_COUNTS,
        (SESSION_LISTS_FILE,),
    )

    def session_of_class(self) -> dict[str, int]:
        return {_class_folder_of_image(row["image"]): int(row["session"]) for row in read_rows(SESSION_LISTS_FILE)}
