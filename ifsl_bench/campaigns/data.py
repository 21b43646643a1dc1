"""The data sets of a campaign, made from files that it or the command names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.common.files import Home
from ifsl_bench.data.preparing.of_task import data_of
from ifsl_bench.data.preparing.prepare import is_prepared, prepare
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.protocol.task import Task


def check_data(data: Mapping[str, Path], tasks: Iterable[Task], home: Home) -> None:
    """Raises :class:`UserError` for a data set that no task has, and for a path that is needed and not there."""
    used = {spec.name for task in tasks for spec in data_of(task, home)}
    for name, path in data.items():
        if name not in used:
            raise unknown("data set", name, used, where="of these tasks")
        if not os.path.exists(path.expanduser()) and not is_prepared(home, name):
            raise UserError(f"data set {name}: there is no {path}")


def prepare_from(data: Mapping[str, Path], work: Workspace) -> None:
    """Makes the data sets that are not prepared yet, each from its path.

    Raises:
        UserError: unusable files, or a data set that was made from other files.
    """
    for name, path in data.items():
        if is_prepared(work.home, name) and not os.path.exists(path.expanduser()):
            continue  # somebody needed the space
        prepare(work.home, name, path.expanduser(), False, work.reporter)
