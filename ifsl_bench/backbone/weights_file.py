"""A finished pretraining as one file: its weights, what made them, and how accurate they are.

The file is in the safetensors format, so other programs read its tensors. The header's metadata hold, as JSON with a
checksum over itself, the definition of the pretraining, from which its key follows, and what was recorded of it; and
the header that the weights have in the cache. With that one in its place the file is, byte for byte, the cache's file
of tensors, whose SHA-256 results name: a file that passes :func:`read_weights` holds the weights with that checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ifsl_bench.common.errors import CorruptFile, is_printable
from ifsl_bench.common.files import open_file, read_errors, sha256_json, write_bytes
from ifsl_bench.common.json_text import strict_json
from ifsl_bench.common.limits import WEIGHTS_FILE, WEIGHTS_HEADER

OURS = "ifsl_bench"  # the key of our metadata
FORM = 1
SECONDS = 1e10  # three hundred years; whoever says more was not timed
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,180}-[0-9a-f]{12}")
TEXT = 300  # characters of a text in what is recorded
KINDS: dict[str, Any] = {
    "key": str,
    "finished": bool,
    "epoch": int,
    "seconds": (int, float),
    "seed": int,
    "bf16": bool,
    "precision": str,
    "device": str,
    "processes": list,
    "accuracy": dict,
    "rounded": str,
}
TYPES = {"F16", "F32", "I64"}  # of tensors: weights; statistics of batch norm; how many batches these saw


@dataclass(frozen=True)
class Weights:
    """What such a file says.

    Attributes:
        definition: what made the weights, as :func:`ifsl_bench.backbone.pretrain.definition` has it.
        info: what was recorded, as in the cache's ``checkpoint.json``, with the checksum of the tensors.
    """

    definition: dict[str, Any]
    info: dict[str, Any]

    @property
    def key(self) -> str:
        return str(self.info["key"])

    @property
    def sha256(self) -> str:
        return str(self.info["tensors"]["sha256"])


def write_weights(path: Path, content: bytes, definition: Mapping[str, Any], info: Mapping[str, Any]) -> Weights:
    """Writes a file that :func:`read_weights` takes.

    Args:
        content: the cache's file of tensors.
        info: what was recorded, with ``key``.

    Raises:
        UserError: it cannot be written.
    """
    size = int.from_bytes(content[:8], "little")
    plain = content[8 : 8 + size].decode()
    recorded = {name: info[name] for name in KINDS} | {"tensors": {"sha256": hashlib.sha256(content).hexdigest()}}
    said = {"format": FORM, "definition": dict(definition), "info": recorded}
    metadata = {OURS: json.dumps(said | {"checksum": sha256_json(said)}), "header": plain}
    header = json.dumps({"__metadata__": metadata, **json.loads(plain)}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of eight
    write_bytes(path, len(header).to_bytes(8, "little") + header + content[8 + size :])
    return Weights(json.loads(json.dumps(said))["definition"], recorded)


def read_facts(path: Path) -> Weights:
    """What a file says of itself; of its weights nothing is read, so they may be damaged.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or none of ours.
        UserError: it may not be read.
    """
    return _facts(path, _header(path)[0])


def read_weights(path: Path) -> tuple[Weights, bytes]:
    """What a file says, and the cache's file of tensors that it holds, which has the checksum that it says.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, none of ours, or holds what no pretraining leaves.
        UserError: it may not be read.
    """
    header, size = _header(path)
    found = _facts(path, header)
    with open_file(path) as file, read_errors(path):
        file.seek(8 + size)
        data = file.read()
    plain = header["__metadata__"]["header"].encode()
    content = len(plain).to_bytes(8, "little") + plain + data
    if hashlib.sha256(content).hexdigest() != found.sha256:
        raise CorruptFile(f"{path} is damaged: its weights are not those that it names; get another copy")
    if _parsed(path, plain) != {name: value for name, value in header.items() if name != "__metadata__"}:
        raise CorruptFile(f"{path} is damaged: it describes its tensors in two ways; get another copy")
    _check_tensors(path, content)
    return found, content


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and its size in bytes."""
    with open_file(path) as file, read_errors(path):
        whole = path.stat().st_size
        WEIGHTS_FILE.check(whole, str(path), CorruptFile)
        size = int.from_bytes(file.read(8), "little")
        if whole < 8 or size > whole - 8:
            raise CorruptFile(f"{path} is no safetensors file, or is cut short; get another copy")
        WEIGHTS_HEADER.check(size, str(path), CorruptFile)
        header = _parsed(path, file.read(size))
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get(OURS), str) or (
        not isinstance(metadata.get("header"), str)
    ):  # fmt: skip
        raise CorruptFile(f"{path} does not say which pretraining it is of; such files come from "
                          f"'ifsl-bench weights export'")  # fmt: skip
    return header, size


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: its header is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is damaged: its header is no JSON object")
    return value


def _facts(path: Path, header: Mapping[str, Any]) -> Weights:
    """What the metadata say, checked: the key follows from the definition, and every text can be printed."""
    said = _parsed(path, header["__metadata__"][OURS].encode())
    if said.get("format") != FORM:
        raise CorruptFile(f"{path} is in format {said.get('format')!r:.40}, this version reads {FORM}")
    if said.pop("checksum", None) != sha256_json(said):
        raise CorruptFile(f"{path} is damaged: what it says of its pretraining is not what was written")
    definition, info = said.get("definition"), said.get("info")
    if not isinstance(definition, dict) or not isinstance(info, dict):
        raise CorruptFile(f"{path} is damaged: it lacks the definition of its pretraining")
    for name, kind in KINDS.items():
        value = info.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CorruptFile(f"{path} is damaged: {name} is {value!r:.40}")
        if isinstance(value, str) and not (is_printable(value) and len(value) <= TEXT):
            raise CorruptFile(f"{path} is damaged: {name} cannot be printed, or is longer than {TEXT} characters")
    accuracy, processes, tensors = info["accuracy"], info["processes"], info.get("tensors")
    if not all(name in ("base/val", "base/test") and type(value) in (int, float) and 0 <= value <= 1
               for name, value in accuracy.items()):  # fmt: skip
        raise CorruptFile(f"{path} is damaged: accuracy is {accuracy!r:.80}")
    if not all(type(count) is int and 0 < count < 1 << 31 for count in processes) or len(processes) > 1000:
        raise CorruptFile(f"{path} is damaged: processes is {processes!r:.40}")
    checksum = tensors.get("sha256") if isinstance(tensors, dict) else None
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
        raise CorruptFile(f"{path} is damaged: it lacks the checksum of its weights")
    if not (0 <= info["seconds"] <= SECONDS and math.isfinite(info["seconds"]) and 0 <= info["epoch"] < 1 << 31):
        raise CorruptFile(f"{path} is damaged: seconds is {info['seconds']!r:.40}, epoch {info['epoch']!r:.40}")
    if not info["finished"] or info["rounded"] != "float16":
        raise CorruptFile(f"{path} holds no finished pretraining of this version")
    key = info["key"]
    if not KEY.fullmatch(key) or not key.endswith(f"-{sha256_json(definition)[:12]}"):
        raise CorruptFile(f"{path} is damaged: its definition does not make {key!r:.80}")
    if definition.get("seed") != info["seed"]:
        raise CorruptFile(f"{path} is damaged: it says two seeds")
    known = {name: info[name] for name in KINDS} | {"tensors": {"sha256": checksum}}
    return Weights(definition, known)


def _check_tensors(path: Path, content: bytes) -> None:
    """Raises :class:`CorruptFile` where a file of tensors is none, or holds numbers that are not finite."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    size = int.from_bytes(content[:8], "little")
    kinds = {entry.get("dtype") for entry in _parsed(path, content[8 : 8 + size]).values() if isinstance(entry, dict)}
    if odd := kinds - TYPES:
        raise CorruptFile(f"{path} holds tensors of type {sorted(map(str, odd))[0]!r:.40}, which no pretraining leaves")
    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise CorruptFile(f"{path} holds no tensors ({error})") from error
    head = tensors.get("head.weight")
    if head is None or head.dim() != 2:
        raise CorruptFile(f"{path} holds no base classifier")
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise CorruptFile(f"{path}: {name!r:.80} is not finite")
