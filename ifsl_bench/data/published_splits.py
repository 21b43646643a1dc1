"""Published splits and session lists, packaged in ``ifsl_bench.tasks``, and the checks of imports against them.

A choice of images that is not published is drawn by a hash.

The session lists are those of TOPIC (Tao et al., CVPR 2020), CEC (Zhang et al., CVPR 2021) and most papers after them.
They name training images of base classes, five of each novel class, and test images of both. Of a base class, a hash
draws training images for base/val, on which options and biases are chosen. Test images of novel classes are novel/test,
their other images novel/support, the five of the lists first.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import re
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import ClassVar, TypeVar

import numpy as np

from ifsl_bench.data.datasets import find_dataset_source
from ifsl_bench.data.read.archive import FileTree, natural_sort_key
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout, PoolCounts, PoolSize, count_files
from ifsl_bench.plugin import registry
from ifsl_bench.utils.errors import UserError

ImageT = TypeVar("ImageT")
ImagesByPoolAndClass = dict[str, dict[str, Sequence[ImageT]]]  # pool -> class -> images
MAX_MISSING_LISTED = 3  # missing images that a message names


def _read_packaged_list(name: str) -> bytes:
    return (resources.files("ifsl_bench.tasks") / name).read_bytes()


def read_rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a packaged CSV file, which may be compressed by xz."""
    content = lzma.decompress(_read_packaged_list(name)) if name.endswith(".xz") else _read_packaged_list(name)
    yield from csv.DictReader(io.StringIO(content.decode("utf-8")))


def digest_packaged_lists(*names: str) -> str:
    """Return 16 hex digits that change with packaged lists, for recipes."""
    return hashlib.sha256(b"".join(_read_packaged_list(name) for name in names)).hexdigest()[:16]


@cache
def read_mapping_of_columns(name: str, key: str, value: str) -> Mapping[str, str]:
    """Return two columns of a packaged list as a mapping, in the order of the list.

    Args:
        name: Of the list.
        key: Column of the keys.
        value: Column of the values.
    """
    return MappingProxyType({row[key]: row[value] for row in read_rows(name)})


def shuffle_by_hash(images: Sequence[ImageT], salt: str) -> list[ImageT]:
    """Return images in the order of a hash of ``salt`` and their positions.

    Args:
        images: Of one class, in the order of the list.
        salt: Text that sets this order apart from others.
    """
    order = sorted(range(len(images)), key=lambda i: hashlib.sha256(f"{salt}:{i}".encode()).digest())
    return [images[i] for i in order]


def split_base_class_images(images: Sequence[ImageT], salt: str) -> dict[str, list[ImageT]]:
    """Draw a class's images into base pools: 80% train, 10% val (rounded down), the rest test.

    Args:
        images: Of the class, in the order of the list.
        salt: Text that sets this draw apart from others, see :func:`shuffle_by_hash`.
    """
    train, val = len(images) * 8 // 10, len(images) // 10
    places = shuffle_by_hash(range(len(images)), salt)
    parts = {"base/train": places[:train], "base/val": places[train : train + val], "base/test": places[train + val :]}
    return {pool: [images[i] for i in sorted(part)] for pool, part in parts.items()}


def divide_into_pools(
    classes: Mapping[str, Sequence[ImageT]], sides: Mapping[str, str], salt: str
) -> ImagesByPoolAndClass[ImageT]:
    """Divide classes into pools: classes of side train by :func:`split_base_class_images`, the others whole.

    Args:
        classes: Class -> images.
        sides: Class -> train, val or test.
        salt: Prefix of the hashed text.

    Returns:
        Pool -> class -> images.
    """
    pools: ImagesByPoolAndClass[ImageT] = {
        pool: {} for pool in ("base/train", "base/val", "base/test", "novel/val", "novel/test")
    }
    for name, images in classes.items():
        whole = {f"novel/{sides[name]}": images}
        for pool, part in (
            split_base_class_images(images, f"{salt}:{name}") if sides[name] == "train" else whole
        ).items():
            pools[pool][name] = part
    return pools


def find_image_paths_by_class(
    tree: FileTree,
    pattern: re.Pattern[str],
    named: Callable[[re.Match[str]], tuple[str, str]],
    classes: Container[str] | None = None,
    what: str = "",
) -> dict[str, dict[str, str]]:
    """Find the files that match a pattern.

    Args:
        tree: Folder or archive.
        pattern: Of paths.
        named: Returns class and published name of a match.
        classes: All classes of the data set, if others are an error.
        what: Name of the data set in messages.

    Returns:
        Class -> published name of an image -> path; classes are sorted.

    Raises:
        UserError: There are two files of one name, or of another class.
    """
    images: dict[str, dict[str, str]] = {}
    for entry in tree.entries:
        if match := pattern.fullmatch(entry.path):
            group, name = named(match)
            if (earlier := images.setdefault(group, {}).setdefault(name, entry.path)) != entry.path:
                raise UserError(
                    f"{tree.path} has {name} twice, {earlier} and {entry.path}; give the folder of the images alone"
                )
    if classes is not None and (strange := sorted(group for group in images if group not in classes)):
        raise UserError(f"{tree.path} has {len(strange)} classes that are not {what}'s ({', '.join(strange[:3])})")
    return dict(sorted(images.items()))


WNID_IMAGE = re.compile(r"(?:.*/)?(n[0-9]{8})/\1_([0-9]+)\.jpe?g", re.IGNORECASE)


class IlsvrcLayout(Layout):
    """The training images of ILSVRC-2012, in any folder or archive, or its tar of tars."""

    title: ClassVar[str] = "the training images of ILSVRC-2012 (<wnid>/<wnid>_<number>.JPEG)"

    def matches(self, tree: FileTree) -> bool:
        return any(WNID_IMAGE.fullmatch(entry.path) for entry in tree.entries)

    def images(self, tree: FileTree) -> dict[str, dict[str, str]]:
        """Return wnid -> published file name (``n01532829_28.JPEG``) -> path, in the order of their numbers."""

        def named(match: re.Match[str]) -> tuple[str, str]:
            return match[1].lower(), f"{match[1].lower()}_{int(match[2])}.JPEG"

        images = find_image_paths_by_class(tree, WNID_IMAGE, named)
        return {
            wnid: {name: group[name] for name in sorted(group, key=natural_sort_key)} for wnid, group in images.items()
        }


def report_missing_images(context: BuildContext, missing: Sequence[str], what: str) -> None:
    """Report images of a list that are missing.

    Args:
        context: State of the build.
        missing: Their names.
        what: The images after their number, such as "images of ...".

    Raises:
        UserError: The user has not allowed it.
    """
    named = f"{', '.join(missing[:MAX_MISSING_LISTED])}{', ...' if len(missing) > MAX_MISSING_LISTED else ''}"
    refused = f"{context.origin} lacks {len(missing):,} {what} ({named}); get the whole"
    context.require_complete_unless_partial(f"{len(missing):,} images are missing: {named}", refused)


def check_pool_counts(
    context: BuildContext, what: str, expected: PoolCounts, pools: ImagesByPoolAndClass[ImageT]
) -> None:
    """Sort each pool's classes, drop those without images, and compare the counts with the published ones.

    A base class that one of the base pools lacks is dropped from all of them.

    Args:
        context: State of the build.
        what: Name of the data set in messages.
        expected: Published counts.
        pools: Pool -> class -> images; changed in place.

    Raises:
        UserError: Counts differ and the user has not allowed it; or a pool is empty.
    """
    base = [pool for pool in expected if pool.startswith("base/")]
    common = set.intersection(*({name for name, images in pools[p].items() if len(images)} for p in base))
    for pool, groups in pools.items():
        usable = common if pool in base else {name for name, images in groups.items() if len(images)}
        pools[pool] = {name: groups[name] for name in sorted(usable)}
    context.check_counts(what, expected, count_files(pools))
    if empty := [pool for pool in expected if not pools[pool]]:
        raise UserError(f"{context.origin} has no images of {what} for {', '.join(empty)}; nothing can be made of it")


class PublishedData(DatasetSource):
    """A data set whose classes and images are published.

    Attributes:
        image_shape: (H, W, C) of an image.
        pool_counts: Classes and images of each pool.
        packaged_list_names: Packaged files of the split; the recipe changes with them.
    """

    image_shape: ClassVar[tuple[int, int, int]]
    pool_counts: ClassVar[PoolCounts]
    packaged_list_names: ClassVar[Sequence[str]] = ()

    def recipe(self) -> str:
        return ", ".join(
            [self.name, "1", *([digest_packaged_lists(*self.packaged_list_names)] if self.packaged_list_names else [])]
        )

    def expected_shape_and_counts(self) -> tuple[tuple[int, ...], PoolCounts]:
        return self.image_shape, self.pool_counts


SESSION_POOLS = ("base/train", "base/val", "base/test", "novel/support", "novel/test")
HELD_OUT_PER_CLASS = 50  # training images of a base class in base/val, of the 500 in CIFAR-100 and mini-ImageNet
COUNTS_60_40 = {  # of both data sets: 60 base and 40 novel classes
    "base/train": PoolSize(60, 60 * 450),
    "base/val": PoolSize(60, 60 * HELD_OUT_PER_CLASS),
    "base/test": PoolSize(60, 60 * 100),
    "novel/support": PoolSize(40, 40 * 500),
    "novel/test": PoolSize(40, 40 * 100),
}


@dataclass(frozen=True)
class ListedImage:
    """A row of a session list: an image, its class, and the number of the session it comes in (0: the base)."""

    image_key: str
    class_name: str
    session_number: int
    is_test_image: bool


def session_pools(
    what: str, listed: Iterable[ListedImage], images: Mapping[str, Mapping[str, ImageT]], held_out: int, salt: str
) -> ImagesByPoolAndClass[ImageT]:
    """Divide the images of a session list into pools, in the order of the list.

    Args:
        what: Name of the list in messages.
        listed: Rows of the list.
        images: Class -> name in the list -> image, of all images; those of novel classes that are not listed follow
            the listed supports.
        held_out: Number of training images of each base class in base/val.
        salt: Prefix of the hashed text that draws these.

    Returns:
        Pool -> class -> images.

    Raises:
        UserError: A class comes in two sessions, or an image is listed twice.
    """
    sessions: dict[str, int] = {}
    names: dict[tuple[str, bool], list[str]] = {}
    role: dict[str, bool] = {}
    for row in listed:
        if (session := sessions.setdefault(row.class_name, row.session_number)) != row.session_number:
            both = "both base and novel" if 0 in (session, row.session_number) else "in two sessions"
            raise UserError(f"{what}: class {row.class_name} is {both} (sessions {session} and {row.session_number})")
        if row.image_key in role:
            twice = "there twice" if role[row.image_key] is row.is_test_image else "both for training and for testing"
            raise UserError(f"{what}: image {row.image_key} is {twice}")
        role[row.image_key] = row.is_test_image
        names.setdefault((row.class_name, row.is_test_image), []).append(row.image_key)
    pools: ImagesByPoolAndClass[ImageT] = {pool: {} for pool in SESSION_POOLS}
    for name, session in sessions.items():
        train, test, present = names.get((name, False), []), names.get((name, True), []), images.get(name, {})
        if session:
            listed_names = {*train, *test}
            others = [image for image in present if image not in listed_names]
            parts = {"novel/support": [*train, *others], "novel/test": test}
        else:
            drawn = set(shuffle_by_hash(train, f"{salt}:{name}")[:held_out])
            parts = {
                "base/train": [image for image in train if image not in drawn],
                "base/val": [image for image in train if image in drawn],
                "base/test": test,
            }
        for pool, part in parts.items():
            pools[pool][name] = [present[image] for image in part if image in present]
    return pools


class SessionSource(PublishedData):
    """A data set whose classes come in the sessions of a published list."""

    @abstractmethod
    def session_of_class(self) -> Mapping[str, int]:
        """Return class -> session, in the order of the list."""


def published_novel_class_order(data: str, classes: Sequence[str]) -> np.ndarray:
    """Return the order of the novel classes of a session list, as indices into ``classes``; int64 [T N].

    Args:
        data: Name of the data set.
        classes: Names of its novel classes.

    Raises:
        UserError: The data set has no published list, or lacks a class of it.
    """
    source = find_dataset_source(data) if data in registry.registered_entry_points(registry.DATASET_GROUP) else None
    if not isinstance(source, SessionSource):
        raise UserError(f"data set {data!r} has no published list of sessions; leave out published = true")
    sessions = source.session_of_class()
    novel = sorted((name for name in sessions if sessions[name]), key=sessions.__getitem__)
    if missing := [name for name in novel if name not in classes]:
        raise UserError(
            f"data set {data!r} lacks {len(missing):,} of the {len(novel):,} novel classes of its list "
            f"({', '.join(missing[:MAX_MISSING_LISTED])}); prepare it from all images"
        )
    return np.array([classes.index(name) for name in novel], np.int64)
