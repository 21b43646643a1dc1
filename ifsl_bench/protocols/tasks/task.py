"""Tasks: what is measured, on which data, after which training.

:mod:`ifsl_bench.protocols.tasks.task_files` reads and finds them. This module imports no torch.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ifsl_bench.utils.files import sha256_json

Side = Literal["train", "val", "test"]
QueryClassKind = Literal["base", "novel"]
WEIGHTS_CHECKSUM_DIGITS = 16  # of the checksum of weights that a user gives, in the names of tasks and files
NO_BACKBONE = "none"  # the backbone of data that are features already
CROSS_ENTROPY_RECIPE = "ce"  # the recipe of plain cross-entropy
MEAN_CENTRED = "mean"  # what becomes of a frozen backbone's features where nothing is said
SUPPORT_POOL = "novel/support"  # the pool of the supports of a published list
INCLUDED_BACKBONE = "included"  # the backbone of embedded features, which come with their base classifiers


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An unknown key, a missing one or one of the wrong type is an error that names it."""


def _without_none(value: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return all values but for the named ones that are None."""
    return {name: part for name, part in value.items() if part is not None or name not in names}


class DataSpec(StrictStruct, frozen=True):
    """The data set of a task and how its images enter a network: ``(x / 255 - mean) / std`` for each channel."""

    name: str
    fingerprint: str | None = None  # the content that the digests in this file belong to
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    partial: bool | None = None  # whether the data of that fingerprint are a part of their source; None: not said
    obtain: str = ""  # what to tell someone who does not have the data


class Schedule(StrictStruct, frozen=True):
    """Learning rate ``rate``, times 0.1 at every step in ``drops``; or cosine from ``rate`` to zero after a warm-up.

    Example:
        >>> ifsl_bench.Schedule(rate=0.001, drops=(4000,)).shape
        'drops'
    """

    rate: float
    drops: tuple[int, ...] = ()
    shape: Literal["drops", "cosine"] = "drops"
    warmup: int = 0

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: counted from 0.
            steps: of the whole training.
        """
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if self.shape == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, steps - self.warmup)))
        return self.rate * 0.1 ** sum(step >= drop for drop in self.drops)

    def stretched(self, factor: float) -> Schedule:
        """Return the schedule for ``factor`` times as many steps."""
        drops = tuple(sorted({max(1, round(drop * factor)) for drop in self.drops}))
        return msgspec.structs.replace(self, drops=drops, warmup=round(self.warmup * factor))


class Pretraining(StrictStruct, frozen=True):
    """Stage 1: backbone and base classifier on base/train by cross-entropy, SGD with momentum.

    A backbone with weights from elsewhere stays as it is; of the rest of this only ``weight_decay``, the penalty of the
    base classifier, and the augmentation of views concern it, and it is the same for every seed.

    ``seed`` is the seed of the one pretraining that every training seed starts from; None: each has its own.
    ``weights`` begins the checksum of a file of weights that the user gave for the backbone, which are used as they
    are, and ``pretrained_on`` is what they have seen, by the user's account: sets of images, joined by ":". ``centre``
    is "none" where the features of such a backbone are left as they are; else the mean of the features of base/train
    is subtracted. ``recipe`` is how the backbone is trained, see :mod:`ifsl_bench.backbones.recipe`; None: by
    cross-entropy.
    """

    backbone: str
    steps: int
    schedule: Schedule
    batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 5e-4
    crop_padding: int = 0  # pixels of zero padding before a random crop of the original size
    flip: bool = False  # horizontal, with probability one half
    norm_momentum: float = 0.1  # PyTorch's convention: the weight of the new batch
    seed: int | None = None
    weights: str | None = None
    pretrained_on: str | None = None
    centre: Literal["mean", "none"] | None = None
    recipe: str | None = None

    def definition_of_weights(self) -> dict[str, Any]:
        """Return everything that changes the weights, but for the seed."""
        value = msgspec.to_builtins(self)
        del value["seed"], value["pretrained_on"]
        return _without_none(value, "weights", "centre", "recipe")  # younger than the first pretrainings

    def batch_size_and_steps_of_epoch(self, images: int) -> tuple[int, int]:
        """Return the images of a step and the steps of an epoch, where base/train has ``images`` images."""
        batch = min(self.batch, images)
        return batch, max(1, images // max(1, batch))

    def with_number_of_steps(self, steps: int) -> Pretraining:
        """Return the pretraining with another number of steps.

        With few steps, running averages follow sooner, to forget where they began.
        """
        if steps == self.steps:
            return self
        schedule = self.schedule.stretched(steps / max(1, self.steps))
        momentum = max(self.norm_momentum, min(1.0, 3 / steps))  # of which (1 - momentum)^steps, 5% or less, is left
        return msgspec.structs.replace(self, steps=steps, schedule=schedule, norm_momentum=momentum)


class EpisodeSpec(StrictStruct, frozen=True):
    """The shape of an episode: ``ways`` novel classes, queries for each of them, base queries in all.

    No base queries means regular few-shot learning: no base class is in the softmax, of support or query.
    """

    ways: int = 5
    novel_queries: int = 5
    base_queries: int = 25


class MetaTraining(StrictStruct, frozen=True):
    """Stage 2: Adam on episodes.

    Example:
        >>> ifsl_bench.MetaTraining(steps=100, schedule=ifsl_bench.Schedule(rate=0.01)).validate_every
        1000
    """

    steps: int = 8000
    schedule: Schedule = Schedule(rate=1e-3, drops=(4000,))
    validate_every: int = 1000


class Evaluation(StrictStruct, frozen=True):
    """Stage 3. ``seed`` fixes the episodes; every method and every training seed sees the same ones.

    ``protocol`` names a registered protocol, see :mod:`ifsl_bench.protocols.protocol`; None: sessions where the task
    has some, else episodes.
    """

    episodes: int = 2000
    validation_episodes: int = 600
    seed: int = 0
    protocol: str | None = None

    @property
    def validation_halves(self) -> tuple[range, range]:
        """The validation episodes that options are chosen on, and those that checkpoints are chosen on."""
        middle = self.validation_episodes // 2
        return range(middle), range(middle, self.validation_episodes)


class SessionSpec(StrictStruct, frozen=True):
    """``count`` sessions of ``ways`` novel classes each, after a base session.

    An *order* deals ``count * ways`` classes into sessions; there are ``orders`` of them, and ``supports`` support sets
    for each. Sequence ``i`` has order ``i // supports``.

    ``queries``: of each novel class, from images that are not its supports. None: as many as a base class has
    on average, rounded down. Where supports have a pool of their own, queries are all images of the other pool.

    ``listed``: the classes are of a published list. Supports come from a pool of their own, novel/support; no
    class is left for validation, so that its sequences are of base classes, hidden as such, and of base/val's images.
    ``published``: the list to the letter, its order and its supports.
    ``memory``: "none" refuses methods that keep the supports of earlier sessions.
    """

    count: int
    ways: int
    orders: int = 100
    supports: int = 4
    queries: int | None = None
    listed: bool = False
    published: bool = False
    memory: Literal["none", "supports"] = "supports"

    @property
    def n_novel_classes(self) -> int:
        """Novel classes of a sequence."""
        return self.count * self.ways

    @property
    def n_sequences(self) -> int:
        return self.orders * self.supports

    def limited_to_classes(self, classes: int) -> SessionSpec:
        """Return the specification with as many sessions as ``classes`` novel classes suffice for; for validation."""
        return msgspec.structs.replace(self, count=min(self.count, classes // self.ways))

    def hiding_base_classes(self, base_classes: int) -> SessionSpec:
        """Return the specification with fewer sessions, where novel classes are base classes that are hidden.

        Novel classes then have their share of all. It is for validation where every class is either a base class or one
        of the test: K base and C novel classes become K - C' base and C' novel ones with C' at most K C / (K + C).
        """
        return self.limited_to_classes(base_classes * self.n_novel_classes // (base_classes + self.n_novel_classes))


class Task(StrictStruct, frozen=True):
    """One line of the leaderboard: data, pretraining, episodes, meta-training and evaluation.

    ``protocol`` is "separate" where novel/train is a pool of its own (tiered-ImageNet), and "shared" where novel/train
    *is* base/train and an episode's classes are hidden from the base classifier (mini-ImageNet). ``n_base_classes`` is
    None for all of the data set's; ``base_order`` is the number of a draw of base classes among all that a published
    list has, None for the list's own. ``recipe`` is how a run trains the backbone instead of the task's own recipe; the
    task and its episodes are the same, and its rows are told apart by it. ``novel_from`` is the data set that the novel
    classes of validation and testing come from, None for ``dataset``; images are normalised as for ``dataset`` all the
    same. ``variant_of`` names the task whose protocol this one departs from: tables keep the two apart.

    Example:
        >>> from ifsl_bench.protocols.tasks.task_files import packaged_tasks
        >>> task = packaged_tasks()["glyphs-5shot"]
        >>> isinstance(task, ifsl_bench.Task), task.shots
        (True, 5)
    """

    name: str
    title: str
    shots: int
    protocol: Literal["separate", "shared"]
    dataset: DataSpec
    pretraining: Pretraining
    episode: EpisodeSpec
    meta_training: MetaTraining
    evaluation: Evaluation
    base_classes: int | None = None
    base_order: int | None = None
    novel_from: str | None = None
    digest: str | None = None
    variant_of: str = ""
    sessions: SessionSpec | None = None
    recipe: str | None = None

    @property
    def has_base(self) -> bool:
        """Whether queries are of base classes too, so that a bias may weigh them against novel ones."""
        return self.sessions is not None or self.episode.base_queries > 0

    @property
    def query_class_kinds(self) -> tuple[QueryClassKind, ...]:
        """The classes that queries are of, novel ones first."""
        return ("novel", "base") if self.has_base else ("novel",)

    @property
    def test_size_text(self) -> str:
        """The number of test episodes or sequences, in words for lists of tasks: "2,000", "400 sequences"."""
        return f"{self.evaluation.episodes:,}{' sequences' if self.sessions else ''}"

    @property
    def cosine_on_linear(self) -> bool:
        """Whether a cosine head is fitted on the backbone of the linear pretraining, as sessions have it."""
        return self.sessions is not None

    @property
    def novel_data(self) -> str:
        """The data set that the novel classes of validation and testing are of."""
        return self.novel_from or self.dataset.name

    def definition(self) -> dict[str, Any]:
        """Return everything that changes a number, and nothing else."""
        value = msgspec.to_builtins(self)
        del value["title"], value["digest"], value["variant_of"], value["recipe"]
        del value["dataset"]["obtain"], value["dataset"]["fingerprint"], value["dataset"]["partial"]
        if self.sessions and self.sessions.memory == "supports":
            del value["sessions"]["memory"]
        if self.pretraining.centre == MEAN_CENTRED:  # what backbones from elsewhere do, and no others can
            value["pretraining"]["centre"] = None
        # Younger than the first stored results: absent where they change nothing.
        value["pretraining"] = _without_none(
            value["pretraining"], "seed", "weights", "pretrained_on", "centre", "recipe"
        )
        value["evaluation"] = _without_none(value["evaluation"], "protocol")
        return _without_none(value, "base_classes", "base_order", "novel_from", "sessions")

    @property
    def recipe_reference(self) -> str | None:
        """The recipe that trains the backbone; None for plain cross-entropy."""
        recipe = self.pretraining.recipe if self.recipe is None else self.recipe
        return None if recipe == CROSS_ENTROPY_RECIPE else recipe

    @property
    def hash(self) -> str:
        """16 hex digits that change whenever the definition does: a changed task is a new task."""
        return sha256_json(self.definition())[:16]

    def pretraining_seed(self, seed: int) -> int:
        """Return the seed of the pretraining that a training seed starts from."""
        return seed if self.pretraining.seed is None else self.pretraining.seed

    def pool(self, side: Side, part: QueryClassKind) -> str:
        """Return the pool of a side's base queries or novel classes (protocol of Ren et al. 2019, appendix).

        Args:
            side: "train", "val" or "test".
            part: "base" or "novel".
        """
        if self.hides_base_classes(side):
            return "base/train" if side == "train" else "base/val"
        if side == "train":
            return "base/val" if part == "base" else "novel/train"
        return f"{part}/{side}"

    def pools(self, side: Side) -> tuple[str, ...]:
        """Return the pools whose images are in a side's episodes."""
        pools = [self.pool(side, part) for part in self.query_class_kinds]
        return tuple(dict.fromkeys([*pools, *([SUPPORT_POOL] if self.has_separate_supports(side) else [])]))

    def has_separate_supports(self, side: Side) -> bool:
        """Return whether supports are of :data:`SUPPORT_POOL_NAME`: the other pool's images are all queries."""
        return side == "test" and self.sessions is not None and self.sessions.listed

    def hides_base_classes(self, side: Side) -> bool:
        """Return whether a side's novel classes are base classes, hidden as such for the episode."""
        if side == "val" and self.sessions is not None and self.sessions.listed:
            return True
        return side == "train" and self.protocol == "shared"

    def base_parity(self, side: Side) -> Literal["even", "odd"] | None:
        """Return the parity of the images, by index in each class, that a side's base queries may use.

        Where meta-training and validation both draw on base/val, the former takes even and the latter odd indices, so
        that no image both trains and selects a model.
        """
        if self.protocol == "shared" or side == "test":
            return None
        return "even" if side == "train" else "odd"
