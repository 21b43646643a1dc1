"""Images: every kind is decoded to RGB of one size, many of them within bounds of memory; bad ones are named."""

from __future__ import annotations

import io
import re
import struct
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from ifsl_bench.data.read import images
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.images import (
    ImageSpec,
    MemorySemaphore,
    UnusableImageError,
    decode_into,
    iterate_tree_images,
    resize_cubic,
)
from ifsl_bench.utils.serialization import create_array
from tests.data.test_archive import make_tar


def picture(height: int = 24, width: int = 24, seed: int = 0) -> np.ndarray:
    """A smooth colour image, uint8 [H, W, 3], which JPEG hardly changes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    a, b, c = rng.uniform(0.5, 3, (3, 3))
    return np.stack([127 + 100 * np.sin(a[i] * x + b[i] * y + c[i]) for i in range(3)], -1).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, form, **options)
    return out.getvalue()


EXACT = ImageSpec(24)


def decode(content: bytes, spec: ImageSpec) -> np.ndarray:
    return images.decode_image(content, spec)[0]


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_come_out_as_they_are(form):
    pixels = picture()
    options = {"lossless": True} if form == "WEBP" else {}
    np.testing.assert_array_equal(decode(encoded(pixels, form, **options), EXACT), pixels)


def test_greyscale_and_palette_become_rgb():
    grey = picture()[..., 0]
    np.testing.assert_array_equal(decode(encoded(grey), EXACT), np.repeat(grey[..., None], 3, -1))
    jpeg = decode(encoded(grey, "JPEG", quality=95), EXACT)
    assert (jpeg[..., 0] == jpeg[..., 1]).all()
    assert (jpeg[..., 0] == jpeg[..., 2]).all()
    palette = Image.fromarray(picture()).quantize(16)
    np.testing.assert_array_equal(decode(encoded(palette), EXACT), np.asarray(palette.convert("RGB")))
    bits = Image.fromarray(grey > 127)
    np.testing.assert_array_equal(decode(encoded(bits), EXACT)[..., 0], np.where(grey > 127, 255, 0))


def test_cmyk_becomes_rgb():
    pixels = picture()
    cmyk = Image.fromarray(np.concatenate([255 - pixels, np.zeros_like(pixels[..., :1])], -1), "CMYK")
    assert np.abs(decode(encoded(cmyk, "JPEG", quality=95), EXACT).astype(int) - pixels).mean() < 6


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_greyscale_that_would_become_black_is_refused(form):
    """8-bit numbers in a 16-bit file; what is black by any range is a picture."""
    wide = picture()[..., 0].astype(np.uint16)
    with pytest.raises(UnusableImageError, match=rf"16-bit pixels go to {wide.max()} of 65,535"):
        decode(encoded(Image.fromarray(wide), form), EXACT)
    assert not decode(encoded(Image.fromarray(0 * wide), form), EXACT).any()
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(wide + 256), form), EXACT), 1)


def test_32_bit_greyscale_has_no_known_range():
    wide = Image.fromarray(picture()[..., 0].astype(np.int32) * 257)
    assert wide.mode == "I"
    with pytest.raises(UnusableImageError, match="its pixels are 32-bit numbers of unknown range"):
        decode(encoded(wide, "TIFF"), ImageSpec(24, applies_exif_orientation=True))
    with pytest.raises(UnusableImageError, match="unknown range"):
        images.to_rgb(wide)


def test_what_is_transparent_is_laid_on_white():
    pixels, alpha = picture(), np.full((24, 24, 1), 255, np.uint8)
    alpha[:12], alpha[12:18] = 0, 128
    out = decode(encoded(Image.fromarray(np.concatenate([pixels, alpha], -1))), EXACT).astype(float)
    share = alpha / 255
    np.testing.assert_allclose(out, share * pixels + (1 - share) * 255, atol=1.01)  # rounded twice, to whole levels
    palette = Image.fromarray(picture()).quantize(8)
    out = decode(encoded(palette, "PNG", transparency=3), EXACT)
    assert (out[np.asarray(palette) == 3] == 255).all()


def test_rotation_recorded_by_a_camera():
    pixels = picture()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    content = encoded(pixels, "PNG", exif=exif)
    np.testing.assert_array_equal(decode(content, ImageSpec(24, applies_exif_orientation=True)), np.rot90(pixels, -1))
    np.testing.assert_array_equal(decode(content, EXACT), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_that_of_pillow_even_beside_a_malformed_entry(orientation):
    pixels = picture(24, 24)
    width_as_text = struct.pack("<HHL4s", 256, 2, 4, b"abc")
    entry = struct.pack("<HHLHH", 274, 3, 1, orientation, 0)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + width_as_text + entry + bytes(4)
    sound = Image.Exif()
    sound[274] = orientation
    with Image.open(io.BytesIO(encoded(pixels, "JPEG", exif=sound))) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    result, finding = images.decode_image(
        encoded(pixels, "JPEG", exif=exif), ImageSpec(24, applies_exif_orientation=True)
    )
    np.testing.assert_array_equal(result, expected)
    assert finding.was_rotated


@pytest.mark.parametrize("kind", ["text", "beyond"])
def test_an_image_whose_orientation_cannot_be_read_is_used_as_it_is(kind):
    text, beyond = struct.pack("<HHL4s", 274, 2, 4, b"abc"), struct.pack("<HHLHH", 274, 3, 1, 99, 0)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + (text if kind == "text" else beyond) + bytes(4)
    content = encoded(picture(24, 24), "JPEG", exif=exif)
    result, finding = images.decode_image(content, ImageSpec(24, applies_exif_orientation=True))
    np.testing.assert_array_equal(result, decode(content, EXACT))
    assert not finding.was_rotated


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_images_of_more_than_8_bits_are_scaled_to_what_is_white(form):
    wide = np.arange(576, dtype=np.uint16).reshape(24, 24) * 7  # up to 4,025, as of a microscope with 12 bits
    content = encoded(Image.fromarray(wide), form)
    dark, finding = images.decode_image(content, EXACT)
    assert finding.max_value == 4025
    assert dark.max() == 15
    bright, finding = images.decode_image(content, ImageSpec(24, white_level=4095))
    assert finding.max_value is None
    np.testing.assert_array_equal(bright[..., 0], np.rint(wide / 4095 * 255))
    assert (
        images.decode_image(encoded(Image.fromarray(wide * 2), form), EXACT)[1].max_value is None
    )  # more than a tenth
    clipped = decode(content, ImageSpec(24, white_level=2000))
    np.testing.assert_array_equal(clipped[..., 0], np.rint(np.minimum(wide / 2000, 1) * 255))
    if form == "TIFF":
        floats = encoded(Image.fromarray(wide.astype(np.float32)), form)
        np.testing.assert_array_equal(decode(floats, ImageSpec(24, white_level=4095)), bright)
        with pytest.raises(UnusableImageError, match="some of its pixels are no numbers"):
            decode(encoded(Image.fromarray(wide * np.float32("nan")), form), ImageSpec(24, white_level=4095))


def test_fits():
    wide = encoded(picture(24, 40))
    with pytest.raises(UnusableImageError, match="40 x 24 pixels instead of 24 x 24"):
        decode(wide, EXACT)
    np.testing.assert_array_equal(decode(wide, ImageSpec(24, "crop")), picture(24, 40)[:, 8:32])
    stretched = Image.fromarray(picture(24, 40)).resize((24, 24), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decode(wide, ImageSpec(24, "stretch")), np.asarray(stretched))
    assert decode(encoded(picture(7, 5)), ImageSpec(24, "crop")).shape == (24, 24, 3)


def test_large_jpeg_is_decoded_small():
    """A photograph of 2,000 pixels with stripes of 15: the middle, as if it had been decoded whole."""
    large = np.where(np.arange(2000)[:, None] // 15 % 2, picture(1500, 2000), 20)[:1500].astype(np.uint8)
    out = decode(encoded(large, "JPEG", quality=95), ImageSpec(200, "crop"))
    expected = Image.fromarray(large[:, 250:1750]).resize((200, 200), Image.Resampling.BICUBIC)
    assert np.abs(out.astype(int) - np.asarray(expected)).mean() < 5


@pytest.mark.parametrize(("height", "width"), [(60, 41), (9, 24), (24, 24)])
def test_cubic_without_averaging_agrees_with_pytorch(height, width):
    """PyTorch's kernel is OpenCV's, that of Keys (1981) with a = -0.75; Pillow rounds in fixed point."""
    pixels = picture(height, width, seed=3)
    wide = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    peer = F.interpolate(wide, (24, 24), mode="bicubic", align_corners=False)
    peer = peer[0].permute(1, 2, 0).round().clamp(0, 255).numpy()
    resized = resize_cubic(pixels, 24)
    assert np.abs(resized - peer).max() <= 1
    if (height, width) != (24, 24):
        np.testing.assert_array_equal(decode(encoded(pixels), ImageSpec(24, "stretch", "cubic-opencv")), resized)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: b"", "an empty file"),
        (lambda: b"<html>not here</html>", "an HTML page"),
        (lambda: encoded(picture(), "JPEG")[:300], "cannot be decoded"),
        (lambda: encoded(Image.fromarray(picture()[..., 0].astype(np.float32)), "TIFF"), "floating-point"),
        (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "no image|cannot be decoded"),
    ],
)
def test_what_cannot_be_decoded_says_why(content, reason):
    with pytest.raises(UnusableImageError, match=reason):
        decode(content(), ImageSpec(24, "stretch"))


@pytest.mark.parametrize(("progressive", "held"), [(False, 100 * 75), (True, 800 * 600)])
def test_a_progressive_jpeg_counts_at_its_full_size(monkeypatch, progressive, held):
    """It is decoded as small as any other, but all of its coefficients are read first."""
    counts = []
    monkeypatch.setattr(
        images, "_pixel_semaphore", SimpleNamespace(acquire_while=lambda count: nullcontext(counts.append(count)))
    )
    decode(encoded(picture(600, 800), "JPEG", progressive=progressive), ImageSpec(24, "crop"))
    assert counts == [held]


def item(row: int, content: bytes):
    return row, f"image {row}", lambda: content


@pytest.fixture
def array(tmp_path):
    """Makes uint8 [n, 24, 24, 3] in a file, full of sevens."""

    def make(n: int) -> np.memmap:
        out = create_array(tmp_path / f"{n}.npy", (n, 24, 24, 3), "uint8")
        out[:] = 7
        return out

    return make


def test_many_images_into_rows_in_any_order(array):
    pictures = [picture(seed=i) for i in range(150)]
    pictures[77] = pictures[12]
    out, progress = array(160), []
    items = [item(int(row), encoded(pictures[row])) for row in np.random.default_rng(0).permutation(150)]
    result = decode_into(out[10:], iter(items), EXACT, progress.append)
    np.testing.assert_array_equal(out[10:], np.stack(pictures))
    assert (out[:10] == 7).all()
    assert sum(progress) == 150
    assert result.bytes_read == sum(len(encoded(p)) for p in pictures)
    same = {(i, j) for i in range(150) for j in range(i) if result.digests[i] == result.digests[j]}
    assert same == {(77, 12)}
    assert (np.load(out.filename) == out).all()


def test_encoded_images_in_memory_are_few(traced):
    """60 of 4 MB each (a picture with something behind it), of which two threads hold one and what it was added to."""
    out = np.zeros((60, 24, 24, 3), np.uint8)
    content = encoded(picture())
    with traced() as memory:
        result = decode_into(out, [(i, "", lambda: content + bytes(1 << 22)) for i in range(60)], EXACT)
    assert result.bad_images == []
    assert (out == picture()).all()
    assert memory.peak < (images.loky.cpu_count() + 1) * (10 << 20)


def test_threads_hold_a_bounded_number_of_pixels_together(monkeypatch):
    class Watched(MemorySemaphore):
        most_held = 0

        @contextmanager
        def acquire_while(self, count):
            with super().acquire_while(count):
                self.most_held = max(self.most_held, self.most - self.available)
                yield

    budget = Watched(2_000)
    monkeypatch.setattr(images, "_pixel_semaphore", budget)
    monkeypatch.setattr(images.loky, "cpu_count", lambda: 8)
    monkeypatch.setattr(images, "_IMAGES_PER_CHUNK", 1)
    sizes = [(30, 30), (24, 24), (60, 60), (40, 20)] * 40  # of which one is larger than the budget
    contents = [encoded(picture(*size, seed=i)) for i, size in enumerate(sizes)]
    out = np.zeros((len(sizes), 24, 24, 3), np.uint8)
    result = decode_into(out, map(item, range(len(sizes)), contents), ImageSpec(24, "stretch"))
    assert result.bad_images == []
    assert result.findings_by_image["enlarged"] == {"images": 40, "smallest": 20}
    assert 900 < budget.most_held <= 2_000
    assert budget.available == 2_000
    for row, content in enumerate(contents):
        np.testing.assert_array_equal(out[row], decode(content, ImageSpec(24, "stretch")))


def test_bad_images_are_listed_by_row_and_name(tmp_path, array):
    """One is no image; one is cut and one removed, after they were listed."""
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.png").write_bytes(encoded(picture(seed=i)) if i else b"<html>")
    with open_tree(folder) as tree:
        paths = [entry.path for entry in tree.entries]
        (folder / "1.png").write_bytes(b"half")
        (folder / "2.png").unlink()
        out = array(4)
        result = decode_into(out, iterate_tree_images(tree, paths), EXACT)
    assert [(row, name) for row, name, _ in result.bad_images] == [
        (row, str(folder / f"{row}.png")) for row in range(3)
    ]
    page, cut_file, missing_file = (reason for *_, reason in result.bad_images)
    assert "an HTML page" in page
    assert re.fullmatch(r"it is cut short: 4 of [\d,]+ bytes are there", cut_file)
    assert missing_file == "No such file or directory"
    assert not out[:3].any()
    assert not result.digests[:3].any()
    np.testing.assert_array_equal(out[3], picture(seed=3))


def test_an_error_in_reading_stops_at_once(array):
    def fail() -> bytes:
        raise OSError("gone")

    def endless():
        yield 0, "image 0", fail
        while True:
            yield item(1, encoded(picture()))

    with pytest.raises(OSError, match="gone"):
        decode_into(array(2), endless(), EXACT)


def test_honest_tiffs_and_such_with_long_texts_are_opened():
    for more in ({}, {"compression": "tiff_deflate"}, {"tiffinfo": {270: "a" * 3_000_000}}):
        out = io.BytesIO()
        Image.new("RGB", (40, 3000), (9, 8, 7)).save(out, "TIFF", **more)
        assert decode(out.getvalue(), ImageSpec(8, "crop")).shape == (8, 8, 3)


def test_one_image_that_is_too_large_spoils_no_other_and_the_limit_is_a_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "1")
    good, large = (
        encoded(picture(9, 9)),
        encoded(picture(9, 9)) + bytes(2 * 10**6),
    )  # what follows an image does no harm
    with open_tree(make_tar(tmp_path / "x.tar", {"a.png": good, "b.png": large, "c.png": good})) as tree:
        out = np.zeros((3, 8, 8, 3), np.uint8)
        ((row, _, reason),) = decode_into(
            out, iterate_tree_images(tree, ["a.png", "b.png", "c.png"]), ImageSpec(8, "crop")
        ).bad_images
        assert row == 1
        assert reason.startswith("it has 2,000,")
        assert "too large for an encoded image" in reason
        assert out[0].any()
        assert (out[0] == out[2]).all()
        monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "3")
        assert not decode_into(out, iterate_tree_images(tree, ["b.png"]), ImageSpec(8, "crop")).bad_images
