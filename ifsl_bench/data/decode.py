"""Encoded images to arrays of one size: RGB, uint8, several at a time.

Decoding is Pillow's; it leaves the interpreter's lock while it works, so threads use all cores and write straight into
the data set's array.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from ifsl_bench.data.archive import Entry, Tree, what_is
from ifsl_bench.data.cubic import resize_cubic
from ifsl_bench.data.pools import release
from ifsl_bench.data.room import Room
from ifsl_bench.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 1 << 26  # of a decoded image, at 4 to 12 bytes each
PIXELS_IN_FLIGHT = 2 * MOST_PIXELS  # of the images that all threads together hold; ordinary ones never come near
QUEUED = 1 << 28  # encoded bytes that wait for a thread, or are in one
_RELEASE = 1 << 28  # bytes written between two releases of the array's pages
_CHUNK, _CHUNK_BYTES = 32, 1 << 23  # images a thread takes at a time, fewer where they are large
_STRIP = 1 << 20  # pixels that are laid on white at a time

Content = bytes | Callable[[], bytes]
Item = tuple[int, str, Content]  # row, how messages name the image, its encoded content or how to read it


class BadImage(Exception):
    """A single image that cannot be used; says why."""


_room = Room(PIXELS_IN_FLIGHT)


@dataclass(frozen=True)
class ImageSpec:
    """What decoded images look like.

    Attributes:
        size: height and width in pixels.
        fit: "exact" accepts images of that size only; "stretch" resizes to it whatever the shape; "crop" scales the
            shorter side and takes the middle.
        filter: "cubic" is Pillow's, which averages when it shrinks; "cubic-opencv" is cv2.INTER_CUBIC, which does
            not: four taps (a = -0.75) at any scale, as in the released preparation of tiered-ImageNet.
        upright: whether a rotation recorded by the camera (EXIF) is applied.
    """

    size: int
    fit: Literal["exact", "stretch", "crop"] = "exact"
    filter: Literal["cubic", "cubic-opencv"] = "cubic"
    upright: bool = False


def decode(content: bytes, spec: ImageSpec) -> np.ndarray:
    """An encoded image as RGB, uint8 [size, size, 3]. Greyscale, palette and CMYK images are converted; what is
    transparent is laid on white.

    Raises:
        BadImage: it cannot be decoded, or has the wrong size.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_formats()) as image:
            whole = image.width * image.height
            if spec.fit == "crop":  # JPEG can be decoded at a half, a quarter or an eighth of its size
                image.draft("RGB", (2 * spec.size, 2 * spec.size))
            pixels = image.width * image.height
            if pixels > MOST_PIXELS:
                raise BadImage(f"it has {image.width:,} x {image.height:,} pixels, too many to decode")
            # A progressive JPEG is in memory at its full size, however small it comes out.
            with _room.of(whole if image.info.get("progressive") else pixels):
                image.load()
                turned = ImageOps.exif_transpose(image) if spec.upright else image
                return _fitted(rgb(turned, image.format), spec)
    except UnidentifiedImageError:
        raise BadImage(f"it is no image but {what_is(content[:512])}") from None
    except Image.DecompressionBombError:
        raise BadImage("it has too many pixels to decode") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error) as error:
        raise BadImage(f"it cannot be decoded ({error})") from None


@cache
def _formats() -> tuple[str, ...]:
    """Those of :data:`FORMATS` that this build of Pillow knows. Called first while there is one thread."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def rgb(image: Image.Image, form: str | None = None) -> Image.Image:
    """An image of any mode as RGB.

    Args:
        form: the format of the file that it comes from.

    Raises:
        BadImage: nobody knows what its numbers stand for.
    """
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and form == "PNG"):  # PNG has no more than 16 bits
        wide = np.asarray(image)
        if 0 < wide.max() < 256:
            raise BadImage(f"its 16-bit pixels go to {wide.max()} of 65,535, so they seem to have another range")
        return Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB")  # the upper 8 bits
    if image.mode in ("I", "F"):
        kind = "32-bit" if image.mode == "I" else "floating-point"
        raise BadImage(f"its pixels are {kind} numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _on_white(image)
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """An image with transparency as RGB, in strips, since whole it would be in memory four times."""
    from PIL import Image

    out = Image.new("RGB", image.size)
    height = max(1, _STRIP // image.width)
    for top in range(0, image.height, height):
        strip = image.crop((0, top, image.width, min(top + height, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        out.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return out


def _fitted(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    from PIL import Image

    size, (width, height) = spec.size, image.size
    if (width, height) == (size, size):
        return np.asarray(image)
    if spec.fit == "exact":
        raise BadImage(f"it has {width} x {height} pixels instead of {size} x {size}")
    box = (0.0, 0.0, float(width), float(height))
    if spec.fit == "crop":
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    if spec.filter == "cubic":
        return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    if spec.fit == "crop":
        image = image.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    return resize_cubic(np.asarray(image), size)


@dataclass
class Decoded:
    """What came of decoding the images of a pool.

    Attributes:
        digests: uint64 [n], equal for images with equal pixels (and, by chance, for others in 2^64).
        bad: row, name and reason of each image that could not be used; its row holds zeros.
        bytes_read: encoded bytes.
    """

    digests: np.ndarray
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    bytes_read: int = 0


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _chunks(items: Iterable[Item]) -> Iterator[tuple[list[Item], int]]:
    """Items for a thread to take together, and how many encoded bytes they hold already."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += len(item[2]) if isinstance(item[2], bytes) else 0
        del item
        if len(chunk) == _CHUNK or size >= _CHUNK_BYTES:
            yield chunk, size
            chunk, size = [], 0
    if chunk:
        yield chunk, size


def decode_into(
    out: np.ndarray, items: Iterable[Item], spec: ImageSpec, advance: Callable[[int], None] | None = None
) -> Decoded:
    """Decodes images into rows of an array, in as many threads as there are cores.

    Args:
        out: uint8 [n, size, size, 3], memory-mapped where it is large; its pages are handed back as they fill, so
            that memory in use does not grow with n.
        items: (row, name, content) of each image; content is read in the thread where it is a function, which may
            raise :class:`BadImage`.
        advance: called with a number of finished images now and then, from this thread.

    Raises:
        UserError: what the images come from, an archive that is read in one go, could not be read on.
    """
    result = Decoded(np.zeros(len(out), np.uint64))
    written = queued = 0
    _formats()

    def work(chunk: list[Item]) -> tuple[int, int, list[tuple[int, str, str]]]:
        size, bad = 0, []
        for row, name, content in chunk:
            try:
                encoded = content if isinstance(content, bytes) else content()
                size += len(encoded)
                pixels = decode(encoded, spec)
            except BadImage as error:
                out[row] = 0
                bad.append((row, name, str(error)))
            else:
                out[row] = pixels
                digest = hashlib.sha256(pixels.tobytes()).digest()[:8]
                result.digests[row] = int.from_bytes(digest, "little")
        return len(chunk), size, bad

    def collect(future: Future[tuple[int, int, list[tuple[int, str, str]]]], held: int) -> None:
        nonlocal written, queued
        count, size, bad = future.result()
        queued -= held
        result.bytes_read += size
        result.bad += bad
        written += count * out[0].nbytes
        if written >= _RELEASE:
            release(out)
            written = 0
        if advance:
            advance(count)

    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
        running: deque[tuple[Future[tuple[int, int, list[tuple[int, str, str]]]], int]] = deque()
        try:
            for chunk, held in _chunks(items):
                running.append((pool.submit(work, chunk), held))
                queued += held
                while running and (len(running) >= 4 * cores() or queued > QUEUED - 2 * _CHUNK_BYTES):
                    collect(*running.popleft())
            while running:
                collect(*running.popleft())
        except BaseException:
            for future, _ in running:
                future.cancel()
            raise
    result.bad.sort()
    return result


def tree_items(tree: Tree, paths: Sequence[str]) -> Iterator[Item]:
    """Items for :func:`decode_into`: row i is the file ``paths[i]`` of the tree."""
    entries = [tree.by_path[path] for path in paths]
    if tree.random:
        for row, entry in enumerate(entries):
            yield row, tree.where(entry), partial(_read, tree, entry)
    else:
        for row, content in tree.scan(entries):
            yield row, tree.where(entries[row]), content


def _read(tree: Tree, entry: Entry) -> bytes:
    """A file that lies by itself; one that cannot be read spoils no other."""
    try:
        return tree.read(entry)
    except UserError as error:
        name = tree.where(entry)
        raise BadImage(str(error).removeprefix(f"cannot read {name}: ").replace(name, "it", 1)) from error


def refuse_bad(bad: Sequence[tuple[int, str, str]], total: int, option: str = "--allow-partial") -> UserError:
    """The error for images that could not be used: how many, and the first of them by name."""
    shown = "; ".join(f"{name}: {reason}" for _, name, reason in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return UserError(
        f"{len(bad):,} of {total:,} images cannot be used: {shown}{more}. Get these files again, or add "
        f"{option} to leave them out and mark the data set partial"
    )
