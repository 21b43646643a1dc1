"""Training states on disk: tensors in a safetensors file, everything else in a JSON file that names it.

Saving writes the tensors under a new name, then replaces the JSON, then removes the old tensors; a process killed at
any point leaves a complete state, the old one or the new one. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import PARTIAL, disk_errors, read_json, sha256_file, write_bytes, write_json

FORMAT = 1


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
            previous = {path.name for path in self.folder.glob("*.safetensors")}
            number = 1 + max((int(p.split(".")[0].split("-")[-1]) for p in previous), default=0)
            name = f"state-{number}.safetensors"
            content = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            write_bytes(self.folder / name, save(content))
            entry = {"file": name, "sha256": sha256_file(self.folder / name)}
            whole = {**info, "format": FORMAT, "tensors": entry}
            write_json(self.json, whole)
            leftovers = [*previous, *(p.name for p in self.folder.glob(f"{PARTIAL}*"))]
            for old in leftovers:
                with contextlib.suppress(OSError):
                    (self.folder / old).unlink()
        return whole

    def info(self) -> dict[str, Any] | None:
        """The JSON part, or None if nothing was saved yet.

        Raises:
            CorruptFile: damaged, or of another format version.
        """
        if not self.json.exists():
            return None
        info = read_json(self.json)
        if info.get("format") != FORMAT or "tensors" not in info:
            raise CorruptFile(f"{self.json} is in format {info.get('format')!r}, this version reads {FORMAT}")
        return info

    def load(self) -> State | None:
        """The latest state, or None if nothing was saved yet.

        Raises:
            CorruptFile: a file is missing, cut short or changed; names it.
        """
        from safetensors.torch import load_file

        info = self.info()
        if info is None:
            return None
        path = self.folder / info["tensors"]["file"]
        if not path.exists():
            raise CorruptFile(f"{path} is missing, though {self.json.name} names it")
        if sha256_file(path) != info["tensors"]["sha256"]:
            raise CorruptFile(f"{path} is not what was written: its checksum differs")
        return State(load_file(path), info)


def is_finished(folder: Path, **facts: Any) -> bool:
    """Whether the folder holds a training that ran to its end and records ``facts``; a damaged one counts as none."""
    try:
        info = CheckpointFolder(folder).info()
    except CorruptFile:
        return False
    return bool(info and info.get("finished") and all(info.get(key) == value for key, value in facts.items()))
