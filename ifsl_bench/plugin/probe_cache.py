"""Probes in the home folder: one that was made of the same code, options and torch is not made again."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import sha256_json
from ifsl_bench.common.sealed import read_sealed, write_sealed
from ifsl_bench.plugin.behaviour import VERSION, Probe
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.method_source import executed, method_source
from ifsl_bench.plugin.probe import probe

IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+([^\n#]+))", re.MULTILINE)
# Of this package, what a method and its probe may run: all that is imported from there, and what the kernels compile.
ROOMS = ("common", "kernels", "solve", "protocol", "plugin", "learners")
APART = frozenset({"torch", "numpy", "ifsl_bench"})  # known by their versions, and the last one by its ROOMS


def probe_of(folder: Path, name: str, method: type[Method], options: Mapping[str, Any], shots: int) -> Probe | None:
    """What :func:`ifsl_bench.plugin.probe.probe` says, from ``folder`` where it is kept."""
    about = {
        "version": VERSION,
        "method": f"{method.__module__}:{method.__qualname__}",
        "code": everything(method),
        "options": dict(options),
        "shots": shots,
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    file = folder / f"{sha256_json(about)[:24]}.json"
    with suppress(FileNotFoundError, CorruptFile, KeyError, msgspec.ValidationError):
        kept = read_sealed(file)
        if "format" in kept:  # one of an older version has no checksum
            return msgspec.convert(kept["probe"], Probe | None)
    found = probe(name, method, options, shots)
    with suppress(UserError):  # where nothing can be kept, as on a read-only mount, it is made anew in every process
        write_sealed(file, {**about, "probe": msgspec.to_builtins(found)})
    return found


@lru_cache(maxsize=256)  # of what was imported, so that a file which is edited during a run changes nothing
def everything(method: type[Method]) -> str:
    """A hash of all code that a method may run: this package's ``ROOMS``, and the modules that its own ones import.

    Files of other packages that are installed beside it are known by size and time. What is imported under a name made
    at run time, or read from a file of data, is not seen.
    """
    sha = hashlib.sha256(method_source(method).encode())
    for part in own_code(*ROOMS):
        sha.update(part)
    todo = [kind.__module__.partition(".")[0] for kind in method.__mro__ if issubclass(kind, Method)]
    mine, seen = set(todo), set(APART | sys.stdlib_module_names)
    for name in sorted({kind.__module__ for kind in method.__mro__ if issubclass(kind, Method)}):
        module = sys.modules.get(name)  # of a file that is in no package, or of a notebook
        content = executed(module)
        values = vars(module).values() if module and content is None else ()
        todo += [home.partition(".")[0] for value in values if isinstance(home := _home(value), str)]
        todo += _imported(content or b"")
    while todo:
        if (top := todo.pop()) in seen:
            continue
        seen.add(top)
        for path in _files(top):
            if top in mine or not {"site-packages", "dist-packages"} & set(path.parts):
                sha.update(content := path.read_bytes())
                todo += _imported(content)
            else:
                stat = path.stat()
                sha.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
    return sha.hexdigest()


@lru_cache(maxsize=8)
def own_code(*rooms: str) -> list[bytes]:
    """The source files of some of this package's folders."""
    root = Path(__file__).parents[1]
    return [path.read_bytes() for room in rooms for path in sorted((root / room).rglob("*.py"))]


def _home(value: Any) -> Any:
    """The module that something comes from."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)


def _imported(content: bytes) -> list[str]:
    """The packages that a module's text imports, at any depth; too many rather than too few."""
    found = []
    for source, listed in IMPORT.findall(content):
        names = [source] if source else listed.split(b",")
        found += [name.strip().split(b".")[0].split(b" ")[0].decode(errors="ignore") for name in names]
    return sorted({name for name in found if name.isidentifier()})


def _files(top: str) -> list[Path]:
    """The files of a package or module, whether or not it was imported yet."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
