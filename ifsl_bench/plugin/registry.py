"""Plugins, found through entry points: methods and data sets, ours and everybody's alike.

Looking a name up imports only the plugin of that name. One that cannot be imported is listed as broken, or as needing
an extra, and takes nobody else down.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ifsl_bench.common.errors import UserError, unknown

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

METHODS = "ifsl_bench.methods"
DATASETS = "ifsl_bench.datasets"


@dataclass(frozen=True)
class Plugin:
    """A registered name. ``value`` is the loaded object, or None with the reason in ``problem``.

    ``lacks`` names the module that has to be installed first, where that is the whole problem.
    """

    name: str
    package: str
    value: Any = None
    problem: str = ""
    lacks: str = ""


def names(group: str) -> dict[str, EntryPoint]:
    """Registered names, without importing any of them; of two equal names the first package in order counts."""
    return dict(_names(group, tuple(sys.path)))


@lru_cache(maxsize=8)  # every look-up would read the metadata of all packages anew
def _names(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.dist.name if p.dist else "")):
        found.setdefault(point.name, point)
    return found


def is_installed(module: str) -> bool:
    """Whether there is such a module; a mere folder of that name, as a checkout is, counts as none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def load(group: str, name: str) -> Plugin:
    """Imports one plugin; a failure is a :class:`Plugin` with a ``problem``, not an exception."""
    point = names(group)[name]
    package = point.dist.name if point.dist else "?"
    try:
        value = point.load()
        for module, install in getattr(value, "requires", {}).items():
            if not is_installed(module):
                return _lacking(name, package, module, install)
        return Plugin(name, package, value=value)
    except ImportError as error:
        missing = getattr(error, "name", None)
        if point.extras and isinstance(error, ModuleNotFoundError) and missing and not missing.startswith("ifsl_bench"):
            return _lacking(name, package, missing, f'pip install "{package}[{",".join(point.extras)}]"')
        return Plugin(name, package, problem=f"broken: {type(error).__name__}: {error}")
    except (Exception, SystemExit) as error:
        return Plugin(name, package, problem=f"broken: {type(error).__name__}: {error}")


def _lacking(name: str, package: str, module: str, install: str) -> Plugin:
    return Plugin(name, package, problem=f"needs an extra ({module} is not installed): {install}", lacks=module)


def get(group: str, kind: str, name: str) -> Any:
    """What is registered under ``name``; ``kind`` is how errors call it.

    Raises:
        UserError: unknown name (with the nearest ones), or a plugin that cannot be used.
    """
    if name not in names(group):
        raise unknown(kind, name, names(group))
    plugin = load(group, name)
    if plugin.problem:
        raise UserError(f"{kind} {name!r} of package {plugin.package} cannot be used; {plugin.problem}")
    return plugin.value


def method(name: str) -> type[Method]:
    """The method class registered under ``name``.

    Raises:
        UserError: unknown name (with the nearest ones), a broken plugin, or one that is no :class:`Method`.
    """
    from ifsl_bench.plugin.method import Method
    from ifsl_bench.plugin.options import check_method

    value = get(METHODS, "method", name)
    if not (isinstance(value, type) and issubclass(value, Method)):
        raise UserError(f"method {name!r} is {value!r}, which is not a subclass of ifsl_bench.Method")
    check_method(value)
    return value


def resolve(name: str) -> tuple[str, type[Method], dict[str, Any]]:
    """A method by its registered name or by a shorthand: the registered name, the class, and the options meant.

    Raises:
        UserError: as :func:`method`.
    """
    if name in names(METHODS):
        return name, method(name), {}
    shorthands: dict[str, tuple[str, type[Method], dict[str, Any]]] = {}
    for registered in names(METHODS):
        try:
            kind = method(registered)
        except UserError:
            continue
        for shorthand, meant in vars(kind).get("shorthands", {}).items():  # a subclass is another method
            shorthands.setdefault(shorthand, (registered, kind, dict(meant)))
    if name not in shorthands:
        raise unknown("method", name, [*names(METHODS), *shorthands])
    return shorthands[name]
