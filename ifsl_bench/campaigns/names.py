"""Names that stand for several methods or tasks: globs, and sets. Imports no torch before methods are asked for.

Sets are ``all`` (what can be run here) and those that a file of published rows gives itself, such as ``paper``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from ifsl_bench.board.published import published_sets
from ifsl_bench.common.errors import MOST_LISTED, UserError
from ifsl_bench.common.files import Home
from ifsl_bench.data.preparing.prepare import is_prepared
from ifsl_bench.plugin import registry
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.task_files import find, own, packaged
from ifsl_bench.protocol.variants import split

ALL = "all"
Warn = Callable[[str], None]


def is_glob(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def method_names(said: Iterable[str], warn: Warn) -> list[str]:
    """Names of methods as they are, globs and sets as the names that they stand for.

    A glob is held against registered names and shorthands alike. ``all`` is a row for each shorthand, or for a method
    without any, of the methods that can be used here; ``warn`` is told of the others.

    Raises:
        UserError: a glob that fits nothing.
    """
    sets = published_sets()
    found: list[str] = []
    for name in said:
        if name == ALL:
            found += _usable(warn)
        elif name in sets:
            found += sets[name][0]
        elif is_glob(name) and not registry.names_file(name):
            found += _fitting(name, [*registry.names(registry.METHODS), *registry.all_shorthands()], "method")
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def _usable(warn: Warn) -> list[str]:
    found: list[str] = []
    for name in registry.names(registry.METHODS):
        try:
            found += vars(registry.method(name)).get("shorthands") or [name]
        except UserError as error:
            warn(f"left out of 'all': {error}")
    return found


def task_names(said: Iterable[str], home: Home) -> list[str]:
    """Names of tasks as they are, globs and sets as the names that they stand for; changes stay behind each.

    A glob is held against the packaged tasks and the user's own, or in ``FILE.toml:GLOB`` against those of the file.
    ``all`` are the tasks whose data are prepared here, or made when they are first used.

    Raises:
        UserError: a glob that fits nothing, or a file that is wrong.
    """
    sets = published_sets()
    found: list[str] = []
    for name in said:
        plain, change = split(name)
        changes = name[len(plain) :] if change.said() else ""
        file, _, inside = plain.rpartition(".toml:")
        if plain == ALL:
            names: Sequence[str] = [task.name for task in _known(home) if _has_data(task, home)]
        elif plain in sets:
            names = sets[plain][1]
        elif file and is_glob(inside):
            file = f"{file}.toml"
            names = [f"{file}:{one}" for one in _fitting(inside, [t.name for t in find(file, home=home)], "task")]
        elif is_glob(plain) and not plain.endswith(".toml"):
            names = _fitting(plain, [task.name for task in _known(home)], "task")
        else:
            names = [plain]
        found += [one + changes for one in names]
    return list(dict.fromkeys(found))


def _known(home: Home) -> list[Task]:
    return list({**packaged(), **own(home)}.values())


def _has_data(task: Task, home: Home) -> bool:
    name = task.dataset.name
    if is_prepared(home, name) or name not in registry.names(registry.DATASETS):
        return is_prepared(home, name)
    plugin = registry.load(registry.DATASETS, name)
    return not plugin.problem and not plugin.value.needs_source


def _fitting(glob: str, names: Iterable[str], kind: str) -> list[str]:
    found = [name for name in dict.fromkeys(names) if fnmatchcase(name, glob)]
    if not found:
        known = list(dict.fromkeys(names))
        few = len(known) <= MOST_LISTED
        listed = f"there are: {', '.join(known)}" if few else f"all {len(known):,}: ifsl-bench {kind}s"
        raise UserError(f"no {kind} fits {glob[:80]!r}; {listed}")
    return found
