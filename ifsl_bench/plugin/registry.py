"""Plugins, found through entry points: methods and data sets, ours and everybody's alike.

Looking a name up imports only the plugin of that name. One that cannot be imported is listed as broken, or as needing
an extra, and takes nobody else down.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ifsl_bench.common.errors import Lacking, UserError, unknown
from ifsl_bench.plugin.rows import label_parts, rows

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

METHODS = "ifsl_bench.methods"
DATASETS = "ifsl_bench.datasets"
SEE = {METHODS: "ifsl-bench methods", DATASETS: "ifsl-bench data list"}  # where all are listed
OWN = "ifsl_bench"  # this package's distribution


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
    """Registered names, without importing any of them.

    Where several packages register one name, each of them is there as ``package:name`` besides, and the name alone is
    nobody's: :func:`load` says whose it might be.
    """
    return dict(_names(group, tuple(sys.path)))


@lru_cache(maxsize=8)  # every look-up would read the metadata of all packages anew
def _points(group: str, _path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, package_of(p))):
        found.setdefault(point.name, []).append(point)
    return found


@lru_cache(maxsize=8)
def _names(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for name, points in _points(group, path).items():
        found[name] = points[0]
        if len(points) > 1:
            found |= {f"{package_of(point)}:{name}": point for point in points}
    return found


def package_of(point: EntryPoint) -> str:
    """The distribution that registers a name."""
    return _called(point.dist) if point.dist else "?"


@lru_cache(maxsize=1024)
def _called(dist: Distribution) -> str:
    """The name of a distribution, which is parsed anew whenever it is asked for."""
    return dist.name


def distribution_of(point: EntryPoint) -> dict[str, str]:
    """Name and version of the distribution that registers a name."""
    return {"name": package_of(point), "version": point.dist.version if point.dist else "?"}


def same_package(a: str, b: str) -> bool:
    """Returns whether two names are of one distribution; cases, hyphens and underscores are all one (PEP 503)."""
    first, second = (re.sub(r"[-_.]+", "-", name).lower() for name in (a, b))
    return first == second


def owners(group: str, name: str) -> list[EntryPoint]:
    """Who registers ``name``; of ``package:name`` that package alone."""
    package, _, plain = name.rpartition(":")
    points = _points(group, tuple(sys.path)).get(plain, [])
    return [point for point in points if not package or same_package(package, package_of(point))]


def called(group: str, point: EntryPoint) -> str:
    """The name that results give to what is registered: its name, or ``package:name`` where others have that name too.

    What comes with this package keeps its name, so that its rows stay the ones that they were.
    """
    alone = len(owners(group, point.name)) == 1 or same_package(package_of(point), OWN)
    return point.name if alone else f"{package_of(point)}:{point.name}"


def is_installed(module: str) -> bool:
    """Returns whether there is such a module; a mere folder of that name, as a checkout is, counts as none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def load(group: str, name: str) -> Plugin:
    """Imports one plugin; a failure is a :class:`Plugin` with a ``problem``, not an exception."""
    points = owners(group, name)
    if len(points) > 1:
        whose = " and ".join(package_of(point) for point in points)
        choice = " or ".join(f"{package_of(point)}:{name}" for point in points)
        how = f"say which is meant, {choice}" if group == METHODS else "uninstall all but one of them"
        return Plugin(
            name, "/".join(package_of(point) for point in points), problem=f"ambiguous: {whose} register it; {how}"
        )
    (point,) = points
    package = package_of(point)
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
    """Finds what is registered under ``name``; ``kind`` is how errors call it.

    Raises:
        UserError: unknown name (with the nearest ones), or a plugin that cannot be used; :class:`Lacking`, if only
            because something has to be installed first.
    """
    if not owners(group, name):
        raise unknown(kind, name, names(group), see=SEE.get(group, ""))
    plugin = load(group, name)
    if plugin.problem:
        kind_of = Lacking if plugin.lacks else UserError
        raise kind_of(f"{kind} {name!r} of package {plugin.package} cannot be used; {plugin.problem}")
    return plugin.value


def names_file(said: str) -> bool:
    """Returns whether a method is a Python file, whose code runs when it is looked up, not by a registered name."""
    return ".py:" in said or said.endswith(".py")


def recorded_name(method: str, distribution: Any) -> str:
    """The name to look a method up by that a file records: with its package, for others may register that name too.

    Args:
        distribution: what the file says of the package, of any type: the file may be a stranger's.
    """
    package = distribution.get("name") if isinstance(distribution, dict) else None
    return f"{package}:{method}" if isinstance(package, str) and package and ":" not in method else method


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
    """A method by its registered name or by a shorthand: what results call it, the class, and the options meant.

    Either may begin with ``package:``, which chooses among the packages that have it.

    Raises:
        UserError: as :func:`method`; a name that several have; or a method whose shorthands are names of others.
    """
    if points := owners(METHODS, name):
        kind, known = method(name), called(METHODS, points[0])
        if shorthands_called(points[0].name):  # equal names are told apart by `package:`, labels would not be
            check_free(points[0].name, known, f"method {points[0].name!r}")
        check_shorthands(known, kind)
        return known, kind, {}
    package, _, plain = name.rpartition(":")
    found = [
        (point, kind, meant)
        for point, kind, meant in shorthands_called(plain)
        if not package or same_package(package, package_of(point))
    ]
    if not found:
        label = label_parts(name)
        if label.name != name and label.name in {**names(METHODS), **all_shorthands()}:
            raise UserError(f"{name!r} is the label of a row, which is run with {shlex.join(label.typed)}; its method: "
                            f"ifsl-bench methods {label.name}")  # fmt: skip
        raise unknown("method", name, [*names(METHODS), *all_shorthands()], see=SEE[METHODS])
    if len(found) > 1:
        whose = " and ".join(f"{called(METHODS, point)} of {package_of(point)}" for point, *_ in found)
        raise UserError(f"{name!r} is a shorthand of several methods, {whose}; name the method and its options instead")
    ((point, kind, meant),) = found
    check_shorthands(called(METHODS, point), kind)
    return called(METHODS, point), kind, dict(meant)


def check_shorthands(name: str, kind: type[Method]) -> None:
    """Raises :class:`UserError` where a method's shorthands are also names or shorthands of other methods."""
    for shorthand in vars(kind).get("shorthands", {}):
        check_free(shorthand, name, f"shorthand {shorthand!r} of method {name}")


def check_free(said: str, name: str, what: str) -> None:
    """Raises :class:`UserError` where what a method calls itself is the name or a shorthand of another one.

    Args:
        said: its name, a shorthand or a label.
        name: what results call the method.
        what: how the error names ``said``.
    """
    mine = owner(name)
    others = [(point, f"method {point.name}") for point in owners(METHODS, said)]
    others += [(point, f"a shorthand of method {point.name}") for point, *_ in shorthands_called(said)]
    for point, kind in others:
        if mine is None or (point.name, package_of(point)) != (mine.name, package_of(mine)):
            by = f" (package {package_of(mine)})" if mine else ""
            raise UserError(f"{what}{by} is also {kind} (package {package_of(point)}); one of them needs another name")


def owner(name: str) -> EntryPoint | None:
    """Who registers what results call ``name``; None for a method that nobody registers."""
    points = owners(METHODS, name)
    return next((point for point in points if len(points) == 1 or same_package(package_of(point), OWN)), None)


Shorthand = tuple[EntryPoint, type["Method"], dict[str, Any]]  # whose it is, and the class and options it stands for


def shorthands_called(name: str) -> list[Shorthand]:
    """The shorthands of that name; of this package's methods only the one that ``methods/rows.toml`` says is loaded."""
    own = rows()[name].of if name in rows() else ""
    points = [point for points in _points(METHODS, tuple(sys.path)).values() for point in points]
    asked = [point for point in points if point.name == own or not same_package(package_of(point), OWN)]
    return [(point, kind, meant[name]) for point, kind, meant in _shorthands(asked) if name in meant]


def all_shorthands() -> dict[str, list[Shorthand]]:
    """All shorthands by name."""
    found: dict[str, list[Shorthand]] = {}
    points = [point for points in _points(METHODS, tuple(sys.path)).values() for point in points]
    for point, kind, meant in _shorthands(points):
        for name, options in meant.items():
            found.setdefault(name, []).append((point, kind, options))
    return found


def _shorthands(points: Iterable[EntryPoint]) -> Iterator[tuple[EntryPoint, type[Method], dict[str, dict[str, Any]]]]:
    """Each method's class and shorthands; those of plugins that cannot be used are left out."""
    for point in points:
        try:
            kind = method(f"{package_of(point)}:{point.name}")
        except UserError:
            continue
        own = vars(kind).get("shorthands", {})  # a subclass is another method
        yield point, kind, {name: dict(options) for name, options in own.items()}
