"""Images made to hang or to fill the memory: each is refused in one line."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.images import BadImage, ImageSpec, decode, decode_into, tree_items
from tests.data.test_archive import add_files
from tests.fuzz.formats import encoded

MB = 1 << 20


def test_one_image_that_is_too_large_spoils_no_other_and_the_limit_is_a_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "1")
    good, large = encoded(), encoded() + bytes(2 * 10**6)  # what follows an image does no harm
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        add_files(archive, {"a.png": good, "b.png": large, "c.png": good})
    with open_tree(path) as tree:
        out = np.zeros((3, 8, 8, 3), np.uint8)
        outcome = decode_into(out, tree_items(tree, ["a.png", "b.png", "c.png"]), ImageSpec(8, "crop"))
        ((row, _, reason),) = outcome.bad
        assert row == 1
        assert reason.startswith("it has 2,000,")
        assert "too large for an encoded image" in reason
        assert out[0].any()
        assert (out[0] == out[2]).all()
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "3")
    with open_tree(path) as tree:
        assert not decode_into(out, tree_items(tree, ["b.png"]), ImageSpec(8, "crop")).bad


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 1 << 20), "pixels, too many to decode"),
        ((1 << 16, (1 << 10) + 1), "pixels, too many to decode"),
        ((1 << 15, 1 << 15), "too many pixels to decode"),
    ],
)
def test_an_image_of_too_many_rows_or_pixels_is_refused_before_it_is_decoded(size, message, traced):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 6, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(MB))) + chunk(b"IEND", b"")
    with traced() as memory, pytest.raises(BadImage, match=message):
        decode(content, ImageSpec(8, "crop"))
    assert memory.peak < 5e6


@pytest.mark.parametrize("progressive", [False, True])
def test_an_image_of_endless_passes_is_refused_before_it_is_decoded(progressive):
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", progressive=progressive)
    content = out.getvalue()
    assert decode(content, ImageSpec(8, "crop"))[0].shape == (8, 8, 3)
    last = content.rindex(b"\xff\xda")
    with pytest.raises(BadImage, match=r"it has 100,\d\d\d scans, too many"):
        decode(content[:last] + content[last : last + 14] * 100_000 + content[last:], ImageSpec(8, "crop"))


def tiff(tags, extra, form="<"):
    """A header with these tags (number, type, values, where) and what follows it."""
    body = struct.pack(f"{form}H", len(tags)) + b"".join(struct.pack(f"{form}HHLL", *tag) for tag in tags)
    start = b"II*\0" if form == "<" else b"MM\0*"
    return start + struct.pack(f"{form}L", 8) + body + bytes(4) + extra


@pytest.mark.parametrize("form", ["<", ">"])
@pytest.mark.parametrize(("kind", "many"), [(4, 5_000_000), (5, 5_000_000), (12, 2_000_000)])
def test_a_tiff_with_millions_of_values_in_its_header_is_refused_before_it_is_opened(form, kind, many):
    usual = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8 if form == "<" else 8 << 16)]
    content = tiff([*usual, (700, kind, many, 200)], bytes(6_000_000), form)
    with pytest.raises(BadImage, match=r"it has [\d,]+ values in its header, too many"):
        decode(content, ImageSpec(16, "crop"))
