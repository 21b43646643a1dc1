"""An encoded image to an array of a size: RGB, uint8. Decoding is Pillow's."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ifsl_bench.data.read.file_tree import what_is
from ifsl_bench.utils.limits import PIXELS, SCANS, SIDE, TIFF_VALUES

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TIFF_BYTES = {1, 2, 6, 7}  # types of tags that are kept as they are: bytes, text
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


class BadImage(Exception):
    """A single image that cannot be used; says why."""


class MemorySemaphore:
    """Lets threads hold so many units in all; who wants more than is left waits."""

    def __init__(self, most: int) -> None:
        self.most = self.available = most
        self.changed = threading.Condition()

    @contextmanager
    def of(self, count: int) -> Iterator[None]:
        """``count`` units, or all of them where it is more, for the time of the block."""
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


_pixels = MemorySemaphore(PIXELS.most)  # of the images that all threads together hold; ordinary ones never come near


@dataclass(frozen=True)
class ImageSpec:
    """The form of decoded images.

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


def decode(content: bytes, spec: ImageSpec) -> tuple[np.ndarray, int]:
    """An encoded image as RGB, uint8 [size, size, 3], and the shorter side, in pixels, of what was decoded.

    Greyscale, palette and CMYK images are converted; what is transparent is laid on white.

    Raises:
        BadImage: it cannot be decoded, or has the wrong size.
    """
    if (values := tiff_values(content)) > TIFF_VALUES.most:
        raise BadImage(f"it has {values:,} values in its header, too many to open")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            whole = image.width * image.height
            if spec.fit == "crop":  # JPEG can be decoded at a half, a quarter or an eighth of its size
                image.draft("RGB", (2 * spec.size, 2 * spec.size))
            if image.format in ("JPEG", "MPO") and (scans := content.count(b"\xff\xda")) > SCANS.most:
                raise BadImage(f"it has {scans:,} scans, too many to decode")
            pixels = image.width * image.height
            if pixels > PIXELS.most or max(image.width, image.height) > SIDE.most:
                raise BadImage(f"it has {image.width:,} x {image.height:,} pixels, too many to decode")
            # A progressive JPEG is in memory at its full size, however small it comes out.
            with _pixels.of(whole if image.info.get("progressive") else pixels):
                image.load()
                turned = ImageOps.exif_transpose(image) if spec.upright else image
                # A JPEG that is decoded at a part of its size is at least twice as large as it will be.
                return _fitted(rgb(turned, image.format), spec), min(image.width, image.height)
    except UnidentifiedImageError:
        raise BadImage(f"it is no image but {what_is(content[:512])}") from None
    except Image.DecompressionBombError:
        raise BadImage("it has too many pixels to decode") from None
    except BadImage:
        raise
    except Exception as error:  # of a damaged file: a decoder may raise anything
        raise BadImage(f"it cannot be decoded ({str(error)[:200] or type(error).__name__})") from None


def rgb(image: Image.Image, form: str | None = None) -> Image.Image:
    """An image of any mode as RGB.

    Args:
        form: the format of the file that it comes from.

    Raises:
        BadImage: nobody knows what its numbers stand for.
    """
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
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _fitted(image: Image.Image, spec: ImageSpec) -> np.ndarray:
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


def resize_cubic(image: np.ndarray, size: int) -> np.ndarray:
    """Resizes an image as OpenCV's INTER_CUBIC does, up to its rounding of weights to 11 bits.

    Args:
        image: uint8 [H, W, C].

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


def tiff_values(content: bytes) -> int:
    """Counts the entries of a TIFF's first directory, and the values of those that are no bytes, before Pillow makes an
    object of each; 0 where there is no TIFF header.

    What lies beyond the end of the file does not count: Pillow takes no more than there is.
    """
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
        if kind not in TIFF_BYTES:
            total += min(many, len(content))
    return total
