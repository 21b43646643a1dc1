"""Pretraining by itself, for later runs to find done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from ifsl_bench.backbones import weights
from ifsl_bench.backbones.contract import check_backbone, is_frozen
from ifsl_bench.backbones.device import choose_device
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    PretrainedBackbone,
    define_pretraining,
    find_packaged_file,
    make_pretraining_key,
    shares_linear_backbone,
)
from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.data.datasets import not_prepared_message
from ifsl_bench.data.preparing.metadata import find_dataset_fingerprint
from ifsl_bench.experiments.job import Job, with_recipe
from ifsl_bench.experiments.stages import make_pretrain_stage
from ifsl_bench.experiments.training_curves import CurveLogs, CurveReporter
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import Paths, write_bytes
from ifsl_bench.utils.progress import Reporter


def load_or_pretrain(
    task: str,
    *,
    head: str = "linear",
    seed: int = 0,
    device: str = "auto",
    home: Paths | None = None,
    reporter: Reporter | None = None,
    compiled: bool = False,
    anew: bool = False,
    curves: CurveLogs | None = None,
    recipe: str | None = None,
) -> PretrainedBackbone:
    """Return the backbone and base classifier that runs on a task begin with, from the cache or package, or trained.

    Args:
        task: a task's name or file, as for ``run``; a file's tasks must have one pretraining.
        head: of the base classifier: "linear" or "cosine"; each method starts from one of them.
        seed: of training; a task may have one pretraining for all of them.
        device: "auto", "cpu", "cuda" or "cuda:N".
        home: folders; the default ones by default.
        reporter: receives the progress; by default only warnings are issued.
        compiled: let torch.compile make the network's kernels; for accelerators.
        anew: train them here even if they come with the package.
        curves: where runs write the curves of trainings, so that either command continues the curves of the other.
        recipe: how the backbone is trained, a name or file with options; the task's own by default.

    Raises:
        UserError: whatever is wrong, in one line.
    """
    kind, home, reporter = parse_head_kind(head), home or Paths.locate(), reporter or Reporter()
    chosen = first_of_shared_pretraining(load_tasks(task, home=home), task)
    chosen = with_recipe(chosen, recipe) if recipe else chosen
    where = choose_device(device)
    if compiled and where.type == "cpu":
        raise UserError("--compile is for accelerators, and this pretraining runs on the CPU: leave it out")
    check_backbone(chosen.pretraining)
    frozen, second = is_frozen(chosen.pretraining), shares_linear_backbone(chosen, kind)
    if frozen and anew:
        raise UserError(
            f"backbone {chosen.pretraining.backbone} has weights from elsewhere, and its base classifier is "
            f"trained once; leave --anew out"
        )
    backbone_head: HeadKind = "linear" if second else kind
    work = Workspace(home, where, reporter)
    prepared = work.open_task(chosen, backbone_head, seed)
    if frozen:
        return prepared.pretrained_backbone
    dataset = prepared.dataset
    key = make_pretraining_key(chosen, dataset.fingerprint, backbone_head, seed)
    if anew:
        weights.disable_packaged(home, key, reporter)
    listener = CurveReporter(curves, f"pretraining/{key}", reporter) if curves else reporter
    trained = pretrain(home, chosen, dataset, backbone_head, seed, where, listener, compiled)
    return work.open_task(chosen, kind, seed).pretrained_backbone if second else trained


def mark_for_training(jobs: Sequence[Job], work: Workspace) -> None:
    """Mark the backbones of jobs for training in this home, also where weights come with the package.

    Args:
        jobs: the jobs.
        work: has the home.
    """
    stages = [make_pretrain_stage(job) for job in jobs]
    for key in dict.fromkeys((stage.linear_stage or stage).key(work.home) for stage in stages):
        weights.disable_packaged(work.home, key, work.reporter)


def export_weights(
    task: str, head: str, seed: int, home: Paths, to: Path | None = None, recipe: str | None = None
) -> tuple[Path, weights.WeightsMetadata]:
    """Write the weights that runs on a task begin with into one file; return its path and the weights' description.

    Args:
        task: a task's name or file; a file's tasks must have one pretraining.
        head: of the base classifier: "linear" or "cosine".
        seed: of training.
        home: folders.
        to: the file or its folder; by default the current folder, and a name after the key of the pretraining.
        recipe: that trained the backbone; the task's own by default.

    Raises:
        UserError: the weights are from elsewhere, not here or not whole; or the file is there already, or its folder
            is not.
    """
    chosen, kind = first_of_shared_pretraining(load_tasks(task, home=home), task), parse_head_kind(head)
    chosen = with_recipe(chosen, recipe) if recipe else chosen
    if is_frozen(chosen.pretraining):
        raise UserError(
            f"backbone {chosen.pretraining.backbone} has weights from elsewhere; hand on their own file, for "
            "--weights FILE"
        )
    if shares_linear_backbone(chosen, kind):
        raise UserError(
            f"{chosen.name} has its {kind} head on the backbone of the linear one; export that: --head linear"
        )
    if (fingerprint := find_dataset_fingerprint(chosen.dataset, home)) is None:
        raise UserError(not_prepared_message(home, chosen.dataset))
    key = make_pretraining_key(chosen, fingerprint, kind, seed)
    path = to or Path()
    path = path / f"{key}.safetensors" if os.path.isdir(path) else path
    if os.path.exists(path):  # a name may be too long
        raise UserError(f"{path} is there already; remove it or choose another name with --to FILE")
    if not os.path.isdir(path.parent):
        raise UserError(f"there is no folder {path.parent}; make it, or choose another with --to FILE")
    folder, packaged = CheckpointFolder(home.pretrained / key), find_packaged_file(home, key)
    info = folder.read_metadata()
    if info is None and packaged is not None:
        write_bytes(path, packaged.read_bytes())
    elif info is not None and info["finished"] is True:
        made_from = define_pretraining(chosen, fingerprint, kind, seed)
        weights.write_weights(path, folder.read_content(info), made_from, {"processes": [1], "key": key, **info})
    else:
        raise UserError(
            f"{key} is not here, or not finished, in {home.pretrained}; first: "
            f"ifsl-bench pretrain --task {task} --head {head} --seed {seed}{f' --recipe {recipe}' if recipe else ''}"
        )
    return path, weights.read_metadata_and_tensors(path)[0]  # checked as others will check it


def parse_head_kind(head: str) -> HeadKind:
    """Return a kind of base classifier; raise :class:`UserError` for another word."""
    if head not in get_args(HeadKind):
        raise unknown_name_error("head", head, get_args(HeadKind))
    return "cosine" if head == "cosine" else "linear"


def first_of_shared_pretraining(tasks: list[Task], file: str) -> Task:
    """Return the first of tasks that all start from one pretraining.

    Args:
        tasks: of a file.
        file: its name, for errors.
    """
    made_of = {(task.dataset.name, str(task.pretraining), task.base_classes, task.base_order) for task in tasks}
    if len(made_of) > 1:
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"the tasks of {file} have different pretrainings ({names}); say which: FILE:NAME")
    return tasks[0]
