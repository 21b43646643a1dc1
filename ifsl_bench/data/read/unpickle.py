"""Pickles read without running anything in them.

A pickle is a program for a stack machine, which may call any function that it names. The standard library's machine in
Python runs it here with a list of the names that data files have; of these, none but :class:`StoredArray` and
:class:`_Dtype` are made. It reads protocols 0 to 5 as Python 2 and 3, old and new NumPy write them. Python 2's strings
become text by Latin-1, as ``pickle.load(..., encoding="latin1")`` has it.

Strings of more than 4 KiB stay in the file, so that one larger than the memory can be looked at (:func:`load`) or
walked from item to item (:func:`items`); not so in protocols 0 and 1 of text, where nothing says how long a string is.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, NoReturn, cast

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import PICKLE_BYTES, PICKLE_STEPS
from ifsl_bench.data.read.archive import what_is
from ifsl_bench.data.read.file_tree import BAD_CONTENT
from ifsl_bench.data.read.stored_array import Span, StoredArray

INLINE = 1 << 12  # bytes; longer strings stay in the file
_STEPS = 30  # that an array in a list takes at the most; those beside long strings do not count
_PICKLE = re.compile(rb"\x80[\x02-\x05]|\([(\]}lditcSVIFLN]|[\]}][q(.apr)]|c[A-Za-z_][\w.]*\n[A-Za-z_]")
_DTYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6}|\?)")
_BAD = (*BAD_CONTENT, TypeError, AttributeError, pickle.UnpicklingError)


class Refused(Exception):
    """Well-formed, but not what a data file may hold."""


def described(value: object) -> str:
    return "an array" if isinstance(value, StoredArray) else f"a {type(value).__name__}"


def _told(value: object) -> str:
    """A string as it is, anything else by its kind alone: writing out a tuple in tuples may exhaust the stack."""
    return repr(value) if isinstance(value, str) else described(value)


class _Bounded:
    """What is read of a pickle: so many steps, each of which begins with a read, and so many bytes beside arrays."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.steps = self.bytes = self.passed = 0  # and long strings passed over

    def read(self, count: int) -> bytes:
        if count > INLINE:
            raise ValueError(f"a number of {count:,} bytes")
        self.steps += 1
        self.bytes += count
        PICKLE_STEPS.check(self.steps - _STEPS * self.passed, self.name)
        PICKLE_BYTES.check(self.bytes, self.name)
        content = self.file.read(count)
        if len(content) < count:
            raise EOFError
        return content

    def readline(self) -> bytes:
        line = self.file.readline(PICKLE_BYTES.most + 1 - self.bytes)
        self.bytes += len(line)
        PICKLE_BYTES.check(self.bytes, self.name)
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def string(self, length: int, utf8: bool) -> bytes | Span:
        """A string of known length, or its place in the file if it is long."""
        if length <= INLINE:
            return self.read(length)
        self.passed += 1
        span = Span(self.file.tell(), length, utf8)
        self.file.seek(length, 1)
        return span


class _Dtype:
    """A NumPy type under construction: the byte order comes after the name."""

    def __init__(self, name: object, *_: object) -> None:
        if not (isinstance(name, str) and _DTYPE.fullmatch(name)):
            raise Refused(f"an array of type {_told(name)}; only numbers and strings are read")
        self.value = np.dtype(name)

    def set(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):
            raise Refused("an array of records; only numbers and strings are read")
        self.value = self.value.newbyteorder(">" if state[1] == ">" else "<")


def _raw(value: object) -> bytes | Span:
    """The content of an array; Python 2's strings have become text."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, (bytes, Span)):
        raise Refused("an array of Python objects")
    return value


# -- what a pickle may name; it is called where the pickle calls it


def _encoded(text: object, encoding: object) -> bytes | Span:
    """How Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"text to be encoded as {_told(encoding)}")
    if not isinstance(text, (str, Span)):
        raise ValueError(f"text expected, found {described(text)}")
    return text.encode("latin-1") if isinstance(text, str) else text


def _scalar(dtype: _Dtype, raw: object) -> Any:
    return np.frombuffer(cast(bytes, _raw(raw)), dtype.value, 1).item()


def _none(*arguments: object) -> NoReturn:
    raise Refused(f"a call of numpy.ndarray with {len(arguments)} arguments")


def _empty() -> bytes:
    return b""


_Machine: Any = pickle._Unpickler


class _Unpickler(_Machine):
    """Makes plain containers, strings, numbers and stored arrays."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Machine.dispatch)

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.source = _Bounded(file, name)
        super().__init__(self.source, encoding="latin1")
        self.names: dict[str, Callable[..., Any]] = {
            "numpy.ndarray": _none,
            "numpy.dtype": lambda *arguments: _Dtype(*arguments),
            "numpy.core.multiarray._reconstruct": lambda *_: StoredArray(file, name),
            "numpy.core.multiarray.scalar": _scalar,
            "numpy.core.numeric._frombuffer": self._frombuffer,
            "_codecs.encode": _encoded,
            "builtins.bytes": _empty,
        }

    def _frombuffer(self, raw: object, dtype: _Dtype, shape: tuple[int, ...], order: str, *axes: Any) -> StoredArray:
        array = StoredArray(self.source.file, self.source.name)
        array.define(dtype.value, shape, order == "F", _raw(raw), *(axes if order == "K" else ()))
        return array

    def find_class(self, module: str, name: str) -> Any:
        full = re.sub(r"^numpy\._core\.", "numpy.core.", f"{module}.{name}")
        function = self.names.get(re.sub(r"^__builtin__\.", "builtins.", full))
        if function is None:
            raise Refused(
                f"the name {module}.{name}, which would run code or make an object when opened; data files hold "
                "arrays, lists, dicts, strings and numbers"
            )
        return function

    def persistent_load(self, pid: object) -> NoReturn:
        raise Refused("a reference to something outside the file")

    # -- operations that differ

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Dtype):
            target.set(state)
        elif isinstance(target, StoredArray):
            shape, dtype, by_columns, raw = state[-4:]  # before them a version, in all but the oldest
            target.define(dtype.value, shape, by_columns, _raw(raw))
        else:
            raise Refused(f"a state for {described(target)}")

    def load_frame(self) -> None:
        self.read(8)  # a frame is not read as a whole: what is long in it stays in the file

    def load_text(self) -> None:
        self._string(4, lambda content: str(content, "utf-8", "surrogatepass"), True)

    def load_long_text(self) -> None:
        self._string(8, lambda content: str(content, "utf-8", "surrogatepass"), True)

    def load_old(self) -> None:
        self._string(4, lambda content: content.decode("latin-1"))

    def load_bytes(self) -> None:
        self._string(4, bytes)

    def load_long_bytes(self) -> None:
        self._string(8, bytes)

    def _string(self, width: int, convert: Callable[[bytes], Any], utf8: bool = False) -> None:
        content = self.source.string(int.from_bytes(self.read(width), "little"), utf8)
        self.append(content if isinstance(content, Span) else convert(content))

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()

    def load_set(self) -> NoReturn:
        raise Refused("a set; data files hold arrays, lists, dicts, strings and numbers")

    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.FRAME[0]: load_frame,
        pickle.BINUNICODE[0]: load_text,
        pickle.BINUNICODE8[0]: load_long_text,
        pickle.BINSTRING[0]: load_old,
        pickle.BINBYTES[0]: load_bytes,
        pickle.BINBYTES8[0]: load_long_bytes,
        pickle.BYTEARRAY8[0]: load_long_bytes,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_SET[0]: load_set,
        pickle.ADDITEMS[0]: load_set,
        pickle.FROZENSET[0]: load_set,
    }


def _check_keys(keys: Sequence[object]) -> None:
    """Raises :class:`Refused` where a key is neither a string nor a whole number: a tuple may hold tuples to any depth,
    and hashing it would exhaust the stack."""
    for key in keys:
        if not isinstance(key, (str, bytes, int)):
            raise Refused(f"{described(key)} among keys, which are strings and whole numbers in data files")


def check_is_pickle(head: bytes, name: str) -> None:
    """Looks at a file's first bytes (512 are plenty).

    Raises:
        UserError: the file is no pickle; the message says what it is.
    """
    if not _PICKLE.match(head):
        raise UserError(f"{name} is no pickle but {what_is(head)}; download or copy it again")


def load(file: BinaryIO, name: str) -> Any:
    """What a pickle holds, with :class:`StoredArray` in the place of every array.

    Args:
        file: open for reading and able to seek; it stays open as long as the arrays are used.
        name: how errors call the file.

    Returns:
        Lists, tuples, dicts, strings, numbers, None and stored arrays. NumPy's scalars become Python's.

    Raises:
        UserError: no pickle, a damaged one, or one that holds or calls anything else.
    """
    try:
        file.seek(0)
        check_is_pickle(file.read(512), name)
        file.seek(0)
        return _Unpickler(file, name).load()
    except Refused as error:
        raise UserError(f"{name} is refused: it holds {error}") from error
    except EOFError as error:
        raise UserError(f"{name} is cut short: it ends in the middle of a value") from error
    except _BAD as error:
        raise UserError(f"{name} is damaged near byte {file.tell():,} ({type(error).__name__}: {error})") from error


def items(file: BinaryIO, name: str) -> Iterator[StoredArray]:
    """The arrays of a pickled list one after the other; :meth:`StoredArray.read` them in this order.

    Raises:
        UserError: as :func:`load`, or the pickle is no list of arrays.
    """
    value = load(file, name)
    if not isinstance(value, list):
        raise UserError(f"{name} holds {described(value)}, expected a list of arrays")
    for i, item in enumerate(value):
        if not isinstance(item, StoredArray):
            raise UserError(f"{name}: item {i} of the list is {described(item)}, expected arrays only")
        yield item
