"""Many encoded images into the rows of a data set's array, by threads: Pillow lets others run while it decodes."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import loky
import numpy as np
from PIL import Image

from ifsl_bench.data.read.decode import BadImage, ImageSpec, decode
from ifsl_bench.data.read.file_tree import Entry, FileTree
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.serialization import releasing

_CHUNK = 32  # images that a thread takes at a time

Item = tuple[int, str, Callable[[], bytes]]  # row, how messages name the image, how to read its encoded content
Bad = tuple[int, str, str]  # row, name, reason


@dataclass
class Decoded:
    """The outcome of decoding the images of a pool."""

    digests: np.ndarray  # uint64 [n], equal for images with equal pixels (and, by chance, for others in 2^64)
    # row, name and reason of each image that could not be used; its row holds zeros
    bad: list[Bad] = field(default_factory=list)
    bytes_read: int = 0  # encoded bytes
    enlarged: int = 0  # how many images had a side shorter than it is now
    smallest: int = 0  # the shortest of these sides, in pixels; 0 where there is none


def digest_of(image: np.ndarray) -> int:
    """64 bits of a hash over the bytes of an image."""
    return int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "little")


def decode_into(
    out: np.ndarray, items: Iterable[Item], spec: ImageSpec, advance: Callable[[int], None] | None = None
) -> Decoded:
    """Decodes images into rows of an array.

    Args:
        out: uint8 [n, size, size, 3], memory-mapped where it is large; its pages are handed back as they fill, so
            that memory in use does not grow with n.
        items: of each image; it is read in a thread, which may raise :class:`BadImage`.
        advance: called with a number of finished images now and then, from this thread.
    """
    result, written = Decoded(np.zeros(len(out), np.uint64)), releasing(out)
    sizes, sides = np.zeros(len(out), np.int64), np.full(len(out), spec.size)  # bytes, and the shorter one in pixels
    Image.init()  # while there is one thread

    def work(chunk: Sequence[Item]) -> int:
        for row, name, read in chunk:
            try:
                content = read()
                out[row], sides[row] = decode(content, spec)
            except BadImage as error:
                out[row] = 0
                result.bad.append((row, name, str(error)))
            else:
                sizes[row], result.digests[row] = len(content), digest_of(out[row])
        return len(chunk)

    pool = ThreadPoolExecutor(loky.cpu_count())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
            for count in _in_order(pool, work, items):
                written(count * 3 * spec.size**2)
                if advance:
                    advance(count)
    finally:
        pool.shutdown(cancel_futures=True)
    enlarged = sides[sides < spec.size]
    result.bad.sort()
    result.bytes_read, result.enlarged = int(sizes.sum()), len(enlarged)
    result.smallest = int(enlarged.min(initial=spec.size)) if len(enlarged) else 0
    return result


def _in_order(pool: ThreadPoolExecutor, work: Callable[[Sequence[Item]], int], items: Iterable[Item]) -> Iterator[int]:
    """Yields what ``work`` returns of the chunks of items, of which a few are given out ahead."""
    rest, running = iter(items), deque[Future[int]]()
    while chunk := list(itertools.islice(rest, _CHUNK)):
        running.append(pool.submit(work, chunk))
        if len(running) > 2 * loky.cpu_count():
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def tree_items(tree: FileTree, paths: Sequence[str]) -> Iterator[Item]:
    """Items for :func:`decode_into`: row i is the file ``paths[i]`` of the tree."""

    def reader(entry: Entry) -> Callable[[], bytes]:
        def read() -> bytes:
            try:
                return tree.read(entry)
            except UserError as error:  # one that cannot be read spoils no other
                name = tree.where(entry)
                raise BadImage(str(error).removeprefix(f"cannot read {name}: ").replace(name, "it", 1)) from error

        return read

    for row, path in enumerate(paths):
        entry = tree.by_path[path]
        yield row, tree.where(entry), reader(entry)
