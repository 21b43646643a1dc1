"""Weights of backbones as files that people hand on, and a list of those that are here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ifsl_bench.backbone.pretrain import definition, pretraining_key
from ifsl_bench.backbone.registered import check_backbone
from ifsl_bench.backbone.shipped import put, shipped, shipped_file
from ifsl_bench.backbone.weights_file import KEY, Weights, read_weights, write_weights
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, open_file, read_errors, set_aside, write_bytes
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.outline import fingerprint_of
from ifsl_bench.data.preparing.prepare import not_prepared
from ifsl_bench.protocol.task_files import find
from ifsl_bench.running.pretraining import head_kind, one_task


def export_weights(task: str, head: str, seed: int, home: Home, to: Path | None = None) -> tuple[Path, Weights]:
    """Writes the weights that runs on a task begin with into one file; those of the package where the home has none.

    Args:
        task, head, seed: as of :func:`ifsl_bench.running.pretraining.pretrain_for`.
        to: the file; in the current folder, named by the key of the pretraining, by default.

    Returns:
        The file, and what it says.

    Raises:
        UserError: they are not in the home, not finished, or not whole; or the file is there already.
    """
    chosen, kind = one_task(find(task, home=home), task), head_kind(head)
    if check_backbone(chosen.pretraining) is not None:
        raise UserError(
            f"backbone {chosen.pretraining.backbone} has weights from elsewhere; hand on their own file, for "
            "--weights FILE"
        )
    fingerprint = fingerprint_of(chosen, home)
    if fingerprint is None:
        raise UserError(not_prepared(home, chosen.dataset))
    key = pretraining_key(chosen, fingerprint, kind, seed)
    target = to or Path(f"{key}.safetensors")
    if os.path.isdir(target):
        target = target / f"{key}.safetensors"
    if os.path.exists(target):
        raise UserError(f"{target} is there already; remove it or choose another name with --to FILE")
    if not os.path.isdir(target.parent):
        raise UserError(f"there is no folder {target.parent}; make it, or choose another with --to FILE")
    store = CheckpointFolder(home.pretrained / key)
    info = store.info()
    if info is None and (path := shipped_file(key)) is not None:
        said, _ = read_weights(path)
        write_bytes(target, path.read_bytes())
        return target, said
    if info is None or info["finished"] is not True:
        begun = "is not finished" if info else "is not here"
        raise UserError(f"{key} {begun} in {home.pretrained}; first: ifsl-bench pretrain --task {task} --head {head} "
                        f"--seed {seed}")  # fmt: skip
    state = store.folder / info["tensors"]["file"]
    with open_file(state) as file, read_errors(state):
        content = file.read()
    made_of = definition(chosen, fingerprint, kind, seed)
    said = write_weights(target, content, made_of, {"processes": [1], "key": key, **info})
    if said.sha256 != info["tensors"]["sha256"]:
        target.unlink()
        raise CorruptFile(f"{state} is not what was written: its checksum differs")
    read_weights(target)  # what others are given is what they can read
    return target, said


def import_weights(file: Path, home: Home, reporter: Reporter, force: bool = False) -> tuple[Weights, bool]:
    """Puts the weights of an exported file into the home, where runs find them.

    Args:
        force: put others of the same pretraining that are there aside, finished or not.

    Returns:
        What the file says, and whether anything was written: the same weights may be there already.

    Raises:
        UserError: there is no such file, it is damaged or none of ours, or others are there.
    """
    try:
        found, content = read_weights(file)
    except FileNotFoundError:
        raise UserError(f"there is no {file}") from None
    folder = home.pretrained / found.key
    with locked(folder, reporter.warn, state=""):
        store = CheckpointFolder(folder)
        try:
            there = store.info()
        except CorruptFile as error:
            there = None
            reporter.warn(f"{error}; the damaged files are in {set_aside(folder)}")
        if there is not None and there["finished"] is True and there["tensors"]["sha256"] == found.sha256:
            return found, False
        if there is not None:
            state = "weights" if there["finished"] is True else "an unfinished training"
            if not force:
                raise UserError(f"{folder} holds {state} of this pretraining already; --force puts them aside")
            reporter.say(f"{state} of {found.key} are kept as {set_aside(folder, 'replaced')}")
        put(home, found, content)
    return found, True


def weights_listing(home: Home) -> list[dict[str, Any]]:
    """A row for each finished pretraining in the home or the package; accuracies in percent."""
    offered, rows = shipped(), []
    folders = sorted(home.pretrained.iterdir()) if home.pretrained.is_dir() else []
    for folder in (one for one in folders if one.is_dir() and KEY.fullmatch(one.name)):
        try:
            info = CheckpointFolder(folder).info()
        except CorruptFile:
            continue
        if info is None or info.get("finished") is not True:
            continue
        same = folder.name in offered and offered[folder.name].sha256 == info["tensors"]["sha256"]
        rows.append(_row(folder.name, info, "home, from the package" if same else "home"))
        if same:
            del offered[folder.name]
    used = {row["pretraining"] for row in rows}
    rows += [_row(key, one.info, "package, not used" if key in used else "package") for key, one in offered.items()]
    return sorted(rows, key=lambda row: (row["pretraining"], row["where"]))


def _row(key: str, info: dict[str, Any], where: str) -> dict[str, Any]:
    accuracy = info.get("accuracy", {})
    shown = {pool: f"{100 * accuracy[pool]:.2f}%" if pool in accuracy else "" for pool in ("base/val", "base/test")}
    return {"pretraining": key, **shown, "weights": info["tensors"]["sha256"][:16], "trained on": info["device"],
            "where": where}  # fmt: skip
