"""Identity of a method's code, which results and stored models record."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ifsl_bench._version import __version__
from ifsl_bench.plugin.method import Method

# What methods compute with: one that names any of it is identified by the code of all of it.
SHARED = ("ifsl_bench.common.cosine", "ifsl_bench.learners", "ifsl_bench.solve")
NAMED = re.compile(rb"\b(cosine|learners|solve)\b")
EXECUTED = "__executed__"  # a module made from a file says what was executed, whatever the file holds now


@lru_cache(maxsize=256)  # of what was imported, so that a file which is edited during a run changes nothing
def method_source(method: type[Method]) -> str:
    """16 hex digits that change with the method's own module, those of its base classes, and what these compute with.

    A class without a file, as a notebook has it, is identified by its compiled functions and by what of its module they
    name.

    Raises:
        RuntimeError: shared code is not found where it says it is.
    """
    sha = hashlib.sha256(__version__.encode())
    for kind in method.__mro__:
        if not issubclass(kind, Method) or kind is Method:
            continue
        module = sys.modules.get(kind.__module__)
        content = executed(module)
        sha.update(content if content is not None else repr(list(_compiled(kind, module, set()))).encode())
        if NAMED.search(content or b"") or any(_uses(module, name) for name in SHARED):
            for name in SHARED:
                for part in _code_of(name):
                    sha.update(part)
    return sha.hexdigest()[:16]


def executed(module: ModuleType | None) -> bytes | None:
    """What a module was made from; None where there is no file."""
    content = getattr(module, EXECUTED, None)
    if isinstance(content, bytes):
        return content
    path = getattr(module, "__file__", None)
    return Path(path).read_bytes() if path and Path(path).is_file() else None


def _compiled(value: Any, module: ModuleType | None, seen: set[int]) -> Iterator[Any]:
    """What a class or function does: byte code and constants, also of what it names of its module."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        for name, member in sorted(vars(value).items()):
            if not name.startswith("__") or isinstance(member, FunctionType):  # not where and when it was defined
                yield name
                yield from _compiled(member, module, seen)
    elif isinstance(value, FunctionType):
        yield [value.__defaults__, value.__kwdefaults__]
        yield from _compiled(value.__code__, module, seen)
    elif isinstance(value, CodeType):
        yield value.co_code
        for constant in value.co_consts:
            yield from _compiled(constant, module, seen)
        for name in value.co_names:
            yield name
            named = vars(module).get(name) if module else None
            if getattr(named, "__module__", None) == getattr(module, "__name__", "") or isinstance(
                named, (int, float, str, tuple)
            ):
                yield from _compiled(named, module, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _compiled(value.__func__, module, seen)
    elif isinstance(value, (int, float, complex, str, bytes, tuple, frozenset, type(None))):
        yield value


def _uses(module: ModuleType | None, shared: str) -> bool:
    """Whether a module has the shared module, or something of its, among its names."""
    for value in vars(module).values() if module else ():
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and (home == shared or home.startswith(f"{shared}.")):
            return True
    return False


def _code_of(shared: str) -> list[bytes]:
    """The contents of a module, or of a package's modules by name."""
    module = importlib.import_module(shared)
    folders = getattr(module, "__path__", None)
    if folders is None:
        return [Path(module.__file__ or "").read_bytes()]
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    if not files:
        raise RuntimeError(f"{shared} has no modules in {list(folders)}: results could not name their code")
    return [file.read_bytes() for file in files]
