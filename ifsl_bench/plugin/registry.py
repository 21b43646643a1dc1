"""Plugins: the suite's methods, and methods and data sets that are found through entry points.

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
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ifsl_bench.plugin.display_names import parse_label, suite_methods
from ifsl_bench.utils.errors import MissingDependencyError, UserError, format_class_and_message, unknown_name_error

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

METHOD_GROUP = "ifsl_bench.methods"
DATASET_GROUP = "ifsl_bench.datasets"
RECIPE_GROUP = "ifsl_bench.recipes"
LIST_COMMAND_OF_GROUP = {
    METHOD_GROUP: "ifsl-bench methods",
    DATASET_GROUP: "ifsl-bench data list",
    RECIPE_GROUP: "ifsl-bench recipes",
}  # where all are listed
OWN_PACKAGE = "ifsl_bench"  # this package's distribution


@dataclass(frozen=True)
class Plugin:
    """A registered name. ``loaded_object`` is None where ``load_problem`` says why.

    ``missing_module`` names the module that has to be installed first, where that is the whole problem.
    """

    name: str
    distribution: str
    loaded_object: Any = None
    load_problem: str = ""
    missing_module: str = ""


def registered_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return registered names, without importing any of them."""
    return {name: points[0] for name, points in _entry_points(group, tuple(sys.path)).items()}


@lru_cache(maxsize=8)  # every look-up would read the metadata of all packages again
def _entry_points(group: str, _path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    found = [
        point for point in entry_points(group=group) if group != METHOD_GROUP or distribution_name(point) != OWN_PACKAGE
    ]
    if group == METHOD_GROUP:  # the files of ``methods/`` declare those of the suite
        suite = distribution(OWN_PACKAGE)
        for name, declared in suite_methods().items():
            point = EntryPoint(name, declared.entry_point_target, METHOD_GROUP)
            vars(point)["dist"] = suite  # as importlib.metadata does
            found.append(point)
    points: dict[str, list[EntryPoint]] = {}
    for point in sorted(found, key=lambda p: (p.name, distribution_name(p))):
        points.setdefault(point.name, []).append(point)
    return points


def distribution_name(point: EntryPoint) -> str:
    """Return the distribution that registers a name."""
    return _distribution_name(point.dist) if point.dist else "?"


@lru_cache(maxsize=1024)
def _distribution_name(dist: Distribution) -> str:
    """Return the name of a distribution, which is parsed at each access."""
    return dist.name


def distribution_name_and_version(point: EntryPoint) -> dict[str, str]:
    """Return name and version of the distribution that registers a name."""
    return {"name": distribution_name(point), "version": point.dist.version if point.dist else "?"}


def is_same_package(a: str, b: str) -> bool:
    """Return whether two names are of one distribution; cases, hyphens and underscores are all one (PEP 503).

    Args:
        a: one name.
        b: the other one.
    """
    first, second = (re.sub(r"[-_.]+", "-", name).lower() for name in (a, b))
    return first == second


def find_owning_entry_points(group: str, name: str) -> list[EntryPoint]:
    """Return the entry points of a name: several where packages dispute it and :func:`load_plugin` refuses it.

    Args:
        group: of entry points.
        name: of the plugin.
    """
    return _entry_points(group, tuple(sys.path)).get(name, [])


def is_installed(module: str) -> bool:
    """Return whether a module is installed; a mere folder of that name, as a checkout is, does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def load_plugin(group: str, name: str) -> Plugin:
    """Import one plugin; a failure is a :class:`Plugin` with a ``problem``, not an exception.

    Args:
        group: of entry points.
        name: of the plugin.
    """
    points = find_owning_entry_points(group, name)
    if len(points) > 1:
        whose = [distribution_name(point) for point in points]
        problem = f"ambiguous: {' and '.join(whose)} register it; uninstall all but one of them"
        return Plugin(name, "/".join(whose), load_problem=problem)
    (point,) = points
    package = distribution_name(point)
    try:
        value = point.load()
        for module, install in getattr(value, "requires", {}).items():
            if not is_installed(module):
                return _missing_dependency(name, package, module, install)
        return Plugin(name, package, loaded_object=value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if point.extras and missing and not missing.startswith("ifsl_bench"):
            return _missing_dependency(name, package, missing, f'pip install "{package}[{",".join(point.extras)}]"')
        return Plugin(name, package, load_problem=f"broken: {format_class_and_message(error)}")


def _missing_dependency(name: str, package: str, module: str, install: str) -> Plugin:
    return Plugin(
        name, package, load_problem=f"needs an extra ({module} is not installed): {install}", missing_module=module
    )


def get_registered(group: str, kind: str, name: str) -> Any:
    """Return the object that is registered under a name.

    Args:
        group: of entry points.
        kind: the object's kind in errors, such as "method".
        name: of the plugin.

    Raises:
        UserError: unknown name (with the nearest ones), or a plugin that cannot be used.
        MissingDependencyError: something has to be installed first.
    """
    if not find_owning_entry_points(group, name):
        raise unknown_name_error(kind, name, registered_entry_points(group), see=LIST_COMMAND_OF_GROUP.get(group, ""))
    plugin = load_plugin(group, name)
    if plugin.load_problem:
        kind_of = MissingDependencyError if plugin.missing_module else UserError
        raise kind_of(f"{kind} {name!r} of package {plugin.distribution} cannot be used; {plugin.load_problem}")
    return plugin.loaded_object


def refers_to_file(method: str) -> bool:
    """Return whether a method is a Python file, whose code runs when it is looked up."""
    return ".py:" in method or method.endswith(".py")


def is_installed_method(name: str) -> bool:
    """Return whether an installed package has a method or a shorthand of this name; those in files have none."""
    return bool(find_owning_entry_points(METHOD_GROUP, name) or find_shorthands_named(name))


def get_method(name: str) -> type[Method]:
    """Return the method class registered under ``name``.

    Raises:
        UserError: unknown name (with the nearest ones), a broken plugin, or one that is no :class:`Method`.
    """
    from ifsl_bench.plugin.options import check_method

    kind: type[Method] = get_registered(METHOD_GROUP, "method", name)
    check_method(kind, f"method {name!r} is {kind!r}, which")
    return kind


def resolve_method(name: str) -> tuple[str, type[Method], dict[str, Any]]:
    """Find a method by its registered name or by a shorthand: its name, the class, and the options meant.

    Raises:
        UserError: as :func:`get_method`; a name that several have; or a method whose shorthands are names of others.
    """
    if find_owning_entry_points(METHOD_GROUP, name):
        kind = get_method(name)
        check_label_is_free(name, name, f"method {name!r}")
        check_shorthands(name, kind)
        return name, kind, {}
    shorthands = find_shorthands_named(name)
    if not shorthands:
        label = parse_label(name)
        if label.method_name != name and label.method_name in {
            **registered_entry_points(METHOD_GROUP),
            **list_shorthands_by_name(),
        }:
            raise UserError(
                f"{name!r} is the label of a row, which is run with {shlex.join(label.command_line_words)}; "
                "its method: "
                f"ifsl-bench methods {label.method_name}"
            )
        raise unknown_name_error(
            "method",
            name,
            [*registered_entry_points(METHOD_GROUP), *list_shorthands_by_name()],
            see=LIST_COMMAND_OF_GROUP[METHOD_GROUP],
        )
    if len(shorthands) > 1:
        whose = " and ".join(f"{point.name} of {distribution_name(point)}" for point, *_ in shorthands)
        raise UserError(f"{name!r} is a shorthand of several methods, {whose}; name the method and its options instead")
    ((point, kind, meant),) = shorthands
    check_shorthands(point.name, kind)
    return point.name, kind, meant


def check_shorthands(name: str, kind: type[Method]) -> None:
    """Raise :class:`UserError` if a method's shorthands are also names or shorthands of other methods.

    Args:
        name: of the method.
        kind: its class.

    Raises:
        UserError: a shorthand is taken.
    """
    for shorthand in vars(kind).get("shorthands", {}):
        check_label_is_free(shorthand, name, f"shorthand {shorthand!r} of method {name}")


def check_label_is_free(label: str, name: str, what: str) -> None:
    """Raise :class:`UserError` if a label of a method is the name or a shorthand of another one.

    Args:
        label: the method's name, a shorthand or a label of it.
        name: the method's name.
        what: the label in errors.
    """
    others = [(point, f"method {point.name}") for point in find_owning_entry_points(METHOD_GROUP, label)]
    others += [(point, f"a shorthand of method {point.name}") for point, *_ in find_shorthands_named(label)]
    for point, kind in others:
        if point.name != name:
            mine = find_owning_entry_points(METHOD_GROUP, name)
            by = f" (package {distribution_name(mine[0])})" if mine else ""
            raise UserError(
                f"{what}{by} is also {kind} (package {distribution_name(point)}); one of them needs another name"
            )


ShorthandEntry = tuple[
    EntryPoint, type["Method"], dict[str, Any]
]  # whose it is, and the class and options it stands for


def find_shorthands_named(name: str) -> list[ShorthandEntry]:
    """Return the shorthands of that name; of the suite's methods only the one that has it is loaded."""
    suite = suite_methods()
    points = [
        p
        for p in registered_entry_points(METHOD_GROUP).values()
        if distribution_name(p) != OWN_PACKAGE or name in suite[p.name].display
    ]
    return [shorthand for called, shorthand in _iterate_shorthands(points) if called == name]


def list_shorthands_by_name() -> dict[str, list[ShorthandEntry]]:
    """Return all shorthands by name."""
    by_name: dict[str, list[ShorthandEntry]] = {}
    for name, shorthand in _iterate_shorthands(registered_entry_points(METHOD_GROUP).values()):
        by_name.setdefault(name, []).append(shorthand)
    return by_name


def _iterate_shorthands(points: Iterable[EntryPoint]) -> Iterator[tuple[str, ShorthandEntry]]:
    """Yield the shorthands of methods; plugins that cannot be used are left out."""
    for point in points:
        try:
            kind = get_method(point.name)
        except UserError:
            continue
        for name, options in vars(kind).get("shorthands", {}).items():  # a subclass is another method
            yield name, (point, kind, dict(options))
