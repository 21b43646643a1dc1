"""Tar archives as trees: plain ones, where every file lies at a known place, and compressed ones, read in passes."""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import image_bytes
from ifsl_bench.data.read.expanding import BEGIN, Expanding
from ifsl_bench.data.read.file_tree import Entry, FileTree, inside, is_tar, what_is
from ifsl_bench.data.read.tar_headers import BLOCK, Damaged, Member, Stream, members

HELD = 1 << 26  # bytes of a file in a compressed archive that are kept in memory; a larger one goes to the disk
COMPRESSIONS: dict[bytes, str] = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}


class Window(io.RawIOBase):
    """A part of a file as a file of its own; several windows on one file may be read at the same time."""

    def __init__(self, file: IO[bytes], lock: threading.Lock, start: int, size: int) -> None:
        self.file, self.lock, self.start, self.size, self.at = file, lock, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence])
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
        window = io.BufferedReader(Window(self.file, self.lock, start, size), 1 << 16)
        where = prefix.rstrip("/") or "its list of files"
        with self.readable(where):
            for member in members(Stream(window, size), self.where(where)):
                path = prefix + inside(self.path, member.name)
                if not _is_file(self.path, member):
                    continue
                if member.start + member.size > size:
                    raise EOFError
                if not prefix and path.endswith(".tar"):
                    yield from self._members(path.removesuffix(".tar") + "/", start + member.start, member.size)
                else:
                    self.starts[path] = start + member.start
                    yield Entry(path, member.size)

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        window = Window(self.file, self.lock, self.starts[entry.path], entry.size)
        return cast(BinaryIO, io.BufferedReader(window, 1 << 16))


def _is_file(archive: Path, member: Member) -> bool:
    if member.link is not None:
        raise UserError(
            f"{archive} holds {member.name!r}, a link to {member.link!r}; links in archives are not followed, "
            f"unpack it and give the folder"
        )
    if member.sparse:
        raise UserError(f"{archive} holds {member.name!r}, a sparse file; unpack it and give the folder")
    return member.regular


class CompressedTar(FileTree):
    """One pass lists the files; :meth:`scan` is one more, and so is each :meth:`open`."""

    random = False

    def __init__(self, path: Path, head: bytes) -> None:
        super().__init__(path)
        self.compression = next(name for start, name in COMPRESSIONS.items() if head.startswith(start))
        self.kind = f"tar archive compressed by {self.compression}"

    def close(self) -> None:
        """Nothing stays open between passes."""

    @contextlib.contextmanager
    def _expanded(self) -> Iterator[IO[bytes]]:
        with open(self.path, "rb") as packed:
            size = self.path.stat().st_size
            begin = BEGIN[self.compression]
            raw = Expanding(packed, begin(), str(self.path), begin, size)
            with io.BufferedReader(raw, 1 << 16) as file:
                yield file

    def _check_inside(self) -> None:
        """Raises :class:`UserError` where what was compressed is no tar archive."""
        with self._expanded() as file:
            head = file.read(BLOCK)
        with contextlib.suppress(Damaged, EOFError):
            next(members(Stream(io.BytesIO(head)), str(self.path)), None)  # an old one is known by its checksum
            return
        if not is_tar(head):
            raise UserError(
                f"{self.path} is compressed by {self.compression}, but what is inside is no tar archive but "
                f"{what_is(head)}; if it belongs to a data set, unpack it and give the folder"
            )

    def _list(self) -> Iterator[Entry]:
        with self.readable("its list of files"):
            self._check_inside()
            with self._expanded() as file:
                for member in members(Stream(file), str(self.path)):
                    path = inside(self.path, member.name)
                    if _is_file(self.path, member):
                        yield Entry(path, member.size)
                while file.read(1 << 20):  # the checksum of the compression comes last
                    pass

    def _files(self, wanted: dict[str, int]) -> Iterator[tuple[int, Stream]]:
        """The wanted files as they pass by, each at its beginning."""
        left = dict(wanted)
        with self._expanded() as file:
            stream = Stream(file)
            for member in members(stream, str(self.path)):
                i = left.pop(inside(self.path, member.name), None) if _is_file(self.path, member) else None
                if i is not None:
                    yield i, stream
                if not left:
                    return

    def scan(self, wanted: Sequence[Entry]) -> Iterator[tuple[int, bytes]]:
        limit = image_bytes()
        for entry in wanted:
            limit.check(entry.size, self.where(entry))
        with self.readable("its files"):
            for i, stream in self._files({entry.path: i for i, entry in enumerate(wanted)}):
                yield i, stream.take(wanted[i].size)

    def open(self, entry: Entry) -> BinaryIO:
        with self.readable(entry):
            for _, stream in self._files({entry.path: 0}):
                small = entry.size <= HELD
                held: IO[bytes] = io.BytesIO() if small else tempfile.TemporaryFile()  # noqa: SIM115 (caller closes)
                for at in range(0, entry.size, 1 << 20):
                    held.write(stream.take(min(1 << 20, entry.size - at)))
                held.seek(0)
                return cast(BinaryIO, held)
        raise UserError(f"{self.where(entry)} is not there any more")
