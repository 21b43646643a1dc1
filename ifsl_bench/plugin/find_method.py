"""Find the class of a method by a registered name, a shorthand, a file, or the class itself, and check it.

A method's file is run as a module of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import LAZY_ROW_LABEL
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.method_source import EXECUTED_SOURCE_KEY, SOURCE_PATH_KEY, hash_method_source, neighbour_modules
from ifsl_bench.plugin.options import check_method, default_options
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import UserError, format_error_location, unknown_name_error
from ifsl_bench.utils.text_format import format_value

_IMPORT_LOCK = threading.RLock()


@dataclass(frozen=True)
class MethodRef:
    """A method that a user named; pickled by reference, also where its class comes from a file."""

    name: str  # in results: the registered name, or the class's own
    method: type[Method]
    source_file: str = (
        ""  # `/path/to/file.py:Class` where the class comes from a file that is in no package; "" elsewhere
    )

    @property
    def distribution(self) -> dict[str, str]:
        """Name and version of the package that registers it; empty for a class that is not registered."""
        points = [] if self.source_file else registry.find_owning_entry_points(registry.METHOD_GROUP, self.name)
        return registry.distribution_name_and_version(points[0]) if points else {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A class from a file cannot be imported by its name elsewhere: the file is read there.
        if self.source_file:
            return _unpickle_method_ref, (self.source_file, hash_method_source(self.method))
        return type(self), (self.name, self.method)


def _unpickle_method_ref(file: str, source: str) -> MethodRef:
    chosen = find_method(file)[0]
    if hash_method_source(chosen.method) != source:
        raise UserError(f"{file} has changed since it was chosen; start the run again")
    return chosen


def find_method(reference: str | type[Method]) -> tuple[MethodRef, Mapping[str, Any]]:
    """Return the method that ``reference`` names, with the options that a shorthand stands for.

    Args:
        reference: a registered name (``protonet``), a shorthand (``lr+a``), ``path/to/file.py:Class`` (the class may be
            left out where the file defines one method), or a subclass of :class:`Method`.

    Raises:
        UserError: there is no such method (with the nearest names), its file cannot be run, or its class breaks the
            contract.
    """
    if isinstance(reference, type):
        check_method(reference, repr(reference))
        origin = getattr(sys.modules.get(reference.__module__), SOURCE_PATH_KEY, "")
        return MethodRef(_registered_name(reference), reference, origin and f"{origin}:{reference.__name__}"), {}
    if not isinstance(reference, str):
        raise UserError(
            f"a method is a name, path/to/file.py:Class or a subclass of ifsl_bench.Method, not {reference!r}"
        )
    path, _, wanted = reference.rpartition(".py:") if ".py:" in reference else (reference.removesuffix(".py"), "", "")
    if path == reference:  # no file
        if reference == LAZY_ROW_LABEL and not registry.find_owning_entry_points(registry.METHOD_GROUP, reference):
            raise UserError(
                "lazy, the model that never answers with a novel class, needs no run: tables of tasks in sessions "
                "compute its row from each A_0 of the other rows ('ifsl-bench table tiny-features-sessions')"
            )
        name, method, meant = registry.resolve_method(reference)
        return MethodRef(name, method), meant
    try:
        file = Path(f"{path}.py").expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise UserError(f"cannot read the method in {path}.py: {error}") from error
    method = load_class_from_file(file, wanted)
    check_method(method, f"{wanted} in {file}")
    return MethodRef(_registered_name(method), method, f"{file}:{wanted or method.__name__}"), {}


def _registered_name(method: type) -> str:
    """Return the registered name of a class, or the class's own where it has none and no other method has it."""
    points = registry.registered_entry_points(registry.METHOD_GROUP)
    for point in points.values():
        if point.value.partition(" ")[0] == f"{method.__module__}:{method.__qualname__}":
            return point.name
    taken = {
        name.lower() for name in (*points, *registry.list_shorthands_by_name())
    }  # file names may not tell cases apart
    if method.__name__.lower() in taken:
        raise UserError(
            f"class {method.__qualname__} has the name of a registered method, {method.__name__.lower()} "
            f"('ifsl-bench methods'); rename the class"
        )
    return method.__name__


def format_label(method: type[Method], name: str, options: Mapping[str, Any], task: Task) -> list[str]:
    """Return the parts of a label: the method's name in tables, and ``key=value`` of each option that it leaves open.

    Args:
        method: the class.
        name: the method's registered name, or the class's own.
        options: name -> value, of the options that are set.
        task: the defaults may depend on it.
    """
    called, named_keys = name, set[str]()
    # A copy or a subclass of a registered method is another one, and says so.
    if name in registry.registered_entry_points(registry.METHOD_GROUP) and "shorthands" in vars(method):
        called, named_keys = method.label(name, default_options(method, task) | dict(options))
        if called != name and called not in method.shorthands:
            registry.check_label_is_free(called, name, f"label {called!r} of method {name}")
    return [called, *(f"{key}={format_value(value)}" for key, value in options.items() if key not in named_keys)]


def searched_option_names(method: type[Method], fixed_options: Container[str], trials: int) -> list[str]:
    """Return the options that are chosen on validation episodes, and ``train.rate`` for the rate of meta-training.

    Args:
        method: the class.
        fixed_options: names of options that are set, and so not searched.
        trials: number of settings in a search of the space; 0 for the grid.
    """
    return [key for key in (method.space if trials else method.grid) if key not in fixed_options]


# -- methods of files


def load_class_from_file(file: Path, wanted: str, contract: type = Method, plural: str = "methods") -> Any:
    """Return a method, or a class of another contract, of a file, not yet checked.

    Args:
        file: the Python file, which is run.
        wanted: the name of the class; "" for the only one.
        contract: the class that it derives from.
        plural: of such classes, for errors.

    Raises:
        UserError: the file cannot be read or run, or has no such class.
    """
    module = _execute_file_as_module(file)
    ours = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, contract) and value.__module__ == module.__name__
    }
    if not wanted and len(ours) != 1:
        names = f", one of {', '.join(ours)}" if ours else ""
        raise UserError(f"{file} defines {len(ours)} {plural}; say which one: {file.name}:CLASS{names}")
    if wanted and not hasattr(module, wanted):
        raise unknown_name_error("class", wanted, ours, where=f"in {file}")
    return getattr(module, wanted) if wanted else next(iter(ours.values()))


@contextmanager
def _make_folder_importable(folder: Path, beside: Iterable[Path]) -> Iterator[None]:
    """Make modules of a folder importable, as by ``python file.py``.

    None stays in ``sys.modules``, since files of other folders may have neighbours of the same names.
    """
    inside = {path.relative_to(folder).parts[0].removesuffix(".py") for path in beside}
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in inside}
    sys.path.insert(0, str(folder))
    # Compiled modules are told apart by seconds and sizes, so one that was edited at once would be taken for the old.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_none
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in inside]:
            del sys.modules[name]
        sys.modules.update(before)


def _execute_file_as_module(file: Path) -> ModuleType:
    """Run a file as a module; again only if its content changed, or a module's in its folder that it imports."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    beside = neighbour_modules(file, content)
    digest = hashlib.sha256(b"\0".join([str(file).encode() + content, *beside.values()])).hexdigest()
    name = f"{file.stem}_{digest[:12]}"
    with _IMPORT_LOCK:
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = str(file)
        vars(module).update({EXECUTED_SOURCE_KEY: content, SOURCE_PATH_KEY: str(file)})
        sys.modules[name] = module  # dataclasses and pickle look there while the file runs
        try:
            with _make_folder_importable(file.parent, beside):
                exec(compile(content, str(file), "exec"), module.__dict__)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, KeyboardInterrupt):
                raise
            at = format_error_location(error, str(file))
            message = error.msg if at and isinstance(error, SyntaxError) else error  # which would name the place again
            raise UserError(f"{file} cannot be run: {at}{type(error).__name__}: {message}") from error
    return module


# -- the contract of a class
