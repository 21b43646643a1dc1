"""Zip archives as trees. The standard library reads their list; what they hold is read here, in bounded pieces."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import EXPANDED, EXPANSION, MEMBERS, ZIP_LIST, image_bytes
from ifsl_bench.data.read.expanding import Decompressor, Expanding, Inflate, zip_lzma
from ifsl_bench.data.read.file_tree import Entry, FileTree, inside
from ifsl_bench.data.read.tarball import Window

_HEADER = 30  # bytes of a member's own header, before its name
_END, _LOCATOR, _END_64 = 22, 20, 56  # bytes of what stands at the end of an archive, and of a large one before that
# What the standard library raises on a list of files that is none.
BAD_LIST = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, struct.error, LookupError,
            OverflowError, AssertionError, RuntimeError, zlib.error, lzma.LZMAError)  # fmt: skip


class ZipMembers:
    """The members of an open zip archive; several may be read at the same time.

    Args:
        file: able to seek.
        where: how errors call it.

    Raises:
        UserError: it has too many members, or they lie upon each other.
        zipfile.BadZipFile, OSError, ...: see :data:`BAD_LIST`; it has no list of files.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.file, self.where, self.lock = file, where, threading.Lock()
        self.bytes = file.seek(0, os.SEEK_END)
        start = _list_start(file, self.bytes)
        ZIP_LIST.check(self.bytes - start, where)
        MEMBERS.check(_at_most(file, start), where)
        with zipfile.ZipFile(file) as archive:
            self.infos: Sequence[zipfile.ZipInfo] = archive.infolist()
            end = archive.start_dir
        del archive  # and its second list, by names
        ordered = sorted(self.infos, key=lambda info: info.header_offset)
        for this, place in zip(ordered, [info.header_offset for info in ordered[1:]] + [end], strict=True):
            if this.header_offset < 0 or this.header_offset + _HEADER + this.compress_size > place:
                raise zipfile.BadZipFile(f"{this.filename!r} lies upon another file")

    def window(self, info: zipfile.ZipInfo) -> Window:
        """The member's content as it is packed.

        Raises:
            RuntimeError: it is encrypted.
            zipfile.BadZipFile: it is not where the list says.
        """
        if info.flag_bits & 1:
            raise RuntimeError("a password is required")
        with self.lock:
            self.file.seek(info.header_offset)
            header = self.file.read(_HEADER)
        if len(header) < _HEADER or not header.startswith(b"PK\x03\x04"):
            raise zipfile.BadZipFile("no file begins where the list of files says")
        start = info.header_offset + _HEADER + sum(struct.unpack("<HH", header[26:]))
        if start + info.compress_size > self.bytes:
            raise EOFError
        return Window(self.file, self.lock, start, info.compress_size)

    def check_expansion(self, info: zipfile.ZipInfo, name: str) -> None:
        """Raises :class:`UserError` where a member, by what the list says, expands beyond all measure."""
        if info.file_size > EXPANDED:
            EXPANSION.check(info.file_size // max(1, info.compress_size), name)

    def open(self, info: zipfile.ZipInfo, name: str) -> BinaryIO:
        """A member's content, which can seek; a step back reads it from its beginning once more.

        Args:
            name: how errors call it.
        """
        self.check_expansion(info, name)
        window = self.window(info)
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise zipfile.BadZipFile("it is stored, but not in its size")
        if info.compress_type not in _METHODS:
            raise NotImplementedError(f"compression method {info.compress_type}")
        return cast(BinaryIO, io.BufferedReader(_Content(window, info, name), 1 << 16))


def _stored(packed: BinaryIO, size: int) -> None:
    return None


_METHODS: dict[int, Callable[[BinaryIO, int], Decompressor | None]] = {
    zipfile.ZIP_STORED: _stored,
    zipfile.ZIP_DEFLATED: lambda packed, size: Inflate(-15),
    zipfile.ZIP_BZIP2: lambda packed, size: bz2.BZ2Decompressor(),
    zipfile.ZIP_LZMA: zip_lzma,
}


class _Content(io.RawIOBase):
    """What a member holds; its size and checksum are compared where it is read in order to its end."""

    def __init__(self, window: Window, info: zipfile.ZipInfo, name: str) -> None:
        self.window, self.info, self.name = window, info, name
        self.source: io.RawIOBase = window
        self.at = self.crc = 0
        self._begin()

    def _begin(self) -> None:
        self.window.seek(0)
        self.at = self.crc = 0
        machine = _METHODS[self.info.compress_type](cast(BinaryIO, self.window), self.info.file_size)
        packed = cast(BinaryIO, self.window)
        self.source = self.window if machine is None else Expanding(packed, machine, self.name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self.info.file_size
        to = min(size, max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: size}[whence]))
        if to < self.at:
            self._begin()
        while self.at < to and self.read(min(to - self.at, 1 << 18)):
            pass
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.info.file_size - self.at)
        if wanted <= 0:
            return 0
        content = self.source.read(wanted) or b""
        if not content:
            raise EOFError
        buffer[: len(content)] = content
        self.at += len(content)
        self.crc = zlib.crc32(content, self.crc)
        if self.at == self.info.file_size and self.crc != self.info.CRC:
            raise zipfile.BadZipFile("wrong CRC")
        return len(content)


def _list_start(file: BinaryIO, size: int) -> int:
    """Where the list of files, and what follows it, begins at the earliest, found as the standard library finds it.

    Of what contradicts itself the longest list counts: versions of Python differ in what they believe.
    """
    begin = max(0, size - (1 << 16) - _END)
    file.seek(begin)
    tail = file.read()
    plain = tail[-_END:].startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")  # without a comment
    end = len(tail) - _END if plain else tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + _END:
        return size  # no archive; opening it says so
    (length,) = struct.unpack("<L", tail[end + 12 : end + 16])
    usual = begin + end - _LOCATOR - _END_64
    file.seek(max(0, usual))
    before = file.read(_LOCATOR + _END_64)
    places = [usual]
    if locator := before[_END_64:].startswith(b"PK\x06\x07"):
        places.append(min(struct.unpack("<Q", before[_END_64 + 8 :][:8])[0], size))
    starts = []
    for place in places if locator else ():
        file.seek(max(0, place))
        if (record := file.read(_END_64)).startswith(b"PK\x06\x06") and len(record) == _END_64:
            starts.append(place - struct.unpack("<Q", record[40:48])[0])
    if not starts or length < (1 << 32) - 1:  # which says that the length is in such a record
        starts.append(usual - length)
    return max(0, min(starts))


def _at_most(file: BinaryIO, start: int) -> int:
    """How many members the list that begins there may have, counted without reading it as one."""
    file.seek(start)
    count, last = 0, b""
    while block := file.read(1 << 20):
        count += (last + block).count(b"PK\x01\x02")
        last = block[-3:]
    return count


class Zip(FileTree):
    kind = "zip archive"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = open(path, "rb")  # noqa: SIM115 (closed by close)
        try:
            self.archive = ZipMembers(self.file, str(path))
        except BAD_LIST as error:
            self.file.close()
            said = str(error) if "lies upon" in str(error) else "it has no list of files at its end"
            raise UserError(
                f"{path} ({path.stat().st_size:,} bytes) begins as a zip archive, but {said}: "
                f"it is cut short or damaged; get it again"
            ) from error
        except BaseException:
            self.file.close()
            raise
        self.members: dict[str, zipfile.ZipInfo] = {}

    def close(self) -> None:
        self.file.close()

    def _list(self) -> Iterator[Entry]:
        for member in self.archive.infos:
            path = inside(self.path, member.filename)
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
        return self.archive.open(self.members[entry.path], self.where(entry))

    def read(self, entry: Entry) -> bytes:
        """As the others do, but fast where there are many small ones."""
        _ = self.entries
        member = self.members[entry.path]
        image_bytes().check(entry.size, self.where(entry))
        if (
            member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            or member.compress_size > 2 * entry.size + 1024
        ):
            return super().read(entry)
        with self.readable(entry):
            self.archive.check_expansion(member, self.where(entry))
            content = self.archive.window(member).read(member.compress_size) or b""
            if len(content) < member.compress_size:
                raise EOFError
            if member.compress_type == zipfile.ZIP_DEFLATED:
                content = zlib.decompressobj(-15).decompress(content, entry.size + 1)
            if len(content) != entry.size or zlib.crc32(content) != member.CRC:
                raise zipfile.BadZipFile("wrong CRC")
        return content
