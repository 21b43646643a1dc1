"""Training states on disk: tensors in a safetensors file, everything else in a JSON file that names it.

Saving writes the tensors under a new name, then replaces the JSON, then removes the old tensors; a process killed at
any point leaves a complete state, the old one or the new one. Nothing is pickled. The JSON file has the checksum of the
tensors and one of itself, see :mod:`ifsl_bench.common.sealed`; in one of an older version, the latter is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import PARTIAL, disk_errors, open_file, read_errors, sha256_file, write_bytes
from ifsl_bench.common.sealed import check_kinds, read_sealed, write_sealed

_TENSORS = re.compile(r"state-([0-9]{1,18})\.safetensors")  # other files in the folder are not ours


@dataclass(frozen=True)
class State:
    """Tensors by name, and JSON-able facts about them."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]


class CheckpointFolder:
    """The latest state of one training, in a folder of its own. The caller holds the folder's lock when saving."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.json = folder / "checkpoint.json"

    def save(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the state; returns the JSON part as :meth:`info` would."""
        from safetensors.torch import save

        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            previous = [match for path in self.folder.iterdir() if (match := _TENSORS.fullmatch(path.name))]
            name = f"state-{1 + max((int(match[1]) for match in previous), default=0)}.safetensors"
            write_bytes(self.folder / name, save(_on_host(tensors)))
            entry = {"file": name, "sha256": sha256_file(self.folder / name)}
            whole = write_sealed(self.json, {**info, "tensors": entry})
            leftovers = [*(match[0] for match in previous), *(p.name for p in self.folder.glob(f"{PARTIAL}*"))]
            for old in leftovers:
                with contextlib.suppress(OSError):
                    (self.folder / old).unlink()
        return whole

    def info(self) -> dict[str, Any] | None:
        """The JSON part, or None if nothing was saved yet.

        Raises:
            CorruptFile: damaged, or of another format version.
            UserError: it may not be read.
        """
        try:
            info = read_sealed(self.json)
        except FileNotFoundError:
            return None
        check_kinds(self.json, info, {"tensors": dict})
        check_kinds(self.json, info["tensors"], {"file": str, "sha256": str})
        if not _TENSORS.fullmatch(info["tensors"]["file"]):
            raise CorruptFile(f"{self.json} is damaged: it names {info['tensors']['file']!r} as its tensors")
        return info

    def load(self) -> State | None:
        """The latest state, or None if nothing was saved yet.

        Raises:
            CorruptFile: a file is missing, cut short or changed; names it.
            UserError: one may not be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        info = self.info()
        if info is None:
            return None
        path = self.folder / info["tensors"]["file"]
        try:
            with open_file(path) as file, read_errors(path):  # load_file opens no path that is not UTF-8
                content = file.read()
            if hashlib.sha256(content).hexdigest() != info["tensors"]["sha256"]:
                raise CorruptFile(f"{path} is not what was written: its checksum differs")
            return State(load(content), info)
        except FileNotFoundError:
            raise CorruptFile(f"{path} is missing, though {self.json.name} names it") from None
        except SafetensorError as error:
            raise CorruptFile(f"{path} holds no tensors ({error})") from error


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory; from a device they come in one transfer for each type."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for key, value in tensors.items():
        groups.setdefault((value.device, value.dtype), []).append(key)
    found: dict[str, Tensor] = {}
    for keys in groups.values():
        flat = torch.cat([tensors[key].detach().reshape(-1) for key in keys]).cpu()
        for key, part in zip(keys, flat.split([tensors[key].numel() for key in keys]), strict=True):
            found[key] = part.reshape(tensors[key].shape).clone()  # safetensors takes no parts of a common memory
    return found


def finished(folder: Path, **facts: Any) -> State | None:
    """A whole state of a training that ran to its end and records ``facts``, None where there is none.

    It needs no lock, which a read-only folder does not grant: where another process is replacing what is there, or it
    is damaged, there is none, and who wants to make it looks again under the lock.

    Raises:
        UserError: it may not be read.
    """
    try:
        return CheckpointFolder(folder).load() if is_finished(folder, **facts) else None
    except CorruptFile:
        return None


def is_finished(folder: Path, **facts: Any) -> bool:
    """Whether the folder holds a training that ran to its end and records ``facts``; a damaged one counts as none."""
    try:
        info = CheckpointFolder(folder).info()
    except CorruptFile:
        return False
    return bool(info and info.get("finished") is True and all(info.get(key) == value for key, value in facts.items()))
