"""What a run is made of before any method comes in: a stage as such, data set, pretraining, features.

Each is a small description that can be pickled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ifsl_bench.backbone.features import BATCH, bank_folder, is_computed
from ifsl_bench.backbone.placement import Place
from ifsl_bench.backbone.pretrain import HeadKind, features_key, pretraining_key
from ifsl_bench.backbone.registered import frozen_backbone
from ifsl_bench.backbone.rough_times import feature_seconds, pretraining_seconds
from ifsl_bench.backbone.weights import features_sha256, is_offered, pretrained_sha256, train_here
from ifsl_bench.common.checkpoint import begun
from ifsl_bench.common.files import Home
from ifsl_bench.common.processor import cores, threads
from ifsl_bench.data.crossed import NOVEL, short
from ifsl_bench.data.preparing.of_task import data_of
from ifsl_bench.data.preparing.outline import Outline, fingerprint_of, novel_fingerprint
from ifsl_bench.data.preparing.prepare import is_prepared, rough_seconds
from ifsl_bench.episodic.prepared import PreparedTask, Workspace, host_threads
from ifsl_bench.protocol.episodes import task_sampler
from ifsl_bench.protocol.task import Side, Task
from ifsl_bench.running.job import Job

PREPARING = 500 << 20  # bytes that an import takes, with the processes that decode
# Bytes a pixel of a batch: of a step of training, for which a small network on letters took 2,000 and ResNet-10 on
# photographs 2,800, and of a forward pass alone.
STEP, FORWARD = 3000, 1000


class Stage(ABC):
    """A piece of work; ``str`` says what it is, for people.

    Attributes:
        kind: of stage, in a word.
    """

    kind: ClassVar[str]

    @abstractmethod
    def key(self, home: Home) -> str:
        """What its artefact is called; equal keys of one kind of stage mean equal artefacts."""

    def needs(self) -> Sequence[Stage]:
        """The stages it waits for. It makes what they should have made and did not, if it comes to that."""
        return ()

    @abstractmethod
    def cached(self, home: Home) -> bool:
        """Whether the artefact is there."""

    @abstractmethod
    def place(self, work: Workspace) -> Place:
        """Where it runs, and why there."""

    def threads(self) -> int:
        """How many it keeps busy on the host's processor; :func:`cores` of them are the whole machine."""
        return 1

    def memory(self, data: Outline, device: torch.device) -> int:
        """Bytes on the host, roughly, beyond those of an idle process; ``device`` is where it computes."""
        return 0

    @abstractmethod
    def estimate(self, data: Outline, work: Workspace) -> float | None:
        """About how many seconds it takes here; None where nobody knows."""

    @abstractmethod
    def run(self, work: Workspace) -> Any:
        """Opens the artefact, or makes it, from where an earlier run stopped."""


@dataclass(frozen=True)
class PrepareData(Stage):
    """The data set, from which the episodes of some sides can be drawn."""

    kind = "data"
    task: Task
    sides: tuple[Side, ...] = ()

    def __str__(self) -> str:
        others = f" with novel classes of {self.task.novel_from}" if self.task.novel_from else ""
        return f"data set {self.task.dataset.name}{others}"

    def key(self, home: Home) -> str:
        return "+".join(spec.name for spec in data_of(self.task, home))

    def cached(self, home: Home) -> bool:
        return all(is_prepared(home, spec.name) for spec in data_of(self.task, home))

    def check(self, data: Outline) -> None:
        """Raises :class:`UserError` where episodes cannot be drawn, as far as that is known."""
        for side in self.sides if data.starts else ():
            task_sampler(self.task, side, 0, data.starts.__getitem__, classes=lambda pool: data.classes.get(pool, ()))

    def place(self, work: Workspace) -> Place:
        return work.place("data")

    def threads(self) -> int:
        return cores()

    def memory(self, data: Outline, device: torch.device) -> int:
        return PREPARING

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        home = work.home
        lacking = [spec.name for spec in data_of(self.task, home)[1:] if not is_prepared(home, spec.name)]
        if not lacking or not is_prepared(home, self.task.dataset.name):
            lacking.append(self.task.dataset.name)
        each = [rough_seconds(name) for name in lacking]
        return None if None in each else sum(filter(None, each))

    def run(self, work: Workspace) -> None:
        prepared = PreparedTask(self.task, "linear", 0, work)  # episodes depend on no backbone
        _ = prepared.dataset
        for side in self.sides:
            prepared.check_episodes(side)


@dataclass(frozen=True)
class CheckEpisodes(Stage):
    """That the episodes of one side of a task can be drawn, and are those that stored results were measured on."""

    kind = "episodes"
    task: Task
    side: Side

    def __str__(self) -> str:
        return f"{self.side} episodes of {self.task.name}"

    def key(self, home: Home) -> str:
        return f"{self.task.name}-{self.task.hash[:12]}-{self.side}"

    def needs(self) -> Sequence[Stage]:
        return [PrepareData(self.task)]

    def cached(self, home: Home) -> bool:
        return False  # nothing but the check itself says that it holds

    def place(self, work: Workspace) -> Place:
        return work.place("data")

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        return 1.0

    def run(self, work: Workspace) -> None:
        PreparedTask(self.task, "linear", 0, work).check_episodes(self.side)


@dataclass(frozen=True)
class Pretrain(Stage):
    """The backbone and its base classifier. ``seed`` is that of training."""

    kind = "pretraining"
    task: Task
    head: HeadKind
    seed: int

    def __str__(self) -> str:
        backbone, seed = self.task.pretraining.backbone, self.task.pretraining_seed(self.seed)
        return f"pretraining {backbone}, {self.head} head, seed {seed}"

    def key(self, home: Home, fingerprint: str = "?") -> str:
        """On data of that fingerprint, where they are neither prepared nor pinned."""
        return pretraining_key(self.task, fingerprint_of(self.task, home) or fingerprint, self.head, self.seed)

    def features_key(self, home: Home) -> str:
        """What its features are called."""
        return features_key(self.task, fingerprint_of(self.task, home) or "?", self.head, self.seed)

    def needs(self) -> Sequence[Stage]:
        return [PrepareData(self.task)]

    def weights(self, home: Home) -> str | None:
        """The checksum of the weights in the cache; None where there are none."""
        return pretrained_sha256(home, self.key(home))

    def cached(self, home: Home) -> bool:
        return self.weights(home) is not None

    def place(self, work: Workspace) -> Place:
        return work.place("pretraining")

    def threads(self) -> int:
        return cores()

    def memory(self, data: Outline, device: torch.device) -> int:
        """Activations of a batch; images are mapped, and the system may drop their pages."""
        return STEP * self.task.pretraining.batch * math.prod(data.shape[:2]) if device.type == "cpu" else PREPARING

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        if is_offered(work.home, self.key(work.home)):
            return 0.1  # the weights come with the package
        spec, images = self.task.pretraining, data.images("base/train")
        held_out = data.images("base/val") + data.images("base/test")
        device = self.place(work).device
        with threads(host_threads(device)):
            sizes = data.shape, data.base_classes, images, held_out
            seconds = pretraining_seconds(spec, *sizes, device) if data.shape else None
        epochs = begun(work.home.pretrained / self.key(work.home), "epoch")
        if seconds is None or not epochs:
            return seconds
        _, each = spec.epoch(images)
        return seconds * (1 - min(1.0, epochs * each / max(1, spec.steps)))

    def prepared(self, work: Workspace) -> PreparedTask:
        return work.prepared(self.task, self.head, self.seed)

    def run(self, work: Workspace) -> None:
        _ = self.prepared(work).pretrained


def train_backbones(jobs: Sequence[Job], work: Workspace) -> None:
    """Has the backbones of jobs trained in this home, also those whose weights come with the package."""
    stages = dict.fromkeys(Pretrain(job.task, job.method.head, job.task.pretraining_seed(job.seed)) for job in jobs)
    for stage in stages:
        train_here(work.home, stage.key(work.home), work.reporter)


@dataclass(frozen=True)
class Features(Stage):
    """The features of a pool under a pretraining, of the plain images or of ``views`` augmented ones of each."""

    kind = "features"
    backbone: Pretrain
    pool: str
    views: int

    def __str__(self) -> str:
        return f"features of {self.pool}" + (f", {self.views} views" if self.views > 1 else "")

    def key(self, home: Home) -> str:
        task, origin = self.backbone.task, ""
        if task.novel_from and self.pool in NOVEL:
            origin = short(novel_fingerprint(task, home)) or "?"
        folder = bank_folder(home, self.backbone.features_key(home), self.pool, task, self.views, origin)
        return folder.relative_to(home.features).as_posix()

    def needs(self) -> Sequence[Stage]:
        return [self.backbone]

    def cached(self, home: Home) -> bool:
        return is_computed(home.features / self.key(home), features_sha256(home, self.backbone.key(home)))

    def place(self, work: Workspace) -> Place:
        return work.place("features")

    def threads(self) -> int:
        return cores()

    def memory(self, data: Outline, device: torch.device) -> int:
        """Activations of the largest layers for a batch, of which none are kept."""
        return FORWARD * BATCH * math.prod(data.shape[:2]) if device.type == "cpu" else PREPARING

    def estimate(self, data: Outline, work: Workspace) -> float | None:
        images, backbone = self.views * data.images(self.pool), self.backbone.task.pretraining.backbone
        of_classifier = self.views == 1 and self.pool.startswith("base/") and frozen_backbone(backbone) is not None
        if of_classifier and not self.backbone.cached(work.home):
            return 0.0  # the pretraining computes them, to train the classifier on
        device = self.place(work).device
        with threads(host_threads(device)):
            return images * feature_seconds(backbone, data.shape, device) if data.shape else None

    def run(self, work: Workspace) -> None:
        self.backbone.prepared(work).features(self.pool, self.views)
