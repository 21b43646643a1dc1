"""How, where and with what a number was made."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

from ifsl_bench._version import __version__
from ifsl_bench.backbone.device import describe_device
from ifsl_bench.plugin.method import Method

LIBRARIES = ("torch", "torchvision", "numpy")
SOLVERS = ("ifsl_bench.learners", "ifsl_bench.solve")  # a method that uses them computes what they compute


def provenance(command: str, device: torch.device, requires: Iterable[str] = ()) -> dict[str, object]:
    """Command, version, commit, device, library versions and time (UTC).

    Args:
        requires: further libraries that the number depends on; one that is no distribution of that name is left out.
    """
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    for name in requires:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    return {
        "command": command,
        "version": __version__,
        "commit": commit(),
        "device": describe_device(device),
        "python": platform.python_version(),
        "libraries": libraries,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def method_source(method: type[Method]) -> str:
    """Identity of a method's code: its own module, those of its base classes, and the solvers if it uses them.

    Raises:
        RuntimeError: the solvers' code is not found where they say they are.
    """
    sha = hashlib.sha256(__version__.encode())
    for kind in method.__mro__:
        module = sys.modules.get(kind.__module__)
        path = getattr(module, "__file__", None)
        if issubclass(kind, Method) and kind is not Method and path:
            sha.update(Path(path).read_bytes())
            if any(_uses(module, name) for name in SOLVERS):  # the learners use the solvers themselves
                for name in SOLVERS:
                    for content in _code_of(name):
                        sha.update(content)
    return sha.hexdigest()[:16]


def _uses(module: object, package: str) -> bool:
    """Whether a module has the package, one of its modules, or something of theirs among its names."""
    for value in vars(module).values():
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and (home == package or home.startswith(f"{package}.")):
            return True
    return False


def _code_of(package: str) -> list[bytes]:
    """The contents of a package's modules, by name."""
    folders = importlib.import_module(package).__path__
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    if not files:
        raise RuntimeError(f"{package} has no modules in {list(folders)}: results could not name the code they used")
    return [file.read_bytes() for file in files]


def commit() -> str:
    """The commit of the checkout this package runs from, with "+changes" where files differ; "" outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
