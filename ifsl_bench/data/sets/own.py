"""Data sets of the user's own: images in folders, with tasks on them, or frozen features."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.sets.feature_files import FeatureFiles
from ifsl_bench.data.sets.folder import ImageFolder, OwnOptions
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout
from ifsl_bench.data.suggested_tasks import (
    FEATURE_RATE,
    FEATURE_STEPS,
    SHOTS,
    check_feasible,
    make_suggested_task_tables,
    make_task_file_text,
)
from ifsl_bench.protocols.tasks.task import NO_BACKBONE
from ifsl_bench.protocols.tasks.task_files import packaged_tasks, parse_tasks
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, quarantine_path, sha256_json, write_bytes
from ifsl_bench.utils.progress import Reporter

TASK_FILE_HEADER = """\
# Written when {name} was prepared, for you to change; a changed task is a new task. It is left as it is until there
# are other data than {fingerprint}.
"""


class OwnData(DatasetSource):
    """A data set that no plugin knows by name."""

    summary: ClassVar[str] = "your own"

    def __init__(self, name: str, options: OwnOptions) -> None:
        self.name, self.options = name, options
        self.layouts: tuple[Layout, ...] = (FeatureFiles(self.check_episodes), ImageFolder(options))

    def recipe(self) -> str:
        divided_by = [self.options.settings(), self.options.split_seed is None]  # else folders may divide the classes
        return f"data of one's own, 2, {sha256_json(divided_by)[:16]}"

    def build(self, context: BuildContext) -> None:
        self.check_name()
        if isinstance(layout := self.find_layout(context.file_tree), ImageFolder):
            context.about["settings"] = self.options.settings()
        elif layout is not None and (flags := self.options.given_command_line_options()):
            raise UserError(f"{', '.join(flags)}: for images; {context.file_tree.path} holds {layout.title}")
        super().build(context)

    def task_names(self) -> list[str]:
        return [f"{self.name}-{shots}shot" for shots in (1, SHOTS)]

    def check_name(self) -> None:
        """Raise UserError if the names of the tasks are taken."""
        for name in (*self.task_names(), f"{self.name}-sessions"):
            if (task := packaged_tasks().get(name)) is not None:
                raise UserError(
                    f"there is a task {name!r} already, on data set {task.dataset.name!r}, which 'ifsl-bench data "
                    f"prepare {task.dataset.name}' makes; for a data set of your own choose another name"
                )

    def check_episodes(self, starts: Mapping[str, np.ndarray]) -> None:
        """Raise UserError if episodes of the written tasks cannot be drawn.

        Args:
            starts: Pool -> int64 [C + 1]; images of class c are ``starts[c]:starts[c + 1]``.
        """
        protocol = "separate" if "novel/train" in starts else "shared"
        pretraining = (
            f'[pretraining]\nbackbone = "{NO_BACKBONE}"\nsteps = {FEATURE_STEPS}\n'
            f"[pretraining.schedule]\nrate = {FEATURE_RATE}\n"
        )
        tasks = f'[tasks.{self.task_names()[-1]}]\nshots = {SHOTS}\nprotocol = "{protocol}"\n'
        (task,) = parse_tasks(f'[dataset]\nname = "{self.name}"\n{pretraining}{tasks}', self.name)
        check_feasible(task, starts.__getitem__)

    def has_same_settings(self, dataset: Dataset) -> bool:
        """Return whether a data set was made with these settings."""
        about = dataset.manifest["about"]
        if about.get("over_folders" if self.options.split_seed is None else "division"):
            return False  # one was divided by folders, the other by the seed
        settings = about.get("settings")
        return settings == self.options.settings() if settings else not self.options.given_command_line_options()

    def has_tasks(self, home: Paths, dataset: Dataset) -> bool:
        """Return whether the tasks of a data set are there, or their names are taken.

        Args:
            home: Folders of task files.
            dataset: The data set; a file with other fingerprints alone is for other data.
        """
        if any(name in packaged_tasks() for name in self.task_names()):
            return True
        path = home.tasks / f"{self.name}.toml"
        if not os.path.exists(path):
            return False
        named = re.findall(r"\b[0-9a-f]{64}\b", path.read_text(encoding="utf-8", errors="replace"))
        return not named or dataset.fingerprint in named

    def write_tasks(self, home: Paths, dataset: Dataset, reporter: Reporter) -> None:
        """Write the tasks of a data set; a file for other data is renamed.

        Args:
            home: Folders of task files.
            dataset: The data set.
            reporter: Takes messages.
        """
        path = home.tasks / f"{self.name}.toml"
        head = TASK_FILE_HEADER.format(name=self.name, fingerprint=dataset.fingerprint)
        text = make_task_file_text(dataset, self.name, make_suggested_task_tables(dataset), head, reporter)
        tasks = [
            task.name for task in parse_tasks(text, str(path))
        ]  # a wrong file would stop every command that lists tasks
        if os.path.exists(path):
            aside = quarantine_path(path, "old")
            reporter.warn(f"the tasks of {self.name} are written again; the file for the data before is now {aside}")
        write_bytes(path, text.encode())
        *others, last = tasks
        reporter.say(
            f"tasks {', '.join(others)} and {last} are in {path}; try: ifsl-bench run --method imprint --task "
            f"{tasks[1]} (--dry-run lists what it would do)"
        )
        if not dataset.has_pool("novel/train"):
            reporter.say(
                f'{self.name} has no novel/train: meta-training hides base classes in turn (protocol = "shared")'
            )
        if len(dataset.shape) == 3:
            reporter.warn(
                f"flip = false in {path}: no image is mirrored in pretraining. Where a mirror image is of the same "
                f"class, as of animals and most things but not of letters, set flip = true"
            )


class OwnObjects(OwnData):
    """A data set from objects of another library in memory; there are no options."""

    def __init__(self, name: str) -> None:
        super().__init__(name, OwnOptions())

    def recipe(self) -> str:
        return "objects of one's own, 1"
