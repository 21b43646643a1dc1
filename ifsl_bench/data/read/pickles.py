"""Pickles read without running anything in them.

A pickle is a program for a stack machine that may call any function it names. The standard library's machine runs it
here with an allow-list of the names in data files; it reads protocols 0 to 5 as Python 2 and 3, old and new NumPy write
them, and returns Python 2's strings as bytes. Long arrays are views of the file, so they are in memory only when they
are used; in protocol 0, and in files that Python 3 wrote for Python 2, they are in memory whole.
"""

from __future__ import annotations

import math
import mmap
import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import numpy as np

from ifsl_bench.data.read.archive import BAD_CONTENT_ERRORS, describe_file_kind
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.limits import PICKLE_BYTES, PICKLE_VALUES

INLINE_BYTES = 1 << 12  # bytes; longer strings stay in the file
_UNPICKLING_STEPS_OF_ARRAY = 30  # of an array in a list; they do not count
_PICKLE_BEGINNING_PATTERN = re.compile(
    rb"\x80[\x02-\x05]|\([(\]}lditcSVIFLN]|[\]}][q(.apr)]|c[A-Za-z_][\w.]*\n[A-Za-z_]"
)
_DTYPE_PATTERN = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6}|\?)")


class _RefusedError(Exception):
    """Well-formed, but not allowed in a data file."""


def describe_value(value: object) -> str:
    """Return the kind of a value; writing out a tuple nested deeply would exhaust the stack."""
    kind = "n array" if isinstance(value, np.ndarray) else " dict" if isinstance(value, dict) else ""
    return f"a{kind or f' {type(value).__name__}'}"


def load_pickle(content: mmap.mmap | bytes, name: str) -> Any:
    """Return the value of a pickle; long arrays are read-only views of ``content``.

    Args:
        content: Of the file, as :meth:`ifsl_bench.data.read.archive.FileTree.memory_map` returns it.
        name: Name of the file in messages.

    Returns:
        Lists, tuples, dicts, strings, numbers, None and arrays. NumPy's scalars become Python's.

    Raises:
        UserError: It is no pickle, a damaged one, or holds or calls anything else.
    """
    head = content[:512]
    if not _PICKLE_BEGINNING_PATTERN.match(head):
        raise UserError(f"{name} is no pickle but {describe_file_kind(head)}; download or copy it again")
    reader = _PickleByteReader(content, name)
    try:
        return _build_arrays(_Unpickler(reader).load())
    except _RefusedError as error:
        raise UserError(f"{name} is refused: it holds {error}") from error
    except EOFError as error:
        raise UserError(f"{name} is cut short: it ends in the middle of a value") from error
    except (*BAD_CONTENT_ERRORS, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise UserError(f"{name} is damaged near byte {reader.at:,} ({type(error).__name__}: {error})") from error


class _PickleByteReader:
    """The file of a pickle, within limits on the number of values and on the bytes of short strings."""

    def __init__(self, content: mmap.mmap | bytes, name: str) -> None:
        self.content, self.view, self.name = content, memoryview(content), name
        self.at = self.steps = self.bytes = 0

    def read(self, count: int) -> bytes | memoryview:
        piece = self.view[self.at : self.at + count]
        if len(piece) < count:
            raise EOFError
        self.at += count
        if count > INLINE_BYTES:
            self.steps -= _UNPICKLING_STEPS_OF_ARRAY
            return piece
        self.steps += 1
        self.bytes += count
        PICKLE_VALUES.check(self.steps, self.name)
        PICKLE_BYTES.check(self.bytes, self.name)
        return bytes(piece)

    def readline(self) -> bytes:
        end = self.content.find(b"\n", self.at) + 1
        if not end:
            raise EOFError
        self.bytes += end - self.at
        PICKLE_BYTES.check(self.bytes, self.name)
        line, self.at = self.content[self.at : end], end
        return line


class _RestrictedDict(dict[Any, Any]):
    """A dict with keys that can be hashed: the hash of a tuple nested deeply would exhaust the stack."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, (str, bytes, int)):
            raise _RefusedError(f"{describe_value(key)} among keys, which are strings and whole numbers in data files")
        super().__setitem__(key, value)


class _PendingDtype:
    """A NumPy type under construction: its byte order follows its name."""

    def __init__(self, name: object, *_: object) -> None:
        text = name.decode("latin-1") if isinstance(name, bytes) else name
        if not (isinstance(text, str) and _DTYPE_PATTERN.fullmatch(text)):
            shown = repr(text) if isinstance(text, str) else describe_value(text)
            raise _RefusedError(f"an array of type {shown}; only numbers and strings are read")
        self.value = np.dtype(text)

    def set(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):
            raise _RefusedError("an array of records; only numbers and strings are read")
        self.value = self.value.newbyteorder(">" if state[1] in (">", b">") else "<")


class _PendingArray:
    """A NumPy array under construction: its content follows."""

    def __init__(self) -> None:
        self.value = np.empty(0, np.uint8)

    def set(self, shape: object, dtype: _PendingDtype, by_columns: object, raw: object, axes: Any = None) -> None:
        if not isinstance(raw, (bytes, memoryview)):
            raise _RefusedError("an array of Python objects")
        if not (isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError("an array whose shape is no tuple of whole numbers")
        if math.prod(shape) * dtype.value.itemsize != len(raw) or not dtype.value.itemsize:
            raise ValueError(f"{len(raw):,} bytes for an array {dtype.value}{list(shape)}")
        array = np.ndarray(shape, dtype.value, raw, order="F" if by_columns else "C")
        self.value = array if axes is None else array.transpose(axes)


def _encode_text_as_latin1(text: object, encoding: object) -> bytes:
    """Undo the way in which Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", "latin-1"):
        shown = repr(encoding) if isinstance(encoding, str) else describe_value(encoding)
        raise _RefusedError(f"text to be encoded as {shown}")
    if not isinstance(text, str):
        raise ValueError(f"text expected, found {describe_value(text)}")
    return text.encode("latin-1")


def _make_array_from_buffer(
    raw: object, dtype: _PendingDtype, shape: object, order: object, *axes: Any
) -> _PendingArray:
    array = _PendingArray()
    array.set(shape, dtype, order == "F", raw, *(axes if order == "K" else ()))
    return array


def _refuse_ndarray(*arguments: object) -> NoReturn:
    raise _RefusedError(f"a call of numpy.ndarray with {len(arguments)} arguments")


_ALLOWED: dict[str, Callable[..., Any]] = {  # functions, no classes: a pickle may make an instance without a call
    "numpy.ndarray": _refuse_ndarray,
    "numpy.dtype": lambda *arguments: _PendingDtype(*arguments),
    "numpy.core.multiarray._reconstruct": lambda *_: _PendingArray(),
    "numpy.core.multiarray.scalar": lambda dtype, raw: np.frombuffer(cast(bytes, raw), dtype.value, 1).item(),
    "numpy.core.numeric._frombuffer": _make_array_from_buffer,
    "_codecs.encode": _encode_text_as_latin1,
    "builtins.bytes": lambda: b"",
}
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, reader: _PickleByteReader) -> None:
        super().__init__(reader, encoding="bytes")
        self.reader = reader

    def find_class(self, module: str, name: str) -> Any:
        full = re.sub(r"^numpy\._core\.", "numpy.core.", f"{module}.{name}")
        function = _ALLOWED.get(re.sub(r"^__builtin__\.", "builtins.", full))
        if function is None:
            raise _RefusedError(
                f"the name {module}.{name}, which would run code or make an object when opened; data files hold "
                "arrays, lists, dicts, strings and numbers"
            )
        return function

    def persistent_load(self, pid: object) -> NoReturn:
        raise _RefusedError("a reference to something outside the file")

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _PendingDtype):
            target.set(state)
        elif isinstance(target, _PendingArray):
            target.set(*state[-4:])  # a version comes first, in all but the oldest
        else:
            raise _RefusedError(f"a state for {describe_value(target)}")

    def load_frame(self) -> None:
        self.read(8)  # frames are not read whole, so that long arrays stay in the file

    def load_bytearray(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def load_empty_dictionary(self) -> None:
        self.append(_RestrictedDict())

    def load_dict(self) -> None:
        items, pairs = self.pop_mark(), _RestrictedDict()
        for key, value in zip(items[::2], items[1::2], strict=True):
            pairs[key] = value
        self.append(pairs)

    def load_set(self) -> NoReturn:
        raise _RefusedError("a set; data files hold arrays, lists, dicts, strings and numbers")

    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.FRAME[0]: load_frame,
        pickle.BYTEARRAY8[0]: load_bytearray,
        pickle.EMPTY_DICT[0]: load_empty_dictionary,
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_SET[0]: load_set,
        pickle.ADDITEMS[0]: load_set,
        pickle.FROZENSET[0]: load_set,
    }


def _build_arrays(value: Any) -> Any:
    """Replace arrays under construction by arrays, in lists and dicts at any depth."""
    whole = [value]
    waiting: list[Any] = [whole]
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, _PendingArray):
                container[key] = item.value
            elif isinstance(item, (list, dict)):
                waiting.append(item)
    return whole[0]
