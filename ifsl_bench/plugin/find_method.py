"""The class of a method that a user names, by a registered name, a shorthand, a file, or the class itself; and back
to what tables call it."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.class_contract import check_method
from ifsl_bench.plugin.display_names import LAZY, printed_alone
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.method_source import FROM, method_source
from ifsl_bench.plugin.options import defaults
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_value


@dataclass(frozen=True)
class MethodRef:
    """A method that somebody asked for."""

    name: str  # what results call it: the registered name, or the class's own
    method: type[Method]
    file: str = ""  # `/path/to/file.py:Class` where the class comes from a file that is in no package; "" elsewhere

    @property
    def distribution(self) -> dict[str, str]:
        """Name and version of the package that registers it; empty for a class that nobody registers."""
        points = [] if self.file else registry.owners(registry.METHODS, self.name)
        return registry.distribution_of(points[0]) if points else {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A class from a file cannot be imported by its name elsewhere: the file is read there.
        if self.file:
            return _reopen, (self.file, method_source(self.method))
        return type(self), (self.name, self.method)


def _reopen(file: str, source: str) -> MethodRef:
    chosen = find_method(file)[0]
    if method_source(chosen.method) != source:
        raise UserError(f"{file} has changed since it was chosen; start the run again")
    return chosen


def find_method(reference: str | type[Method]) -> tuple[MethodRef, Mapping[str, Any]]:
    """The method that ``reference`` means, with the options that a shorthand stands for.

    Args:
        reference: a registered name (``protonet``), a shorthand (``lr+a``), ``path/to/file.py:Class`` (the class may be
            left out where the file defines one method), or a subclass of :class:`Method`.

    Raises:
        UserError: there is no such method (with the nearest names), its file cannot be run, or its class breaks the
            contract.
    """
    if isinstance(reference, type):
        check_method(reference, repr(reference))
        file = getattr(sys.modules.get(reference.__module__), FROM, "")
        return MethodRef(_name_of(reference), reference, file and f"{file}:{reference.__name__}"), {}
    if not isinstance(reference, str):
        raise UserError(
            f"a method is a name, path/to/file.py:Class or a subclass of ifsl_bench.Method, not {reference!r}"
        )
    path, _, wanted = reference.rpartition(".py:") if ".py:" in reference else (reference.removesuffix(".py"), "", "")
    if path == reference:  # no file
        if reference in printed_alone() and not registry.owners(registry.METHODS, reference):
            raise UserError(f"{reference} is known from the numbers that its paper prints; its method is not part of "
                            f"this package and cannot be run. The paper: ifsl-bench cite {reference}")  # fmt: skip
        if reference == LAZY and not registry.owners(registry.METHODS, reference):
            raise UserError("lazy, the model that never answers with a novel class, needs no run: tables of tasks in "
                            "sessions compute its row from each A_0 of the other rows ('ifsl-bench table "
                            "tiny-features-sessions')")  # fmt: skip
        name, method, meant = registry.resolve(reference)
        return MethodRef(name, method), meant
    try:
        where = Path(f"{path}.py").expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise UserError(f"cannot read the method in {path}.py: {error}") from error
    from ifsl_bench.plugin.method_file import class_in

    method = class_in(where, wanted)
    check_method(method, f"{wanted} in {where}")
    return MethodRef(_name_of(method), method, f"{where}:{wanted or method.__name__}"), {}


def _name_of(method: type) -> str:
    """The registered name of a class, or the class's own where it has none and nobody else has it."""
    points = registry.names(registry.METHODS)
    for point in points.values():
        if point.value.partition(" ")[0] == f"{method.__module__}:{method.__qualname__}":
            return point.name
    taken = {name.lower() for name in (*points, *registry.all_shorthands())}  # file names may not tell cases apart
    if method.__name__.lower() in taken:
        raise UserError(f"class {method.__qualname__} has the name of a registered method, {method.__name__.lower()} "
                        f"('ifsl-bench methods'); rename the class")  # fmt: skip
    return method.__name__


def format_label(method: type[Method], name: str, options: Mapping[str, Any], task: Task) -> list[str]:
    """The method's name in tables, then each given option that the name does not say, as ``key=value``."""
    called, named_keys = name, set[str]()
    # A copy or a subclass of a registered method is another one, and says so.
    if name in registry.names(registry.METHODS) and "shorthands" in vars(method):
        called, named_keys = method.label(name, defaults(method, task) | dict(options))
        if called != name and called not in method.shorthands:
            registry.check_free(called, name, f"label {called!r} of method {name}")
    return [called, *(f"{key}={format_value(value)}" for key, value in options.items() if key not in named_keys)]


def searched_options(method: type[Method], fixed_options: Container[str], trials: int) -> list[str]:
    """Lists what is chosen on validation episodes: of the grid, or with ``trials`` of the space, what is not fixed.

    Names of options, and ``train.rate`` for the learning rate of meta-training.
    """
    return [key for key in (method.space if trials else method.grid) if key not in fixed_options]
