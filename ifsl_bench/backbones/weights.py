"""Files of weights: finished pretrainings, exported, imported and part of the package, and weights made elsewhere.

A file is in the safetensors format, so other programs read its tensors. The header's metadata hold, as JSON with its
own checksum, the definition of the pretraining, from which its key follows, and its record; and the header that the
weights have in the cache. With that header the file is, byte for byte, the cache's file of tensors, whose SHA-256
results name: a file that passes :func:`read_metadata_and_tensors` holds the weights with that checksum.

The folder ``weights`` of this package has one file for each pretraining that comes with it, ``KEY.safetensors``; others
are in the repository alone, see :mod:`ifsl_bench.backbones.fetch_weights`. A home that has nothing of a pretraining
copies its file, once; from then on everything works as if it had been trained there. With :func:`disable_packaged` a
home trains it instead; a note in the folder of the pretraining records it.
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
from ifsl_bench.backbones.fetch_weights import read_weights_list
from ifsl_bench.backbones.pretrained import (
    PACKAGED_WEIGHTS_DISABLED_FILE,
    find_packaged_file,
    format_accuracies,
    has_pretraining,
    is_package_used,
    read_weights_sha256,
)
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE
from ifsl_bench.utils.checkpoint import CheckpointFolder, read_finished_metadata
from ifsl_bench.utils.errors import CorruptFile, UserError, escape_controls, is_printable
from ifsl_bench.utils.files import (
    Paths,
    open_file,
    parse_json,
    quarantine_path,
    sha256_json,
    translate_read_errors,
    write_bytes,
)
from ifsl_bench.utils.limits import (
    FOREIGN_WEIGHTS_FILE_BYTES,
    FOREIGN_WEIGHTS_TENSORS,
    WEIGHTS_FILE_BYTES,
    WEIGHTS_HEADER_BYTES,
)
from ifsl_bench.utils.locks import hold_lock
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import write_checksummed

TRAIN_COMMANDS = "'run --pretrain' or 'pretrain --anew'"
SAFETENSORS_METADATA_KEY = "ifsl_bench"  # the key of our metadata
FORMAT_VERSION = 1
MAX_RECORDED_SECONDS = 1e10  # three hundred years
KEY_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,180}-[0-9a-f]{12}")
WEIGHTS_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # of files of weights that were made elsewhere
ShortText = Annotated[str, Meta(max_length=300)]


class TensorsFileRecord(msgspec.Struct):
    """Checksum of the cache's file of tensors."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class CheckpointRecord(msgspec.Struct):
    """The fields of ``checkpoint.json`` that a file has, in its order."""

    key: ShortText
    finished: bool
    epoch: Annotated[int, Meta(ge=0, lt=1 << 31)]
    seconds: Annotated[float, Meta(ge=0, le=MAX_RECORDED_SECONDS)]
    seed: int
    bf16: bool
    precision: ShortText
    device: ShortText
    processes: Annotated[list[Annotated[int, Meta(ge=1, lt=1 << 31)]], Meta(max_length=1000)]
    accuracy: dict[Literal["base/val", "base/test"], Annotated[float, Meta(ge=0, le=1)]]
    rounded: Literal["float16"]
    tensors: TensorsFileRecord
    recipe: ShortText = ""  # of a backbone that one trained


@dataclass(frozen=True)
class WeightsMetadata:
    """The metadata of a file of weights.

    Attributes:
        pretraining_definition: everything that determines the weights, see
            :func:`ifsl_bench.backbones.pretrained.define_pretraining`.
        training_record: the record, as in the cache's ``checkpoint.json``, with the checksum of the tensors.
    """

    pretraining_definition: dict[str, Any]
    training_record: dict[str, Any]

    @property
    def pretraining_key(self) -> str:
        """Name of the pretraining."""
        return str(self.training_record["key"])

    @property
    def sha256(self) -> str:
        """Checksum of the cache's file of tensors."""
        return str(self.training_record["tensors"]["sha256"])

    @property
    def accuracies_in_words(self) -> str:
        """Accuracies of the base classifier, in percent."""
        return format_accuracies(self.training_record["accuracy"])

    @property
    def has_embedded_features(self) -> bool:
        """Whether they are of embedded features, which come without images to train on."""
        return bool(self.pretraining_definition["pretraining"]["backbone"] == INCLUDED_BACKBONE)


def write_weights(path: Path, content: bytes, definition: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Write a file for :func:`read_metadata_and_tensors`.

    Args:
        path: the file.
        content: the cache's file of tensors.
        definition: everything that determines the weights.
        info: the record, with ``key``.

    Raises:
        UserError: it cannot be written.
    """
    size = int.from_bytes(content[:8], "little")
    plain = content[8 : 8 + size].decode()
    fields = [
        name for name in CheckpointRecord.__struct_fields__ if name != "tensors" and (name != "recipe" or name in info)
    ]
    recorded = {name: info[name] for name in fields} | {"tensors": {"sha256": hashlib.sha256(content).hexdigest()}}
    facts = {"format": FORMAT_VERSION, "definition": dict(definition), "info": recorded}
    metadata = {SAFETENSORS_METADATA_KEY: json.dumps(facts | {"checksum": sha256_json(facts)}), "header": plain}
    header = json.dumps({"__metadata__": metadata, **json.loads(plain)}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of eight
    write_bytes(path, len(header).to_bytes(8, "little") + header + content[8 + size :])


def read_metadata(path: Path) -> WeightsMetadata:
    """Read the metadata of a file, and nothing of its weights, which may be damaged.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or another kind of file.
        UserError: it may not be read.
    """
    return _parse_metadata(path, _read_header_and_size(path)[0])


def read_metadata_and_tensors(path: Path) -> tuple[WeightsMetadata, bytes]:
    """Read and check a file; return its metadata and the cache's file of tensors.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or another kind of file.
        UserError: it may not be read.
    """
    header, size = _read_header_and_size(path)
    weights = _parse_metadata(path, header)
    with open_file(path) as file, translate_read_errors(path):
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


def _read_header_and_size(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and its size in bytes."""
    with open_file(path) as file, translate_read_errors(path):
        file_size = path.stat().st_size
        WEIGHTS_FILE_BYTES.check(file_size, str(path), CorruptFile)
        size = int.from_bytes(file.read(8), "little")
        if file_size < 8 or size > file_size - 8:
            raise CorruptFile(f"{path} is no safetensors file, or is cut short; get another copy")
        WEIGHTS_HEADER_BYTES.check(size, str(path), CorruptFile)
        header = parse_json(file.read(size), f"the header of {path}")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not all(
        isinstance(metadata.get(name), str) for name in (SAFETENSORS_METADATA_KEY, "header")
    ):
        raise CorruptFile(f"{path} does not say its pretraining; files that do come from 'ifsl-bench weights export'")
    return header, size


def _parse_metadata(path: Path, header: Mapping[str, Any]) -> WeightsMetadata:
    """Check the metadata: the key follows from the definition, and every text can be printed."""
    facts = parse_json(header["__metadata__"][SAFETENSORS_METADATA_KEY].encode(), f"the header of {path}")
    if facts.get("format") != FORMAT_VERSION:
        raise CorruptFile(f"{path} is in format {facts.get('format')!r:.40}, this version reads {FORMAT_VERSION}")
    if facts.pop("checksum", None) != sha256_json(facts):
        raise CorruptFile(f"{path} is damaged: its description of the pretraining is not what was written")
    info = facts.get("info", {})
    try:
        definition, recorded = (
            msgspec.convert(facts.get("definition"), dict[str, Any]),
            msgspec.convert(info, CheckpointRecord),
        )
    except msgspec.ValidationError as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    if not recorded.finished or not all(map(is_printable, (recorded.precision, recorded.device, recorded.recipe))):
        raise CorruptFile(f"{path} holds no finished pretraining, or texts that cannot be printed")
    key = recorded.key
    if not KEY_PATTERN.fullmatch(key) or not key.endswith(f"-{sha256_json(definition)[:12]}"):
        raise CorruptFile(f"{path} is damaged: its definition does not make {key!r:.80}")
    fields = {name: info[name] for name in CheckpointRecord.__struct_fields__ if name in info}
    return WeightsMetadata(definition, fields | {"tensors": {"sha256": recorded.tensors.sha256}})


def list_packaged_weights(home: Paths) -> dict[str, WeightsMetadata]:
    """Return the metadata of the files that come with the package, or were fetched into a home, by key.

    A damaged file is left out.
    """
    weights = dict[str, WeightsMetadata]()
    packaged = {path.stem for folder in pretrained.PACKAGED_FOLDERS for path in folder.glob("*.safetensors")}
    for key in sorted(packaged | read_weights_list().files.keys()):
        path = find_packaged_file(home, key)
        with suppress(CorruptFile):
            weights |= {key: read_metadata(path)} if path else {}
    return weights


def has_other_weights(home: Paths, key: str, sha256: str | None) -> bool:
    """Return whether a run in a home begins with other weights than some: those in the home, else in the package.

    Weights that have to be trained first may become the same; those of the package that are trained nevertheless do
    not, nor does a head that was fitted on the features of other weights.

    Args:
        home: where weights are stored.
        key: of the pretraining.
        sha256: checksum of the weights to compare with.
    """
    path, there = find_packaged_file(home, key), read_weights_sha256(home, key)
    if there is not None:
        return there != sha256
    head = read_finished_metadata(home.pretrained / key)
    if head and "features_sha256" in head:
        return has_other_weights(home, head["features"], head["features_sha256"])
    if path is None:
        return False
    if not is_package_used(home, key):
        return True
    try:
        return read_metadata(path).sha256 != sha256
    except CorruptFile:
        return False


def install_packaged(home: Paths, key: str, reporter: Reporter) -> None:
    """Copy the weights that come with the package into a home that has nothing of this pretraining, and report it.

    The caller holds the lock of the pretraining's folder.

    Args:
        home: where weights are kept.
        key: of the pretraining.
        reporter: hears of it.

    Raises:
        CorruptFile: the package's file is damaged.
        UserError: a file may not be read or written.
    """
    if has_pretraining(home, key):
        return
    path, is_listed = find_packaged_file(home, key), key in read_weights_list().files
    if path is None:
        if is_listed:
            reporter.say(
                f"stored rows start from weights that are not here, and are trained here now; to have the same, stop "
                f"and get them: ifsl-bench weights fetch {key}"
            )
        return
    try:
        weights, content = read_metadata_and_tensors(path)
        if weights.pretraining_key != key:
            raise CorruptFile(f"{path} holds the weights of {weights.pretraining_key}")
    except CorruptFile as error:
        again = f"'ifsl-bench weights fetch {key}'" if is_listed else "install ifsl_bench again"
        raise CorruptFile(f"{error}; {again}, or train them here: {TRAIN_COMMANDS}") from error
    _write_to_home(home, weights, content)
    here = "" if weights.has_embedded_features else f" ({TRAIN_COMMANDS} trains them here)"
    reporter.say(f"backbone and base classifier come with the package: {key}, {weights.accuracies_in_words}{here}")


def _write_to_home(home: Paths, weights: WeightsMetadata, content: bytes) -> None:
    """Write weights into a home; the caller holds the lock of their folder."""
    info = {name: value for name, value in weights.training_record.items() if name != "tensors"}
    CheckpointFolder(home.pretrained / weights.pretraining_key).write_content(content, info)


def disable_packaged(home: Paths, key: str, reporter: Reporter) -> None:
    """Make a home train a pretraining whose weights come with the package, or can be fetched.

    Copied weights are kept under another name; a training here, finished or interrupted, stays.

    Args:
        home: where weights are kept.
        key: of the pretraining.
        reporter: hears of copied weights.

    Raises:
        UserError: they are of embedded features, which cannot be trained; or a file may not be read or written.
    """
    path, folder = find_packaged_file(home, key), home.pretrained / key
    if path is None and key not in read_weights_list().files:
        return
    weights = read_metadata(path) if path else None
    if weights and weights.has_embedded_features:
        raise UserError(f"{key} cannot be trained here: its features come without the images they are of")
    if (folder / PACKAGED_WEIGHTS_DISABLED_FILE).exists():
        return
    with hold_lock(folder, reporter.warn):
        if weights and read_weights_sha256(home, key) == weights.sha256:
            reporter.say(f"{key}: the weights from the package are kept as {quarantine_path(folder, 'replaced')}")
        write_checksummed(folder / PACKAGED_WEIGHTS_DISABLED_FILE, {"key": key})


def import_weights(file: Path, home: Paths, reporter: Reporter, force: bool = False) -> tuple[WeightsMetadata, bool]:
    """Copy the weights of an exported file into the home, where runs find them.

    Args:
        file: as 'weights export' writes it.
        home: where weights are kept.
        reporter: hears of weights that are replaced.
        force: replace others of the same pretraining, finished or not; they are kept under another name.

    Returns:
        The metadata, and whether anything was written: the same weights may be there already.

    Raises:
        UserError: there is no such file, it is damaged or another kind of file, or other weights are there.
    """
    try:
        weights, content = read_metadata_and_tensors(file)
    except FileNotFoundError:
        raise UserError(f"there is no {file}") from None
    folder = home.pretrained / weights.pretraining_key
    with hold_lock(folder, reporter.warn, state=""):
        try:
            info = CheckpointFolder(folder).read_metadata()
        except CorruptFile as error:
            info = None
            reporter.warn(f"{error}; the damaged files are in {quarantine_path(folder)}")
        if info is not None:
            state = "weights" if info["finished"] is True else "an unfinished training"
            if state == "weights" and info["tensors"]["sha256"] == weights.sha256:
                return weights, False
            if not force:
                raise UserError(f"{folder} holds {state} of this pretraining already; --force puts them aside")
            reporter.say(f"{state} of {weights.pretraining_key} are kept as {quarantine_path(folder, 'replaced')}")
        _write_to_home(home, weights, content)
    return weights, True


def list_weights(home: Paths) -> list[dict[str, Any]]:
    """Return a row for each finished pretraining in the home or the package, or that can be fetched.

    Accuracies are in percent.
    """
    offered = {key: weights.training_record for key, weights in list_packaged_weights(home).items()}
    to_fetch = {key: file for key, file in read_weights_list().files.items() if key not in offered}
    keys = [path.name for path in home.pretrained.iterdir()] if home.pretrained.is_dir() else []
    here = {
        key: info
        for key in filter(KEY_PATTERN.fullmatch, keys)
        if (info := read_finished_metadata(home.pretrained / key))
    }
    rows = []
    for key, info in here.items():
        same = key in offered and offered[key]["tensors"] == {"sha256": info["tensors"]["sha256"]}
        rows.append(
            _make_weights_row(key, offered.pop(key) if same else info, "home, from the package" if same else "home")
        )
    rows += [
        _make_weights_row(key, info, "package, not used" if key in here else "package") for key, info in offered.items()
    ]
    for key, file in to_fetch.items():
        empty = {"base/val": "", "base/test": "", "weights": "", "trained on": ""}
        rows.append({"pretraining": key, **empty, "where": f"to be fetched, {file.size / 1e6:.1f} MB"})
    return sorted(rows, key=lambda row: (row["pretraining"], row["where"]))


def _make_weights_row(key: str, info: dict[str, Any], where: str) -> dict[str, Any]:
    accuracy = info.get("accuracy", {})
    shown = {pool: f"{100 * accuracy[pool]:.2f}%" if pool in accuracy else "" for pool in ("base/val", "base/test")}
    training = {"weights": info["tensors"]["sha256"][:16], "trained on": info["device"]}
    return {"pretraining": key, "recipe": info.get("recipe", ""), **shown, **training, "where": where}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights that was made elsewhere, by name; no code in it is run.

    Raises:
        UserError: no such file, one that is too large, or no weights.
    """
    if not os.path.isfile(path):
        raise UserError(f"there is no file of weights {path}")
    if path.suffix not in WEIGHTS_SUFFIXES:
        raise UserError(f"{path}: a file of weights ends in {', '.join(WEIGHTS_SUFFIXES)}")
    FOREIGN_WEIGHTS_FILE_BYTES.check(path.stat().st_size, str(path))
    try:
        safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or escape_controls(str(error))}") from error
    except (EOFError, KeyError, pickle.UnpicklingError) as error:  # empty, text, or more than tensors
        why = "torch.save did not write it, not to its end, or with more than tensors by name"
        raise UserError(f"{path} holds no weights: {why}; save its state_dict") from error
    except Exception as error:  # of many kinds, safetensors' own among them
        raise UserError(
            f"{path} holds no weights: {type(error).__name__}: {escape_controls(str(error))[:200]}"
        ) from error
    for key in ("state_dict", "model", "params", "embedding"):  # as training scripts wrap them
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} holds no weights: it should hold tensors by name, as a state_dict does")
    FOREIGN_WEIGHTS_TENSORS.check(len(content), str(path))
    return {str(name).removeprefix("module."): value for name, value in content.items()}
