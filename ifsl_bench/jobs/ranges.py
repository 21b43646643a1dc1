"""Evaluation of many episodes: calibration first, then ranges of episodes, in any order and by any process.

:class:`Calibrate` holds the method against its contract and finds the bias on validation episodes, so that no range has
to keep the margins of its queries. What calibration and ranges have found lies under ``evaluated`` in the home folder
until the result is stored. :func:`remove_evaluated` then removes it, so that a result which is asked for anew is
measured anew, while a run that was stopped goes on with the ranges that are not done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ifsl_bench.common import packed
from ifsl_bench.common.building import remove
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.common.own_code import own_code
from ifsl_bench.common.progress import Mute
from ifsl_bench.common.sealed import read_sealed, write_sealed
from ifsl_bench.data.preparing.outline import Outline
from ifsl_bench.episodic.evaluation import Evaluated
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.jobs import ready
from ifsl_bench.jobs.job import Job
from ifsl_bench.jobs.preparation import Stage
from ifsl_bench.jobs.rates import Amount
from ifsl_bench.jobs.ready import EvaluationStage, Part
from ifsl_bench.jobs.training import MetaTrain, backbone_of, evaluation_amount, say_place
from ifsl_bench.plugin.episode_contract import check_answers, check_repeated
from ifsl_bench.protocol.calibration import Bias, Calibrated
from ifsl_bench.protocol.metrics import Counts

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class KeptStage(EvaluationStage):
    """A stage of evaluation whose findings are kept until the result is stored."""

    def folder(self, home: Home) -> Path:
        """The folder where evaluations are kept until the result is stored."""
        return home.cache / "evaluated" / EvaluationStage.key(self, home)

    def made_of(self, home: Home) -> str | None:
        """Identity of all that determines what is found in an episode, but for the machine; None where something is
        still to be made."""
        weights = backbone_of(self.job).weights(home)
        job: Job | None = self.job
        if self.model is None and self.job.searched:
            from ifsl_bench.jobs.searching import kept_choice

            job = kept_choice(self.job, home)
        if weights is None or job is None:
            return None
        trained = ""
        if self.model is not None or job.trains:
            try:
                info = CheckpointFolder(self.model or MetaTrain(job).folder(home)).info()
            except CorruptFile:
                return None
            if info is None or info.get("finished") is not True or info.get("pretraining_sha256") != weights:
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

    def file(self, home: Home) -> Path:
        return self.folder(home) / "bias.json"

    def cached(self, home: Home) -> bool:
        return self.read(home) is not None

    def read(self, home: Home) -> tuple[Bias | None, str] | None:
        """Reads the bias that was found, if it is there and of the same method; a damaged one is found again."""
        return _read(self.file(home), self.made_of(home), _bias_of)

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
        value = {
            "made_of": self.made_of(work.home),
            "bias": bias.value if bias else None,
            "validation_episodes": bias.validation_episodes if bias else 0,
            "points": bias.points.tolist() if bias else [],
            "resampled": bias.resampled.tolist() if bias else [],
            "why": why,
        }
        write_sealed(self.file(work.home), value)
        return bias, why


@dataclass(frozen=True)
class EvaluateRange(KeptStage):
    """Test episodes ``start`` to ``stop - 1`` of a job."""

    kind = "range"
    start: int = 0
    stop: int = 0

    def told(self, seeds: str) -> str:
        return f"evaluating {self.job.told(seeds)}: episodes {self.start:,} to {self.stop - 1:,}"

    def key(self, home: Home) -> str:
        return f"{super().key(home)}/{self.start}-{self.stop}"

    def inputs(self) -> Sequence[Stage]:
        return [Calibrate(self.job, self.model)]

    def file(self, home: Home) -> Path:
        return self.folder(home) / f"{self.start}-{self.stop}.json"

    def cached(self, home: Home) -> bool:
        if not self.file(home).exists():
            return False
        stored = Calibrate(self.job, self.model).read(home)
        return stored is not None and self.read(home, stored[0]) is not None

    def read(self, home: Home, bias: Bias | None) -> Part | None:
        """Reads what was found with this bias, if it is of the same method; damaged files are made again."""

        def part(content: dict[str, Any]) -> Part:
            evaluated = evaluated_of(content, self.stop - self.start, bias)
            return Part(evaluated, float(content["seconds"]), str(content["place"]), str(content["device"]))

        return _read(self.file(home), self._made_of(home, bias), part)

    def _made_of(self, home: Home, bias: Bias | None) -> str | None:
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
        made_of = self._made_of(work.home, bias)
        write_sealed(self.file(work.home), {"made_of": made_of, **about, **record_of(part.evaluated)})
        return part


def ranges_of(job: Job, model: Path | None = None) -> list[EvaluateRange]:
    """The ranges of a job's episodes; one where they are few."""
    starts = range(0, job.episodes, ready.RANGE)
    return [EvaluateRange(job, model, start, min(start + ready.RANGE, job.episodes)) for start in starts]


def remove_evaluated(job: Job, home: Home, model: Path | None = None) -> None:
    """Removes what calibration and ranges of a job have left, all at once: another run of the same job finds all of it
    or nothing, and keeps what it writes from then on."""
    with contextlib.suppress(OSError):
        remove(Calibrate(job, model).folder(home))


def _bias_of(content: dict[str, Any]) -> tuple[Bias | None, str]:
    value = content["bias"]
    points, resampled = (np.array(content[name], dtype=np.float64) for name in ("points", "resampled"))
    bias = None if value is None else Bias(float(value), int(content["validation_episodes"]), points, resampled)
    return bias, str(content["why"])


def _read(file: Path, made_of: str | None, read: Callable[[dict[str, Any]], Kept]) -> Kept | None:
    """Reads what a stage left, if it is there, whole, and made of the same."""
    try:
        content = read_sealed(file)
        return read(content) if made_of is not None and content.get("made_of") == made_of else None
    except (FileNotFoundError, CorruptFile, KeyError, TypeError, ValueError):
        return None


def record_of(evaluated: Evaluated) -> dict[str, Any]:
    """Packs it for JSON, bit by bit: counts, statistics, and the hits on the base-novel curve."""
    assert isinstance(evaluated.counts, Counts)  # there are never so many sequences
    return {
        "base_queries": evaluated.counts.base_queries,
        "novel_queries": evaluated.counts.novel_queries,
        "counts": {name: packed.pack(values) for name, values in evaluated.counts.columns().items()},
        "statistics": {name: packed.pack(values) for name, values in evaluated.statistics.items()},
        "curve": evaluated.calibrated.curve[:, 1:].astype(int).tolist() if evaluated.calibrated else [],
        "resampled": evaluated.calibrated.resampled.tolist() if evaluated.calibrated else [],
    }


def evaluated_of(record: Mapping[str, Any], episodes: int, bias: Bias | None) -> Evaluated:
    """The record of so many episodes, read again.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """

    def arrays(texts: Mapping[str, str]) -> dict[str, np.ndarray]:
        read = {name: packed.unpack(text, episodes) for name, text in texts.items()}
        if any(len(values) != episodes for values in read.values()):
            raise ValueError(f"it is not of {episodes:,} episodes")
        return read

    hits: dict[str, Any] = arrays(record["counts"])
    counts = Counts(**hits, base_queries=int(record["base_queries"]), novel_queries=int(record["novel_queries"]))
    statistics = arrays(record["statistics"])
    if bias is None:
        return Evaluated(counts, statistics)
    base, novel = counts.calibrated_base, counts.calibrated_novel
    if base is None or novel is None:
        raise ValueError("it has no hits with a bias")
    curve = np.concatenate([bias.points[:, None], np.reshape(record["curve"], (-1, 2))], 1)
    resampled = np.array(record["resampled"], dtype=np.int64).reshape(len(bias.resampled), 2)
    calibrated = Calibrated(bias.value, bias.validation_episodes, base, novel, curve, resampled)
    return Evaluated(counts, statistics, None, calibrated)
