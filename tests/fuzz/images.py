"""Encoded images."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from ifsl_bench.data.read.decode import BadImage, ImageSpec, decode
from ifsl_bench.utils.errors import UserError
from tests.fuzz.formats import Format
from tests.fuzz.mutation import once, spoiled


def encoded(form: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (9, 7), **options: object) -> bytes:
    """A small image of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode)
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@cache
def images() -> Sequence[bytes]:
    modes = {
        "PNG": ("RGB", "RGBA", "P", "1", "LA"), "JPEG": ("RGB", "CMYK"), "GIF": ("P",), "BMP": ("RGB", "P"),
        "TIFF": ("RGB", "CMYK"), "WEBP": ("RGB",),
    }  # fmt: skip
    return [
        *(encoded(form, mode) for form in modes for mode in modes[form]),
        encoded("JPEG", "L", progressive=True),
        encoded("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"),
        encoded("TIFF", "L", compression="tiff_lzw"),
        encoded("TIFF", "1", compression="group4"),
        encoded("WEBP", "RGBA", lossless=True),
    ]


def spoiled_image(random: Random, content: bytes) -> bytes:
    """Chunks of a PNG with their checksums made right; of others, any bytes."""
    if not content.startswith(b"\x89PNG") or random.random() < 0.3:
        return spoiled(random, content)
    at, chunks = 8, []
    while at + 12 <= len(content):
        length = struct.unpack(">I", content[at : at + 4])[0]
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    i = random.randrange(len(chunks))
    kind, data = chunks[i]
    if random.random() < 0.3:
        bomb = zlib.compress(bytes(1 << 22))
        chunks.insert(i, (random.choice((b"zTXt", b"iCCP", b"iTXt")), b"k\0\0" + bomb))
    elif random.random() < 0.2:
        chunks[i:i] = [random.choice(chunks)] * random.choice((1, 500))
    else:
        chunks[i] = (kind, once(random, data))
    out = content[:8]
    for kind, data in chunks:
        out += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return out


def read_image(path: Path) -> None:
    content = path.read_bytes()
    specs = (ImageSpec(8, "crop", upright=True), ImageSpec(8, "stretch", "cubic-opencv"), ImageSpec(9))
    refused = []
    for spec in specs:
        try:
            decode(content, spec)
        except BadImage as error:
            refused.append(str(error))
    if len(refused) == len(specs):
        raise UserError(refused[0])


FORMATS = [Format("image", images, read_image, spoiled_image, 20)]
