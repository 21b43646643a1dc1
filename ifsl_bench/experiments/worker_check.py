"""Checks a worker before it gets work; runs on the worker, and imports nothing heavy before the rest is checked."""

from __future__ import annotations

import os
import pickle
import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ifsl_bench.utils.errors import UserError, one_line
from ifsl_bench.utils.files import PARTIAL, Paths, own_code

ACCELERATOR = "GPU"  # the resource that a worker with one declares
PACKAGES = ("ifsl_bench", "torch", "numpy", "numba", "distributed")  # that decide digits, or whether messages arrive


@dataclass(frozen=True)
class MustHave:
    """The folders, versions and code that every worker must have."""

    tokens: Mapping[str, str]  # files in the home and results folders, and what is in them
    versions: Mapping[str, str]  # of Python, packages and the code of this one
    methods: tuple[tuple[str, bytes, str], ...] = field(default=(), repr=False)  # name, pickled, identity of its code


@contextmanager
def wanted(home: Paths, methods: Iterable[tuple[str, bytes, str]] = ()) -> Iterator[MustHave]:
    """Yield what workers must have; while the block runs, files in the folders let them check these.

    Args:
        home: the folders.
        methods: name, pickled description and identity of the code of each method.
    """
    tokens = {}
    try:
        for folder in (home.cache, home.results):
            with suppress(OSError):  # a read-only home that has all that is needed is a good one
                folder.mkdir(parents=True, exist_ok=True)
                file, token = folder / f"{PARTIAL}token-{secrets.token_hex(8)}", secrets.token_hex(8)
                file.write_text(token)
                tokens[str(file)] = token
        yield MustHave(tokens, versions(), tuple(methods))
    finally:
        for path in tokens:
            Path(path).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Return what decides digits in this process: versions, and the digest of this package's code."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return {**installed, "code of ifsl_bench": own_code()[:12]}


def unfit(must_have: MustHave, dask_worker: Any = None) -> str:
    """Return in one line why this process cannot work for a campaign; "" where it can.

    Args:
        must_have: folders, versions and methods.
        dask_worker: of this process, set by Dask.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command itself has it; read when torch is imported
    mine, theirs = versions(), must_have.versions
    if differing := [f"{name} {mine[name]} (the command: {theirs[name]})" for name in theirs
                     if mine[name] != theirs[name]]:  # fmt: skip
        return f"has {', '.join(differing)}: install the same on both"
    for name, token in must_have.tokens.items():
        with suppress(OSError):
            if Path(name).read_text() == token:
                continue
        return (f"lacks the folder {Path(name).parent} of this machine, or has another one there; mount the same one, "
                "or choose another with --home or --results")  # fmt: skip
    from ifsl_bench.backbones.device import choose_device
    from ifsl_bench.plugin.method_source import method_source

    for name, description, source in must_have.methods:
        try:
            method = pickle.loads(description).method
        except (ImportError, AttributeError, UserError) as error:
            return f"cannot load method {name} ({one_line(str(error))}); install it there as it is installed here"
        if method_source(method) != source:
            return f"has other code of method {name} than this machine; install the same there"
    accelerated = dask_worker is not None and dask_worker.state.total_resources.get(ACCELERATOR, 0) >= 1
    if accelerated and choose_device("auto").type == "cpu":
        return f"declares {ACCELERATOR}=1, but PyTorch sees none there"
    return ""
