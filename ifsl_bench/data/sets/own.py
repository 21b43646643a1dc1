"""Data sets of the user's own: images in folders, with tasks on them, or frozen features."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ifsl_bench.data.feasibility import SIDES, infeasible_tasks
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.sets.feature_files import FeatureFiles
from ifsl_bench.data.sets.folder import SHOTS, WAYS, ImageFolder, OwnOptions
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout
from ifsl_bench.protocols.tasks.reference import task_text
from ifsl_bench.protocols.tasks.task import (
    NO_BACKBONE,
    DataSpec,
    EpisodeSpec,
    Evaluation,
    MetaTraining,
    Pretraining,
    Schedule,
    Task,
)
from ifsl_bench.protocols.tasks.task_files import packaged, parse
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, quarantine, sha256_json, write_bytes
from ifsl_bench.utils.progress import Reporter

HEAD = """\
# Written when {name} was prepared, for you to change; a changed task is a new task. It is left as it is until there
# are other data than {fingerprint}.
"""
EPOCHS, BATCH = 30, 128  # of pretraining on images
SESSIONS = 10  # at most; the common lists have 8 or 10
STEPS, RATE = 2000, 0.1  # of a base classifier on features with a mean square of one


class OwnData(DatasetSource):
    """A data set that no plugin knows by name."""

    summary: ClassVar[str] = "your own"

    def __init__(self, name: str, options: OwnOptions) -> None:
        self.name, self.options = name, options
        self.layouts: tuple[Layout, ...] = (FeatureFiles(self.check_episodes), ImageFolder(options))

    def recipe(self) -> str:
        divided_by = [self.options.settings(), self.options.split_seed is None]  # else folders may divide the classes
        return f"data of one's own, 1, {sha256_json(divided_by)[:16]}"

    def build(self, context: BuildContext) -> None:
        self.check_name()
        if isinstance(layout := self.layout(context.files), ImageFolder):
            context.about["settings"] = self.options.settings()
        elif layout is not None and (flags := self.options.flags()):
            raise UserError(f"{', '.join(flags)}: for images; {context.files.path} holds {layout.title}")
        super().build(context)

    def task_names(self) -> list[str]:
        return [f"{self.name}-{shots}shot" for shots in (1, SHOTS)]

    def check_name(self) -> None:
        """Raises :class:`UserError` where the tasks would be called as others are."""
        for name in (*self.task_names(), f"{self.name}-sessions"):
            if (task := packaged().get(name)) is not None:
                raise UserError(
                    f"there is a task {name!r} already, on data set {task.dataset.name!r}, which 'ifsl-bench data "
                    f"prepare {task.dataset.name}' makes; for a data set of your own choose another name"
                )

    def check_episodes(self, starts: Mapping[str, np.ndarray]) -> None:
        """Raises :class:`UserError` where the tasks that are written cannot have episodes.

        Args:
            starts: int64 [C + 1] of each pool: images of class c are ``starts[c]:starts[c + 1]``.
        """
        from ifsl_bench.protocols.sampling.episodes import task_stream  # with torch

        task = Task(
            name=self.task_names()[-1],
            title="",
            shots=SHOTS,
            protocol="separate" if "novel/train" in starts else "shared",
            dataset=DataSpec(name=self.name),
            pretraining=Pretraining(backbone=NO_BACKBONE, steps=STEPS, schedule=Schedule(rate=RATE)),
            episode=EpisodeSpec(),
            meta_training=MetaTraining(),
            evaluation=Evaluation(),
        )
        for side in SIDES:
            task_stream(task, side, 0, starts.__getitem__)

    def has_same_settings(self, dataset: Dataset) -> bool:
        """Returns whether a data set was made with the settings asked for."""
        about = dataset.manifest["about"]
        if about.get("over_folders" if self.options.split_seed is None else "division"):
            return False  # the seed has divided the classes, and folders were to, or the other way round
        settings = about.get("settings")
        return settings == self.options.settings() if settings else not self.options.flags()

    def has_tasks(self, home: Paths, dataset: Dataset) -> bool:
        """Returns whether the tasks of a data set are there, or cannot be, since others have their names.

        They are for other data only where the file names other fingerprints and not this one.
        """
        if any(name in packaged() for name in self.task_names()):
            return True
        path = home.tasks / f"{self.name}.toml"
        if not os.path.exists(path):
            return False
        named = re.findall(r"\b[0-9a-f]{64}\b", path.read_text(encoding="utf-8", errors="replace"))
        return not named or dataset.fingerprint in named

    def write_tasks(self, home: Paths, dataset: Dataset, reporter: Reporter) -> None:
        """Writes the tasks of a data set; a file for other data is kept aside."""
        path, head = home.tasks / f"{self.name}.toml", HEAD.format(name=self.name, fingerprint=dataset.fingerprint)
        text = task_file(dataset, self.name, suggested(dataset), head, reporter)
        tasks = [
            task.name for task in parse(text, str(path))
        ]  # one wrong file there would stop every command that lists tasks
        if os.path.exists(path):
            aside = quarantine(path, "old")
            reporter.warn(f"the tasks of {self.name} are written anew; those for the data before are kept as {aside}")
        write_bytes(path, text.encode())
        *others, last = tasks
        reporter.say(
            f"tasks {', '.join(others)} and {last} are in {path}; try: ifsl-bench run --method imprint --task "
            f"{tasks[1]} (with --dry-run it says how long that takes)"
        )
        if not dataset.has("novel/train"):
            reporter.say(
                f'{self.name} has no novel/train: meta-training hides base classes in turn (protocol = "shared")'
            )
        if len(dataset.shape) == 3:
            reporter.warn(
                f"flip = false in {path}: no image is mirrored in pretraining. Where a mirror image is of the same "
                f"class, as of animals and most things but not of letters, set flip = true"
            )


class OwnObjects(OwnData):
    """Data of one's own from objects of another library in memory; how they are divided is no option."""

    def __init__(self, name: str) -> None:
        super().__init__(name, OwnOptions())

    def recipe(self) -> str:
        return "objects of one's own, 1"


def suggested(dataset: Dataset) -> dict[str, Any]:
    """The tables of a task file on a data set, but for the tasks."""
    pools = dataset.manifest["pools"]
    train = pools["base/train"]["statistics"]
    data = {"name": dataset.name, "fingerprint": dataset.fingerprint, "partial": dataset.partial}
    batch = max(2, min(BATCH, train["images"]))
    if len(dataset.shape) != 3:
        square = float(np.mean(np.square(train["mean"]) + np.square(train["std"])))  # of an entry
        pretraining = {"backbone": NO_BACKBONE, "steps": STEPS, "batch": batch}
        rate = float(f"{RATE / max(1.0, square):.1g}")  # with larger features the loss is steeper
        return {"dataset": data, "pretraining": {**pretraining, "schedule": {"rate": rate, "drops": [STEPS // 2]}}}
    steps = max(1, EPOCHS * (train["images"] // batch))
    data["mean"] = [round(v / 255, 4) for v in train["mean"]]
    data["std"] = [round(max(v, 1.0) / 255, 4) for v in train["std"]]
    pretraining = {
        "backbone": "resnet10-stempool",
        "steps": steps,
        "batch": batch,
        "crop_padding": dataset.shape[0] // 8,
        "flip": False,
        "schedule": {"rate": RATE, "shape": "cosine", "warmup": steps // EPOCHS},
    }
    return {"dataset": data, "pretraining": pretraining}


def task_file(dataset: Dataset, name: str, content: Mapping[str, Any], head: str, reporter: Reporter) -> str:
    """TOML with tasks of 1 and of 5 shots on a data set, and one in sessions if classes and images suffice.

    Args:
        name: that the tasks are called after.
        content: tables of the file, as :func:`suggested` makes them.
        head: comments above them.
    """
    base, novel = (dataset.manifest["pools"][pool]["statistics"]["classes"] for pool in ("base/train", "novel/test"))
    tasks = {
        f"{name}-{shots}shot": {
            "title": f"{name} {base}+{WAYS}, {shots} shot{'s' if shots > 1 else ''}",
            "shots": shots,
            "protocol": "separate" if dataset.has("novel/train") else "shared",
        }
        for shots in (1, SHOTS)
    }
    episodes = {**content, "tasks": tasks}
    if (count := min(novel // WAYS, SESSIONS)) < 2:
        reporter.say(
            f"{name}-sessions is left out: two sessions of {WAYS} need {2 * WAYS} classes in novel/test, which has "
            f"{novel}; smaller ones: ifsl-bench run --method ncm --task {name}-{SHOTS}shot --sessions 2 "
            f"--ways {novel // 2}"
        )
        return task_text(episodes, head)
    sessions = {
        "of": f"{name}-{SHOTS}shot",
        "title": f"{name} {base} + {count} x {WAYS}, sessions of {SHOTS} shots",
        "sessions": {"count": count, "ways": WAYS},
    }
    text = task_text({**episodes, "variants": {f"{name}-sessions": sessions}}, head)
    if lines := infeasible_tasks(dataset, [task for task in parse(text, name) if task.sessions]):
        reporter.say(f"{lines[0]}; it is left out")
        return task_text(episodes, head)
    return text
