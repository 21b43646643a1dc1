"""Makes an embedded data set of a task's features; see :mod:`ifsl_bench.data.sets.embedded`.

``python -m tests.tools.embed_features --of TASK --task TASK --notice TEXT`` writes the file of features into the
package, and beside the other weights the two base classifiers, in half precision as they are, with scale, offset and
the moments of base/train. It prints the fingerprint that the task file is to pin.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from ifsl_bench.backbones import pretrained as stored
from ifsl_bench.backbones import weights
from ifsl_bench.backbones.features import compute_class_moments, feature_folder
from ifsl_bench.backbones.pretrained import HeadKind, define_pretraining, make_pretraining_key
from ifsl_bench.data.preparing.prepare import build_in_locked_folder
from ifsl_bench.data.sets.embedded import (
    FORMAT_VERSION,
    HEAD_ORDER,
    METADATA_KEY,
    EmbeddedFeatures,
    compute_pools_checksum,
)
from ifsl_bench.data.source import BuildContext
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, Task
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.files import Paths, write_bytes

LEVELS = 255
KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
assert KINDS == HEAD_ORDER


def quantised(features: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Features [n, D] of each pool as bytes [n, D], with float32 [D] scale and offset: x is near byte * scale + offset.

    The levels of a dimension are even between its smallest and its largest value over all pools.
    """
    least = np.min([rows.min(0) for rows in features.values()], 0).astype(np.float32)
    most = np.max([rows.max(0) for rows in features.values()], 0).astype(np.float32)
    scale = np.where(most > least, (most - least) / LEVELS, 1).astype(np.float32)
    levels = {}
    for pool, rows in features.items():
        levels[pool] = np.clip(np.rint((rows - least) / scale), 0, LEVELS).astype(np.uint8)
    return levels, scale, least


def embed(of: Task, task: Task, notice: str, work: Workspace) -> str:
    """Writes features and base classifiers of ``of``, whose pretrainings are in the home, as those of ``task``.

    Args:
        task: with the backbone of embedded features; its data set is written.
        notice: the terms on the images, in one line.

    Returns:
        The fingerprint of the data set.

    Raises:
        UserError: data or pretrainings are not there, or a file may not be written.
    """
    assert task.pretraining.backbone == INCLUDED_BACKBONE, task.pretraining.backbone
    sides = {head: _side(work.open_task(of, head, of.pretraining.seed or 0)) for head in KINDS}
    dataset = work.open_task(of, "linear", of.pretraining.seed or 0).dataset
    pools = list(sides["linear"][0])
    rows = {pool: np.stack([sides[head][0][pool] for head in KINDS], 1)[..., None] for pool in pools}
    counts = {pool: np.diff(dataset.pool(pool).class_starts).tolist() for pool in pools}
    counts["base/train"] = [1] * len(rows["base/train"])
    made_by = {head: {"key": sides[head][2]["key"], "sha256": sides[head][2]["sha256"]} for head in KINDS}
    source = _Named(task.dataset.name)
    classes = {pool: dataset.pool(pool).class_names for pool in pools}
    about = {"data": {"name": dataset.name, "fingerprint": dataset.fingerprint}, "pretrainings": made_by}
    write_embedded(source.features_file, rows, classes, counts, notice, about)
    with tempfile.TemporaryDirectory() as folder:
        embedded_dataset = build_in_locked_folder(
            Path(folder) / "data", source, BuildContext(None, work.reporter), None, source.build
        )
        fingerprint = embedded_dataset.fingerprint
        labels = {pool: embedded_dataset.pool(pool).labels for pool in ("base/val", "base/test")}
    for head in KINDS:
        features, tensors, info = sides[head]
        key = make_pretraining_key(task, fingerprint, head, 0)
        values = {name: tensors[f"network.{name}"].numpy() for name in ("scale", "offset")}
        weight = tensors["head.weight"].float()
        accuracy = {}
        for pool, right in labels.items():
            hidden = torch.from_numpy(features[pool] * values["scale"] + values["offset"])
            logits = torch.nn.functional.linear(hidden, weight, tensors["head.bias"].float()) if head == "linear" else (
                torch.nn.functional.normalize(hidden) @ torch.nn.functional.normalize(weight).T
            )  # fmt: skip
            accuracy[pool] = float((logits.argmax(1).numpy() == right).mean())
        recorded = info["recorded"] | {"key": key, "accuracy": accuracy, "seed": 0}
        made_of = define_pretraining(task, fingerprint, head, 0)
        weights.write_weights(stored.PACKAGED_FOLDERS[0] / f"{key}.safetensors", save(tensors), made_of, recorded)
    return fingerprint


def write_embedded(
    path: Path,
    pools: dict[str, np.ndarray],
    classes: dict[str, tuple[str, ...]],
    counts: dict[str, list[int]],
    notice: str,
    features_of: dict[str, Any],
) -> None:
    """Writes the file of a data set.

    Args:
        pools: uint8 [n, 2, D, 1] of each pool, by class.
        classes, counts: of each pool: names of the classes, and how many rows each has.
        notice: the terms, in one line, told whoever uses the features first.
        features_of: what they were made from, JSON-able.
    """
    shape = next(iter(pools.values())).shape[1:]
    header = {
        "format": FORMAT_VERSION,
        "shape": list(shape),
        "pools": {pool: {"classes": list(classes[pool]), "counts": counts[pool]} for pool in pools},
        "sha256": compute_pools_checksum(pools),
        "notice": notice,
        "features_of": features_of,
    }
    whole = {pool: np.ascontiguousarray(rows) for pool, rows in pools.items()}
    write_bytes(path, save_arrays(whole, {METADATA_KEY: json.dumps(header)}))


class _Named(EmbeddedFeatures):
    """The data set of a name, registered or not."""

    def __init__(self, name: str) -> None:
        self.name = name


def _side(prepared: PreparedTask) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor], dict[str, Any]]:
    """One backbone's bytes [n, D] of each pool, the tensors of its weights, and what was recorded of it."""
    dataset, pretrained = prepared.dataset, prepared.pretrained_backbone
    starts, base = dataset.pool("base/train").class_starts, prepared.open_features("base/train")
    folder = feature_folder(prepared.work.home, pretrained.features_key, "base/train", prepared.task)
    moments = compute_class_moments(folder, base, starts, prepared.work.reporter)
    features = {
        pool: np.asarray(prepared.open_features(pool)) for pool in dataset.manifest["pools"] if pool != "base/train"
    }
    bytes_, scale, offset = quantised({"base/train": moments.means.astype(np.float32), **features})
    head = {f"head.{name}": value.detach().half() for name, value in pretrained.base_classifier.named_parameters()}
    tensors = {
        "network.row": torch.tensor(HEAD_ORDER.index(prepared.head)),
        "network.scale": torch.from_numpy(scale),
        "network.offset": torch.from_numpy(offset),
        "network.means": torch.from_numpy(moments.means).float(),
        "network.counts": torch.from_numpy(moments.counts),
        "network.covariance": torch.from_numpy(moments.covariance).float(),
        **head,
    }
    info = {"key": pretrained.pretraining_key, "sha256": pretrained.sha256, "recorded": pretrained.training_record}
    return bytes_, tensors, info


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", required=True, help="task whose features these are; its pretrainings are in the home")
    parser.add_argument("--task", required=True, help="task on the embedded features")
    parser.add_argument("--notice", required=True, help="the terms on the images, in one line")
    parser.add_argument("--home")
    options = parser.parse_args()
    home = Paths.locate(options.home)
    print(
        embed(
            load_tasks(options.of, home=home)[0],
            load_tasks(options.task, home=home)[0],
            options.notice,
            Workspace(home),
        )
    )


if __name__ == "__main__":
    main()
