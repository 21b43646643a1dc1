"""Stage 1: the backbone and the base classifier, trained on base/train by cross-entropy, then frozen for good."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.device import Precision, choose_precision, describe_device, whole_float32
from ifsl_bench.backbones.feeding import draw_epoch, make_feed
from ifsl_bench.backbones.images import batches
from ifsl_bench.backbones.networks import CosineHead, LinearHead
from ifsl_bench.backbones.pretrained import Checkpoint, HeadKind, NotIncluded, Pretrained, in_percent, pretraining_key
from ifsl_bench.backbones.processes import ALONE, World, share_norms
from ifsl_bench.backbones.weights import adopt
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.protocols.tasks.task import INCLUDED, Task
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, quarantine
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.progress import RATE, NullReporter, Reporter
from ifsl_bench.utils.seeds import seed_of

ROUNDED = torch.float16  # what the weights of a finished pretraining are rounded to, and stored as
LOOK = 10  # steps from one look at the loss to the next, since a look waits for the device


class _Classifier(nn.Module):
    """Images [B, C, H, W] to logits [B, K]: backbone and base classifier as one module, for processes to share."""

    def __init__(self, network: Backbone, head: LinearHead | CosineHead, precision: Precision) -> None:
        super().__init__()
        self.network, self.head, self.precision = network, head, precision

    def forward(self, images: Tensor) -> Tensor:
        with self.precision.autocast(images.device):
            features = self.network(images)
        return self.head(features.float())


class Trainer(Checkpoint):
    """A pretraining as far as it has come.

    Args:
        world: the processes that share each batch. Each has a trainer, and all of them call the same methods in the
            same order, but for :meth:`restore`, which is for the first one.

    Raises:
        UserError: the processes cannot share it; or mean and std do not fit the images.
    """

    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device,
        world: World = ALONE,
    ) -> None:  # fmt: skip
        super().__init__(folder, task, dataset, head, seed, device)
        self.world, self.network = world, share_norms(self.network, device, world)
        if self._batch[0] < world.size:
            raise UserError(f"a batch of {self._batch[0]} images is too small for {world.size} processes; start fewer")
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
        """The optimiser, made when it is needed: a finished training needs none, and importing it takes a second."""
        spec, free = self.task.pretraining, self.parameters[len(self.decayed) :]
        groups = [{"params": self.decayed, "weight_decay": spec.weight_decay}, {"params": free, "weight_decay": 0.0}]
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD([g for g in groups if g["params"]], 0.0, spec.momentum, fused=fused)

    def agree(self) -> None:
        """Gives the other processes what the first one has restored."""
        if self.world.size == 1:
            return
        began = self.info["epoch"] > 0 or self.info["finished"]
        state = {k: v.cpu() for k, v in self._tensors().items()} if self.world.first and began else {}
        self.info, state = self.world.told((self.info, state))
        if state:
            self.load(state)

    @property
    def _batch(self) -> tuple[int, int]:
        """Images of a step, of all processes, and steps of an epoch."""
        return self.task.pretraining.epoch(self.dataset.manifest["pools"]["base/train"]["shape"][0])

    def load(self, tensors: dict[str, Tensor]) -> None:
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
                if (buffer := self.optimiser.state[parameter].get("momentum_buffer")) is not None:
                    tensors[f"momentum.{i}"] = buffer
        return tensors

    def _save(self) -> None:
        if self.world.first:
            self.info = self.store.save(self._tensors(), self.info)

    def train(self, reporter: Reporter, compiled: bool = False) -> None:
        """Trains to the end, from where it is.

        Args:
            compiled: let torch.compile make the network's kernels.

        Raises:
            UserError: the loss became infinite or NaN, or a file may not be read or written.
            CorruptFile: the images are not what was written.
        """
        spec, world = self.task.pretraining, self.world
        for name in ("base/train", *self.held_out) if world.first else ():
            self.dataset.check_images(name)
        world.wait()
        pool, (batch, per_epoch) = self.dataset.pool("base/train"), self._batch
        feed = make_feed(pool, self.normalise, self.device)
        model = self._model(compiled).train()
        start, spent = time.perf_counter(), self.info["seconds"]
        if self.info["processes"][-1:] != [world.size]:
            self.info["processes"] = [*self.info["processes"], world.size]
        title = f"pretraining {spec.backbone}, {self.kind} head, seed {self.seed}"
        done = self.info["epoch"] * per_epoch
        reporter.say(f"{title}: {self.info['precision']}" + (f", {world.size} processes" if world.size > 1 else ""))
        with reporter.stage(title, spec.steps, min(done, spec.steps)) as stage:
            while done < spec.steps:
                epoch = self.info["epoch"]
                steps = min(per_epoch, spec.steps - done)
                drawn = draw_epoch(pool, spec, self.seed, epoch, batch, steps, world)
                devices = [self.device] if self.device.type == "cuda" else []
                own = [world.rank] if world.rank else []  # other images, so other numbers
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(seed_of("dropout", self.seed, epoch, *own))
                    loaded = feed.batches(drawn)
                    with closing(loaded):  # its thread ends with the epoch, however that ends
                        for i, (images, labels) in enumerate(loaded):
                            stage.advance(1, **self._step(model, images, labels, done + i))
                done += per_epoch
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
        self.info = world.told(self.info)  # with the checksum of what the first one wrote

    @torch.no_grad()
    def _round(self) -> None:
        """Rounds the parameters to half precision; the statistics of batch norm, which are no parameters, stay whole.

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

    def _model(self, compiled: bool) -> nn.Module:
        """The module that a step calls: the network and its head, compiled or not, as one of the processes has them."""
        model: nn.Module = _Classifier(self.network, self.head, Precision(self.info["bf16"], ""))
        if self.world.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids, process_group=self.world.group)
        return torch.compile(model) if compiled else model  # type: ignore[return-value]

    def _step(self, model: nn.Module, images: Tensor, labels: Tensor, step: int) -> dict[str, float]:
        """Trains on a batch, of which this process has a part; figures are read from the device only now and then."""
        spec, size, (batch, _) = self.task.pretraining, self.world.size, self._batch
        for group in self.optimiser.param_groups:
            group["lr"] = spec.schedule.at(step, spec.steps)
        logits = model(images)
        if size == 1:
            loss = F.cross_entropy(logits, labels)
        else:  # parts may differ by an image: the mean over processes, which gradients become, is that over the batch
            loss = F.cross_entropy(logits, labels, reduction="sum") * (size / batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        if step % LOOK and step != spec.steps - 1:
            return {}
        hits = (logits.detach().argmax(1) == labels).sum() * (size / batch)
        value, accuracy = (self.world.total(torch.stack([loss.detach(), hits])) / size).tolist()  # one wait for both
        if not np.isfinite(value):
            raise UserError(
                f"pretraining diverged: the loss is {value} at step {step + 1} of {spec.steps}; "
                f"lower pretraining.schedule.rate (now {spec.schedule.rate}) in the task file"
            )
        return {"loss": value, "accuracy": 100 * accuracy, RATE: spec.schedule.at(step, spec.steps)}

    @torch.inference_mode()
    def _accuracy(self, pool: Pool, batch: int) -> float:
        """Each process labels some of the batches; one wait, at the end."""
        starts = range(self.world.rank * batch, len(pool), self.world.size * batch)
        rows = [np.arange(start, min(start + batch, len(pool))) for start in starts]
        labels = torch.from_numpy(pool.labels).to(self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        with closing(batches(pool.images, rows, self.device)) as loaded:
            for chosen, images in zip(rows, loaded, strict=True):
                with whole_float32():
                    logits = self.head(self.network(self.normalise(images)))
                hits += (logits.argmax(1) == labels[chosen[0] : chosen[-1] + 1]).sum()
        return int(self.world.total(hits)) / len(pool)


def pretrain(
    home: Paths,
    task: Task,
    dataset: Dataset,
    head: HeadKind,
    seed: int,
    device: torch.device,
    reporter: Reporter,
    world: World = ALONE,
    compiled: bool = False,
) -> Pretrained:
    """Loads the pretraining from the cache, takes it from the package where that has it, resumes it, or starts it.

    One that is damaged, or is another's, is set aside with a warning, and starts anew.

    Args:
        world: the processes that share each batch, all of which call this; the first one writes and takes the lock.
        compiled: let torch.compile make the network's kernels; for devices.

    Raises:
        UserError: the loss became infinite or NaN, a file may not be read or written, or the processes cannot share
            this pretraining.
        CorruptFile: the images to train on are not what was written.
    """
    key = pretraining_key(task, dataset.fingerprint, head, seed)
    folder = home.pretrained / key

    def new() -> Trainer:
        return Trainer(folder, task, dataset, head, task.pretraining_seed(seed), device, world)

    with ExitStack() as held:
        trainer = _restored(new, home, key, held, reporter) if world.first else new()
        trainer.agree()
        if not trainer.info["finished"]:
            if task.pretraining.backbone == INCLUDED:
                raise NotIncluded(task)
            trainer.train(reporter, compiled)
    return trainer.finished(reporter if world.first else NullReporter())


def _restored(new: Callable[[], Trainer], home: Paths, key: str, held: ExitStack, reporter: Reporter) -> Trainer:
    """The training as far as it has come; one that is not finished, with its folder's lock, which ``held`` keeps."""
    trainer, folder = new(), home.pretrained / key
    with suppress(CorruptFile):  # before the lock, which a read-only folder does not grant
        trainer.restore()
        if trainer.info["finished"]:
            return trainer
    held.enter_context(locked(folder, reporter.warn))
    adopt(home, key, reporter)
    trainer = new()
    try:
        trainer.restore()
    except CorruptFile as error:
        reporter.warn(f"{error}; training starts anew, the damaged files are in {quarantine(folder)}")
        trainer = new()
    return trainer
