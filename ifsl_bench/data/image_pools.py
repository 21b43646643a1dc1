"""Pools from image files: decoding with progress, images that cannot be used, and duplicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.read.images import BadItem, ImageItem, ImageSpec, decode_into, iterate_tree_images
from ifsl_bench.data.source import BuildContext
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import ProgressTask
from ifsl_bench.utils.text_format import format_count

T = TypeVar("T")
MAX_IMAGES_LISTED = 20  # bad, and duplicate, images that the manifest names


@dataclass(frozen=True, slots=True)
class ListItem:
    """An image in a list, ``list[index]`` in messages."""

    list_name: str
    index: int

    def __str__(self) -> str:
        return f"{self.list_name}[{self.index}]"


ImageFiles = Mapping[str, Sequence[str | ListItem]]  # class -> images, in order
ImageReader = Callable[[str, Sequence[Any]], Iterator[ImageItem]]  # pool, its images -> items


def divide_classes_into_pools(
    classes: Mapping[str, Sequence[T]], sides: Mapping[str, str]
) -> dict[str, dict[str, Sequence[T]]]:
    """Divide classes into pools: images of base classes 80/10/10 in their order, novel classes whole.

    Args:
        classes: Class -> images.
        sides: Class -> "base", or the pool of a novel class.

    Returns:
        Pool -> class -> images.
    """
    pools: dict[str, dict[str, Sequence[T]]] = {}
    for name, paths in classes.items():
        if sides[name] != "base":
            pools.setdefault(sides[name], {})[name] = paths
            continue
        tenth = len(paths) // 10
        train = len(paths) - 2 * tenth
        cuts = {"base/train": (0, train), "base/val": (train, train + tenth), "base/test": (train + tenth, len(paths))}
        for pool, (start, stop) in cuts.items():
            pools.setdefault(pool, {})[name] = paths[start:stop]
    return {pool: pools[pool] for pool in POOL_NAMES if pool in pools}


@contextmanager
def iterate_unfinished_pools(
    context: BuildContext, pools: Mapping[str, Mapping[str, Sequence[Any]]]
) -> Iterator[tuple[list[str], ProgressTask]]:
    """Yield the pools that an interrupted import has not completed, and the progress of their images.

    Args:
        context: State of the build.
        pools: Pool -> class -> images.
    """
    counts = {name: sum(map(len, files.values())) for name, files in pools.items()}
    names = [name for name in pools if not context.writer.has_complete_pool(name)]
    total, left = sum(counts.values()), sum(counts[name] for name in names)
    with context.reporter.report_stage(f"importing {total:,} images", total, total - left) as stage:
        yield names, stage


def make_pool_labels(files: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Return the label of each image of a pool (class -> images), int64 [n]."""
    return np.repeat(np.arange(len(files)), [len(group) for group in files.values()])


def import_images(
    context: BuildContext, pools: Mapping[str, ImageFiles], spec: ImageSpec, read: ImageReader | None = None
) -> None:
    """Decode the files of each pool and write the pools.

    Args:
        context: State of the build.
        pools: pool -> class -> paths in ``context.files``, or items of lists; classes and images keep their order.
        spec: Size and fit of the images.
        read: Reads the images of a pool if they are items of lists; the row of an item is its index in the argument.

    Raises:
        UserError: Images cannot be used and the user has not allowed it; or a class has no image.
    """
    refused: list[BadItem] = []
    items = read or (lambda _, paths: iterate_tree_images(context.file_tree, paths))
    with iterate_unfinished_pools(context, pools) as (names, stage):
        for name in names:
            refused += _import_pool(context, name, pools[name], spec, stage.advance, items)
    if refused:
        total = sum(len(group) for files in pools.values() for group in files.values())
        shown = "; ".join(f"{name}: {reason}" for _, name, reason in refused[:3])
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise UserError(
            f"{len(refused):,} of {total:,} images cannot be used: {shown}{more}. Get these files again, or add "
            f"{context.partial_option_text} to leave them out and mark the data set partial"
        )
    for name in pools:
        if skipped := context.writer.pools[name].get("skipped"):
            context.mark_partial(f"{name}: left out: {format_count(skipped['images'], 'image')} that cannot be used")
    report_duplicates(context, pools)
    _warn_about_images(context, pools, spec)


class _BadImagesError(Exception):
    """Leaves the block that writes a pool, so that it does not count as complete."""


def _import_pool(
    context: BuildContext,
    name: str,
    files: ImageFiles,
    spec: ImageSpec,
    advance: Callable[[int], None],
    read: ImageReader,
) -> list[BadItem]:
    """Write a pool; return the images that cannot be used, if the user has not allowed to leave them out."""
    paths = [path for group in files.values() for path in group]
    labels = make_pool_labels(files)
    shape, facts = (spec.side_pixels, spec.side_pixels, 3), dict[str, Any]()
    try:
        with context.writer.write_pool(name, labels, tuple(files), shape, facts=facts) as images:
            done = decode_into(images, read(name, paths), spec, advance)
            context.bytes_read += done.bytes_read
            if done.bad_images:
                raise _BadImagesError
            facts |= done.findings_by_image
            np.save(context.writer.side_file_path(name), done.digests)
    except _BadImagesError:
        if not context.allow_partial:
            return done.bad_images
    else:
        return []
    context.reporter.warn(
        f"left out of {name}: {'; '.join(f'{path}: {why}' for _, path, why in done.bad_images[:MAX_IMAGES_LISTED])}"
    )
    good = np.setdiff1d(np.arange(len(paths)), [row for row, _, _ in done.bad_images])
    if lost := set(range(len(files))) - set(labels[good].tolist()):
        raise UserError(f"{name}: no image of class {list(files)[min(lost)]!r} can be used ({done.bad_images[0][2]})")
    listed = [[path, why] for _, path, why in done.bad_images[:MAX_IMAGES_LISTED]]
    facts = {"skipped": {"images": len(done.bad_images), "first": listed}, **done.findings_by_image}
    # Once more without them: rare, and simpler than moving the rows that follow.
    with context.writer.write_pool(name, labels[good], tuple(files), shape, facts=facts) as images:
        if again := decode_into(images, read(name, [paths[row] for row in good]), spec).bad_images:
            raise UserError(f"{name}: {again[0][1]}: {again[0][2]}; it could be read a moment ago, so try again")
        np.save(context.writer.side_file_path(name), done.digests)  # of all paths, zero where left out
    return []


def _warn_about_images(context: BuildContext, pools: Mapping[str, ImageFiles], spec: ImageSpec) -> None:
    """Warn of images that were enlarged, not turned, dark or too bright, in pools of an interrupted import too."""
    total = sum(context.writer.pools[name]["shape"][0] for name in pools)
    for fact in ("enlarged", "not_turned", "dark", "beyond_white"):
        entries = [entry for name in pools if (entry := context.writer.pools[name].get(fact))]
        if not entries:
            continue
        images = f"{sum(entry['images'] for entry in entries):,} of {total:,} images"
        if fact == "enlarged":
            smallest = min(entry["smallest"] for entry in entries)
            context.reporter.warn(
                f"{images} were enlarged to {spec.side_pixels} x {spec.side_pixels} pixels; the smallest had a side "
                f"of {smallest}"
            )
        elif fact == "not_turned":
            context.reporter.warn(f"{images} have an orientation (EXIF) that cannot be read; they are not turned")
        elif fact == "beyond_white":
            brightest = max(entry["brightest"] for entry in entries)
            context.reporter.warn(
                f"{images} have more than a tenth of their pixels beyond --white {spec.white_level}, up to "
                f"{brightest:,}: "
                "these are all white. Make the data set again with a larger number and --force, if that is not wanted"
            )
        else:
            brightest = max(entry["brightest"] for entry in entries)
            white = (1 << brightest.bit_length()) - 1
            context.reporter.warn(
                f"{images} have 16 bits and use less than a tenth of them, up to {brightest:,} of 65,535, so they are "
                f"nearly black. If {white:,} is their white, make the data set again with --white {white} --force"
            )


def report_duplicates(
    context: BuildContext, pools: Mapping[str, ImageFiles], what: str = "image", how: str = "pixel by pixel"
) -> None:
    """Report and record which images are equal to another; they stay in their pools.

    Args:
        context: State of the build.
        pools: Pool -> class -> images, in the order of the digests in the pool's side file.
        what: The word for one of them in messages.
        how: How they are compared, in messages.
    """
    paths = [(name, path) for name, files in pools.items() for group in files.values() for path in group]
    digests = np.concatenate([np.load(context.writer.side_file_path(name)) for name in pools])
    repeated = np.flatnonzero(digests != 0)
    order = repeated[np.argsort(digests[repeated], kind="stable")]
    equal = np.append(False, digests[order][1:] == digests[order][:-1])  # to the one before it
    first = np.maximum.accumulate(np.where(equal, 0, np.arange(len(order))))  # place of the first of its equals
    pairs = [(paths[order[first[i]]], paths[order[i]]) for i in np.flatnonzero(equal)]
    if not pairs:
        return
    pools_differ = [a[0] != b[0] for a, b in pairs]
    sides_differ = [_side_of_pool(a[0]) != _side_of_pool(b[0]) for a, b in pairs]
    worst_first = sorted(range(len(pairs)), key=lambda i: (not sides_differ[i], not pools_differ[i]))
    shown = [pairs[i] for i in worst_first[:MAX_IMAGES_LISTED]]
    names = ", ".join(f"{a[1]} = {b[1]}" for a, b in shown[:3])
    message = (
        f"{format_count(len(pairs), what)} equal to another one {how}, {sum(pools_differ):,} in another pool and "
        f"{sum(sides_differ):,} on another side ({names}); they are kept"
    )
    (context.reporter.warn if any(pools_differ) else context.reporter.say)(message)
    context.about["duplicates"] = {
        "images": len(pairs),
        "across_sides": sum(sides_differ),
        "across_pools": sum(pools_differ),
        "first": [[str(a[1]), str(b[1])] for a, b in shown],
    }


def _side_of_pool(pool: str) -> str:
    return "base" if pool.startswith("base/") else pool
