"""The product of a meta-training: a model, how it went, and how its solves went."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.protocols.loader import MAX_UNCONVERGED_SHARE
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.serialization import check_value_types
from ifsl_bench.utils.threads import whole_machine_threads

MIN_EPISODES_TO_SHARE_THREADS = 8  # episodes a step from which several threads pay


def training_threads(episodes: int) -> int:
    """Return the number of threads of a step on the host's processor.

    A small step has one, as threads would wait for each other longer than they compute.
    """
    return 1 if episodes < MIN_EPISODES_TO_SHARE_THREADS else whole_machine_threads()


class DivergedError(UserError):
    """A meta-training whose loss became infinite or NaN."""


@dataclass(frozen=True)
class TrainingRecord:
    """A meta-trained model and the record of its training.

    Attributes:
        history_by_step: validation accuracies, in percent, by step.
        kept_step: the step of the chosen model.
        solves: how the inner solves went, see :class:`SolveCounts`; empty for a method that has none.
        device_description: the device it ran on, and why there.
    """

    history_by_step: dict[int, float]
    kept_step: int
    seconds: float
    solves: dict[str, int]
    device_description: str

    def to_result_entry(self) -> dict[str, Any]:
        """Return the training's entry in a result."""
        record = {
            "validation": {str(step): value for step, value in self.history_by_step.items()},
            "kept_step": self.kept_step,
        }
        return record | ({"solves": self.solves} if self.solves else {})

    def training_remarks(self) -> Iterator[str]:
        """Yield a line for each fault in the solves of more than ``MAX_UNCONVERGED_SHARE`` of the episodes."""
        kinds = {
            "unconverged": ("episodes", "inner solve did not converge"),
            "adjoint_diverged": ("adjoint_episodes", "Neumann series grew: a shorter rate may help"),
            "adjoint_failed": ("adjoint_episodes", "linear solve for the gradient missed its tolerance"),
            "adjoint_indefinite": ("adjoint_episodes", "solve stopped at a saddle, where the gradient is no minimum's"),
        }
        for key, (total, what) in kinds.items():
            if (count := self.solves.get(key, 0)) > MAX_UNCONVERGED_SHARE * self.solves.get(total, 0):
                yield f"in {count} of {self.solves[total]} episodes of meta-training the {what}"


class TrainedModel(NamedTuple):
    """A method that is ready, how it was trained if it was, and its folder under ``trained``."""

    method: Method
    training_record: TrainingRecord | None = None
    model_folder: str = ""


@dataclass
class SolveCounts:
    """Counts over all episodes of a meta-training, stored across interruptions in ``counts_by_kind``.

    ``episodes`` solved and ``unconverged`` ones; ``adjoint_episodes`` whose gradient came from a linear solve,
    ``adjoint_diverged`` whose series grew, ``adjoint_failed`` that missed the tolerance and ``adjoint_indefinite``
    whose search had stopped at a saddle.
    """

    counts_by_kind: dict[str, int]
    _unconverged_flags: list[torch.Tensor] = field(default_factory=list)

    def add_prediction(self, prediction: Prediction) -> None:
        """Add a prediction after its backward pass; :meth:`total_counts` reads an accelerator's counts, which waits."""
        unconverged = prediction.statistics.get("solver_unconverged")
        if unconverged is not None:
            self._add_counts(episodes=len(unconverged), unconverged=0)
            self._unconverged_flags.append(unconverged.detach().count_nonzero())
        if (adjoint := prediction.adjoint) is not None and adjoint.episodes:
            self._add_counts(
                adjoint_episodes=adjoint.episodes,
                adjoint_diverged=adjoint.n_diverged,
                adjoint_failed=adjoint.n_failed,
                adjoint_indefinite=adjoint.n_indefinite,
            )

    def total_counts(self) -> dict[str, int]:
        """Return the counts of all that was added."""
        if self._unconverged_flags:
            self._add_counts(unconverged=int(torch.stack(self._unconverged_flags).sum()))
            self._unconverged_flags.clear()
        return self.counts_by_kind

    def _add_counts(self, **more: int) -> None:
        for key, value in more.items():
            self.counts_by_kind[key] = self.counts_by_kind.get(key, 0) + value


def model_folders(first: Path) -> Iterator[Path]:
    """Yield the folders where models of one description may lie: ``first``, then ``first-2`` and so on."""
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))


def is_free_or_same_method(folder: Path, same: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Check whether a folder is free, or has a model of the same method.

    Args:
        folder: of a model.
        same: whether recorded facts are of the method in question.
    """
    try:
        info = CheckpointFolder(folder).read_metadata()
        return info is None or same(info)
    except (CorruptFile, ValueError):
        return True  # it is set aside when it is opened


def check_training_state(path: Path, info: Mapping[str, Any]) -> None:
    """Check that a state records the progress of a meta-training.

    Args:
        path: the file of the record, for errors.
        info: the record.

    Raises:
        CorruptFile: it does not.
    """
    kinds = {"finished": bool, "step": int, "history": dict, "seconds": (int, float), "solves": dict, "place": str}
    check_value_types(path, info, kinds)


def read_training_record(folder: Path) -> dict[str, Any]:
    """Return the record that a finished meta-training left in a folder.

    Raises:
        UserError: there is none, one that has not ended, or one that may not be read.
        CorruptFile: it is damaged.
    """
    info = CheckpointFolder(folder).read_metadata()
    texts = dict.fromkeys(("method", "method_source", "pretraining", "pretraining_sha256"), str)
    needed = {**texts, "seed": int, "options": dict, "train": dict, "history": dict}
    if info is None or needed.keys() - info.keys():
        raise UserError(f"{folder} is no meta-trained model of {folder.parent}")
    check_value_types(CheckpointFolder(folder).metadata_file, info, needed)
    check_training_state(CheckpointFolder(folder).metadata_file, info)
    if not info["finished"]:
        raise UserError(f"the meta-training in {folder} stopped at step {info['step']}; run it to its end first")
    if registry.refers_to_file(info["method"]):  # a path in a file that may be a stranger's is no reason to run code
        raise UserError(f"{folder.name} is of a method in a file, {info['method']}; run that file to evaluate it")
    return info


def load_trained(folder: Path, method: Method, name: str, select: str) -> TrainedModel:
    """Return the method with the parameters of a stored model.

    Args:
        folder: of the model.
        method: whose parameters are replaced.
        name: of the method, for errors.
        select: "best" or "last", see :class:`Training`.

    Raises:
        UserError: there is no model.
        CorruptFile: it is damaged, or of other parameters.
    """
    state = CheckpointFolder(folder).load()
    if state is None:
        raise UserError(f"{folder} is no meta-trained model: it has no checkpoint.json")
    info = state.metadata
    check_training_state(CheckpointFolder(folder).metadata_file, info)
    with torch.no_grad():
        for key, value in method.named_parameters():
            stored = state.tensors.get(f"{select}.{key}")
            if stored is None or stored.shape != value.shape:
                raise CorruptFile(
                    f"{folder} does not fit method {name!r}: parameter {key} is missing or has another shape"
                )
            value.copy_(stored)
    history = {int(k): v for k, v in info["history"].items()}
    step = info["best" if select == "best" else "step"]
    trained = TrainingRecord(history, step, info["seconds"], info["solves"], info["place"])
    return TrainedModel(method.eval(), trained, folder.name)
