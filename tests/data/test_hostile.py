"""Files made to hang, to fill the memory or to end in a traceback: each ends in one line, soon, in little memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.common import limits
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import sha256_json
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.data.read.archive import Entry, natural, open_tree
from ifsl_bench.data.read.decode import BadImage, ImageSpec, decode
from ifsl_bench.data.read.decode_many import decode_into, tree_items
from ifsl_bench.data.read.npz import Npz
from ifsl_bench.data.read.unpickle import items, load

ROOT = Path(__file__).parents[2]
MB = 1 << 20


def head(name: bytes = b"a.png", size: int | bytes = 0, kind: bytes = b"0") -> bytes:
    """A tar header with a right checksum."""
    field = b"%011o\0" % size if isinstance(size, int) else size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"0" * 11 + b"\0" + b" " * 8 + kind
    block = (block.ljust(257, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def base256(value: int) -> bytes:
    return ((value & ((1 << 96) - 1)) | (1 << 95)).to_bytes(12, "big")


def extended(kind: bytes, content: bytes, size: int | bytes | None = None) -> bytes:
    return head(b"x", len(content) if size is None else size, kind) + content + bytes(-len(content) % 512)


def record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length += len(str(length)) - len(str(len(body)))
    return b"%d" % length + body


def member(size: int | bytes = 0, content: bytes = b"") -> bytes:
    return head(size=size) + content + bytes(-len(content) % 512)


END = bytes(1024)
PLAIN = member(3, b"abc")


def tars() -> dict[str, tuple[bytes, str]]:
    """Name -> an archive and what is said of it."""
    below = "size below zero"
    return {
        "negative size": (PLAIN + member(base256(-1024)) + END, below),
        "negative size that ends at the first header": (PLAIN + member(base256(-2048)) + END, below),
        "negative octal": (PLAIN + member(b"-0000001000\0") + END, "damaged where a file should begin"),
        "octal with underscores": (member(b"1_0".ljust(12, b"\0")) + END, "damaged where a file should begin"),
        "size of 2^88": (member(base256(1 << 88)) + END, below),
        "size of 2^62": (member(base256(1 << 62)) + END, "cut short"),
        "pax size below zero": (extended(b"x", record(b"size", b"-1024")) + member() + END, "whose size is '-1024'"),
        "pax size of 5,000 digits": (extended(b"x", record(b"size", b"9" * 5000)) + member() + END, "whose size is"),
        "pax size that is a float": (extended(b"x", record(b"size", b"1e3")) + member() + END, "whose size is '1e3'"),
        "pax size for all": (extended(b"g", record(b"size", b"512")) + PLAIN + END, "all its files one name or size"),
        "long pax header of digits": (extended(b"x", b"1" * 1_000_000) + PLAIN + END, "damaged"),
        "many long pax headers": (extended(b"x", b"1" * 100_000 + b" ") * 30 + PLAIN + END, "damaged"),
        "pax record of no length": (extended(b"x", b"0 a=b\n") + PLAIN + END, "damaged"),
        "pax record of length 2": (extended(b"x", b"2 a=b\n") + PLAIN + END, "damaged"),
        "pax record too long": (extended(b"x", b"99 a=b\n") + PLAIN + END, "damaged"),
        "pax sparse": (extended(b"x", record(b"GNU.sparse.map", b"0,1")) + PLAIN + END, "a sparse file"),
        "GNU sparse": (head(kind=b"S") + END, "a sparse file"),
        "long name of 2^88 bytes": (head(b"x", base256(1 << 88), b"L") + PLAIN + END, below),
        "long name of 6 GB": (
            head(b"x", base256(6 << 30), b"L") + PLAIN + END,
            "extended header of 6,442,450,944 bytes",
        ),
        "long link below zero": (head(b"x", base256(-512), b"K") + PLAIN + END, below),
        "pax header below zero": (head(b"x", base256(-512), b"x") + PLAIN + END, below),
        "long name of 70,000": (extended(b"L", b"n" * 70_000 + b"\0") + PLAIN + END, "70,000 characters"),
        "5,000 digits": (extended(b"L", b"1" * 5000 + b".png\0") + PLAIN + END, "5,004 characters"),
        "long names without a file": (extended(b"L", b"a\0") * 2000 + END, "damaged"),
        "long name in a long name": (extended(b"L", b"../../x\0") + PLAIN + END, "leads out of the archive"),
        "cut in an extended header": (extended(b"x", record(b"path", b"a"))[:700], "cut short"),
        "hard link": (head(kind=b"1") + END, "a link to"),
        "negative size in an inner archive": (
            head(b"a.tar", 2048) + (PLAIN + member(base256(-1024))).ljust(2048, b"\0") + END,
            below,
        ),
        "inner archive longer than its place": (head(b"a.tar", 1 << 30) + PLAIN + END, "cut short"),
    }


def zeros_deflated(megabytes: int) -> bytes:
    """So many MiB of zeros as one deflate stream, made without compressing them all."""
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = machine.compress(bytes(MB)) + machine.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + machine.flush()


def zipped(
    members: list[tuple[bytes, int, bytes, int, int]], shift: int = 0, count: int | None = None, end: int | None = None
) -> bytes:
    """A zip archive of (name, method, packed content, size, CRC).

    Args:
        shift: added to where the second member and those after it are said to lie.
        count: how many there are said to be.
        end: where the list is said to begin.
    """
    body, listed = b"", b""
    for name, method, packed, size, crc in members:
        place = len(body) + (shift if body else 0)
        fields = struct.pack("<HHHHIII", 0, method, 0, 0, crc, len(packed), size)
        listed += b"PK\x01\x02" + struct.pack("<HH", 20, 20) + fields
        listed += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, place) + name
        body += b"PK\x03\x04" + struct.pack("<H", 20) + fields + struct.pack("<HH", len(name), 0) + name + packed
    number = len(members) if count is None else count
    start = len(body) if end is None else end
    return body + listed + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, number, number, len(listed), start, 0)


def zips() -> dict[str, tuple[bytes, str]]:
    bomb = zeros_deflated(300)
    small = zlib.compress(b"x" * 1000, wbits=-15)
    ok = (b"a.png", 8, small, 1000, zlib.crc32(b"x" * 1000))
    bz = b"".join([bz2.compress(bytes(MB))])
    huge_dictionary = b"\x09\x04\x05\x00" + b"\x5d" + struct.pack("<I", 0xFFFFFFFF) + bytes(20)
    return {
        "members upon each other": (zipped([ok, (b"b.png", *ok[1:])], shift=-10), "lies upon another"),
        "two names for one member": (zipped([ok, (b"b.png", *ok[1:])], shift=-35 - len(small)), "lies upon another"),
        "a member beyond the end": (zipped([ok, (b"b.png", *ok[1:])], shift=1 << 20), "lies upon another"),
        "a list beyond the end": (zipped([ok], end=1 << 31), "no list of files|lies upon"),
        "stored, in another size": (zipped([(b"a.png", 0, b"x" * 10, 1000, 0)]), "not in its size|damaged|wrong"),
        "more than it says": (zipped([(b"a.png", 8, small, 10, 0)]), "damaged"),
        "less than it says": (zipped([(b"a.png", 8, small, 2000, 0)]), "damaged|cut short"),
        "something after the end of what is packed": (
            zipped([(b"a.png", 8, small + b"more" * 10, 2000, 0)]),
            "damaged|cut short",
        ),
        "bzip2, something after the end": (zipped([(b"a.png", 12, bz + bz[:40], 2 * MB, 0)]), "damaged|cut short"),
        "no name": (zipped([(b"", *ok[1:]), (b"b.png", 8, small, 10, 0)]), "damaged"),
        "bzip2, more than it says": (zipped([(b"a.png", 12, bz, 100, 0)]), "damaged"),
        "LZMA with a dictionary of 4 GB": (zipped([(b"a.png", 14, huge_dictionary, 1000, 0)]), "damaged"),
        "a bomb": (zipped([(b"a.pkl", 8, bomb, 300 * MB, 0)]), "expands to more than 200 times"),
        "unknown method": (zipped([(b"a.png", 99, b"x", 1, 0)]), "packed by a method that Python cannot read"),
        "a long name": (zipped([(b"n" * 60_000, *ok[1:])]), "60,000 characters"),
    }


def packed() -> dict[str, tuple[bytes, str]]:
    start = head(size=base256(4 << 30))
    bombs = {
        "gzip": gzip.compress(start) + gzip.compress(bytes(MB)) * 600,
        "bzip2": bz2.compress(start) + bz2.compress(bytes(MB)) * 300,
        "xz": lzma.compress(start) + lzma.compress(bytes(MB), preset=0) * 300,
    }
    inner = {
        name: pack(PLAIN + member(base256(-1024)) + END)
        for name, pack in (("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress))
    }
    long = gzip.compress(head(b"x", base256(6 << 30), b"L")) + gzip.compress(bytes(MB)) * 20
    return {
        **{f"a bomb of {name}": (content, "expands to more than 200 times") for name, content in bombs.items()},
        **{f"negative size in {name}": (content, "size below zero") for name, content in inner.items()},
        "long name of 6 GB in gzip": (long, "extended header of 6,442,450,944 bytes"),
    }


CHILD = """
import json, sys, time
from pathlib import Path
from ifsl_bench.data.read.archive import open_tree
from tests.fuzz.formats import Format
from tests.fuzz.runner import judged, peak
def read(path):
    with open_tree(path) as tree:
        for entry in tree.entries:
            with tree.readable(entry), tree.open(entry) as file:
                while file.read(1 << 20):
                    pass
for path in json.load(sys.stdin):
    start = time.monotonic()
    what, told = judged(Format("archive", list, read), Path(path))
    print(json.dumps([what, told, time.monotonic() - start, peak()]), flush=True)
"""
ARCHIVES = tars() | zips() | packed()


@pytest.fixture(scope="module")
def judgements(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, float, int]]:
    """What reading each archive came to, in a process that may hang: verdict, message, seconds, memory so far."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = []
    for i, (content, _) in enumerate(ARCHIVES.values()):
        (folder / str(i)).write_bytes(content)
        paths.append(str(folder / str(i)))
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    return dict(zip(ARCHIVES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused_in_one_line_soon_and_in_little_memory(name, judgements):
    what, told, seconds, peak = judgements[name]
    assert what == "refused", f"{what}: {told}"
    assert re.search(ARCHIVES[name][1], told), told
    assert seconds < 10
    assert peak < 500e6


def sizes(tree_file: Callable[[Path], Path], path: Path) -> None:
    with open_tree(tree_file(path)) as tree, pytest.raises(UserError, match="too large for an encoded image") as error:
        tree.read(next(entry for entry in tree.entries if entry.name == "a.png"))
    assert "IFSL_BENCH_LARGEST_IMAGE" in str(error.value)


def sparse(path: Path, before: bytes, size: int, after: bytes) -> Path:
    """A file with ``size`` zeros in it that take no room on the disk."""
    with open(path, "wb") as file:
        file.write(before)
        file.seek(size, os.SEEK_CUR)
        file.write(after)
    return path


def test_an_image_of_4_gb_is_refused_before_it_is_read(tmp_path, traced):
    size = 4 << 30
    folder = tmp_path / "folder"
    folder.mkdir()
    sparse(folder / "a.png", b"", size, b"x")
    with traced() as memory:
        sizes(lambda p: sparse(p, head(size=base256(size)), size, END), tmp_path / "a.tar")
        sizes(lambda p: folder, tmp_path)
        declared = zipped([(b"a.png", 8, b"\0" * 5000, 900_000 * 1000, 0)])
        (tmp_path / "a.zip").write_bytes(declared)
        sizes(lambda p: p, tmp_path / "a.zip")
    assert memory.peak < 5e6


def test_one_image_that_is_too_large_spoils_no_other_and_the_limit_is_a_setting(tmp_path, monkeypatch):
    from tests.fuzz.images import encoded

    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "1")
    good, large = encoded(), encoded() + bytes(2 * 10**6)  # what follows an image does no harm
    for mode in ("w", "w:gz"):
        path = tmp_path / f"x.{mode[-1]}"
        with tarfile.open(path, mode) as archive:
            for name, content in (("a.png", good), ("b.png", large), ("c.png", good)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        with open_tree(path) as tree:
            out = np.zeros((3, 8, 8, 3), np.uint8)
            done = decode_into(out, tree_items(tree, ["a.png", "b.png", "c.png"]), ImageSpec(8, "crop"))
            ((row, _, reason),) = done.bad
            assert row == 1
            assert reason.startswith("it has 2,000,")
            assert "too large for an encoded image" in reason
            assert out[0].any()
            assert (out[0] == out[2]).all()
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", "3")
    with open_tree(path) as tree:
        assert not decode_into(out, tree_items(tree, ["b.png"]), ImageSpec(8, "crop")).bad


@pytest.mark.parametrize("size", [(1, 1 << 20), (1 << 20, 1), (1 << 16, (1 << 10) + 1)])
def test_an_image_of_too_many_rows_or_pixels_is_refused_before_it_is_decoded(size, traced):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 6, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(MB))) + chunk(b"IEND", b"")
    with traced() as memory, pytest.raises(BadImage, match="pixels, too many to decode"):
        decode(content, ImageSpec(8, "crop"))
    assert memory.peak < 5e6


@pytest.mark.parametrize("progressive", [False, True])
def test_an_image_of_endless_passes_is_refused_before_it_is_decoded(progressive):
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", progressive=progressive)
    content = out.getvalue()
    assert decode(content, ImageSpec(8, "crop")).shape == (8, 8, 3)
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
        assert decode(out.getvalue(), ImageSpec(8, "crop")).shape == (8, 8, 3)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "many", "²", "9" * 5000])
def test_a_setting_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", value)
    with pytest.raises(UserError, match="expected a whole number of MB"):
        limits.image_bytes()


def test_more_files_than_any_data_set_has_are_refused(tmp_path, monkeypatch):
    few = limits.Limit(50, limits.MEMBERS.error, "")
    for module in ("file_tree", "zipped"):
        monkeypatch.setattr(f"ifsl_bench.data.read.{module}.MEMBERS", few)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(51):
            archive.writestr(f"{i}.png", b"")
    (tmp_path / "a.tar").write_bytes(b"".join(head(b"%d.png" % i) for i in range(51)) + END)
    for name in ("a.zip", "a.tar"):
        with pytest.raises(UserError, match=r"holds 51 files, more than 50"), open_tree(tmp_path / name) as tree:
            _ = tree.entries


def _listed(count: int) -> bytes:
    """So many entries of a zip archive's list."""
    return b"".join(b"PK\x01\x02" + struct.pack("<24xH16x", 7) + b"%06d/" % i for i in range(count))


def _end(count: int, length: int, place: bytes = bytes(4)) -> bytes:
    return b"PK\x05\x06" + struct.pack("<HHHHL", 0, 0, count, count, length) + place + bytes(2)


def _large(count: int, length: int, gap: int = 0) -> bytes:
    """What stands before the end of a large archive, the record perhaps not where the locator is."""
    record = b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, 30)
    return record + bytes(gap) + b"PK\x06\x07" + struct.pack("<LQL", 0, 30 + length, 1)


@pytest.mark.parametrize(
    "ending",
    [
        lambda length: _large(60, length) + _end(1, 53),
        lambda length: _large(60, length) + _end(0xFFFF, 0xFFFFFFFF, b"\xff" * 4),
        lambda length: _large(60, length, gap=99) + _end(1, 53),
        lambda length: _end(60, length, b"PK\x05\x06"),
        lambda length: _end(60, length)[:-2] + b"\x04\0" + b"note",
    ],
    ids=["in the large record alone", "large", "record elsewhere", "an end within the end", "with a comment"],
)
def test_the_list_of_a_zip_archive_is_counted_wherever_it_is_said_to_be(ending, monkeypatch, tmp_path):
    content = b"PK\x03\x04" + bytes(26) + _listed(60)
    (tmp_path / "a.zip").write_bytes(content + ending(len(content) - 30))
    opened = []
    monkeypatch.setattr(zipfile, "ZipFile", opened.append)
    for name, most, said in (("MEMBERS", 50, "holds 60 files"), ("ZIP_LIST", 3000, "has a list of files of 3,")):
        with monkeypatch.context() as only:
            only.setattr(f"ifsl_bench.data.read.zipped.{name}", replace(getattr(limits, name), most=most))
            with pytest.raises(UserError, match=said):
                open_tree(tmp_path / "a.zip")
    assert not opened, "Python's reader makes objects of all of them"


def test_any_number_of_extended_headers_before_a_file_takes_no_memory(tmp_path, traced):
    with open(tmp_path / "a.tar", "wb") as file:
        for i in range(5):
            file.write(extended(b"x", b"".join(record(b"%d.%d" % (i, k), b"") for k in range(20_000))))
        file.write(extended(b"x", record(b"path", b"b.png")) + PLAIN + END)
    with traced() as memory, open_tree(tmp_path / "a.tar") as tree:
        assert [entry.path for entry in tree.entries] == ["b.png"]
    assert memory.peak < 3e6


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_list_as_long_as_is_taken_fits_into_a_gigabyte(kind, tmp_path, traced):
    """Measured on a short one, whose files are as small as they can be."""
    count, path = 20_000, tmp_path / f"a.{kind}"
    names = [b"n%04d/image_%07d.png" % (i // 100, i) for i in range(count)]
    if kind == "zip":
        path.write_bytes(zipped([(name, 0, b"", 0, 0) for name in names]))
    else:
        content = b"".join(map(head, names)) + END
        path.write_bytes(gzip.compress(content, 1) if kind == "tar.gz" else content)
    with traced() as memory, open_tree(path) as tree:
        assert len(tree.entries) == count
        found = tree.content()["names"]
    assert memory.peak / count * limits.MEMBERS.most < 1e9
    assert found == sha256_json([[name.decode(), 0] for name in names])


@pytest.mark.parametrize("shared", ["", "top/", "top/of/it/"])
def test_what_tells_one_content_from_another_is_below_the_folder_that_all_share(shared, tmp_path):
    paths = ["a-b/1.png", "a/1.png", "a/b/2.png", "ab.png"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in paths:
            archive.writestr(shared + path, path)
    with open_tree(tmp_path / "a.zip") as tree:
        assert tree.content()["names"] == sha256_json([[path, len(path)] for path in paths])


def test_names_of_thousands_of_digits_sort_by_their_number():
    names = ["a" + "9" * 5000, "a1" + "0" * 5000, "a2", "a010", "a" + "1" * 5000]
    assert sorted(names, key=natural) == ["a2", "a010", "a" + "1" * 5000, "a" + "9" * 5000, "a1" + "0" * 5000]


def npy(said: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = said.encode()
    return b"\x93NUMPY\x02\0" + struct.pack("<I", len(text) if length is None else length) + text + data


def _said(descr: str = "'<f4'", shape: str = "(4, 3)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"


HEADERS = {
    "no .npy at all": (b"PK\x03\x04 what is this", "it is no .npy file"),
    "empty": (b"", "no .npy file but an empty file"),
    "shape of 10^18": (npy(_said(shape="(1000000000, 1000000000)"), b"x" * 48), "bytes for an array"),
    "shape below zero": (npy(_said(shape="(-4, -3)"), b"x" * 48), "no tuple of whole numbers"),
    "shape of 5,000 digits": (npy(_said(shape=f"({'9' * 5000}, 1)")), "Exceeds the limit|damaged"),
    "shape of bools": (npy(_said(shape="(True, 3)"), b"x" * 12), "no tuple of whole numbers"),
    "shape that is a number": (npy(_said(shape="12"), b"x" * 48), "no tuple of whole numbers"),
    "nested deep": (npy("(" * 9000), "damaged"),
    "a long sum": (npy("-" * 9000 + "1"), "damaged"),
    "a call": (npy("__import__('os').system('true')"), "damaged"),
    "objects": (npy(_said("'|O'"), b"x" * 96), "of Python objects"),
    "records": (npy(_said("[('a', '<f4')]"), b"x" * 48), "of records"),
    "a header of 4 GB": (npy(_said(), b"x" * 48, (1 << 32) - 1), "header of 4,294,967,295 bytes"),
    "no columns": (npy(_said(shape="(4, 0)")), r"found features float32\[4, 0\]"),
    "no rows": (npy(_said(shape="(0, 3)")), r"found features float32\[0, 3\]"),
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
    with traced() as memory, pytest.raises(UserError, match=rf"base-train\.npz.*({message})"):
        prepare(home, "own", features(tmp_path / "f", content), False, Reporter())
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
    with traced() as memory, pytest.raises(UserError, match="expands to more than 200 times its size"):
        prepare(home, "own", tmp_path, False, Reporter())
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
            one = io.BytesIO()
            np.save(one, array)
            archive.writestr(f"{name}.npy", one.getvalue())
    out.seek(0)
    file = Npz(out, "x.npz")
    for name, array in arrays.items():
        found = file.array(name).read()
        assert found.dtype == array.dtype
        assert (found == array).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0x110000, 1, 2, 3], np.uint32).view("<U1"), "label of row 0 is no text .*0x110000"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], np.uint32).view("<U2")[:, 0], "label of row 1 .*0xd800"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], ">u4").view(">U2")[:, 0], "label of row 1 .*0xd800"),
        (np.arange(4) + 0.5, "labels must be integers or strings"),
        (np.arange(4) > 1, "labels must be integers or strings"),
        (np.array([b"a", b"b", b"c", b"d"]), "labels must be integers or strings"),
        (np.arange(5), r"labels int64\[5\]"),
        (np.arange(8).reshape(4, 2), r"labels int64\[4, 2\]"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message, tmp_path, home):
    out = io.BytesIO()
    np.save(out, np.zeros((4, 3), np.float32))
    with pytest.raises(UserError, match=rf"base-train\.npz.*{message}"):
        prepare(home, "own", features(tmp_path / "f", out.getvalue(), labels), False, Reporter())


@pytest.mark.parametrize(
    "content", [b"\x80\x02]" + b"]" * 3_000, b"\x80\x02" + b"(" * 3_000, b"\x80\x02" + b"N0" * 1_500]
)
def test_a_pickle_of_endless_values_is_refused(content, monkeypatch):
    monkeypatch.setattr(
        "ifsl_bench.data.read.unpickle.PICKLE_STEPS", limits.Limit(2_000, limits.PICKLE_STEPS.error, "")
    )
    with pytest.raises(UserError, match=r"x\.pkl makes more than 2,000 values"):
        load(io.BytesIO(content), "x.pkl")


def test_a_pickle_of_endless_strings_is_refused_and_one_of_large_arrays_is_not(monkeypatch):
    monkeypatch.setattr(
        "ifsl_bench.data.read.unpickle.PICKLE_BYTES", limits.Limit(50_000, limits.PICKLE_BYTES.error, "")
    )
    strings = [f"{i:0200}" for i in range(1_000)]
    with pytest.raises(UserError, match=r"x\.pkl holds more than 50,000 bytes of names and numbers"):
        load(io.BytesIO(pickle.dumps(strings)), "x.pkl")
    arrays = [np.zeros(100_000, np.uint8) for _ in range(300)]
    assert len(load(io.BytesIO(pickle.dumps(arrays, 4)), "x.pkl")) == 300
    assert sum(1 for _ in items(io.BytesIO(pickle.dumps(arrays, 4)), "x.pkl")) == 300


def test_a_name_that_no_terminal_can_show_is_written_out():
    with pytest.raises(UserError, match=r"it holds the name x\\ud800\._frombuffer"):
        load(io.BytesIO(b"\x80\x04Vx\\ud800\n\x8c\x0b_frombuffer\x93."), "x.pkl")


def test_a_list_of_classes_that_is_endless_is_refused(tmp_path, monkeypatch):
    from ifsl_bench.data.sets.folder import read_sides

    monkeypatch.setattr("ifsl_bench.data.sets.folder.SPLIT_FILE", limits.Limit(100, limits.SPLIT_FILE.error, ""))
    (tmp_path / "x.csv").write_text("class,split\n" + "a,base\n" * 100)
    with pytest.raises(UserError, match=r"x\.csv has more than 100 characters"):
        read_sides(tmp_path / "x.csv")


def test_every_limit_says_why_and_what_to_do():
    found = [limit for limit in vars(limits).values() if isinstance(limit, limits.Limit)] + [limits.image_bytes()]
    assert len(found) >= 12
    for limit in found:
        assert len(limit.why) > 20
        limit.check(limit.most, "x")
        with pytest.raises(UserError) as error:
            limit.check(limit.most + 1, "x.zip")
        assert str(error.value).startswith("x.zip ")
        assert f"{limit.most:,}" in str(error.value)
        assert "{" not in str(error.value)


def test_an_entry_is_found_again_after_the_archive_was_read(tmp_path):
    """A step back in a member that is compressed reads it anew."""
    content = os.urandom(300_000)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = tmp_path / "a.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("x.pkl", content)
        with open_tree(path) as tree, tree.open(Entry("x.pkl", len(content))) as file:
            assert file.read(200_000) == content[:200_000]
            file.seek(5)
            assert file.read(100) == content[5:105]
            file.seek(-3, os.SEEK_END)
            assert file.read() == content[-3:]
