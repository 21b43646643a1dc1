"""mini-ImageNet (Vinyals et al. 2016; classes of Ravi and Larochelle 2017): 64 base, 16 + 20 novel classes, 84x84.

``mini-imagenet`` is the data of Gidaris and Komodakis (LwoF, CVPR 2018) and of Ren et al. (NeurIPS 2019): besides the
60,000 images it has others of the base classes, base/val and base/test, whose choice is not published as a list. The
variants have other ones: ``mini-imagenet-ilsvrc`` draws them from ILSVRC-2012, ``mini-imagenet-held-out`` holds them
out of the 600 a class that mini-ImageNet itself has.

The session lists (see :mod:`ifsl_bench.data.published_splits`) have 60 base and 40 novel classes. They give each class
500 training images, of which 50 of a base class are for base/val, and 100 test images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.pickle_pools import (
    IMAGE_SHAPE,
    IMAGE_SIZE,
    decode_text,
    find_required_entry,
    group_rows_by_class,
    load_pickled_dict,
    to_image_array,
    to_integer_array,
    write_pools_from_arrays,
)
from ifsl_bench.data.published_splits import (
    COUNTS_60_40,
    HELD_OUT_PER_CLASS,
    IlsvrcLayout,
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
    shuffle_by_hash,
)
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, Layout, PoolSize
from ifsl_bench.utils.errors import UserError

CLASSES_FILE, ORIGINAL_NAMES_FILE = "mini-imagenet.csv", "mini-imagenet-original-names.csv.xz"
POOL_COUNTS = {  # Ren et al. (2019), appendix, "Dataset Statistics"
    "base/train": PoolSize(64, 38_400),
    "base/val": PoolSize(64, 18_748),
    "base/test": PoolSize(64, 19_200),
    "novel/val": PoolSize(16, 9_600),
    "novel/test": PoolSize(20, 12_000),
}
HELD_OUT_COUNTS = POOL_COUNTS | {
    "base/train": PoolSize(64, 64 * 480),
    "base/val": PoolSize(64, 64 * 60),
    "base/test": PoolSize(64, 64 * 60),
}
HELD_OUT_NAME = "mini-imagenet-held-out"
HELD_OUT_IMAGES_PER_CLASS = 300  # images of a base class in base/test, and at most in base/val
_IMAGE_NAME = re.compile(r"(?:.*/)?(n[0-9]{8})([0-9]{8})\.jpe?g", re.IGNORECASE)
_SIDE_OF_POOL = {
    "base/train": "train",
    "base/val": "train",
    "base/test": "train",
    "novel/val": "val",
    "novel/test": "test",
}
read_side_of_wnid = partial(read_mapping_of_columns, CLASSES_FILE, "wnid", "split")  # wnid -> train, val or test


def _check_sides(groups: Mapping[str, Any], side: str, where: str) -> None:
    for wnid in groups:
        if read_side_of_wnid().get(wnid) != side:
            status = f"is a {read_side_of_wnid()[wnid]} class" if wnid in read_side_of_wnid() else "is no class"
            raise UserError(f"{where} has class {wnid!r} among its {side} classes, which {status} of mini-ImageNet")


class LwofPickles(Layout):
    """The pickles of LwoF and of Ren et al. (2019), one for each pool."""

    title: ClassVar[str] = "the pickles of LwoF and of Ren et al. (2019) (miniImageNet_category_split_*.pickle)"
    file_name_of_pool: ClassVar[Mapping[str, str]] = {
        pool: f"miniImageNet_category_split_{part}.pickle"
        for pool, part in zip(
            POOL_COUNTS, ("train_phase_train", "train_phase_val", "train_phase_test", "val", "test"), strict=True
        )
    }

    def matches(self, tree: FileTree) -> bool:
        return any(entry.name in self.file_name_of_pool.values() for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        entries = {
            pool: find_required_entry(context.file_tree, name, self.title)
            for pool, name in self.file_name_of_pool.items()
        }
        arrays: dict[str, np.ndarray] = {}
        pools: dict[str, dict[str, Sequence[int]]] = {}
        for pool, entry in entries.items():
            where = context.file_tree.format_location(entry)
            value = load_pickled_dict(context.file_tree, entry, ("data", "labels", "catname2label"))
            arrays[pool] = to_image_array(value["data"], "'data'", where)
            pools[pool] = _rows_by_wnid_from_labels(value, len(arrays[pool]), where)
            _check_sides(pools[pool], _SIDE_OF_POOL[pool], where)
        check_pool_counts(context, "mini-ImageNet", POOL_COUNTS, pools)
        write_pools_from_arrays(context, pools, arrays)


def _rows_by_wnid_from_labels(value: Mapping[str, Any], count: int, where: str) -> dict[str, Sequence[int]]:
    """Return wnid -> rows, from a label for each row and a label for each wnid."""
    labels = to_integer_array(value["labels"], "'labels'", where, count)
    if not isinstance(value["catname2label"], dict):
        raise UserError(f"'catname2label' of {where} is no dict of class names and labels")
    numbers = to_integer_array(list(value["catname2label"].values()), "'catname2label'", where).tolist()
    names = {number: decode_text(name) for number, name in zip(numbers, value["catname2label"], strict=True)}
    return dict(group_rows_by_class(labels, names, where))


class Learn2learnCaches(Layout):
    """The caches of learn2learn, one for each side of the split."""

    title: ClassVar[str] = "the caches of learn2learn (mini-imagenet-cache-{train,validation,test}.pkl)"
    file_names_of_side: ClassVar[Mapping[str, Sequence[str]]] = {
        side: [f"mini-imagenet-cache-{name}.pkl" for name in names]
        for side, names in {"train": ["train"], "val": ["validation", "val"], "test": ["test"]}.items()
    }

    def matches(self, tree: FileTree) -> bool:
        return any(entry.name in names for entry in tree.entries for names in self.file_names_of_side.values())

    def build(self, context: BuildContext) -> None:
        tree = context.file_tree
        entries = {
            side: next((e for name in names[1:] if (e := tree.find_by_name(name))), None)
            or find_required_entry(tree, names[0], self.title)
            for side, names in self.file_names_of_side.items()
        }
        arrays: dict[str, np.ndarray] = {}
        class_rows: dict[str, list[int]] = {}
        for side, entry in entries.items():
            where = tree.format_location(entry)
            value = load_pickled_dict(tree, entry, ("image_data", "class_dict"))
            arrays[side] = to_image_array(value["image_data"], "'image_data'", where)
            groups = _read_rows_by_wnid(value["class_dict"], len(arrays[side]), where)
            _check_sides(groups, side, where)
            class_rows |= groups
        pools: dict[str, dict[str, Sequence[int]]] = divide_into_pools(class_rows, read_side_of_wnid(), HELD_OUT_NAME)
        check_pool_counts(context, "mini-ImageNet", HELD_OUT_COUNTS, pools)
        write_pools_from_arrays(context, pools, {pool: arrays[_SIDE_OF_POOL[pool]] for pool in pools})


def _read_rows_by_wnid(value: object, count: int, where: str) -> dict[str, list[int]]:
    """Return wnid -> rows of a cache."""
    if not isinstance(value, dict):
        raise UserError(f"'class_dict' of {where} is a {type(value).__name__}, expected a dict of rows for each class")
    groups = {
        decode_text(name): to_integer_array(rows, f"class {decode_text(name)!r}", where).tolist()
        for name, rows in value.items()
    }
    used = [row for rows in groups.values() for row in rows]
    if used and not 0 <= min(used) <= max(used) < count:
        wrong = next(row for row in used if not 0 <= row < count)
        raise UserError(f"'class_dict' of {where} names row {wrong}, 'image_data' has {count:,}")
    if len(set(used)) < len(used):
        raise UserError(f"'class_dict' of {where} names an image twice")
    return groups


class MiniIlsvrcPhotographs(IlsvrcLayout):
    """The training images of ILSVRC-2012.

    Of the images of a base class that are not in mini-ImageNet, 300 are drawn for base/test, and up to 300 others for
    base/val; LwoF's counts come to the same numbers.
    """

    def build(self, context: BuildContext) -> None:
        taken = set(read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original").values())
        pools: dict[str, dict[str, Sequence[str]]] = {pool: {} for pool in POOL_COUNTS}
        for wnid, images in self.images(context.file_tree).items():
            if wnid not in read_side_of_wnid():
                continue
            mine = [path for name, path in images.items() if name in taken]
            if read_side_of_wnid()[wnid] != "train":
                pools[f"novel/{read_side_of_wnid()[wnid]}"][wnid] = mine
                continue
            others = [name for name in images if name not in taken]
            order = shuffle_by_hash(others, f"mini-imagenet-ilsvrc:{wnid}")
            test = (
                HELD_OUT_IMAGES_PER_CLASS if len(order) > HELD_OUT_IMAGES_PER_CLASS else (len(order) + 1) // 2
            )  # fewer only where the folder is not whole
            for pool, part in (
                ("base/test", order[:test]),
                ("base/val", order[test : test + HELD_OUT_IMAGES_PER_CLASS]),
            ):
                chosen = set(part)
                pools[pool][wnid] = [images[name] for name in others if name in chosen]
            pools["base/train"][wnid] = mine
        check_pool_counts(context, "mini-ImageNet", POOL_COUNTS, pools)
        import_images(context, pools, ImageSpec(IMAGE_SIZE, fit_mode="stretch"))


class MiniPhotographs(Layout):
    """The 60,000 JPEGs, 84x84, in any folders, under the names of Ravi and Larochelle (ICLR 2017)."""

    title: ClassVar[str] = "the 60,000 images of mini-ImageNet (n0153282900000005.jpg, ...)"

    def matches(self, tree: FileTree) -> bool:
        return any(_IMAGE_NAME.fullmatch(entry.path) for entry in tree.entries)


def image_paths_by_wnid(context: BuildContext) -> dict[str, dict[str, str]]:
    """Return wnid -> file name -> path in ``context.files``, both in the order of the published list.

    Raises:
        UserError: A file of the list is missing and the user has not allowed it, or it is there twice.
    """
    there = find_image_paths_by_class(
        context.file_tree, _IMAGE_NAME, lambda match: (match[1].lower(), f"{match[1]}{match[2]}.jpg".lower())
    )
    images: dict[str, dict[str, str]] = {}
    missing = []
    for name in read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original"):
        if (path := there.get(name[:9], {}).get(name)) is None:
            missing.append(name)
        else:
            images.setdefault(name[:9], {})[name] = path
    if missing:
        report_missing_images(context, missing, "of the 60,000 images of mini-ImageNet")
    return images


class HeldOutPhotographs(MiniPhotographs):
    """The photographs of mini-ImageNet, with base/val and base/test drawn from the images of the base classes."""

    def build(self, context: BuildContext) -> None:
        paths = {wnid: list(images.values()) for wnid, images in image_paths_by_wnid(context).items()}
        pools: dict[str, dict[str, Sequence[str]]] = divide_into_pools(paths, read_side_of_wnid(), HELD_OUT_NAME)
        check_pool_counts(context, "mini-ImageNet", HELD_OUT_COUNTS, pools)
        import_images(context, pools, ImageSpec(IMAGE_SIZE))


class MiniImageNet(PublishedData):
    """The exact protocol of Ren et al. (2019)."""

    name = "mini-imagenet"
    summary: ClassVar[str] = "mini-ImageNet, exact protocol; from LwoF's five pickles"
    layouts = (LwofPickles(),)
    image_shape, pool_counts = IMAGE_SHAPE, POOL_COUNTS


class MiniIlsvrc(PublishedData):
    """A variant: base/val and base/test are other images."""

    name = "mini-imagenet-ilsvrc"
    summary: ClassVar[str] = "mini-ImageNet, variant: other images in base/val and base/test; from ILSVRC-2012"
    layouts = (MiniIlsvrcPhotographs(),)
    image_shape, pool_counts, packaged_list_names = IMAGE_SHAPE, POOL_COUNTS, (CLASSES_FILE, ORIGINAL_NAMES_FILE)


class MiniHeldOut(PublishedData):
    """A variant: base/val and base/test are held out of base/train."""

    name = HELD_OUT_NAME
    summary: ClassVar[str] = (
        "mini-ImageNet, variant: base images held out; from its 60,000 JPEGs, or learn2learn's caches"
    )
    layouts = (Learn2learnCaches(), HeldOutPhotographs())
    image_shape, pool_counts = IMAGE_SHAPE, HELD_OUT_COUNTS


SESSION_LISTS_FILE = "mini-imagenet-fscil.csv.xz"
SESSION_LISTS_TITLE = "mini-ImageNet's session lists"


class MiniSessionPhotographs(MiniPhotographs):
    """The photographs of mini-ImageNet, divided by the session lists."""

    def build(self, context: BuildContext) -> None:
        images = (
            ListedImage(row["filename"], row["wnid"], int(row["session"]), row["role"] == "test")
            for row in read_rows(SESSION_LISTS_FILE)
        )
        pools: dict[str, dict[str, Sequence[str]]] = session_pools(
            SESSION_LISTS_TITLE, images, image_paths_by_wnid(context), HELD_OUT_PER_CLASS, "mini-imagenet-sessions"
        )
        check_pool_counts(context, SESSION_LISTS_TITLE, COUNTS_60_40, pools)
        import_images(context, pools, ImageSpec(IMAGE_SIZE))


class MiniSessions(SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "mini-imagenet-sessions"
    summary: ClassVar[str] = "mini-ImageNet, 60 base and 40 novel classes of the session lists; from its 60,000 JPEGs"
    layouts = (MiniSessionPhotographs(),)
    image_shape, pool_counts, packaged_list_names = IMAGE_SHAPE, COUNTS_60_40, (SESSION_LISTS_FILE, ORIGINAL_NAMES_FILE)

    def session_of_class(self) -> dict[str, int]:
        return {row["wnid"]: int(row["session"]) for row in read_rows(SESSION_LISTS_FILE)}
