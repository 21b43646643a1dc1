"""Arrays, pickles and images made to hang, to fill the memory or to end in a traceback: each ends in one line."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.decode import BadImage, ImageSpec, decode
from ifsl_bench.data.read.decode_many import decode_into, tree_items
from ifsl_bench.data.read.npz import npz_arrays
from ifsl_bench.data.read.unpickle import load
from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import refused
from tests.data.test_archive import add_files
from tests.data.test_hostile import zeros_deflated, zipped

MB = 1 << 20


def npy(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x02\0" + struct.pack("<I", len(text) if length is None else length) + text + data


def _said(descr: str = "'<f4'", shape: str = "(4, 3)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"


HEADERS = {
    "no .npy at all": (b"PK\x03\x04 what is this", "the magic string is not correct"),
    "shape of 10^18": (npy(_said(shape="(1000000000, 1000000000)"), b"x" * 48), "greater than file size"),
    "shape below zero": (npy(_said(shape="(-4, -3)"), b"x" * 48), "negative dimensions"),
    "shape of 5,000 digits": (npy(_said(shape=f"({'9' * 5000}, 1)")), "Exceeds the limit|damaged"),
    "shape that is a number": (npy(_said(shape="12"), b"x" * 48), "shape is not valid"),
    "nested deep": (npy("(" * 9000), "damaged"),
    "a long sum": (npy("-" * 9000 + "1"), "damaged"),
    "a call": (npy("__import__('os').system('true')"), "damaged"),
    "objects": (npy(_said("'|O'"), b"x" * 96), "Python objects"),
    "records": (npy(_said("[('a', '<f4')]"), b"x" * 48), "of records"),
    "no columns": (npy(_said(shape="(4, 0)")), r"found features float32\[4, 0\]"),
    "one axis": (npy(_said(shape="(12,)"), b"x" * 48), r"found features float32\[12\]"),
}


def features(folder: Path, content: bytes, labels: np.ndarray | None = None) -> Path:
    """The first of six files, with that as features.npy."""
    folder.mkdir()
    out = io.BytesIO()
    np.save(out, np.arange(4) if labels is None else labels)
    with zipfile.ZipFile(folder / "base-train.npz", "w") as archive:
        archive.writestr("features.npy", content)
        archive.writestr("labels.npy", out.getvalue())
    return folder


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_of_arrays_are_refused_in_one_line(name, tmp_path, home, traced):
    content, message = HEADERS[name]
    with traced() as memory:
        refused(home, "own", features(tmp_path / "f", content), rf"base-train\.npz.*({message})")
    assert memory.peak < 20e6


def test_a_bomb_in_an_npz_file_is_refused(tmp_path, home, traced):
    megabytes = 300
    start = npy(_said(shape=f"({megabytes * MB // 16}, 4)"))
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed_head = machine.compress(start) + machine.flush(zlib.Z_FULL_FLUSH)
    content = zipped(
        [
            (b"features.npy", 8, packed_head + zeros_deflated(megabytes), len(start) + megabytes * MB, 0),
            (b"labels.npy", 0, b"", 0, 0),
        ]
    )
    (tmp_path / "base-train.npz").write_bytes(content)
    with traced() as memory:
        refused(home, "own", tmp_path, "expands to more than 200 times its size")
    assert memory.peak < 50e6


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_of_every_order_and_packing_are_read_as_numpy_reads_them(method, tmp_path):
    arrays = {
        "a": np.arange(12.0).reshape(4, 3),
        "b": np.asfortranarray(np.arange(12).reshape(4, 3)),
        "c": np.array(["é", "bc"]),
        "d": np.arange(3, dtype=">i2"),
        "e": np.float16([1.5]),
        "f": np.array([True, False]),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    out.seek(0)
    result = npz_arrays(out, "x.npz", *arrays)
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype
        assert (result[name] == array).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0x110000, 1, 2, 3], np.uint32).view("<U1"), "a label is no text"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], ">u4").view(">U2")[:, 0], "a label is no text"),
        (np.arange(4) + 0.5, "labels must be integers or strings"),
        (np.array([b"a", b"b", b"c", b"d"]), "labels must be integers or strings"),
        (np.arange(5), r"labels int64\[5\]"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message, tmp_path, home):
    out = io.BytesIO()
    np.save(out, np.zeros((4, 3), np.float32))
    refused(home, "own", features(tmp_path / "f", out.getvalue(), labels), rf"base-train\.npz.*{message}")


@pytest.mark.parametrize(
    "content", [b"\x80\x02]" + b"]" * 3_000, b"\x80\x02" + b"(" * 3_000, b"\x80\x02" + b"N0" * 1_500]
)
def test_a_pickle_of_endless_values_is_refused(content, monkeypatch):
    monkeypatch.setattr("ifsl_bench.data.read.unpickle.PICKLE_STEPS", limits.Limit(2_000, limits.PICKLE_STEPS.error))
    with pytest.raises(UserError, match=r"x\.pkl makes more than 2,000 values"):
        load(content, "x.pkl")


def test_a_pickle_of_endless_strings_is_refused_and_one_of_large_arrays_is_not(monkeypatch):
    monkeypatch.setattr("ifsl_bench.data.read.unpickle.PICKLE_BYTES", limits.Limit(50_000, limits.PICKLE_BYTES.error))
    strings = [f"{i:0200}" for i in range(1_000)]
    with pytest.raises(UserError, match=r"x\.pkl holds more than 50,000 bytes of names and numbers"):
        load(pickle.dumps(strings), "x.pkl")
    arrays = [np.zeros(100_000, np.uint8) for _ in range(300)]
    assert len(load(pickle.dumps(arrays, 4), "x.pkl")) == 300


def test_a_name_that_no_terminal_can_show_is_written_out():
    with pytest.raises(UserError, match=r"it holds the name x\\ud800\._frombuffer"):
        load(b"\x80\x04Vx\\ud800\n\x8c\x0b_frombuffer\x93.", "x.pkl")


def test_one_image_that_is_too_large_spoils_no_other_and_the_limit_is_a_setting(tmp_path, monkeypatch):
    from tests.fuzz.images import encoded

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


def test_honest_tiffs_and_such_with_long_texts_are_opened():
    for more in ({}, {"compression": "tiff_deflate"}, {"tiffinfo": {270: "a" * 3_000_000}}):
        out = io.BytesIO()
        Image.new("RGB", (40, 3000), (9, 8, 7)).save(out, "TIFF", **more)
        assert decode(out.getvalue(), ImageSpec(8, "crop"))[0].shape == (8, 8, 3)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "²", "9" * 5000])
def test_a_setting_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", value)
    with pytest.raises(UserError, match="expected a whole number of MB"):
        limits.image_bytes()


def test_every_limit_says_what_to_do():
    all_limits = [limit for limit in vars(limits).values() if isinstance(limit, limits.Limit)] + [limits.image_bytes()]
    assert len(all_limits) >= 12
    for limit in all_limits:
        limit.check(limit.most, "x")
        with pytest.raises(UserError) as error:
            limit.check(limit.most + 1, "x.zip")
        assert str(error.value).startswith("x.zip ")
        assert f"{limit.most:,}" in str(error.value)
        assert "{" not in str(error.value)
