"""CUB-200-2011 (Wah et al. 2011), 11,788 photographs of 200 kinds of birds, as 100 base, 50 + 50 novel classes.

The classes' sides, in ``tasks/cub.csv``, are those of Chen et al. (A Closer Look at Few-shot Classification, ICLR
2019): of the classes in the order of their numbers, the first and each second one from there are base classes, of the
others by turns one is for validation and one for testing. Which images of a base class are held out for base/val and
base/test is drawn by a hash here. Whole images are stretched to a square; bounding boxes are not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.published_splits import PublishedData, check_pools, columns, divided, find_images
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, Count, Layout

CLASSES = "cub.csv"
COUNTS = {  # of the images of each class that the list has
    "base/train": Count(100, 4_700),
    "base/val": Count(100, 565),
    "base/test": Count(100, 620),
    "novel/val": Count(50, 2_950),
    "novel/test": Count(50, 2_953),
}
_IMAGE = re.compile(r"(?:.*/)?([0-9]{3}\.[A-Za-z_-]+)/([^/]+\.jpe?g)", re.IGNORECASE)
sides = partial(columns, CLASSES, "class", "split")  # class, "001.Black_footed_Albatross" -> train, val or test


class Photographs(Layout):
    title: ClassVar[str] = "the photographs of CUB-200-2011 (images/001.Black_footed_Albatross/*.jpg, ...)"

    def __init__(self, size: int) -> None:
        self.size = size

    def matches(self, tree: FileTree) -> bool:
        return any((match := _IMAGE.fullmatch(entry.path)) and match[1] in sides() for entry in tree.entries)

    def images(self, tree: FileTree) -> dict[str, dict[str, str]]:
        """Class -> "class/file name" -> path, both in order."""
        images = find_images(tree, _IMAGE, lambda match: (match[1], f"{match[1]}/{match[2]}"), sides(), "CUB-200-2011")
        return {name: dict(sorted(group.items())) for name, group in images.items()}

    def build(self, context: BuildContext) -> None:
        paths = {name: list(images.values()) for name, images in self.images(context.files).items()}
        pools: dict[str, dict[str, Sequence[str]]] = divided(paths, sides(), "cub")
        check_pools(context, "CUB-200-2011", COUNTS, pools)
        import_images(context, pools, ImageSpec(self.size, fit="stretch"))


class Cub(PublishedData):
    """The classes of Chen et al. (2019), with base images held out, 84x84."""

    name = "cub"
    summary: ClassVar[str] = "CUB-200-2011, 100+50+50 classes of birds, 84x84; from CUB_200_2011.tgz or its folder"
    layouts = (Photographs(84),)
    shape, counts, lists = (84, 84, 3), COUNTS, (CLASSES,)


class Cub64(Cub):
    """The same classes and images, smaller: novel classes for tasks on images of that size."""

    name = "cub-64"
    summary: ClassVar[str] = "the same as cub, 64x64; for --novel-from, beside base classes of that size"
    layouts = (Photographs(64),)
    shape = (64, 64, 3)
