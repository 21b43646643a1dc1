"""Arrays of .npz files, left where they are."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import ARRAY_HEADER
from ifsl_bench.data.read.archive import some, what_is
from ifsl_bench.data.read.stored_array import Span, StoredArray
from ifsl_bench.data.read.zipped import open_member, open_zip

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def reading(kind: str, where: str) -> Iterator[None]:
    """Makes one line of whatever a library raises on a damaged file of that kind."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{where} is no readable {kind} file: it is damaged ({type(error).__name__}: {reason:.100}); "
            f"download or copy it again"
        ) from error


def open_as(kind: str, file: BinaryIO, where: str, hint: str = "download or copy it again") -> zipfile.ZipFile:
    """A zip archive that goes by another name.

    Args:
        hint: what to do where it is none.

    Raises:
        UserError: it is none, or two members have one name.
        Exception: it is damaged; see :func:`reading`.
    """
    head = file.read(512)
    if not head.startswith(b"PK"):
        raise UserError(f"{where} is no readable {kind} file but {what_is(head)}; {hint}")
    archive = open_zip(file, where)
    if len({info.filename for info in archive.infolist()}) < len(archive.infolist()):
        raise UserError(f"{where} holds two arrays of one name; get it again")
    return archive


class Npz:
    """An open .npz file.

    Args:
        file: able to seek; it stays open as long as arrays are used.
        where: how errors call it.

    Raises:
        UserError: it is none, or a damaged one.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.where = where
        with reading(".npz", where):
            self.archive = open_as(".npz", file, where)
        self.infos = {info.filename.removesuffix(".npy"): info for info in self.archive.infolist()}

    def need(self, *names: str) -> None:
        """Raises :class:`UserError` where an array is missing."""
        if missing := sorted(set(names) - self.infos.keys()):
            has = some([info.filename[:40] for info in self.archive.infolist()], 6) or "nothing"
            raise UserError(f"{self.where} lacks {', '.join(map(repr, missing))}; it has {has}")

    def array(self, name: str) -> StoredArray:
        """An array, still in the file.

        Raises:
            UserError: it is missing, damaged, or neither of numbers nor of strings.
        """
        self.need(name)
        info = self.infos[name]
        with reading(".npz", self.where):
            member = open_member(self.archive, info, f"{name!r} of {self.where}")
            read_header = _HEADERS[np.lib.format.read_magic(member)]
            shape, by_columns, dtype = read_header(member, max_header_size=ARRAY_HEADER.most)
            if dtype.kind not in "biufcSU":
                raise ValueError("an array of records or of Python objects; only numbers and strings are read")
            array = StoredArray(member, self.where)
            start = member.tell()
            array.define(dtype, shape, by_columns, Span(start, info.file_size - start))
        return array
