"""mini-ImageNet for few-shot class-incremental learning: the classes and images of the session lists that TOPIC (Tao et
al., CVPR 2020), CEC (Zhang et al., CVPR 2021) and most papers after them use. 60 base classes, 40 novel ones.

The lists give each class 500 training and 100 test images, and name five of the 500 as a novel class's supports. Of a
base class, 50 training images are held out here as base/val, drawn by a hash: options and biases are chosen on them.
Novel classes have their test images in novel/test and the others in novel/support, those of the lists first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.pickle_pools import SHAPE, SIZE
from ifsl_bench.data.published_splits import (
    COUNTS_60_40,
    HELD_OUT,
    ListedImage,
    SessionSource,
    check_pools,
    rows,
    session_pools,
)
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.sets.mini import NAMES, Photographs, listed_images
from ifsl_bench.data.source import BuildContext

LISTS = "mini-imagenet-fscil.csv.xz"
WHAT = "mini-ImageNet's session lists"


class SessionPhotographs(Photographs):
    def build(self, context: BuildContext) -> None:
        images = (
            ListedImage(row["filename"], row["wnid"], int(row["session"]), row["role"] == "test") for row in rows(LISTS)
        )
        pools: dict[str, dict[str, Sequence[str]]] = session_pools(
            WHAT, images, listed_images(context), HELD_OUT, "mini-imagenet-sessions"
        )
        check_pools(context, WHAT, COUNTS_60_40, pools)
        import_images(context, pools, ImageSpec(SIZE))


class MiniSessions(SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "mini-imagenet-sessions"
    summary: ClassVar[str] = "mini-ImageNet, 60 base and 40 novel classes of the session lists; from its 60,000 JPEGs"
    layouts = (SessionPhotographs(),)
    shape, counts, lists = SHAPE, COUNTS_60_40, (LISTS, NAMES)

    def sessions(self) -> dict[str, int]:
        return {row["wnid"]: int(row["session"]) for row in rows(LISTS)}
