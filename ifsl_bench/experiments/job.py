"""Jobs: one method, with its options, on one task, with one training seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.backbones.contract import check_backbone, is_frozen
from ifsl_bench.backbones.find_recipe import find_recipe, recipes_that_provide
from ifsl_bench.experiments.run_config import MAX_JOBS, RunConfig, expand_method_names, keep_matching_names
from ifsl_bench.plugin.display_names import RowLabel, split_off_recipe
from ifsl_bench.plugin.find_method import MethodRef, find_method, format_label, searched_option_names
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.method_source import hash_method_source, is_same_method
from ifsl_bench.plugin.options import is_trainable, list_missing_extras, resolve_options
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import (
    CROSS_ENTROPY_RECIPE,
    INCLUDED_BACKBONE,
    NO_BACKBONE,
    MetaTraining,
    Side,
    Task,
)
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED, MOST_SEEDS, MOST_TRIALS, max_episodes_of_task
from ifsl_bench.protocols.tasks.variants import TrainingChanges
from ifsl_bench.store.schema import result_file_name
from ifsl_bench.utils.errors import MissingDependencyError, UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.text_format import format_value

SEED_OF_TRIALS = 0  # one choice for all seeds, so that they differ by training alone


@dataclass(frozen=True)
class Job:
    """One result to be made; a description that can be pickled."""

    method_ref: MethodRef  # the method, and how another process finds it
    set_options: Mapping[str, Any]  # the options that the user set, converted, in the constructor's order
    task: Task
    training_changes: TrainingChanges
    seed: int  # of meta-training, and of pretraining unless the task has one for all seeds
    n_episodes: int  # the number of test episodes, the first ones of the task's stream; it may exceed the task's own
    n_trials: int = 0  # how many settings are tried to choose from; 0 for the method as published
    is_calibrated: bool = False  # whether the row has the bias on the novel logits that is best on validation episodes

    @property
    def method_name(self) -> str:
        return self.method_ref.name

    @property
    def method(self) -> type[Method]:
        return self.method_ref.method

    @property
    def row_label(self) -> RowLabel:
        """The label of its row in tables: the method's name, with everything that is not the default."""
        name, *options = format_label(self.method, self.method_name, self.set_options, self.task)
        options += [
            f"train.{key}={format_value(value)}" for key, value in self.training_changes.non_default_values().items()
        ]
        if self.task.recipe is not None:
            recipe, *values = split_off_recipe(find_recipe(self.task.recipe).label)
            options += [f"recipe={recipe}", *(f"recipe.{value}" for value in values)]
        if self.n_episodes != self.task.evaluation.episodes:
            options.append(f"episodes={self.n_episodes}")
        return RowLabel(name, self.is_calibrated, self.setting if self.n_trials else "", tuple(options))

    @property
    def label(self) -> str:
        """The name of its row."""
        return str(self.row_label)

    def __str__(self) -> str:
        return f"{self.label} on {self.task.name}, seed {self.seed}"

    @property
    def setting(self) -> str:
        """The setting that it is ranked in: "paper", "tuned-12", or "every" where nothing is trained or tuned."""
        if self.n_trials:
            return f"tuned-{self.n_trials}"
        return "paper" if self.is_meta_trained or self.method.space else "every"

    @property
    def method_options(self) -> dict[str, Any]:
        """The options given, and those whose default depends on the task."""
        return {**self.method.defaults(self.task), **self.set_options}

    @property
    def input_kind(self) -> str:
        """What the method is given of each image."""
        return self.method.sees_with(self.method_options)

    @property
    def keeps_supports_of_sessions(self) -> bool:
        """Whether a sequence's sessions are learned from all supports so far."""
        return protocol_of_task(self.task).learns_sessions and self.method.keeps_supports(self.method_options)

    @property
    def values_of_all_options(self) -> dict[str, Any]:
        """All values that a label has to tell apart."""
        training = {f"train.{key}": value for key, value in self.training_changes.non_default_values().items()}
        more = {
            "trials": self.n_trials,
            "calibrated": self.is_calibrated,
            "episodes": self.n_episodes,
            "recipe": self.task.recipe,
        }
        return {**self.method_options, **training, **{f"--{key}": value for key, value in more.items()}}

    @property
    def searched_names(self) -> list[str]:
        """The names of the options that are chosen on validation episodes."""
        return searched_option_names(self.method, self.fixed_options, self.n_trials)

    @property
    def fixed_options(self) -> dict[str, Any]:
        return {
            **self.set_options,
            **({LEARNING_RATE_OPTION: self.training_changes.rate} if self.training_changes.rate else {}),
        }

    @property
    def is_meta_trained(self) -> bool:
        return is_trainable(self.method, self.method_options)

    @property
    def required_sides(self) -> tuple[Side, ...]:
        """The sides whose episodes the job cannot do without."""
        if self.is_meta_trained:
            return "test", "train", "val"
        return ("test", "val") if self.searched_names or self.is_calibrated else ("test",)

    @property
    def meta_training_schedule(self) -> MetaTraining:
        """The meta-training schedule: the method's or the task's, with the user's changes."""
        return self.training_changes.apply_to(self.published_schedule)

    @property
    def published_schedule(self) -> MetaTraining:
        return self.method.schedule or self.task.meta_training

    @property
    def method_code_identity(self) -> dict[str, Any]:
        """The identity of the method's code, recorded with models, trials and results."""
        return {
            "method_source": hash_method_source(self.method),
            "revision": self.method.revision,
            "distribution": self.method_ref.distribution,
        }

    def is_made_by_same_code(self, recorded: Mapping[str, Any]) -> bool:
        """Return whether a recorded :attr:`method_code_identity` is of the job's method."""
        return is_same_method(self.method_code_identity, recorded)

    def result_path(self, home: Paths) -> Path:
        return home.results / self.task.name / result_file_name(self.label, self.seed)


def make_jobs(config: RunConfig, home: Paths | None = None) -> list[Job]:
    """Make the jobs of a config, by task, then seed, then method; every name and option is checked before any work.

    Args:
        config: without globs and sets.
        home: where the user's own tasks are.

    Raises:
        UserError: an unknown name, an impossible option or number of episodes, two methods of one label, or nothing to
            calibrate.
    """
    _check_config(config)
    training, trials, change = TrainingChanges.parse_values(config.train), config.trials or 0, config.change
    methods = [(*find_method(word), word if isinstance(word, str) else word.__name__) for word in config.methods]
    jobs: list[Job] = []
    tasks = dict.fromkeys(itertools.chain.from_iterable(load_tasks(name, change, home) for name in config.tasks))
    for plain, recipe in itertools.product(tasks, config.recipes or (None,)):
        task = plain if recipe is None else with_recipe(plain, recipe)
        count = task.evaluation.episodes if config.episodes is None else config.episodes
        _check_task(task, training, count, config)
        for seed, (chosen, meant, name) in itertools.product(config.all_seeds, methods):
            options = resolve_options(chosen.method, name, {**meant, **config.options}, task, trials)
            job = Job(chosen, options, task, training, seed, count, trials, config.calibrate)
            if reason := protocol_of_task(task).reason_method_cannot_run(task, chosen.method, job.method_options):
                raise UserError(f"{job.label} {reason}")
            if job.input_kind != "features" and task.pretraining.backbone in (NO_BACKBONE, INCLUDED_BACKBONE):
                raise UserError(f"{job.label} sees {job.input_kind}, and the data of {task.name} are features")
            check_extras(job)
            if training.sessions > 1 and job.is_meta_trained and chosen.method.keeps_supports(job.method_options):
                raise UserError(
                    f"--train sessions={training.sessions}: {job.label} does not learn one session after the other; "
                    "leave it out"
                )
            # What --train and --tune do not concern is the same whatever they say, and has one label.
            job = job if job.is_meta_trained else replace(job, training_changes=TrainingChanges())
            jobs.append(job if job.searched_names else replace(job, n_trials=0))
    return without_duplicates(jobs)


def with_recipe(task: Task, recipe: str) -> Task:
    """Return a task whose backbone is trained by a recipe; the task itself where that is its own.

    Args:
        task: the task.
        recipe: a name or file, perhaps with options, see :func:`ifsl_bench.backbones.find_recipe.find_recipe`.

    Raises:
        UserError: no such recipe, or a backbone that is not trained here.
    """
    reference = find_recipe(recipe).recipe_reference
    if reference == (task.pretraining.recipe or CROSS_ENTROPY_RECIPE):
        return task
    if task.pretraining.backbone in (NO_BACKBONE, INCLUDED_BACKBONE):
        raise UserError(f"--recipe: the data of {task.name} are features, and recipe {recipe} trains on images")
    if is_frozen(task.pretraining):
        raise UserError(f"--recipe: backbone {task.pretraining.backbone} of {task.name} has weights from elsewhere")
    return msgspec.structs.replace(task, recipe=reference)


def check_extras(job: Job) -> None:
    """Raise :class:`UserError` where the recipe of a job's backbone does not learn what its method needs."""
    if not job.method.needs:
        return
    spec = job.task.pretraining
    here = spec.backbone not in (NO_BACKBONE, INCLUDED_BACKBONE) and not is_frozen(spec)
    recipe = find_recipe(job.task.recipe_reference or CROSS_ENTROPY_RECIPE)
    if not (missing := list_missing_extras(job.method, recipe.provided_extras_names if here else ())):
        return
    lacks = f"recipe {recipe.label} does not" if here else f"nothing that {job.task.name} is given does"
    providers = recipes_that_provide(job.method.needs) if here else []
    advice = f"; add --recipe {' or '.join(providers)}" if providers else ""
    raise UserError(
        f"method {job.method_name} needs a recipe that learns its {' and '.join(missing)}, and {lacks}{advice}"
    )


def _check_config(config: RunConfig) -> None:
    """Raise :class:`UserError` for missing names, and impossible seeds or trials."""
    seeds, trials = config.all_seeds, config.trials or 0
    if not config.methods or not config.tasks:
        raise UserError("name at least one method and one task")
    if odd := [task for task in config.tasks if not isinstance(task, str)]:
        raise UserError(f"a task is a name or path/to/my.toml, not {odd[0]!r}")
    if len(seeds) > MOST_SEEDS:
        raise UserError(f"{len(seeds):,} seeds are too many for one command; {MOST_SEEDS:,} at most")
    if any(type(seed) is not int or not 0 <= seed <= LARGEST_SEED + MOST_SEEDS for seed in seeds):
        raise UserError(f"seeds must be whole numbers from 0 to {LARGEST_SEED}, not {list(seeds)}")
    if type(trials) is not int or not 0 <= trials <= MOST_TRIALS or trials == 1:
        raise UserError(f"--tune takes the number of settings to try, 2 to {MOST_TRIALS:,}, not {trials}")


def _check_task(task: Task, training: TrainingChanges, episodes: int, config: RunConfig) -> None:
    """Raise :class:`UserError` for views, episodes or calibration that a task does not have."""
    spec, most, least = task.pretraining, max_episodes_of_task(task), protocol_of_task(task).min_test_items
    if training.views > 1 and (spec.backbone == NO_BACKBONE or not (spec.crop_padding or spec.flip)):
        raise UserError(f"--train views={training.views}: task {task.name} has no augmentation to make views with")
    if type(episodes) is not int or not least <= episodes <= most:
        raise UserError(f"--episodes must be {least} to {most:,} for task {task.name}, not {episodes}")
    # A change to the default leaves the task as it is, so that the check of the task would not find it.
    centre = config.change.centre
    check_backbone(msgspec.structs.replace(spec, centre=centre) if centre else spec)
    if config.calibrate and not task.has_base:
        raise UserError(f"--calibrate: task {task.name} has no base classes, so there is no bias to find")


def unused_training_options_fault(jobs: Sequence[Job], train: Mapping[str, Any]) -> str | None:
    """Return a message where options of training are given and nothing is meta-trained; None elsewhere.

    Args:
        jobs: of the run.
        train: the options of training that the user gave.
    """
    if not train or any(job.is_meta_trained for job in jobs):
        return None
    labels = " and ".join(dict.fromkeys(job.label for job in jobs))
    return f"{labels}: nothing is meta-trained, so --train ({', '.join(train)}) changes nothing; leave it out"


def without_duplicates(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs, each once.

    Raises:
        UserError: the results of two different ones would replace each other.
    """
    jobs_by_name: dict[str, Job] = {}
    for job in jobs:
        first = jobs_by_name.setdefault(str(job), job)
        if first.method_ref != job.method_ref:
            raise UserError(f"two different methods are called {job.label!r}; rename a class, or run one at a time")
        if first.task.hash != job.task.hash:
            raise UserError(f"two different tasks are called {job.task.name!r}; rename one, or run one at a time")
        if first.values_of_all_options != job.values_of_all_options:
            mine, theirs = (
                _format_differences(first.values_of_all_options, job.values_of_all_options),
                _format_differences(job.values_of_all_options, first.values_of_all_options),
            )
            raise UserError(
                f"two settings share the name {job.label!r}: {mine}, and {theirs}; change a value, or run one at a time"
            )
    return list(jobs_by_name.values())


def _format_differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Format the values that the other mapping does not have."""
    return ", ".join(f"{key} {value!r}" for key, value in values.items() if key not in others or others[key] != value)


def expand_configs(
    configs: Sequence[RunConfig], reporter: Reporter, only: Sequence[str] = ()
) -> tuple[list[Job], Mapping[str, int]]:
    """Make the jobs of configs that can be run here, in the file's order, each once.

    A method of a file that lacks an extra takes its own jobs with it, and no others.

    Args:
        configs: as :func:`find_tasks` returns them.
        reporter: receives warnings of methods that ``all`` leaves out, and remarks on options that change nothing.
        only: names, globs and sets that choose among the methods; all of them where it is empty.

    Returns:
        The jobs, and how many others there are of each method that something has to be installed for first, by what
        to do.

    Raises:
        UserError: an unknown name, an impossible option, too many jobs, or two that would replace each other's results.
    """
    say, home = reporter.say, configs[0].paths
    configs = keep_matching_names(
        configs, only, "methods", lambda names: expand_method_names(names, reporter.warn), "method"
    )
    many = sum(len(run.methods) * len(run.tasks) * len(run.all_seeds) for run in configs)
    if many > MAX_JOBS:
        raise UserError(f"these are {many:,} jobs, {MAX_JOBS:,} at most; divide them")
    jobs: list[Job] = []
    lacking: dict[str, int] = {}
    for run in configs:
        with run.name_file_in_errors():
            usable = replace(run, methods=_installed_methods(run, lacking)) if run.place_in_campaign_file else run
            of_request = make_jobs(usable, home) if usable.methods or not run.place_in_campaign_file else []
        for label in dict.fromkeys(job.label for job in of_request if run.trials and not job.n_trials):
            advice = "it tries the options in a method's `space`, see docs/writing-a-method.md"
            say(f"{label}: nothing to choose, so --tune changes nothing; {advice}")
        if not run.place_in_campaign_file and (
            remark := unused_training_options_fault(of_request, run.train)
        ):  # a file may be for more methods
            raise UserError(remark)
        for label in dict.fromkeys(
            job.label for job in of_request if run.train and not run.place_in_campaign_file and not job.is_meta_trained
        ):
            say(f"{label}: nothing is meta-trained, so --train changes nothing")
        for name, label in dict.fromkeys(
            (job.method_name, job.label) for job in of_request if job.method_name in run.methods
        ):
            if label.partition(".")[0] != name:
                say(f"{name} with these options is called {label}")
        jobs += of_request
    if lacking and not jobs:
        raise MissingDependencyError(next(iter(lacking)))
    return without_duplicates(jobs), lacking


def _installed_methods(config: RunConfig, lacking: dict[str, int]) -> list[Any]:
    """Return the methods whose extras are installed; the jobs of the others are counted in ``lacking``."""
    usable = []
    for name in config.methods:
        try:
            find_method(name)
        except MissingDependencyError as error:
            lacking[str(error)] = lacking.get(str(error), 0) + len(config.tasks) * len(config.all_seeds)
            continue
        usable.append(name)
    return usable
