"""Makes jobs of requests: looks up names, those of tasks before methods and torch are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from ifsl_bench.data.datasets import is_made_here, is_prepared
from ifsl_bench.experiments.request import MOST_JOBS, Campaign, Request
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import find, own, packaged
from ifsl_bench.protocols.tasks.variants import split
from ifsl_bench.store.published import published_sets
from ifsl_bench.utils.errors import MOST_LISTED, MissingDependencyError, UserError, unknown
from ifsl_bench.utils.files import Paths

if TYPE_CHECKING:
    from ifsl_bench.experiments.job import Job


ALL = "all"
Warn = Callable[[str], None]


def asked(file: str | None, request: Request) -> Campaign:
    """Makes a campaign of a command line's request, and of the campaign file that it names, if any.

    Raises:
        UserError: see :func:`ifsl_bench.experiments.campaign_file.read_campaign`.
    """
    if file is None:
        return Campaign([request])
    from ifsl_bench.experiments.campaign_file import read_campaign

    return read_campaign(file, request)


def is_glob(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def method_names(words: Iterable[str], warn: Warn) -> list[str]:
    """Names of methods as they are, globs and sets as the names that they stand for.

    A glob is held against registered names and shorthands alike. ``all`` is a row for each shorthand, or for a method
    without any, of the methods that can be used here; ``warn`` is told of the others.

    Raises:
        UserError: a glob that fits nothing.
    """
    sets = published_sets()
    names: list[str] = []
    for name in words:
        if name == ALL:
            names += _usable(warn)
        elif name in sets:
            names += sets[name][0]
        elif is_glob(name) and not registry.names_file(name):
            names += _fitting(name, [*registry.names(registry.METHODS), *registry.all_shorthands()], "method")
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def _usable(warn: Warn) -> list[str]:
    names: list[str] = []
    for name in registry.names(registry.METHODS):
        try:
            names += vars(registry.method(name)).get("shorthands") or [name]
        except UserError as error:
            warn(f"left out of 'all': {error}")
    return names


def task_names(words: Iterable[str], home: Paths) -> list[str]:
    """Names of tasks as they are, globs and sets as the names that they stand for; changes stay behind each.

    A glob is held against the packaged tasks and the user's own, or in ``FILE.toml:GLOB`` against those of the file.
    ``all`` are the tasks whose data are prepared here, or made when they are first used.

    Raises:
        UserError: a glob that fits nothing, or a file that is wrong.
    """
    sets = published_sets()
    expanded: list[str] = []
    for name in words:
        plain, change = split(name)
        changes = name[len(plain) :] if change.parts() else ""
        file, _, inside = plain.rpartition(".toml:")
        if plain == ALL:
            names: Sequence[str] = [task.name for task in _tasks_here(home) if _has_data(task, home)]
        elif plain in sets:
            names = sets[plain][1]
        elif file and is_glob(inside):
            tasks = [task.name for task in find(f"{file}.toml", home=home)]
            names = [f"{file}.toml:{fitting}" for fitting in _fitting(inside, tasks, "task")]
        elif is_glob(plain) and not plain.endswith(".toml"):
            names = _fitting(plain, [task.name for task in _tasks_here(home)], "task")
        else:
            names = [plain]
        expanded += [name_of_task + changes for name_of_task in names]
    return list(dict.fromkeys(expanded))


def _tasks_here(home: Paths) -> list[Task]:
    return list({**packaged(), **own(home)}.values())


def _has_data(task: Task, home: Paths) -> bool:
    with suppress(UserError):  # of a broken plugin
        return is_prepared(home, task.dataset.name) or is_made_here(task.dataset.name)
    return False


def _fitting(glob: str, names: Sequence[str], kind: str) -> list[str]:
    available = list(dict.fromkeys(names))
    fitting = [name for name in available if fnmatchcase(name, glob)]
    if not fitting:
        few = len(available) <= MOST_LISTED
        listed = f"there are: {', '.join(available)}" if few else f"all {len(available):,}: ifsl-bench {kind}s"
        raise UserError(f"no {kind} fits {glob[:80]!r}; {listed}")
    return fitting


def with_tasks(campaign: Campaign, home: Paths) -> tuple[Campaign, list[Task]]:
    """The campaign with each of its tasks by name, as far as they are wanted, and these tasks. Imports no torch.

    Raises:
        UserError: no such task or file, an impossible change of one, or tasks that the campaign does not have.
    """
    campaign = _narrowed(campaign, "tasks", lambda names: task_names(names, home), "task")
    tasks: dict[Task, None] = {}
    for request in campaign.requests:
        with request.named_in_errors():
            tasks |= dict.fromkeys(task for name in request.tasks for task in find(name, request.change, home))
    return campaign, list(tasks)


def jobs_of(
    campaign: Campaign, home: Paths, warn: Warn, say: Callable[[str], None]
) -> tuple[list[Job], Mapping[str, int]]:
    """The jobs of a campaign that can be run here, in the file's order, each once.

    A method of a file that lacks an extra takes its own jobs with it, and no others.

    Args:
        campaign: as :func:`with_tasks` returns it.
        warn: is told of methods that ``all`` leaves out.
        say: is told of rows that nothing is chosen for, so that trials change nothing.

    Returns:
        The jobs, and how many others there are of each method that something has to be installed for first, by what
        to do.

    Raises:
        UserError: an unknown name, an impossible option, too many jobs, or two that would replace each other's results.
    """
    from ifsl_bench.experiments.job import each_once, make_jobs, trained_in_vain

    campaign = _narrowed(campaign, "methods", lambda names: method_names(names, warn), "method")
    many = sum(len(run.methods) * len(run.tasks) * len(run.all_seeds) for run in campaign.requests)
    if many > MOST_JOBS:
        raise UserError(f"these are {many:,} jobs, {MOST_JOBS:,} at most; divide them")
    jobs: list[Job] = []
    lacking: dict[str, int] = {}
    for run in campaign.requests:
        with run.named_in_errors():
            usable = replace(run, methods=_not_lacking(run, lacking)) if run.where else run
            of_request = make_jobs(usable, home) if usable.methods or not run.where else []
        for label in dict.fromkeys(job.label for job in of_request if run.trials and not job.trials):
            say(f"{label}: nothing to choose, so --tune changes nothing; what it tries is in a method's `space`, see "
                "docs/writing-a-method.md")  # fmt: skip
        if not run.where and (remark := trained_in_vain(of_request, run.train)):  # a file may be for more methods
            raise UserError(remark)
        for label in dict.fromkeys(job.label for job in of_request if run.train and not run.where and not job.trains):
            say(f"{label}: nothing is meta-trained, so --train changes nothing")
        for name, label in dict.fromkeys((job.name, job.label) for job in of_request if job.name in run.methods):
            if label.partition(".")[0] != name:
                say(f"{name} with these options is called {label}")
        jobs += of_request
    if lacking and not jobs:
        raise MissingDependencyError(next(iter(lacking)))
    return each_once(jobs), lacking


def _not_lacking(request: Request, lacking: dict[str, int]) -> list[Any]:
    """The methods that nothing has to be installed for first; the jobs of the others are counted in ``lacking``."""
    from ifsl_bench.plugin.find_method import find_method

    usable = []
    for name in request.methods:
        try:
            find_method(name)
        except MissingDependencyError as error:
            lacking[str(error)] = lacking.get(str(error), 0) + len(request.tasks) * len(request.all_seeds)
            continue
        usable.append(name)
    return usable


def _narrowed(
    campaign: Campaign, field: Literal["methods", "tasks"], expand: Callable[[Sequence[Any]], list[str]], kind: str
) -> Campaign:
    """The campaign with the names that a field's stand for, as far as they fit those that are wanted alone."""
    expanded: list[tuple[Request, list[str]]] = []
    for request in campaign.requests:
        with request.named_in_errors():
            expanded.append((request, expand(getattr(request, field))))
    available = list(dict.fromkeys(name for _, names in expanded for name in names))
    chosen = set()
    for name in getattr(campaign.only, field):
        globbed = [candidate for candidate in available if fnmatchcase(candidate, name)]
        fitting = {*globbed} if is_glob(name) else {*expand([name])} & {*available}
        if not fitting:
            raise unknown(kind, name, available, where="in the campaign")
        chosen |= fitting
    requests = []
    for request, names in expanded:
        names = [name for name in names if name in chosen] if chosen else names
        if names or not chosen:
            requests.append(replace(request, **{field: names}))  # type: ignore[arg-type]
    return replace(campaign, requests=requests)
