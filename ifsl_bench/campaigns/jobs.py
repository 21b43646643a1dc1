"""From what is asked for to jobs: names are looked up, those of tasks before methods, and torch, are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ifsl_bench.campaigns.campaign_file import MOST_JOBS, Campaign, Wanted
from ifsl_bench.campaigns.names import Warn, method_names, task_names
from ifsl_bench.common.errors import UserError, unknown
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
    only = task_names(campaign.only_tasks, home)
    campaign = _narrowed(campaign, "tasks", lambda said: task_names(said, home), only, "task")
    found: dict[Task, None] = {}
    for wanted in campaign.wanted:
        with _told(wanted):
            found |= dict.fromkeys(task for name in wanted.tasks for task in find(name, wanted.change, home))
    return campaign, list(found)


def jobs_of(campaign: Campaign, home: Home, warn: Warn, say: Callable[[str], None]) -> list[Job]:
    """The jobs of a campaign in the file's order, each once.

    Args:
        campaign: as :func:`with_tasks` returns it.
        warn: is told of methods that ``all`` leaves out.
        say: is told of rows that nothing is chosen for, so that trials change nothing.

    Raises:
        UserError: an unknown name, an impossible option, too many jobs, or two that would replace each other's results.
    """
    from ifsl_bench.protocol.training import Training
    from ifsl_bench.running.job import each_once, make_jobs

    only = method_names(campaign.only_methods, warn)
    campaign = _narrowed(campaign, "methods", lambda said: method_names(said, warn), only, "method")
    many = sum(len(w.methods) * len(w.tasks) * len(w.seeds) for w in campaign.wanted)
    if many > MOST_JOBS:
        raise UserError(f"these are {many:,} jobs, {MOST_JOBS:,} at most; divide them")
    jobs: list[Job] = []
    for w in campaign.wanted:
        with _told(w):
            how = w.options, Training.parse(w.train), w.seeds, w.episodes, w.change, home, w.trials, w.calibrate
            made = make_jobs(w.methods, w.tasks, *how)
        for label in dict.fromkeys(job.label for job in made if w.trials and not job.trials):
            say(f"{label}: nothing to choose, so --tune changes nothing")
        jobs += made
    return each_once(jobs)


def _narrowed(
    campaign: Campaign, field: str, expand: Callable[[Sequence[str]], list[str]], only: Sequence[str], kind: str
) -> Campaign:
    """The campaign with the names that a field's stand for; where ``only`` has any, with these alone."""
    wanted: list[Wanted] = []
    there: dict[str, None] = {}
    for one in campaign.wanted:
        with _told(one):
            names = expand(getattr(one, field))
        there |= dict.fromkeys(names)
        names = [name for name in names if not only or name in only]
        changed: Any = {field: names}
        wanted += [replace(one, **changed)] if names else []
    if strange := [name for name in only if name not in there]:
        raise unknown(kind, strange[0], there, where="in the campaign")
    return replace(campaign, wanted=wanted)


@contextmanager
def _told(wanted: Wanted) -> Iterator[None]:
    """Errors say where in a file they come from."""
    try:
        yield
    except UserError as error:
        if not wanted.where:
            raise
        raise UserError(f"{wanted.where}: {error}") from error
