"""Identity of a method, which results and stored models record: its `revision`, and the syntax of its own code.

The methods of this package are known by their `revision` alone: tests pin their numbers. Imports no torch.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ifsl_bench.plugin.registry import OWN_PACKAGE

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

EXECUTED_SOURCE_KEY = "__executed__"  # a module made from a file says what was executed, whatever the file holds now
SOURCE_PATH_KEY = "__from__"  # a module made from a file says which
INSTALL_FOLDERS = ("site-packages", "dist-packages")  # folders where a module's neighbours are other distributions
NODES_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_same_method(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two records of origin are of one method: ``hash_method_source``, ``revision``, ``distribution``.

    Records of revision 0 may leave it out.

    Args:
        first: one record.
        second: the other one.
    """
    return _method_identity_key(first) == _method_identity_key(second)


def _method_identity_key(made_by: Mapping[str, Any]) -> tuple[Any, ...]:
    distribution = made_by.get("distribution")
    own = isinstance(distribution, dict) and distribution.get("name") == OWN_PACKAGE
    return made_by.get("revision", 0), OWN_PACKAGE if own else made_by.get("method_source")


def hash_method_source(method: type[Method]) -> str:
    """Return :func:`hash_source_of_class` of a method."""
    from ifsl_bench.plugin.adapting import Adapting
    from ifsl_bench.plugin.method import AdditiveClassifier, Method

    return hash_source_of_class(method, (Method, AdditiveClassifier, Adapting))


@lru_cache(maxsize=256)  # of what was imported, so that a file which is edited during a run changes nothing
def hash_source_of_class(plugin: type, contract: tuple[type, ...]) -> str:
    """Return 16 hex digits that change with the syntax of a class's own package or file, comments aside.

    Base classes from elsewhere count with theirs. A file counts with the modules next to it that it imports. A class
    without a file, as a notebook has it, is identified by its compiled functions and by what of its module they name.

    Args:
        plugin: the class.
        contract: classes that it derives from and that do not count; the first is the base of all others.
    """
    sha = hashlib.sha256()
    for kind in plugin.__mro__:
        if issubclass(kind, contract[0]) and kind not in contract:
            for part in _syntax_of_modules(kind, sys.modules.get(kind.__module__)):
                sha.update(part.encode())
    return sha.hexdigest()[:16]


def _syntax_of_modules(kind: type, module: ModuleType | None) -> Iterator[str]:
    """Yield the syntax of each module that a class may run of its own package, or in the folder of its file."""
    package = sys.modules.get(top := kind.__module__.partition(".")[0])
    folders = (
        getattr(package, "__path__", ()) if top != OWN_PACKAGE else ()
    )  # whose modules have a method each, or none
    files = {path: path.read_bytes() for folder in folders for path in sorted(Path(folder).rglob("*.py"))}
    if not files:
        path, content = _read_executed_source(module)
        if content is None:
            yield repr(list(_code_and_constants(kind, module, set())))
            return
        files = {path: content}
        if package is module and not set(INSTALL_FOLDERS) & set(path.parts):
            _add_neighbour_modules(path, files)
    yield from map(_normalised_syntax_text, files.values())


def _read_executed_source(module: ModuleType | None) -> tuple[Path, bytes | None]:
    """Return the path of a module and the source it was made from; None where there is no file."""
    path, content = Path(getattr(module, "__file__", None) or ""), getattr(module, EXECUTED_SOURCE_KEY, None)
    if isinstance(content, bytes):
        return path, content
    return path, path.read_bytes() if path.is_file() else None


def neighbour_modules(path: Path, content: bytes) -> dict[Path, bytes]:
    """Return the modules in a file's folder that it imports, at any depth, with their content.

    Args:
        path: of the file.
        content: of the file.
    """
    files = {path: content}
    _add_neighbour_modules(path, files)
    del files[path]
    return files


def _add_neighbour_modules(path: Path, files: dict[Path, bytes]) -> None:
    """Add the modules in a file's folder that it imports, at any depth; but never ifsl_bench, as in a clone."""
    for node in ast.walk(_parse_or_none(files[path]) or ast.Module([], [])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        tops = [name.partition(".")[0] for name in names]
        for top in (top for top in tops if top != OWN_PACKAGE):
            beside = [path.with_name(f"{top}.py"), *sorted(path.with_name(top).rglob("*.py"))]
            for neighbour in beside:
                if neighbour.is_file() and neighbour not in files:
                    files[neighbour] = neighbour.read_bytes()
                    _add_neighbour_modules(neighbour, files)


def _normalised_syntax_text(content: bytes) -> str:
    """Return the syntax of a module without comments and docstrings, as text that is the same for equal trees."""
    if (tree := _parse_or_none(content)) is None:
        return repr(content)
    for node in ast.walk(tree):
        if isinstance(node, NODES_WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.unparse(tree)  # unlike ast.dump, as good as the same in every version of Python


def _parse_or_none(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a file; None if this Python cannot parse it, as a package's may be for another."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):
        return None


def _code_and_constants(value: Any, module: ModuleType | None, seen: set[int]) -> Iterator[Any]:
    """Yield the byte code and constants of a class or function, and of names of its module that it uses."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        for name, member in sorted(vars(value).items()):
            if not name.startswith("__") or isinstance(member, FunctionType):  # not where and when it was defined
                yield name
                yield from _code_and_constants(member, module, seen)
    elif isinstance(value, FunctionType):
        yield [value.__defaults__, value.__kwdefaults__]
        yield from _code_and_constants(value.__code__, module, seen)
    elif isinstance(value, CodeType):
        yield value.co_code
        for constant in value.co_consts:
            yield from _code_and_constants(constant, module, seen)
        for name in value.co_names:
            yield name
            named = vars(module).get(name) if module else None
            if getattr(named, "__module__", None) == getattr(module, "__name__", "") or isinstance(
                named, (int, float, str, tuple)
            ):
                yield from _code_and_constants(named, module, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _code_and_constants(value.__func__, module, seen)
    elif isinstance(value, (int, float, complex, str, bytes, tuple, frozenset, type(None))):
        yield value
