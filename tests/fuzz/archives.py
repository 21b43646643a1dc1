"""Archives, and images in them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random

from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.file_tree import natural
from ifsl_bench.data.sets.folder import OwnOptions
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LogReporter
from tests.fuzz.formats import Format
from tests.fuzz.images import encoded
from tests.fuzz.mutation import NUMBERS, number, once, spoiled

NAMES = (
    "a/../../b", "/etc/passwd", "a" * 101, "a" * 5000, "9" * 5000, "\udc80", "\n\x1b[2J", "", ".", "a//b", "C:x",
    "a/b.tar", "é" * 60, "con", "a\\..\\b", "\0", "__MACOSX/a",
)  # fmt: skip


@cache
def files(classes: int = 3, images: int = 2) -> dict[str, bytes]:
    image = encoded()
    return {f"top/class_{c}/image_{i}.png": image for c in range(classes) for i in range(images)}


def tarred(content: dict[str, bytes], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.pax_headers = {"comment": "x" * 30} if form == tarfile.PAX_FORMAT else {}
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@cache
def tars() -> Sequence[bytes]:
    long = {f"top/{'long' * 30}/{'é' * 40}.png": b"x" * 700, **files()}
    forms = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    plain = [tarred(files() if form == tarfile.USTAR_FORMAT else long, form) for form in forms]
    return [*plain, tarred({"top/a.tar": plain[0], "top/b.tar": plain[2]}, tarfile.GNU_FORMAT)]


def spoiled_tar(random: Random, content: bytes) -> bytes:
    """Fields of headers changed, and their checksums made right; or headers added; or any bytes changed."""
    if random.random() < 0.2:
        return spoiled(random, content)
    blocks = [content[i : i + 512] for i in range(0, len(content), 512)]
    for _ in range(random.choice((1, 1, 2, 5))):
        heads = [i for i, block in enumerate(blocks) if block[257:262] == b"ustar"]
        if not heads:
            break
        i = random.choice(heads)
        way = random.randrange(8)
        if way == 0:
            blocks[i] = _head(blocks[i], 124, size_field(random))
        elif way == 1:
            kind = random.choice(b"0\x001257LKxgSXDMV") if random.random() < 0.9 else random.randrange(256)
            blocks[i] = _head(blocks[i], 156, bytes([kind]))
        elif way == 2:
            name = random.choice(NAMES).encode("utf-8", "surrogateescape")[:100]
            blocks[i] = _head(blocks[i], 0, name.ljust(100, b"\0"))
        elif way == 3:
            start, width = random.choice(((100, 8), (108, 8), (136, 12), (257, 8), (345, 155), (157, 100)))
            blocks[i] = _head(blocks[i], start, random.randbytes(width))
        elif way == 4:
            blocks[i:i] = extended(random, blocks[i])
        elif way == 5:
            blocks[i : i + 2] = []
        elif way == 6:
            blocks[i:i] = blocks[i : i + random.choice((1, 2, 4))] * random.choice((1, 1, 200))
        else:
            blocks[i] = once(random, blocks[i])
    return b"".join(blocks)[: 1 << 20]


SIZES = (b"-1\0", b"-0000000777\0", b" " * 12, b"0o17\0", b"9" * 12, b"+7 ", b"1_0 ", b"\xff" * 12,
         b"\x80" + b"\xff" * 11, b"\x80" + b"\0" * 3 + b"\xff" * 8)  # fmt: skip


def size_field(random: Random) -> bytes:
    way = random.randrange(4)
    if way == 0:
        return b"%011o\0" % (random.choice(NUMBERS) & ((1 << 33) - 1))
    if way == 1:  # base 256, positive or negative
        value = random.choice(NUMBERS) * random.choice((1, -1, 1 << 20))
        return (value & ((1 << 96) - 1) | (1 << 95)).to_bytes(12, "big")
    return random.choice(SIZES).ljust(12, b"\0")


KEYS = ("path", "size", "linkpath", "GNU.sparse.map", "GNU.sparse.size", "hdrcharset", "x", "")


def extended(random: Random, like: bytes) -> list[bytes]:
    """An extended header with hostile records."""
    kind = random.choice(b"xxxxgLK")
    if chr(kind) in "xg":
        values = (*map(str, NUMBERS), "-1", "-512", "1e9", "9" * 5000, *NAMES)
        count = random.choice((1, 2, 50))
        content = b"".join(record(random, random.choice(KEYS), random.choice(values)) for _ in range(count))
    else:
        content = random.choice(NAMES).encode("utf-8", "surrogateescape") + b"\0"
    size = len(content) if random.random() < 0.8 else random.choice(NUMBERS) & ((1 << 33) - 1)
    head = _head(_head(like, 124, b"%011o\0" % size), 156, bytes([kind]))
    content += bytes(-len(content) % 512)
    return [head, *(content[i : i + 512] for i in range(0, len(content), 512))]


def record(random: Random, key: str, value: str) -> bytes:
    body = b" " + key.encode() + b"=" + value.encode("utf-8", "surrogateescape") + b"\n"
    length = next(size for size in range(len(body), len(body) + 9) if size == len(body) + len(str(size)))
    if random.random() < 0.2:
        length = random.choice((0, 1, 2, length + 1, length - 1, 10**7, 10**20))
    return str(length).encode() + body


def _head(block: bytes, at: int, value: bytes) -> bytes:
    block = (block[:at] + value + block[at + len(value) :])[:512].ljust(512, b"\0")
    block = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def zipped(content: dict[str, bytes], method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w", force_zip64=len(data) % 2 == 0) as member:
                member.write(data)
    return out.getvalue()


@cache
def zips() -> Sequence[bytes]:
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    zeros = zipped({"top/zeros.png": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    return [*(zipped(files(), method) for method in methods), zeros]


# Offset and width of the fields of each of zip's records.
_FIELDS = {
    b"PK\x01\x02": (*((at, 2) for at in (4, 6, 8, 10, 28, 30, 32)), *((at, 4) for at in (16, 20, 24, 38, 42))),
    b"PK\x03\x04": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\x06\x06": ((4, 8), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
}


def spoiled_zip(random: Random, content: bytes) -> bytes:
    """Fields of the records changed; or any bytes."""
    if random.random() < 0.3:
        return spoiled(random, content)
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 9))):
        mark = random.choice(tuple(_FIELDS))
        places = _places(bytes(data), mark)
        if not places:
            continue
        place = random.choice(places)
        at, width = random.choice(_FIELDS[mark])
        data[place + at : place + at + width] = number(random, width)
        if mark == b"PK\x01\x02" and random.random() < 0.3:  # another member's place
            data[place + 42 : place + 46] = data[(source := random.choice(places)) + 42 : source + 46]
    return bytes(data)


def _places(content: bytes, mark: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(mark), content)]


def spoiled_inside(
    spoil: Callable[[Random, bytes], bytes], pack: Callable[[bytes], bytes], random: Random, content: bytes
):
    """Spoils the content, or its compressed bytes."""
    return pack(spoil(random, content)) if random.random() < 0.6 else spoiled(random, pack(content))


def read_archive(path: Path) -> None:
    with open_tree(path) as tree:
        entries = tree.entries
        sorted(entries, key=lambda entry: natural(entry.path))
        tree.identity()
        tree.content()
        refused = []
        for entry in [entry for entry in entries if entry.size < 1 << 26][:4]:
            try:
                tree.read(entry)
                with tree.readable(entry), tree.open(entry) as file:
                    file.read(10)
                    file.seek(0)
                    while file.read(1 << 16):
                        pass
            except UserError as error:  # the others may be read
                refused.append(error)
        if refused:
            raise refused[0]


# -- all of it: from an archive to a data set


@cache
def folders() -> Sequence[bytes]:
    own = {f"top/class_{c}/{i}.png": encoded(size=(8 + c, 8 + i)) for c in range(24) for i in range(20)}
    return [zipped(own, zipfile.ZIP_DEFLATED), tarred(own, tarfile.USTAR_FORMAT)]


def spoiled_folder(random: Random, content: bytes) -> bytes:
    return (spoiled_zip if content.startswith(b"PK") else spoiled_tar)(random, content)


def read_folder(path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        quiet = LogReporter(io.StringIO())
        prepare(Paths.locate(home), "own", path, False, quiet, allow_partial=True, own=OwnOptions(size=8))
    finally:
        shutil.rmtree(home, ignore_errors=True)


gzipped = partial(gzip.compress, compresslevel=1, mtime=0)
FORMATS = [
    Format("tar", tars, read_archive, spoiled_tar, 20),
    Format("tar.gz", tars, read_archive, partial(spoiled_inside, spoiled_tar, gzipped)),
    Format("tar.bz2", tars, read_archive, partial(spoiled_inside, spoiled_tar, bz2.compress), 4),
    Format("tar.xz", tars, read_archive, partial(spoiled_inside, spoiled_tar, partial(lzma.compress, preset=0)), 4),
    Format("zip", zips, read_archive, spoiled_zip, 20),
    Format("folder", folders, read_folder, spoiled_folder, 3),
]
