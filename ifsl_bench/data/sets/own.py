"""Data sets of the user's own: images in folders, with tasks on them, or frozen features."""

from __future__ import annotations

import re
from typing import ClassVar

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home, set_aside, sha256_json, write_bytes
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.sets.feature_files import FeatureFiles
from ifsl_bench.data.sets.folder import SHOTS, WAYS, ImageFolder, OwnOptions
from ifsl_bench.data.source import DatasetSource, Form, Import
from ifsl_bench.protocol.task_files import packaged, parse

TASK_FILE = """\
# Written when {name} was prepared, for you to change; a changed task is a new task. It is left as it is until there
# are other data than {fingerprint}.

[dataset]
name = "{name}"
fingerprint = "{fingerprint}"
partial = {partial}
mean = {mean}
std = {std}

[pretraining]
backbone = "resnet10-stempool"
steps = {steps}
batch = {batch}
crop_padding = {padding}
flip = true

[pretraining.schedule]
rate = 0.1
shape = "cosine"
warmup = {warmup}
{tasks}"""

TASK = """
[tasks."{name}-{shots}shot"]
title = "{title}"
shots = {shots}
protocol = "{protocol}"
"""
EPOCHS, BATCH = 30, 128


class OwnData(DatasetSource):
    """A data set that no plugin knows by name."""

    summary: ClassVar[str] = "your own"

    def __init__(self, name: str, options: OwnOptions) -> None:
        self.name, self.options = name, options
        self.forms: tuple[Form, ...] = (FeatureFiles(), ImageFolder(options))

    def recipe(self) -> str:
        return f"data of one's own, 1, {sha256_json(self.options.settings())[:16]}"

    def build(self, to: Import) -> None:
        if isinstance(form := self.form(to.files), ImageFolder):
            to.about["settings"] = self.options.settings()
            self.check_name()
        elif form is not None and (given := self.options.given()):
            raise UserError(f"{', '.join(given)}: for images; {to.files.path} holds {form.title}")
        super().build(to)

    def task_names(self) -> list[str]:
        return [f"{self.name}-{shots}shot" for shots in (1, SHOTS)]

    def check_name(self) -> None:
        """Raises :class:`UserError` where the tasks would be called as others are."""
        for name in self.task_names():
            if (task := packaged().get(name)) is not None:
                raise UserError(
                    f"there is a task {name!r} already, on data set {task.dataset.name!r}, which 'ifsl-bench data "
                    f"prepare {task.dataset.name}' makes; for a data set of your own choose another name"
                )

    def made(self, dataset: Dataset) -> bool:
        """Whether a data set was made with the settings asked for."""
        settings = dataset.manifest["about"].get("settings")
        return settings == self.options.settings() if settings else not self.options.given()

    def has_tasks(self, home: Home, dataset: Dataset) -> bool:
        """Whether the tasks of a data set are there, as far as it is one of images.

        The user may have changed them, and unpinned them from the data: they are for other data only where the file
        names other fingerprints and not this one.
        """
        if len(dataset.shape) != 3:
            return True
        path = home.tasks / f"{self.name}.toml"
        if not path.exists():
            return False
        named = re.findall(r"\b[0-9a-f]{64}\b", path.read_text(encoding="utf-8", errors="replace"))
        return not named or dataset.fingerprint in named

    def write_tasks(self, home: Home, dataset: Dataset, reporter: Reporter) -> None:
        """Writes the tasks of a data set of images; a file for other data is kept aside."""
        path, text = home.tasks / f"{self.name}.toml", task_file(dataset)
        parse(text, str(path))  # one wrong file there would stop every command that lists tasks
        if path.exists():
            aside = set_aside(path, "old")
            reporter.warn(f"the tasks of {self.name} are written anew; those for the data before are kept as {aside}")
        write_bytes(path, text.encode())
        tasks = self.task_names()
        reporter.say(
            f"tasks {' and '.join(tasks)} are in {path}; try: ifsl-bench run --method imprint --task {tasks[-1]}"
        )


class OwnObjects(OwnData):
    """The same, made from objects of another library in memory; how they are divided is no option."""

    def __init__(self, name: str) -> None:
        super().__init__(name, OwnOptions())

    def recipe(self) -> str:
        return "objects of one's own, 1"

    def made(self, dataset: Dataset) -> bool:
        return True


def task_file(dataset: Dataset) -> str:
    """TOML with a 1-shot and a 5-shot task on a data set of images."""
    pools = dataset.manifest["pools"]
    train = pools["base/train"]["statistics"]
    separate = dataset.has("novel/train")
    batch = min(BATCH, train["images"])
    steps = max(1, EPOCHS * (train["images"] // batch))
    tasks = "".join(
        TASK.format(
            name=dataset.name,
            shots=shots,
            title=f"{dataset.name} {train['classes'] - (0 if separate else WAYS)}+{WAYS}, "
            f"{shots} shot{'s' if shots > 1 else ''}",
            protocol="separate" if separate else "shared",
        )
        for shots in (1, SHOTS)
    )
    return TASK_FILE.format(
        name=dataset.name,
        fingerprint=dataset.fingerprint,
        partial=str(dataset.partial).lower(),
        mean=[round(v / 255, 4) for v in train["mean"]],
        std=[round(max(v, 1.0) / 255, 4) for v in train["std"]],
        steps=steps,
        batch=batch,
        padding=dataset.shape[0] // 8,
        warmup=steps // EPOCHS,
        tasks=tasks,
    )
