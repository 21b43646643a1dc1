"""Compressed streams as files: no more is expanded at a time than was asked for, whatever the file says."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol

from ifsl_bench.common.limits import EXPANDED, EXPANSION, UNPACKING

_BLOCK = 1 << 16


class Decompressor(Protocol):
    """What the standard library's ``bz2`` and ``lzma`` have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class Inflate:
    """``zlib``'s decompressor in the form that the other two have."""

    def __init__(self, wbits: int) -> None:
        self._machine = zlib.decompressobj(wbits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._machine.eof

    @property
    def unused_data(self) -> bytes:
        return self._machine.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        try:
            out = self._machine.decompress(self._machine.unconsumed_tail + data, max_length)
        except zlib.error as error:
            raise zlib.error("CRC check failed") if "data check" in str(error) else error from None
        self.needs_input = not self._machine.unconsumed_tail and len(out) < max_length
        return out


def xz() -> Decompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=UNPACKING.most)


def zip_lzma(packed: BinaryIO, size: int) -> Decompressor:
    """LZMA as zip archives have it, from the head of a member on; ``size`` is that of the content."""
    head = packed.read(9)  # two bytes of version, the length of the properties, and the five of them
    if len(head) < 9:
        raise EOFError
    if head[2:4] != b"\x05\x00":
        raise lzma.LZMAError("properties of unknown length")
    machine = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=UNPACKING.most)
    machine.decompress(head[4:] + b"\xff" * 8, 0)  # the size is not said: some archivers write an end mark, others none
    return machine


BEGIN: dict[str, Callable[[], Decompressor]] = {
    "gzip": lambda: Inflate(31),
    "bzip2": bz2.BZ2Decompressor,
    "xz": xz,
}


class Expanding(io.RawIOBase):
    """What a compressed stream holds, read forward.

    Args:
        packed: the compressed stream, from its beginning; closed with this one.
        machine: the decompressor of its first part.
        where: how errors call it.
        again: makes one for each further part; None where there is none, and what follows is left alone.
        size: bytes of the compressed stream, to which what comes out is held; None where another bound holds.

    Raises:
        EOFError: it ends early.
        UserError: it expands beyond all measure.
    """

    def __init__(
        self,
        packed: BinaryIO,
        machine: Decompressor,
        where: str,
        again: Callable[[], Decompressor] | None = None,
        size: int | None = None,
    ) -> None:
        self.packed, self.machine, self.where, self.again, self.size = packed, machine, where, again, size
        self.done = 0
        self.ended = False

    def close(self) -> None:
        self.packed.close()
        super().close()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.done

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = b""
        while len(buffer) and not content and not self.ended:
            content = self._next(len(buffer))
        buffer[: len(content)] = content
        self.done += len(content)
        if self.size is not None and self.done > EXPANDED:
            EXPANSION.check(self.done // max(1, self.size), self.where)
        return len(content)

    def _next(self, most: int) -> bytes:
        if not self.machine.eof:
            data = self.packed.read(_BLOCK) if self.machine.needs_input else b""
            if self.machine.needs_input and not data:
                raise EOFError
            return self.machine.decompress(data, most)
        rest = self.machine.unused_data.lstrip(b"\0")  # zeros may fill up the end
        while self.again and not rest and (data := self.packed.read(_BLOCK)):
            rest = data.lstrip(b"\0")
        if not rest or self.again is None:
            self.ended = True
            return b""
        self.machine = self.again()
        return self.machine.decompress(rest, most)
