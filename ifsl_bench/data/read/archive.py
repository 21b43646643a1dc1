"""Folders and archives as one thing, opened by what they are and not by what they are called.

A folder, a zip archive, a tar archive (also one of tar archives, as ILSVRC-2012 is distributed) and a tar archive
compressed by gzip, bzip2 or xz.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ifsl_bench.data.read.file_tree import Entry, FileTree, is_hidden, is_tar, mapped, what_is
from ifsl_bench.data.read.tarball import COMPRESSIONS, Tar
from ifsl_bench.data.read.zipped import Zip
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json


def open_tree(path: Path) -> FileTree:
    """Opens a folder or an archive.

    Raises:
        UserError: there is no such thing, or it is no archive, or a damaged one; the message says what it really is.
    """
    if os.path.isdir(path):
        return _Folder(path)
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return Zip(path)
    if is_tar(head) or head.startswith(tuple(COMPRESSIONS)):
        return Tar(path, head)
    raise UserError(
        f"{path} is neither a folder nor a zip or tar archive (of gzip, bzip2 or xz at most); it is {what_is(head)}"
    )


class _Folder(FileTree):
    kind = "folder"

    def where(self, entry: Entry | str) -> str:
        return str(self.path / (entry if isinstance(entry, str) else entry.path))

    def _list(self) -> Iterator[Entry]:
        # Links are followed, since people build data sets of them; one that leads back up ends there.
        waiting: list[tuple[str, str, frozenset[tuple[int, int]]]] = [("", str(self.path), frozenset())]
        while waiting:
            prefix, folder, above = waiting.pop()
            with self.readable(prefix):
                status = os.stat(folder)
                me = (status.st_dev, status.st_ino)
                if me in above:
                    continue
                with os.scandir(folder) as items:
                    for item in items:
                        if is_hidden(item.name):  # not looked into, however much is in it
                            continue
                        try:
                            file = item.stat()
                        except OSError:
                            if not item.is_symlink():
                                raise
                            # A broken link is no reason to stop before somebody asks for the file.
                            yield Entry(prefix + item.name, 0, lost=True)
                            continue
                        if stat.S_ISDIR(file.st_mode):
                            waiting.append((f"{prefix}{item.name}/", item.path, above | {me}))
                        elif stat.S_ISREG(file.st_mode):
                            yield Entry(prefix + item.name, file.st_size, file.st_mtime_ns)

    def open(self, entry: Entry) -> BinaryIO:
        return open(self.path / entry.path, "rb")

    def mapped(self, entry: Entry) -> mmap.mmap | bytes:
        with self.readable(entry), self.open(entry) as file:
            return mapped(file)

    def identity(self) -> str:
        return sha256_json([str(self.path.resolve()), [[e.path, e.size, e.changed] for e in self.entries]])
