"""The stack machine behind :mod:`ifsl_bench.data.read.unpickle`: its state, its strings, and the names it knows."""

from __future__ import annotations

import codecs
import enum
import re
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import numpy as np

from ifsl_bench.common.limits import image_bytes
from ifsl_bench.data.read.stored_array import CHUNK, Kind, Span, StoredArray, decoder


class Refused(Exception):
    """Well-formed, but not what a data file may hold."""


class Name(enum.Enum):
    """What a pickle may name; none of it is imported or called."""

    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "numpy.core.multiarray._reconstruct"
    SCALAR = "numpy.core.multiarray.scalar"
    FROMBUFFER = "numpy.core.numeric._frombuffer"
    ENCODE = "_codecs.encode"  # how Python 3 writes bytes for Python 2
    BYTES = "builtins.bytes"  # and how it writes empty ones


_RENAMED = (("numpy._core.", "numpy.core."), ("__builtin__.", "builtins."))


def described(value: object) -> str:
    return "an array" if isinstance(value, StoredArray) else f"a {type(value).__name__}"


def _told(value: object) -> str:
    """A string as it is, anything else by its kind alone: writing out a tuple in tuples may exhaust the stack."""
    return repr(value) if isinstance(value, str) else described(value)


class _Dtype:
    """A NumPy type under construction: the byte order comes after the name."""

    def __init__(self, name: object) -> None:
        if not (isinstance(name, str) and re.fullmatch(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6}|\?)", name)):
            raise Refused(f"an array of type {_told(name)}; only numbers and strings are read")
        self.value = np.dtype(name)

    def set(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):
            raise Refused("an array of records; only numbers and strings are read")
        self.value = self.value.newbyteorder(">" if state[1] == ">" else "<")


class Machine:
    """Pickle's stack machine. ``stack`` is the innermost frame, ``frames`` those outside the last marks."""

    def __init__(self, file: BinaryIO, name: str, inline: int, skip: bool) -> None:
        self.file, self.name, self.inline, self.skip = file, name, inline, skip
        self.stack: list[Any] = []
        self.frames: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.recent: dict[int, bytes | bytearray] = {}  # the last long string, by its place
        self.ready: list[Any] = []  # complete items of the outermost list, where they are walked
        self.passed = 0  # bytes of the file that are not kept in memory
        self.sent = 0  # how many of the innermost frame's items have been ready before

    # -- reading

    def exactly(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def long(self, count: int) -> bytes | bytearray:
        """A long string, piece by piece: a false length in a damaged file must not claim that much memory."""
        if count <= CHUNK:
            return self.exactly(count)
        whole, limit = bytearray(), image_bytes()
        while len(whole) < count:
            limit.check(len(whole), f"an item of {self.name}")
            whole += self.exactly(min(CHUNK, count - len(whole)))
        return whole

    def number(self, width: int, signed: bool = False) -> int:
        if width > 1024:
            raise ValueError(f"a number of {width:,} bytes")
        return int.from_bytes(self.exactly(width), "little", signed=signed)

    def line(self) -> bytes:
        line = self.file.readline(self.inline + 2)
        if not line.endswith(b"\n"):
            raise EOFError if len(line) < self.inline else ValueError("a line without end")
        return line[:-1]

    def string(self, length: int, kind: Kind, convert: Callable[[bytes], Any]) -> Any:
        """A string of known length: its value, or its place in the file if it is long."""
        if length <= self.inline:
            return convert(self.exactly(length))
        span = Span(self.file.tell(), length, kind)
        self.passed += length
        if self.skip:
            self.file.seek(length, 1)
        else:
            self.keep(span, self.long(length))
        return span

    def text_line(self, kind: Kind, convert: Callable[[bytes], Any]) -> Any:
        """A string written as a line (protocol 0), which has to be read to find its end."""
        start = self.file.tell()
        line = self.file.readline(self.inline)
        if line.endswith(b"\n"):
            return convert(line[:-1])
        length, data = len(line), bytearray(line)
        while piece := self.file.readline(CHUNK):
            length += len(piece)
            if not self.skip:
                image_bytes().check(length, f"an item of {self.name}")
            data += b"" if self.skip else piece
            if piece.endswith(b"\n"):
                quote = 1 if kind == "quoted" else 0
                span = Span(start + quote, length - 1 - 2 * quote, kind)
                self.passed += length
                if not self.skip:
                    self.keep(span, data[quote : quote + span.length])
                return span
        raise EOFError

    def keep(self, span: Span, data: bytes | bytearray) -> None:
        """Keeps the bytes of the last long string, so that whoever wants them at once need not read them again."""
        self.recent.clear()
        self.recent[span.start] = data if span.kind == "bytes" else decoder(span.kind)(data, True)

    # -- the stack

    def mark(self) -> None:
        self.frames.append(self.stack)
        self.stack = []

    def popped(self) -> list[Any]:
        """What lies above the last mark."""
        values, self.stack = self.stack, self.frames.pop()
        return values

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        """Items for the list on top of the stack, which is the outermost value or one inside it."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"items for {described(target)}")
        if self.skip or self.frames or len(self.stack) > 1:
            target.extend(values)
        else:
            self.ready += values[self.sent :]
            self.sent = 0

    def append(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError(f"keys for {described(target)}")
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        target.update(zip(plain(pairs[::2], "keys"), pairs[1::2], strict=True))

    def add_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, set):
            raise ValueError(f"members for {described(target)}")
        target.update(plain(values, "members of a set"))

    def complete(self) -> None:
        """The array on top is complete: if it is an item of the outermost list, it can be taken."""
        if not self.skip and [len(frame) for frame in self.frames] in ([], [1]):
            own = self.stack if self.frames else self.stack[1:]
            if isinstance(self.frames[0][0] if self.frames else self.stack[0], list):
                self.ready += own[self.sent :]
                self.sent = len(own)

    # -- names and what is done with them

    def named(self, module: str, attribute: str) -> None:
        full = f"{module}.{attribute}"
        for new, old in _RENAMED:
            full = old + full[len(new) :] if full.startswith(new) else full
        try:
            self.stack.append(Name(full))
        except ValueError:
            raise Refused(
                f"the name {module}.{attribute}, which would run code or make an object when opened; data files hold "
                "arrays, lists, dicts, strings and numbers"
            ) from None

    def reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        if function is Name.DTYPE:
            self.stack.append(_Dtype(args[0]))
        elif function is Name.ENCODE:
            self.stack.append(_encoded(*args))
        elif function is Name.BYTES and args == ():
            self.stack.append(b"")
        elif function is Name.SCALAR and len(args) == 2:
            self.stack.append(np.frombuffer(cast(bytes, _raw(args[1])), args[0].value, 1).item())
        elif function is Name.RECONSTRUCT and args[0] is Name.NDARRAY:
            self.stack.append(StoredArray(self.file, self.name, self.recent))
        elif function is Name.FROMBUFFER:
            raw, dtype, shape, order, *axes = args
            array = StoredArray(self.file, self.name, self.recent)
            array.define(dtype.value, shape, order, _raw(raw), *(axes if order == "K" else ()))
            self.stack.append(array)
            self.complete()
        else:
            raise Refused(f"a call of {getattr(function, 'value', described(function))} with {len(args)} arguments")

    def persistent(self) -> None:
        """What a reference to something outside the pickle stands for."""
        raise Refused("a reference to something outside the file")

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Dtype):
            target.set(state)
        elif isinstance(target, StoredArray) and not target.defined:
            shape, dtype, by_columns, raw = state[-4:]  # before them a version, in all but the oldest
            target.define(dtype.value, shape, "F" if by_columns else "C", _raw(raw))
            self.complete()
        else:
            raise Refused(f"a state for {described(target)}")


def plain(values: list[Any], what: str) -> list[Any]:
    """Values that may be hashed. A tuple may hold tuples to any depth, and hashing it would exhaust the stack.

    Raises:
        Refused: one is neither a string nor a whole number.
    """
    for value in values:
        if not isinstance(value, (str, bytes, int)):
            raise Refused(f"{described(value)} among {what}, which are strings and whole numbers in data files")
    return values


def _encoded(text: object, encoding: object) -> bytes | Span:
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"text to be encoded as {_told(encoding)}")
    if isinstance(text, Span):
        return text
    if not isinstance(text, str):
        raise ValueError(f"text expected, found {described(text)}")
    return text.encode("latin-1")


def _raw(value: object) -> bytes | Span:
    """The content of an array; Python 2's strings have become text."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, (bytes, Span)):
        raise Refused("an array of Python objects")
    return value


def latin(data: bytes) -> str:
    return data.decode("latin-1")


def utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string without quotes")
    return latin(codecs.escape_decode(line[1:-1])[0])
