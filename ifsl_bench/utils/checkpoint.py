"""Training states on disk: tensors in a safetensors file, everything else in a JSON file that names it.

Saving writes the tensors under a new name, then replaces the JSON, then removes the old tensors; a process killed at
any point leaves a complete state, the old one or the new one. Nothing is pickled. The JSON file has the checksum of the
tensors and one of itself, see :mod:`ifsl_bench.utils.serialization`. The caller of `write_tensors` holds the folder's
lock.
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

from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import (
    PARTIAL_MARK,
    open_file,
    record_last_use,
    translate_disk_errors,
    translate_read_errors,
    write_bytes,
)
from ifsl_bench.utils.serialization import check_value_types, read_checksummed, write_checksummed

_TENSORS_FILE_PATTERN = re.compile(r"state-([0-9]+)\.safetensors")  # other files here are not ours


@dataclass(frozen=True)
class CheckpointState:
    """Tensors by name, and JSON-able facts about them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


class CheckpointFolder:
    """The latest state of one training, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata_file = folder / "checkpoint.json"

    def write_tensors(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the state; return the JSON part as :meth:`read_metadata` would.

        Args:
            tensors: name -> tensor, on any device.
            info: the JSON part.
        """
        from safetensors.torch import save

        # Copies in the plain order, since safetensors takes no parts of a common memory, and no other order.
        copies = {
            key: torch.clone(value.detach().cpu(), memory_format=torch.contiguous_format)
            for key, value in tensors.items()
        }
        return self.write_content(save(copies), info)

    def write_content(self, content: bytes, info: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the state, given its tensors as bytes; return the JSON part as :meth:`read_metadata` would.

        Args:
            content: of a safetensors file with the tensors.
            info: the JSON part.
        """
        with translate_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            previous = [
                match for path in self.folder.iterdir() if (match := _TENSORS_FILE_PATTERN.fullmatch(path.name))
            ]
            name = f"state-{1 + max((int(match[1]) for match in previous), default=0)}.safetensors"
            write_bytes(self.folder / name, content)
            facts = {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
            whole = write_checksummed(self.metadata_file, {**info, "tensors": facts})
            for old in (*(self.folder / match[0] for match in previous), *self.folder.glob(f"{PARTIAL_MARK}*")):
                with contextlib.suppress(OSError):
                    old.unlink()
        return whole

    def read_metadata(self) -> dict[str, Any] | None:
        """Return the JSON part, or None if nothing was saved yet.

        Raises:
            CorruptFile: damaged, or of another format version.
            UserError: it may not be read.
        """
        try:
            info = read_checksummed(self.metadata_file)
        except FileNotFoundError:
            return None
        check_value_types(self.metadata_file, info, {"tensors": dict})
        check_value_types(self.metadata_file, info["tensors"], {"file": str, "sha256": str})
        return info

    def load(self) -> CheckpointState | None:
        """Return the latest state, or None if nothing was saved yet.

        Raises:
            CorruptFile: a file is missing, cut short or changed; names it. Without the lock, another process may just
                have replaced it.
            UserError: one may not be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        info = self.read_metadata()
        if info is None:
            return None
        try:
            state = CheckpointState(load(self.read_content(info)), info)
        except SafetensorError as error:
            raise CorruptFile(f"{self.folder / info['tensors']['file']} holds no tensors ({error})") from error
        record_last_use(self.metadata_file)
        return state

    def read_content(self, info: dict[str, Any]) -> bytes:
        """Return the file of tensors that :meth:`read_metadata` names; raise :class:`CorruptFile` if it changed."""
        path = self.folder / info["tensors"]["file"]
        try:
            with open_file(path) as file, translate_read_errors(path):  # load_file opens no path that is not UTF-8
                content = file.read()
        except FileNotFoundError:
            raise CorruptFile(f"{path} is missing, though {self.metadata_file.name} names it") from None
        if hashlib.sha256(content).hexdigest() != info["tensors"]["sha256"]:
            raise CorruptFile(f"{path} is not what was written: its checksum differs")
        return content


def read_finished_metadata(folder: Path, **facts: Any) -> dict[str, Any] | None:
    """Return the JSON part of a training that ran to its end and records ``facts``; None if there is none.

    It needs no lock, which a read-only folder does not grant.
    """
    try:
        info = CheckpointFolder(folder).read_metadata()
    except CorruptFile:
        return None
    ended = info is not None and info.get("finished") is True
    return info if info and ended and all(info.get(key) == value for key, value in facts.items()) else None


def read_unfinished_counter(folder: Path, counter: str) -> int:
    """Return an unfinished training's own counter; 0 if there is no such training, or its state is damaged.

    Args:
        folder: of the checkpoint.
        counter: its key in the JSON part.
    """
    try:
        info = CheckpointFolder(folder).read_metadata()
    except UserError:
        return 0
    count = info.get(counter) if info and info.get("finished") is not True else 0
    return max(0, count) if type(count) is int else 0
