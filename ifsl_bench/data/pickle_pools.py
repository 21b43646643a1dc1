"""From pickles of arrays to pools: images in one large array, or in a list of encoded ones, with labels beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

import numpy as np

from ifsl_bench.common.arrays import release
from ifsl_bench.common.errors import UserError
from ifsl_bench.data.image_pools import ListItem
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.decode_many import Item
from ifsl_bench.data.read.stored_array import StoredArray
from ifsl_bench.data.read.unpickle import described, items, load
from ifsl_bench.data.source import Count, Import

SIZE = 84
SHAPE = (SIZE, SIZE, 3)


class Images(Protocol):
    """Images in one array, wherever it is: uint8 [n, H, W, 3] when read, in order; 84x84 where nobody says else."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """So many rows at a time; the last block has what is left."""


Rows = Mapping[str, Sequence[int]]  # class -> rows of the source array or list, in the order they are to have
_BLOCK, _RELEASE = 256, 1 << 28  # rows read at a time; bytes written between two releases of the pool's pages


@contextmanager
def opened(tree: FileTree, entry: Entry) -> Iterator[BinaryIO]:
    """A file of the tree."""
    with tree.readable(entry):
        file = tree.open(entry)
    with file:
        yield file


def required(tree: FileTree, name: str, what: str) -> Entry:
    """The file of that name, in whatever folder of the tree.

    Raises:
        UserError: there is none.
    """
    entry = tree.named(name)
    if entry is None:
        raise UserError(
            f"{tree.path} lacks {name}, a part of {what}; get the whole, or unpack all of it into one folder"
        )
    return entry


def load_dict(file: BinaryIO, where: str, keys: Sequence[str]) -> dict[str, Any]:
    """A pickled dict with at least these keys, which may be text or bytes; arrays stay in the file.

    Raises:
        UserError: it is none, or lacks a key.
    """
    value = load(file, where)
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, expected a dict with {', '.join(keys)}")
    named = {text(key): item for key, item in value.items()}
    if missing := [key for key in keys if key not in named]:
        has = ", ".join(str(key) for key in named) or "nothing"
        raise UserError(f"{where} lacks {', '.join(missing)}; it has {has}")
    return named


def text(value: object) -> str:
    """A name that Python 2 or 3 wrote, as text; of what is no name the kind alone, since it may be nested deeply."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, (str, int, np.generic)) else described(value)


def integers(value: object, what: str, where: str) -> np.ndarray:
    """A list or an array of whole numbers as int64 [n].

    Raises:
        UserError: it is something else.
    """
    if isinstance(value, StoredArray):
        found, array = f"{value.dtype}{list(value.shape)}", value.read() if value.dtype.kind in "iu" else None
    elif isinstance(value, (list, tuple)):
        odd = next((i for i, v in enumerate(value) if type(v) is not int or abs(v) >= 1 << 62), None)
        found, array = "", np.array(value, np.int64) if odd is None else None
        if odd is not None:
            kind = "too large a number" if type(value[odd]) is int else described(value[odd])
            found = f"a {type(value).__name__} whose item {odd} is {kind}"
    elif isinstance(value, np.ndarray):
        found, array = f"{value.dtype}{list(value.shape)}", value if value.dtype.kind in "iu" else None
    else:
        found, array = f"a {type(value).__name__}", None
    if array is None or array.size != max(array.shape, default=0):
        raise UserError(f"{what} of {where} is {found}, expected a list of whole numbers")
    return array.reshape(-1).astype(np.int64)


def images_array(value: object, what: str, where: str) -> StoredArray:
    """An array of images, uint8 [n, 84, 84, 3].

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, StoredArray):
        raise UserError(f"{what} of {where} is a {type(value).__name__}, expected an array uint8[n, 84, 84, 3]")
    if value.dtype != np.uint8 or value.shape[1:] != SHAPE:
        raise UserError(f"{what} of {where} is {value.dtype}{list(value.shape)}, expected uint8[n, 84, 84, 3]")
    return value


def count_rows(pools: Mapping[str, Rows]) -> dict[str, Count]:
    """Classes and images of each pool, for :meth:`Import.check_counts`."""
    return {name: Count(len(groups), sum(map(len, groups.values()))) for name, groups in pools.items()}


def _targets(rows: np.ndarray, count: int) -> np.ndarray:
    """The place in ``rows`` of each of 0..count-1, -1 for those that are not in it; [count]."""
    target = np.full(count, -1, np.int64)
    target[rows] = np.arange(len(rows))
    return target


def copy_rows(
    to: Import,
    name: str,
    groups: Rows,
    source: Images,
    advance: Callable[[int], None],
    bgr: bool = False,
    shape: tuple[int, int, int] = SHAPE,
    digests: bool = False,
) -> None:
    """Writes a pool of images that lie in an array, in one pass over it.

    Args:
        bgr: whether its channels are blue, green, red; they are turned round.
        shape: of an image, [H, W, 3].
        digests: keep a number for each image, for :func:`ifsl_bench.data.image_pools.note_duplicates`.
    """
    rows = np.concatenate([np.asarray(group, np.int64) for group in groups.values()])
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
    target = _targets(rows, len(source))
    with to.writer.pool(name, labels, tuple(groups), shape) as images:
        start = written = 0
        for block in source.blocks(_BLOCK):
            at = target[start : start + len(block)]
            images[at[at >= 0]] = block[at >= 0][..., ::-1] if bgr else block[at >= 0]
            start += len(block)
            written += int((at >= 0).sum()) * images[0].nbytes
            if written >= _RELEASE:
                release(images)
                written = 0
            advance(int((at >= 0).sum()))
        if digests:
            np.save(to.writer.side_file(name), np.array([_digest(image) for image in images], np.uint64))
        to.bytes_read += source.nbytes


def _digest(image: np.ndarray) -> int:
    """Equal for images with equal pixels (and, by chance, for others in 2^64), as of images that are decoded."""
    return int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "little")


def listed(where: str, groups: Rows) -> dict[str, list[ListItem]]:
    """Class -> its items in a list, as ``import_images`` wants them."""
    return {name: [ListItem(where, row) for row in group] for name, group in groups.items()}


def list_items(tree: FileTree, entry: Entry, wanted: Sequence[ListItem], count: int) -> Iterator[Item]:
    """The encoded images that lie as byte arrays in a pickled list, in one pass over it.

    Args:
        wanted: items of that list; each becomes the row of its place here.
        count: how many items the list should have.

    Raises:
        UserError: the list has more or fewer items, or other ones.
    """
    target = _targets(np.array([item.index for item in wanted], np.int64), count)
    where = tree.where(entry)
    at = 0
    with opened(tree, entry) as file:
        for at, item in enumerate(items(file, where), 1):
            if item.dtype != np.uint8 or item.nbytes != max(item.shape, default=0):
                raise UserError(
                    f"item {at - 1} of {where} is {item.dtype}{list(item.shape)}, expected an encoded image (bytes)"
                )
            if at <= count and target[at - 1] >= 0:
                yield int(target[at - 1]), f"image {at - 1} of {where}", item.read().tobytes()
    if at != count:
        raise UserError(f"{where} has {at:,} images, the labels beside it are {count:,}; get both files again")
