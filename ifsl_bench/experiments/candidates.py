"""The settings that a job chooses from, in the rounds of its search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ifsl_bench.experiments.job import TUNING_SEED, Job
from ifsl_bench.plugin import search_points as settings
from ifsl_bench.plugin.options import defaults, settled
from ifsl_bench.plugin.search_points import Point
from ifsl_bench.plugin.space import RATE
from ifsl_bench.utils.text_format import format_options


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
    """The settings to choose from, by round of the search, up to the first of which not all accuracies are known.

    They are the same with and without calibration. Where nothing is chosen, there is one, the job at no point.

    Args:
        accuracy: of a candidate on validation episodes; -inf if it cannot be chosen, None while it is not known.
    """
    default = {**defaults(job.method, job.task), RATE: job.published_schedule.schedule.rate}
    sessions = job.task.sessions is not None
    rounds: list[list[Candidate]] = []
    finished: list[list[tuple[Point, float]]] = []
    while points := settings.points(job.method, job.fixed_options, job.trials, default, finished, sessions):
        rounds.append([_candidate(job, point) for point in points])
        accuracies = [accuracy(candidate) for candidate in rounds[-1]]
        if any(value is None for value in accuracies):
            break
        finished.append([(point, value) for point, value in zip(points, accuracies, strict=True) if value is not None])
    return rounds


def _candidate(job: Job, point: Point) -> Candidate:
    options = settled(job.method, {**job.set_options, **point}, job.task)
    rate = point.get(RATE, job.training.rate)
    published = job.published_schedule.schedule.rate
    training = msgspec.structs.replace(job.training, rate=0.0 if rate == published else rate)
    seed = TUNING_SEED if job.trials else job.seed
    plain = replace(job, set_options=options, training=training, seed=seed, trials=0, calibrated=False)
    return Candidate(point, plain)
