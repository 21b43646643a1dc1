"""Evaluation of many episodes: calibration first, then ranges of episodes, in any order and by any process.

:class:`Calibrate` holds the method against its contract and finds the bias on validation episodes, so that no range has
to keep the margins of its queries. What calibration and ranges have found lies under ``evaluated`` in the home folder
until the result is stored. :func:`remove_evaluated` then removes it, so that a result which is asked for anew is
measured anew, while a run that was stopped goes on with the ranges that are not done.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ifsl_bench.data.preparing.metadata import Outline
from ifsl_bench.experiments import evaluation_context as ready
from ifsl_bench.experiments.evaluation import Evaluated
from ifsl_bench.experiments.evaluation_context import EvaluationStage, Part
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.rates import Amount
from ifsl_bench.experiments.stages import Stage
from ifsl_bench.experiments.training_stage import MetaTrain, backbone_of, evaluation_amount, say_place
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.episode_contract import check_answers, check_repeated
from ifsl_bench.protocols.calibration import Bias, Calibrated
from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.utils.atomic_dir import remove
from ifsl_bench.utils.checkpoint import finished_info
from ifsl_bench.utils.files import Paths, own_code, sha256_json, write_bytes
from ifsl_bench.utils.progress import Mute


@dataclass(frozen=True)
class KeptStage(EvaluationStage):
    """A stage of evaluation whose findings are kept until the result is stored."""

    def folder(self, home: Paths) -> Path:
        """The folder where evaluations are kept until the result is stored."""
        return home.cache / "evaluated" / EvaluationStage.key(self, home)

    def made_of(self, home: Paths) -> str | None:
        """Identity of all that determines what is found in an episode, but for the machine; None where something is
        still to be made."""
        weights = backbone_of(self.job).weights(home)
        job: Job | None = self.job
        if self.model is None and self.job.searched:
            from ifsl_bench.experiments.searching import kept_choice

            job = kept_choice(self.job, home)
        if weights is None or job is None:
            return None
        trained = ""
        if self.model is not None or job.trains:
            info = finished_info(self.model or MetaTrain(job).folder(home), pretraining_sha256=weights)
            if info is None:
                return None
            trained = info["tensors"]["sha256"]
        code = [job.identity, own_code(), torch.__version__]
        return sha256_json([EvaluationStage.key(self, home), job.options, weights, trained, code])


@dataclass(frozen=True)
class Calibrate(KeptStage):
    """The stage before the ranges: checks the method against its contract, and finds the bias."""

    kind = "calibration"

    def told(self, seeds: str) -> str:
        return f"calibrating {self.job.told(seeds)}: {len(self.job.task.evaluation.halves[0]):,} validation episodes"

    def inputs(self) -> Sequence[Stage]:
        return self.needed()

    def file(self, home: Paths) -> Path:
        return self.folder(home) / "bias.npz"

    def cached(self, home: Paths) -> bool:
        return self.read(home) is not None

    def read(self, home: Paths) -> tuple[Bias | None, str] | None:
        """Reads the bias that was found, if it is there and of the same method; a damaged one is found again."""
        if (fields := _read(self.file(home), self.made_of(home))) is None:
            return None
        bias = _fields(fields, "bias.")
        return Bias(**bias) if bias else None, fields["why"].item()

    def amount(self, data: Outline, work: Workspace) -> Amount:
        return evaluation_amount(self.job, len(self.job.task.evaluation.halves[0]), work)

    def compute(self, work: Workspace) -> tuple[Bias | None, str]:
        if (stored := self.read(work.home)) is not None:
            return stored
        ready = self.ready(work, Mute())
        asked = ready.asked()
        answers = check_answers(asked)
        bias, why = ready.bias(work.reporter)
        check_repeated(asked, answers)
        fields = {**_named("bias.", vars(bias) if bias else {}), "why": why}
        _write(self.file(work.home), self.made_of(work.home), fields)
        return bias, why


@dataclass(frozen=True)
class EvaluateRange(KeptStage):
    """Test episodes ``start`` to ``stop - 1`` of a job."""

    kind = "range"
    start: int = 0
    stop: int = 0

    def told(self, seeds: str) -> str:
        return f"evaluating {self.job.told(seeds)}: episodes {self.start:,} to {self.stop - 1:,}"

    def key(self, home: Paths) -> str:
        return f"{super().key(home)}/{self.start}-{self.stop}"

    def inputs(self) -> Sequence[Stage]:
        return [Calibrate(self.job, self.model)]

    def file(self, home: Paths) -> Path:
        return self.folder(home) / f"{self.start}-{self.stop}.npz"

    def cached(self, home: Paths) -> bool:
        if not self.file(home).exists():
            return False
        stored = Calibrate(self.job, self.model).read(home)
        return stored is not None and self.read(home, stored[0]) is not None

    def read(self, home: Paths, bias: Bias | None) -> Part | None:
        """Reads what was found with this bias, if it is of the same method; damaged files are made again."""
        fields = _read(self.file(home), self._made_of(home, bias))
        return Part(evaluated_of(fields), **_fields(fields, "about.")) if fields else None

    def _made_of(self, home: Paths, bias: Bias | None) -> str | None:
        made_of = self.made_of(home)
        found_with = [bias.value, bias.points.tolist(), bias.resampled.tolist()] if bias else None
        return sha256_json([made_of, found_with, self.start, self.stop]) if made_of else None

    def amount(self, data: Outline, work: Workspace) -> Amount:
        return evaluation_amount(self.job, self.stop - self.start, work)

    def compute(self, work: Workspace) -> Part:
        bias, _ = Calibrate(self.job, self.model).compute(work)
        if (stored := self.read(work.home, bias)) is not None:
            return stored
        ready = self.ready(work, Mute())
        say_place(work, self, ready.place)
        asked = ready.asked()
        with torch.no_grad():
            answers = asked.logits()
        part = ready.part(range(self.start, self.stop), bias, work.reporter, str(self))
        check_repeated(asked, answers)
        about = {"seconds": part.seconds, "place": part.place, "device": part.device}
        fields = {**_named("about.", about), **record_of(part.evaluated)}
        _write(self.file(work.home), self._made_of(work.home, bias), fields)
        return part


def ranges_of(job: Job, model: Path | None = None) -> list[EvaluateRange]:
    """The ranges of a job's episodes; one where they are few."""
    starts = range(0, job.episodes, ready.RANGE)
    return [EvaluateRange(job, model, start, min(start + ready.RANGE, job.episodes)) for start in starts]


def remove_evaluated(job: Job, home: Paths, model: Path | None = None) -> None:
    """Removes what calibration and ranges of a job have left, all at once: another run of the same job finds all of it
    or nothing, and keeps what it writes from then on."""
    with contextlib.suppress(OSError):
        remove(Calibrate(job, model).folder(home))


def _write(file: Path, made_of: str | None, fields: Mapping[str, Any]) -> None:
    """Keeps arrays and single values, with what they are made of."""
    content = io.BytesIO()
    np.savez(content, made_of=np.array(made_of), **fields)
    write_bytes(file, content.getvalue())


def _read(file: Path, made_of: str | None) -> dict[str, np.ndarray] | None:
    """Reads what a stage left, if it is there, whole, and made of the same."""
    try:
        with np.load(file, allow_pickle=False) as content:
            fields = dict(content)
    except (OSError, ValueError, EOFError, TypeError, NotImplementedError, zipfile.BadZipFile):
        return None
    return fields if made_of is not None and "made_of" in fields and fields["made_of"].item() == made_of else None


def _named(prefix: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under longer names, without those that are None."""
    return {prefix + name: value for name, value in fields.items() if value is not None}


def _fields(fields: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """The fields that :func:`_named` gave a prefix; what is no array as the number or text that it was."""
    named = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    return {name: value if value.ndim else value.item() for name, value in named.items()}


def record_of(evaluated: Evaluated) -> dict[str, Any]:
    """Lists its arrays and numbers by name: counts, statistics, and the hits on the base-novel curve."""
    assert isinstance(evaluated.counts, Counts)  # there are never so many sequences
    calibrated = vars(evaluated.calibrated) if evaluated.calibrated else {}
    counts, statistics = _named("counts.", vars(evaluated.counts)), _named("statistics.", evaluated.statistics)
    return {**counts, **statistics, **_named("calibrated.", calibrated)}


def evaluated_of(record: Mapping[str, np.ndarray]) -> Evaluated:
    """The evaluation of a record, read again."""
    calibrated = _fields(record, "calibrated.")
    counts, statistics = Counts(**_fields(record, "counts.")), _fields(record, "statistics.")
    return Evaluated(counts, statistics, None, Calibrated(**calibrated) if calibrated else None)
