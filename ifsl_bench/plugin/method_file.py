"""Methods of files: ``path/to/file.py:Class``, run as a module of its own."""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.method_source import EXECUTED, FROM, neighbours
from ifsl_bench.utils.errors import UserError, unknown, where

_LOCK = threading.RLock()


def class_in(file: Path, wanted: str) -> Any:
    """The method of a file: the one of this name, or the only one; not yet held against the contract.

    Raises:
        UserError: the file cannot be read or run, or has no such class.
    """
    module = _run(file)
    ours = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    }
    if not wanted and len(ours) != 1:
        raise UserError(f"{file} defines {len(ours)} methods; say which one: {file.name}:CLASS" +
                        (f", one of {', '.join(ours)}" if ours else ""))  # fmt: skip
    if wanted and not hasattr(module, wanted):
        raise unknown("class", wanted, ours, where=f"in {file}")
    return getattr(module, wanted) if wanted else next(iter(ours.values()))


@contextmanager
def _importable(folder: Path, beside: Iterable[Path]) -> Iterator[None]:
    """Inside, modules of a folder can be imported as by ``python file.py``; files of other folders may have neighbours
    of the same names, so none stays in the list of modules."""
    inside = {path.relative_to(folder).parts[0].removesuffix(".py") for path in beside}
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in inside}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in inside]:
            del sys.modules[name]
        sys.modules.update(before)


def _run(file: Path) -> ModuleType:
    """The file as a module; run again when its content has changed, or that of a module beside it that it imports."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the method in {file}: {error.strerror}") from error
    beside = neighbours(file, content)
    digest = hashlib.sha256(b"\0".join([str(file).encode() + content, *beside.values()])).hexdigest()
    name = f"{file.stem}_{digest[:12]}"
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = str(file)
        vars(module).update({EXECUTED: content, FROM: str(file)})
        sys.modules[name] = module  # dataclasses and pickle look there while the file runs
        try:
            with _importable(file.parent, beside):
                exec(compile(content, str(file), "exec"), module.__dict__)
        except BaseException as error:
            del sys.modules[name]
            if not isinstance(error, (Exception, SystemExit)):
                raise
            at = where(error, str(file))
            message = error.msg if at and isinstance(error, SyntaxError) else error  # which would name the place again
            raise UserError(f"{file} cannot be run: {at}{type(error).__name__}: {message}") from error
    return module
