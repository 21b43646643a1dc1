"""The weights that come with the package, and how a home comes to use them.

The folder ``weights`` beside this file has one file for each, ``KEY.safetensors``, as ``ifsl-bench weights export``
writes them. A home that has nothing of a pretraining takes these, once; from then on they are its own, and everything
that is kept in the cache is found as if they had been trained there. Whoever wants to train them says so, and a note in
the folder of the pretraining keeps it so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.weights_file import Weights, read_facts, read_weights
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, set_aside
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.sealed import write_sealed
from ifsl_bench.protocol.task import INCLUDED

FOLDER = Path(__file__).parent / "weights"
NOTE = "trained-here.json"
HERE = "'run --pretrain' or 'pretrain --anew'"


def shipped_file(key: str) -> Path | None:
    """The file of a pretraining that comes with the package; None where none does."""
    path = FOLDER / f"{key}.safetensors"
    return path if path.is_file() else None


def shipped() -> dict[str, Weights]:
    """What comes with the package, by key; a damaged file is left out."""
    found = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        try:
            found[path.stem] = read_facts(path)
        except CorruptFile:
            continue
    return found


def is_offered(home: Home, key: str) -> bool:
    """Whether the package has weights that the home would take: it has nothing of this pretraining."""
    return shipped_file(key) is not None and not _is_begun(home.pretrained / key)


def _is_begun(folder: Path) -> bool:
    return os.path.lexists(folder / "checkpoint.json") or (folder / NOTE).exists()


def weights_to_use(home: Home, key: str) -> str | None:
    """The checksum of the weights that a run in this home begins with: those in the home, else those of the package.

    None where they have to be trained first; "" where they come with the package and are to be trained all the same.
    """
    if (there := pretrained_sha256(home, key)) is not None:
        return there
    path = shipped_file(key)
    if path is None or not is_offered(home, key):
        return "" if path else None
    try:
        return read_facts(path).sha256
    except CorruptFile:
        return None


def pretrained_sha256(home: Home, key: str) -> str | None:
    """The checksum of a finished pretraining in the cache, None where there is none (a damaged one counts as none)."""
    try:
        info = CheckpointFolder(home.pretrained / key).info()
    except CorruptFile:
        return None
    return str(info["tensors"]["sha256"]) if info and info.get("finished") is True else None


def features_sha256(home: Home, key: str) -> str | None:
    """The checksum of what the features of a finished pretraining depend on; None where there is none.

    It is that of the weights; of a backbone from elsewhere, that of its file alone.
    """
    try:
        info = CheckpointFolder(home.pretrained / key).info()
    except CorruptFile:
        return None
    return str(info.get("weights", info["tensors"]["sha256"])) if info and info.get("finished") is True else None


def adopt(home: Home, key: str, reporter: Reporter) -> None:
    """Puts the weights that come with the package into a home which has nothing of this pretraining, and says so.

    The caller holds the lock of the pretraining's folder.

    Raises:
        CorruptFile: the package's file is damaged; says what to do.
        UserError: a file may not be read or written.
    """
    path = shipped_file(key)
    if path is None or not is_offered(home, key):
        return
    try:
        found, content = read_weights(path)
        if found.key != key:
            raise CorruptFile(f"{path} holds the weights of {found.key}")
    except CorruptFile as error:
        raise CorruptFile(f"{error}; install ifsl_bench again, or train them here: {HERE}") from error
    put(home, found, content)
    shown = ", ".join(f"{pool} {100 * value:.2f}%" for pool, value in found.info["accuracy"].items())
    other = "" if _is_of_features(found) else f" ({HERE} trains them here)"
    reporter.say(f"backbone and base classifier come with the package: {key}, {shown}{other}")


def _is_of_features(weights: Weights) -> bool:
    """Whether they are those of embedded features, which nobody can train."""
    return bool(weights.definition["pretraining"]["backbone"] == INCLUDED)


def put(home: Home, weights: Weights, content: bytes) -> dict[str, Any]:
    """Writes weights into a home; the caller holds the lock of their folder."""
    info = {name: value for name, value in weights.info.items() if name != "tensors"}
    return CheckpointFolder(home.pretrained / weights.key).put(content, info)


def train_here(home: Home, key: str, reporter: Reporter) -> None:
    """Has a home train what it would take from the package; what it has trained so already stays.

    Weights that it has taken are kept under another name. An interrupted training goes on.

    Raises:
        UserError: they are those of embedded features, which nobody can train; or a file may not be read or written.
    """
    path, folder = shipped_file(key), home.pretrained / key
    if path is not None and _is_of_features(read_facts(path)):
        raise UserError(f"{key} cannot be trained here: its features come without the images they are of")
    if path is None or (folder / NOTE).exists():
        return
    with locked(folder, reporter.warn):
        store = CheckpointFolder(folder)
        try:
            info = store.info()
        except CorruptFile:
            info = None
        if info is not None and info["tensors"]["sha256"] == read_facts(path).sha256:
            reporter.say(f"{key}: the weights from the package are kept as {set_aside(folder, 'replaced')}")
        write_sealed(folder / NOTE, {"key": key})
