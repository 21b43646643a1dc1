"""The workspace of stages: folders, a device, and a task with its features, episodes and base classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ifsl_bench.backbones.contract import is_frozen
from ifsl_bench.backbones.device import CPU_DEVICE, DeviceChoice, StageType, choose_device, choose_stage_device
from ifsl_bench.backbones.features import (
    ClassMoments,
    FeaturePool,
    compute_class_moments,
    compute_features,
    feature_folder,
    flatten_images_to_rows,
    make_base_classifier,
    make_feature_pool,
    parse_seen_stage,
    read_feature_record,
    subtract_feature_mean,
)
from ifsl_bench.backbones.networks import CentredNetwork, LaterStages, PrecomputedFeatures
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    PretrainedBackbone,
    make_pretraining_key,
    open_pretrained,
    shares_linear_backbone,
)
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.metadata import open_data
from ifsl_bench.plugin.method import Base, BaseNetwork
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.episode_protocol import EPISODES_PROTOCOL
from ifsl_bench.protocols.loader import Loader
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler, make_training_sampler
from ifsl_bench.protocols.tasks.task import SUPPORT_POOL, Side, Task
from ifsl_bench.solvers.numba_code_cache import set_cache_folder
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine_path
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import check_value_types, read_checksummed, write_checksummed
from ifsl_bench.utils.threads import (
    limit_evaluation_threads,
    limit_threads_in_block,
    max_busy_threads,
    whole_machine_threads,
)

if TYPE_CHECKING:
    from ifsl_bench.experiments.training_curves import CurveLogs
    from ifsl_bench.protocols.sampling.sequences import SequenceSampler


def host_threads(device: torch.device) -> int:
    """Return the threads for pretraining and features: all cores on the CPU, this process's share elsewhere."""
    return whole_machine_threads() if device.type == "cpu" else max_busy_threads()


@dataclass(frozen=True)
class Workspace:
    """The folders of caches and results, the device that computes, and the reporter of the progress.

    Attributes:
        device_is_forced: whether everything is computed on ``device``; else :mod:`ifsl_bench.backbones.device` decides
            which stages are, and the others are computed on the host.
        curve_logs: where trainings write their curves; None for no curves.
    """

    home: Paths = field(default_factory=Paths.locate)
    device: torch.device = field(default_factory=lambda: choose_device("auto"))
    reporter: Reporter = field(default_factory=Reporter)
    device_is_forced: bool = False
    curve_logs: CurveLogs | None = None
    _open_tasks: list[PreparedTask] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_cache_folder(self.home.cache / "compiled", self.reporter.say)

    def choose_device(self, kind: StageType, episodes: int = 0, few: int | None = None) -> DeviceChoice:
        """Return the device for a stage, see :func:`~ifsl_bench.backbones.device.choose_stage_device`.

        Args:
            kind: of stage.
            episodes: of a step of meta-training.
            few: a step of meta-training with fewer episodes is faster on the host; None where a step of any number is.
        """
        return choose_stage_device(kind, self.device, self.device_is_forced, episodes, few)

    def curve_reporter(self, kind: str, key: str) -> Reporter:
        """Return the reporter of a training, which also writes its curves if a run has any.

        Args:
            kind: of stage.
            key: of the training.
        """
        if self.curve_logs is None:
            return self.reporter
        from ifsl_bench.experiments.training_curves import CurveReporter

        return CurveReporter(self.curve_logs, f"{kind}/{key}", self.reporter)

    def open_task(self, task: Task, head: HeadKind, seed: int, sees: str = "features") -> PreparedTask:
        """Return the task with this pretraining; the last one stays open, its features in memory.

        Args:
            task: to prepare.
            head: of the base classifier.
            seed: of training.
            sees: what methods are given, as :attr:`.Method.sees` has it.
        """
        if not self._open_tasks or self._open_tasks[0].made_of != (task, head, seed, sees):
            # A workspace of its own, with nothing open: in a reference cycle with this one, network and features would
            # stay in memory until Python next looks for cycles, which after many runs is many networks later.
            self._open_tasks[:] = [PreparedTask(task, head, seed, replace(self), sees)]
        return self._open_tasks[0]


def workspace(
    home: str | Path | None = None,
    results: str | Path | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Workspace:
    """Make the workspace; see :meth:`ifsl_bench.utils.files.Paths.locate` for the defaults.

    Args:
        home: the folder of the cache, and of results where these are not given.
        results: the folder of results.
        device: ``cpu``, ``cuda`` or ``cuda:1`` for everything; ``auto`` leaves it to a rule which stages an accelerator
            gets, if there is one, see :mod:`ifsl_bench.backbones.device`.
        reporter: receives the progress; by default only warnings are issued.

    Example:
        >>> ifsl_bench.workspace(home="my-home", device="cpu").home.cache.name
        'my-home'
    """
    return Workspace(Paths.locate(home, results), choose_device(device), reporter or Reporter(), device != "auto")


class PreparedTask:
    """A task with one pretraining: features, episodes and the base classifier, each made when first needed.

    Args:
        seed: of training; a task may have one pretraining for all of them.
        sees: what methods are given of each image, as :attr:`.Method.sees` has it.
    """

    def __init__(self, task: Task, head: HeadKind, seed: int, work: Workspace, sees: str = "features") -> None:
        self.task, self.head, self.seed, self.work, self.sees = task, head, seed, work, sees
        self.made_of = (task, head, seed, sees)
        self._features: dict[tuple[str, int, int], np.ndarray] = {}
        self._pools: dict[tuple[str, int, torch.device], FeaturePool] = {}

    @cached_property
    def dataset(self) -> Dataset:
        return open_data(self.task, self.work.home, self.work.reporter)

    @cached_property
    def pretrained_backbone(self) -> PretrainedBackbone:
        work, device = self.work, self.work.choose_device("pretraining").device
        with limit_threads_in_block(host_threads(device)):
            if is_frozen(self.task.pretraining):
                from ifsl_bench.backbones.frozen import pretrain_frozen

                place = work.choose_device("features")
                frozen = work.home, self.task, self.dataset, self.head
                return pretrain_frozen(*frozen, place.device, work.reporter, str(place))
            task, data = self.task, self.dataset
            if not shares_linear_backbone(self.task, self.head):
                reporter = work.curve_reporter(
                    "pretraining", make_pretraining_key(task, data.fingerprint, self.head, self.seed)
                )
                made_of = work.home, task, data, self.head, self.seed, device, reporter
                if (opened := open_pretrained(*made_of)) is not None:
                    return opened
                from ifsl_bench.backbones.trainer import pretrain

                return pretrain(*made_of)
            from ifsl_bench.backbones.heads import fit_cosine_head

            # It has the same features, and reads those of base/train alone.
            linear = PreparedTask(self.task, "linear", self.seed, work)
            return fit_cosine_head(
                work.home, task, data, linear.pretrained_backbone, linear.open_features, self.seed, work.reporter
            )

    def open_features(self, pool: str, views: int = 1, stage: int = 0) -> np.ndarray:
        """Return the features of a pool, float32 [views * n, D], as the network has them; verified when first opened.

        Args:
            pool: by name, with n images.
            views: 1 for the plain images, else the number of augmented ones of each.
            stage: for maps, float16 [views * n, C, H, W]: those behind so many stages of the network; below 0, behind
                all but so many.
        """
        if (pool, views, stage) not in self._features:
            made_of, place = (
                (self.task, self.dataset, self.pretrained_backbone, pool),
                self.work.choose_device("features"),
            )
            how = (place.device, self.work.reporter, views, str(place))
            with limit_threads_in_block(host_threads(place.device)):
                self._features[pool, views, stage] = compute_features(self.work.home, *made_of, *how, stage)
        return self._features[pool, views, stage]

    def feature_devices(self) -> dict[str, str]:
        """Return the devices that computed the opened features, as far as recorded: one entry, or one a pool."""
        places = {}
        for pool, views, stage in self._features:
            of = views, self.dataset.fingerprint_prefix_of_pool(pool), stage
            folder = feature_folder(self.work.home, self.pretrained_backbone.features_key, pool, self.task, *of)
            if place := str(read_feature_record(folder).get("place", "")):
                name = "maps" if stage else "features"
                places[f"{name} of {pool}" + (f", {views} views" if views > 1 else "")] = place
        return {"features": next(iter(places.values()))} if len(set(places.values())) == 1 else places

    @cached_property
    def base_classifier(self) -> Base:
        """The base classifier, on the CPU."""
        name = "base/train"
        if isinstance(network := self.pretrained_backbone.network, PrecomputedFeatures):  # base/train has but the means
            parts = {part: getattr(network, part).cpu().numpy() for part in network.MOMENT_NAMES}
            return make_base_classifier(self.pretrained_backbone, ClassMoments(**parts))
        folder = feature_folder(self.work.home, self.pretrained_backbone.features_key, name, self.task)
        features, pool, mean = (
            self.open_features(name),
            self.dataset.pool(name),
            self.pretrained_backbone.base_feature_mean,
        )
        with limit_threads_in_block(host_threads(CPU_DEVICE)):
            moments = compute_class_moments(folder, features, pool.class_starts, self.work.reporter)

        def images() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.from_numpy(subtract_feature_mean(np.array(features), mean)), torch.from_numpy(
                pool.labels.astype(np.int64)
            )

        return replace(
            make_base_classifier(self.pretrained_backbone, moments), images=images, network=self._base_network()
        )

    def _base_network(self) -> BaseNetwork | None:
        """Return the network, on the CPU, and its images, for methods that see images; None for others."""
        if self.sees == "features":
            return None
        pretrained, labels = self.pretrained_backbone, self.dataset.pool("base/train").labels.astype(np.int64)
        device, network, shape = next(pretrained.network.parameters()).device, pretrained.network, self.dataset.shape
        if pretrained.base_feature_mean is not None:
            network = CentredNetwork(network, torch.from_numpy(pretrained.base_feature_mean).float().to(device))
        if stage := parse_seen_stage(self.sees):
            network, shape = LaterStages(network, stage), self.open_features("base/train", 1, stage).shape[1:]

        def normalise(rows: torch.Tensor) -> torch.Tensor:
            inputs = rows.unflatten(1, shape)
            return inputs.float() if stage else pretrained.normalise_images(inputs.to(device))

        def images() -> tuple[torch.Tensor, torch.Tensor]:
            return self._load_pixel_rows("base/train", 1), torch.from_numpy(labels)

        return BaseNetwork(network, normalise, images).to(CPU_DEVICE)

    def _load_pixel_rows(self, name: str, views: int) -> torch.Tensor:
        """Return the numbers of a pool's images or maps, a row for each, as a memory map."""
        if stage := parse_seen_stage(self.sees):
            return flatten_images_to_rows(self.open_features(name, views, stage))
        self.dataset.check_image_checksum(name)
        return flatten_images_to_rows(self.dataset.pool(name).images)

    def feature_pool(self, name: str, views: int = 1, device: torch.device = CPU_DEVICE) -> FeaturePool:
        """Return a pool, copied to the device once: its features, or what else methods see, and base logits.

        Args:
            name: of the pool.
            views: 1 for the plain images, else the number of augmented ones of each.
            device: of the features.
        """
        if (name, views, device) not in self._pools:
            features, pool = self.open_features(name, views), self.dataset.pool(name)
            with limit_evaluation_threads():
                made = make_feature_pool(
                    features, pool, self.base_classifier, device, self.pretrained_backbone.base_feature_mean
                )
            if self.sees != "features":
                made = replace(made, features=self._load_pixel_rows(name, views).to(device))
            self._pools[name, views, device] = made
        return self._pools[name, views, device]

    def sampler(self, side: Side, device: torch.device = CPU_DEVICE) -> EpisodeSampler | SequenceSampler:
        """Return the sampler of a side's episodes or sequences.

        Args:
            side: of the task.
            device: of the indices and labels that are drawn.

        Raises:
            UserError: they cannot be drawn.
        """
        return protocol_of_task(self.task).make_sampler(
            self.task, side, self.seed, self._class_starts, device, self._class_names, self.class_order
        )

    def training_sampler(self, sessions: int, device: torch.device = CPU_DEVICE) -> EpisodeSampler:
        """Return the sampler of training episodes with the novel classes of several sessions.

        See :func:`~ifsl_bench.protocols.sampling.episodes.make_training_sampler`.

        Args:
            sessions: whose novel classes and base queries an episode has.
            device: of the indices and labels that are drawn.

        Raises:
            UserError: the pools have too few classes or images.
        """
        return make_training_sampler(self.task, sessions, self.seed, self._class_starts, device, self._class_names)

    def _class_starts(self, pool: str) -> np.ndarray:
        return self.dataset.pool(pool).class_starts

    def _class_names(self, pool: str) -> Sequence[str]:
        return self.dataset.pool(pool).class_names

    @cached_property
    def class_order(self) -> np.ndarray | None:
        """The order of novel classes in a published list, [T N] labels of novel/test; None elsewhere."""
        return protocol_of_task(self.task).published_class_order(self.task, self._class_names)

    def loader(self, side: Side, views: int = 1, device: torch.device = CPU_DEVICE) -> Loader:
        """Return the loader of a side's episodes or sequences.

        Args:
            side: training is on episodes always.
            views: 1 for the plain images, else how many augmented ones of each.
            device: of the features.
        """
        task, sampler = self.task, self.sampler(side, device)
        novel, base, support = (
            self.feature_pool(name, views, device) if name in task.pools(side) else None
            for name in (task.pool(side, "novel"), task.pool(side, "base"), SUPPORT_POOL)
        )
        assert novel is not None
        protocol = EPISODES_PROTOCOL if side == "train" else protocol_of_task(task)
        return protocol.make_loader(task, sampler, novel, base, support)

    def episode_loader(self, side: Side, device: torch.device = CPU_DEVICE, views: int = 1) -> EpisodeLoader:
        """Return the loader of a side's episodes; raise :class:`UserError` where it has sequences of sessions.

        Args:
            side: of the task.
            device: of the features.
            views: as of :meth:`make_loader`.
        """
        loader = self.loader(side, views, device)
        if not isinstance(loader, EpisodeLoader):
            raise UserError(f"task {self.task.name} is in sessions; take a task in episodes")
        return loader

    def check_episodes(self, side: Side) -> None:
        """Check that the episodes of a side can be drawn, and that the test ones have the expected digest.

        Raises:
            UserError: they cannot, or they differ.
        """
        self.sampler(side)
        if side == "test":
            self.check_digest()

    def check_digest(self) -> None:
        """Compare the test episodes with the pinned or first recorded digest.

        A record that is damaged is set aside with a warning, and the digest recorded again.

        Raises:
            UserError: they differ, so that results would not be comparable; or the record cannot be read or written.
        """
        task, count = self.task, self.task.evaluation.episodes
        digest = self.sampler("test").digest(count)
        data = self.dataset.fingerprint[:12] + self.dataset.novel_fingerprint[:12]
        record = self.work.home.cache / "digests" / f"{task.name}-{task.hash}-{data}.json"
        expected = task.digest or self._recorded_digest(record)
        if expected is None:
            write_checksummed(record, {"task": task.name, "task_hash": task.hash, "episodes": count, "digest": digest})
        elif expected != digest:
            where = "its task file" if task.digest else record
            raise UserError(
                f"the test episodes of {task.name} have digest {digest[:16]}, and {expected[:16]} in {where}: stored "
                "results were measured on other episodes"
            )

    def _recorded_digest(self, record: Path) -> str | None:
        """Return the digest in the record of this task; None where there is no record."""
        try:
            entries = read_checksummed(record)
            check_value_types(record, entries, {"task_hash": str, "digest": str})
            if entries["task_hash"] != self.task.hash:
                raise CorruptFile(f"{record} is of another task")
        except FileNotFoundError:
            return None
        except CorruptFile as error:
            aside = quarantine_path(record)
            self.work.reporter.warn(f"{error}; the digest is recorded again, the old file is {aside}")
            return None
        return str(entries["digest"])
