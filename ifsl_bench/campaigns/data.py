"""The data sets of a campaign, made from files that it or the command names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ifsl_bench.common.errors import unknown
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.protocol.task import Task


def check_data(data: Mapping[str, Path], tasks: Iterable[Task]) -> None:
    """Raises :class:`ifsl_bench.UserError` for a data set that none of the tasks has."""
    used = {task.dataset.name for task in tasks}
    for name in data:
        if name not in used:
            raise unknown("data set", name, used, where="of these tasks")


def prepare_from(data: Mapping[str, Path], tasks: Iterable[Task], work: Workspace) -> None:
    """Makes the data sets that are not prepared yet, each from its path.

    Raises:
        UserError: a data set that none of the tasks has, unusable files, or one that was made from other files.
    """
    check_data(data, tasks)
    for name, path in data.items():
        prepare(work.home, name, path.expanduser(), False, work.reporter)
