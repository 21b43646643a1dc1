"""Pretraining on base/train: network and base classifier are trained together by cross-entropy, then frozen for good.

The parts of the training are apart: :func:`~ifsl_bench.backbones.images.plan_epoch` draws the batches and their
augmentation, the recipe's loss is minimised, :attr:`PretrainingTrainer.optimiser` and the task's schedule say how, and
:meth:`PretrainingTrainer.train` is the loop, with a checkpoint after each epoch.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.device import PrecisionChoice, choose_precision, describe_device, disable_tf32
from ifsl_bench.backbones.find_recipe import find_recipe, make_recipe, naming_recipe_errors
from ifsl_bench.backbones.heads import fit_head_with_facts
from ifsl_bench.backbones.image_views import apply_augmentation, draw_augmentation
from ifsl_bench.backbones.images import DeviceBatchLoader, HostBatchLoader, load_batches, make_batch_loader, plan_epoch
from ifsl_bench.backbones.networks import LinearHead
from ifsl_bench.backbones.pretrained import (
    HeadKind,
    HeadNotIncludedError,
    PretrainedBackbone,
    PretrainingCheckpoint,
    format_accuracies,
    make_pretraining_key,
    open_pretrained,
    steps_and_passes,
)
from ifsl_bench.backbones.recipe import ParameterGroup, Recipe, RecipeBackbone, TrainingStep, View
from ifsl_bench.backbones.weights import install_packaged
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.tasks.task import CROSS_ENTROPY_RECIPE, INCLUDED_BACKBONE, Task
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine_path
from ifsl_bench.utils.locks import hold_lock
from ifsl_bench.utils.progress import LEARNING_RATE, Reporter

SAVED_WEIGHTS_DTYPE = torch.float16  # what the weights of a finished pretraining are rounded to, and stored as
EPOCH_SELECTION_POOL = "base/val"  # images that an epoch is selected on, where a recipe's option asks for that
# Steps from one look at the loss to the next, since a look waits for the device; the last is looked at
STEPS_BETWEEN_LOGS = 10
EVALUATION_BATCH_SIZE = 256  # images of base/train that features are computed of at once


class PretrainingTrainer(PretrainingCheckpoint):
    """A pretraining in progress; arguments as of :class:`~ifsl_bench.backbones.pretrained.PretrainingCheckpoint`."""

    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device
    ) -> None:
        super().__init__(folder, task, dataset, head, seed, device)
        self.recipe, self.choice = self._make_recipe(), find_recipe(task.recipe_reference or CROSS_ENTROPY_RECIPE)
        self.best: dict[str, Tensor] = {}  # the state that is taken in the end, where the best epoch's is
        if self.choice.selects_best and not dataset.has_pool(EPOCH_SELECTION_POOL):
            raise UserError(
                f"recipe {self.choice.label} selects an epoch on {EPOCH_SELECTION_POOL}, and data set "
                f"{dataset.name} has no "
                f"such images; leave select=best out"
            )
        self.steps, self.passes = steps_and_passes(task, self.recipe)
        spec = task.pretraining.with_number_of_steps(self.steps)
        self.schedule, self.decay = spec.schedule, spec.weight_decay
        self.groups = [part for group in self.recipe.parameter_groups() for part in self._divide_by_decay(group)]
        self.parameters = [parameter for group in self.groups for parameter in group.parameters]
        precision = choose_precision(device)
        self.info = {
            "key": folder.name,
            "finished": False,
            "epoch": 0,
            "seconds": 0.0,
            "seed": seed,
            "rng": "order, crops and dropout of epoch e are drawn from a generator seeded by (purpose, seed, e)",
            "bf16": precision.bf16,
            "precision": f"{'bf16 autocast' if precision.bf16 else 'float32'}, channels_last: {precision.reason}",
            "device": describe_device(device),
            "processes": [],
            **({"recipe": self.choice.label} if task.recipe_reference else {}),
        }

    def _make_recipe(self) -> Recipe:
        """Return the recipe to train by; of plain cross-entropy it has the network and the head of this checkpoint."""
        if isinstance(self.network, RecipeBackbone):
            return self.network.recipe
        with torch.random.fork_rng(devices=[]):
            plain = make_recipe(find_recipe(CROSS_ENTROPY_RECIPE), self.network, len(self.head.weight), 0)
        plain.head = self.head
        return plain

    def _divide_by_decay(self, group: ParameterGroup) -> list[ParameterGroup]:
        """Divide a group by weight decay: one without a decay of its own has the task's, of matrices and larger."""
        parameters = list(group.parameters)  # which may be an iterator
        if group.decay is not None:
            return [ParameterGroup(parameters, group.rate, group.decay)]
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        others = [parameter for parameter in parameters if parameter.dim() < 2]
        return [ParameterGroup(matrices, group.rate, self.decay), ParameterGroup(others, group.rate, 0.0)]

    @cached_property
    def optimiser(self) -> torch.optim.Optimizer:
        """SGD, made when it is needed: a finished training needs none, and importing it takes a second."""
        groups = [
            {"params": list(group.parameters), "weight_decay": group.decay, "factor": group.rate}
            for group in self.groups
            if group.parameters
        ]
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD(groups, 0.0, self.task.pretraining.momentum, fused=fused)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the weights of network and head, and the optimiser's momentum, as :meth:`_state_tensors` names them."""
        super().load_tensors(tensors)
        self.best = {name.removeprefix("best."): x for name, x in tensors.items() if name.startswith("best.")}
        for i, parameter in enumerate(self.parameters):
            if f"momentum.{i}" in tensors:  # in the parameter's own layout, which fused steps need
                buffer = torch.empty_like(parameter).copy_(tensors[f"momentum.{i}"])
                self.optimiser.state[parameter]["momentum_buffer"] = buffer

    def _network_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of network and head, by the names that they are stored under."""
        parts = (("network", self.network), ("head", self.head))
        return {f"{part}.{name}": x for part, module in parts for name, x in module.state_dict().items()}

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = self._network_tensors()
        if self.info["finished"]:
            for part, module in (("network", self.network), ("head", self.head)):
                for name, value in module.named_parameters():
                    tensors[f"{part}.{name}"] = value.detach().to(
                        SAVED_WEIGHTS_DTYPE
                    )  # exact: they were rounded before
            return {name: x for name, x in tensors.items() if not self._is_training_only(name)}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        for i, parameter in enumerate(self.parameters):
            buffer = self.optimiser.state[parameter].get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{i}"] = buffer
        return tensors

    def _is_training_only(self, name: str) -> bool:
        """Return whether a tensor of :meth:`_network_tensors` is of no use after the training."""
        part, _, tensor = name.partition(".")
        network = self.network
        return part == "network" and isinstance(network, RecipeBackbone) and network.is_training_only(tensor)

    def _save_checkpoint(self) -> None:
        self.info = self.store.write_tensors(self._state_tensors(), self.info)

    def train(self, reporter: Reporter, use_compile: bool = False) -> None:
        """Train to the end, from where it is.

        Args:
            reporter: shows loss, accuracy and learning rate.
            use_compile: let torch.compile make the network's kernels.

        Raises:
            UserError: the loss became infinite or NaN, or a file may not be read or written.
            CorruptFile: the images are not what was written.
        """
        spec = self.task.pretraining
        for name in ("base/train", *self.held_out_pools):
            self.dataset.check_image_checksum(name)
        pool, recipe = self.dataset.pool("base/train"), self.recipe
        batch, steps_per_epoch = spec.batch_size_and_steps_of_epoch(len(pool))
        feed = self._start_training()
        if use_compile:
            recipe.backbone.compile()
        if self.info["processes"][-1:] != [1]:  # earlier versions also trained in several
            self.info["processes"] = [*self.info["processes"], 1]
        start, spent = time.perf_counter(), self.info["seconds"]
        how = f"{self.kind} head" if self.task.recipe_reference is None else f"recipe {self.task.recipe_reference}"
        title = f"pretraining {spec.backbone}, {how}, seed {self.seed}"
        done = self.info["epoch"] * steps_per_epoch
        reporter.say(f"{title}: {self.info['precision']}")
        with reporter.report_stage(title, self.steps, min(done, self.steps)) as stage:
            while done < self.steps:
                epoch = self.info["epoch"]
                steps = min(steps_per_epoch, self.steps - done)
                with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                    torch.manual_seed(derive_seed("dropout", self.seed, epoch))
                    # The thread that gathers images ends with the epoch, however that ends.
                    with closing(self._load_batches(feed, epoch, batch, steps)) as loaded:
                        for at, views, labels in loaded:
                            stage.advance(1, **self._train_step(views, labels, at))
                    self._end_epoch(at)
                done += steps_per_epoch
                self.info |= {"epoch": epoch + 1, "seconds": spent + time.perf_counter() - start}
                if done < self.steps:
                    self._save_checkpoint()
        if self.best:
            super().load_tensors(self.best)
            reporter.say(f"{title}: weights after epoch {self.info['best']['epoch']} of {self.info['epoch']} are taken")
        recipe.eval()
        recipe.autocast = nullcontext
        self._round_parameters()
        if self.task.recipe_reference is not None:
            self._fit_head()
        accuracy = {name: self._measure_accuracy(self.dataset.pool(name), batch) for name in self.held_out_pools}
        reporter.say(f"{title}: accuracy {format_accuracies(accuracy)}")
        self.info |= {"finished": True, "accuracy": accuracy, "seconds": spent + time.perf_counter() - start}
        self.info["rounded"] = str(SAVED_WEIGHTS_DTYPE).removeprefix("torch.")
        self._save_checkpoint()

    def _end_epoch(self, at: TrainingStep) -> None:
        """Let the recipe follow an epoch that ends with this step, and keep its weights where they are the best."""
        recipe, autocast = self.recipe, self.recipe.autocast
        self._check_state(f"after step {at.step + 1} of {self.steps}")
        recipe.eval()
        recipe.autocast = nullcontext
        random = np.random.Generator(np.random.PCG64(derive_seed("recipe epoch", self.seed, at.epoch)))
        with naming_recipe_errors(self.choice), torch.no_grad():
            recipe.after_epoch(replace(at, random=random), BaseImages(self))
        if self.choice.selects_best:
            self._fit_head()
            accuracy = self._measure_accuracy(self.dataset.pool(EPOCH_SELECTION_POOL), EVALUATION_BATCH_SIZE)
            if not self.best or accuracy > self.info["best"]["accuracy"]:
                self.info["best"] = {"epoch": at.epoch + 1, "accuracy": accuracy}
                self.best = {name: x.detach().clone() for name, x in self._network_tensors().items()}
        recipe.train()
        recipe.autocast = autocast

    @property
    def _has_plain_views(self) -> bool:
        """Whether the feed cuts and normalises the images, which is faster than views that are drawn here."""
        return tuple(self.recipe.views) == (View(),)

    def _start_training(self) -> HostBatchLoader | DeviceBatchLoader:
        """Set the recipe to training, and return what brings the images."""
        precision = PrecisionChoice(self.info["bf16"], "")
        self.recipe.autocast = lambda: precision.autocast(self.device)
        self.recipe.train()
        normalise = self.normalise if self._has_plain_views else lambda images: images
        return make_batch_loader(self.dataset.pool("base/train"), normalise, self.device)

    def _load_batches(
        self, feed: HostBatchLoader | DeviceBatchLoader, epoch: int, batch: int, steps: int
    ) -> Generator[tuple[TrainingStep, list[Tensor], Tensor]]:
        """Yield the steps of an epoch: where it is, the views [B, C, h, w] and the labels [B]."""
        pool, spec = self.dataset.pool("base/train"), self.task.pretraining
        first = epoch * spec.batch_size_and_steps_of_epoch(len(pool))[1]
        drawn = plan_epoch(pool, spec, self.seed, epoch, batch, steps)
        if not self._has_plain_views:
            drawn = replace(drawn, crops_by_batch=None)
        colours = np.random.Generator(np.random.PCG64(derive_seed("views", self.seed, epoch)))
        with closing(feed.load_batches(drawn)) as loaded:
            for step, (images, labels) in enumerate(loaded, first):
                views = [images] if self._has_plain_views else []
                for view in self.recipe.views if not self._has_plain_views else ():
                    values = draw_augmentation(view, len(images), spec.crop_padding, spec.flip, colours).to(self.device)
                    views.append(self.normalise(apply_augmentation(images, view, values)))
                random = np.random.Generator(np.random.PCG64(derive_seed("recipe", self.seed, step)))
                looks = step % STEPS_BETWEEN_LOGS == 0 or step == first + steps - 1
                yield TrainingStep(step, self.steps, epoch, random, looks), views, labels

    def _train_step(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, float]:
        """Train on a batch; loss and accuracy are read from the device only now and then."""
        rate = self.schedule.rate_at(at.step, self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["factor"]
        with naming_recipe_errors(self.choice):
            terms = self.recipe.loss(views, labels, at)
            scalars = list(terms.values()) if isinstance(terms, dict) else []
            loss = scalars[0] if len(scalars) == 1 else sum(scalars)
            if not isinstance(loss, Tensor) or loss.dim():
                raise UserError(
                    f"recipe {self.choice.label}: loss() returned {terms!r:.80}, expected a dict of scalars"
                )
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self.optimiser.step()
            self.recipe.after_step(at)
        if not at.is_logged:
            return {}
        parts = terms if len(terms) > 1 else {}
        shown = {"loss": loss.detach(), **{name: term.detach() for name, term in parts.items()}, **at.logged_values}
        values = dict(zip(shown, torch.stack([x.float() for x in shown.values()]).tolist(), strict=True))  # one wait
        if not np.isfinite(values["loss"]):
            raise self._divergence_error(f"the loss is {values['loss']} at step {at.step + 1} of {self.steps}")
        return {name: 100 * x if name == "accuracy" else x for name, x in values.items()} | {LEARNING_RATE: rate}

    def _fit_head(self) -> None:
        """Fit the linear base classifier on the features of base/train, or take the recipe's own."""
        head = self.recipe.classifier()
        if head is None:
            pool = self.dataset.pool("base/train")
            with torch.no_grad(), disable_tf32():
                batches = (self.network(images) for _, images in self.load_images(pool))
                rows = np.concatenate([x.cpu().numpy() for x in batches])
            labels, classes = pool.labels.astype(np.int64), len(pool.class_starts) - 1
            fitted, _ = fit_head_with_facts("linear", rows, labels, classes, self.decay, self.device)
            assert isinstance(fitted, LinearHead)
            head = fitted
        self.head.load_state_dict(head.state_dict())
        with torch.no_grad():
            for value in self.head.parameters():
                value.copy_(value.to(SAVED_WEIGHTS_DTYPE))

    @torch.no_grad()
    def _round_parameters(self) -> None:
        """Round the parameters to half precision; the statistics of batch norm, which are no parameters, stay whole.

        Before accuracy and features are taken, so that weights that were stored and read again give the same ones.
        """
        for module in (self.network, self.head):
            for value in module.parameters():
                value.copy_(value.to(SAVED_WEIGHTS_DTYPE))
        self._check_state(f"in half precision, whose largest number is {torch.finfo(SAVED_WEIGHTS_DTYPE).max:g}")

    def _check_state(self, where: str) -> None:
        """Raise :class:`UserError` for weights that are not finite; what is not kept, as a mask, may be infinite.

        Args:
            where: words that follow "is not finite".
        """
        for name, x in self._network_tensors().items():
            broken = torch.isnan(x) if self._is_training_only(name) else ~torch.isfinite(x)
            if bool(broken.any()):
                part, _, tensor = name.partition(".")
                part = "base classifier" if part == "head" else "backbone"
                raise self._divergence_error(f"the {part}'s {tensor} is not finite {where}")

    def _divergence_error(self, what: str) -> UserError:
        rate = self.task.pretraining.schedule.rate
        return UserError(f"pretraining diverged: {what}; lower pretraining.schedule.rate (now {rate}) in the task file")

    def load_images(self, pool: Pool, batch: int = EVALUATION_BATCH_SIZE) -> Generator[tuple[np.ndarray, Tensor]]:
        """Yield the rows and the images of a pool, batch after batch, as the network takes them.

        Args:
            pool: the images.
            batch: images of a batch.
        """
        rows = np.split(np.arange(len(pool)), range(batch, len(pool), batch))
        with closing(load_batches(pool.images, rows, self.device)) as loaded:
            for chosen, images in zip(rows, loaded, strict=True):
                yield chosen, self.normalise(images)

    @torch.no_grad()
    def _measure_accuracy(self, pool: Pool, batch: int) -> float:
        """Return the share of a pool's images that is labelled right; the device is waited for once, at the end."""
        labels = torch.from_numpy(pool.labels).to(self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        for rows, images in self.load_images(pool, batch):
            with disable_tf32():
                logits = self.head(self.network(images))
            hits += (logits.argmax(1) == labels[rows[0] : rows[-1] + 1]).sum()
        return int(hits) / len(pool)


class BaseImages:
    """base/train as :meth:`Recipe.after_epoch` gets it: images as the network takes them, and labels, in batches.

    Args:
        trainer: has the images.
    """

    def __init__(self, trainer: PretrainingTrainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        pool = self.trainer.dataset.pool("base/train")
        for rows, images in self.trainer.load_images(pool):
            yield images, torch.from_numpy(pool.labels[rows].astype(np.int64)).to(self.trainer.device)


def measure_seconds_per_step(task: Task, dataset: Dataset, device: torch.device, most: float = 1.0) -> float:
    """Measure how long a step of pretraining takes, with the network and the images that it will have.

    The first step, which makes what the others use again, is left out. Nothing is stored.

    Args:
        task: Defines how to train.
        dataset: The images.
        device: Where to train.
        most: Seconds, without the first step, after which no further one is begun; there are two to ten.
    """
    spec = task.pretraining
    trainer = PretrainingTrainer(Path(), task, dataset, "linear", task.pretraining_seed(0), device)
    pool = dataset.pool("base/train")
    with closing(
        trainer._load_batches(trainer._start_training(), 0, spec.batch_size_and_steps_of_epoch(len(pool))[0], 1)
    ) as loaded:
        at, views, labels = next(loaded)
    seconds: list[float] = []
    while len(seconds) < 2 or (sum(seconds[1:]) < most and len(seconds) < 10):
        start = time.perf_counter()
        trainer._train_step(
            views, labels, replace(at, is_logged=True)
        )  # whose loss is read, so that the device is waited for
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def pretrain(
    home: Paths,
    task: Task,
    dataset: Dataset,
    head: HeadKind,
    seed: int,
    device: torch.device,
    reporter: Reporter,
    use_compile: bool = False,
) -> PretrainedBackbone:
    """Load a pretraining from the cache, take it from the package where that has it, resume it, or start it.

    One that is damaged, or is another's, is set aside with a warning, and starts again.

    Args:
        home: where it is kept.
        task: defines how to train.
        dataset: the images.
        head: "linear" or "cosine".
        seed: of training; a task may have one pretraining for all of them.
        device: where to train.
        reporter: shows how far it is.
        use_compile: let torch.compile make the network's kernels; for accelerators.

    Raises:
        UserError: the loss became infinite or NaN, or a file may not be read or written.
        CorruptFile: the images to train on are not what was written.
    """
    opened = open_pretrained(home, task, dataset, head, seed, device, reporter)
    if opened is not None:
        return opened
    key = make_pretraining_key(task, dataset.fingerprint, head, seed)
    folder = home.pretrained / key
    with hold_lock(folder, reporter.warn):
        install_packaged(home, key, reporter)
        trainer = PretrainingTrainer(folder, task, dataset, head, task.pretraining_seed(seed), device)
        try:
            trainer.restore_from_checkpoint()
        except CorruptFile as error:
            reporter.warn(f"{error}; training starts anew, the damaged files are in {quarantine_path(folder)}")
            trainer = PretrainingTrainer(folder, task, dataset, head, task.pretraining_seed(seed), device)
        if not trainer.info["finished"]:
            if task.pretraining.backbone == INCLUDED_BACKBONE:
                raise HeadNotIncludedError(task)
            trainer.train(reporter, use_compile)
    return trainer.to_pretrained_backbone(reporter)
