"""The search for a method's options on validation episodes: what is tried in each round, and which setting is chosen.

A method as published tries the values of its grid in one round. With ``--tune`` the first round is the default and
points spread over the method's space, and later rounds change one option of the best setting at a time. Every trial is
a whole one and is kept in the home folder, so that the seeds of a row, and an interrupted search, share it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ifsl_bench.backbones.device import DeviceChoice
from ifsl_bench.experiments.job import TUNING_SEED, Job
from ifsl_bench.experiments.selection_bootstrap import (
    RIVAL_EPISODES,
    Tried,
    best_of,
    firmness,
    read_trial,
    tried_with,
    write_trial,
)
from ifsl_bench.experiments.stages import MetaTrain, Stage, backbone_of, key_of, to_evaluate
from ifsl_bench.experiments.trained_models import Diverged
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.find_method import searched_options
from ifsl_bench.plugin.method import Method, NonFinite
from ifsl_bench.plugin.options import accepts, defaults, grid_of, space_of, without_defaults
from ifsl_bench.plugin.space import RATE, Space
from ifsl_bench.protocols.calibration import Bias
from ifsl_bench.protocols.loader import evaluate
from ifsl_bench.protocols.metrics import HitCounts
from ifsl_bench.protocols.registry import protocol_of
from ifsl_bench.store.schema import Choice
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import is_locked, locked
from ifsl_bench.utils.progress import NullReporter, Reporter
from ifsl_bench.utils.text_format import format_options

Point = dict[str, Any]  # option -> value
PAIR = 2  # settings of a later round: below the best one and above it
# Without 5, whose root is that of the golden section; 95, more than any method has options.
PRIMES = [number for number in range(2, 500) if number != 5 and all(number % n for n in range(2, number))]
HALVINGS = 4  # of the distance between these and the best, for each option


# -- the points of a search


def points(
    method: type[Method],
    fixed_options: Container[str],
    trials: int,
    default: Mapping[str, Any],
    rounds: Sequence[Sequence[tuple[Point, float]]] = (),
    sessions: bool = False,
) -> list[Point]:
    """Return the values to try in the next round: the product of the grid, or a round of :func:`next_round`.

    Args:
        method: whose options are searched.
        fixed_options: the options that are set by the user, which are not searched.
        trials: the number of settings to try; 0 for the grid.
        default: the values of the method as published.
        rounds: the earlier rounds, with accuracies.
        sessions: whether the grid is for sessions.

    Returns:
        The points; one empty point where nothing is searched, and none after the last round.
    """
    free = searched_options(method, fixed_options, trials)
    if free and trials:
        space = space_of(method)
        return next_round({key: space[key] for key in free}, default, trials, rounds)
    grid = grid_of(method, sessions)
    product = itertools.product(*(grid[key] for key in free))
    return [] if rounds else [dict(zip(free, values, strict=True)) for values in product]


def next_round(
    space: Space, default: Mapping[str, Any], trials: int, rounds: Sequence[Sequence[tuple[Point, float]]]
) -> list[Point]:
    """Return the settings of a search's next round; none after the last one.

    The first round is the default and points spread over the whole space. Each later one is the best setting so far
    with one option changed, to a value below and one above. Options take turns, and each time that an option's turn
    comes again its two values are half as far from the best. Every trial is a whole one: the search costs as much as
    any other choice among ``trials`` settings.

    Args:
        space: the options that are searched, with their ranges.
        default: the values of the method as published.
        trials: the number of settings to try in all.
        rounds: the settings of each earlier round, with their accuracies; -inf for one that cannot be chosen.
    """
    pairs = min(trials // 2 // PAIR, HALVINGS * len(space))  # half of the trials, but for searches of many
    first = trials - PAIR * pairs
    if not rounds:
        return _distinct([{key: default[key] for key in space}, *spread(space, first)])[:first]  # which may hold it
    if len(rounds) > pairs:
        return []
    tried = [point for results in rounds for point, _ in results]
    best, _ = max((pair for results in rounds for pair in results), key=lambda pair: pair[1])
    reach = 0.5 * first ** (-1 / len(space)) * 0.5 ** ((len(rounds) - 1) // len(space))  # first half as far as they lie
    names = list(space)
    for turn in range(len(space)):  # an option that has nothing new beside the best leaves its turn to the next
        key = names[(len(rounds) - 1 + turn) % len(space)]
        neighbours = _distinct([best | {key: value} for value in space[key].beside(best[key], reach)])
        if new := [point for point in neighbours if point not in tried]:
            return new
    return []


def spread(space: Space, count: int) -> list[Point]:
    """Return ``count`` points that fill the space evenly.

    They are multiples of an irrational number for each option, modulo 1 (Richtmyer's sequence, 1951); of the golden
    section for the first option, for which they are most even.

    Args:
        space: the options, with their ranges.
        count: the number of points.
    """
    steps = [(math.sqrt(5) - 1) / 2, *(math.sqrt(prime) % 1 for prime in PRIMES)]
    shares = [[(0.5 + i * step) % 1 for step in steps] for i in range(count)]
    return [{key: space[key].at(u) for key, u in zip(space, row, strict=False)} for row in shares]


def _distinct(candidates: Sequence[Point]) -> list[Point]:
    return [point for i, point in enumerate(candidates) if point not in candidates[:i]]


def at_edge(method: type[Method], options: Mapping[str, Any], point: Point, offered: Sequence[Point]) -> list[str]:
    """Return the options whose number is the smallest or the largest offered.

    A number at the end of what the option takes is left out: nothing lies beyond it.

    Args:
        method: whose options they are.
        options: the method's other options.
        point: the setting that was chosen.
        offered: all settings that were tried.
    """
    edges = []
    for key, value in point.items():
        values = [candidate[key] for candidate in offered if _is_number(candidate[key])]
        if not _is_number(value):
            continue
        ends = [end for end, extreme in ((-math.inf, min(values)), (math.inf, max(values))) if value == extreme]
        if any(key == RATE or accepts(method, {**options, **point, key: _beyond(value, end)}) for end in ends):
            edges.append(key)
    return edges


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beyond(value: float, end: float) -> float:
    """The next value towards an end."""
    return value + int(math.copysign(1, end)) if isinstance(value, int) else math.nextafter(value, end)


# -- the candidates of a job


@dataclass(frozen=True)
class Candidate:
    """One of the settings to choose from: the values of what is searched, and the job with them, not calibrated."""

    point: Point
    job: Job

    @property
    def name(self) -> str:
        """The point in words, as results have it."""
        return format_options(self.point)


def rounds_of(job: Job, accuracy: Callable[[Candidate], float | None] = lambda _: None) -> list[list[Candidate]]:
    """Return the settings to choose from, by round, up to the first round of which not all accuracies are known.

    They are the same with and without calibration. Where nothing is chosen, there is one, the job at no point.

    Args:
        job: with what is searched.
        accuracy: of a candidate on validation episodes; -inf if it cannot be chosen, None while it is not known.
    """
    default = {**defaults(job.method, job.task), RATE: job.published_schedule.schedule.rate}
    sessions = protocol_of(job.task).learns_sessions
    rounds: list[list[Candidate]] = []
    finished: list[list[tuple[Point, float]]] = []
    while settings := points(job.method, job.fixed_options, job.trials, default, finished, sessions):
        rounds.append([_candidate(job, point) for point in settings])
        accuracies = [accuracy(candidate) for candidate in rounds[-1]]
        if any(value is None for value in accuracies):
            break
        finished.append(
            [(point, value) for point, value in zip(settings, accuracies, strict=True) if value is not None]
        )
    return rounds


def _candidate(job: Job, point: Point) -> Candidate:
    options = without_defaults(job.method, {**job.set_options, **point}, job.task)
    rate = point.get(RATE, job.training.rate)
    published = job.published_schedule.schedule.rate
    training = msgspec.structs.replace(job.training, rate=0.0 if rate == published else rate)
    seed = TUNING_SEED if job.trials else job.seed
    plain = replace(job, set_options=options, training=training, seed=seed, trials=0, calibrated=False)
    return Candidate(point, plain)


# -- trials and the choice


@dataclass(frozen=True)
class Trial(Stage):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    kind = "trial"
    job: Job

    def __str__(self) -> str:
        task, steps = self.job.task, f"{self.job.schedule.steps:,} steps, " if self.job.trains else ""
        return f"trial of {self.job}: {steps}{len(task.evaluation.halves[0]):,} validation {protocol_of(task).drawn}"

    def key(self, home: Paths) -> str:
        return f"{key_of(self.job, home)}-{self.job.training.select}"

    def file(self, home: Paths) -> Path:
        """Return the file that keeps the trial."""
        return home.cache / "trials" / f"{self.key(home)}.json"

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        return [(self, self.file(home)), *MetaTrain(self.job).artefacts(home)]

    def cached(self, home: Paths) -> bool:
        return self.kept(home) is not None

    def kept(self, home: Paths) -> Tried | None:
        """Return the trial of the same method on the backbone that is in the home, if there is one."""
        return read_trial(self.file(home), backbone_of(self.job).weights(home), self.job.has_made)

    def place(self, work: Workspace) -> DeviceChoice:
        evaluation = work.place("evaluation")
        training = MetaTrain(self.job).place(work) if self.job.trains else evaluation
        if training == evaluation:
            return evaluation
        return DeviceChoice(evaluation.device, f"{evaluation.why}, after meta-training on {training}")

    def compute(self, work: Workspace) -> Tried:
        job, file, prepared = self.job, self.file(work.home), backbone_of(self.job).prepared(work)
        weights = prepared.pretrained.sha256
        tried = read_trial(file, weights, job.has_made, work.reporter)
        if tried is None:
            with locked(file, work.reporter.warn):
                tried = read_trial(file, weights, job.has_made)  # another process may have made it
                if tried is None:
                    tried = self._tried(work, prepared)
                    write_trial(file, tried, weights, str(job), job.identity)
                    drawn = protocol_of(job.task).drawn
                    work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation {drawn}")
        return tried

    def _tried(self, work: Workspace, prepared: PreparedTask) -> Tried:
        job, episodes = self.job, self.job.task.evaluation.halves[0]
        try:
            method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
            loader = prepared.loader("val", device=work.place("evaluation").device)
            return tried_with(evaluate(method, job.name, loader, episodes, work.reporter, str(self)))
        except (Diverged, NonFinite) as error:
            return Tried(0.0, len(episodes), diverged=str(error))

    def on_test(self, work: Workspace, episodes: range, title: str) -> HitCounts:
        """Count the hits of the setting on test episodes, calibrated by its own bias.

        Args:
            work: where the job's data and models are.
            episodes: of the test stream.
            title: of the progress.
        """
        job, bias = self.job, self.compute(work).bias
        method = to_evaluate(job, work, MetaTrain(job).compute(work).method)
        loader = backbone_of(job).prepared(work).loader("test", device=work.place("evaluation").device)
        alone = None if bias is None else Bias(bias, len(job.task.evaluation.halves[0]), np.empty(0), np.empty(0))
        return evaluate(method, job.name, loader, episodes, work.reporter, title, job.episodes, alone).counts


@dataclass(frozen=True)
class Search(Stage):
    """The search of a job: its trials, and the best setting, meta-trained with the job's seed."""

    kind = "search"
    job: Job

    def __str__(self) -> str:
        return f"search of {self.job}: {self.job.trials or len(rounds_of(self.job)[0])} trials"

    def key(self, home: Paths) -> str:
        return f"{key_of(self.job, home)}-{self.job.setting}-{self.job.training.select}"

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        """List the trials, with their models, and the models of all candidates: one of these is the job's own."""
        candidates = list(itertools.chain.from_iterable(rounds_of(self.job, kept_accuracies(home))))
        own = [MetaTrain(replace(candidate.job, seed=self.job.seed)) for candidate in candidates]
        stages: list[Stage] = [*(Trial(candidate.job) for candidate in candidates), *own]
        return [artefact for stage in stages for artefact in stage.artefacts(home)]

    def cached(self, home: Paths) -> bool:
        best = kept_choice(self.job, home)
        return best is not None and (not best.trains or MetaTrain(best).cached(home))

    def compute(self, work: Workspace) -> None:
        best, _ = chosen(self.job, work, NullReporter())
        MetaTrain(best).compute(work)


def kept_accuracies(home: Paths) -> Callable[[Candidate], float | None]:
    """Return a function that looks up the accuracy of a candidate whose trial is in a home, for :func:`rounds_of`."""

    def accuracy(candidate: Candidate) -> float | None:
        tried = Trial(candidate.job).kept(home)
        return None if tried is None else tried.to_compare

    return accuracy


def chosen(job: Job, work: Workspace, reporter: Reporter) -> tuple[Job, dict[str, Any]]:
    """Make the trials of a job, and choose the best.

    Args:
        job: with what is searched.
        work: where trials are kept.
        reporter: receives the choice.

    Returns:
        The best of the candidates with the job's seed, and the fields of a result about the choice.
    """
    known: dict[str, Tried] = {}
    while True:
        rounds = rounds_of(job, lambda candidate: known[candidate.name].to_compare if candidate.name in known else None)
        missing = {candidate.name: Trial(candidate.job) for candidate in rounds[-1] if candidate.name not in known}
        if not missing:
            break
        while missing:  # those first that no other process is making
            free = (name for name, trial in missing.items() if not is_locked(trial.file(work.home)))
            name = next(free, next(iter(missing)))
            known[name] = missing.pop(name).compute(work)
    candidates = {candidate.name: candidate for candidate in itertools.chain.from_iterable(rounds)}
    tried = {name: known[name] for name in candidates}
    name = best_of(str(job), tried, reporter)
    reporter.say(f"{job}: {name} is the best of {len(tried)}, {tried[name].accuracy:.2f}% on validation")
    point, best = candidates[name].point, candidates[name].job
    offered = [candidate.point for candidate in candidates.values()]
    return replace(best, seed=job.seed), {
        "options": {**best.options, **{key: value for key, value in point.items() if key != RATE}},
        "tuned": {", ".join(point): {setting: trial.accuracy for setting, trial in tried.items()}},
        **({"choice": Choice(**firmness(tried, name))} if "choices" in protocol_of(job.task).features else {}),
        "rounds": [len(round_) for round_ in rounds],
        "passed_over": [setting for setting, trial in tried.items() if trial.failed],
        "edge": at_edge(job.method, best.options, point, offered),
    }


def counted_on_test(job: Job, choice: dict[str, Any], counts: HitCounts, work: Workspace) -> dict[str, Any]:
    """Count the hits of a choice's rivals on the first test episodes, as docs/statistics.md needs them.

    Args:
        job: that was searched.
        choice: the fields of a result about the choice, as :func:`chosen` returns them.
        counts: of the chosen setting on all test episodes.
        work: where trials are kept.
    """
    if "choice" not in choice or not choice["choice"].rivals:
        return choice
    record, episodes = choice["choice"], range(min(RIVAL_EPISODES, len(counts)))
    jobs = [candidate.job for candidate in itertools.chain.from_iterable(rounds_of(job, kept_accuracies(work.home)))]
    columns = [counts.columns()]
    for i, index in enumerate(record.rivals):
        title = f"rival {i + 1} of {len(record.rivals)} of {job}: {len(episodes):,} test episodes"
        columns.append(Trial(jobs[index]).on_test(work, episodes, title).columns())
    hits = {name: [int(column[name][: len(episodes)].sum()) for column in columns] for name in columns[-1]}
    return choice | {"choice": msgspec.structs.replace(record, test_episodes=len(episodes), test_hits=hits)}


def kept_choice(job: Job, home: Paths) -> Job | None:
    """Return the choice from trials that are kept; None where one is missing, or all have failed.

    Args:
        job: with its seed.
        home: where trials are kept.
    """
    if not job.searched:
        return job
    accuracy = kept_accuracies(home)
    candidates = list(itertools.chain.from_iterable(rounds_of(job, accuracy)))
    accuracies = [value for candidate in candidates if (value := accuracy(candidate)) is not None]
    if len(accuracies) < len(candidates) or max(accuracies) == -math.inf:
        return None
    return replace(candidates[accuracies.index(max(accuracies))].job, seed=job.seed)
