"""Arrays of .npz files, left where they are; their headers are read without NumPy's parser, which is Python's."""

from __future__ import annotations

import ast
import re
import struct
from typing import BinaryIO

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import ARRAY_HEADER
from ifsl_bench.data.read.archive import what_is
from ifsl_bench.data.read.file_tree import some
from ifsl_bench.data.read.stored_array import BAD_HEADER, Span, StoredArray
from ifsl_bench.data.read.zipped import BAD_LIST, ZipMembers

_MAGIC = b"\x93NUMPY"
_TYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6}|\?)")


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
        try:
            head = file.read(512)
            if not head.startswith(b"PK"):
                raise UserError(f"{where} is no readable .npz file but {what_is(head)}; download or copy it again")
            self.members = ZipMembers(file, where)
        except BAD_LIST as error:
            raise UserError(
                f"{where} is no readable .npz file, it is damaged ({type(error).__name__}: {str(error)[:100]}); "
                "download or copy it again"
            ) from error
        self.infos = {info.filename.removesuffix(".npy"): info for info in self.members.infos}
        if len(self.infos) < len(self.members.infos):
            raise UserError(f"{where} holds two arrays of one name; get it again")

    def need(self, *names: str) -> None:
        """Raises :class:`UserError` where an array is missing."""
        if missing := sorted(set(names) - self.infos.keys()):
            has = some([info.filename[:40] for info in self.members.infos], 6) or "nothing"
            raise UserError(f"{self.where} lacks {', '.join(map(repr, missing))}; it has {has}")

    def array(self, name: str) -> StoredArray:
        """An array, still in the file.

        Raises:
            UserError: it is missing, damaged, or neither of numbers nor of strings.
        """
        self.need(name)
        info, what = self.infos[name], f"{name!r} of {self.where}"
        try:
            member = self.members.open(info, what)
            dtype, shape, by_columns = header(member, what)
            array = StoredArray(member, self.where, {})
            start = member.tell()
            array.define(dtype, shape, "F" if by_columns else "C", Span(start, info.file_size - start, "bytes"))
        except (*BAD_LIST, *BAD_HEADER) as error:
            raise UserError(
                f"{self.where} is no readable .npz file: {name!r} is damaged ({type(error).__name__}: "
                f"{str(error)[:100]}); download or copy it again"
            ) from error
        return array


def header(file: BinaryIO, what: str) -> tuple[np.dtype, tuple[int, ...], bool]:
    """Type, shape, and whether it is stored by columns, of the .npy file that begins here.

    Raises:
        ValueError, EOFError, ...: there is no such header; see ``BAD_HEADER``.
        UserError: it is too long.
    """
    start = file.read(8)
    if start[:6] != _MAGIC:
        raise ValueError(f"it is no .npy file but {what_is(start)}")
    width, kind = {1: (2, "<H"), 2: (4, "<I"), 3: (4, "<I")}.get(start[6] if len(start) > 6 else 0, (0, ""))
    if not width:
        raise ValueError("a version of .npy that nobody knows")
    (length,) = struct.unpack(kind, file.read(width))
    ARRAY_HEADER.check(length, what)
    said = ast.literal_eval(file.read(length).decode("utf-8" if start[6] == 3 else "latin-1").strip())
    if not isinstance(said, dict) or said.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header says something else than a type and a shape")
    descr, shape = said["descr"], said["shape"]
    if not (isinstance(descr, str) and _TYPE.fullmatch(descr)):
        kind_of = "of records or of Python objects" if not isinstance(descr, str) or "O" in descr else f"{descr[:40]!r}"
        raise ValueError(f"an array {kind_of}; only numbers and strings are read")
    if not isinstance(shape, tuple) or not isinstance(said["fortran_order"], bool):
        raise ValueError("a shape that is no tuple of whole numbers")
    return np.dtype(descr), shape, said["fortran_order"]
