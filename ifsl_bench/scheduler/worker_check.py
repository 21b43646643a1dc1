"""Checks a worker before it gets work; runs on the worker, and imports nothing heavy before the rest is checked."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ifsl_bench
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home
from ifsl_bench.common.own_code import own_code
from ifsl_bench.common.owners import PARTIAL

DAEMON = "DASK_DISTRIBUTED__WORKER__DAEMON=False"  # what a shell exports before it starts a worker
PACKAGES = ("ifsl_bench", "torch", "numpy", "numba", "distributed")  # that decide digits, or whether messages arrive


@dataclass(frozen=True)
class MustHave:
    """The folders, versions and code that every worker must have.

    Attributes:
        tokens: files in the home and results folders, and what is in them; "" for a folder that cannot be written to,
            of which it is only asked that it is there.
        versions: of Python and packages.
        code: digest of the package's source files.
        methods: each method's name, its description pickled, and the identity of its code.
    """

    tokens: Mapping[str, str]
    versions: Mapping[str, str]
    code: str
    methods: tuple[tuple[str, bytes, str], ...] = field(default=(), repr=False)


@contextmanager
def wanted(home: Home, methods: Iterable[tuple[str, bytes, str]] = ()) -> Iterator[MustHave]:
    """Yields what workers must have; while the block runs, files in the folders let them check these."""
    tokens = {}
    try:
        for folder in (home.cache, home.results):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            file, token = folder / f"{PARTIAL}token-{secrets.token_hex(8)}", secrets.token_hex(8)
            try:
                file.write_text(token)
                tokens[str(file)] = token
            except OSError:  # a read-only home that has all that is needed is a good one
                tokens[str(folder)] = ""
        yield MustHave(tokens, versions(), own_code(), tuple(methods))
    finally:
        for path, token in tokens.items():
            if token:
                Path(path).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Returns the versions in this process; "" for a package that it lacks."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = ""
    return installed


def unfit(wanted: MustHave) -> str:
    """Says in one line why this process cannot work for a campaign; "" where it can."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command itself has it; read when torch is imported
    if differ := {name: mine for name, mine in versions().items() if mine != wanted.versions[name]}:
        return "; ".join(
            f"has {name} {mine}, this command has {wanted.versions[name]}: install the same on both"
            if mine
            else f"has no {name}, this command has {wanted.versions[name]}: install it there"
            for name, mine in differ.items()
        )
    if multiprocessing.current_process().daemon:
        return f"is daemonic, so it may start no processes of its own; start it with {DAEMON} in its environment"
    return _folder_lacking(wanted.tokens) or _code_lacking(wanted)


def _folder_lacking(tokens: Mapping[str, str]) -> str:
    for name, token in tokens.items():
        path = Path(name)
        folder = path.parent if token else path
        if not folder.is_dir():
            return f"lacks the folder {folder}; mount it there, or choose another with --home or --results"
        try:
            content = path.read_text() if token else ""
        except OSError as error:
            content = f"({error})"
        if content != token:
            return f"has another folder at {folder} than here; mount the same one, or choose another with --home"
    return ""


def _code_lacking(wanted: MustHave) -> str:
    if own_code() != wanted.code:
        return f"runs other code of ifsl_bench {ifsl_bench.__version__} than this machine; install the same on both"
    from ifsl_bench.plugin.method_source import method_source

    for name, description, source in wanted.methods:
        try:
            chosen = pickle.loads(description)
        except (ImportError, AttributeError, UserError) as error:
            return f"cannot load method {name} ({one_line(str(error))}); install it there as it is installed here"
        if method_source(chosen.method) != source:
            return f"has other code of method {name} than this machine; install the same there"
    return ""


def without_accelerator() -> bool:
    """Tells whether this process sees no accelerator, whatever it was declared to have."""
    from ifsl_bench.backbone.device import choose_device

    return choose_device("auto").type == "cpu"
