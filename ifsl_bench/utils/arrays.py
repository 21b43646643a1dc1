"""Arrays on disk: .npy files that are filled and read through memory maps, and read without trusting their headers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import disk_errors, read_errors

_LONGEST = 1024  # bytes of a header; those of our arrays have 118


def create_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """A new .npy file to fill through a memory map, its room on the disk reserved.

    Without the reservation a full disk would show only when a page is written, as a killing signal and no error.
    """
    with disk_errors(path):
        array: np.memmap = npy.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
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


def releasing(array: np.ndarray) -> Callable[[int], None]:
    """A function to be told of bytes as they are written to an array, which releases it after each 64 MB."""
    held = 0

    def written(count: int) -> None:
        nonlocal held
        held += count
        if held >= 1 << 26:
            release(array)
            held = 0

    return written


def open_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A read-only memory map of a .npy file that was written as an array of that shape and type.

    The header must say so, and the file must have the size that follows; the content is not looked at.

    Raises:
        CorruptFile: it is missing, or is something else.
        UserError: it may not be read.
    """
    try:
        with read_errors(path):
            array: np.memmap = npy.open_memmap(path, mode="r", max_header_size=_LONGEST)
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    except UserError:
        raise
    except Exception as error:  # of many kinds, from a text that Python's parser is given
        raise CorruptFile(f"{path} is cut short or has a damaged header ({error})") from error
    if (array.shape, array.dtype, array.flags.c_contiguous) != (tuple(shape), np.dtype(dtype), True):
        raise CorruptFile(f"{path} has another header than was written: it is no {dtype}{list(shape)}")
    if (size := path.stat().st_size) != (whole := array.offset + array.nbytes):
        raise CorruptFile(f"{path} has {size} bytes, {whole} were written: it is changed")
    return array
