"""Evaluation of many episodes: calibration first, then ranges of episodes, in any order and by any process.

:class:`Calibrate` holds the method against its contract and finds the bias on validation episodes, so that no range has
to keep the margins of its queries. What calibration and ranges have found lies under ``evaluated`` in the home folder
until the result is stored. :func:`remove_evaluated` then removes it, so that a result which is asked for anew is
measured anew, while a run that was stopped goes on with the ranges that are not done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ifsl_bench.backbone.device import describe_device
from ifsl_bench.backbone.placement import Place
from ifsl_bench.common.building import remove
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.common.own_code import own_code
from ifsl_bench.common.progress import Mute, Reporter
from ifsl_bench.common.sealed import read_sealed, write_sealed
from ifsl_bench.data.preparing.outline import Outline
from ifsl_bench.episodic.evaluation import Evaluated, evaluate, evaluated_of, predict, record_of
from ifsl_bench.episodic.loader import EpisodeLoader
from ifsl_bench.episodic.prepared import PreparedTask, Workspace
from ifsl_bench.episodic.sequence_loader import SequenceLoader
from ifsl_bench.episodic.trained import Trained, load_trained
from ifsl_bench.jobs.job import TUNING_SEED, Job
from ifsl_bench.jobs.preparation import CheckEpisodes, Stage
from ifsl_bench.jobs.rates import Amount
from ifsl_bench.jobs.searching import TrainChosen, chosen, kept_choice, trials_of
from ifsl_bench.jobs.training import (
    JobStage,
    MetaTrain,
    backbone_of,
    evaluation_amount,
    features_of,
    fresh,
    key_of,
    say_place,
    to_evaluate,
)
from ifsl_bench.plugin.contract import Asked, check_answers, check_repeated
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.session_contract import check_sessions
from ifsl_bench.protocol.calibration import Bias, find_bias
from ifsl_bench.protocol.task import Side

Kept = TypeVar("Kept")
RANGE = 10_000  # episodes that are evaluated in one go
FIRST = 8  # test episodes that the contract is checked on in every run


@dataclass(frozen=True)
class Part:
    """The evaluation of a range, with its seconds, place and device."""

    found: Evaluated
    seconds: float
    place: str
    device: str


@dataclass(frozen=True)
class Ready:
    """A method where it is evaluated.

    Attributes:
        job: with the options that were chosen.
        choice: what a result says of the choice.
        folder: of the meta-training, "" if there is none.
    """

    job: Job
    choice: dict[str, Any]
    method: Method
    trained: Trained | None
    folder: str
    prepared: PreparedTask
    place: Place

    def loader(self, side: Side) -> EpisodeLoader | SequenceLoader:
        return self.prepared.loader(side, device=self.place.device)

    def episodes(self) -> EpisodeLoader:
        """The test episodes; raises :class:`UserError` where the task is in sessions."""
        return self.prepared.episodes("test", self.place.device)

    def asked(self) -> Asked:
        """The method with its first test episodes; of sequences, with the first sessions of these."""
        loader = self.loader("test")
        count = min(FIRST, self.job.episodes)
        first = loader.episodes(count) if isinstance(loader, SequenceLoader) else loader.batch(0, FIRST)
        predict(self.method.eval(), self.job.name, first)
        return Asked(self.job.name, self.method, first.support, first.query, first.masked)

    def check_sessions(self) -> None:
        """Holds a method that learns session by session against the contract, on the first sequences."""
        loader = self.loader("test")
        if isinstance(loader, SequenceLoader) and not self.job.supports_kept and loader.sampler.shape.count > 1:
            batch = loader.batch(0, min(FIRST, self.job.episodes))
            check_sessions(self.job.name, self.method, batch.supports[:2], loader.episodes(len(batch)).query)

    def bias(self, reporter: Reporter) -> tuple[Bias | None, str]:
        """Finds the bias that calibrates it on the validation episodes that options are chosen on.

        None in regular few-shot learning; and where the data have too few validation classes, with the reason.
        """
        task = self.job.task
        if not task.kind.has_base:
            return None, ""
        try:
            self.prepared.sampler("val")
        except UserError as error:
            return None, f"no calibrated Acc., since validation episodes cannot be drawn: {error}"
        title = f"calibrating {self.job}"
        margins = evaluate(
            self.method, self.job.name, self.loader("val"), task.evaluation.halves[0], reporter, title,
            called="validation accuracy",
        ).margins  # fmt: skip
        return (find_bias(margins, resample=task.sessions is None), "") if margins else (None, "")

    def part(self, episodes: range, bias: Bias | None, reporter: Reporter, title: str) -> Part:
        """Evaluates some of the job's test episodes."""
        test, start = self.loader("test"), time.perf_counter()
        evaluated = evaluate(self.method, self.job.name, test, episodes, reporter, title, self.job.episodes, bias)
        return Part(evaluated, time.perf_counter() - start, str(self.place), describe_device(self.place.device))


@dataclass(frozen=True)
class EvaluationStage(JobStage):
    """A stage that evaluates a job's method.

    Attributes:
        model: the folder of a stored model to evaluate, in place of the job's own.
    """

    model: Path | None = None

    def key(self, home: Home) -> str:
        """Names all that is evaluated for one result."""
        job = self.job
        how = [job.setting, job.training.select, job.calibrated, str(self.model or "")]
        return f"{key_of(job, home)}-{sha256_json(how)[:12]}-{job.episodes}"

    def folder(self, home: Home) -> Path:
        """The folder where evaluations are kept until the result is stored."""
        return home.cache / "evaluated" / EvaluationStage.key(self, home)

    def place(self, work: Workspace) -> Place:
        return work.place("evaluation")

    def ready(self, work: Workspace, reporter: Reporter) -> Ready:
        """The method, trained if need be; the reporter hears what was chosen."""
        plain = self.job, {"options": self.job.options, "tuned": {}, "passed_over": [], "edge": []}
        job, choice = chosen(self.job, work, reporter) if self.model is None else plain
        if self.model is None:
            method, trained, folder = MetaTrain(job).compute(work)
        else:
            method, trained, folder = load_trained(self.model, fresh(job, work), job.name, job.training.select)
        prepared = backbone_of(job).prepared(work)
        return Ready(job, choice, to_evaluate(job, work, method), trained, folder, prepared, self.place(work))

    def made_of(self, home: Home) -> str | None:
        """Identity of all that determines what is found in an episode, but for the machine; None where something is
        still to be made."""
        weights = backbone_of(self.job).weights(home)
        job = self.job if self.model is not None else kept_choice(self.job, home)
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
class Calibrate(EvaluationStage):
    """The stage before the ranges: checks the method against its contract, and finds the bias."""

    kind = "calibration"

    def told(self, seeds: str) -> str:
        return f"calibrating {self.job.told(seeds)}: {len(self.job.task.evaluation.halves[0]):,} validation episodes"

    def inputs(self) -> Sequence[Stage]:
        job = self.job
        # Every row has calibrated numbers beside its own; validation episodes that cannot be drawn are no hindrance.
        more = features_of(job, (*job.sides, "val") if job.task.kind.has_base else job.sides)
        if job.searched and self.model is None:
            if job.trials and job.seed != TUNING_SEED and job.trains:  # which waits for the trials
                more += [TrainChosen(replace(job, calibrated=False, episodes=job.task.evaluation.episodes))]
            else:
                more += trials_of(job)
        elif job.trains and self.model is None:
            more += [MetaTrain(replace(job, calibrated=False))]
        return [*(CheckEpisodes(job.task, side) for side in job.sides), *more]

    def file(self, home: Home) -> Path:
        return self.folder(home) / "bias.json"

    def cached(self, home: Home) -> bool:
        return self.kept(home) is not None

    def kept(self, home: Home) -> tuple[Bias | None, str] | None:
        """Reads the bias that was found, if it is there and of the same method; a damaged one is found again."""
        return _read(self.file(home), self.made_of(home), _bias_of)

    def amount(self, data: Outline, work: Workspace) -> Amount:
        return evaluation_amount(self.job, len(self.job.task.evaluation.halves[0]), work)

    def compute(self, work: Workspace) -> tuple[Bias | None, str]:
        if (kept := self.kept(work.home)) is not None:
            return kept
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
class EvaluateRange(EvaluationStage):
    """Test episodes ``start`` to ``stop - 1`` of a job."""

    kind = "range"
    start: int = 0
    stop: int = RANGE

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
        found = Calibrate(self.job, self.model).kept(home)
        return found is not None and self.kept(home, found[0]) is not None

    def kept(self, home: Home, bias: Bias | None) -> Part | None:
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
        if (kept := self.kept(work.home, bias)) is not None:
            return kept
        ready = self.ready(work, Mute())
        say_place(work, self, ready.place)
        asked = ready.asked()
        with torch.no_grad():
            answers = asked.logits()
        part = ready.part(range(self.start, self.stop), bias, work.reporter, str(self))
        check_repeated(asked, answers)
        about = {"seconds": part.seconds, "place": part.place, "device": part.device}
        made_of = self._made_of(work.home, bias)
        write_sealed(self.file(work.home), {"made_of": made_of, **about, **record_of(part.found)})
        return part


def ranges_of(job: Job, model: Path | None = None) -> list[EvaluateRange]:
    """The ranges of a job's episodes; one where they are few."""
    starts = range(0, job.episodes, RANGE)
    return [EvaluateRange(job, model, start, min(start + RANGE, job.episodes)) for start in starts]


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
