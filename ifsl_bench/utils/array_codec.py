"""Arrays as text, for JSON files: short where a list of numbers would be long.

A packed array is one line of three words, as in ``u2 100000 eNrt...``: the kind of its numbers, how many there are, and
in base64 the zlib stream of their bytes, which ends with a checksum. The least significant bytes of all numbers come
first, then the next ones of all, since bytes of one significance are alike and compress well. Kinds are ``u1`` to
``u4``, whole numbers from 0 of one to four bytes; ``i8``, whole numbers; ``f2``, ``f4`` and ``f8``, IEEE 754 numbers.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Collection

import numpy as np

COUNTS = ("u1", "u2", "u3", "u4")
KINDS = (*COUNTS, "i8", "f2", "f4", "f8")
_WORDS = re.compile(r"([uif][1-8]) (0|[1-9][0-9]{0,9}) ([A-Za-z0-9+/]*={0,2})")


def width(most: int) -> int:
    """Bytes of a whole number from 0 to ``most``."""
    return max(1, (int(most).bit_length() + 7) // 8)


def pack(values: np.ndarray) -> str:
    """An array [n] of numbers, bit by bit; whole numbers in as few bytes as the largest needs."""
    if values.dtype.kind == "f":
        kind = f"f{values.itemsize}"
    else:
        values = values.astype(np.int64)
        small = not len(values) or (values.min() >= 0 and values.max() < 1 << 32)
        kind = f"u{width(values.max(initial=0))}" if small else "i8"
    if kind not in KINDS:
        raise ValueError(f"numbers of kind {kind} are not packed")
    planes = values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(len(values), values.itemsize)
    raw = np.ascontiguousarray(planes[:, : int(kind[1])].T).tobytes()
    stream = zlib.compressobj(9, strategy=zlib.Z_FILTERED)  # counts scatter: codes of single bytes are the shortest
    return f"{kind} {len(values)} {base64.b64encode(stream.compress(raw) + stream.flush()).decode()}"


def length(text: str) -> int:
    """Reads how many numbers a packed array says that it has; raises :class:`ValueError` for what is none."""
    return int(_words(text)[1])


def unpack(text: str, most: int, kinds: Collection[str] = KINDS) -> np.ndarray:
    """The array in a text that may be a stranger's; whole numbers as int64.

    Args:
        most: how many numbers it may have; no more memory is taken than these need.
        kinds: that it may be of.

    Raises:
        ValueError: it is no packed array of these; says why.
    """
    kind, count, data = _words(text)
    n, each = int(count), int(kind[1])
    if kind not in kinds:
        raise ValueError(f"it holds numbers of kind {kind}, where {' or '.join(kinds)} was expected")
    if n > most:
        raise ValueError(f"it has {n:,} numbers, more than {most:,}")
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(base64.b64decode(data, validate=True), n * each + 1)
    except (ValueError, zlib.error) as error:  # the former of base64
        raise ValueError(f"it is damaged ({error})") from None
    if len(raw) != n * each or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not hold the {n:,} numbers that it says")
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(each, n)
    if kind[0] == "u":
        return sum((planes[i].astype(np.int64) << 8 * i for i in range(each)), np.zeros(n, dtype=np.int64))
    return np.ascontiguousarray(planes.T).view(f"<{kind}").reshape(n).astype(kind, copy=False)


def _words(text: str) -> tuple[str, str, str]:
    match = _WORDS.fullmatch(text)
    if match is None:
        raise ValueError("it is no packed array: a kind of number, a count, and base64 were expected")
    return match[1], match[2], match[3]
