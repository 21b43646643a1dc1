"""Arrays of .npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO

import numpy as np

from ifsl_bench.data.read.file_tree import some, what_is
from ifsl_bench.data.read.zipped import open_member, open_zip
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import append, temporary_file


@contextmanager
def reading(failed: str, remedy: str = "") -> Iterator[None]:
    """Makes one line of whatever a library raises: what failed, why, and what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{failed} ({type(error).__name__}: {reason:.200}){remedy}") from error


def reading_file(kind: str, where: str) -> AbstractContextManager[None]:
    """Makes one line of what is raised on a file of some kind, which is then damaged."""
    return reading(f"{where} is no readable {kind} file: it is damaged", "; download or copy it again")


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


def npz_arrays(file: BinaryIO, where: str, *names: str) -> dict[str, np.ndarray]:
    """Arrays of a .npz file, each mapped from a copy in the folder for temporary files.

    Args:
        file: able to seek.
        where: how errors call it.
        names: of the arrays.

    Raises:
        UserError: the file is damaged, or an array is missing, or neither of numbers nor of strings.
    """
    with reading_file(".npz", where):
        archive = open_as(".npz", file, where)
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := sorted(set(names) - infos.keys()):
            has = some([info.filename[:40] for info in archive.infolist()], 6) or "nothing"
            raise UserError(f"{where} lacks {', '.join(map(repr, missing))}; it has {has}")
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            with (
                open_member(archive, infos[name], f"{name!r} of {where}") as member,
                temporary_file() as copy,  # gone afterwards, but for what is mapped of it
            ):
                while block := member.read(1 << 20):
                    append(copy, block)
                arrays[name] = np.lib.format.open_memmap(copy.name, mode="r")
            if arrays[name].dtype.kind not in "biufcSU":
                raise ValueError("an array of records or of Python objects; only numbers and strings are read")
    return arrays
