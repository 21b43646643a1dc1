"""Arrays that stay in the file that holds them until their rows are asked for."""

from __future__ import annotations

import codecs
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.read.file_tree import BAD_CONTENT

_CHUNK = 1 << 20
_AXES = 32  # as many as every NumPy allows


@dataclass(frozen=True, slots=True)
class Span:
    """The content of a long string, left where it is: ``length`` bytes of the file from ``start``; ``utf8`` where they
    are the UTF-8 of its Latin-1 text."""

    start: int
    length: int
    utf8: bool = False

    def pieces(self, file: BinaryIO) -> Iterator[bytes]:
        """The string's bytes in order, about a MiB at a time."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        file.seek(self.start)
        rest = self.length
        while rest:
            piece = file.read(min(_CHUNK, rest))
            if not piece:
                raise EOFError(f"the file ends {rest:,} bytes before the end of an array")
            rest -= len(piece)
            yield decoder.decode(piece, rest == 0).encode("latin-1") if self.utf8 else piece


class StoredArray:
    """An array inside an open file; nothing of a long one is in memory before it is read.

    Attributes:
        shape: its shape; (0,) for one that is not defined.
        dtype: its NumPy type, one without objects.
    """

    __slots__ = ("_axes", "_file", "_name", "_raw", "_stored", "dtype", "shape")

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self.define(np.dtype("u1"), (0,), False, b"")

    def define(
        self,
        dtype: np.dtype,
        shape: tuple[int, ...],
        by_columns: bool,
        raw: bytes | Span,
        axes: tuple[int, ...] = (),
    ) -> None:
        """Says what it holds.

        Args:
            axes: the transposition that follows the reshaping to ``shape``, if any.

        Raises:
            ValueError: no such array, or the content does not have the size of the shape.
        """
        if not (isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError("an array whose shape is no tuple of whole numbers")
        if axes and not (all(type(a) is int for a in axes) and sorted(axes) == list(range(len(shape)))):
            raise ValueError(f"axes that do not belong to an array {list(shape)}")
        if by_columns and len(shape) > 1:  # the columns of an array are the rows of its transpose
            shape, axes = shape[::-1], tuple(range(len(shape)))[::-1]
        # NumPy counts so, and makes no array beyond this even where an axis of length 0 leaves it empty.
        if len(shape) > _AXES or math.prod(n or 1 for n in shape) * dtype.itemsize > sys.maxsize or not dtype.itemsize:
            raise ValueError("an array of a type or shape that cannot be")
        self.dtype, self._stored, self._axes, self._raw = dtype, shape, axes, raw
        self.shape = tuple(shape[a] for a in axes) if axes else shape
        span = raw if isinstance(raw, Span) else Span(0, len(raw))
        if span.length < self.nbytes or (span.length > self.nbytes and not span.utf8):  # which takes more room
            raise ValueError(f"{span.length:,} bytes for an array {dtype}{list(self.shape)}")

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
        if isinstance(self._raw, bytes):
            flat = np.frombuffer(self._raw, self.dtype)
        else:
            (flat,) = self._filled([math.prod(self.shape)])
        shaped = flat.reshape(self._stored)
        return shaped.transpose(self._axes) if self._axes else shaped

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """The array in order, ``rows`` rows at a time (the last block has what is left).

        An array that is not stored row by row is read as a whole first.

        Raises:
            UserError: the file is damaged.
        """
        starts = range(0, len(self), rows)
        if isinstance(self._raw, bytes) or self._axes:
            whole = self.read()
            yield from (whole[start : start + rows] for start in starts)
        else:
            width = math.prod(self.shape[1:])
            for block in self._filled([min(rows, len(self) - start) * width for start in starts]):
                yield block.reshape(-1, *self.shape[1:]) if width else np.empty((rows, *self.shape[1:]), self.dtype)

    def _filled(self, counts: list[int]) -> Iterator[np.ndarray]:
        """Its values in flat arrays of so many, straight from the file."""
        assert isinstance(self._raw, Span)
        try:
            pieces, piece = self._raw.pieces(self._file), memoryview(b"")
            for count in counts:
                block = np.empty(count, self.dtype)
                target = block.view("u1").data
                while target:
                    piece = piece or memoryview(next(pieces))
                    step = min(len(piece), len(target))
                    target[:step], target, piece = piece[:step], target[step:], piece[step:]
                yield block
            if piece or any(pieces):
                raise ValueError("more bytes than its shape has")
        except (*BAD_CONTENT, StopIteration) as error:
            raise UserError(
                f"{self._name} is damaged: an array {self.dtype}{list(self.shape)}: "
                f"{error or 'fewer bytes than its shape has'}"
            ) from error
