"""Files made to hang, to fill the memory, to run code or to reach outside: each ends in one line, in little memory.

Tables of (content, message) by format, read as tests.fuzz reads its cases; then what needs more than a table.
"""

from __future__ import annotations

import bz2
import collections
import dataclasses
import gzip
import io
import lzma
import os
import pickle
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.data.read import archive, pickles
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError
from tests.fuzz.formats import FORMATS, base256, encoded, tar_field, zipped
from tests.fuzz.harness import tried

MB = 1 << 20
EVIL_PATHS = ("../evil.JPEG", "a/../../evil.JPEG", "/etc/evil", "C:/evil", "..\\evil.JPEG")

# -- tar archives


def head(name: bytes = b"a.png", size: int | bytes = 0, kind: bytes = b"0") -> bytes:
    """A tar header with a right checksum."""
    block = tar_field(tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT), 0, name.ljust(100, b"\0"))
    return tar_field(tar_field(block, 124, b"%011o\0" % size if isinstance(size, int) else size), 156, kind)


def extended(kind: bytes, content: bytes) -> bytes:
    return head(b"x", len(content), kind) + content + bytes(-len(content) % 512)


def record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length += len(str(length)) - len(str(len(body)))
    return b"%d" % length + body


def member(size: int | bytes = 0, content: bytes = b"") -> bytes:
    return head(size=size) + content + bytes(-len(content) % 512)


END = bytes(1024)
PLAIN, BELOW = member(3, b"abc"), "size below zero"
FOUR = b"".join(member(100, bytes([i + 1]) * 100) for i in range(4)) + END
HALF, DAMAGED = FOUR[:2048], FOUR[:2048] + b"\xff" * 20 + FOUR[2068:]
PACKED = gzip.compress(FOUR)
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
    "hard link": (head(kind=b"1") + END, r"a\.png.* a link, which is not followed"),
    "symbolic link": (head(kind=b"2") + END, r"a\.png.* a link, which is not followed"),
    "inner archive of negative size": (
        head(b"a.tar", 2048) + (PLAIN + member(base256(-1024))).ljust(2048, b"\0") + END,
        BELOW,
    ),
    "inner archive longer than its place": (head(b"a.tar", 1 << 30) + PLAIN + END, "cut short"),
    "a bomb of gzip": (gzip.compress(head(size=200 * MB)) + gzip.compress(bytes(MB)) * 300, "more than 200 times"),
    "a bomb of xz": (lzma.compress(head(size=200 * MB)) + lzma.compress(bytes(MB)) * 300, "more than 200 times"),
    "long name of 6 GB in gzip": (
        gzip.compress(head(b"x", base256(6 << 30), b"L")) + gzip.compress(bytes(MB)) * 20,
        "extended header of 6,442,450,944 bytes",
    ),
    # the standard library takes both for the end of the list
    "cut between two files": (HALF, "cut short"),
    "cut between two packed files": (gzip.compress(HALF), "cut short"),
    "damaged header": (DAMAGED, "damaged where a file should begin"),
    "damaged header, packed": (gzip.compress(DAMAGED), "damaged where a file should begin"),
    "another checksum of gzip": (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], r"damaged \(CRC"),
} | {
    path: (PLAIN + head(path.encode()) + END, f"^(?=.*leads out of the archive).*{re.escape(repr(path))}")
    for path in EVIL_PATHS
}

# -- zip archives


def zeros_deflated(megabytes: int, start: bytes = b"") -> bytes:
    """So many MiB of zeros behind a beginning as one deflate stream, made without compressing them all."""
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = machine.compress(start) + machine.flush(zlib.Z_FULL_FLUSH)
    return first + (machine.compress(bytes(MB)) + machine.flush(zlib.Z_FULL_FLUSH)) * megabytes + machine.flush()


def zip_field(content: bytes, mark: bytes, **values: int) -> bytes:
    """A zip archive with fields of its last record of a kind changed, each named by its place and its bytes."""
    data = bytearray(content)
    for name, value in values.items():
        place, width = map(int, name[1:].split("_"))
        at = content.rindex(mark) + place
        data[at : at + width] = value.to_bytes(width, "little")
    return bytes(data)


def listed(packed: bytes, method: int, size: int, *names: str) -> bytes:
    """A zip archive of a packed file that is said to have that size, behind empty ones."""
    *empty, name = names or ("a.png",)
    files = dict.fromkeys(empty, b"") | {name: packed}
    return zip_field(zipped(files, zipfile.ZIP_STORED), ENTRY, _10_2=method, _24_4=size)


ENTRY, LAST = b"PK\x01\x02", b"PK\x05\x06"
ONE, TWO = zipped({"a.png": b"x" * 1000}), zipped({"a.png": b"x" * 1000, "b.png": b"x" * 1000})
SECOND = TWO.rindex(b"PK\x03\x04")
DICTIONARY = b"\x09\x04\x05\x00" + b"\x5d" + struct.pack("<I", 0xFFFFFFFF) + bytes(20)
ZIPS = {
    "members upon each other": (zip_field(TWO, ENTRY, _42_4=SECOND - 10), "Bad magic"),
    "two names for one member": (zip_field(TWO, ENTRY, _42_4=0), "differ|Overlapped"),
    "a list beyond the end": (zip_field(ONE, LAST, _16_4=1 << 31), "no list of files|Invalid argument"),
    "more than it says": (zip_field(ONE, ENTRY, _24_4=10), "damaged"),
    "bzip2, more than it says": (listed(bz2.compress(bytes(MB)), 12, 100), "damaged"),
    "LZMA with a dictionary of 4 GB": (listed(DICTIONARY, 14, 1000), "damaged"),
    "a bomb": (listed(zeros_deflated(300), 8, 300 * MB, "a.pkl"), "expands to more than 200 times"),
    "unknown method": (listed(b"x", 99, 1), "packed by a method that Python cannot read"),
    "a long name": (zipped({"n" * 60_000: b"x"}), "60,000 characters"),
    "symbolic link": (zip_field(ONE, ENTRY, _40_2=stat.S_IFLNK | 0o777), r"a\.png.*link"),
} | {
    path: (zipped({"a.png": b"x", path: b"x"}), f"^(?=.*leads out of the archive).*{re.escape(repr(path))}")
    for path in EVIL_PATHS
}

# -- images


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    size = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + png_chunk(b"IDAT", zlib.compress(bytes(MB))) + png_chunk(b"IEND", b"")


def scans(progressive: bool) -> bytes:
    """A JPEG of 100,000 passes."""
    content = encoded("JPEG", size=(200, 200), progressive=progressive)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last : last + 14] * 100_000 + content[last:]


def tiff(order: str, kind: int, count: int) -> bytes:
    """A header with that many values of a type in a tag."""
    bits = 8 if order == "<" else 8 << 16
    tags = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, bits), (700, kind, count, 200)]
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}LH", 8, len(tags))
    return start + b"".join(struct.pack(f"{order}HHLL", *tag) for tag in tags) + bytes(6_000_000)


IMAGES = {
    "rows": (png(1, 1 << 20), "pixels, too many to decode"),
    "a row more than a square": (png(1 << 16, (1 << 10) + 1), "pixels, too many to decode"),
    "pixels": (png(1 << 15, 1 << 15), "too many pixels to decode"),
    "passes": (scans(False), r"it has 100,\d\d\d scans, too many"),
    "progressive passes": (scans(True), r"it has 100,\d\d\d scans, too many"),
} | {
    f"TIFF {order} {kind}": (tiff(order, kind, count), r"it has [\d,]+ values in its header, ")
    for order in "<>"
    for kind, count in ((4, 5_000_000), (5, 5_000_000), (12, 2_000_000))
}

# -- arrays in .npz files


def npy(descr: str = "'<f4'", shape: str = "(4, 3)", data: bytes = bytes(48), header: str | None = None) -> bytes:
    said = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n" if header is None else header
    return b"\x93NUMPY\x02\0" + struct.pack("<I", len(said)) + said.encode() + data


def npz(features: bytes = npy(), labels: np.ndarray = np.arange(4)) -> bytes:  # noqa: B008
    out, array = io.BytesIO(), io.BytesIO()
    np.save(array, labels)
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("features.npy", features)
        file.writestr("labels.npy", array.getvalue())
    return out.getvalue()


BOMB = npy(shape=f"({300 * MB // 16}, 4)", data=b"")
ARRAYS = {
    "no .npy at all": (npz(b"PK\x03\x04 what is this"), "the magic string is not correct"),
    "shape of 10^18": (npz(npy(shape="(1000000000, 1000000000)")), "greater than file size"),
    "shape below zero": (npz(npy(shape="(-4, -3)")), "negative dimensions"),
    "shape of 5,000 digits": (npz(npy(shape=f"({'9' * 5000}, 1)")), "Exceeds the limit|damaged"),
    "shape that is a number": (npz(npy(shape="12")), "shape is not valid"),
    "nested deep": (npz(npy(header="(" * 9000)), "damaged"),
    "a long sum": (npz(npy(header="-" * 9000 + "1")), "damaged"),
    "a call": (npz(npy(header="__import__('os').system('true')")), "damaged"),
    "objects": (npz(npy("'|O'", data=bytes(96))), "Python objects"),
    "records": (npz(npy("[('a', '<f4')]")), "of records|array of type"),
    "no columns": (npz(npy(shape="(4, 0)", data=b"")), r"found features float32\[4, 0\]"),
    "one axis": (npz(npy(shape="(12,)")), r"found features float32\[12\]"),
    "a bomb": (
        listed(zeros_deflated(300, BOMB), 8, len(BOMB) + 300 * MB, "labels.npy", "features.npy"),
        "expands to more than 200 times its size",
    ),
    "no letter": (npz(labels=np.array([0x110000, 1, 2, 3], np.uint32).view("<U1")), "a label is no text"),
    "half a letter": (
        npz(labels=np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], ">u4").view(">U2")[:, 0]),
        "a label is no text",
    ),
    "fractions": (npz(labels=np.arange(4) + 0.5), "labels must be integers or strings"),
    "bytes": (npz(labels=np.array([b"a", b"b", b"c", b"d"])), "labels must be integers or strings"),
    "a label too many": (npz(labels=np.arange(5)), r"labels int64\[5\]"),
}

# -- pickles


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


NAMED = [
    (Runs(os.system, "touch x"), rf"{os.system.__module__}\.system"),
    (Runs(eval, "open('x', 'w')"), r"(builtins|__builtin__)\.eval"),
    ({"data": np.zeros(3), "labels": [Runs(open, "x", "w")]}, r"io\.open"),
    (Path("x"), r"pathlib\.(_local\.)?"),
    (collections.OrderedDict(a=1), r"collections\.OrderedDict"),
    (np.ma.masked_array([1, 2], [0, 1]), r"numpy\.ma\."),
]
DEEP = b")" + 2_000 * b"\x85"  # a tuple in a tuple in a tuple ...; a million would end the interpreter
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
STATE = b"N}U\x0c__defaults__K\x01s\x86b."
PICKLES = [
    (b"(S'touch x'\nios\nsystem\n.", r"the name os\.system"),  # INST, as Python 2 wrote objects
    (b"\x80\x02(cos\nsystem\nU\x01xo.", r"the name os\.system"),
    (b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.", r"the name numpy\.dtype\.__class__"),
    (b"\x80\x04Vx\\ud800\n\x8c\x0b_frombuffer\x93.", r"it holds the name x\\ud800\._frombuffer"),
    (b"\x80\x02\x82\x01.", "unregistered extension"),
    (b"\x80\x02U\x01xQ.", "a reference to something outside"),
    (b"\x80\x05\x97.", "out-of-band data"),
    (b"\x80\x02cnumpy\nndarray\n)\x81.", "not a type object"),
    (b"\x80\x02cnumpy\nndarray\nK\x02\x85R.", r"a call of numpy\.ndarray"),
    (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00hex\x86R.", "encoded as 'hex'"),
    (b"\x80\x02cnumpy\nndarray\n}U\x01xK\x01sb.", "a state for"),
    (b"\x80\x02c_codecs\nencode\n" + STATE, "refused: it holds a state for a function"),
    (b"\x80\x02cnumpy\ndtype\n" + STATE, "refused: it holds a state for a function"),
    (b"\x80\x02cnumpy.core.multiarray\nscalar\n" + STATE, "refused: it holds a state for a function"),
    (b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", "an array of type 'O8'"),
    (b"\x80\x09K\x01.", "no pickle but a file of no known kind|protocol 9"),
    (pickle.dumps(np.array([1, "a"], object)), "refused: it holds an array of"),
    (pickle.dumps(np.zeros(2, [("x", "i4")])), "refused: it holds an array of"),
    (pickle.dumps(np.array(["2020-01-01"], "M8[D]")), "refused: it holds an array of"),
    # values that would exhaust the stack
    (b"\x80\x04}" + DEEP + b"K\x01s.", "is refused: it holds a tuple among keys"),
    (b"\x80\x04}(" + DEEP + b"K\x01u.", "is refused: it holds a tuple among keys"),
    (b"\x80\x04(" + DEEP + b"K\x01d.", "is refused: it holds a tuple among keys"),
    (b"\x80\x04\x8f(" + DEEP + b"\x90.", "is refused: it holds a set"),
    (b"\x80\x04(" + DEEP + b"\x91.", "is refused: it holds a set"),
    (b"\x80\x04cnumpy\ndtype\n" + DEEP + b"\x85R.", "is refused: it holds an array of type a tuple"),
    (b"\x80\x04c_codecs\nencode\nU\x01x" + DEEP + b"\x86R.", "is refused: it holds text to be encoded as a tuple"),
    (b"\x80\x04}U\x01aK\x01sG?\xe0\x00\x00\x00\x00\x00\x00K\x01s.", "is refused: it holds a float among keys"),
    (b"\x80\x02" + ARRAY + DEEP + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x01xtb.", "an array whose shape"),
    # lengths that are not there
    *((b"\x80\x02" + start + b"x" * 100_000, "is (cut short|damaged)") for start in (
        b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 6 + b"\x00\x00", b"T\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f",
        b"\x96" + b"\xff" * 6 + b"\x00\x00", b"]S'",
    )),
    # names are lines, and from protocol 4 on texts
    *((pickle.dumps(value, protocol), f"holds .*({name})") for value, name in NAMED for protocol in (0, 2, 4)),
]  # fmt: skip

HOSTILE = {"tar": TARS, "zip": ZIPS, "image": IMAGES, "npz": ARRAYS, "pickle": dict(enumerate(PICKLES))}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_in_one_line_soon_and_in_little_memory(kind):
    names, rows = zip(*HOSTILE[kind].items(), strict=True)
    form = dataclasses.replace(FORMATS[kind], seconds=60, bytes=100 * MB)
    verdicts = [verdict for _, verdict in tried(form, lambda i: rows[i][0], range(len(rows)))]
    for name, (_, message), verdict in zip(names, rows, verdicts, strict=True):
        assert verdict.how == "refused", (name, verdict)
        assert re.search(message, verdict.message), (name, verdict)


NUMBERED = zipped({f"{i}/": b"" for i in range(60)})
MANY = b"".join(head(b"%d.png" % i) for i in range(51)) + END


@pytest.mark.parametrize(
    ("kind", "limit", "most", "content", "message"),
    [
        ("tar", "ARCHIVE_MEMBERS", 50, MANY, "holds 51 files, more than 50"),
        ("zip", "ARCHIVE_MEMBERS", 50, NUMBERED, "holds 60 files, more than 50"),
        ("zip", "ZIP_DIRECTORY_BYTES", 2_000, NUMBERED, "has a list of files of 2,"),
        ("pickle", "PICKLE_VALUES", 2_000, b"\x80\x02]" + b"]" * 3_000, "makes more than 2,000 values"),
        ("pickle", "PICKLE_VALUES", 2_000, b"\x80\x02" + b"(" * 3_000, "makes more than 2,000 values"),
        ("pickle", "PICKLE_VALUES", 2_000, b"\x80\x02" + b"N0" * 1_500, "makes more than 2,000 values"),
        ("pickle", "PICKLE_BYTES", 50_000, pickle.dumps([f"{i:0200}" for i in range(1_000)]), "holds more than 50,000"),
    ],
)  # fmt: skip
def test_what_is_more_than_any_data_set_has_is_refused(kind, limit, most, content, message, tmp_path, monkeypatch):
    module = pickles if kind == "pickle" else archive
    monkeypatch.setattr(module, limit, dataclasses.replace(getattr(limits, limit), maximum=most))
    monkeypatch.setattr(zipfile, "ZipInfo", None)  # zipfile makes one for each member
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=message):
        FORMATS[kind].read(tmp_path / "x")
    arrays = [np.zeros(100_000, np.uint8) for _ in range(300)]
    assert len(pickles.load_pickle(pickle.dumps(arrays, 4), "x.pkl")) == 300


def test_an_image_of_4_gb_is_refused_before_it_is_read(tmp_path, traced):
    size = 4 << 30
    (tmp_path / "folder").mkdir()
    for path, before, after in (("a.tar", head(size=base256(size)), END), ("folder/a.png", b"", b"x")):
        with open(tmp_path / path, "wb") as file:
            file.write(before)
            file.seek(size, os.SEEK_CUR)  # zeros that take no room on the disk
            file.write(after)
    (tmp_path / "a.zip").write_bytes(listed(bytes(5000), 8, 900_000 * 1000))
    with traced() as memory:
        for path in ("a.tar", "folder", "a.zip"):
            with open_tree(tmp_path / path) as tree, pytest.raises(UserError, match="IFSL_BENCH_LARGEST_IMAGE") as said:
                tree.read_bytes(tree.find_by_name("a.png"))
            assert "too large for an encoded image" in str(said.value)
    assert memory.peak < 5e6
