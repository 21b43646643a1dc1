"""Tiny-ImageNet: 200 classes of ImageNet with 500 training images of 64x64 pixels, divided like tiered-ImageNet.

The classes' sides are in ``tasks/tiny-tiered.csv``: classes of one high-level WordNet category stay together on one of
the sides train, val and test; the train side is divided into base classes (train_a) and classes for meta-training
(train_b). Images are in order of their numbers. The folders ``val`` and ``test`` of the download are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from ifsl_bench.data.image_pools import divide_classes_into_pools, import_images
from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.published_splits import check_pool_counts, find_image_paths_by_class, read_mapping_of_columns
from ifsl_bench.data.read.archive import FileTree, natural_sort_key
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.sets.embedded import EmbeddedFeatures
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout, PoolCounts, count_files
from ifsl_bench.utils.files import sha256_json

IMAGE_SIZE, IMAGES_PER_CLASS = 64, 500
_POOL_OF_PHASE = {"train_a": "base", "train_b": "novel/train", "val": "novel/val", "test": "novel/test"}
_IMAGE_PATH = re.compile(r"(?:.*/)?train/(n[0-9]{8})/images/\1_([0-9]+)\.jpe?g", re.IGNORECASE)


@cache
def read_pool_by_wnid() -> Mapping[str, str]:
    """Return wnid -> "base" or the pool of a novel class, sorted by wnid."""
    return {
        wnid: _POOL_OF_PHASE[side]
        for wnid, side in sorted(read_mapping_of_columns("tiny-tiered.csv", "wnid", "split").items())
    }


class _TinyTrainFolder(Layout):
    title: ClassVar[str] = "Tiny-ImageNet's download (train/<wnid>/images/<wnid>_<number>.JPEG)"

    def __init__(self, most: Mapping[str, int]) -> None:
        self.most = most  # images taken of a class of each side; all where it does not say

    def matches(self, tree: FileTree) -> bool:
        return any(_IMAGE_PATH.fullmatch(entry.path) for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        def named(match: re.Match[str]) -> tuple[str, str]:
            return match[1], f"{match[1]}_{int(match[2])}.JPEG"

        images = {}
        for wnid, paths in find_image_paths_by_class(
            context.file_tree, _IMAGE_PATH, named, read_pool_by_wnid(), "Tiny-ImageNet"
        ).items():
            images[wnid] = [paths[name] for name in sorted(paths, key=natural_sort_key)][
                : self.most.get(read_pool_by_wnid()[wnid])
            ]
        there = divide_classes_into_pools(images, read_pool_by_wnid())
        pools = {pool: dict(there.get(pool, {})) for pool in POOL_NAMES}
        whole = divide_classes_into_pools(
            {wnid: [""] * IMAGES_PER_CLASS for wnid in read_pool_by_wnid()}, read_pool_by_wnid()
        )
        check_pool_counts(context, "Tiny-ImageNet", count_files(whole), pools)
        import_images(context, pools, ImageSpec(IMAGE_SIZE))


class TinyImageNet(DatasetSource):
    """Tiny-ImageNet with tiered-ImageNet's kind of split."""

    name = "tiny"
    summary: ClassVar[str] = "Tiny-ImageNet, 200 classes, 64x64; from the public tiny-imagenet-200.zip or its folder"
    max_images_per_class: ClassVar[Mapping[str, int]] = {}

    def __init__(self) -> None:
        self.layouts = (_TinyTrainFolder(self.max_images_per_class),)

    def recipe(self) -> str:
        return f"Tiny-ImageNet, 1, {sha256_json([dict(read_pool_by_wnid()), dict(self.max_images_per_class)])[:16]}"

    def expected_shape_and_counts(self) -> tuple[tuple[int, ...], PoolCounts]:
        per_class = {
            wnid: [""] * self.max_images_per_class.get(side, IMAGES_PER_CLASS)
            for wnid, side in read_pool_by_wnid().items()
        }
        return (IMAGE_SIZE, IMAGE_SIZE, 3), count_files(divide_classes_into_pools(per_class, read_pool_by_wnid()))


class TinyPack(TinyImageNet):
    """The first images of each class: half the size, and enough for a leaderboard on a CPU."""

    name = "tiny-pack"
    summary: ClassVar[str] = "the first 180 to 360 images of each of Tiny-ImageNet's classes, always partial"
    max_images_per_class: ClassVar[Mapping[str, int]] = {
        "base": 360,
        "novel/train": 180,
        "novel/val": 180,
        "novel/test": 225,
    }


class TinyFeatures(EmbeddedFeatures):
    """The features of :class:`TinyPack`'s images under the two backbones of its tasks."""

    name = "tiny-features"
    summary: ClassVar[str] = "features of tiny-pack's images under its two backbones; embedded, no download"
