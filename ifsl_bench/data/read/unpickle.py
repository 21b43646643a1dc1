"""Pickles read without running anything in them.

A pickle is a program for a stack machine, and a program that may call any function. The machine here knows plain
containers, strings, numbers and NumPy arrays; it imports nothing, calls nothing that a file names, and refuses every
other name. It reads protocols 0 to 5 as Python 2 and 3, old and new NumPy write them. Python 2's strings become text by
Latin-1, as ``pickle.load(..., encoding="latin1")`` has it.

Long strings stay in the file (:class:`~ifsl_bench.data.read.stored_array.StoredArray`), so that a file larger than the
memory can be looked at (:func:`load`) or walked from item to item (:func:`items`).
"""

from __future__ import annotations

import pickle  # for the name of an operation alone
import re
import struct
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import PICKLE_BYTES, PICKLE_STEPS
from ifsl_bench.data.read.archive import what_is
from ifsl_bench.data.read.stored_array import BROKEN, StoredArray
from ifsl_bench.data.read.unpickle_machine import Machine, Refused, described
from ifsl_bench.data.read.unpickle_operations import OPERATIONS

INLINE = 1 << 16  # bytes; longer strings stay in the file

_PICKLE = re.compile(rb"\x80[\x02-\x05]|\([(\]}lditcSVIFLN]|[\]}][q(.apr)]|c[A-Za-z_][\w.]*\n[A-Za-z_]")


def check_is_pickle(head: bytes, name: str) -> None:
    """Looks at a file's first bytes (512 are plenty).

    Raises:
        UserError: the file is no pickle; the message says what it is.
    """
    if not _PICKLE.match(head):
        raise UserError(f"{name} is no pickle but {what_is(head)}; download or copy it again")


def _run(machine: Machine) -> Generator[None, None, Any]:
    """Runs a machine, with a pause whenever something is ready, and in the end gives the result."""
    file, name = machine.file, machine.name
    try:
        file.seek(0)
        check_is_pickle(file.read(512), name)
        file.seek(0)
        steps = 0  # since something was ready
        while (code := file.read(1)) != pickle.STOP:
            if (steps := steps + 1) > PICKLE_STEPS.most:
                PICKLE_STEPS.check(steps, name)
            if not steps % 256:
                PICKLE_BYTES.check(file.tell() - machine.passed, name)
            if not code:
                raise EOFError
            if (operation := OPERATIONS.get(code)) is None:
                raise ValueError(f"no operation is written {code!r}")
            operation(machine)
            if machine.ready:
                place, steps = file.tell(), 0
                machine.passed = place
                yield
                file.seek(place)  # whoever read an array again has moved on
        return machine.stack.pop()
    except Refused as error:
        raise UserError(f"{name} is refused: it holds {error}") from error
    except EOFError as error:
        raise UserError(f"{name} is cut short: it ends in the middle of a value") from error
    except (*BROKEN, LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise UserError(f"{name} is damaged near byte {file.tell():,} ({type(error).__name__}: {error})") from error


def load(file: BinaryIO, name: str, kind: type[Machine] = Machine) -> Any:
    """What a pickle holds, with :class:`StoredArray` in the place of every array.

    Args:
        file: open for reading and able to seek; it stays open as long as the arrays are used.
        name: how errors call the file.
        kind: of machine; one may know more than NumPy's arrays.

    Returns:
        Lists, tuples, dicts, sets, strings, numbers, None and stored arrays. NumPy's scalars become Python's.

    Raises:
        UserError: no pickle, a damaged one, or one that holds or calls anything else.
    """
    run = _run(kind(file, name, INLINE, skip=True))
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def items(file: BinaryIO, name: str) -> Iterator[StoredArray]:
    """The arrays of a pickled list one after the other, as the file is read: one of them is in memory at a time.

    ``read`` each before the next is asked for; later its bytes have to be looked up in the file again.

    Raises:
        UserError: as :func:`load`, or the pickle is no list of arrays.
    """
    machine = Machine(file, name, 64, skip=False)
    run = _run(machine)
    count = 0
    while True:
        try:
            next(run)
        except StopIteration as end:
            if not isinstance(end.value, list):
                raise UserError(f"{name} holds {described(end.value)}, expected a list of arrays") from None
            return
        for value in machine.ready:
            if not (isinstance(value, StoredArray) and value.defined):
                raise UserError(f"{name}: item {count} of the list is {described(value)}, expected arrays only")
            yield value
            count += 1
        machine.ready.clear()
