"""Tar archives as trees: plain ones, where every file lies at a known place, and compressed ones, read in passes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.read.file_tree import Entry, FileTree, inside, is_tar, what_is

BLOCK = 512
HELD = 1 << 26  # bytes of a file in a compressed archive that are kept in memory; a larger one goes to the disk
COMPRESSIONS: dict[bytes, tuple[str, Callable[..., Any]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\x00": ("xz", lzma.open),
}


class _Window(io.RawIOBase):
    """A part of a file as a file of its own; several windows on one file may be read at the same time."""

    def __init__(self, file: IO[bytes], lock: threading.Lock, start: int, size: int) -> None:
        self.file, self.lock, self.start, self.size, self.at = file, lock, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.size - self.at))
        with self.lock:
            self.file.seek(self.start + self.at)
            content = self.file.read(count)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


class Tar(FileTree):
    """A tar archive that is not compressed. Tar archives in it count as folders, as ILSVRC-2012 is distributed."""

    kind = "tar archive"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self.lock = threading.Lock()
        self.starts: dict[str, int] = {}

    def close(self) -> None:
        self.file.close()

    def _list(self) -> Iterator[Entry]:
        yield from self._members("", 0, self.path.stat().st_size)

    def _members(self, prefix: str, start: int, size: int) -> Iterator[Entry]:
        window = io.BufferedReader(_Window(self.file, self.lock, start, size), 1 << 16)
        where = prefix.rstrip("/") or "its list of files"
        with self.readable(where), tarfile.open(fileobj=window, mode="r:") as archive:
            for member in archive:
                path = prefix + inside(self.path, member.name)
                if member.isreg() and not prefix and path.endswith(".tar"):
                    yield from self._members(path.removesuffix(".tar") + "/", start + member.offset_data, member.size)
                elif _is_file(self.path, member):
                    self.starts[path] = start + member.offset_data
                    yield Entry(path, member.size)
            window.seek(archive.offset)
            _check_end(window.read(BLOCK), self.where(where))

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        window = _Window(self.file, self.lock, self.starts[entry.path], entry.size)
        return cast(BinaryIO, io.BufferedReader(window, 1 << 16))


def _is_file(archive: Path, member: tarfile.TarInfo) -> bool:
    if member.issym() or member.islnk():
        raise UserError(
            f"{archive} holds {member.name!r}, a link to {member.linkname!r}; links in archives are not followed, "
            f"unpack it and give the folder"
        )
    if member.issparse():
        raise UserError(f"{archive} holds {member.name!r}, a sparse file; unpack it and give the folder")
    return member.isreg()


def _check_end(block: bytes, where: str) -> None:
    """Where the list of members ends there must be a block of zeros. Python takes anything else for the end, too."""
    if len(block) < BLOCK:
        raise UserError(f"cannot read {where}: it is cut short; get it again")
    if block.strip(b"\0"):
        raise UserError(f"cannot read {where}: it is damaged where a file should begin; get it again")


class _Remembering(io.RawIOBase):
    """Passes on what it reads, and remembers the end of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.tail, self.at = file, b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        self.tail = (self.tail + content)[-(1 << 15) :]
        self.at += len(content)
        return content

    def block(self, offset: int) -> bytes:
        """The block at an offset that was read lately."""
        while self.at < offset + BLOCK and self.read(BLOCK):
            pass
        start = offset - (self.at - len(self.tail))
        return self.tail[start : start + BLOCK] if start >= 0 else b""


class CompressedTar(FileTree):
    """One pass lists the files; :meth:`scan` is one more, and so is each :meth:`open`."""

    random = False

    def __init__(self, path: Path, head: bytes) -> None:
        super().__init__(path)
        self.compression, self.opener = next(f for start, f in COMPRESSIONS.items() if head.startswith(start))
        self.kind = f"tar archive compressed by {self.compression}"

    def close(self) -> None:
        """Nothing stays open between passes."""

    @contextlib.contextmanager
    def _pass(self, whole: bool = False) -> Iterator[tarfile.TarFile]:
        """The archive from its beginning; ``whole`` where it is read to its end, which is then checked."""
        with self.opener(self.path, "rb") as file:
            source = _Remembering(file)
            try:
                archive = tarfile.open(fileobj=source, mode="r|")  # noqa: SIM115
            except tarfile.ReadError as error:
                with self.opener(self.path, "rb") as again:  # raises where it is the compression that is damaged
                    head = again.read(BLOCK)
                if is_tar(head):
                    raise
                raise UserError(
                    f"{self.path} is compressed by {self.compression}, but what is inside is no tar archive but "
                    f"{what_is(head)}; if it belongs to a data set, unpack it and give the folder"
                ) from error
            with archive:
                yield archive
                if whole:
                    _check_end(source.block(archive.offset), self.where("its list of files"))
                    while source.read(1 << 20):  # the checksum of the compression comes last
                        pass

    def _list(self) -> Iterator[Entry]:
        with self.readable("its list of files"), self._pass(whole=True) as archive:
            for member in archive:
                path = inside(self.path, member.name)
                if _is_file(self.path, member):
                    yield Entry(path, member.size)

    def _files(self, archive: tarfile.TarFile, wanted: dict[str, int]) -> Iterator[tuple[int, IO[bytes]]]:
        """The wanted files as they pass by."""
        left = dict(wanted)
        for member in archive:
            i = left.pop(inside(self.path, member.name), None)
            if i is not None and (file := archive.extractfile(member)) is not None:
                yield i, file
            if not left:
                return

    def scan(self, wanted: Sequence[Entry]) -> Iterator[tuple[int, bytes]]:
        with self.readable("its files"), self._pass() as archive:
            for i, file in self._files(archive, {entry.path: i for i, entry in enumerate(wanted)}):
                yield i, file.read()

    def open(self, entry: Entry) -> BinaryIO:
        with self.readable(entry), self._pass() as archive:
            for _, file in self._files(archive, {entry.path: 0}):
                small = entry.size <= HELD
                held: IO[bytes] = io.BytesIO() if small else tempfile.TemporaryFile()  # noqa: SIM115 (caller closes)
                while block := file.read(1 << 20):
                    held.write(block)
                held.seek(0)
                return cast(BinaryIO, held)
        raise UserError(f"{self.where(entry)} is not there any more")
