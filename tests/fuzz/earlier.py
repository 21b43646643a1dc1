"""Files that broke the program once, made here: each now ends in one line, or well.

What the harness finds goes to ``tests/fuzz/kept/`` by itself; these are older than it, or too large to be kept there.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np

from tests.fuzz.archives import files, folders, tarred, zips
from tests.fuzz.arrays import header
from tests.fuzz.cache import FINISHED
from tests.fuzz.texts import csvs, tomls

_END = bytes(1024)


def _head(name: bytes, size: int | bytes, kind: bytes = b"0") -> bytes:
    """A tar header whose checksum is right; a negative size, or one beyond 8 GB, is in base 256."""
    if isinstance(size, int):
        large = not 0 <= size < 1 << 33
        size = (size & ((1 << 95) - 1) | (1 << 95)).to_bytes(12, "big") if large else b"%011o\0" % size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"0" * 11 + b"\0" + b" " * 8 + kind
    block = (block.ljust(257, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _member(name: bytes, content: bytes, kind: bytes = b"0") -> bytes:
    return _head(name, len(content), kind) + content + bytes(-len(content) % 512)


def _before(*blocks: bytes) -> bytes:
    """A tar archive of a good file between these."""
    return b"".join(blocks) + _member(b"top/a/b.png", b"abc") + _END


def _npz(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _labels(*points: int) -> bytes:
    """The .npy file of a label a character, by their code points."""
    return _npy(np.array(points, np.uint32).view("<U1"))


_FEATURES = _npy(np.arange(12, dtype=np.float32).reshape(4, 3))


def _flipped_header() -> bytes:
    content = bytearray(_FEATURES)
    content[20] ^= 0x20
    return _npz(features=bytes(content), labels=_labels(65, 66, 67, 68), images=_FEATURES)


def _zeros(megabytes: int) -> bytes:
    """A gzip file of a tar member's header and so many MB of zeros."""
    return gzip.compress(_head(b"a.png", megabytes << 20), 1) + gzip.compress(bytes(1 << 20), 9) * megabytes


def _large_image() -> bytes:
    out = io.BytesIO(folders()[0])
    with (
        zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("top/class_0/large.png", "w") as member,
    ):
        for _ in range(300):
            member.write(os.urandom(1000) * 1000)
    return out.getvalue()


def _zip_named(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, content in {name: next(iter(files().values())), **files()}.items():
            archive.writestr(path, content)
    return out.getvalue()


def _recipe(only: str, chance: int, start: str = FINISHED) -> bytes:
    return json.dumps({"start": start, "only": only, "chance": chance}).encode()


# (format, what it is) -> how it is made
EARLIER: dict[tuple[str, str], Callable[[], bytes]] = {
    ("tar", "a size below zero"): lambda: _before(_head(b"x", -1024)),
    ("tar", "a size that leads back to the first header"): lambda: _before(_member(b"x", b""), _head(b"y", -2048)),
    ("tar", "a pax header of 100 kB of digits"): lambda: _before(_member(b"x", b"1" * 100_000, b"x")),
    ("tar", "a pax header of 200 kB of digits and spaces"): lambda: _before(_member(b"x", b"1 " * 100_000, b"x")),
    ("tar", "a pax size of 5,000 digits"): lambda: _before(_member(b"x", b"5011 size=" + b"9" * 5000 + b"\n", b"x")),
    ("tar", "a GNU long name of 2^88 bytes"): lambda: _before(_head(b"x", 1 << 88, b"L")),
    ("tar", "a GNU long name of 6 GB"): lambda: _before(_head(b"x", 6 << 30, b"L")),
    ("tar", "5,000 digits in a name"): lambda: _before(_member(b"x", b"9" * 4000 + b".png\0", b"L")),
    ("tar", "5,000 digits in a folder's name"): lambda: tarred({f"{'9' * 3900}/a.png": b"x"}, tarfile.PAX_FORMAT),
    ("tar.gz", "3 GB of zeros in one file"): lambda: _zeros(3000),
    ("tar.gz", "a GNU long name of 6 GB"): lambda: gzip.compress(_before(_head(b"x", 6 << 30, b"L")), 1),
    ("zip", "5,000 digits in a name"): lambda: _zip_named("9" * 4000 + ".png"),
    ("folder", "5,000 digits in a folder's name"): lambda: _zip_named(f"top/{'9' * 3900}/a.png"),
    ("folder", "an image of 300 MB"): _large_image,
    ("folder", "a size below zero"): lambda: _before(_head(b"x", -1024)),
    ("npz", "a member that is no .npy"): lambda: _npz(features=b"what is this", labels=_labels(65)),
    ("npz", "a member that is a zip"): lambda: _npz(features=zips()[0], labels=_labels(65)),
    ("npz", "a flipped bit in a header"): _flipped_header,
    ("npz", "a label of half a character"): lambda: _npz(features=_FEATURES, labels=_labels(0xD800, 1, 2, 3)),
    ("npz", "a label beyond all characters"): lambda: _npz(features=_FEATURES, labels=_labels(0x110000, 1, 2, 3)),
    ("npz", "features of no columns"): lambda: _npz(
        features=_npy(np.zeros((4, 0), np.float32)), labels=_labels(1, 2, 3, 4)
    ),
    ("npz", "a shape of 5,000 digits"): lambda: _npz(
        features=header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000}, 1)}}"), labels=_labels(1)
    ),
    ("npz", "a header nested 9,000 deep"): lambda: _npz(features=header("(" * 9000), labels=_labels(1)),
    ("toml", "nested 100,000 deep"): lambda: b"x = " + b"[" * 100_000,
    ("toml", "tables nested 100,000 deep"): lambda: b"x = " + b"{a=" * 70_000,
    ("toml", "a key of 100,000 parts"): lambda: b"a." * 100_000 + b"a = 1",
    ("toml", "a number of 5,000 digits"): lambda: _task(b"steps = 900", b"steps = " + b"9" * 5000),
    ("toml", "10^12 episodes"): lambda: _task(b"episodes = 2000", b"episodes = 1000000000000"),
    ("toml", "a seed below zero"): lambda: _task(b"seed = 0", b"seed = -1"),
    ("toml", "half a character"): lambda: b'x = "\\ud800"',
    ("csv", "half a character"): lambda: csvs()[0] + "\n\ud800,base".encode("utf-8", "surrogatepass"),
    ("pickle", "a name of half a character"): lambda: b"\x80\x02Vx\\ud800\n\x8c\x0b_frombuffer\x93.",
    ("pickle", "an integer of 5,000 digits"): lambda: b"\x80\x02I" + b"9" * 5000 + b"\n.",
    ("pickle", "a call of a function"): lambda: b"cos\nsystem\n(S'true'\ntR.",
    ("cache", "the header of prepared images"): lambda: _recipe("base-val.images.npy", 3),
    ("cache", "a checkpoint's facts"): lambda: _recipe("trained/", 5),
    ("cache", "an unfinished training's facts"): lambda: _recipe("checkpoint.json", 7, "meta-training saved twice"),
}


def _task(old: bytes, new: bytes) -> bytes:
    """The task file of the letters with one line changed."""
    (content,) = [one for one in tomls() if b'name = "glyphs"' in one]
    assert content.count(old) == 1
    return content.replace(old, new)


# Of these there is use: long names are names, one image too large is left out, a damaged cache is mended.
GOOD = {key for key in EARLIER if "5,000 digits in a" in key[1] and key[0] != "folder"} | {
    ("folder", "an image of 300 MB"),
    ("cache", "a checkpoint's facts"),
    ("cache", "an unfinished training's facts"),
}
