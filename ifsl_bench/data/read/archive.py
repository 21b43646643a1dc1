"""Folders and archives as trees of named files, recognised by their content and read without unpacking.

A tree is a folder, a zip archive, a tar archive (also one of tar archives, as ILSVRC-2012 is distributed), or a tar
archive compressed by gzip, bzip2 or xz.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import itertools
import json
import lzma
import mmap
import os
import re
import stat
import struct
import tarfile
import threading
import unicodedata
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import append_to_temporary_file, open_temporary_file, sha256_json
from ifsl_bench.utils.limits import (
    ARCHIVE_MEMBERS,
    ARCHIVE_PATH_CHARACTERS,
    EXPANSION_RATIO,
    HARMLESS_EXPANDED_BYTES,
    TAR_EXTENDED_HEADER_BYTES,
    ZIP_DIRECTORY_BYTES,
    image_bytes_limit,
)
from ifsl_bench.utils.text_format import format_count

# What operating systems and archivers add to folders, apart from names that begin with a dot.
_IGNORED_NAMES = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir"}
_UNDECODED_BYTES = re.compile("[\ud800-\udfff]")  # Python's stand-ins for bytes of a name that are not UTF-8
# The exceptions of the standard library on damaged archives, which have no common base class.
BAD_CONTENT_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, struct.error, EOFError, OSError),
    *(RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError),
)
_SAMPLED_FILES, _HEAD_BYTES = 64, 1 << 16  # number of files, and bytes of each, in the fingerprint of a tree's content
_FILE_KIND_OF_FIRST_BYTES = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "an empty zip archive",
    b"\x1f\x8b": "a file compressed by gzip",
    b"BZh": "a file compressed by bzip2",
    b"\xfd7zXZ\x00": "a file compressed by xz",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"\x89HDF": "an HDF5 file",
    b"%PDF": "a PDF document",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
}
_DECOMPRESSORS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {  # by the first bytes of a file
    b"\x1f\x8b": ("gzip", lambda packed: gzip.GzipFile(fileobj=packed)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
}


def describe_file_kind(head: bytes) -> str:
    """Return the kind of a file in words, from its first bytes (512 are enough)."""
    if not head:
        return "an empty file"
    for start, meaning in _FILE_KIND_OF_FIRST_BYTES.items():
        if head.startswith(start):
            return meaning
    if _is_tar(head):
        return "a tar archive"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a Python pickle"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")) or b"<html" in text:
        return "an HTML page (a download that failed often leaves the server's error page under the file's name)"
    if text.startswith(b"{") and b'"' in text[:40]:
        return "JSON text (perhaps a server's error message)"
    return "a file of no known kind"


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def natural_sort_key(path: str) -> list[str | tuple[int, str]]:
    """Return a sort key by which ``a_9`` comes before ``a_10``, whatever the encoding of accents."""
    parts = re.split("([0-9]+)", normalise_unicode(path))
    digits = [part.lstrip("0") for part in parts]  # compared by length first: Python makes no number of 5,000 digits
    return [(len(digits[i]), digits[i]) if i % 2 else part for i, part in enumerate(parts)]


def normalise_unicode(name: str) -> str:
    """Return a name in Unicode's NFC; macOS writes accents in NFD."""
    return unicodedata.normalize("NFC", name)


def escape_undecoded_bytes(path: str) -> str:
    r"""Return a path with ``\xe9`` in place of bytes that are not UTF-8."""
    return _UNDECODED_BYTES.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", path)


def format_first_names(names: Sequence[str], count: int = 3) -> str:
    """Return the first names as text, and the number of the others.

    Args:
        names: All of them.
        count: How many are written out.
    """
    return ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a tree.

    Attributes:
        path: relative to the tree, with ``/`` between folders.
        size: in bytes.
        modification_time_ns: time of the last change in ns; 0 in archives.
        is_broken_link: whether it is a link that cannot be followed.
    """

    path: str
    size: int
    modification_time_ns: int = field(default=0, compare=False)
    is_broken_link: bool = False

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition("/")[2]


class FileTree(ABC):
    """A folder or an archive, opened for reading by several threads; use it in a ``with`` statement.

    Attributes:
        path: the folder or archive that the user named.
        kind_in_words: "folder", "zip archive", ...
    """

    kind_in_words: str

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, ExitStack()

    def __enter__(self) -> FileTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """All files that are not hidden, sorted by path.

        Raises:
            UserError: A path leads out of the tree, is no text, or occurs twice; or there are too many files.
        """
        entries = []
        for count, entry in enumerate(self._iterate_entries(), 1):
            ARCHIVE_MEMBERS.check(count, str(self.path))
            if not any(map(_is_hidden, entry.path.split("/"))):
                entries.append(entry)
        entries.sort(key=lambda entry: entry.path)
        if strange := [escape_undecoded_bytes(e.path) for e in entries if escape_undecoded_bytes(e.path) != e.path]:
            raise UserError(
                f"{self.path} holds {format_count(len(strange), 'file')} with a name that is not UTF-8 "
                f"({format_first_names(strange)}); rename files, or the folders they are in"
            )
        if twice := [a.path for a, b in itertools.pairwise(entries) if a.path == b.path]:
            raise UserError(
                f"{self.path} holds {format_count(len(twice), 'file')} twice under the same name "
                f"({format_first_names(twice)}), and which is meant is unclear; pack the archive again"
            )
        return entries

    @cached_property
    def entry_by_path(self) -> dict[str, Entry]:
        """The files by path."""
        return {entry.path: entry for entry in self.entries}

    def find_by_name(self, name: str) -> Entry | None:
        """Return the file called ``name`` in any folder of the tree, or None.

        Raises:
            UserError: There are several.
        """
        entries = [entry for entry in self.entries if entry.name == name]
        if len(entries) > 1:
            raise UserError(
                f"{self.path} holds {len(entries)} files called {name} "
                f"({format_first_names([e.path for e in entries])}); "
                f"say which is meant with --from and a smaller folder"
            )
        return entries[0] if entries else None

    @abstractmethod
    def _iterate_entries(self) -> Iterable[Entry]: ...

    @abstractmethod
    def open(self, entry: Entry) -> BinaryIO:
        """Open a file as a stream; use it within :meth:`translate_read_errors`."""

    def read_bytes(self, entry: Entry) -> bytes:
        """Return the content of a file.

        Raises:
            UserError: It is damaged or cut short, or too large for an image.
        """
        image_bytes_limit().check(entry.size, self.format_location(entry))
        with self.translate_read_errors(entry), self.open(entry) as file:
            content = file.read(entry.size + 1)
        if len(content) != entry.size:
            raise UserError(
                f"{self.format_location(entry)} is cut short: {len(content):,} of {entry.size:,} bytes are there"
            )
        return content

    def memory_map(self, entry: Entry) -> mmap.mmap | bytes:
        """Return a memory map of a file of any size; a file in an archive is copied to a temporary one.

        Raises:
            UserError: It is damaged or cut short.
        """
        with self.translate_read_errors(entry), self.open(entry) as file, open_temporary_file() as copy:
            while block := file.read(1 << 20):
                append_to_temporary_file(copy, block)
            return _map_file(copy)

    def format_location(self, entry: Entry | str) -> str:
        """Return the name of a file in messages."""
        return f"{entry if isinstance(entry, str) else entry.path} in {self.path}"

    @contextmanager
    def translate_read_errors(self, entry: Entry | str) -> Iterator[None]:
        """Convert exceptions of the standard library on damaged content into :class:`UserError`."""
        try:
            yield
        except BAD_CONTENT_ERRORS as error:
            raise UserError(f"cannot read {self.format_location(entry)}: {_describe_error(error)}") from error

    def identity_hash(self) -> str:
        """Return a hash of path, sizes and times, which changes when the files do."""
        status = self.path.stat()
        return sha256_json([str(self.path.resolve()), status.st_size, status.st_mtime_ns])

    def content_hashes(self) -> dict[str, str]:
        """Return hashes of the content from few bytes, equal wherever the files lie and however they are packed.

        Returns:
            ``names``: of paths below the common folder, and sizes. ``heads``: of the beginnings of some files.
        """
        ends = [entry.path for entry in (*self.entries[:1], *self.entries[-1:])]  # they are sorted
        start = os.path.commonprefix(ends).rfind("/") + 1  # noqa: RUF071 (letter by letter)
        names, as_json = hashlib.sha256(b"["), json.JSONEncoder(separators=(",", ":")).encode
        for i, entry in enumerate(self.entries):  # one by one: the text of a million names takes a gigabyte
            names.update(f"{',' if i else ''}{as_json([entry.path[start:], entry.size])}".encode())
        names.update(b"]")
        count = len(self.entries)
        spread = (
            dict.fromkeys(self.entries[i * count // _SAMPLED_FILES] for i in range(_SAMPLED_FILES)) if count else ()
        )
        heads = [hashlib.sha256(self._read_beginning(entry)).hexdigest() for entry in spread]
        return {"names": names.hexdigest(), "heads": sha256_json(heads)}

    def _read_beginning(self, entry: Entry) -> bytes:
        try:
            with self.translate_read_errors(entry), self.open(entry) as file:
                return file.read(_HEAD_BYTES)
        except UserError:  # the import fails later, if it needs the file
            return b""


def open_tree(path: Path) -> FileTree:
    """Open a folder or an archive.

    Raises:
        UserError: It does not exist, is no archive, or a damaged one.
    """
    if os.path.isdir(path):
        return _FolderTree(path)
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _ZipTree(path)
    if _is_tar(head) or head.startswith(tuple(_DECOMPRESSORS)):
        return _TarTree(path, head)
    raise UserError(
        f"{path} is neither a folder nor a zip or tar archive (of gzip, bzip2 or xz at most); it is "
        f"{describe_file_kind(head)}"
    )


class _FolderTree(FileTree):
    kind_in_words = "folder"

    def format_location(self, entry: Entry | str) -> str:
        return str(self.path / (entry if isinstance(entry, str) else entry.path))

    def _iterate_entries(self) -> Iterator[Entry]:
        # Links are followed, since people build data sets of them, except in circles.
        waiting: list[tuple[str, str, frozenset[tuple[int, int]]]] = [("", str(self.path), frozenset())]
        while waiting:
            prefix, folder, above = waiting.pop()
            with self.translate_read_errors(prefix):
                status = os.stat(folder)
                inode = (status.st_dev, status.st_ino)
                if inode in above:
                    continue
                with os.scandir(folder) as items:
                    for item in items:
                        if _is_hidden(item.name):
                            continue
                        try:
                            file = item.stat()
                        except OSError:
                            if not item.is_symlink():
                                raise
                            yield Entry(prefix + item.name, 0, is_broken_link=True)
                            continue
                        if stat.S_ISDIR(file.st_mode):
                            waiting.append((f"{prefix}{item.name}/", item.path, above | {inode}))
                        elif stat.S_ISREG(file.st_mode):
                            yield Entry(prefix + item.name, file.st_size, file.st_mtime_ns)

    def open(self, entry: Entry) -> BinaryIO:
        return open(self.path / entry.path, "rb")

    def memory_map(self, entry: Entry) -> mmap.mmap | bytes:
        with self.translate_read_errors(entry), self.open(entry) as file:
            return _map_file(file)

    def identity_hash(self) -> str:
        return sha256_json([str(self.path.resolve()), [[e.path, e.size, e.modification_time_ns] for e in self.entries]])


class _ZipDirectoryReader(io.BufferedReader):
    """A zip archive whose central directory is refused before it is parsed if it is too long."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(cast(io.RawIOBase, file))
        self.where = where

    def read(self, size: int | None = -1) -> bytes:
        ZIP_DIRECTORY_BYTES.check(size or 0, self.where)
        content = super().read(size)
        ARCHIVE_MEMBERS.check(content.count(b"PK\x01\x02"), self.where)
        return content


def open_zip(file: BinaryIO, where: str) -> zipfile.ZipFile:
    """Open a zip archive whose members may be read by several threads.

    Args:
        file: Seekable; it stays open as long as members are read.
        where: Name of the archive in messages.

    Raises:
        UserError: It has too many members.
        zipfile.BadZipFile, OSError, ...: It has no list of members; see ``BAD_CONTENT_ERRORS``.
    """
    directory = _ZipDirectoryReader(file, where)
    archive = zipfile.ZipFile(directory)
    directory.detach()
    archive.fp = file
    archive.NameToInfo.clear()  # a second list, which takes as much memory
    return archive


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> BinaryIO:
    """Open a member as a seekable stream; a step back decompresses it from the beginning.

    Args:
        archive: As :func:`open_zip` returns it.
        info: The member.
        where: Name of the member in messages.

    Raises:
        UserError: It expands beyond all measure, by its entry in the list of members.
    """
    if info.file_size > HARMLESS_EXPANDED_BYTES:
        EXPANSION_RATIO.check(info.file_size // max(1, info.compress_size), where)
    return cast(BinaryIO, archive.open(info))


class _ZipTree(FileTree):
    kind_in_words = "zip archive"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.members: dict[str, zipfile.ZipInfo] = {}
        file = self.opened.enter_context(open(path, "rb"))  # noqa: SIM115 (closed with the tree)
        try:
            self.archive = open_zip(file, str(path))
        except BAD_CONTENT_ERRORS as error:
            self.opened.close()
            raise UserError(
                f"{path} ({path.stat().st_size:,} bytes) begins as a zip archive, but it has no list of files at its "
                f"end: it is cut short or damaged; get it again"
            ) from error
        except UserError:
            self.opened.close()
            raise

    def _iterate_entries(self) -> Iterator[Entry]:
        for member in self.archive.infolist():
            path = _safe_member_path(self.path, member.filename)
            if member.filename.endswith("/"):
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise UserError(
                    f"{self.path} holds {member.filename!r}, a symbolic link; links in archives are not followed, "
                    f"unpack it and give the folder"
                )
            self.members[path] = member
            yield Entry(path, member.file_size)

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        return open_member(self.archive, self.members[entry.path], self.format_location(entry))


class _TarHeader(tarfile.TarInfo):
    """A member's header; tarfile trusts sizes in it, and takes a damaged one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _TarHeader:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise EOFError from error
        except (tarfile.HeaderError, ValueError, RecursionError) as error:
            raise tarfile.ReadError("it is damaged where a file should begin; get it again") from error

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self.check_size()
        if self.type in (b"L", b"K", b"x", b"g", b"X"):  # of GNU, pax and Solaris
            TAR_EXTENDED_HEADER_BYTES.check(self.size, "it", tarfile.ReadError)
        return super()._proc_member(tar)  # type: ignore[misc]

    def check_size(self) -> None:
        if self.size < 0:  # the next header would lie before this one
            raise tarfile.ReadError("a file of a size below zero; it is not to be trusted, get it again")


class _FilePart(io.RawIOBase):
    """A part of a file as a file of its own; several parts may be read by several threads."""

    def __init__(self, file: BinaryIO, lock: threading.Lock, start: int, size: int) -> None:
        self.file, self.lock, self.start, self.size, self.at = file, lock, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with self.lock:
            self.file.seek(self.start + self.at)
            content = self.file.read(max(0, min(len(buffer), self.size - self.at)))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class _TarTree(FileTree):
    """A tar archive, read in place; a compressed one is expanded into a temporary file, for random access."""

    def __init__(self, path: Path, head: bytes) -> None:
        super().__init__(path)
        self.compression = ""
        self.decompress: Callable[[Any], Any] | None = None
        for magic, (name, decompress) in _DECOMPRESSORS.items():
            if head.startswith(magic):
                self.compression, self.decompress = name, decompress
        self.kind_in_words = f"tar archive compressed by {self.compression}" if self.compression else "tar archive"
        self.lock, self.starts = threading.Lock(), dict[str, int]()

    @cached_property
    def uncompressed_file(self) -> BinaryIO:
        packed = self.opened.enter_context(open(self.path, "rb"))  # noqa: SIM115 (closed with the tree)
        if self.decompress is None:
            return packed
        expanded = self.opened.enter_context(open_temporary_file())
        with self.decompress(packed) as content:
            head = content.read(tarfile.BLOCKSIZE)
            try:
                tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")  # an old archive has a checksum alone
            except tarfile.HeaderError as error:
                if not _is_tar(head):
                    raise UserError(
                        f"{self.path} is compressed by {self.compression}, but what is inside is no tar archive but "
                        f"{describe_file_kind(head)}; if it belongs to a data set, unpack it and give the folder"
                    ) from error
            append_to_temporary_file(expanded, head)
            while block := content.read(1 << 20):
                append_to_temporary_file(expanded, block)
                if expanded.tell() > HARMLESS_EXPANDED_BYTES:
                    EXPANSION_RATIO.check(expanded.tell() // max(1, self.path.stat().st_size), str(self.path))
        return expanded

    def _iterate_entries(self) -> Iterator[Entry]:
        with self.translate_read_errors("its list of files"):
            size = self.uncompressed_file.seek(0, io.SEEK_END)
        yield from self._iterate_files("", 0, size)

    def _iterate_files(self, prefix: str, start: int, size: int) -> Iterator[Entry]:
        """Yield the regular files of an archive that begins at byte ``start``; tar archives in it count as folders."""
        with self.translate_read_errors(prefix.rstrip("/") or "its list of files"):
            part = self._open_part(start, size)
            tar: Any = tarfile.open(fileobj=part, mode="r:", tarinfo=_TarHeader, encoding="utf-8")  # noqa: SIM115
            while (member := tar.next()) is not None:
                tar.members.clear()  # else the headers of a million files stay in memory
                member.check_size()
                if member.size > size:  # tarfile would look for its end for ever
                    raise EOFError
                kind = "a link" if member.islnk() or member.issym() else "a sparse file" if member.issparse() else ""
                if kind:
                    raise UserError(
                        f"{self.path} holds {member.name!r}, {kind}, which is not followed in archives; unpack it and "
                        f"give the folder"
                    )
                if not member.isfile():
                    continue
                path, place = prefix + _safe_member_path(self.path, member.name), start + member.offset_data
                if not prefix and path.endswith(".tar"):
                    yield from self._iterate_files(path.removesuffix(".tar") + "/", place, member.size)
                else:
                    self.starts[path] = place
                    yield Entry(path, member.size)

    def _open_part(self, start: int, size: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_FilePart(self.uncompressed_file, self.lock, start, size), 1 << 16))

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        return self._open_part(self.starts[entry.path], entry.size)


def _map_file(file: BinaryIO) -> mmap.mmap | bytes:
    file.flush()
    empty = os.fstat(file.fileno()).st_size == 0
    return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _safe_member_path(archive: Path, name: str) -> str:
    """Return a member's path, normalised.

    Raises:
        UserError: It leads out of the archive, or is too long.
    """
    ARCHIVE_PATH_CHARACTERS.check(len(name), str(archive))
    plain = name.replace("\\", "/")
    if plain.startswith("/") or re.match("[A-Za-z]:", plain) or ".." in plain.split("/") or "\0" in plain:
        raise UserError(
            f"{archive} holds {name!r}, a path that leads out of the archive; it is not to be trusted, get another copy"
        )
    path = str(PurePosixPath(plain))
    return name if path == name else path  # of a million names, no second copy


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _IGNORED_NAMES


def _describe_error(error: BaseException) -> str:
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
