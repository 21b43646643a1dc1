"""CUB-200-2011 for few-shot class-incremental learning: the session lists that TOPIC (Tao et al., CVPR 2020), CEC
(Zhang et al., CVPR 2021) and most papers after them use. 100 base classes, 100 novel ones, in the order of their
numbers.

The lists name 30 training images of a base class, five of a novel class, and 11 to 30 test images of each. Of a base
class, eight training images are held out here as base/val, drawn by a hash: options and biases are chosen on them.
Novel classes have their test images in novel/test and the others, about 30, in novel/support, those of the lists first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.published_splits import (
    ListedImage,
    SessionSource,
    check_pools,
    report_missing,
    rows,
    session_pools,
)
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.sets.cub import Photographs
from ifsl_bench.data.source import BuildContext, Count

LISTS = "cub200-fscil.csv.xz"
HELD_OUT = 8  # training images of a base class in base/val
SIZE = 224
WHAT = "CUB-200-2011's session lists"
COUNTS = {
    "base/train": Count(100, 100 * 22),
    "base/val": Count(100, 100 * HELD_OUT),
    "base/test": Count(100, 2_864),
    "novel/support": Count(100, 2_994),
    "novel/test": Count(100, 2_930),
}


class SessionPhotographs(Photographs):
    def build(self, context: BuildContext) -> None:
        paths = self.images(context.files)
        images = [ListedImage(row["image"], _class(row["image"]), int(row["session"]), row["role"] == "test")
                  for row in rows(LISTS)]  # fmt: skip
        if missing := [row.image for row in images if row.image not in paths.get(row.name, {})]:
            report_missing(context, missing, f"images of {WHAT}")
        pools: dict[str, dict[str, Sequence[str]]] = session_pools(WHAT, images, paths, HELD_OUT, "cub-sessions")
        check_pools(context, WHAT, COUNTS, pools)
        import_images(context, pools, ImageSpec(self.size, fit="crop"))


def _class(image: str) -> str:
    return image.partition("/")[0]


class CubSessions(SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train; 224x224."""

    name = "cub-sessions"
    summary: ClassVar[str] = "CUB-200-2011, 100 base and 100 novel classes of the session lists; from CUB_200_2011.tgz"
    layouts = (SessionPhotographs(SIZE),)
    shape, counts, lists = (SIZE, SIZE, 3), COUNTS, (LISTS,)

    def sessions(self) -> dict[str, int]:
        return {_class(row["image"]): int(row["session"]) for row in rows(LISTS)}
