"""What is to be run: one method, with its options, on one task, with one training seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.board.result_file import file_name
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home, sha256_json
from ifsl_bench.episodic.meta_training import Training
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import options_of, resolve_options, trains
from ifsl_bench.protocol.task import NO_BACKBONE, MetaTraining, Side, Task
from ifsl_bench.protocol.task_files import find
from ifsl_bench.protocol.variants import Change
from ifsl_bench.running.provenance import method_source

MOST_BEYOND = 40  # values tried beyond the end of a grid


@dataclass(frozen=True)
class Job:
    """One result to be made.

    Attributes:
        name: the method's registered name.
        options: those that are not the default, converted, in the constructor's order.
        seed: of meta-training, and of pretraining unless the task has one for all seeds.
        episodes: the first so many test episodes of the task.
    """

    name: str
    method: type[Method]
    options: Mapping[str, Any]
    task: Task
    training: Training
    seed: int
    episodes: int

    @property
    def label(self) -> str:
        """The method's name with everything that is not the default."""
        default = {key: option.default for key, option in options_of(self.method).items()}
        name, said = self.method.label(self.name, default | self.settings()[0])
        parts = [f"{k}={short(v)}" for k, v in self.options.items() if k not in said]
        parts += [f"{k}={short(v)}" for k, v in self.training.changes().items()]
        if self.episodes != self.task.evaluation.episodes:
            parts.append(f"episodes={self.episodes}")
        return ".".join([name, *parts])

    def settings(self) -> list[dict[str, Any]]:
        """The options to try: one setting, or the product of the grids that the method tunes and the user left free."""
        fixed = {**self.method.defaults(self.task), **self.options}
        grids = [self.method.tune[key] for key in self.tuned]
        return [{**fixed, **dict(zip(self.tuned, values, strict=True))} for values in itertools.product(*grids)]

    @property
    def tuned(self) -> list[str]:
        """The options that are chosen on the validation episodes."""
        return [key for key in self.method.tune if key not in self.options]

    def beyond(self, best: Mapping[str, Any]) -> Iterator[dict[str, Any]] | None:
        """Settings beyond the end of the grid at which ``best`` lies, nearest first; None where it is at no end.

        For one tuned option whose grid is a geometric row of positive numbers, in steps of that row; and only for
        methods without training, since each further setting of another one costs a training.
        """
        if len(self.tuned) != 1 or trains(self.method, best):
            return None
        (key,) = self.tuned
        ratio = _ratio(self.method.tune[key])
        ends = self.method.tune[key][0], self.method.tune[key][-1]
        if ratio is None or best[key] not in ends:
            return None
        step = ratio if best[key] == ends[1] else 1 / ratio
        return ({**best, key: float(f"{best[key] * step**i:.3g}")} for i in range(1, MOST_BEYOND + 1))

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides whose episodes the job draws."""
        if trains(self.method, self.settings()[0]):
            return ("test", "train", "val")
        return ("test", "val") if self.tuned else ("test",)

    def result_path(self, home: Home) -> Path:
        return home.results / self.task.name / file_name(self.label, self.seed)

    @property
    def plan(self) -> MetaTraining:
        """The meta-training schedule: the method's or the task's, stretched where the user says so."""
        return self.training.plan(self.method.schedule or self.task.meta_training)

    def trained_folder(self, home: Home, pretraining_key: str, options: Mapping[str, Any]) -> Path:
        """Where a meta-trained model is kept; the name changes with everything that changes its parameters."""
        training = {k: v for k, v in self.training.changes().items() if k != "select"}  # every state holds both models
        plan = msgspec.to_builtins(self.plan)
        made_of = [self.name, self.source, dict(options), training, plan, self.task.definition(), pretraining_key]
        return home.trained / f"{self.task.name}-{self.name}-seed{self.seed}-{sha256_json(made_of)[:12]}"

    @property
    def source(self) -> str:
        """Identity of the method's code, see :func:`ifsl_bench.running.provenance.method_source`."""
        return method_source(self.method)


def _ratio(grid: Sequence[Any]) -> float | None:
    """What each value of a grid is multiplied by to give the next; None where there is no such number."""
    if len(grid) < 4 or not all(isinstance(value, float) and value > 0 for value in grid):
        return None
    ratio = float((grid[-1] / grid[0]) ** (1 / (len(grid) - 1)))
    steps = (b / a for a, b in itertools.pairwise(grid))
    return ratio if ratio != 1 and all(math.isclose(step, ratio, rel_tol=0.01) for step in steps) else None


def short(value: Any) -> str:
    """A value in a label; different values never look alike."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def make_jobs(
    methods: Sequence[str],
    tasks: Sequence[str],
    options: Mapping[str, Any],
    training: Training,
    seeds: Sequence[int],
    episodes: int | None,
    change: Change | None = None,
    home: Home | None = None,
) -> list[Job]:
    """The jobs of a command, by task, then seed, then method; every name and option is checked before any work.

    Args:
        change: of every task, beside what their names say; see :mod:`ifsl_bench.protocol.variants`.
        home: where the user's own tasks are.

    Raises:
        UserError: an unknown name, an impossible option or number of episodes.
    """
    if not methods or not tasks:
        raise UserError("name at least one method and one task")
    if any(not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise UserError(f"seeds must be whole numbers from 0, not {list(seeds)}")
    chosen = [registry.resolve(name) for name in dict.fromkeys(methods)]
    jobs = []
    for task in dict.fromkeys(itertools.chain.from_iterable(find(name, change, home) for name in tasks)):
        resolved = [resolve_options(method, name, {**meant, **options}, task) for name, method, meant in chosen]
        # --train does not concern a method that has nothing to train: its result is the same whatever it says.
        plugins = [
            (name, method, given, training if trains(method, given) else Training())
            for (name, method, _), given in zip(chosen, resolved, strict=True)
        ]
        count = task.evaluation.episodes if episodes is None else episodes
        augmented = task.pretraining.backbone != NO_BACKBONE and (
            task.pretraining.crop_padding or task.pretraining.flip
        )
        if training.views > 1 and not augmented:
            raise UserError(f"--train views={training.views}: task {task.name} has no augmentation to make views with")
        if not isinstance(count, int) or not 2 <= count <= task.evaluation.episodes:
            raise UserError(f"--episodes must be 2 to {task.evaluation.episodes} for task {task.name}, not {count}")
        jobs += [
            Job(name, method, given, task, own_training, seed, count)
            for seed in seeds
            for name, method, given, own_training in plugins
        ]
    return jobs
