"""Tar archives as trees: plain ones, where every file lies at a known place, and compressed ones, read in passes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import EXPANDED, EXPANSION, EXTENDED_HEADER, image_bytes
from ifsl_bench.data.read.file_tree import Entry, FileTree, inside, is_tar, what_is

HELD = 1 << 26  # bytes of a file in a compressed archive that are kept in memory; a larger one goes to the disk
COMPRESSIONS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda packed: gzip.GzipFile(fileobj=packed)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
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
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"it holds {self.name!r}, a sparse file; unpack it and give the folder")
        return super()._proc_member(tar)  # type: ignore[misc]

    def check_size(self) -> None:
        """Raises :class:`tarfile.ReadError` where the next header would lie before this one."""
        if self.size < 0:
            raise tarfile.ReadError("a file of a size below zero; it is not to be trusted, get it again")


def _members(file: IO[bytes], archive: Path, mode: str, most: int) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """The regular files of an archive, to its end mark.

    Args:
        mode: "r:" for a file that can seek, "r|" for one that is read forward.
        most: bytes that it can hold; the standard library would look for the end of a longer member for ever.

    Raises:
        EOFError, tarfile.TarError, ...: it is cut short or damaged.
        UserError: it holds links or sparse files.
    """
    tar = tarfile.open(fileobj=file, mode=mode, tarinfo=_Header, encoding="utf-8")  # type: ignore[call-overload]  # noqa: SIM115
    while (member := tar.next()) is not None:
        tar.members.clear()  # else all headers of a million files stay in memory
        cast(_Header, member).check_size()
        if member.size > most:
            raise EOFError
        if member.islnk() or member.issym():
            raise UserError(
                f"{archive} holds {member.name!r}, a link to {member.linkname!r}; links in archives are not followed, "
                f"unpack it and give the folder"
            )
        if member.issparse():
            raise UserError(f"{archive} holds {member.name!r}, a sparse file; unpack it and give the folder")
        if member.isfile():
            yield member, tar


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
        if not count:
            return 0
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
        yield from self._files("", 0, self.path.stat().st_size)

    def _files(self, prefix: str, start: int, size: int) -> Iterator[Entry]:
        with self.readable(prefix.rstrip("/") or "its list of files"):
            for member, _ in _members(self._window(start, size), self.path, "r:", size):
                path = prefix + inside(self.path, member.name)
                place = start + member.offset_data
                if not prefix and path.endswith(".tar"):
                    yield from self._files(path.removesuffix(".tar") + "/", place, member.size)
                else:
                    self.starts[path] = place
                    yield Entry(path, member.size)

    def _window(self, start: int, size: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(Window(self.file, self.lock, start, size), 1 << 16))

    def open(self, entry: Entry) -> BinaryIO:
        _ = self.entries
        return self._window(self.starts[entry.path], entry.size)


class _Expanding(io.RawIOBase):
    """The content of a compressed file, read forward.

    Raises:
        UserError: it expands beyond all measure.
    """

    def __init__(self, content: Any, size: int, where: str) -> None:
        self.content, self.size, self.where, self.done = content, size, where, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count: int = self.content.readinto(buffer)
        self.done += count
        if self.done > EXPANDED:
            EXPANSION.check(self.done // max(1, self.size), self.where)
        return count


class CompressedTar(FileTree):
    """One pass lists the files; :meth:`scan` is one more, and so is each :meth:`open`."""

    random = False

    def __init__(self, path: Path, head: bytes) -> None:
        super().__init__(path)
        self.compression, self.expand = next(how for start, how in COMPRESSIONS.items() if head.startswith(start))
        self.kind = f"tar archive compressed by {self.compression}"
        self.size = path.stat().st_size
        self.most = max(EXPANDED, EXPANSION.most * self.size)

    def close(self) -> None:
        """Nothing stays open between passes."""

    @contextlib.contextmanager
    def _expanded(self) -> Iterator[IO[bytes]]:
        with open(self.path, "rb") as packed, self.expand(packed) as content:
            yield io.BufferedReader(_Expanding(content, self.size, str(self.path)), 1 << 16)

    def _check_inside(self) -> None:
        """Raises :class:`UserError` where what was compressed is no tar archive."""
        with self._expanded() as file:
            head = file.read(tarfile.BLOCKSIZE)
        with contextlib.suppress(tarfile.HeaderError):
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")  # an old one is known by its checksum
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
                for member, _ in _members(file, self.path, "r|", self.most):
                    yield Entry(inside(self.path, member.name), member.size)
                while file.read(1 << 20):  # the checksum of the compression comes last
                    pass

    def _files(self, wanted: Sequence[Entry]) -> Iterator[tuple[int, IO[bytes]]]:
        """The wanted files as they pass by."""
        places = {entry.path: i for i, entry in enumerate(wanted)}
        with self._expanded() as file:
            for member, tar in _members(file, self.path, "r|", self.most):
                if (i := places.pop(inside(self.path, member.name), None)) is not None:
                    yield i, cast(IO[bytes], tar.extractfile(member))
                if not places:
                    return

    def scan(self, wanted: Sequence[Entry]) -> Iterator[tuple[int, bytes]]:
        limit = image_bytes()
        for entry in wanted:
            limit.check(entry.size, self.where(entry))
        with self.readable("its files"):
            for i, content in self._files(wanted):
                yield i, content.read()

    def open(self, entry: Entry) -> BinaryIO:
        with self.readable(entry):
            for _, content in self._files([entry]):
                held = tempfile.SpooledTemporaryFile(HELD)  # noqa: SIM115 (the caller closes it)
                shutil.copyfileobj(content, held, 1 << 20)
                held.seek(0)
                return cast(BinaryIO, held)
        raise UserError(f"{self.where(entry)} is not there any more")
