"""``RunConfig``: methods, tasks and options of a command, a campaign file or a notebook call, and their look-up.

Names of tasks are looked up before methods and torch are imported: a wrong one is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ifsl_bench.data.datasets import is_generated, is_prepared
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import load_tasks, own_tasks, packaged_task, packaged_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, make_task_changes, split_task_name
from ifsl_bench.utils.errors import MAX_LISTED_NAMES, UserError, unknown_name_error
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:
    from ifsl_bench.experiments.workspace import Workspace
    from ifsl_bench.plugin.method import Method
    from ifsl_bench.utils.progress import Reporter


ALL_NAMES = "all"
MAX_JOBS = 10_000  # of a campaign: all are listed, and their results looked for, before the first begins
WarnFunction = Callable[[str], None]


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run. Methods, tasks, recipes and seeds multiply; None, or empty, is the default.

    Attributes:
        methods: names, globs and sets; a call may have classes too.
        tasks: names, globs and sets.
        options: of the methods, name -> value.
        train: changes of meta-training, see :class:`ifsl_bench.protocols.tasks.variants.TrainingChanges`.
        trials: how many settings of each method to choose from; 0 for the methods as published.
        seed: the first training seed.
        seeds: the number of seeds, or all of them.
        episodes: the number of test episodes, from the first on.
        calibrate: whether rows have the bias on novel logits that is best on validation episodes.
        change: of every task, on top of the changes in its name.
        place_in_campaign_file: the start of error messages, in a campaign file.
        data: data set -> the path that it is made from.
        home, results_dir: folders of caches and of results; None for the usual ones.
        device: "auto", "cpu", "cuda" or "cuda:N".
        jobs, devices, cluster: the workers; this process alone where all are None.
        rerun: whether results that are stored are measured again.
        retrain: whether models that are stored are trained again.
        own_weights: whether backbones are trained here even if their weights come with the package.
        log, log_dir: the kind of the curves of trainings, and their folder.
        recipes: names or files of recipes that train the backbones; empty for each task's own, cross-entropy mostly.
    """

    methods: Sequence[str | type[Method]] = ()
    tasks: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    trials: int | None = None
    seed: int | None = None
    seeds: int | Sequence[int] | None = None
    episodes: int | None = None
    calibrate: bool = False
    change: TaskChanges = field(default_factory=TaskChanges)
    place_in_campaign_file: str = ""
    data: Mapping[str, str | Path] = field(default_factory=dict)
    home: str | Path | None = None
    results_dir: str | Path | None = None
    device: str = "auto"
    jobs: int | None = None
    devices: str | None = None
    cluster: str | None = None
    rerun: bool = False
    retrain: bool = False
    own_weights: bool = False
    log: str | None = None
    log_dir: str | Path | None = None
    recipes: Sequence[str] = ()

    @property
    def all_seeds(self) -> Sequence[int]:
        """Every training seed; 0 alone by default."""
        if isinstance(self.seeds, Sequence):
            return self.seeds
        first = self.seed or 0
        return range(first, first + (1 if self.seeds is None else self.seeds))

    @property
    def paths(self) -> Paths:
        """The folders of caches and results."""
        return Paths.locate(self.home, self.results_dir)

    @property
    def data_path_by_dataset(self) -> dict[str, Path]:
        """Data set -> the path that it is made from."""
        return {name: Path(path) for name, path in self.data.items()}

    def override_config(self, base: RunConfig) -> RunConfig:
        """Return a config of a file with this command line's values in place of the file's.

        Methods and tasks stay the file's; how to run is the command line's.
        """
        more: dict[str, Any] = {
            key: value for key in ("trials", "episodes") if (value := getattr(self, key)) is not None
        }
        if self.seed is not None or self.seeds is not None:
            first = min(base.all_seeds, default=0) if self.seed is None else self.seed
            more |= {"seed": first, "seeds": self.seeds}
        else:
            more |= {"seed": base.seed, "seeds": base.seeds}
        return replace(
            self,
            methods=base.methods,
            tasks=base.tasks,
            place_in_campaign_file=base.place_in_campaign_file,
            options={**base.options, **self.options},
            train={**base.train, **self.train},
            calibrate=base.calibrate or self.calibrate,
            recipes=self.recipes or base.recipes,
            change=make_task_changes({**base.change.changes_by_key(), **self.change.changes_by_key()}),
            data={**base.data, **self.data},
            results_dir=self.results_dir or base.results_dir,
            **({"trials": base.trials, "episodes": base.episodes} | more),
        )

    @contextmanager
    def name_file_in_errors(self) -> Iterator[None]:
        """Begin errors inside with the place in a file."""
        try:
            yield
        except UserError as error:
            if not self.place_in_campaign_file:
                raise
            raise UserError(f"{self.place_in_campaign_file}: {error}") from error

    def workspace(self, reporter: Reporter) -> Workspace:
        """Open the folders and the device."""
        from ifsl_bench.backbones.device import keep_freed_memory_in_allocator
        from ifsl_bench.experiments.workspace import workspace

        keep_freed_memory_in_allocator()
        # The devices of a cluster are those of its workers.
        work = workspace(self.home, self.results_dir, "cpu" if self.cluster else self.device, reporter)
        if self.log is None and self.log_dir is None:
            return work
        from ifsl_bench.experiments.training_curves import make_curve_logs

        return replace(work, curve_logs=make_curve_logs(self.log, self.log_dir, work.home))


def is_glob(name: str) -> bool:
    """Return whether a name has marks of a glob."""
    return any(mark in name for mark in "*?[")


def expand_method_names(words: Iterable[str], warn: WarnFunction) -> list[str]:
    """Return names of methods as they are, globs and sets as the names that they stand for.

    A glob is compared with registered names and shorthands alike. ``all`` is a row for each shorthand, or for a method
    without any, of the methods that can be used here, whatever trained the backbone: those that are given features, and
    work in episodes and in sessions.

    Args:
        words: names, globs and sets.
        warn: receives a warning about the methods that ``all`` leaves out.

    Raises:
        UserError: a glob that fits nothing.
    """
    from ifsl_bench.store.published import read_published_sets

    names: list[str] = []
    for name in words:
        if name == ALL_NAMES:
            names += _usable_methods(warn)
        elif registry.find_owning_entry_points(registry.METHOD_GROUP, name):
            names.append(name)
        elif name in (sets := read_published_sets()):
            names += sets[name][0]
        elif is_glob(name) and not registry.refers_to_file(name):
            names += _match_glob(
                name,
                [*registry.registered_entry_points(registry.METHOD_GROUP), *registry.list_shorthands_by_name()],
                "method",
            )
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def _usable_methods(warn: WarnFunction) -> list[str]:
    names: list[str] = []
    for name in registry.registered_entry_points(registry.METHOD_GROUP):
        try:
            method = registry.get_method(name)
            left_out = method.needs or method.sees != "features" or (method.label_slots and method.keeps_supports())
            names += [] if left_out else vars(method).get("shorthands") or [name]
        except UserError as error:
            warn(f"left out of 'all': {error}")
    return names


def expand_task_names(words: Iterable[str], home: Paths) -> list[str]:
    """Return names of tasks as they are, globs and sets as the names that they stand for; changes stay behind each.

    A glob is compared with the packaged tasks and the user's own, or in ``FILE.toml:GLOB`` with the tasks of the file.
    ``all`` are the tasks whose data are prepared here, or made when they are first used.

    Args:
        words: names, globs and sets, each perhaps with changes.
        home: folders of the user's tasks and data.

    Raises:
        UserError: a glob that fits nothing, or a file that is wrong.
    """
    from ifsl_bench.store.published import read_published_sets

    expanded: list[str] = []
    for name in words:
        plain, change = split_task_name(name)
        changes = name[len(plain) :] if change.changes_by_key() else ""
        file, _, inside = plain.rpartition(".toml:")
        if plain == ALL_NAMES:
            names: Sequence[str] = [task.name for task in _all_tasks(home) if _has_data(task, home)]
        elif packaged_task(plain):
            names = [plain]
        elif plain in (sets := read_published_sets()):
            names = sets[plain][1]
        elif file and is_glob(inside):
            tasks = [task.name for task in load_tasks(f"{file}.toml", home=home)]
            names = [f"{file}.toml:{fitting}" for fitting in _match_glob(inside, tasks, "task")]
        elif is_glob(plain) and not plain.endswith(".toml"):
            names = _match_glob(plain, [task.name for task in _all_tasks(home)], "task")
        else:
            names = [plain]
        expanded += [name_of_task + changes for name_of_task in names]
    return list(dict.fromkeys(expanded))


def _all_tasks(home: Paths) -> list[Task]:
    return list({**packaged_tasks(), **own_tasks(home)}.values())


def _has_data(task: Task, home: Paths) -> bool:
    with suppress(UserError):  # of a broken plugin
        return is_prepared(home, task.dataset.name) or is_generated(task.dataset.name)
    return False


def _match_glob(glob: str, names: Sequence[str], kind: str) -> list[str]:
    available = list(dict.fromkeys(names))
    fitting = [name for name in available if fnmatchcase(name, glob)]
    if not fitting:
        few = len(available) <= MAX_LISTED_NAMES
        listed = f"there are: {', '.join(available)}" if few else f"all {len(available):,}: ifsl-bench {kind}s"
        raise UserError(f"no {kind} fits {glob[:80]!r}; {listed}")
    return fitting


def find_tasks(configs: Sequence[RunConfig], only: Sequence[str] = ()) -> tuple[list[RunConfig], list[Task]]:
    """Look up the tasks of configs. Imports no torch.

    Args:
        configs: of one command.
        only: names, globs and sets that choose among the tasks; all of them where it is empty.

    Returns:
        The configs, with each of their tasks by name, and the tasks.

    Raises:
        UserError: no such task or file, an impossible change of one, or chosen tasks that the configs do not have.
    """
    home = configs[0].paths
    configs = keep_matching_names(configs, only, "tasks", lambda names: expand_task_names(names, home), "task")
    tasks: dict[Task, None] = {}
    for config in configs:
        with config.name_file_in_errors():
            tasks |= dict.fromkeys(task for name in config.tasks for task in load_tasks(name, config.change, home))
    return configs, list(tasks)


def keep_matching_names(
    configs: Sequence[RunConfig],
    only: Sequence[str],
    field: Literal["methods", "tasks"],
    expanded: Callable[[Sequence[Any]], list[str]],
    kind: str,
) -> list[RunConfig]:
    """Return the configs with the names of a field that ``only`` chooses; with all names where it is empty.

    A config with none of the chosen names is left out.

    Args:
        configs: of a campaign.
        only: names, globs and sets that choose.
        field: the field of names.
        expanded: gives the names that the words of the field stand for.
        kind: the word for such a name, for errors.

    Raises:
        UserError: one of ``only`` fits no name of the field.
    """
    names_of: list[tuple[RunConfig, list[str]]] = []
    for config in configs:
        with config.name_file_in_errors():
            names_of.append((config, expanded(getattr(config, field))))
    available = list(dict.fromkeys(name for _, names in names_of for name in names))
    chosen = set()
    for name in only:
        globbed = [candidate for candidate in available if fnmatchcase(candidate, name)]
        fitting = {*globbed} if is_glob(name) else {*expanded([name])} & {*available}
        if not fitting:
            raise unknown_name_error(kind, name, available, where="in the campaign")
        chosen |= fitting
    narrowed = []
    for config, names in names_of:
        names = [name for name in names if name in chosen] if chosen else names
        if names or not chosen:
            narrowed.append(replace(config, **{field: names}))  # type: ignore[arg-type]
    return narrowed
