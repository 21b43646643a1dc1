"""Stages before any method comes in: their base, data set, pretraining, features.

Each is a small description that can be pickled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ifsl_bench.backbones.contract import is_frozen
from ifsl_bench.backbones.device import DeviceChoice, StageType
from ifsl_bench.backbones.features import BATCH, bank_folder, recorded
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    NotIncluded,
    features_key,
    features_sha256,
    is_offered,
    packaged_file,
    pretrained_sha256,
    pretraining_key,
    shares_linear_backbone,
)
from ifsl_bench.data.datasets import is_prepared, rough_seconds
from ifsl_bench.data.pools import entry_of
from ifsl_bench.data.preparing.metadata import DatasetMetadata, data_of, fingerprint_of, novel_fingerprint
from ifsl_bench.data.views import NOVEL, prefix_of
from ifsl_bench.experiments.rates import Amount
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.protocols.sampling.episodes import task_stream, training_sampler
from ifsl_bench.protocols.tasks.task import INCLUDED, Side, Task
from ifsl_bench.utils.checkpoint import begun
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.threads import cores

PREPARING = 500 << 20  # bytes that an import takes, with the processes that decode
# Bytes a pixel of a batch: of a step of training, for which a small network on letters took 2,000 and ResNet-10 on
# photographs 2,800, and of a forward pass alone.
STEP, FORWARD = 3000, 1000


class Stage(ABC):
    """A piece of work: a description with what it waits for, what it makes, and how that is computed.

    Attributes:
        kind: of stage, in a word.
        trains: whether it trains a method, or tries a trained one.
        placed_as: kind of work, by which its place is chosen.
    """

    kind: ClassVar[str]
    trains: ClassVar[bool] = False
    placed_as: ClassVar[StageType] = "data"

    def __str__(self) -> str:
        return self.told("" if self.shown_seed is None else f", seed {self.shown_seed}")

    @abstractmethod
    def told(self, seeds: str) -> str:
        """Names the stage for people, with ``seeds`` after it, if it has a seed: ", seed 0", ", seeds 0 to 4"."""

    @property
    def shown_seed(self) -> int | None:
        """The seed that it is told with; None where it has none."""
        return None

    @property
    def family(self) -> Hashable:
        """Equal for stages that plans tell of in one line."""
        return self.told("")

    @abstractmethod
    def key(self, home: Paths) -> str:
        """Names its artefact; equal keys of one kind of stage mean equal artefacts."""

    def inputs(self) -> Sequence[Stage]:
        """The stages it waits for. It makes what they should have made and did not, if it comes to that."""
        return ()

    def artefacts(self, home: Paths) -> list[tuple[Stage, Path]]:
        """The models and trials that it makes, with their files or folders."""
        return []

    def cached(self, home: Paths) -> bool:
        """Tells whether the artefact is there; never, where it leaves none."""
        return False

    def place(self, work: Workspace) -> DeviceChoice:
        """Says where it runs, and why there."""
        return work.place(self.placed_as)

    def threads(self) -> int:
        """The threads that it keeps busy on the host's processor; :func:`cores` of them are the whole machine."""
        return 1

    def memory(self, data: DatasetMetadata, device: torch.device) -> int:
        """Bytes on the host, roughly, beyond those of an idle process; ``device`` is where it computes."""
        return 0

    @abstractmethod
    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount | None:
        """The work that is left; None where it is unknown; raises :class:`UserError` where nobody can do it."""

    @abstractmethod
    def compute(self, work: Workspace) -> Any:
        """Opens the artefact, or makes it, from where an earlier run stopped."""


@dataclass(frozen=True)
class PrepareData(Stage):
    """The data set, from which the episodes of some sides can be drawn, those of training with so many sessions."""

    kind = "data"
    task: Task
    sides: tuple[Side, ...] = ()
    sessions: int = 1

    def told(self, seeds: str) -> str:
        others = f" with novel classes of {self.task.novel_from}" if self.task.novel_from else ""
        return f"data set {self.task.dataset.name}{others}"

    def key(self, home: Paths) -> str:
        return "+".join(spec.name for spec in data_of(self.task, home))

    def cached(self, home: Paths) -> bool:
        return all(is_prepared(home, spec.name) for spec in data_of(self.task, home))

    def check(self, data: DatasetMetadata) -> None:
        """Raises :class:`UserError` where episodes cannot be drawn, as far as that is known."""

        def starts(pool: str) -> np.ndarray:
            return entry_of(data.starts, pool, self.task.dataset.name)

        for side in self.sides if data.starts else ():
            task_stream(self.task, side, 0, starts, classes=lambda pool: data.classes.get(pool, ()))
        if self.sessions > 1 and data.starts:
            training_sampler(self.task, self.sessions, 0, starts)
        if self.task.sessions and self.task.sessions.published and (classes := data.classes.get("novel/test")):
            from ifsl_bench.data.published_splits import order_of

            order_of(self.task.novel_data, classes)

    def threads(self) -> int:
        return cores()

    def memory(self, data: DatasetMetadata, device: torch.device) -> int:
        return PREPARING

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount | None:
        lacking = [spec.name for spec in data_of(self.task, work.home) if not is_prepared(work.home, spec.name)]
        each = [rough_seconds(name) for name in lacking]
        return None if None in each else Amount(self.kind, "+".join(lacking) + "/cpu", 1.0, sum(filter(None, each)))

    def compute(self, work: Workspace) -> None:
        prepared = PreparedTask(self.task, "linear", 0, work)  # episodes depend on no backbone
        _ = prepared.dataset
        for side in self.sides:
            prepared.check_episodes(side)
        if self.sessions > 1:
            prepared.training_sampler(self.sessions)


@dataclass(frozen=True)
class CheckEpisodes(Stage):
    """A check that one side's episodes can be drawn, and are those that stored results were measured on."""

    kind = "episodes"
    task: Task
    side: Side

    def told(self, seeds: str) -> str:
        return f"{self.side} {'episodes' if self.side == 'train' else self.task.kind.drawn} of {self.task.name}"

    def key(self, home: Paths) -> str:
        return f"{self.task.name}-{self.task.hash[:12]}-{self.side}"

    def inputs(self) -> Sequence[Stage]:
        return [PrepareData(self.task)]

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount | None:
        return Amount(self.kind, f"{self.task.name}/cpu", 1.0, 1.0)

    def compute(self, work: Workspace) -> None:
        PreparedTask(self.task, "linear", 0, work).check_episodes(self.side)


@dataclass(frozen=True)
class Pretrain(Stage):
    """The backbone and its base classifier. ``seed`` is that of training."""

    kind = placed_as = "pretraining"
    task: Task
    head: HeadKind
    seed: int

    def told(self, seeds: str) -> str:
        return f"pretraining {self.task.pretraining.backbone}, {self.head} head{seeds}"

    @property
    def shown_seed(self) -> int:
        return self.task.pretraining_seed(self.seed)

    def key(self, home: Paths, fingerprint: str = "?") -> str:
        """The key on data of that fingerprint, where they are neither prepared nor pinned."""
        return pretraining_key(self.task, fingerprint_of(self.task.dataset, home) or fingerprint, self.head, self.seed)

    def features_key(self, home: Paths) -> str:
        """Names the folder of its features."""
        return features_key(self.task, fingerprint_of(self.task.dataset, home) or "?", self.head, self.seed)

    @property
    def linear(self) -> Pretrain | None:
        """The pretraining on whose backbone this head is fitted; None where it has its own."""
        return replace(self, head="linear") if shares_linear_backbone(self.task, self.head) else None

    def inputs(self) -> Sequence[Stage]:
        if linear := self.linear:
            pools = ["base/train"] if self.task.pretraining.backbone != INCLUDED else []
            return [PrepareData(self.task), linear, *(Features(linear, pool, 1) for pool in pools)]
        return [PrepareData(self.task)]

    def weights(self, home: Paths) -> str | None:
        """The checksum of the weights in the cache; None where there are none."""
        return pretrained_sha256(home, self.key(home))

    def cached(self, home: Paths) -> bool:
        return self.weights(home) is not None

    def perhaps_shipped(self, home: Paths) -> bool:
        """Whether the package has its weights, if the data, which are not prepared, are those of the weights."""
        from ifsl_bench.backbones.weights import packaged_weights

        if fingerprint_of(self.task.dataset, home):
            return False
        fingerprints = {str(weights.definition["data"]) for weights in packaged_weights().values()}
        return any(packaged_file(self.key(home, fingerprint)) for fingerprint in fingerprints)

    def threads(self) -> int:
        return cores()

    def memory(self, data: DatasetMetadata, device: torch.device) -> int:
        """Activations of a batch; images are mapped, and the system may drop their pages."""
        return STEP * self.task.pretraining.batch * math.prod(data.shape[:2]) if device.type == "cpu" else PREPARING

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount | None:
        spec, images, home = self.task.pretraining, data.images("base/train"), work.home
        held_out = data.images("base/val") + data.images("base/test")
        if not data.shape:
            return None
        second = self.linear is not None
        if spec.backbone == INCLUDED and data.fingerprint and not (second or packaged_file(self.key(home))):
            raise NotIncluded(self.task)
        seen = images + held_out  # by a frozen backbone, beside whose features the classifier costs little
        if not is_frozen(spec):
            batch, each = spec.epoch(images)
            begun_at = begun(home.pretrained / self.key(home), "epoch") * each / max(1, spec.steps)
            seen = round(spec.steps * batch * (1 - min(1.0, begun_at))) + held_out // 3
        if is_offered(home, self.key(home)) or second:
            seen = 0  # the weights come with the package, or are a classifier's alone
        return Amount(self.kind, _named(spec.backbone, data, self.place(work)), seen * math.prod(data.shape[:2]))

    def prepared(self, work: Workspace) -> PreparedTask:
        return work.prepared(self.task, self.head, self.seed)

    def compute(self, work: Workspace) -> None:
        _ = self.prepared(work).pretrained


@dataclass(frozen=True)
class Features(Stage):
    """The features of a pool under a pretraining, of the plain images or of ``views`` augmented ones of each."""

    kind = placed_as = "features"
    backbone: Pretrain
    pool: str
    views: int

    def told(self, seeds: str) -> str:
        return f"features of {self.pool}" + (f", {self.views} views" if self.views > 1 else "")

    def key(self, home: Paths) -> str:
        task, origin = self.backbone.task, ""
        if task.novel_from and self.pool in NOVEL:
            origin = prefix_of(novel_fingerprint(task, home)) or "?"
        folder = bank_folder(home, self.backbone.features_key(home), self.pool, task, self.views, origin)
        return folder.relative_to(home.features).as_posix()

    def inputs(self) -> Sequence[Stage]:
        return [self.backbone]

    def cached(self, home: Paths) -> bool:
        there, weights = recorded(home.features / self.key(home)), features_sha256(home, self.backbone.key(home))
        return weights is not None and there.get("pretraining_sha256") == weights

    def threads(self) -> int:
        return cores()

    def memory(self, data: DatasetMetadata, device: torch.device) -> int:
        """Activations of the largest layers for a batch, of which none are kept."""
        return FORWARD * BATCH * math.prod(data.shape[:2]) if device.type == "cpu" else PREPARING

    def amount(self, data: DatasetMetadata, work: Workspace) -> Amount | None:
        images, spec = self.views * data.images(self.pool), self.backbone.task.pretraining
        of_classifier = self.views == 1 and self.pool.startswith("base/") and is_frozen(spec)
        if of_classifier and not self.backbone.cached(work.home):
            images = 0  # the pretraining computes them, to train the classifier on
        if not data.shape:
            return None
        return Amount(self.kind, _named(spec.backbone, data, self.place(work)), images * math.prod(data.shape[:2]))

    def compute(self, work: Workspace) -> None:
        self.backbone.prepared(work).features(self.pool, self.views)


def _named(backbone: str, data: DatasetMetadata, place: DeviceChoice) -> str:
    """A network on images of a size, on a device, as rates are kept."""
    return f"{backbone}/{'x'.join(map(str, data.shape))}/{place.device.type}"
