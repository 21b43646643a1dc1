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
from ifsl_bench.data.published_splits import check_pools, digest, rows, shuffled
from ifsl_bench.data.read.decode import ImageSpec
from ifsl_bench.data.session_lists import SessionSource
from ifsl_bench.data.sets.mini_photographs import NAMES, Photographs, find_images
from ifsl_bench.data.source import Count, Counts, Import

LISTS = "mini-imagenet-fscil.csv.xz"
HELD_OUT = 50  # training images of a base class in base/val
COUNTS = {
    "base/train": Count(60, 60 * 450),
    "base/val": Count(60, 60 * HELD_OUT),
    "base/test": Count(60, 60 * 100),
    "novel/support": Count(40, 40 * 500),
    "novel/test": Count(40, 40 * 100),
}


class SessionPhotographs(Photographs):
    def build(self, to: Import) -> None:
        role = {row["filename"]: (row["session"] == "0", row["role"] == "test") for row in rows(LISTS)}
        base_classes = {name[:9] for name, (base, _) in role.items() if base}
        pools: dict[str, dict[str, Sequence[str]]] = {pool: {} for pool in COUNTS}
        for wnid, images in find_images(to).items():
            test = [path for name, path in images.items() if role.get(name, (False, False))[1]]
            listed = [path for name, path in images.items() if name in role and not role[name][1]]
            if wnid in base_classes:
                held_out = set(shuffled(listed, f"mini-imagenet-sessions:{wnid}")[:HELD_OUT])
                pools["base/train"][wnid] = [path for path in listed if path not in held_out]
                pools["base/val"][wnid] = [path for path in listed if path in held_out]
                pools["base/test"][wnid] = test
            else:
                others = [path for name, path in images.items() if name not in role]
                pools["novel/support"][wnid] = [*listed, *others]
                pools["novel/test"][wnid] = test
        check_pools(to, "mini-ImageNet's session lists", COUNTS, pools)
        import_images(to, pools, ImageSpec(SIZE))


class MiniSessions(SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "mini-imagenet-sessions"
    summary: ClassVar[str] = "mini-ImageNet, 60 base and 40 novel classes of the session lists; from its 60,000 JPEGs"
    forms = (SessionPhotographs(),)

    def recipe(self) -> str:
        return f"{self.name}, 1, {digest(LISTS, NAMES)}"

    def sessions(self) -> dict[str, int]:
        return {row["wnid"]: int(row["session"]) for row in rows(LISTS)}

    def outline(self) -> tuple[tuple[int, ...], Counts]:
        return SHAPE, COUNTS
