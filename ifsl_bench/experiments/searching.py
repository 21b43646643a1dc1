"""The search for options: its trials in rounds, the choice among them, and the chosen one's meta-training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ifsl_bench.backbones.device import DeviceChoice
from ifsl_bench.data.preparing.metadata import DatasetMetadata
from ifsl_bench.experiments.candidates import Candidate, rounds_of
from ifsl_bench.experiments.evaluation import evaluate
from ifsl_bench.experiments.job import TUNING_SEED, Job
from ifsl_bench.experiments.rates import Amount
from ifsl_bench.experiments.selection_bootstrap import (
    RIVAL_EPISODES,
    Tried,
    best_of,
    firmness,
    read_trial,
    tried_with,
    write_trial,
)
from ifsl_bench.experiments.stages import Stage
from ifsl_bench.experiments.trained_models import Diverged, Model
from ifsl_bench.experiments.training_stage import (
    JobStage,
    MetaTrain,
    backbone_of,
    evaluation_amount,
    key_of,
    prepared_for,
    to_evaluate,
    training_place,
)
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin import search_points as settings
from ifsl_bench.plugin.find_method import format_label
from ifsl_bench.plugin.method import NonFinite
from ifsl_bench.plugin.search_points import PAIR
from ifsl_bench.plugin.space import RATE
from ifsl_bench.protocols.calibration import Bias
from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.store.schema import Choice
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter, Reporter


@dataclass(frozen=True)
class Trial(JobStage):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    kind = "trial"
    trains = True

    def told(self, seeds: str) -> str:
        steps = f"{self.job.schedule.steps:,} steps, " if self.job.trains else ""
        task = self.job.task
        validation = f"{len(task.evaluation.halves[0]):,} validation {task.kind.drawn}"
        return f"trial of {self.job.told(seeds)}: {steps}{validation}"

    @property
    def family(self) -> str:
        return trials_named(self.job)

    def key(self, home: Paths) -> str:
        return f"{key_of(self.job, home)}-{self.job.training.select}"

    def inputs(self) -> Sequence[Stage]:
        return prepared_for(self.job, ("train", "val") if self.job.trains else ("val",))

    def file(self, home: Paths) -> Path:
        return home.cache / "trials" / f"{self.key(home)}.json"

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        return [(self, self.file(home)), *MetaTrain(self.job).artefacts(home)]

    def cached(self, home: Paths) -> bool:
        return self.read_here(home) is not None

    def read_here(self, home: Paths) -> Tried | None:
        """The trial on the backbone that is in the home."""
        return self.read(home, backbone_of(self.job).weights(home))

    def read(self, home: Paths, weights: str | None, reporter: Reporter | None = None) -> Tried | None:
        """The trial of the same method on the same backbone, if there is one."""
        return read_trial(self.file(home), weights, self.job.has_made, reporter)

    def place(self, work: Workspace) -> DeviceChoice:
        evaluation = work.place("evaluation")
        return both(training_place(self.job, work), evaluation) if self.job.trains else evaluation

    def threads(self) -> int:
        return MetaTrain(self.job).threads()

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount:
        """Meta-training, beside which the episodes take little; without it these."""
        if self.job.trains:
            return MetaTrain(self.job).amount(data, work)
        return evaluation_amount(self.job, len(self.job.task.evaluation.halves[0]), work)

    def compute(self, work: Workspace) -> Tried:
        job, file, prepared = self.job, self.file(work.home), backbone_of(self.job).prepared(work)
        tried = self.read(work.home, prepared.pretrained.sha256, work.reporter)
        if tried is None:
            tried = self._tried(work, prepared)
            write_trial(file, tried, prepared.pretrained.sha256, str(job), job.identity)
            work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation {job.task.kind.drawn}")
        return tried

    def on_test(self, work: Workspace, episodes: range, title: str) -> Counts:
        """Counts the hits of what was tried on test episodes, calibrated by its own bias."""
        job, bias = self.job, self.compute(work).bias
        method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
        loader = backbone_of(job).prepared(work).loader("test", device=work.place("evaluation").device)
        alone = None if bias is None else Bias(bias, len(job.task.evaluation.halves[0]), np.empty(0), np.empty(0))
        counts = evaluate(method, job.name, loader, episodes, work.reporter, title, job.episodes, alone).counts
        assert isinstance(counts, Counts)  # no such question is asked of sequences
        return counts

    def _tried(self, work: Workspace, prepared: PreparedTask) -> Tried:
        job, episodes = self.job, self.job.task.evaluation.halves[0]
        try:
            method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
            loader = prepared.loader("val", device=work.place("evaluation").device)
            return tried_with(evaluate(method, job.name, loader, episodes, work.reporter, str(self)))
        except (Diverged, NonFinite) as error:
            return Tried(0.0, len(episodes), diverged=str(error))


def trials_named(job: Job) -> str:
    """The trials of a search, for people: what is tried, with what is not."""
    fixed = {key: value for key, value in job.set_options.items() if key not in job.method.space}
    return f"trials of {'.'.join(format_label(job.method, job.name, fixed, job.task))} on {job.task.name}"


def both(first: DeviceChoice, second: DeviceChoice) -> DeviceChoice:
    """Joins the places of work in two parts."""
    return first if first == second else DeviceChoice(second.device, f"{second.why}, after meta-training on {first}")


@dataclass(frozen=True)
class LaterTrial(JobStage):
    """A trial in a later round of a search: what it tries follows from the rounds before it.

    Attributes:
        job: the search, as :func:`trials_of` has it.
        round: from 1.
        slot: in the round, from 0.
    """

    round: int
    slot: int

    kind = "trial"
    trains = True

    def told(self, seeds: str) -> str:
        return f"trial {self.slot + 1} of round {self.round + 1} of {self.job.told(seeds)}"

    @property
    def family(self) -> str:
        return trials_named(self.job)

    @property
    def _first(self) -> Trial:
        """The search's first trial, which takes about as long."""
        return Trial(rounds_of(self.job)[0][0].job)

    def key(self, home: Paths) -> str:
        select = self.job.training.select
        return f"{key_of(self.job, home)}-{self.job.setting}-{select}-{self.round}.{self.slot}"

    def inputs(self) -> Sequence[Stage]:
        if self.round > 1:
            return [LaterTrial(self.job, self.round - 1, slot) for slot in range(PAIR)]
        return [Trial(candidate.job) for candidate in rounds_of(self.job)[0]]

    def trial(self, home: Paths) -> Trial | None:
        """Returns its trial; None while a round before it is not done, and where the search has no such trial."""
        rounds = rounds_of(self.job, kept_accuracies(home))
        candidates = rounds[self.round][self.slot :] if len(rounds) > self.round else []
        return Trial(candidates[0].job) if candidates else None

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        trial = self.trial(home)
        return trial.artefacts(home) if trial else []

    def cached(self, home: Paths) -> bool:
        accuracy = kept_accuracies(home)
        rounds = rounds_of(self.job, accuracy)
        here = rounds[self.round][self.slot :][:1] if len(rounds) > self.round else rounds[-1]
        return all(accuracy(candidate) is not None for candidate in here)

    def place(self, work: Workspace) -> DeviceChoice:
        return self._first.place(work)

    def threads(self) -> int:
        return self._first.threads()

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount:
        return self._first.amount(data, work)

    def compute(self, work: Workspace) -> Tried | None:
        trial = self.trial(work.home)
        return trial.compute(work) if trial else None


def trials_of(job: Job) -> list[Trial | LaterTrial]:
    """The trials that a job's choice waits for; the same ones for all seeds of a search, calibrated or not."""
    first = [Trial(candidate.job) for candidate in rounds_of(job)[0]]
    seed, episodes = TUNING_SEED if job.trials else job.seed, job.task.evaluation.episodes
    search = replace(job, seed=seed, calibrated=False, episodes=episodes)
    later = settings.rounds_after_first(job.method, job.fixed_options, job.trials)
    return [*first, *(LaterTrial(search, i + 1, slot) for i in range(later) for slot in range(PAIR))]


def kept_accuracies(home: Paths) -> Callable[[Candidate], float | None]:
    """The accuracies of trials that are in a home, for :func:`~ifsl_bench.experiments.candidates.rounds_of`."""

    def accuracy(candidate: Candidate) -> float | None:
        tried = Trial(candidate.job).read_here(home)
        return None if tried is None else tried.to_compare

    return accuracy


@dataclass(frozen=True)
class TrainChosen(MetaTrain):
    """The best of a job's candidates, meta-trained with a seed that is not the trials'."""

    def told(self, seeds: str) -> str:
        return f"meta-training the choice for {self.job.told(seeds)}: {self.job.schedule.steps:,} steps"

    def key(self, home: Paths) -> str:
        return f"{key_of(self.job, home)}-{self.job.setting}-{self.job.training.select}"

    def inputs(self) -> Sequence[Stage]:
        return [*prepared_for(self.job, ("train", "val")), *trials_of(self.job)]

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        """The models of all candidates: one of these is its own."""
        candidates = itertools.chain.from_iterable(rounds_of(self.job, kept_accuracies(home)))
        jobs = [replace(candidate.job, seed=self.job.seed) for candidate in candidates]
        return [artefact for job in jobs for artefact in MetaTrain(job).artefacts(home)]

    def cached(self, home: Paths) -> bool:
        return False  # what is chosen is known where all trials are

    def compute(self, work: Workspace) -> Model:
        best, _ = chosen(self.job, work, NullReporter())
        return MetaTrain(best).compute(work)


def chosen(job: Job, work: Workspace, reporter: Reporter) -> tuple[Job, dict[str, Any]]:
    """The best of the candidates of a job that is searched, with the job's seed, and what a result says of the choice.

    Args:
        reporter: who hears of the choice.
    """
    tried: dict[str, Tried] = {}

    def accuracy(candidate: Candidate) -> float:
        tried[candidate.name] = Trial(candidate.job).compute(work)
        return tried[candidate.name].to_compare

    rounds = rounds_of(job, accuracy)
    candidates = {candidate.name: candidate for candidate in itertools.chain.from_iterable(rounds)}
    name = best_of(str(job), tried, reporter)
    reporter.say(f"{job}: {name} is the best of {len(tried)}, {tried[name].accuracy:.2f}% on validation")
    point, best = candidates[name].point, candidates[name].job
    offered = [candidate.point for candidate in candidates.values()]
    return replace(best, seed=job.seed), {
        "options": {**best.options, **{key: value for key, value in point.items() if key != RATE}},
        "tuned": {", ".join(point): {setting: trial.accuracy for setting, trial in tried.items()}},
        **({} if job.task.sessions else {"choice": Choice(**firmness(tried, name))}),
        "rounds": [len(round_) for round_ in rounds],
        "passed_over": [setting for setting, trial in tried.items() if trial.failed],
        "edge": settings.at_edge(job.method, best.options, point, offered),
    }


def counted_on_test(job: Job, choice: dict[str, Any], counts: Counts, work: Workspace) -> dict[str, Any]:
    """Counts the hits of a choice's rivals on the first test episodes, as docs/statistics.md needs them.

    Args:
        choice: what a result says of it, as :func:`chosen` has it.
        counts: those of the chosen setting on all test episodes.
    """
    if "choice" not in choice or not choice["choice"].rivals:
        return choice
    firmness, episodes = choice["choice"], range(min(RIVAL_EPISODES, len(counts)))
    jobs = [candidate.job for candidate in itertools.chain.from_iterable(rounds_of(job, kept_accuracies(work.home)))]
    columns = [counts.columns()]
    for i, place in enumerate(firmness.rivals):
        title = f"rival {i + 1} of {len(firmness.rivals)} of {job}: {len(episodes):,} test episodes"
        columns.append(Trial(jobs[place]).on_test(work, episodes, title).columns())
    hits = {name: [int(column[name][: len(episodes)].sum()) for column in columns] for name in columns[-1]}
    return choice | {"choice": msgspec.structs.replace(firmness, test_episodes=len(episodes), test_hits=hits)}


def kept_choice(job: Job, home: Paths) -> Job | None:
    """The choice from trials that are there; None where one is missing, or all have failed."""
    if not job.searched:
        return job
    accuracy = kept_accuracies(home)
    candidates = list(itertools.chain.from_iterable(rounds_of(job, accuracy)))
    accuracies = [value for candidate in candidates if (value := accuracy(candidate)) is not None]
    if len(accuracies) < len(candidates) or max(accuracies) == -math.inf:
        return None
    return replace(candidates[accuracies.index(max(accuracies))].job, seed=job.seed)
