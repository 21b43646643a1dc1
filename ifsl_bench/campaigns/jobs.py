"""From what is asked for to jobs: names are looked up, those of tasks before methods, and torch, are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ifsl_bench.campaigns.campaign_file import MOST_JOBS, Campaign, Wanted
from ifsl_bench.campaigns.names import Warn, is_glob, method_names, task_names
from ifsl_bench.common.errors import Lacking, UserError, unknown
from ifsl_bench.common.files import Home
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.task_files import find

if TYPE_CHECKING:
    from ifsl_bench.running.job import Job


def with_tasks(campaign: Campaign, home: Home) -> tuple[Campaign, list[Task]]:
    """The campaign with each of its tasks by name, as far as they are wanted, and these tasks. Imports no torch.

    Raises:
        UserError: no such task or file, an impossible change of one, or tasks that the campaign does not have.
    """
    campaign = _narrowed(campaign, "tasks", lambda said: task_names(said, home), campaign.only_tasks, "task")
    found: dict[Task, None] = {}
    for wanted in campaign.wanted:
        with _told(wanted):
            found |= dict.fromkeys(task for name in wanted.tasks for task in find(name, wanted.change, home))
    return campaign, list(found)


@dataclass(frozen=True)
class Asked:
    """What is asked for.

    Attributes:
        jobs: that can be run here.
        lacking: how many others there are of each method that something has to be installed for first, by what to do.
    """

    jobs: list[Job]
    lacking: Mapping[str, int]


def jobs_of(campaign: Campaign, home: Home, warn: Warn, say: Callable[[str], None]) -> Asked:
    """The jobs of a campaign in the file's order, each once.

    A method of a file that lacks an extra takes its own jobs with it, and no others.

    Args:
        campaign: as :func:`with_tasks` returns it.
        warn: is told of methods that ``all`` leaves out.
        say: is told of rows that nothing is chosen for, so that trials change nothing.

    Raises:
        UserError: an unknown name, an impossible option, too many jobs, or two that would replace each other's results.
    """
    from ifsl_bench.protocol.training import Training
    from ifsl_bench.running.job import each_once, make_jobs, trained_in_vain

    campaign = _narrowed(campaign, "methods", lambda said: method_names(said, warn), campaign.only_methods, "method")
    many = sum(len(w.methods) * len(w.tasks) * len(w.seeds) for w in campaign.wanted)
    if many > MOST_JOBS:
        raise UserError(f"these are {many:,} jobs, {MOST_JOBS:,} at most; divide them")
    jobs: list[Job] = []
    lacking: dict[str, int] = {}
    for w in campaign.wanted:
        with _told(w):
            how = w.options, Training.parse(w.train), w.seeds, w.episodes, w.change, home, w.trials, w.calibrate
            usable = _usable(w, lacking) if w.where else w.methods
            made = make_jobs(usable, w.tasks, *how) if usable or not w.where else []
        for label in dict.fromkeys(job.label for job in made if w.trials and not job.trials):
            say(f"{label}: nothing to choose, so --tune changes nothing; what it tries is in a method's `space`, see "
                "docs/writing-a-method.md")  # fmt: skip
        if not w.where and (said := trained_in_vain(made, w.train)):  # a file may be for more methods
            raise UserError(said)
        for label in dict.fromkeys(job.label for job in made if w.train and not w.where and not job.trains):
            say(f"{label}: nothing is meta-trained, so --train changes nothing")
        for name, label in dict.fromkeys((job.name, job.label) for job in made if job.name in w.methods):
            if label.partition(".")[0] != name:
                say(f"{name} with these options is called {label}")
        jobs += made
    if lacking and not jobs:
        raise Lacking(next(iter(lacking)))
    return Asked(each_once(jobs), lacking)


def _usable(wanted: Wanted, lacking: dict[str, int]) -> list[str]:
    """The methods that nothing has to be installed for first; the jobs of the others are counted in ``lacking``."""
    from ifsl_bench.plugin.find_method import find_method

    found = []
    for name in wanted.methods:
        try:
            find_method(name)
        except Lacking as error:
            lacking[str(error)] = lacking.get(str(error), 0) + len(wanted.tasks) * len(wanted.seeds)
            continue
        found.append(name)
    return found


def _narrowed(
    campaign: Campaign, field: str, expand: Callable[[Sequence[str]], list[str]], only: Sequence[str], kind: str
) -> Campaign:
    """The campaign with the names that a field's stand for; where ``only`` has any, with those that fit these alone."""
    changed: list[Wanted] = []
    for one in campaign.wanted:
        with _told(one):
            names: Any = {field: expand(getattr(one, field))}
        changed.append(replace(one, **names))
    there = list(dict.fromkeys(name for one in changed for name in getattr(one, field)))
    kept: set[str] = set()
    for said in only:
        fitting = {name for name in there if fnmatchcase(name, said)} if is_glob(said) else {*expand([said])} & {*there}
        if not fitting:
            raise unknown(kind, said, there, where="in the campaign")
        kept |= fitting
    if only:
        few: list[dict[str, Any]] = [{field: [n for n in getattr(one, field) if n in kept]} for one in changed]
        changed = [replace(one, **names) for one, names in zip(changed, few, strict=True) if names[field]]
    return replace(campaign, wanted=changed)


@contextmanager
def _told(wanted: Wanted) -> Iterator[None]:
    """Errors say where in a file they come from."""
    try:
        yield
    except UserError as error:
        if not wanted.where:
            raise
        raise UserError(f"{wanted.where}: {error}") from error
