"""Archives made to hang, to fill the memory or to reach outside: each ends in one line, soon, in little memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json
from tests.data.helpers import spoil
from tests.data.test_archive import MAKERS, make_tar

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
PLAIN, BELOW = member(3, b"abc"), "size below zero"
TARS = {
    "negative size": (PLAIN + member(base256(-1024)) + END, BELOW),
    "size of 2^80": (member(base256(1 << 80)) + END, "cut short"),
    "pax size below zero": (extended(b"x", record(b"size", b"-1024")) + member() + END, BELOW),
    "long pax header of digits": (extended(b"x", b"1" * 16_000) + b"\1" * 512 + END, "damaged"),
    "many long pax headers": (extended(b"x", b"1" * 100_000 + b" ") * 30 + PLAIN + END, "header of 100,001 bytes"),
    "pax sparse": (extended(b"x", record(b"GNU.sparse.map", b"0,1")) + PLAIN + END, "a sparse file"),
    "long name of 2^80 bytes": (head(b"x", base256(1 << 80), b"L") + PLAIN + END, "header of 2.80 or more bytes"),
    "pax header below zero": (head(b"x", base256(-512), b"x") + PLAIN + END, BELOW),
    "long name of 16,000": (extended(b"L", b"n" * 16_000 + b"\0") + PLAIN + END, "16,000 characters"),
    "long name that climbs out": (extended(b"L", b"../../x\0") + PLAIN + END, "leads out of the archive"),
    "cut in an extended header": (extended(b"x", record(b"path", b"a"))[:700], "cut short"),
    "hard link": (head(kind=b"1") + END, "a link, which is not followed"),
    "inner archive of negative size": (
        head(b"a.tar", 2048) + (PLAIN + member(base256(-1024))).ljust(2048, b"\0") + END,
        BELOW,
    ),
    "inner archive longer than its place": (head(b"a.tar", 1 << 30) + PLAIN + END, "cut short"),
    "a bomb of gzip": (gzip.compress(head(size=200 * MB)) + gzip.compress(bytes(MB)) * 600, "more than 200 times"),
    "a bomb of xz": (lzma.compress(head(size=200 * MB)) + lzma.compress(bytes(MB)) * 300, "more than 200 times"),
    "long name of 6 GB in gzip": (
        gzip.compress(head(b"x", base256(6 << 30), b"L")) + gzip.compress(bytes(MB)) * 20,
        "extended header of 6,442,450,944 bytes",
    ),
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


SMALL = zlib.compress(b"x" * 1000, wbits=-15)
OK = (b"a.png", 8, SMALL, 1000, zlib.crc32(b"x" * 1000))
DICTIONARY = b"\x09\x04\x05\x00" + b"\x5d" + struct.pack("<I", 0xFFFFFFFF) + bytes(20)
ZIPS = {
    "members upon each other": (zipped([OK, (b"b.png", *OK[1:])], shift=-10), "Bad magic"),
    "two names for one member": (zipped([OK, (b"b.png", *OK[1:])], shift=-35 - len(SMALL)), "differ|Overlapped"),
    "a list beyond the end": (zipped([OK], end=1 << 31), "no list of files|Invalid argument"),
    "more than it says": (zipped([(b"a.png", 8, SMALL, 10, 0)]), "damaged"),
    "bzip2, more than it says": (zipped([(b"a.png", 12, bz2.compress(bytes(MB)), 100, 0)]), "damaged"),
    "LZMA with a dictionary of 4 GB": (zipped([(b"a.png", 14, DICTIONARY, 1000, 0)]), "damaged"),
    "a bomb": (zipped([(b"a.pkl", 8, zeros_deflated(300), 300 * MB, 0)]), "expands to more than 200 times"),
    "unknown method": (zipped([(b"a.png", 99, b"x", 1, 0)]), "packed by a method that Python cannot read"),
    "a long name": (zipped([(b"n" * 60_000, *OK[1:])]), "60,000 characters"),
}
ARCHIVES = TARS | ZIPS


CHILD = """
import json, sys, time
from pathlib import Path
from tests.fuzz.harness import Format, judged, peak, read_archive
for path in json.load(sys.stdin):
    start = time.monotonic()
    what, message = judged(Format("archive", list, read_archive), Path(path))
    print(json.dumps([what, message, time.monotonic() - start, peak()]), flush=True)
"""


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
def test_a_hostile_archive_is_refused_in_one_line(name, judgements):
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
    for module in ("archive",):
        monkeypatch.setattr(f"ifsl_bench.data.read.{module}.MEMBERS", few)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(51):
            archive.writestr(f"{i}.png", b"")
    (tmp_path / "a.tar").write_bytes(b"".join(head(b"%d.png" % i) for i in range(51)) + END)
    for name in ("a.zip", "a.tar"):
        with pytest.raises(UserError, match=r"holds 51 files, more than 50"), open_tree(tmp_path / name) as tree:
            _ = tree.entries


def test_a_list_of_a_zip_archive_that_is_too_long_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(zipped([(b"%d/" % i, 0, b"", 0, 0) for i in range(60)]))
    monkeypatch.setattr(zipfile, "ZipInfo", None)  # zipfile makes one for each member
    for name, most, message in (("MEMBERS", 50, "holds 60 files"), ("ZIP_LIST", 2000, "has a list of files of 2,")):
        with monkeypatch.context() as only:
            only.setattr(f"ifsl_bench.data.read.archive.{name}", replace(getattr(limits, name), most=most))
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


@pytest.mark.parametrize("name", ["../evil.JPEG", "a/../../evil.JPEG", "/etc/evil", "C:/evil", "..\\evil.JPEG"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_paths_that_climb_out_are_refused(kind, name, tmp_path):
    path = MAKERS[kind](tmp_path / "data", {"a/b.JPEG": b"x", name: b"x"})
    with open_tree(path) as tree, pytest.raises(UserError, match="leads out of the archive") as error:
        _ = tree.entries
    assert repr(name) in str(error.value)
    assert str(path) in str(error.value)


def test_links_in_archives_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("a/link.JPEG")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        member = zipfile.ZipInfo("a/link.JPEG")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(member, "/etc/passwd")
    for name in ("a.tar", "a.zip"):
        with open_tree(tmp_path / name) as tree, pytest.raises(UserError, match=r"a/link\.JPEG.*link"):
            _ = tree.entries


@pytest.mark.parametrize("kind", ["zip", "tar", "tar of tars", "tar.gz", "tar.bz2", "tar.xz"])
@pytest.mark.parametrize("share", [0.0002, 0.5, 0.9])
def test_archives_that_are_cut_short_are_named(kind, share, tmp_path):
    """Cut anywhere, also where the standard library takes the cut for the end of the list."""
    files = {f"top/a/a_{i}.JPEG": os.urandom(700) for i in range(90)}
    path = MAKERS[kind](tmp_path / "data", files)
    content = path.read_bytes()
    path.write_bytes(content[: max(600, int(share * len(content)))])
    with pytest.raises(UserError, match=r"cut short|damaged") as error, open_tree(path) as tree:
        _ = tree.entries
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", ["zip", "stored zip", "lzma zip"])
def test_damaged_content_in_a_zip_archive_is_named(kind, tmp_path):
    files = {"top/good.JPEG": os.urandom(3000), "top/bad.JPEG": os.urandom(3000)}
    path = MAKERS[kind](tmp_path / "data", files)
    spoil(path, path.read_bytes().index(b"top/bad.JPEG") + 1000)
    with open_tree(path) as tree:
        assert tree.read(tree.by_path["top/good.JPEG"]) == files["top/good.JPEG"]
        with pytest.raises(UserError, match=r"cannot read top/bad\.JPEG in .*data: its content is damaged"):
            tree.read(tree.by_path["top/bad.JPEG"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: 512 + 2 * 1024], "cut short"),
        (lambda content: content[: 512 + 2 * 1024] + b"\xff" * 20 + content[512 + 2 * 1024 + 20 :],
         "damaged where a file should begin"),
    ],
    ids=["cut between two files", "damaged header"],
)  # fmt: skip
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
def test_a_tar_archive_does_not_end_silently(damage, message, pack, tmp_path):
    """As it does for the standard library."""
    path = make_tar(tmp_path / "data", {f"top/{i}.png": bytes([i + 1]) * 100 for i in range(4)})
    path.write_bytes(pack(damage(path.read_bytes())))
    with open_tree(path) as tree, pytest.raises(UserError, match=message):
        _ = tree.entries


def test_damaged_compression_is_noticed(tmp_path):
    path = make_tar(tmp_path / "data", {f"top/{i}.png": os.urandom(5000) for i in range(4)}, "w:gz")
    spoil(path, -8)  # of gzip's checksum
    with open_tree(path) as tree, pytest.raises(UserError, match=r"damaged \(CRC"):
        _ = tree.entries
