"""The search for a method's options on validation episodes: settings to try, their trials, and the choice among them.

A method as published tries the values of its grid in one round. With ``--tune`` the first round is the default and
points spread over the method's space, and later rounds change one option of the best setting at a time. Every trial is
a whole one and is stored in the home folder, so that the seeds of a row, and an interrupted search, share it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.backbones.device import DeviceChoice
from ifsl_bench.experiments.job import SEED_OF_TRIALS, Job
from ifsl_bench.experiments.stages import (
    MetaTrainStage,
    Stage,
    copy_for_evaluation,
    make_pretrain_stage,
    meta_training_key,
)
from ifsl_bench.experiments.trained_models import DivergedError
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.find_method import searched_option_names
from ifsl_bench.plugin.method import Method, NonFiniteLogitsError
from ifsl_bench.plugin.options import (
    accepts_options,
    declared_option_grid,
    declared_search_space,
    default_options,
    drop_default_values,
)
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, SearchSpace
from ifsl_bench.protocols.calibration import ValidationBias, bootstrap_episode_counts, find_best_bias
from ifsl_bench.protocols.loader import MAX_UNCONVERGED_SHARE, EvaluationResult, evaluate_method
from ifsl_bench.protocols.metrics import HitCounts
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.store.schema import StoredOptionChoice
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine_path
from ifsl_bench.utils.locks import hold_lock, is_locked
from ifsl_bench.utils.progress import NullReporter, Reporter
from ifsl_bench.utils.serialization import check_value_types, read_checksummed, write_checksummed
from ifsl_bench.utils.text_format import format_options

OptionPoint = dict[str, Any]  # option -> value
POINTS_PER_LATER_ROUND = 2  # settings of a later round: below the best one and above it
# Without 5, whose root is that of the golden section; 95, more than any method has options.
PRIME_NUMBERS = [number for number in range(2, 500) if number != 5 and all(number % n for n in range(2, number))]
MAX_HALVINGS = 4  # of the distance between these and the best, for each option
MIN_RIVAL_WINS, MAX_RIVALS = 2, 6  # resamples that choose a setting which is tried on test episodes; settings, at most
RIVAL_EPISODES = 1000  # test episodes, at most: a difference between settings spreads far less than a number


# -- the points of a search


def draw_next_search_round(
    method: type[Method],
    fixed_options: Container[str],
    trials: int,
    default: Mapping[str, Any],
    rounds: Sequence[Sequence[tuple[OptionPoint, float]]] = (),
    sessions: bool = False,
) -> list[OptionPoint]:
    """Return the values to try in the next round: the product of the grid, or a round of :func:`propose_next_round`.

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
    free = searched_option_names(method, fixed_options, trials)
    if free and trials:
        space = declared_search_space(method)
        return propose_next_round({key: space[key] for key in free}, default, trials, rounds)
    grid = declared_option_grid(method, sessions)
    product = itertools.product(*(grid[key] for key in free))
    return [] if rounds else [dict(zip(free, values, strict=True)) for values in product]


def propose_next_round(
    space: SearchSpace, default: Mapping[str, Any], trials: int, rounds: Sequence[Sequence[tuple[OptionPoint, float]]]
) -> list[OptionPoint]:
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
    pairs = min(
        trials // 2 // POINTS_PER_LATER_ROUND, MAX_HALVINGS * len(space)
    )  # half of the trials, but for searches of many
    first = trials - POINTS_PER_LATER_ROUND * pairs
    if not rounds:
        return _without_duplicates([{key: default[key] for key in space}, *make_evenly_spread_points(space, first)])[
            :first
        ]  # which may hold it
    if len(rounds) > pairs:
        return []
    tried = [point for results in rounds for point, _ in results]
    best, _ = max((pair for results in rounds for pair in results), key=lambda pair: pair[1])
    reach = 0.5 * first ** (-1 / len(space)) * 0.5 ** ((len(rounds) - 1) // len(space))  # first half as far as they lie
    names = list(space)
    for turn in range(len(space)):  # an option that has nothing new beside the best leaves its turn to the next
        key = names[(len(rounds) - 1 + turn) % len(space)]
        neighbours = _without_duplicates(
            [best | {key: value} for value in space[key].neighbouring_values(best[key], reach)]
        )
        if new := [point for point in neighbours if point not in tried]:
            return new
    return []


def make_evenly_spread_points(space: SearchSpace, count: int) -> list[OptionPoint]:
    """Return ``count`` points that fill the space evenly.

    They are multiples of an irrational number for each option, modulo 1 (Richtmyer's sequence, 1951); of the golden
    section for the first option, for which they are most even.

    Args:
        space: the options, with their ranges.
        count: the number of points.
    """
    steps = [(math.sqrt(5) - 1) / 2, *(math.sqrt(prime) % 1 for prime in PRIME_NUMBERS)]
    shares = [[(0.5 + i * step) % 1 for step in steps] for i in range(count)]
    return [{key: space[key].value_at_share(u) for key, u in zip(space, row, strict=False)} for row in shares]


def _without_duplicates(candidates: Sequence[OptionPoint]) -> list[OptionPoint]:
    return [point for i, point in enumerate(candidates) if point not in candidates[:i]]


def options_at_edge(
    method: type[Method], options: Mapping[str, Any], point: OptionPoint, offered: Sequence[OptionPoint]
) -> list[str]:
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
        if any(
            key == LEARNING_RATE_OPTION
            or accepts_options(method, {**options, **point, key: _step_beyond_range(value, end)})
            for end in ends
        ):
            edges.append(key)
    return edges


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _step_beyond_range(value: float, end: float) -> float:
    """Return the next value towards an end."""
    return value + int(math.copysign(1, end)) if isinstance(value, int) else math.nextafter(value, end)


# -- the candidates of a job


@dataclass(frozen=True)
class SearchCandidate:
    """One of the settings to choose from: the values of the searched options, and the job with them, not calibrated."""

    option_values: OptionPoint
    job: Job

    @property
    def name(self) -> str:
        """The point in words, as results have it."""
        return format_options(self.option_values)


def candidates_by_round(
    job: Job, accuracy: Callable[[SearchCandidate], float | None] = lambda _: None
) -> list[list[SearchCandidate]]:
    """Return the settings to choose from, by round, up to the first round that lacks an accuracy.

    They are the same with and without calibration. Where nothing is chosen, there is one, the job at no point.

    Args:
        job: with the searched options.
        accuracy: of a candidate on validation episodes; -inf if it cannot be chosen, None while there is none.
    """
    default = {**default_options(job.method, job.task), LEARNING_RATE_OPTION: job.published_schedule.schedule.rate}
    sessions = protocol_of_task(job.task).learns_sessions
    rounds: list[list[SearchCandidate]] = []
    finished: list[list[tuple[OptionPoint, float]]] = []
    while settings := draw_next_search_round(job.method, job.fixed_options, job.n_trials, default, finished, sessions):
        rounds.append([_make_candidate(job, point) for point in settings])
        accuracies = [accuracy(candidate) for candidate in rounds[-1]]
        if any(value is None for value in accuracies):
            break
        finished.append(
            [(point, value) for point, value in zip(settings, accuracies, strict=True) if value is not None]
        )
    return rounds


def _make_candidate(job: Job, point: OptionPoint) -> SearchCandidate:
    options = drop_default_values(job.method, {**job.set_options, **point}, job.task)
    rate = point.get(LEARNING_RATE_OPTION, job.training_changes.rate)
    published = job.published_schedule.schedule.rate
    training = msgspec.structs.replace(job.training_changes, rate=0.0 if rate == published else rate)
    seed = SEED_OF_TRIALS if job.n_trials else job.seed
    plain = replace(job, set_options=options, training_changes=training, seed=seed, n_trials=0, is_calibrated=False)
    return SearchCandidate(point, plain)


# -- trials and the choice


@dataclass(frozen=True)
class TrialRecord:
    """The result of a setting on validation episodes.

    Attributes:
        accuracy: in percent, over the validation episodes; 0 where training diverged.
        episodes: the number of these episodes.
        unconverged: episodes whose inner solve failed.
        diverged: the message of a training that diverged.
        hits: a count of :class:`ifsl_bench.protocols.metrics.EpisodeHitCounts` -> its value in each episode; ``hits``
            -> all of each sequence of sessions; empty where training diverged.
        bias: on the novel logits, best on these episodes; None where there is none.
    """

    accuracy: Annotated[float, Meta(ge=0, le=100)]
    episodes: Annotated[int, Meta(ge=1)]
    unconverged: Annotated[int, Meta(ge=0)] = 0
    diverged: str = ""
    hits: dict[str, list[int]] = field(default_factory=dict)
    bias: float | None = None

    @property
    def failure_reason(self) -> str | None:
        """The failure of its training, or of more than ``MAX_UNCONVERGED_SHARE`` of its inner solves; else None."""
        if self.unconverged > MAX_UNCONVERGED_SHARE * self.episodes:
            return f"inner solves fail in {self.unconverged} of {self.episodes} validation episodes"
        return self.diverged or None

    @property
    def selection_score(self) -> float:
        """Its accuracy; -inf where it cannot be chosen."""
        return -math.inf if self.failure_reason else self.accuracy


def find_best_setting(name: str, tried: Mapping[str, TrialRecord], reporter: Reporter) -> str:
    """Return the setting with the highest accuracy, the first of equally good ones.

    Args:
        name: of the job, for warnings and errors.
        tried: the trial of each setting.
        reporter: receives a warning for each setting that is passed over, with the reason.

    Raises:
        UserError: none can be chosen.
    """
    for setting, trial in tried.items():
        if trial.failure_reason:
            reporter.warn(f"{name}: {setting} is passed over: {trial.failure_reason}")
    best = max(tried, key=lambda setting: tried[setting].selection_score)
    if tried[best].failure_reason:
        raise UserError(f"{name}: none of {len(tried)} settings works; set the options by hand with --set")
    return best


def make_trial_record(evaluated: EvaluationResult) -> TrialRecord:
    """Return the trial of a setting whose validation episodes were evaluated; calibrated counts are with its bias."""
    counts, margins = evaluated.counts, evaluated.margins
    bias = None if margins is None else find_best_bias(margins)
    hits = counts.selection_hits(margins, bias)
    return TrialRecord(evaluated.accuracy, len(counts), evaluated.n_unconverged_episodes, hits=hits, bias=bias)


def bootstrap_selection(tried: Mapping[str, TrialRecord], best: str) -> dict[str, Any]:
    """Return the setting that each bootstrap resample of the validation episodes would choose, and the hits of all.

    Args:
        tried: the trial of each setting.
        best: the setting that was chosen.

    Returns:
        The fields of a result's ``choice``; see docs/statistics.md. Its ``rivals`` are the settings
        that at least ``MIN_RIVAL_WINS`` resamples would choose, the most frequent first, at most ``MAX_RIVALS``.
    """
    hits = {name: [sum(trial.hits.get(name, [])) for trial in tried.values()] for name in tried[best].hits}
    right = [trial.hits if not trial.failure_reason else {} for trial in tried.values()]
    nothing = [-1] * tried[best].episodes  # a failed setting is worse than one without any hits
    joint = np.array([np.add(counts["base_joint"], counts["novel_joint"]) if counts else nothing for counts in right])
    winners = (bootstrap_episode_counts(tried[best].episodes) @ joint.T).argmax(1)
    chosen, wins = list(tried).index(best), np.bincount(winners, minlength=len(tried))
    rivals = [place for place in np.argsort(-wins, kind="stable").tolist() if place != chosen]
    return {
        "validation_episodes": tried[best].episodes,
        "chosen": chosen,
        "rivals": [place for place in rivals if wins[place] >= MIN_RIVAL_WINS][:MAX_RIVALS],
        "winners": winners.tolist(),
        "hits": hits,
    }


def write_trial(
    file: Path, tried: TrialRecord, pretraining_sha256: str, about: str, made_by: Mapping[str, Any]
) -> None:
    """Store a trial, with the checksum of its backbone and the identity of its method.

    Args:
        file: to write.
        tried: the trial.
        pretraining_sha256: checksum of the backbone's weights.
        about: the job, for readers of the file.
        made_by: the facts that tell its method from others.
    """
    about_it = {"file": file.name, "of": about, "pretraining_sha256": pretraining_sha256, "made_by": made_by}
    write_checksummed(file, {**about_it, **asdict(tried)})


def read_trial(
    file: Path,
    pretraining_sha256: str | None,
    same: Callable[[Mapping[str, Any]], bool],
    reporter: Reporter | None = None,
) -> TrialRecord | None:
    """Return the trial that was stored for a backbone; None where it is missing, damaged or of another method.

    A trial without the hits of episodes, which a choice needs, is made again; its model is in the cache.

    Args:
        file: of the trial.
        pretraining_sha256: checksum of the backbone's weights; None where there are no weights.
        same: whether a recorded identity is the method's.
        reporter: is warned of a damaged one, which is then set aside.

    Raises:
        UserError: it may not be read.
    """
    try:
        record = read_checksummed(file)
        check_value_types(file, record, {"file": str, "of": str, "pretraining_sha256": str, "made_by": dict})
        if record["file"] != file.name:
            raise CorruptFile(f"{file} is the trial of {record['of']}")
        if record["pretraining_sha256"] != pretraining_sha256 or not same(record["made_by"]):
            return None
        tried = msgspec.convert(record, TrialRecord)
        return tried if tried.hits or tried.diverged else None
    except FileNotFoundError:
        return None
    except (CorruptFile, ValueError) as error:  # msgspec's ValidationError is a ValueError
        if reporter:
            fault = error if isinstance(error, CorruptFile) else f"{file} is damaged: {error}"
            reporter.warn(f"{fault}; the setting is tried again, the old file is {quarantine_path(file)}")
        return None


@dataclass(frozen=True)
class TrialStage(Stage):
    """One of the jobs to choose from, meta-trained, on the validation episodes that options are chosen on."""

    stage_name = "trial"
    job: Job

    def __str__(self) -> str:
        task, steps = (
            self.job.task,
            f"{self.job.meta_training_schedule.steps:,} steps, " if self.job.is_meta_trained else "",
        )
        count = len(task.evaluation.validation_halves[0])
        return f"trial of {self.job}: {steps}{count:,} validation {protocol_of_task(task).drawn_items_noun}"

    def key(self, home: Paths) -> str:
        return f"{meta_training_key(self.job, home)}-{self.job.training_changes.select}"

    def trial_path(self, home: Paths) -> Path:
        """Return the file of the trial's record."""
        return home.cache / "trials" / f"{self.key(home)}.json"

    def list_artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        return [(self, self.trial_path(home)), *MetaTrainStage(self.job).list_artefacts(home)]

    def is_cached(self, home: Paths) -> bool:
        return self.load_stored_trial(home) is not None

    def load_stored_trial(self, home: Paths) -> TrialRecord | None:
        """Return the trial of the same method on the backbone that is in the home, if there is one."""
        return read_trial(
            self.trial_path(home), make_pretrain_stage(self.job).weights_checksum(home), self.job.is_made_by_same_code
        )

    def choose_device(self, work: Workspace) -> DeviceChoice:
        evaluation = work.choose_device("evaluation")
        training = MetaTrainStage(self.job).choose_device(work) if self.job.is_meta_trained else evaluation
        if training == evaluation:
            return evaluation
        return DeviceChoice(evaluation.device, f"{evaluation.reason}, after meta-training on {training}")

    def compute(self, work: Workspace) -> TrialRecord:
        job, file, prepared = self.job, self.trial_path(work.home), make_pretrain_stage(self.job).open_task(work)
        weights = prepared.pretrained_backbone.sha256
        tried = read_trial(file, weights, job.is_made_by_same_code, work.reporter)
        if tried is None:
            with hold_lock(file, work.reporter.warn):
                tried = read_trial(file, weights, job.is_made_by_same_code)  # another process may have made it
                if tried is None:
                    tried = self._evaluate_trial(work, prepared)
                    write_trial(file, tried, weights, str(job), job.method_code_identity)
                    drawn = protocol_of_task(job.task).drawn_items_noun
                    work.reporter.say(f"{job}: {tried.accuracy:.2f}% on {tried.episodes} validation {drawn}")
        return tried

    def _evaluate_trial(self, work: Workspace, prepared: PreparedTask) -> TrialRecord:
        job, episodes = self.job, self.job.task.evaluation.validation_halves[0]
        try:
            method = copy_for_evaluation(job, work, MetaTrainStage(job).compute(work).method)
            loader = prepared.loader("val", device=work.choose_device("evaluation").device)
            return make_trial_record(
                evaluate_method(method, job.method_name, loader, episodes, work.reporter, str(self))
            )
        except (DivergedError, NonFiniteLogitsError) as error:
            return TrialRecord(0.0, len(episodes), diverged=str(error))

    def count_test_hits(self, work: Workspace, episodes: range, title: str) -> HitCounts:
        """Count the hits of the setting on test episodes, calibrated by its own bias.

        Args:
            work: where the job's data and models are.
            episodes: of the test stream.
            title: of the progress.
        """
        job, bias = self.job, self.compute(work).bias
        method = copy_for_evaluation(job, work, MetaTrainStage(job).compute(work).method)
        loader = make_pretrain_stage(job).open_task(work).loader("test", device=work.choose_device("evaluation").device)
        alone = (
            None
            if bias is None
            else ValidationBias(bias, len(job.task.evaluation.validation_halves[0]), np.empty(0), np.empty(0))
        )
        return evaluate_method(
            method, job.method_name, loader, episodes, work.reporter, title, job.n_episodes, alone
        ).counts


@dataclass(frozen=True)
class SearchStage(Stage):
    """The search of a job: its trials, and the best setting, meta-trained with the job's seed."""

    stage_name = "search"
    job: Job

    def __str__(self) -> str:
        return f"search of {self.job}: {self.job.n_trials or len(candidates_by_round(self.job)[0])} trials"

    def key(self, home: Paths) -> str:
        return f"{meta_training_key(self.job, home)}-{self.job.setting}-{self.job.training_changes.select}"

    def list_artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        """List the trials, with their models, and the models of all candidates: one of these is the job's own."""
        candidates = list(
            itertools.chain.from_iterable(candidates_by_round(self.job, make_trial_accuracy_lookup(home)))
        )
        own = [MetaTrainStage(replace(candidate.job, seed=self.job.seed)) for candidate in candidates]
        stages: list[Stage] = [*(TrialStage(candidate.job) for candidate in candidates), *own]
        return [artefact for stage in stages for artefact in stage.list_artefacts(home)]

    def is_cached(self, home: Paths) -> bool:
        best = chosen_job_from_trials(self.job, home)
        return best is not None and (not best.is_meta_trained or MetaTrainStage(best).is_cached(home))

    def compute(self, work: Workspace) -> None:
        best, _ = choose_setting_with_record(self.job, work, NullReporter())
        MetaTrainStage(best).compute(work)


def make_trial_accuracy_lookup(home: Paths) -> Callable[[SearchCandidate], float | None]:
    """Return a function that looks up a candidate's accuracy among a home's trials, for :func:`candidates_by_round`."""

    def accuracy(candidate: SearchCandidate) -> float | None:
        tried = TrialStage(candidate.job).load_stored_trial(home)
        return None if tried is None else tried.selection_score

    return accuracy


def choose_setting_with_record(job: Job, work: Workspace, reporter: Reporter) -> tuple[Job, dict[str, Any]]:
    """Make the trials of a job, and choose the best.

    Args:
        job: with the searched options.
        work: where trials are stored.
        reporter: receives the choice.

    Returns:
        The best of the candidates with the job's seed, and the fields of a result about the choice.
    """
    known: dict[str, TrialRecord] = {}
    while True:
        rounds = candidates_by_round(
            job, lambda candidate: known[candidate.name].selection_score if candidate.name in known else None
        )
        missing = {candidate.name: TrialStage(candidate.job) for candidate in rounds[-1] if candidate.name not in known}
        if not missing:
            break
        while missing:  # those first that no other process is making
            free = (name for name, trial in missing.items() if not is_locked(trial.trial_path(work.home)))
            name = next(free, next(iter(missing)))
            known[name] = missing.pop(name).compute(work)
    candidates = {candidate.name: candidate for candidate in itertools.chain.from_iterable(rounds)}
    tried = {name: known[name] for name in candidates}
    name = find_best_setting(str(job), tried, reporter)
    reporter.say(f"{job}: {name} is the best of {len(tried)}, {tried[name].accuracy:.2f}% on validation")
    point, best = candidates[name].option_values, candidates[name].job
    offered = [candidate.option_values for candidate in candidates.values()]
    return replace(best, seed=job.seed), {
        "options": {
            **best.method_options,
            **{key: value for key, value in point.items() if key != LEARNING_RATE_OPTION},
        },
        "tuned": {", ".join(point): {setting: trial.accuracy for setting, trial in tried.items()}},
        **(
            {"choice": StoredOptionChoice(**bootstrap_selection(tried, name))}
            if "choices" in protocol_of_task(job.task).figures_and_tables
            else {}
        ),
        "rounds": [len(round_) for round_ in rounds],
        "passed_over": [setting for setting, trial in tried.items() if trial.failure_reason],
        "edge": options_at_edge(job.method, best.method_options, point, offered),
    }


def add_test_hits_of_rivals(job: Job, choice: dict[str, Any], counts: HitCounts, work: Workspace) -> dict[str, Any]:
    """Count the hits of a choice's rivals on the first test episodes, as docs/statistics.md needs them.

    Args:
        job: that was searched.
        choice: the fields of a result about the choice, as :func:`choose_setting_with_record` returns them.
        counts: of the chosen setting on all test episodes.
        work: where trials are stored.
    """
    if "choice" not in choice or not choice["choice"].rivals:
        return choice
    record, episodes = choice["choice"], range(min(RIVAL_EPISODES, len(counts)))
    jobs = [
        candidate.job
        for candidate in itertools.chain.from_iterable(candidates_by_round(job, make_trial_accuracy_lookup(work.home)))
    ]
    columns = [counts.count_arrays()]
    for i, index in enumerate(record.rivals):
        title = f"rival {i + 1} of {len(record.rivals)} of {job}: {len(episodes):,} test episodes"
        columns.append(TrialStage(jobs[index]).count_test_hits(work, episodes, title).count_arrays())
    hits = {name: [int(column[name][: len(episodes)].sum()) for column in columns] for name in columns[-1]}
    return choice | {"choice": msgspec.structs.replace(record, test_episodes=len(episodes), test_hits=hits)}


def chosen_job_from_trials(job: Job, home: Paths) -> Job | None:
    """Return the choice from stored trials; None where one is missing, or all have failed.

    Args:
        job: with its seed.
        home: where trials are stored.
    """
    if not job.searched_names:
        return job
    accuracy = make_trial_accuracy_lookup(home)
    candidates = list(itertools.chain.from_iterable(candidates_by_round(job, accuracy)))
    accuracies = [value for candidate in candidates if (value := accuracy(candidate)) is not None]
    if len(accuracies) < len(candidates) or max(accuracies) == -math.inf:
        return None
    return replace(candidates[accuracies.index(max(accuracies))].job, seed=job.seed)
