"""Arrays that stay in the file that holds them until their rows are asked for."""

from __future__ import annotations

import codecs
import lzma
import math
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal
from zipfile import BadZipFile

import numpy as np

from ifsl_bench.common.errors import UserError

CHUNK = 1 << 20
_AXES = 32  # as many as every NumPy allows
# What reading can raise on a damaged file or archive; the standard library has no common class for them.
BROKEN = (EOFError, OSError, BadZipFile, zlib.error, lzma.LZMAError)
# And on the header of an .npy file, which is read by Python's parser.
BAD_HEADER = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, RecursionError, MemoryError,
              struct.error)  # fmt: skip
Kind = Literal["bytes", "utf-8", "quoted", "unicode-escape"]


@dataclass(frozen=True)
class Span:
    """The content of a long string, left where it is: ``length`` bytes of the file from ``start``.

    ``kind`` says how the bytes of the string are written there: as they are, as the UTF-8 or the raw-unicode-escape of
    their Latin-1 text, or as Python 2 quotes a string.
    """

    start: int
    length: int
    kind: Kind

    def pieces(self, file: BinaryIO, name: str) -> Iterator[bytes]:
        """The string's bytes in order, about a MiB at a time."""
        decode = decoder(self.kind)
        file.seek(self.start)
        left = self.length
        while left:
            piece = file.read(min(CHUNK, left))
            if not piece:
                raise UserError(f"{name} is cut short: it ends {left:,} bytes before the end of an array")
            left -= len(piece)
            if decoded := decode(piece, left == 0):
                yield decoded


def decoder(kind: Kind) -> Callable[[bytes | bytearray, bool], bytes]:
    """A function of (next piece, whether it is the last) that gives the bytes they stand for."""
    if kind == "bytes":
        return lambda piece, last: bytes(piece)
    if kind == "utf-8":
        utf8 = codecs.getincrementaldecoder("utf-8")()
        return lambda piece, last: utf8.decode(piece, last).encode("latin-1")
    held = b""

    def unescape(piece: bytes | bytearray, last: bool) -> bytes:
        nonlocal held
        piece = held + piece
        cut = len(piece) if last else _before_escape(piece)
        piece, held = piece[:cut], piece[cut:]
        if kind == "quoted":
            return codecs.escape_decode(piece)[0]
        return piece.decode("raw-unicode-escape").encode("latin-1")

    return unescape


def _before_escape(piece: bytes) -> int:
    """Where to cut so that no escape (ten characters at most) is cut in two."""
    at = piece.rfind(b"\\", max(0, len(piece) - 9))
    first = at
    while first > 0 and piece[first - 1] == ord("\\"):
        first -= 1
    return at if at >= 0 and (at - first) % 2 == 0 else len(piece)  # the last of an even run is itself escaped


class StoredArray:
    """An array inside an open file; nothing of a long one is in memory before it is read.

    Attributes:
        shape: its shape.
        dtype: its NumPy type, one without objects.
    """

    __slots__ = ("_axes", "_file", "_name", "_raw", "_recent", "_stored", "defined", "dtype", "shape")

    def __init__(self, file: BinaryIO, name: str, recent: dict[int, bytes | bytearray]) -> None:
        """An array yet to be defined; ``recent`` maps places in the file to strings that are in memory by chance."""
        self._file, self._name, self._recent = file, name, recent
        self.defined = False
        self.dtype = np.dtype("u1")
        self.shape: tuple[int, ...] = ()
        self._raw: bytes | Span = b""

    def define(
        self, dtype: np.dtype, shape: tuple[int, ...], order: str, raw: bytes | Span, axes: tuple[int, ...] = ()
    ) -> None:
        """Says what it holds.

        Args:
            order: "C", or "F" for an array stored by columns.
            axes: the transposition that follows the reshaping to ``shape``, if any.

        Raises:
            ValueError: no such array, or the content does not have the size of the shape.
        """
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array whose shape is no tuple of whole numbers")
        if axes and not (all(type(a) is int for a in axes) and sorted(axes) == list(range(len(shape)))):
            raise ValueError(f"axes that do not belong to an array {list(shape)}")
        if order == "F" and len(shape) > 1:  # the columns of an array are the rows of its transpose
            shape, axes = shape[::-1], tuple(range(len(shape)))[::-1]
        self.dtype, self._stored, self._axes, self._raw = dtype, shape, axes, raw
        self.shape = tuple(shape[a] for a in axes) if axes else shape
        # NumPy counts so, and makes no array beyond this even where an axis of length 0 leaves it empty.
        if len(shape) > _AXES or math.prod(n or 1 for n in shape) * dtype.itemsize > sys.maxsize or not dtype.itemsize:
            raise ValueError("an array of a type or shape that cannot be")
        # Where the bytes are not written as they are, they take at least as much room.
        exact = not isinstance(raw, Span) or raw.kind == "bytes"
        size = raw.length if isinstance(raw, Span) else len(raw)
        if size < self.nbytes or (exact and size != self.nbytes):
            raise ValueError(f"{size:,} bytes for an array {dtype}{list(self.shape)}")
        self.defined = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def read(self) -> np.ndarray:
        """The whole array; a read-only view where its bytes are in memory already.

        Raises:
            UserError: the file is damaged.
        """
        if not self.defined:
            raise UserError(f"{self._name} is damaged: it has an array without content")
        held = self._raw if isinstance(self._raw, bytes) else self._recent.get(self._raw.start)
        if held is not None and len(held) == self.nbytes:
            flat = np.frombuffer(held, self.dtype)
        else:
            count = math.prod(self.shape)
            (flat,) = [*self._filled(count, count)] if count else [np.empty(0, self.dtype)]
        shaped = flat.reshape(self._stored)
        return shaped.transpose(self._axes) if self._axes else shaped

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """The array in order, ``rows`` rows at a time (the last block has what is left).

        An array that is not stored row by row is read as a whole first.

        Raises:
            UserError: the file is damaged.
        """
        if isinstance(self._raw, bytes) or self._axes:
            whole = self.read()
            yield from (whole[i : i + rows] for i in range(0, len(self), rows))
        else:
            width = math.prod(self.shape[1:])
            for block in self._filled(rows * width, len(self) * width):
                yield block.reshape(-1, *self.shape[1:])

    def _filled(self, count: int, total: int) -> Iterator[np.ndarray]:
        """The ``total`` values in flat arrays of ``count``, straight from the file."""
        assert isinstance(self._raw, Span)
        try:
            pieces = self._raw.pieces(self._file, self._name)
            piece = memoryview(b"")
            for start in range(0, total, count):
                block = np.empty(min(count, total - start), self.dtype)
                target, done = block.view("u1"), 0
                while done < len(target):
                    piece = piece or memoryview(next(pieces, b""))
                    if not piece:
                        raise ValueError("fewer bytes than its shape has")
                    step = min(len(piece), len(target) - done)
                    target[done : done + step] = np.frombuffer(piece[:step], "u1")
                    piece, done = piece[step:], done + step
                yield block
            if piece or any(pieces):
                raise ValueError("more bytes than its shape has")
        except (*BROKEN, ValueError) as error:
            raise UserError(f"{self._name} is damaged: an array {self.dtype}{list(self.shape)}: {error}") from error
