"""A method that is ready to be evaluated, and what stages of evaluation have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifsl_bench.backbones.device import Place, describe_device
from ifsl_bench.experiments.evaluation import Evaluated, evaluate, has_sessions
from ifsl_bench.experiments.job import TUNING_SEED, Job
from ifsl_bench.experiments.stages import CheckEpisodes, Stage
from ifsl_bench.experiments.trained_models import Trained, load_trained
from ifsl_bench.experiments.training_stage import (
    JobStage,
    MetaTrain,
    backbone_of,
    features_stages,
    fresh,
    key_of,
    to_evaluate,
)
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.episode_contract import Asked
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocols.calibration import Bias, find_bias
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.tasks.task import Side
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.progress import Reporter

if TYPE_CHECKING:
    from ifsl_bench.protocols.sequence_loader import SequenceLoader

RANGE = 10_000  # episodes that are evaluated in one go; more are evaluated by :mod:`ifsl_bench.experiments.ranges`
FIRST = 8  # test episodes that the contract is checked on in every run


def in_ranges(job: Job) -> bool:
    """Tells whether a job's episodes are so many that they are evaluated in ranges."""
    return job.episodes > RANGE


@dataclass(frozen=True)
class Part:
    """The evaluation of a range, with its seconds, place and device."""

    evaluated: Evaluated
    seconds: float
    place: str
    device: str


@dataclass(frozen=True)
class Ready:
    """A method where it is evaluated."""

    job: Job  # with the options that were chosen
    choice: dict[str, Any]  # what a result says of the choice
    method: Method
    trained: Trained | None
    folder: str  # of the meta-training, "" if there is none
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
        first = loader.episodes(count) if has_sessions(loader) else loader.batch(0, FIRST)
        return Asked(self.job.name, self.method.eval(), first.support, first.query, first.masked).looked_at()

    def check_sessions(self) -> None:
        """Holds a method that learns session by session against the contract, on the first sequences."""
        loader = self.loader("test")
        if has_sessions(loader) and not self.job.supports_kept and loader.sampler.shape.count > 1:
            from ifsl_bench.plugin.session_contract import check_sessions

            batch = loader.batch(0, min(FIRST, self.job.episodes))
            check_sessions(self.job.name, self.method, batch.supports, loader.episodes(len(batch)).query)

    def bias(self, reporter: Reporter) -> tuple[Bias | None, str]:
        """Finds the bias that calibrates it on the validation episodes that options are chosen on.

        None in regular few-shot learning, and in sessions for a method that is given every image, which each validation
        sequence would fit anew; and where the data have too few validation classes, with the reason.
        """
        task = self.job.task
        if not task.kind.has_base or (task.sessions is not None and self.job.method.every_image):
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
        return (find_bias(margins, sequences=task.sessions is not None), "") if margins else (None, "")

    def part(self, episodes: range, bias: Bias | None, reporter: Reporter, title: str) -> Part:
        """Evaluates some of the job's test episodes."""
        test, start = self.loader("test"), time.perf_counter()
        evaluated = evaluate(self.method, self.job.name, test, episodes, reporter, title, self.job.episodes, bias)
        return Part(evaluated, time.perf_counter() - start, str(self.place), describe_device(self.place.device))


@dataclass(frozen=True)
class EvaluationStage(JobStage):
    """A stage that evaluates a job's method."""

    placed_as = "evaluation"
    model: Path | None = None  # the folder of a stored model to evaluate, in place of the job's own

    def key(self, home: Paths) -> str:
        """Names all that is evaluated for one result."""
        job = self.job
        how = [job.setting, job.training.select, job.calibrated, str(self.model or "")]
        return f"{key_of(job, home)}-{sha256_json(how)[:12]}-{job.episodes}"

    def ready(self, work: Workspace, reporter: Reporter) -> Ready:
        """The method, trained if need be; the reporter hears what was chosen."""
        job, choice = self.job, {"options": self.job.options, "tuned": {}, "passed_over": [], "edge": []}
        if self.model is None and job.searched:
            from ifsl_bench.experiments.searching import chosen

            job, choice = chosen(job, work, reporter)
        if self.model is None:
            method, trained, folder = MetaTrain(job).compute(work)
        else:
            method, trained, folder = load_trained(self.model, fresh(job, work), job.name, job.training.select)
        prepared = backbone_of(job).prepared(work)
        return Ready(job, choice, to_evaluate(job, work, method), trained, folder, prepared, self.place(work))

    def needed(self) -> list[Stage]:
        """The stages before an evaluation: checks of episodes, features, and what gives the method."""
        job = self.job
        # Every row has calibrated numbers beside its own; validation episodes that cannot be drawn are no hindrance.
        more = features_stages(job, (*job.sides, "val") if job.task.kind.has_base else job.sides)
        if job.searched and self.model is None:
            from ifsl_bench.experiments.searching import TrainChosen, trials_of

            if job.trials and job.seed != TUNING_SEED and job.trains:  # which waits for the trials
                more += [TrainChosen(replace(job, calibrated=False, episodes=job.task.evaluation.episodes))]
            else:
                more += trials_of(job)
        elif job.trains and self.model is None:
            more += [MetaTrain(replace(job, calibrated=False))]
        return [*(CheckEpisodes(job.task, side) for side in job.sides), *more]
