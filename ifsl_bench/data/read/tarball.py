"""Tar archives as trees: plain ones are read in place, compressed ones are expanded once, into a temporary file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from ifsl_bench.data.read.file_tree import Entry, FileTree, inside, is_tar, what_is
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import append, temporary_file
from ifsl_bench.utils.limits import EXPANDED, EXPANSION, EXTENDED_HEADER

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}  # by how a file begins
_EXPAND: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda packed: gzip.GzipFile(fileobj=packed),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
_EXTENDED = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE,
             tarfile.SOLARIS_XHDTYPE)  # fmt: skip


class _Header(tarfile.TarInfo):
    """A member's header. The standard library believes what sizes it says, and ends silently at one that is damaged."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Header:
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
        if self.type in _EXTENDED:
            EXTENDED_HEADER.check(self.size, "it", tarfile.ReadError)
        return super()._proc_member(tar)  # type: ignore[misc]

    def check_size(self) -> None:
        """Raises :class:`tarfile.ReadError` where the next header would lie before this one."""
        if self.size < 0:
            raise tarfile.ReadError("a file of a size below zero; it is not to be trusted, get it again")


def _members(file: BinaryIO, archive: Path, most: int) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive, to its end mark.

    Args:
        most: bytes that it has; the standard library would look for the end of a longer member for ever.

    Raises:
        EOFError, tarfile.TarError, ...: it is cut short or damaged.
        UserError: it holds links or sparse files.
    """
    tar: Any = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8")  # noqa: SIM115
    while (member := tar.next()) is not None:
        tar.members.clear()  # else all headers of a million files stay in memory
        cast(_Header, member).check_size()
        if member.size > most:
            raise EOFError
        kind = "a link" if member.islnk() or member.issym() else "a sparse file" if member.issparse() else ""
        if kind:
            raise UserError(
                f"{archive} holds {member.name!r}, {kind}, which is not followed in archives; unpack it and give the "
                f"folder"
            )
        if member.isfile():
            yield member


class _Window(io.RawIOBase):
    """A part of a file as a file of its own; several windows on one file may be read at the same time."""

    def __init__(self, file: BinaryIO, lock: threading.Lock, start: int, size: int) -> None:
        self.file, self.lock, self.start, self.size, self.at = file, lock, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence])
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with self.lock:
            self.file.seek(self.start + self.at)
            content = self.file.read(max(0, min(len(buffer), self.size - self.at)))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class Tar(FileTree):
    """A tar archive. Tar archives in it count as folders, as ILSVRC-2012 is distributed.

    Args:
        head: the first bytes of the file.
    """

    def __init__(self, path: Path, head: bytes) -> None:
        super().__init__(path)
        self.compression = next((name for start, name in COMPRESSIONS.items() if head.startswith(start)), "")
        self.kind = f"tar archive compressed by {self.compression}" if self.compression else "tar archive"
        self.lock, self.starts = threading.Lock(), dict[str, int]()

    @cached_property
    def file(self) -> BinaryIO:
        """The archive, expanded."""
        packed = self.opened.enter_context(open(self.path, "rb"))  # noqa: SIM115 (closed with the tree)
        if not self.compression:
            return packed
        expanded = self.opened.enter_context(temporary_file())
        with _EXPAND[self.compression](packed) as content:
            head = content.read(tarfile.BLOCKSIZE)
            self._check_inside(head)
            append(expanded, head)
            while block := content.read(1 << 20):
                append(expanded, block)
                if expanded.tell() > EXPANDED:
                    EXPANSION.check(expanded.tell() // max(1, self.path.stat().st_size), str(self.path))
        return expanded

    def _check_inside(self, head: bytes) -> None:
        """Raises :class:`UserError` where what was compressed is no tar archive."""
        try:
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")  # an old one is known by its checksum
        except tarfile.HeaderError as error:
            if not is_tar(head):
                raise UserError(
                    f"{self.path} is compressed by {self.compression}, but what is inside is no tar archive but "
                    f"{what_is(head)}; if it belongs to a data set, unpack it and give the folder"
                ) from error

    def _list(self) -> Iterator[Entry]:
        with self.readable("its list of files"):
            size = self.file.seek(0, io.SEEK_END)
        yield from self._files("", 0, size)

    def _files(self, prefix: str, start: int, size: int) -> Iterator[Entry]:
        with self.readable(prefix.rstrip("/") or "its list of files"):
            for member in _members(self._window(start, size), self.path, size):
                path = prefix + inside(self.path, member.name)
                place = start + member.offset_data
                if not prefix and path.endswith(".tar"):
                    yield from self._files(path.removesuffix(".tar") + "/", place, member.size)
                else:
                    self.starts[path] = place
                    yield Entry(path, member.size)

    def _window(self, start: int, size: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Window(self.file, self.lock, start, size), 1 << 16))

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        return self._window(self.starts[entry.path], entry.size)
