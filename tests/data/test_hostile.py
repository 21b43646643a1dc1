"""Files made to hang, to fill the memory or to end in a traceback: each ends in one line, soon, in little memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.file_tree import Entry
from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json

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
        "negative octal": (PLAIN + member(b"-0000001000\0") + END, below),
        "size of 2^80": (member(base256(1 << 80)) + END, "cut short"),
        "pax size below zero": (extended(b"x", record(b"size", b"-1024")) + member() + END, below),
        "long pax header of digits": (extended(b"x", b"1" * 16_000) + b"\1" * 512 + END, "damaged"),
        "many long pax headers": (extended(b"x", b"1" * 100_000 + b" ") * 30 + PLAIN + END, "header of 100,001 bytes"),
        "pax record of no length": (extended(b"x", b"0 a=b\n") + PLAIN + END, "damaged"),
        "pax sparse": (extended(b"x", record(b"GNU.sparse.map", b"0,1")) + PLAIN + END, "a sparse file"),
        "GNU sparse": (head(kind=b"S") + END, "a sparse file"),
        "long name of 2^80 bytes": (head(b"x", base256(1 << 80), b"L") + PLAIN + END, "header of 2.80 or more bytes"),
        "pax header below zero": (head(b"x", base256(-512), b"x") + PLAIN + END, below),
        "long name of 16,000": (extended(b"L", b"n" * 16_000 + b"\0") + PLAIN + END, "16,000 characters"),
        "5,000 digits": (extended(b"L", b"1" * 5000 + b".png\0") + PLAIN + END, "5,004 characters"),
        "long names without a file": (extended(b"L", b"a\0") * 2000 + END, "damaged"),
        "long name in a long name": (extended(b"L", b"../../x\0") + PLAIN + END, "leads out of the archive"),
        "cut in an extended header": (extended(b"x", record(b"path", b"a"))[:700], "cut short"),
        "hard link": (head(kind=b"1") + END, "a link, which is not followed"),
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
    bz = bz2.compress(bytes(MB))
    huge_dictionary = b"\x09\x04\x05\x00" + b"\x5d" + struct.pack("<I", 0xFFFFFFFF) + bytes(20)
    return {
        "members upon each other": (zipped([ok, (b"b.png", *ok[1:])], shift=-10), "lies upon another"),
        "two names for one member": (zipped([ok, (b"b.png", *ok[1:])], shift=-35 - len(small)), "lies upon another"),
        "a list beyond the end": (zipped([ok], end=1 << 31), "no list of files|lies upon"),
        "stored, in another size": (zipped([(b"a.png", 0, b"x" * 10, 1000, 0)]), "not in its size|damaged|wrong"),
        "more than it says": (zipped([(b"a.png", 8, small, 10, 0)]), "damaged"),
        "less than it says": (zipped([(b"a.png", 8, small, 2000, 0)]), "damaged|cut short"),
        "bzip2, something after the end": (zipped([(b"a.png", 12, bz + bz[:40], 2 * MB, 0)]), "damaged|cut short"),
        "no name": (zipped([(b"", *ok[1:]), (b"b.png", 8, small, 10, 0)]), "damaged"),
        "bzip2, more than it says": (zipped([(b"a.png", 12, bz, 100, 0)]), "damaged"),
        "LZMA with a dictionary of 4 GB": (zipped([(b"a.png", 14, huge_dictionary, 1000, 0)]), "damaged"),
        "a bomb": (zipped([(b"a.pkl", 8, bomb, 300 * MB, 0)]), "expands to more than 200 times"),
        "unknown method": (zipped([(b"a.png", 99, b"x", 1, 0)]), "packed by a method that Python cannot read"),
        "a long name": (zipped([(b"n" * 60_000, *ok[1:])]), "60,000 characters"),
    }


def packed() -> dict[str, tuple[bytes, str]]:
    start = head(size=200 * MB)
    bombs = {
        "gzip": gzip.compress(start) + gzip.compress(bytes(MB)) * 600,
        "bzip2": bz2.compress(start) + bz2.compress(bytes(MB)) * 300,
        "xz": lzma.compress(start) + lzma.compress(bytes(MB), preset=0) * 300,
    }
    long = gzip.compress(head(b"x", base256(6 << 30), b"L")) + gzip.compress(bytes(MB)) * 20
    return {
        **{f"a bomb of {name}": (content, "expands to more than 200 times") for name, content in bombs.items()},
        "negative size in gzip": (gzip.compress(PLAIN + member(base256(-1024)) + END), "size below zero"),
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
    """Results of reading each archive, in a process that may hang: verdict, message, seconds, memory so far."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = []
    for i, (content, _) in enumerate(ARCHIVES.values()):
        (folder / str(i)).write_bytes(content)
        paths.append(str(folder / str(i)))
    command = [sys.executable, "-c", CHILD]
    process = subprocess.run(
        command, input=json.dumps(paths), capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    return dict(zip(ARCHIVES, map(json.loads, process.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused_in_one_line_soon_and_in_little_memory(name, judgements):
    verdict, message, seconds, peak = judgements[name]
    assert verdict == "refused", f"{verdict}: {message}"
    assert re.search(ARCHIVES[name][1], message), message
    assert seconds < 10
    assert peak < 500e6


def test_an_image_of_4_gb_is_refused_before_it_is_read(tmp_path, traced):
    size = 4 << 30
    (tmp_path / "folder").mkdir()
    for path, before, after in (("a.tar", head(size=base256(size)), END), ("folder/a.png", b"", b"x")):
        with open(tmp_path / path, "wb") as file:
            file.write(before)
            file.seek(size, os.SEEK_CUR)  # zeros that take no room on the disk
            file.write(after)
    (tmp_path / "a.zip").write_bytes(zipped([(b"a.png", 8, b"\0" * 5000, 900_000 * 1000, 0)]))
    with traced() as memory:
        for path in ("a.tar", "folder", "a.zip"):
            with open_tree(tmp_path / path) as tree, pytest.raises(UserError, match="IFSL_BENCH_LARGEST_IMAGE") as said:
                tree.read(tree.named("a.png"))
            assert "too large for an encoded image" in str(said.value)
    assert memory.peak < 5e6


def test_more_files_than_any_data_set_has_are_refused(tmp_path, monkeypatch):
    few = limits.Limit(50, limits.MEMBERS.error)
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


def _large(count: int, length: int) -> bytes:
    """The records before the end of a large archive."""
    record = b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, 30)
    return record + b"PK\x06\x07" + struct.pack("<LQL", 0, 30 + length, 1)


@pytest.mark.parametrize(
    "ending",
    [
        lambda length: _large(60, length) + _end(1, 53),
        lambda length: _large(60, length) + _end(0xFFFF, 0xFFFFFFFF, b"\xff" * 4),
        lambda length: _end(60, length, b"PK\x05\x06"),
        lambda length: _end(60, length)[:-2] + b"\x04\0" + b"note",
    ],
    ids=["in the large record alone", "large", "an end within the end", "with a comment"],
)
def test_the_list_of_a_zip_archive_is_counted_wherever_it_is_said_to_be(ending, monkeypatch, tmp_path):
    content = b"PK\x03\x04" + bytes(26) + _listed(60)
    (tmp_path / "a.zip").write_bytes(content + ending(len(content) - 30))
    monkeypatch.setattr(zipfile, "ZipInfo", None)  # of which Python's reader makes one for each
    for name, most, message in (("MEMBERS", 50, "holds 60 files"), ("ZIP_LIST", 3000, "has a list of files of 3,")):
        with monkeypatch.context() as only:
            only.setattr(f"ifsl_bench.data.read.zipped.{name}", replace(getattr(limits, name), most=most))
            with pytest.raises(UserError, match=message):
                open_tree(tmp_path / "a.zip")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_list_as_long_as_is_taken_fits_into_a_gigabyte(kind, tmp_path, traced):
    """Measured on a short one, whose files are as small as they can be."""
    count, path = 3_000, tmp_path / f"a.{kind}"
    names = [b"n%04d/image_%07d.png" % (i // 100, i) for i in range(count)]
    of_zip = kind == "zip"
    path.write_bytes(zipped([(n, 0, b"", 0, 0) for n in names]) if of_zip else b"".join(map(head, names)) + END)
    peaks = []
    for _ in range(3):  # modules imported on first use, and other threads of the process, take memory too
        with traced() as memory, open_tree(path) as tree:
            assert len(tree.entries) == count
            digest = tree.content()["names"]
        peaks.append(memory.peak)
    assert min(peaks) / count * limits.MEMBERS.most < 1e9
    assert digest == sha256_json([[name.decode(), 0] for name in names])


@pytest.mark.parametrize("shared", ["", "top/", "top/of/it/"])
def test_what_tells_one_content_from_another_is_below_the_folder_that_all_share(shared, tmp_path):
    paths = ["a-b/1.png", "a/1.png", "a/b/2.png", "ab.png"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in paths:
            archive.writestr(shared + path, path)
    with open_tree(tmp_path / "a.zip") as tree:
        assert tree.content()["names"] == sha256_json([[path, len(path)] for path in paths])


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
