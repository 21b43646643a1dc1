"""What each operation of a pickle does to :class:`~ifsl_bench.data.read.unpickle_machine.Machine`, protocols 0 to 5."""

from __future__ import annotations

import pickle  # for the names of the operations alone
import struct
from collections.abc import Callable
from typing import Any

from ifsl_bench.data.read.unpickle_machine import Machine, Refused, latin, plain, quoted, utf8

Operation = Callable[[Machine], object]


def _integer(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else int(line)  # the two are Python 2's True and False


def _protocol(machine: Machine) -> None:
    if (protocol := machine.number(1)) > pickle.HIGHEST_PROTOCOL:
        raise Refused(f"a pickle of protocol {protocol}, newer than this version knows")


def _tuple(count: int) -> Operation:
    def operation(machine: Machine) -> None:
        values = tuple(machine.stack[-count:])
        if len(values) < count:
            raise IndexError("too few values for a tuple")
        machine.stack[-count:] = [values]

    return operation


def _refuse(what: str) -> Operation:
    def operation(machine: Machine) -> None:
        raise Refused(what)

    return operation


def _instance(machine: Machine) -> None:
    """Python 2's way to make an object: a name and what to call it with."""
    machine.named(machine.line().decode(), machine.line().decode())
    raise Refused(f"an object of class {machine.stack[-1].value}")


def _pushes(make: Callable[[Machine], Any]) -> Operation:
    def operation(machine: Machine) -> None:
        value = make(machine)  # which may put another stack in place
        machine.stack.append(value)

    return operation


def _pop(machine: Machine) -> None:
    machine.stack.pop() if machine.stack else machine.popped()


def _from_top(machine: Machine) -> None:
    attribute, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(attribute, str) and isinstance(module, str)):
        raise ValueError("a name that is no text")
    machine.named(module, attribute)


def _pairs(machine: Machine) -> dict[Any, Any]:
    values = machine.popped()
    return dict(zip(plain(values[::2], "keys"), values[1::2], strict=True))


OPERATIONS: dict[bytes, Operation] = {
    pickle.PROTO: _protocol,
    pickle.FRAME: lambda m: m.exactly(8),
    # numbers and constants
    pickle.NONE: _pushes(lambda m: None),
    pickle.NEWTRUE: _pushes(lambda m: True),
    pickle.NEWFALSE: _pushes(lambda m: False),
    pickle.INT: _pushes(lambda m: _integer(m.line())),
    pickle.LONG: _pushes(lambda m: int(m.line().rstrip(b"L"))),
    pickle.BININT: _pushes(lambda m: m.number(4, signed=True)),
    pickle.BININT1: _pushes(lambda m: m.number(1)),
    pickle.BININT2: _pushes(lambda m: m.number(2)),
    pickle.LONG1: _pushes(lambda m: m.number(m.number(1), signed=True)),
    pickle.LONG4: _pushes(lambda m: m.number(m.number(4), signed=True)),
    pickle.FLOAT: _pushes(lambda m: float(m.line())),
    pickle.BINFLOAT: _pushes(lambda m: struct.unpack(">d", m.exactly(8))[0]),
    # strings
    pickle.STRING: _pushes(lambda m: m.text_line("quoted", quoted)),
    pickle.UNICODE: _pushes(lambda m: m.text_line("unicode-escape", lambda line: line.decode("raw-unicode-escape"))),
    pickle.BINSTRING: _pushes(lambda m: m.string(m.number(4), "bytes", latin)),
    pickle.SHORT_BINSTRING: _pushes(lambda m: m.string(m.number(1), "bytes", latin)),
    pickle.BINUNICODE: _pushes(lambda m: m.string(m.number(4), "utf-8", utf8)),
    pickle.SHORT_BINUNICODE: _pushes(lambda m: m.string(m.number(1), "utf-8", utf8)),
    pickle.BINUNICODE8: _pushes(lambda m: m.string(m.number(8), "utf-8", utf8)),
    pickle.BINBYTES: _pushes(lambda m: m.string(m.number(4), "bytes", bytes)),
    pickle.SHORT_BINBYTES: _pushes(lambda m: m.string(m.number(1), "bytes", bytes)),
    pickle.BINBYTES8: _pushes(lambda m: m.string(m.number(8), "bytes", bytes)),
    pickle.BYTEARRAY8: _pushes(lambda m: m.string(m.number(8), "bytes", bytes)),
    # containers
    pickle.EMPTY_LIST: _pushes(lambda m: []),
    pickle.EMPTY_TUPLE: _pushes(lambda m: ()),
    pickle.EMPTY_DICT: _pushes(lambda m: {}),
    pickle.EMPTY_SET: _pushes(lambda m: set()),
    pickle.LIST: _pushes(lambda m: m.popped()),
    pickle.TUPLE: _pushes(lambda m: tuple(m.popped())),
    pickle.DICT: _pushes(_pairs),
    pickle.FROZENSET: _pushes(lambda m: frozenset(plain(m.popped(), "members of a set"))),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.APPEND: Machine.append,
    pickle.APPENDS: lambda m: m.extend(m.popped()),
    pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.set_items(m.popped()),
    pickle.ADDITEMS: lambda m: m.add_items(m.popped()),
    # the stack and the memo
    pickle.MARK: Machine.mark,
    pickle.POP: _pop,
    pickle.POP_MARK: lambda m: m.popped(),
    pickle.DUP: _pushes(lambda m: m.stack[-1]),
    pickle.PUT: lambda m: m.remember(int(m.line())),
    pickle.BINPUT: lambda m: m.remember(m.number(1)),
    pickle.LONG_BINPUT: lambda m: m.remember(m.number(4)),
    pickle.MEMOIZE: lambda m: m.remember(len(m.memo)),
    pickle.GET: _pushes(lambda m: m.memo[int(m.line())]),
    pickle.BINGET: _pushes(lambda m: m.memo[m.number(1)]),
    pickle.LONG_BINGET: _pushes(lambda m: m.memo[m.number(4)]),
    # names, calls, objects
    pickle.GLOBAL: lambda m: m.named(m.line().decode(), m.line().decode()),
    pickle.STACK_GLOBAL: _from_top,
    pickle.REDUCE: lambda m: m.reduce(),
    pickle.BUILD: Machine.build,
    pickle.INST: _instance,
    pickle.OBJ: _refuse("an object to be made from a class"),
    pickle.NEWOBJ: _refuse("an object to be made from a class"),
    pickle.NEWOBJ_EX: _refuse("an object to be made from a class"),
    pickle.PERSID: _refuse("a reference to something outside the file"),
    pickle.BINPERSID: lambda m: m.persistent(),
    pickle.EXT1: _refuse("a registered extension"),
    pickle.EXT2: _refuse("a registered extension"),
    pickle.EXT4: _refuse("a registered extension"),
    pickle.NEXT_BUFFER: _refuse("a buffer that is kept outside the file"),
    pickle.READONLY_BUFFER: _refuse("a buffer that is kept outside the file"),
}
