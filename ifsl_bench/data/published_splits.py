"""Published facts of data sets: class and image lists, packaged in ``ifsl_bench.tasks``, and counts to hold an import
against. Where a choice of images is not published, it is drawn by a hash."""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import ClassVar, TypeVar

from ifsl_bench.data.read.archive import FileTree, natural
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout, PoolCounts, count_files
from ifsl_bench.utils.errors import UserError

Image = TypeVar("Image")
Pools = dict[str, dict[str, Sequence[Image]]]  # pool -> class -> images
LISTED = 3  # missing images that a message names


def _content(name: str) -> bytes:
    return (resources.files("ifsl_bench.tasks") / name).read_bytes()


def rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a packaged CSV file, which may be compressed by xz."""
    content = lzma.decompress(_content(name)) if name.endswith(".xz") else _content(name)
    yield from csv.DictReader(io.StringIO(content.decode("utf-8")))


def digest(*names: str) -> str:
    """16 hex digits that change with packaged lists; for recipes."""
    return hashlib.sha256(b"".join(_content(name) for name in names)).hexdigest()[:16]


@cache
def columns(name: str, key: str, value: str) -> Mapping[str, str]:
    """Two columns of a packaged list as a mapping, in the list's order."""
    return MappingProxyType({row[key]: row[value] for row in rows(name)})


def shuffled(images: Sequence[Image], salt: str) -> list[Image]:
    """Images in a random order that is the same everywhere: by the hash of ``salt`` and their places."""
    order = sorted(range(len(images)), key=lambda i: hashlib.sha256(f"{salt}:{i}".encode()).digest())
    return [images[i] for i in order]


def held_out(images: Sequence[Image], salt: str) -> dict[str, list[Image]]:
    """A class's images drawn into the base pools: 80% train, 10% val (both rounded down), the rest test.

    These are the shares, and the way of rounding, of tiered-ImageNet's Train-A.
    """
    train, val = len(images) * 8 // 10, len(images) // 10
    places = shuffled(range(len(images)), salt)
    parts = {"base/train": places[:train], "base/val": places[train : train + val], "base/test": places[train + val :]}
    return {pool: [images[i] for i in sorted(part)] for pool, part in parts.items()}


def divided(classes: Mapping[str, Sequence[Image]], sides: Mapping[str, str], salt: str) -> Pools[Image]:
    """Pool -> class -> images: of the classes on the side train drawn by :func:`held_out`, of the others whole.

    Args:
        sides: class -> train, val or test.
        salt: what the draw depends on beside the name of a class.
    """
    pools: Pools[Image] = {pool: {} for pool in ("base/train", "base/val", "base/test", "novel/val", "novel/test")}
    for name, images in classes.items():
        whole = {f"novel/{sides[name]}": images}
        for pool, part in (held_out(images, f"{salt}:{name}") if sides[name] == "train" else whole).items():
            pools[pool][name] = part
    return pools


def find_images(
    tree: FileTree,
    pattern: re.Pattern[str],
    named: Callable[[re.Match[str]], tuple[str, str]],
    classes: Container[str] | None = None,
    what: str = "",
) -> dict[str, dict[str, str]]:
    """Class -> name of an image, as published -> path of a file that the pattern matches; classes in order.

    Args:
        named: class and name, of a match.
        classes: all of them, where a folder of another class is an error; ``what`` has them.

    Raises:
        UserError: there are two files of one name, or of another class.
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
        """wnid -> file name as published (``n01532829_28.JPEG``) -> path, both in order of their numbers."""

        def named(match: re.Match[str]) -> tuple[str, str]:
            return match[1].lower(), f"{match[1].lower()}_{int(match[2])}.JPEG"

        images = find_images(tree, WNID_IMAGE, named)
        return {wnid: {name: group[name] for name in sorted(group, key=natural)} for wnid, group in images.items()}


def report_missing(context: BuildContext, missing: Sequence[str], what: str) -> None:
    """Says that some images of a list are missing, and names the first.

    Args:
        what: the images, after their number: "images of ...".

    Raises:
        UserError: the user has not allowed it.
    """
    named = f"{', '.join(missing[:LISTED])}{', ...' if len(missing) > LISTED else ''}"
    refused = f"{context.origin} lacks {len(missing):,} {what} ({named}); get the whole"
    context.require_complete(f"{len(missing):,} images are missing: {named}", refused)


def check_pools(context: BuildContext, what: str, expected: PoolCounts, pools: Pools[Image]) -> None:
    """Sorts each pool's classes by name, drops those that cannot be used, and compares the rest with what should be.

    A class without images is dropped, and one of the base classes that any of the three base pools lacks.

    Raises:
        UserError: counts differ where the user has not allowed it; a pool is empty.
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
        shape: (H, W, C) of an image.
        counts: classes and images of each pool.
        lists: the packaged files that say which image is for what; the recipe changes with them.
    """

    shape: ClassVar[tuple[int, int, int]]
    counts: ClassVar[PoolCounts]
    lists: ClassVar[Sequence[str]] = ()

    def recipe(self) -> str:
        return ", ".join([self.name, "1", *([digest(*self.lists)] if self.lists else [])])

    def expected_contents(self) -> tuple[tuple[int, ...], PoolCounts]:
        return self.shape, self.counts
