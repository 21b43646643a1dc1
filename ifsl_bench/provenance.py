"""How, where and with what a number was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from ifsl_bench._version import __version__
from ifsl_bench.device import describe_device


def provenance(command: str, device: torch.device) -> dict[str, object]:
    """Command, version, commit, device, library versions and time (UTC)."""
    return {
        "command": command,
        "version": __version__,
        "commit": commit(),
        "device": describe_device(device),
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit of the checkout this package runs from, with "+changes" where files differ; "" outside one."""
    root = Path(__file__).resolve().parent.parent
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
