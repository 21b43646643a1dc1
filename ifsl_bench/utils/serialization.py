"""Formats of files: JSON with a checksum over itself, arrays as text for JSON, and .npy files through memory maps."""

from __future__ import annotations

import base64
import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import read_json, sha256_json, translate_disk_errors, translate_read_errors, write_json

FORMAT_VERSION = 2  # of JSON files with a checksum
COUNT_KINDS = ("u1", "u2", "u3", "u4")
ARRAY_KINDS = (*COUNT_KINDS, "i8", "f2", "f4", "f8")
_PACKED_ARRAY_PATTERN = re.compile(r"([uif][1-8]) (0|[1-9][0-9]{0,9}) ([A-Za-z0-9+/]*={0,2})")
_MAX_HEADER_BYTES = 1024  # bytes of a .npy header; our arrays have headers of 118
_RELEASE_BLOCK_BYTES = 1 << 26  # bytes


# -- JSON with a checksum


def write_checksummed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Write a JSON object with its format and the SHA-256 of all of it.

    Args:
        path: the file.
        value: what ``json`` can write.

    Returns:
        The object as :func:`read_checksummed` reads it.
    """
    whole: dict[str, Any] = json.loads(json.dumps({**value, "format": FORMAT_VERSION}))
    write_json(path, {**whole, "checksum": sha256_json(whole)})
    return whole


def read_checksummed(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without its checksum, which is checked.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFile: it is damaged, or of another format.
        UserError: it may not be read.
    """
    value: dict[str, Any] = read_json(path)
    if value.get("format") != FORMAT_VERSION:
        raise CorruptFile(f"{path} is in format {value.get('format')!r:.40}, this version reads {FORMAT_VERSION}")
    if value.pop("checksum", None) != sha256_json(value):
        raise CorruptFile(f"{path} is not what was written: its checksum differs")
    return value


def check_value_types(path: Path, value: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check the types of a JSON object's values; a bool is no number.

    Args:
        path: the file, for the error.
        value: the object as JSON gave it, key -> value.
        kinds: key -> type, or a tuple of types.

    Raises:
        CorruptFile: a key is missing or its value is of another type.
    """
    for key, kind in kinds.items():
        content = value.get(key)
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if key not in value or not isinstance(content, allowed) or (isinstance(content, bool) and bool not in allowed):
            raise CorruptFile(f"{path} is damaged: {key} is {'missing' if key not in value else repr(content)[:40]}")


# -- arrays as text
#
# A packed array is one line of three words, as in ``u2 100000 eNrt...``: the kind of its numbers, their count, and in
# base64 the zlib stream of their bytes, which ends with a checksum. The least significant bytes of all numbers come
# first, then the next ones of all, since bytes of one significance are alike and compress well. Kinds are ``u1`` to
# ``u4``, whole numbers from 0 of one to four bytes; ``i8``, whole numbers; ``f2``, ``f4`` and ``f8``, IEEE 754 numbers.


def bytes_per_count(most: int) -> int:
    """Return the bytes of a whole number from 0 to ``most``."""
    return max(1, (int(most).bit_length() + 7) // 8)


def pack_array(values: np.ndarray) -> str:
    """Write an array [n] of numbers as text without loss; whole numbers take as few bytes as the largest needs."""
    if values.dtype.kind == "f":
        kind = f"f{values.itemsize}"
    else:
        values = values.astype(np.int64)
        small = not len(values) or (values.min() >= 0 and values.max() < 1 << 32)
        kind = f"u{bytes_per_count(values.max(initial=0))}" if small else "i8"
    if kind not in ARRAY_KINDS:
        raise ValueError(f"numbers of kind {kind} are not packed")
    planes = values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(len(values), values.itemsize)
    raw = np.ascontiguousarray(planes[:, : int(kind[1])].T).tobytes()
    stream = zlib.compressobj(9, strategy=zlib.Z_FILTERED)  # counts scatter: codes of single bytes are the shortest
    return f"{kind} {len(values)} {base64.b64encode(stream.compress(raw) + stream.flush()).decode()}"


def read_packed_length(text: str) -> int:
    """Return the count of numbers that a packed array states; raise :class:`ValueError` if it is not one."""
    return int(_split_packed_text(text)[1])


def unpack_array(text: str, most: int, kinds: Collection[str] = ARRAY_KINDS) -> np.ndarray:
    """Read a packed array, which may come from an untrusted file.

    Args:
        text: the packed array.
        most: the largest count that is read; no more memory is taken than these need.
        kinds: kinds of numbers that are read.

    Returns:
        The numbers [n]; whole ones as int64.

    Raises:
        ValueError: it is no packed array of these; the message names the reason.
    """
    kind, count, data = _split_packed_text(text)
    n, size = int(count), int(kind[1])
    if kind not in kinds:
        raise ValueError(f"it holds numbers of kind {kind}, where {' or '.join(kinds)} was expected")
    if n > most:
        raise ValueError(f"it has {n:,} numbers, more than {most:,}")
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(base64.b64decode(data, validate=True), n * size + 1)
    except (ValueError, zlib.error) as error:  # the former of base64
        raise ValueError(f"it is damaged ({error})") from None
    if len(raw) != n * size or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not hold the {n:,} numbers that it states")
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(size, n)
    if kind[0] == "u":
        return sum((planes[i].astype(np.int64) << 8 * i for i in range(size)), np.zeros(n, dtype=np.int64))
    return np.ascontiguousarray(planes.T).view(f"<{kind}").reshape(n).astype(kind, copy=False)


def _split_packed_text(text: str) -> tuple[str, str, str]:
    match = _PACKED_ARRAY_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("it is no packed array: a kind of number, a count, and base64 were expected")
    return match[1], match[2], match[3]


# -- .npy files


def create_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """Create a .npy file to fill through a memory map, its room on the disk reserved.

    Without the reservation a full disk would show only when a page is written, as a killing signal and no error.

    Args:
        path: the file.
        shape: of the array.
        dtype: of its numbers, as NumPy writes it.
    """
    with translate_disk_errors(path):
        array: np.memmap = npy.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        if hasattr(os, "posix_fallocate"):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def release_memory(array: np.ndarray) -> None:
    """Hand the memory of a memory-mapped array back to the system; its content stays, in the file.

    Pages of a map count as memory in use until they are handed back, so a long sequential pass calls this now and then.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def make_memory_releaser(array: np.ndarray) -> Callable[[int], None]:
    """Return a function that counts bytes as they are written to an array, and releases it after each 64 MB."""
    pending = 0

    def written(count: int) -> None:
        nonlocal pending
        pending += count
        if pending >= _RELEASE_BLOCK_BYTES:
            release_memory(array)
            pending = 0

    return written


def open_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Open a read-only memory map of a .npy file whose header and size are checked, and whose content is not read.

    Args:
        path: the file.
        shape: that it was written with.
        dtype: likewise.

    Raises:
        CorruptFile: it is missing, or is something else.
        UserError: it may not be read.
    """
    try:
        with translate_read_errors(path):
            array: np.memmap = npy.open_memmap(path, mode="r", max_header_size=_MAX_HEADER_BYTES)
    except FileNotFoundError:
        raise CorruptFile(f"{path} is missing") from None
    except (UserError, OSError):
        raise
    except Exception as error:  # of many kinds, from a text that Python's parser is given
        raise CorruptFile(f"{path} is cut short or has a damaged header ({error})") from error
    if (array.shape, array.dtype, array.flags.c_contiguous) != (tuple(shape), np.dtype(dtype), True):
        raise CorruptFile(f"{path} has another header than was written: it is no {dtype}{list(shape)}")
    size, whole = path.stat().st_size, array.offset + array.nbytes
    if size != whole:
        raise CorruptFile(f"{path} has {size} bytes, {whole} were written: it is changed")
    return array
