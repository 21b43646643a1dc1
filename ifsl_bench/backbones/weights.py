"""Weights as files: finished pretrainings, handed from home to home and shipped with the package, and weights made
elsewhere.

A file is in the safetensors format, so other programs read its tensors. The header's metadata hold, as JSON with a
checksum over itself, the definition of the pretraining, from which its key follows, and what was recorded of it; and
the header that the weights have in the cache. With that one in its place the file is, byte for byte, the cache's file
of tensors, whose SHA-256 results name: a file that passes :func:`read_weights` holds the weights with that checksum.

The folder ``weights`` beside this module has one file for each pretraining of the package, ``KEY.safetensors``. A home
that has nothing of a pretraining takes these, once; from then on they are its own, and everything that is kept in the
cache is found as if they had been trained there. Whoever wants to train them says so, and a note in the folder of the
pretraining keeps it so.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from ifsl_bench.backbones import pretrained
from ifsl_bench.backbones.pretrained import DISABLED, in_percent, is_offered, packaged_file, pretrained_sha256
from ifsl_bench.protocols.tasks.task import INCLUDED
from ifsl_bench.utils.checkpoint import CheckpointFolder, finished_info
from ifsl_bench.utils.checksummed_json import write_checksummed
from ifsl_bench.utils.errors import CorruptFile, UserError, is_printable, one_line
from ifsl_bench.utils.files import Paths, open_file, quarantine, read_errors, sha256_json, write_bytes
from ifsl_bench.utils.limits import GIVEN_TENSORS, GIVEN_WEIGHTS, WEIGHTS_FILE, WEIGHTS_HEADER
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.progress import Reporter

HERE = "'run --pretrain' or 'pretrain --anew'"
OURS = "ifsl_bench"  # the key of our metadata
FORM = 1
SECONDS = 1e10  # three hundred years; whoever says more was not timed
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,180}-[0-9a-f]{12}")
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")  # of files of weights that were made elsewhere
Text = Annotated[str, Meta(max_length=300)]


class Checksum(msgspec.Struct):
    """The checksum of the cache's file of tensors."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Recorded(msgspec.Struct):
    """The fields of ``checkpoint.json`` that a file hands on, in the order in which it has them."""

    key: Text
    finished: bool
    epoch: Annotated[int, Meta(ge=0, lt=1 << 31)]
    seconds: Annotated[float, Meta(ge=0, le=SECONDS)]
    seed: int
    bf16: bool
    precision: Text
    device: Text
    processes: Annotated[list[Annotated[int, Meta(ge=1, lt=1 << 31)]], Meta(max_length=1000)]
    accuracy: dict[Literal["base/val", "base/test"], Annotated[float, Meta(ge=0, le=1)]]
    rounded: Literal["float16"]
    tensors: Checksum


@dataclass(frozen=True)
class Weights:
    """The metadata of such a file.

    Attributes:
        definition: what made the weights, as :func:`ifsl_bench.backbones.pretrained.definition` has it.
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

    @property
    def accuracies(self) -> str:
        """Accuracies of the base classifier, in percent."""
        return in_percent(self.info["accuracy"])

    @property
    def of_features(self) -> bool:
        """Returns whether they are those of embedded features, which nobody can train."""
        return bool(self.definition["pretraining"]["backbone"] == INCLUDED)


def write_weights(path: Path, content: bytes, definition: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Writes a file that :func:`read_weights` takes.

    Args:
        content: the cache's file of tensors.
        info: what was recorded, with ``key``.

    Raises:
        UserError: it cannot be written.
    """
    size = int.from_bytes(content[:8], "little")
    plain = content[8 : 8 + size].decode()
    fields = [name for name in Recorded.__struct_fields__ if name != "tensors"]
    recorded = {name: info[name] for name in fields} | {"tensors": {"sha256": hashlib.sha256(content).hexdigest()}}
    facts = {"format": FORM, "definition": dict(definition), "info": recorded}
    metadata = {OURS: json.dumps(facts | {"checksum": sha256_json(facts)}), "header": plain}
    header = json.dumps({"__metadata__": metadata, **json.loads(plain)}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of eight
    write_bytes(path, len(header).to_bytes(8, "little") + header + content[8 + size :])


def read_facts(path: Path) -> Weights:
    """Reads the metadata of a file; of its weights nothing is read, so they may be damaged.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or none of ours.
        UserError: it may not be read.
    """
    return _facts(path, _header(path)[0])


def read_weights(path: Path) -> tuple[Weights, bytes]:
    """Reads the metadata of a file, and the cache's file of tensors that it holds, which has the checksum that it says.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or none of ours.
        UserError: it may not be read.
    """
    header, size = _header(path)
    weights = _facts(path, header)
    with open_file(path) as file, read_errors(path):
        file.seek(8 + size)
        data = file.read()
    plain = header["__metadata__"]["header"].encode()
    content = len(plain).to_bytes(8, "little") + plain + data
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise CorruptFile(f"{path} is damaged: its weights are not those that it names; get another copy")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CorruptFile(f"{path} holds no tensors ({error})") from error
    if "head.weight" not in tensors or tensors["head.weight"].dim() != 2:
        raise CorruptFile(f"{path} holds no base classifier")
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise CorruptFile(f"{path}: {name!r:.80} is not finite")
    return weights, content


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
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(name), str) for name in (OURS, "header")):
        raise CorruptFile(f"{path} does not say its pretraining; files that do come from 'ifsl-bench weights export'")
    return header, size


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: its header is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is damaged: its header is no JSON object")
    return value


def _facts(path: Path, header: Mapping[str, Any]) -> Weights:
    """Checks the metadata: the key follows from the definition, and every text can be printed."""
    facts = _parsed(path, header["__metadata__"][OURS].encode())
    if facts.get("format") != FORM:
        raise CorruptFile(f"{path} is in format {facts.get('format')!r:.40}, this version reads {FORM}")
    if facts.pop("checksum", None) != sha256_json(facts):
        raise CorruptFile(f"{path} is damaged: what it says of its pretraining is not what was written")
    info = facts.get("info", {})
    try:
        definition, recorded = msgspec.convert(facts.get("definition"), dict[str, Any]), msgspec.convert(info, Recorded)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    if not recorded.finished or not all(map(is_printable, (recorded.precision, recorded.device))):
        raise CorruptFile(f"{path} holds no finished pretraining, or texts that cannot be printed")
    key = recorded.key
    if not KEY.fullmatch(key) or not key.endswith(f"-{sha256_json(definition)[:12]}"):
        raise CorruptFile(f"{path} is damaged: its definition does not make {key!r:.80}")
    fields = {name: info[name] for name in Recorded.__struct_fields__}
    return Weights(definition, fields | {"tensors": {"sha256": recorded.tensors.sha256}})


def packaged_weights() -> dict[str, Weights]:
    """The files that come with the package, by key; a damaged file is left out."""
    weights = {}
    for path in sorted(pretrained.PACKAGED.glob("*.safetensors")):
        with suppress(CorruptFile):
            weights[path.stem] = read_facts(path)
    return weights


def weights_to_use(home: Paths, key: str) -> str | None:
    """The checksum of the weights that a run in this home begins with: those in the home, else those of the package.

    None where they have to be trained first; "" where they come with the package and are to be trained all the same,
    and where those in the home are a head that was fitted on the features of other weights.
    """
    path, there = packaged_file(key), pretrained_sha256(home, key)
    head = finished_info(home.pretrained / key) if there is None else None
    if head and "features_sha256" in head:
        return None if weights_to_use(home, head["features"]) in (None, head["features_sha256"]) else ""
    if there is not None or path is None:
        return there
    if not is_offered(home, key):
        return ""
    with suppress(CorruptFile):
        return read_facts(path).sha256
    return None


def install_packaged(home: Paths, key: str, reporter: Reporter) -> None:
    """Puts the weights that come with the package into a home which has nothing of this pretraining, and says so.

    The caller holds the lock of the pretraining's folder.

    Raises:
        CorruptFile: the package's file is damaged; says what to do.
        UserError: a file may not be read or written.
    """
    path = packaged_file(key)
    if path is None or not is_offered(home, key):
        return
    try:
        weights, content = read_weights(path)
        if weights.key != key:
            raise CorruptFile(f"{path} holds the weights of {weights.key}")
    except CorruptFile as error:
        raise CorruptFile(f"{error}; install ifsl_bench again, or train them here: {HERE}") from error
    _put(home, weights, content)
    here = "" if weights.of_features else f" ({HERE} trains them here)"
    reporter.say(f"backbone and base classifier come with the package: {key}, {weights.accuracies}{here}")


def _put(home: Paths, weights: Weights, content: bytes) -> None:
    """Writes weights into a home; the caller holds the lock of their folder."""
    info = {name: value for name, value in weights.info.items() if name != "tensors"}
    CheckpointFolder(home.pretrained / weights.key).put(content, info)


def disable_packaged(home: Paths, key: str, reporter: Reporter) -> None:
    """Has a home train what it would take from the package; what it has trained so already stays.

    Weights that it has taken are kept under another name. An interrupted training goes on.

    Raises:
        UserError: they are those of embedded features, which nobody can train; or a file may not be read or written.
    """
    path, folder = packaged_file(key), home.pretrained / key
    if path is None:
        return
    weights = read_facts(path)
    if weights.of_features:
        raise UserError(f"{key} cannot be trained here: its features come without the images they are of")
    if (folder / DISABLED).exists():
        return
    with locked(folder, reporter.warn):
        if pretrained_sha256(home, key) == weights.sha256:
            reporter.say(f"{key}: the weights from the package are kept as {quarantine(folder, 'replaced')}")
        write_checksummed(folder / DISABLED, {"key": key})


def export_weights(home: Paths, key: str, definition: Mapping[str, Any], to: Path) -> Weights | None:
    """Writes the weights that runs in a home begin with into one file; those of the package where the home has none.

    Args:
        definition: what made them.
        to: the file.

    Returns:
        What the file says; None where they are neither here nor finished.

    Raises:
        UserError: the file is there already, its folder is not, or the weights are not whole.
    """
    if os.path.exists(to):  # a name may be too long
        raise UserError(f"{to} is there already; remove it or choose another name with --to FILE")
    if not os.path.isdir(to.parent):
        raise UserError(f"there is no folder {to.parent}; make it, or choose another with --to FILE")
    store = CheckpointFolder(home.pretrained / key)
    info, path = store.info(), packaged_file(key)
    if info is None and path is not None:
        write_bytes(to, path.read_bytes())
    elif info is not None and info["finished"] is True:
        write_weights(to, store.content(info), definition, {"processes": [1], "key": key, **info})
    else:
        return None
    return read_weights(to)[0]  # what others are given is what they can read


def import_weights(file: Path, home: Paths, reporter: Reporter, force: bool = False) -> tuple[Weights, bool]:
    """Puts the weights of an exported file into the home, where runs find them.

    Args:
        force: put others of the same pretraining that are there aside, finished or not.

    Returns:
        What the file says, and whether anything was written: the same weights may be there already.

    Raises:
        UserError: there is no such file, it is damaged or none of ours, or others are there.
    """
    try:
        weights, content = read_weights(file)
    except FileNotFoundError:
        raise UserError(f"there is no {file}") from None
    folder = home.pretrained / weights.key
    with locked(folder, reporter.warn, state=""):
        try:
            info = CheckpointFolder(folder).info()
        except CorruptFile as error:
            info = None
            reporter.warn(f"{error}; the damaged files are in {quarantine(folder)}")
        if info is not None:
            state = "weights" if info["finished"] is True else "an unfinished training"
            if state == "weights" and info["tensors"]["sha256"] == weights.sha256:
                return weights, False
            if not force:
                raise UserError(f"{folder} holds {state} of this pretraining already; --force puts them aside")
            reporter.say(f"{state} of {weights.key} are kept as {quarantine(folder, 'replaced')}")
        _put(home, weights, content)
    return weights, True


def weights_listing(home: Paths) -> list[dict[str, Any]]:
    """A row for each finished pretraining in the home or the package; accuracies in percent."""
    offered = {key: weights.info for key, weights in packaged_weights().items()}
    keys = [path.name for path in home.pretrained.iterdir()] if home.pretrained.is_dir() else []
    here = {key: info for key in filter(KEY.fullmatch, keys) if (info := finished_info(home.pretrained / key))}
    rows = []
    for key, info in here.items():
        same = key in offered and offered[key]["tensors"] == {"sha256": info["tensors"]["sha256"]}
        rows.append(_row(key, offered.pop(key) if same else info, "home, from the package" if same else "home"))
    rows += [_row(key, info, "package, not used" if key in here else "package") for key, info in offered.items()]
    return sorted(rows, key=lambda row: (row["pretraining"], row["where"]))


def _row(key: str, info: dict[str, Any], where: str) -> dict[str, Any]:
    accuracy = info.get("accuracy", {})
    shown = {pool: f"{100 * accuracy[pool]:.2f}%" if pool in accuracy else "" for pool in ("base/val", "base/test")}
    training = {"weights": info["tensors"]["sha256"][:16], "trained on": info["device"]}
    return {"pretraining": key, **shown, **training, "where": where}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in it is run.

    Raises:
        UserError: no such file, one that is too large, or no weights.
    """
    if not os.path.isfile(path):
        raise UserError(f"there is no file of weights {path}")
    if path.suffix not in ENDINGS:
        raise UserError(f"{path}: a file of weights ends in {', '.join(ENDINGS)}")
    GIVEN_WEIGHTS.check(path.stat().st_size, str(path))
    try:
        safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(str(error))}") from error
    except (EOFError, KeyError, pickle.UnpicklingError) as error:  # empty, text, or more than tensors
        why = "torch.save did not write it, not to its end, or with more than tensors by name"
        raise UserError(f"{path} holds no weights: {why}; save its state_dict") from error
    except Exception as error:  # of many kinds, safetensors' own among them
        raise UserError(f"{path} holds no weights: {type(error).__name__}: {one_line(str(error))[:200]}") from error
    for key in ("state_dict", "model", "params", "embedding"):  # as training scripts wrap them
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} holds no weights: it should hold tensors by name, as a state_dict does")
    GIVEN_TENSORS.check(len(content), str(path))
    return {str(name).removeprefix("module."): value for name, value in content.items()}
