"""Zip archives: the standard library reads them, within bounds."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ifsl_bench.data.read.file_tree import BAD_CONTENT, Entry, FileTree, inside
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.limits import EXPANDED, EXPANSION, MEMBERS, ZIP_LIST

_HEADER = 30  # bytes of a member's own header, before its name


class _Listing(io.BufferedReader):
    """An archive that the standard library reads the list of members of: one too long is refused before it is parsed.

    Args:
        where: how errors call the archive.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(cast(io.RawIOBase, file))
        self.where = where

    def read(self, size: int | None = -1) -> bytes:
        ZIP_LIST.check(size or 0, self.where)
        content = super().read(size)
        MEMBERS.check(content.count(b"PK\x01\x02"), self.where)
        return content


def open_zip(file: BinaryIO, where: str) -> zipfile.ZipFile:
    """Opens an archive whose members may be read by several threads.

    Args:
        file: able to seek; it stays open as long as members are read.
        where: how errors call the archive.

    Raises:
        UserError: it has too many members.
        zipfile.BadZipFile, OSError, ...: it has no list of members, or they lie upon each other; see ``BAD_CONTENT``.
    """
    listing = _Listing(file, where)
    archive = zipfile.ZipFile(listing)
    listing.detach()
    archive.fp = file
    archive.NameToInfo.clear()  # a second list, which takes as much memory
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    places = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    for info, place in zip(infos, places, strict=True):
        if info.header_offset < 0 or info.header_offset + _HEADER + info.compress_size > place:
            raise zipfile.BadZipFile(f"{info.filename!r} lies upon another file")
    return archive


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> BinaryIO:
    """A member's content, which can seek; a step back reads it from its beginning once more.

    Raises:
        UserError: it expands beyond all measure, by what the list of members says.
    """
    if info.file_size > EXPANDED:
        EXPANSION.check(info.file_size // max(1, info.compress_size), where)
    return cast(BinaryIO, archive.open(info))


class Zip(FileTree):
    kind = "zip archive"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.members: dict[str, zipfile.ZipInfo] = {}
        file = self.opened.enter_context(open(path, "rb"))  # noqa: SIM115 (closed with the tree)
        try:
            self.archive = open_zip(file, str(path))
        except (UserError, *BAD_CONTENT) as error:
            self.opened.close()
            if isinstance(error, UserError):
                raise
            reason = str(error) if "lies upon" in str(error) else "it has no list of files at its end"
            raise UserError(
                f"{path} ({path.stat().st_size:,} bytes) begins as a zip archive, but {reason}: "
                f"it is cut short or damaged; get it again"
            ) from error

    def _list(self) -> Iterator[Entry]:
        for member in self.archive.infolist():
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
        return open_member(self.archive, self.members[entry.path], self.where(entry))
