"""Encoded images as arrays: RGB, uint8, of one size. Pillow decodes; threads decode many."""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import loky
import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from ifsl_bench.data.read.archive import Entry, FileTree, describe_file_kind
from ifsl_bench.utils.errors import UserError, is_refused_by_machine
from ifsl_bench.utils.limits import IMAGE_PIXELS, IMAGE_SIDE, JPEG_SCANS, TIFF_VALUES
from ifsl_bench.utils.serialization import make_memory_releaser

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TIFF_BYTE_TYPES = {1, 2, 6, 7}  # types of tags that are kept as they are: bytes, text
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_16_BIT = 65_535  # of 16 bits
TRANSPOSE_OF_ORIENTATION = {  # EXIF's orientation -> what makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class UnusableImageError(Exception):
    """An image that cannot be used, and why."""


class MemorySemaphore:
    """A weighted semaphore: threads hold at most ``most`` units in all, and wait for more."""

    def __init__(self, most: int) -> None:
        self.most = self.available = most
        self.changed = threading.Condition()

    @contextmanager
    def acquire_while(self, count: int) -> Iterator[None]:
        """Hold ``count`` units, or all of them if it is more, within the block."""
        count = min(count, self.most)
        with self.changed:
            self.changed.wait_for(lambda: count <= self.available)
            self.available -= count
        try:
            yield
        finally:
            with self.changed:
                self.available += count
                self.changed.notify_all()


_pixel_semaphore = MemorySemaphore(IMAGE_PIXELS.maximum)  # of all threads together; ordinary images never come near


@dataclass(frozen=True)
class ImageSpec:
    """The form of decoded images.

    Attributes:
        side_pixels: height and width in pixels.
        fit_mode: "exact" accepts images of that size only; "stretch" resizes to it whatever the shape; "crop" scales
            the shorter side and takes the middle.
        resampling_filter: "cubic" is Pillow's, which averages when it shrinks; "cubic-opencv" is cv2.INTER_CUBIC, which
            does not: four taps (a = -0.75) at any scale, as in the released preparation of tiered-ImageNet.
        applies_exif_orientation: whether a rotation recorded by the camera (EXIF) is applied.
        white_level: the number that is white in images of more than 8 bits; None for 65,535, which 16 bits can hold.
    """

    side_pixels: int
    fit_mode: Literal["exact", "stretch", "crop"] = "exact"
    resampling_filter: Literal["cubic", "cubic-opencv"] = "cubic"
    applies_exif_orientation: bool = False
    white_level: int | None = None


@dataclass(frozen=True)
class ImageFindings:
    """Facts of a decoded image of which an import reports the number.

    Attributes:
        original_side: the shorter side in pixels, before it was resized.
        was_rotated: False if the camera's orientation was to be applied and cannot be read.
        max_value: the largest number of an image of 16 bits that uses less than a tenth of its range; else None.
        max_value_beyond_white: the largest number of an image with a tenth of its pixels beyond ``ImageSpec.white``;
            else None.
    """

    original_side: int
    was_rotated: bool = True
    max_value: int | None = None
    max_value_beyond_white: int | None = None


def decode_image(content: bytes, spec: ImageSpec) -> tuple[np.ndarray, ImageFindings]:
    """Decode an image; greyscale, palette and CMYK become RGB, and transparent pixels are laid on white.

    Args:
        content: The encoded image.
        spec: Size and fit.

    Returns:
        The image, uint8 [size, size, 3], and what an import reports of it.

    Raises:
        BadImage: It cannot be decoded, or has the wrong size.
    """
    if (values := count_tiff_header_values(content)) > TIFF_VALUES.maximum:
        raise UnusableImageError(f"it has {values:,} values in its header, too many to open")
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            whole = image.width * image.height
            if spec.fit_mode == "crop":  # JPEG can be decoded at a half, a quarter or an eighth of its size
                image.draft("RGB", (2 * spec.side_pixels, 2 * spec.side_pixels))
            if image.format in ("JPEG", "MPO") and (scans := content.count(b"\xff\xda")) > JPEG_SCANS.maximum:
                raise UnusableImageError(f"it has {scans:,} scans, too many to decode")
            pixels = image.width * image.height
            if pixels > IMAGE_PIXELS.maximum or max(image.width, image.height) > IMAGE_SIDE.maximum:
                raise UnusableImageError(f"it has {image.width:,} x {image.height:,} pixels, too many to decode")
            # A progressive JPEG is in memory at its full size, however small it comes out.
            with _pixel_semaphore.acquire_while(whole if image.info.get("progressive") else pixels):
                image.load()
                brightest = (
                    int(np.asarray(image).max())
                    if _is_16_bit(image, image.format) and not spec.white_level
                    else MAX_16_BIT
                )
                coloured = to_rgb(image, image.format, spec.white_level)
                turned = True
                if spec.applies_exif_orientation:
                    coloured, turned = _apply_orientation(image, coloured)
                # A JPEG that is decoded at a part of its size is at least twice as large as it will be.
                side = min(image.width, image.height)
                finding = ImageFindings(
                    side,
                    turned,
                    brightest if 0 < brightest < MAX_16_BIT // 10 else None,
                    _find_max_value_beyond_white(image, spec.white_level),
                )
                return _fit_to_size(coloured, spec), finding
    except UnidentifiedImageError:
        raise UnusableImageError(f"it is no image but {describe_file_kind(content[:512])}") from None
    except Image.DecompressionBombError:
        raise UnusableImageError("it has too many pixels to decode") from None
    except UnusableImageError:
        raise
    except Exception as error:  # of a damaged file: a decoder may raise anything
        if is_refused_by_machine(error):
            raise
        raise UnusableImageError(f"it cannot be decoded ({str(error)[:200] or type(error).__name__})") from None


def _apply_orientation(image: Image.Image, pixels: Image.Image) -> tuple[Image.Image, bool]:
    """Turn pixels as the camera recorded it; return them, and False if the record cannot be read.

    Args:
        image: As it was opened, with its metadata.
        pixels: Its pixels, perhaps converted.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of damaged metadata: Pillow may raise anything
        return pixels, False
    if orientation in TRANSPOSE_OF_ORIENTATION:
        return pixels.transpose(TRANSPOSE_OF_ORIENTATION[orientation]), True
    return pixels, orientation in (0, 1)  # unknown, and upright


def _find_max_value_beyond_white(image: Image.Image, white: int | None) -> int | None:
    """Return the largest number of an image of more than 8 bits with a tenth of its pixels beyond white; else None."""
    if white is None or not (image.mode.startswith("I;16") or image.mode in ("I", "F")):
        return None
    numbers = np.asarray(image)
    return int(numbers.max()) if (numbers > white).mean() > 0.1 else None


def _is_16_bit(image: Image.Image, form: str | None) -> bool:
    """Return whether an image has 16 bits a pixel; PNG has no more, TIFF may."""
    return image.mode.startswith("I;16") or (image.mode == "I" and form == "PNG")


def to_rgb(image: Image.Image, form: str | None = None, white: int | None = None) -> Image.Image:
    """Convert an image of any mode to RGB.

    Args:
        image: The image.
        form: Format of its file, such as "PNG".
        white: The number that is white in an image of more than 8 bits; None for all that 16 bits can hold.

    Raises:
        BadImage: The range of its numbers is unknown.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        numbers = np.asarray(image)
        if white is not None:
            if not np.isfinite(numbers).all():
                raise UnusableImageError("some of its pixels are no numbers")
            bytes_ = np.rint(np.clip(numbers.astype(np.float64) * (255 / white), 0, 255)).astype(np.uint8)
            return Image.fromarray(bytes_).convert("RGB")
        if not _is_16_bit(image, form):
            kind = "32-bit" if image.mode == "I" else "floating-point"
            raise UnusableImageError(
                f"its pixels are {kind} numbers of unknown range; --white N says which number is white"
            )
        if 0 < numbers.max() < 256:
            raise UnusableImageError(
                f"its 16-bit pixels go to {numbers.max()} of 65,535, so they seem to have another range; --white N "
                f"says which number is white"
            )
        return Image.fromarray((numbers >> 8).astype(np.uint8)).convert("RGB")  # the upper 8 bits
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        page = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(page, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _fit_to_size(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    size, (width, height) = spec.side_pixels, image.size
    if (width, height) == (size, size):
        return np.asarray(image)
    if spec.fit_mode == "exact":
        raise UnusableImageError(f"it has {width} x {height} pixels instead of {size} x {size}")
    box = (0.0, 0.0, float(width), float(height))
    if spec.fit_mode == "crop":
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    if spec.resampling_filter == "cubic":
        return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    if spec.fit_mode == "crop":
        image = image.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    return resize_cubic(np.asarray(image), size)


def resize_cubic(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an image as OpenCV's INTER_CUBIC does, up to its rounding of weights to 11 bits.

    Args:
        image: uint8 [H, W, C].
        size: Height and width of the result.

    Returns:
        uint8 [size, size, C].
    """

    def taps(length: int) -> tuple[np.ndarray, np.ndarray]:
        centre = (np.arange(size) + 0.5) * length / size - 0.5
        first = np.floor(centre).astype(np.int64)
        t = centre - first  # [size]
        d = np.stack([t + 1, t, 1 - t, 2 - t])  # [4, size], distances of the taps
        a = -0.75
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        weights = np.where(d <= 1, near, far)
        return np.clip(first + np.arange(-1, 3)[:, None], 0, length - 1), weights

    rows, row_weights = taps(image.shape[0])
    columns, column_weights = taps(image.shape[1])
    used = image[rows]  # [4, size, W, C]
    tall = np.einsum("kyxc,ky->yxc", used, row_weights)
    wide = np.einsum("ykxc,kx->yxc", tall[:, columns], column_weights)
    return np.clip(np.rint(wide), 0, 255).astype(np.uint8)


def count_tiff_header_values(content: bytes) -> int:
    """Return the number of values in a TIFF's first directory that Pillow would make objects of; 0 for other files."""
    form = content[:4]
    if form not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return 0
    order, big = "<" if form[:1] == b"I" else ">", b"+" in form
    first, number, entry = ("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")
    try:
        (at,) = struct.unpack_from(order + first, content, 8 if big else 4)
        (count,) = struct.unpack_from(order + number, content, at)
    except (struct.error, OverflowError):
        return 0
    size = struct.calcsize(order + entry)
    at += struct.calcsize(order + number)
    there = min(count, max(0, (len(content) - at) // size))
    total = there
    for i in range(min(there, 1 << 16)):
        _, kind, many = struct.unpack_from(order + entry, content, at + i * size)
        if kind not in TIFF_BYTE_TYPES:
            total += min(many, len(content))
    return total


_IMAGES_PER_CHUNK = 32  # images that a thread takes at a time

ImageItem = tuple[int, str, Callable[[], bytes]]  # row, name in messages, function that reads the encoded image
BadItem = tuple[int, str, str]  # row, name, reason


@dataclass
class DecodingOutcome:
    """The outcome of decoding the images of a pool."""

    digests: np.ndarray  # uint64 [n], of the pixels
    bad_images: list[BadItem] = field(default_factory=list)  # images that could not be used; their rows hold zeros
    bytes_read: int = 0  # encoded bytes
    # Facts of images to be reported, for the manifest: name -> {"images": their number, ...}.
    findings_by_image: dict[str, dict[str, int]] = field(default_factory=dict)


def digest_image(image: np.ndarray) -> int:
    """Return 64 bits of a hash over the bytes of an image."""
    return int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "little")


def decode_into(
    out: np.ndarray, items: Iterable[ImageItem], spec: ImageSpec, advance: Callable[[int], None] | None = None
) -> DecodingOutcome:
    """Decode images into rows of an array, in threads.

    Args:
        out: uint8 [n, size, size, 3]; pages of a memory map are released as they fill.
        items: The images; reading one, in a thread, may raise :class:`UnusableImageError`.
        spec: Size and fit.
        advance: Called with numbers of finished images, from this thread.
    """
    result, written = DecodingOutcome(np.zeros(len(out), np.uint64)), make_memory_releaser(out)
    sizes, findings = np.zeros(len(out), np.int64), [ImageFindings(spec.side_pixels)] * len(out)
    Image.init()  # while there is one thread

    def work(chunk: Sequence[ImageItem]) -> int:
        for row, name, read in chunk:
            try:
                content = read()
                out[row], findings[row] = decode_image(content, spec)
            except UnusableImageError as error:
                out[row] = 0
                result.bad_images.append((row, name, str(error)))
            else:
                sizes[row], result.digests[row] = len(content), digest_image(out[row])
        return len(chunk)

    pool = ThreadPoolExecutor(loky.cpu_count())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, on odd metadata
            for count in _map_in_order(pool, work, items):
                written(count * 3 * spec.side_pixels**2)
                if advance:
                    advance(count)
    finally:
        pool.shutdown(cancel_futures=True)
    result.bad_images.sort()
    result.bytes_read = int(sizes.sum())
    if enlarged := [finding.original_side for finding in findings if finding.original_side < spec.side_pixels]:
        result.findings_by_image["enlarged"] = {"images": len(enlarged), "smallest": min(enlarged)}
    if not_turned := sum(not finding.was_rotated for finding in findings):
        result.findings_by_image["not_turned"] = {"images": not_turned}
    if dark := [finding.max_value for finding in findings if finding.max_value is not None]:
        result.findings_by_image["dark"] = {"images": len(dark), "brightest": max(dark)}
    if beyond := [finding.max_value_beyond_white for finding in findings if finding.max_value_beyond_white is not None]:
        result.findings_by_image["beyond_white"] = {"images": len(beyond), "brightest": max(beyond)}
    return result


def _map_in_order(
    pool: ThreadPoolExecutor, work: Callable[[Sequence[ImageItem]], int], items: Iterable[ImageItem]
) -> Iterator[int]:
    """Yield the results of ``work`` on chunks of items; a few chunks are submitted ahead."""
    rest, running = iter(items), deque[Future[int]]()
    while chunk := list(itertools.islice(rest, _IMAGES_PER_CHUNK)):
        running.append(pool.submit(work, chunk))
        if len(running) > 2 * loky.cpu_count():
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def iterate_tree_images(tree: FileTree, paths: Sequence[str]) -> Iterator[ImageItem]:
    """Yield items for :func:`decode_into`; row i is the file ``paths[i]`` of the tree.

    Args:
        tree: Folder or archive.
        paths: Of the files in the tree, in the order of the rows.
    """

    def reader(entry: Entry) -> Callable[[], bytes]:
        def read() -> bytes:
            try:
                return tree.read_bytes(entry)
            except UserError as error:  # the others are still decoded
                name = tree.format_location(entry)
                raise UnusableImageError(
                    str(error).removeprefix(f"cannot read {name}: ").replace(name, "it", 1)
                ) from error

        return read

    for row, path in enumerate(paths):
        entry = tree.entry_by_path[path]
        yield row, tree.format_location(entry), reader(entry)
