"""Many encoded images into the rows of a data set's array, on all cores.

Threads read the encoded images, and decode them into the array or have a process do it. Pillow leaves the interpreter's
lock while it decodes; but where images are small, threads hand the lock to and fro more than they work.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from ifsl_bench.common.arrays import release
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import image_bytes
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.budget import Budget
from ifsl_bench.data.read.decode import BadImage, ImageSpec, decode_rows, formats
from ifsl_bench.data.read.decode_workers import Workers, cores

QUEUED = 1 << 28  # bytes of images, encoded or decoded, that wait for a thread or are in one
_RELEASE = 1 << 26  # bytes written between two releases of the array's pages
_CHUNK, _CHUNK_BYTES = 128, 1 << 23  # images a thread takes at a time, fewer where they are large
_BATCH_BYTES = 1 << 20  # encoded bytes after which a thread has decoded what it read
_LARGE = Budget(QUEUED)  # encoded bytes that threads read, of images larger than that; others never come near


@dataclass(frozen=True, slots=True)
class Unread:
    """A file of a tree, to be read when its turn comes; one that cannot be read spoils no other."""

    tree: FileTree
    entry: Entry

    def __call__(self) -> bytes:
        try:
            return self.tree.read(self.entry)
        except UserError as error:
            name = self.tree.where(self.entry)
            told = str(error).removeprefix(f"cannot read {name}: ").replace(name, "it", 1)
            raise BadImage(told) from error


Content = bytes | Callable[[], bytes]
Item = tuple[int, str, Content]  # row, how messages name the image, its encoded content or how to read it
Bad = tuple[int, str, str]  # row, name, reason
_Worked = tuple[int, int, list[Bad], list[int]]  # images, encoded bytes, unusable ones, shorter sides of enlarged ones


@dataclass
class Decoded:
    """The outcome of decoding the images of a pool.

    Attributes:
        digests: uint64 [n], equal for images with equal pixels (and, by chance, for others in 2^64).
        bad: row, name and reason of each image that could not be used; its row holds zeros.
        bytes_read: encoded bytes.
        enlarged: how many images had a side shorter than it is now.
        smallest: the shortest of these sides, in pixels; 0 where there is none.
    """

    digests: np.ndarray
    bad: list[Bad] = field(default_factory=list)
    bytes_read: int = 0
    enlarged: int = 0
    smallest: int = 0


def decode_into(
    out: np.ndarray,
    items: Iterable[Item],
    spec: ImageSpec,
    advance: Callable[[int], None] | None = None,
    workers: Workers | None = None,
) -> Decoded:
    """Decodes images into rows of an array, on all cores.

    Args:
        out: uint8 [n, size, size, 3], memory-mapped where it is large; its pages are handed back as they fill, so
            that memory in use does not grow with n.
        items: (row, name, content) of each image; content is read in a thread where it is a function, which may
            raise :class:`BadImage`.
        advance: called with a number of finished images now and then, from this thread.
        workers: processes that decode; without them the threads do.

    Raises:
        UserError: what the images come from, an archive that is read in one go, could not be read on.
    """
    result = Decoded(np.zeros(len(out), np.uint64))
    written = queued = 0
    image_bytes = 3 * spec.size**2
    threads = max(cores(), 4 * workers.count) if workers else cores()  # most of them wait for a process
    formats()

    def work(chunk: list[Item]) -> _Worked:
        size, bad, small = 0, list[Bad](), list[int]()
        for rows, names, contents in _batches(chunk, bad):
            batch = (workers.decode_rows if workers else decode_rows)(out, rows, contents, spec)
            result.digests[rows] = batch.digests
            bad += [(rows[i], names[i], reason) for i, reason in batch.bad]
            small += batch.small
            size += sum(map(len, contents))
        return len(chunk), size, bad, small

    def collect(future: Future[_Worked], held: int) -> None:
        nonlocal written, queued
        count, size, bad, small = future.result()
        queued -= held
        result.enlarged += len(small)
        result.smallest = min([*small, result.smallest or spec.size]) if small else result.smallest
        result.bytes_read += size
        result.bad += bad
        for row, _, _ in bad:
            out[row] = 0
        written += count * image_bytes
        if written >= _RELEASE:
            release(out)
            written = 0
        if advance:
            advance(count)

    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
        running: deque[tuple[Future[_Worked], int]] = deque()
        try:
            for chunk, held in _chunks(items, image_bytes):
                running.append((pool.submit(work, chunk), held))
                queued += held
                while running and (len(running) >= 2 * threads or queued > QUEUED - 2 * _CHUNK_BYTES):
                    collect(*running.popleft())
            while running:
                collect(*running.popleft())
        except BaseException:
            for future, _ in running:
                future.cancel()
            raise
    result.bad.sort()
    return result


def _chunks(items: Iterable[Item], image_bytes: int) -> Iterator[tuple[list[Item], int]]:
    """Items for a thread to take together, and how many bytes they hold, or will hold when they are decoded."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += image_bytes + (len(item[2]) if isinstance(item[2], bytes) else 0)
        del item
        if len(chunk) == _CHUNK or size >= _CHUNK_BYTES:
            yield chunk, size
            chunk, size = [], 0
    if chunk:
        yield chunk, size


def _batches(chunk: list[Item], bad: list[Bad]) -> Iterator[tuple[list[int], list[str], list[bytes]]]:
    """Rows, names and contents of images to decode together. What cannot be read is added to ``bad``."""
    rows, names, contents = list[int](), list[str](), list[bytes]()
    size = 0
    for row, name, content in chunk:
        large = content.entry.size if isinstance(content, Unread) else 0
        with _LARGE.of(large) if large > _BATCH_BYTES else nullcontext():  # until it is decoded
            try:
                encoded = content if isinstance(content, bytes) else content()
            except BadImage as error:
                bad.append((row, name, str(error)))
                continue
            rows.append(row)
            names.append(name)
            contents.append(encoded)
            size += len(encoded)
            del content, encoded
            if size >= _BATCH_BYTES:
                yield rows, names, contents
                contents.clear()  # the caller has them no more
                rows, names, contents, size = [], [], [], 0
    if rows:
        yield rows, names, contents


def tree_items(tree: FileTree, paths: Sequence[str]) -> Iterator[Item]:
    """Items for :func:`decode_into`: row i is the file ``paths[i]`` of the tree."""
    entries = [tree.by_path[path] for path in paths]
    if tree.random:
        for row, entry in enumerate(entries):
            yield row, tree.where(entry), Unread(tree, entry)
        return
    most = image_bytes().most
    rows = [row for row, entry in enumerate(entries) if entry.size <= most]
    for row in sorted(set(range(len(entries))) - set(rows)):
        yield row, tree.where(entries[row]), Unread(tree, entries[row])  # which says that it is too large
    for i, content in tree.scan([entries[row] for row in rows]):
        yield rows[i], tree.where(entries[rows[i]]), content


def refuse_bad(bad: Sequence[Bad], total: int, option: str = "--allow-partial") -> UserError:
    """The error for images that could not be used: how many, and the first of them by name."""
    shown = "; ".join(f"{name}: {reason}" for _, name, reason in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return UserError(
        f"{len(bad):,} of {total:,} images cannot be used: {shown}{more}. Get these files again, or add "
        f"{option} to leave them out and mark the data set partial"
    )
