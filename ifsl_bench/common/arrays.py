"""Arrays on disk: .npy files that are filled and read through memory maps, and read without trusting their headers."""

from __future__ import annotations

import ast
import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import disk_errors, open_file, read_errors

_MAGIC = b"\x93NUMPY\x01\x00"  # version 1.0, which NumPy writes for every header that it can hold
_LONGEST = 1024  # bytes of a header; those of our arrays have 118


def create_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """A new .npy file to fill through a memory map, its room on the disk reserved.

    Without the reservation a full disk would show only when a page is written, as a killing signal and no error.
    """
    with disk_errors(path):
        array: np.memmap = open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        if hasattr(os, "posix_fallocate"):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def release(array: np.ndarray) -> None:
    """Hands the memory of a memory-mapped array back to the system; its content stays, in the file.

    Pages of a map count as memory in use until they are handed back, so a long sequential pass calls this now and then.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def open_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A read-only memory map of a .npy file that was written as an array of that shape and type.

    The header must say so to the letter, and the file must have the size that follows; the content is not looked at.

    Raises:
        CorruptFile: it is missing, or is something else.
        UserError: it may not be read.
    """
    try:
        with open_file(path) as file, read_errors(path):
            start, size = file.read(len(_MAGIC) + 2 + _LONGEST), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    magic, (length,) = start[: len(_MAGIC)], struct.unpack("<H", start[len(_MAGIC) :][:2].ljust(2, b"\0"))
    begin = len(_MAGIC) + 2 + length
    try:
        if magic != _MAGIC or begin > len(start):
            raise ValueError("it does not begin like one of ours")
        header = ast.literal_eval(start[len(_MAGIC) + 2 : begin].decode("latin-1"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise CorruptFile(f"{path} has a damaged header ({error})") from error
    kind = np.dtype(dtype)
    if header != {"descr": kind.str, "fortran_order": False, "shape": tuple(shape)}:
        raise CorruptFile(f"{path} has another header than was written: it is no {dtype}{list(shape)}")
    if size != (whole := begin + kind.itemsize * int(np.prod(shape, dtype=np.int64))):
        raise CorruptFile(f"{path} has {size} bytes, {whole} were written: it is cut short or changed")
    with read_errors(path):
        return np.memmap(path, kind, "r", begin, tuple(shape))
