"""The common base of folders and archives: a tree of named files, listed and read without unpacking anything."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import lzma
import mmap
import os
import re
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import append, sha256_json, temporary_file
from ifsl_bench.utils.limits import MEMBERS, PATH, image_bytes

# What systems and their archivers leave among people's files, beside what is hidden by a dot.
_CLUTTER = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir"}
_UNDECODED = re.compile("[\ud800-\udfff]")  # how Python writes the bytes of a name that are not UTF-8
# What the standard library raises on damaged archives, which has no common class.
BAD_CONTENT = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, EOFError, OSError, RuntimeError,
               ValueError, LookupError, ArithmeticError, AssertionError, struct.error)  # fmt: skip
_SAMPLED, _HEAD = 64, 1 << 16  # files, and bytes of each, that tell one content from another
_STARTS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "a file compressed by gzip"),
    (b"BZh", "a file compressed by bzip2"),
    (b"\xfd7zXZ\x00", "a file compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "a file compressed by zstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"%PDF", "a PDF document"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
)


def what_is(head: bytes) -> str:
    """Names the kind of a file, in words, from its first bytes (512 are enough)."""
    if not head:
        return "an empty file"
    for start, meaning in _STARTS:
        if head.startswith(start):
            return meaning
    if is_tar(head):
        return "a tar archive"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a Python pickle"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")) or b"<html" in text:
        return "an HTML page (a download that failed often leaves the server's error page under the file's name)"
    if text.startswith(b"{") and b'"' in text[:40]:
        return "JSON text (perhaps a server's error message)"
    return "a file of no known kind"


def is_tar(head: bytes) -> bool:
    """Returns whether the first 512 bytes of a file are those of a tar archive."""
    return head[257:262] == b"ustar"


def natural(path: str) -> list[str | tuple[int, str]]:
    """A sort key by which ``a_9`` comes before ``a_10``: digits count as numbers, accents however they are encoded."""
    parts = re.split("([0-9]+)", nfc(path))
    digits = [part.lstrip("0") for part in parts]  # compared by length first: Python makes no number of 5,000 digits
    return [(len(digits[i]), digits[i]) if i % 2 else part for i, part in enumerate(parts)]


def nfc(name: str) -> str:
    """A name as it is compared: macOS takes letters and their accents apart (NFD) where others do not (NFC)."""
    return unicodedata.normalize("NFC", name)


def printable(path: str) -> str:
    """A path with ``\\xe9`` in the place of bytes that are not UTF-8; other paths as they are."""
    return _UNDECODED.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", path)


def some(names: Sequence[str], count: int = 3) -> str:
    """The first few names of a list, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a tree. ``path`` is relative, with ``/`` between folders; ``size`` in bytes; ``changed``, when it was
    last written (ns), where it is a file of its own; ``lost``, whether it is a link that cannot be followed."""

    path: str
    size: int
    changed: int = field(default=0, compare=False)
    lost: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class FileTree(ABC):
    """A folder or an archive, opened for reading, also by several threads; to be used in a ``with`` statement.

    Attributes:
        path: what the user named.
        kind: what it is, in words.
        opened: what is to be closed.
    """

    kind: str

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, contextlib.ExitStack()

    def __enter__(self) -> FileTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """All files, sorted by path, but hidden ones and those in hidden folders: what begins with a dot, and what
        systems leave behind (``__MACOSX``, ``Thumbs.db``, ``@eaDir``, ...).

        Raises:
            UserError: a path leads out of the tree, is no text, or occurs twice; it is named. Or there are too many.
        """
        entries = []
        for count, entry in enumerate(self._list(), 1):
            MEMBERS.check(count, str(self.path))
            if not any(map(is_hidden, entry.path.split("/"))):
                entries.append(entry)
        entries.sort(key=lambda entry: entry.path)
        if strange := [e.path for e in entries if printable(e.path) != e.path]:
            raise UserError(
                f"{self.path} holds {len(strange)} files whose names are not UTF-8 "
                f"({some([printable(path) for path in strange])}); rename them, or the folders they are in"
            )
        if twice := [a.path for a, b in itertools.pairwise(entries) if a.path == b.path]:
            raise UserError(
                f"{self.path} holds {len(twice)} files twice under the same name ({some(twice)}), and which is meant "
                f"is unclear; pack the archive anew"
            )
        return entries

    @cached_property
    def by_path(self) -> dict[str, Entry]:
        return {entry.path: entry for entry in self.entries}

    def named(self, name: str) -> Entry | None:
        """The file of that name in any folder of the tree; None where there is none.

        Raises:
            UserError: there are several.
        """
        entries = [entry for entry in self.entries if entry.name == name]
        if len(entries) > 1:
            raise UserError(
                f"{self.path} holds {len(entries)} files called {name} ({some([e.path for e in entries])}); "
                f"say which is meant with --from and a smaller folder"
            )
        return entries[0] if entries else None

    @abstractmethod
    def _list(self) -> Iterable[Entry]: ...

    @abstractmethod
    def open(self, entry: Entry) -> BinaryIO:
        """A file for reading from its beginning, without ever holding all of it; see :meth:`readable`."""

    def read(self, entry: Entry) -> bytes:
        """A whole file.

        Raises:
            UserError: it is damaged or cut short, or too large to be an image; names it.
        """
        image_bytes().check(entry.size, self.where(entry))
        with self.readable(entry), self.open(entry) as file:
            content = file.read(entry.size + 1)
        if len(content) != entry.size:
            raise UserError(f"{self.where(entry)} is cut short: {len(content):,} of {entry.size:,} bytes are there")
        return content

    def mapped(self, entry: Entry) -> mmap.mmap | bytes:
        """A whole file of any size, whose bytes are read when they are used; of an archive, a copy of it on the disk.

        Raises:
            UserError: it is damaged or cut short; names it.
        """
        with self.readable(entry), self.open(entry) as file, temporary_file() as copy:
            while block := file.read(1 << 20):
                append(copy, block)
            return mapped(copy)

    def where(self, entry: Entry | str) -> str:
        """The name of a file in messages."""
        path = entry if isinstance(entry, str) else entry.path
        return f"{path} in {self.path}"

    @contextlib.contextmanager
    def readable(self, entry: Entry | str) -> Iterator[None]:
        """Turns what the standard library raises on damaged archives into one plain line."""
        try:
            yield
        except BAD_CONTENT as error:
            raise UserError(f"cannot read {self.where(entry)}: {_plain(error)}") from error

    def identity(self) -> str:
        """Changes when the files do, as far as names, sizes and times tell."""
        status = self.path.stat()
        return sha256_json([str(self.path.resolve()), status.st_size, status.st_mtime_ns])

    def content(self) -> dict[str, str]:
        """A fingerprint of the content from few bytes, the same wherever it lies and however it is packed.

        Returns:
            ``names``: of the files' paths below the folder that all share, and their sizes. ``heads``: of the
            beginnings of a few files, spread evenly.
        """
        ends = [entry.path for entry in (*self.entries[:1], *self.entries[-1:])]  # what they share, all between do
        start = os.path.commonprefix(ends).rfind("/") + 1  # noqa: RUF071 (letter by letter)
        names, as_json = hashlib.sha256(b"["), json.JSONEncoder(separators=(",", ":")).encode
        for i, entry in enumerate(self.entries):  # whole, the text of a million names takes a gigabyte
            names.update(f"{',' if i else ''}{as_json([entry.path[start:], entry.size])}".encode())
        names.update(b"]")
        count = len(self.entries)
        spread = dict.fromkeys(self.entries[i * count // _SAMPLED] for i in range(_SAMPLED)) if count else ()
        heads = [hashlib.sha256(self._beginning(entry)).hexdigest() for entry in spread]
        return {"names": names.hexdigest(), "heads": sha256_json(heads)}

    def _beginning(self, entry: Entry) -> bytes:
        """The first bytes of a file; none where it cannot be read, since the import will see whether it is needed."""
        try:
            with self.readable(entry), self.open(entry) as file:
                return file.read(_HEAD)
        except UserError:
            return b""


def mapped(file: BinaryIO) -> mmap.mmap | bytes:
    """The content of a file on the disk."""
    file.flush()
    empty = os.fstat(file.fileno()).st_size == 0
    return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def inside(archive: Path, name: str) -> str:
    """A member's path, normalised.

    Raises:
        UserError: it leads out of the archive, or is too long to be one.
    """
    PATH.check(len(name), str(archive))
    plain = name.replace("\\", "/")
    if plain.startswith("/") or re.match("[A-Za-z]:", plain) or ".." in plain.split("/") or "\0" in plain:
        raise UserError(
            f"{archive} holds {name!r}, a path that leads out of the archive; it is not to be trusted, get another copy"
        )
    path = str(PurePosixPath(plain))
    return name if path == name else path  # of a million names, no second copy


def is_hidden(name: str) -> bool:
    """Returns whether people do not see a file or folder of this name, or did not make it."""
    return name.startswith(".") or name.lower() in _CLUTTER


def _plain(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, EOFError) or "end of data" in text or "incomplete" in text:
        return "it is cut short; get it again"
    if "CRC" in text or isinstance(error, zlib.error | lzma.LZMAError):
        return f"its content is damaged ({text}); get it again"
    if "password" in text:
        return "it is encrypted; unpack it and give the folder"
    if isinstance(error, NotImplementedError):
        return f"it is packed by a method that Python cannot read ({text}); unpack it and give the folder"
    return error.strerror or text if isinstance(error, OSError) else text
