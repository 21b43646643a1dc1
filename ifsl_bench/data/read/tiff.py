"""Counts the values in the header of a TIFF, before Pillow makes an object of each."""

from __future__ import annotations

import struct

BYTES = {1, 2, 6, 7}  # types of tags that are kept as they are: bytes, text


def values(content: bytes) -> int:
    """Entries of the first directory, and the values of those that are no bytes; 0 where there is no TIFF header.

    What lies beyond the end of the file does not count: Pillow takes no more than there is.
    """
    form = content[:4]
    if form not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return 0
    order, big = "<" if form[:1] == b"I" else ">", b"+" in form
    first, number, entry = ("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")
    try:
        (at,) = struct.unpack_from(order + first, content, 8 if big else 4)
        (count,) = struct.unpack_from(order + number, content, at)
    except (struct.error, OverflowError):
        return 0
    size = struct.calcsize(order + entry)
    at += struct.calcsize(order + number)
    there = min(count, max(0, (len(content) - at) // size))
    total = there
    for i in range(min(there, 1 << 16)):
        _, kind, many = struct.unpack_from(order + entry, content, at + i * size)
        if kind not in BYTES:
            total += min(many, len(content))
    return total
