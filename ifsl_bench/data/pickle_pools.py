"""Pools from pickles: images in one large array, or in a list of encoded ones, with labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ifsl_bench.data.image_pools import ListItem, iterate_unfinished_pools, make_pool_labels
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.images import ImageItem, digest_image
from ifsl_bench.data.read.pickles import describe_value, load_pickle
from ifsl_bench.data.source import BuildContext
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.serialization import make_memory_releaser

IMAGE_SIZE = 84
IMAGE_SHAPE = (IMAGE_SIZE, IMAGE_SIZE, 3)


RowsByClass = Mapping[str, Sequence[int]]  # class -> rows of the array or list, in order
_IMAGES_PER_BLOCK = 256  # rows copied at a time


def find_required_entry(tree: FileTree, name: str, what: str) -> Entry:
    """Return the file of a name in any folder of the tree.

    Args:
        tree: Folder or archive.
        name: Of the file.
        what: The set of files that it belongs to, in messages.

    Raises:
        UserError: There is none.
    """
    entry = tree.find_by_name(name)
    if entry is None:
        raise UserError(
            f"{tree.path} lacks {name}, a part of {what}; get the whole, or unpack all of it into one folder"
        )
    return entry


def load_pickled_dict(tree: FileTree, entry: Entry, keys: Sequence[str]) -> dict[str, Any]:
    """Read a pickled dict; its keys may be text or bytes.

    Args:
        tree: Folder or archive.
        entry: The file.
        keys: Keys that it must have.

    Raises:
        UserError: It is no dict, or lacks a key.
    """
    where = tree.format_location(entry)
    value = load_pickle(tree.memory_map(entry), where)
    if not isinstance(value, dict):
        raise UserError(f"{where} holds {describe_value(value)}, expected a dict with {', '.join(keys)}")
    named = {decode_text(key): item for key, item in value.items()}
    if missing := [key for key in keys if key not in named]:
        raise UserError(f"{where} lacks {', '.join(missing)}; it has {', '.join(named) or 'nothing'}")
    return named


def decode_text(value: object) -> str:
    """Return a name of Python 2 or 3 as text, and the kind of any other value, which may be nested deeply."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    name = isinstance(value, (str, np.generic)) or (isinstance(value, int) and abs(value) < 1 << 62)
    return str(value) if name else describe_value(value)


def to_integer_array(value: object, what: str, where: str, images: int | None = None) -> np.ndarray:
    """Return a list or an array of whole numbers as int64 [n].

    Args:
        value: Of a pickle.
        what: Its name in messages.
        where: Name of the file in messages.
        images: Number of images, if the numbers are their labels.

    Raises:
        UserError: It is something else, or not a label for each image.
    """
    kind, numbers = describe_value(value), None
    if isinstance(value, (list, tuple)):
        odd = next((i for i, v in enumerate(value) if type(v) is not int or abs(v) >= 1 << 62), None)
        if odd is None:
            numbers = np.array(value, np.int64)
        else:
            fault = "too large a number" if type(value[odd]) is int else describe_value(value[odd])
            kind += f" whose item {odd} is {fault}"
    elif isinstance(value, np.ndarray):
        kind = f"{value.dtype}{list(value.shape)}"
        if value.dtype.kind in "iu" and value.size == max(value.shape, default=0):
            numbers = value.reshape(-1).astype(np.int64)
    if numbers is None:
        raise UserError(f"{what} of {where} is {kind}, expected a list of whole numbers")
    if images is not None and len(numbers) != images:
        raise UserError(f"{where} has {images:,} images and {len(numbers):,} labels")
    return numbers


def group_rows_by_class(labels: np.ndarray, names: Mapping[int, str], where: str) -> dict[str, list[int]]:
    """Return class -> rows.

    Args:
        labels: int64 [n].
        names: Label -> class.
        where: Name of the file in messages.

    Raises:
        UserError: A label has no name, or two labels have one name.
    """
    present = np.unique(labels).tolist()
    if nameless := [label for label in present if label not in names]:
        raise UserError(f"{where} has images of label {nameless[0]}, which has no class name")
    if len({names[label] for label in present}) < len(present):
        raise UserError(f"{where} gives two labels one name")
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return {names[label]: rows.tolist() for label, rows in zip(present, groups, strict=False)}


def to_class_names(value: object, what: str, where: str) -> list[str]:
    """Return the names of classes in a list or an array of texts.

    Args:
        value: Of a pickle.
        what: Its name in messages.
        where: Name of the file in messages.

    Raises:
        UserError: It is something else.
    """
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise UserError(f"{what} of {where} is {describe_value(value)}, expected a list of names")
    return [decode_text(name) for name in (np.atleast_1d(value) if isinstance(value, np.ndarray) else value)]


def to_image_array(value: Any, what: str, where: str, shape: tuple[int, ...] = IMAGE_SHAPE) -> np.ndarray:
    """Return an array of images, uint8 [n, ``*shape``].

    Args:
        value: Of a pickle.
        what: Its name in messages.
        where: Name of the file in messages.
        shape: Of an image.

    Raises:
        UserError: It is something else.
    """
    if not isinstance(value, np.ndarray):
        kind = describe_value(value)
    elif value.dtype != np.uint8 or value.shape[1:] != shape:
        kind = f"{value.dtype}{list(value.shape)}"
    else:
        return value
    raise UserError(f"{what} of {where} is {kind}, expected uint8[n, {', '.join(map(str, shape))}]")


def write_pools_from_arrays(
    context: BuildContext, pools: Mapping[str, RowsByClass], arrays: Mapping[str, np.ndarray], digests: bool = False
) -> None:
    """Write pools from arrays of images; complete pools stay.

    Args:
        context: State of the build.
        pools: Pool -> class -> rows.
        arrays: Pool -> uint8 [n, H, W, 3].
        digests: Whether to write a digest of each image, for :func:`ifsl_bench.data.image_pools.report_duplicates`.
    """
    with iterate_unfinished_pools(context, pools) as (names, stage):
        for pool in names:
            source, groups = arrays[pool], pools[pool]
            rows = np.concatenate([np.asarray(group, np.int64) for group in groups.values()])
            with context.writer.write_pool(pool, make_pool_labels(groups), tuple(groups), source.shape[1:]) as images:
                written = make_memory_releaser(images)
                for start in range(0, len(rows), _IMAGES_PER_BLOCK):
                    block = source[rows[start : start + _IMAGES_PER_BLOCK]]
                    images[start : start + len(block)] = block
                    written(block.nbytes)
                    stage.advance(len(block))
                if digests:
                    np.save(
                        context.writer.side_file_path(pool),
                        np.array([digest_image(image) for image in images], np.uint64),
                    )
                context.bytes_read += images.nbytes


def to_list_items(where: str, groups: RowsByClass) -> dict[str, list[ListItem]]:
    """Return class -> items of a list, for :func:`import_images`.

    Args:
        where: Name of the list, the ``where`` of its items.
        groups: Class -> positions in the list.
    """
    return {name: [ListItem(where, row) for row in group] for name, group in groups.items()}


def read_list_items(tree: FileTree, entry: Entry, wanted: Sequence[ListItem], count: int) -> Iterator[ImageItem]:
    """Yield encoded images from a pickled list of byte arrays.

    Args:
        tree: Folder or archive.
        entry: The file.
        wanted: Items of the list, in the order of the rows.
        count: Number of items that the list should have.

    Raises:
        UserError: The list has more or fewer items, or other ones.
    """
    where = tree.format_location(entry)
    images = load_pickle(tree.memory_map(entry), where)
    if not isinstance(images, list):
        raise UserError(f"{where} holds {describe_value(images)}, expected a list of arrays")
    if len(images) != count:
        raise UserError(f"{where} has {len(images):,} images, the labels beside it are {count:,}; get both files again")
    for row, item in enumerate(wanted):
        image = images[item.index]
        if not isinstance(image, np.ndarray):
            raise UserError(f"{where}: item {item.index} of the list is {describe_value(image)}, expected arrays only")
        if image.dtype != np.uint8 or image.nbytes != max(image.shape, default=0):
            kind = f"{image.dtype}{list(image.shape)}"
            raise UserError(f"item {item.index} of {where} is {kind}, expected an encoded image (bytes)")
        yield row, f"image {item.index} of {where}", image.tobytes
