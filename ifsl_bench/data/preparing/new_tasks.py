"""Writes a task file for a data set that is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.data.preparing.catalogue import open_or_make
from ifsl_bench.data.sets.own import suggested, task_file
from ifsl_bench.protocols.tasks.task_files import own, packaged, parse
from ifsl_bench.protocols.tasks.task_limits import NAME, RULE
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, disk_errors, write_bytes
from ifsl_bench.utils.progress import Reporter


def write_new(home: Paths, name: str, data: str, path: Path, reporter: Reporter) -> list[str]:
    """Writes tasks ``name-1shot``, ``name-5shot`` and ``name-sessions`` with comments on every key; returns the names.

    The last is left out where classes or images do not suffice.

    Training is as in the first task that there is on the data set, or as it is for data of one's own.

    Raises:
        UserError: no such name or data set, the data are not prepared, the file or tasks of the name are there.
    """
    if not re.fullmatch(NAME, name):
        raise UserError(f"{name!r} is no name for tasks: {RULE}")
    if ending := re.search(r"-(\d+shot|sessions)$", name):
        plain = name.removesuffix(ending[0])
        raise UserError(f"the tasks are called NAME-1shot, NAME-5shot and NAME-sessions; leave out {ending[0]!r}: "
                        f"ifsl-bench tasks new {plain or 'NAME'} --data {data}")  # fmt: skip
    if os.path.exists(path):
        raise UserError(f"{path} is there already; choose another name, or another file with --out")
    dataset = open_or_make(home, data, reporter)
    tasks_there = {**packaged(), **own(home)}
    content: dict[str, Any] = suggested(dataset)
    like = next((task for task in tasks_there.values() if task.dataset.name == data and task.kind.has_base), None)
    if like is not None:
        tables = msgspec.to_builtins(like)
        content = {key: tables[key] for key in ("dataset", "pretraining", "episode", "meta_training", "evaluation")}
        content["dataset"]["fingerprint"] = dataset.fingerprint
    text = task_file(dataset, name, content, f"# Tasks on the data set {data}.\n", reporter)
    tasks = [task.name for task in parse(text, str(path))]
    if taken := [task for task in tasks if task in tasks_there]:
        raise UserError(f"there is a task {taken[0]!r} already; choose another name")
    with disk_errors(path):
        write_bytes(path, text.encode())
    return tasks
