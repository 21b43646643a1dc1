"""How, where and with what a number was made."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from ifsl_bench._version import __version__
from ifsl_bench.backbone.device import describe_device
from ifsl_bench.common.errors import one_line

LIBRARIES = ("torch", "torchvision", "numpy")


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
        "command": one_line(command),  # a name of a file that is no text could not be written
        "version": __version__,
        "commit": commit(),
        "device": describe_device(device),
        "python": platform.python_version(),
        "libraries": libraries,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


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
