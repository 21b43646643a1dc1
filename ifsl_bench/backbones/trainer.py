"""Pretraining on base/train: network and base classifier are trained together by cross-entropy, then frozen for good.

The parts of the training are apart: :func:`~ifsl_bench.backbones.images.draw_epoch` draws the batches and their
augmentation, :meth:`Trainer.loss` is minimised, :attr:`Trainer.optimiser` and the task's schedule say how, and
:meth:`Trainer.train` is the loop, with a checkpoint after each epoch.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.device import Precision, choose_precision, describe_device, whole_float32
from ifsl_bench.backbones.images import batches, draw_epoch, make_feed
from ifsl_bench.backbones.networks import CosineHead, LinearHead
from ifsl_bench.backbones.pretrained import (
    Checkpoint,
    HeadKind,
    NotIncluded,
    Pretrained,
    in_percent,
    open_pretrained,
    pretraining_key,
)
from ifsl_bench.backbones.weights import install_packaged
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.protocols.sampling.draws import seed_of
from ifsl_bench.protocols.tasks.task import INCLUDED, Task
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.progress import RATE, Reporter

ROUNDED = torch.float16  # what the weights of a finished pretraining are rounded to, and stored as
LOG_EVERY = 10  # steps from one look at the loss to the next, since a look waits for the device


class _Classifier(nn.Module):
    """Images [B, C, H, W] to logits [B, K]: backbone and base classifier as one module, to be compiled as one."""

    def __init__(self, network: Backbone, head: LinearHead | CosineHead, precision: Precision) -> None:
        super().__init__()
        self.network, self.head, self.precision = network, head, precision

    def forward(self, images: Tensor) -> Tensor:
        with self.precision.autocast(images.device):
            features = self.network(images)
        return self.head(features.float())


class Trainer(Checkpoint):
    """A pretraining in progress; arguments as of :class:`~ifsl_bench.backbones.pretrained.Checkpoint`."""

    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device
    ) -> None:
        super().__init__(folder, task, dataset, head, seed, device)
        every = [*self.network.parameters(), *self.head.parameters()]
        self.decayed = [parameter for parameter in every if parameter.dim() >= 2]
        self.parameters = [*self.decayed, *(parameter for parameter in every if parameter.dim() < 2)]
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
        }

    @cached_property
    def optimiser(self) -> torch.optim.Optimizer:
        """SGD, made when it is needed: a finished training needs none, and importing it takes a second."""
        spec, free = self.task.pretraining, self.parameters[len(self.decayed) :]
        groups = [{"params": self.decayed, "weight_decay": spec.weight_decay}, {"params": free, "weight_decay": 0.0}]
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD([g for g in groups if g["params"]], 0.0, spec.momentum, fused=fused)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the weights of network and head, and the optimiser's momentum, as :meth:`_tensors` names them."""
        super().load(tensors)
        for i, parameter in enumerate(self.parameters):
            if f"momentum.{i}" in tensors:  # in the parameter's own layout, which fused steps need
                buffer = torch.empty_like(parameter).copy_(tensors[f"momentum.{i}"])
                self.optimiser.state[parameter]["momentum_buffer"] = buffer

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"network.{k}": v for k, v in self.network.state_dict().items()}
        tensors |= {f"head.{k}": v for k, v in self.head.state_dict().items()}
        if self.info["finished"]:
            for part, module in (("network", self.network), ("head", self.head)):
                for name, value in module.named_parameters():
                    tensors[f"{part}.{name}"] = value.detach().to(ROUNDED)  # exact: they were rounded before
        else:
            for i, parameter in enumerate(self.parameters):
                buffer = self.optimiser.state[parameter].get("momentum_buffer")
                if buffer is not None:
                    tensors[f"momentum.{i}"] = buffer
        return tensors

    def _save(self) -> None:
        self.info = self.store.save(self._tensors(), self.info)

    def train(self, reporter: Reporter, compiled: bool = False) -> None:
        """Train to the end, from where it is.

        Args:
            reporter: shows loss, accuracy and learning rate.
            compiled: let torch.compile make the network's kernels.

        Raises:
            UserError: the loss became infinite or NaN, or a file may not be read or written.
            CorruptFile: the images are not what was written.
        """
        spec = self.task.pretraining
        for name in ("base/train", *self.held_out):
            self.dataset.check_images(name)
        pool = self.dataset.pool("base/train")
        batch, steps_per_epoch = spec.epoch(len(pool))
        feed = make_feed(pool, self.normalise, self.device)
        model: nn.Module = _Classifier(self.network, self.head, Precision(self.info["bf16"], "")).train()
        if compiled:
            model = torch.compile(model)  # type: ignore[assignment]
        if self.info["processes"][-1:] != [1]:  # earlier versions also trained in several
            self.info["processes"] = [*self.info["processes"], 1]
        start, spent = time.perf_counter(), self.info["seconds"]
        title = f"pretraining {spec.backbone}, {self.kind} head, seed {self.seed}"
        done = self.info["epoch"] * steps_per_epoch
        reporter.say(f"{title}: {self.info['precision']}")
        with reporter.stage(title, spec.steps, min(done, spec.steps)) as stage:
            while done < spec.steps:
                epoch = self.info["epoch"]
                drawn = draw_epoch(pool, spec, self.seed, epoch, batch, min(steps_per_epoch, spec.steps - done))
                with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                    torch.manual_seed(seed_of("dropout", self.seed, epoch))
                    with closing(feed.batches(drawn)) as loaded:  # its thread ends with the epoch, however that ends
                        for step, (images, labels) in enumerate(loaded, done):
                            stage.advance(1, **self._step(model, images, labels, step))
                done += steps_per_epoch
                self.info |= {"epoch": epoch + 1, "seconds": spent + time.perf_counter() - start}
                if done < spec.steps:
                    self._save()
        self.network.eval()
        self._round()
        accuracy = {name: self._accuracy(self.dataset.pool(name), batch) for name in self.held_out}
        reporter.say(f"{title}: accuracy {in_percent(accuracy)}")
        self.info |= {"finished": True, "accuracy": accuracy, "seconds": spent + time.perf_counter() - start}
        self.info["rounded"] = str(ROUNDED).removeprefix("torch.")
        self._save()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what a step minimises, the mean cross-entropy of a batch.

        Args:
            logits: float32 [B, K].
            labels: int64 [B].
        """
        return F.cross_entropy(logits, labels)

    def _step(self, model: nn.Module, images: Tensor, labels: Tensor, step: int) -> dict[str, float]:
        """Train on a batch; loss and accuracy are read from the device only now and then."""
        spec = self.task.pretraining
        rate = spec.schedule.at(step, spec.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        logits = model(images)
        loss = self.loss(logits, labels)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        if step % LOG_EVERY and step != spec.steps - 1:
            return {}
        hits = (logits.detach().argmax(1) == labels).float().mean()
        value, accuracy = torch.stack([loss.detach(), hits]).tolist()  # one wait for both
        if not np.isfinite(value):
            raise UserError(
                f"pretraining diverged: the loss is {value} at step {step + 1} of {spec.steps}; "
                f"lower pretraining.schedule.rate (now {spec.schedule.rate}) in the task file"
            )
        return {"loss": value, "accuracy": 100 * accuracy, RATE: rate}

    @torch.no_grad()
    def _round(self) -> None:
        """Round the parameters to half precision; the statistics of batch norm, which are no parameters, stay whole.

        Before accuracy and features are taken, so that weights that were stored and read again give the same ones.
        """
        for part, module in (("backbone", self.network), ("base classifier", self.head)):
            for _, value in module.named_parameters():
                value.copy_(value.to(ROUNDED))
            broken = [name for name, value in module.state_dict().items() if not bool(torch.isfinite(value).all())]
            if broken:
                raise UserError(
                    f"pretraining diverged: the {part}'s {broken[0]} is not finite in half precision, whose largest "
                    f"number is {torch.finfo(ROUNDED).max:g}; lower pretraining.schedule.rate "
                    f"(now {self.task.pretraining.schedule.rate}) in the task file"
                )

    @torch.inference_mode()
    def _accuracy(self, pool: Pool, batch: int) -> float:
        """Return the share of a pool's images that is labelled right; the device is waited for once, at the end."""
        rows = [np.arange(start, min(start + batch, len(pool))) for start in range(0, len(pool), batch)]
        labels = torch.from_numpy(pool.labels).to(self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        with closing(batches(pool.images, rows, self.device)) as loaded:
            for chosen, images in zip(rows, loaded, strict=True):
                with whole_float32():
                    logits = self.head(self.network(self.normalise(images)))
                hits += (logits.argmax(1) == labels[chosen[0] : chosen[-1] + 1]).sum()
        return int(hits) / len(pool)


def seconds_per_step(task: Task, dataset: Dataset, device: torch.device, most: float = 1.0) -> float:
    """Measure how long a step of pretraining takes, with the network and the images that it will have.

    The first step is left out if there is another. Nothing is stored.

    Args:
        task: Defines how to train.
        dataset: The images.
        device: Where to train.
        most: Seconds after which no further step is begun; there are at most ten.
    """
    spec = task.pretraining
    trainer = Trainer(Path(), task, dataset, "linear", task.pretraining_seed(0), device)
    pool = dataset.pool("base/train")
    batch, steps_per_epoch = spec.epoch(len(pool))
    model = _Classifier(trainer.network, trainer.head, choose_precision(device)).train()
    drawn = draw_epoch(pool, spec, 0, 0, batch, min(steps_per_epoch, 10))
    seconds: list[float] = []
    with closing(make_feed(pool, trainer.normalise, device).batches(drawn)) as loaded:
        for images, labels in loaded:
            start = time.perf_counter()
            trainer._step(model, images, labels, 0)  # whose loss is read, so that the device is waited for
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > most:
                break
    return float(np.median(seconds[1:] or seconds))


def pretrain(
    home: Paths,
    task: Task,
    dataset: Dataset,
    head: HeadKind,
    seed: int,
    device: torch.device,
    reporter: Reporter,
    compiled: bool = False,
) -> Pretrained:
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
        compiled: let torch.compile make the network's kernels; for accelerators.

    Raises:
        UserError: the loss became infinite or NaN, or a file may not be read or written.
        CorruptFile: the images to train on are not what was written.
    """
    opened = open_pretrained(home, task, dataset, head, seed, device, reporter)
    if opened is not None:
        return opened
    key = pretraining_key(task, dataset.fingerprint, head, seed)
    folder = home.pretrained / key
    with locked(folder, reporter.warn):
        install_packaged(home, key, reporter)
        trainer = Trainer(folder, task, dataset, head, task.pretraining_seed(seed), device)
        try:
            trainer.restore()
        except CorruptFile as error:
            reporter.warn(f"{error}; training starts anew, the damaged files are in {quarantine(folder)}")
            trainer = Trainer(folder, task, dataset, head, task.pretraining_seed(seed), device)
        if not trainer.info["finished"]:
            if task.pretraining.backbone == INCLUDED:
                raise NotIncluded(task)
            trainer.train(reporter, compiled)
    return trainer.finished(reporter)
