"""Stage 1: the backbone and the base classifier, trained on base/train by cross-entropy, then frozen for good."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbone.device import Precision, choose_precision, describe_device
from ifsl_bench.backbone.images import Normalise, batches, crop_and_flip, gather
from ifsl_bench.backbone.networks import Backbone, CosineHead, LinearHead, channels_last, make_backbone, make_head
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, set_aside, sha256_json
from ifsl_bench.common.locks import locked
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.sealed import SECONDS, check_kinds, check_range
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.protocol.task import DataSpec, Task

HeadKind = Literal["linear", "cosine"]
RECIPE = 1  # raise it when the code below starts to give other weights from equal settings


@dataclass(frozen=True)
class Pretrained:
    """A finished pretraining.

    Attributes:
        key: identity of everything that made it.
        network: images [B, C, H, W] -> features [B, D], in evaluation mode.
        head: the base classifier.
        info: what was recorded: accuracy on base/val and base/test, precision, device, seconds.
    """

    key: str
    network: Backbone
    head: LinearHead | CosineHead
    normalise: Normalise
    info: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Checksum of the weights: a pretraining that is repeated elsewhere has the same key but other weights."""
        return str(self.info["tensors"]["sha256"])

    def entry(self) -> dict[str, Any]:
        """What a result says of the pretraining; accuracies in percent."""
        accuracy = {pool: round(100 * value, 4) for pool, value in self.info["accuracy"].items()}
        said = {name: self.info[name] for name in ("precision", "device")}
        return {"key": self.key, "sha256": self.sha256, "accuracy": accuracy, **said}


def pretraining_key(task: Task, fingerprint: str, head: HeadKind, seed: int) -> str:
    """What a pretraining is called on disk: readable, and different whenever the weights could differ.

    Args:
        seed: of training; a task may have one pretraining for all of them.
    """
    seed = task.pretraining_seed(seed)
    made_of = {
        "recipe": RECIPE,
        "data": fingerprint,
        "images": [task.dataset.mean, task.dataset.std],
        "pretraining": task.pretraining.definition(),
        "head": head,
        "seed": seed,
    }
    data = task.dataset.name
    if task.base_classes is not None:
        made_of["base_classes"] = task.base_classes
        data += f"+base-classes={task.base_classes}"
    return f"{data}-{task.pretraining.backbone}-{head}-seed{seed}-{sha256_json(made_of)[:12]}"


def pretrained_sha256(home: Home, key: str) -> str | None:
    """The checksum of a finished pretraining in the cache, None where there is none (a damaged one counts as none)."""
    try:
        info = CheckpointFolder(home.pretrained / key).info()
    except CorruptFile:
        return None
    return str(info["tensors"]["sha256"]) if info and info.get("finished") is True else None


def pretrain(
    home: Home, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device, reporter: Reporter
) -> Pretrained:
    """Loads the pretraining from the cache, resumes it, or starts it.

    One that is damaged, or is another's, is set aside with a warning, and starts anew.

    Raises:
        UserError: the loss became infinite or NaN, or a file may not be read or written.
        CorruptFile: the images to train on are not what was written.
    """
    key = pretraining_key(task, dataset.fingerprint, head, seed)
    folder = home.pretrained / key

    def new() -> _Trainer:
        return _Trainer(folder, task, dataset, head, task.pretraining_seed(seed), device)

    trainer = new()
    try:  # before the lock, which a read-only folder does not grant
        trainer.restore()
    except CorruptFile:
        trainer = new()
    if not trainer.info["finished"]:
        with locked(folder, reporter.warn):
            trainer = new()
            try:
                trainer.restore()
            except CorruptFile as error:
                aside = set_aside(folder)
                reporter.warn(f"{error}; training starts anew, the damaged files are in {aside}")
                trainer = new()
            if not trainer.info["finished"]:
                trainer.train(reporter)
    trainer.network.eval().requires_grad_(False)
    trainer.head.requires_grad_(False)
    return Pretrained(key, trainer.network, trainer.head, trainer.normalise, trainer.info)


class _Trainer:
    def __init__(
        self, folder: Path, task: Task, dataset: Dataset, head: HeadKind, seed: int, device: torch.device
    ) -> None:
        self.folder, self.task, self.dataset, self.kind, self.seed, self.device = (
            folder, task, dataset, head, seed, device,
        )  # fmt: skip
        spec = task.pretraining
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("initial weights", seed))
            self.network = make_backbone(spec.backbone, dataset.shape, spec.norm_momentum)
            classes = len(dataset.manifest["pools"]["base/train"]["classes"])
            self.head = make_head(head, self.network.features, classes)
        channels_last(self.network, device)
        self.head.to(device)
        self.normalise = make_normalise(task.dataset, dataset, device)
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for module in (self.network, self.head):
            for parameter in module.parameters():
                (decayed if parameter.dim() >= 2 else free).append(parameter)
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": free, "weight_decay": 0.0}]
        self.optimiser = torch.optim.SGD([g for g in groups if g["params"]], lr=0.0, momentum=spec.momentum)
        self.parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        precision = choose_precision(device)
        self.info: dict[str, Any] = {
            "key": folder.name,
            "finished": False,
            "epoch": 0,
            "seconds": 0.0,
            "seed": seed,
            "rng": "order, crops and dropout of epoch e are drawn from a generator seeded by (purpose, seed, e)",
            "bf16": precision.bf16,
            "precision": f"{'bf16 autocast' if precision.bf16 else 'float32'}, channels_last: {precision.reason}",
            "device": describe_device(device),
        }

    def restore(self) -> None:
        """Goes on from the state on disk, if there is one.

        Raises:
            CorruptFile: it is damaged or another's; this trainer is of no use then.
            UserError: it may not be read.
        """
        state = CheckpointFolder(self.folder).load()
        if state is None:
            return
        self._check(state.info)
        try:
            self._load(state.tensors)
        except (RuntimeError, KeyError) as error:
            raise CorruptFile(f"{self.folder} does not fit the network: {error}") from error
        self.info = state.info

    def _check(self, info: dict[str, Any]) -> None:
        """What is recorded must fit together; of a state without a checksum that is all that can be known."""
        path, number = CheckpointFolder(self.folder).json, (int, float)
        kinds = {"epoch": int, "seconds": number, "seed": int, "bf16": bool, "precision": str, "device": str}
        check_kinds(path, info, {"finished": bool, **kinds})
        check_range(path, info, ["seconds"], 0, SECONDS)
        if info.get("key", self.folder.name) != self.folder.name or info["seed"] != self.seed:
            raise CorruptFile(f"{path} is of another pretraining: {info.get('key', '')}, seed {info['seed']}")
        steps, (_, per_epoch) = self.task.pretraining.steps, self._batch
        if info["finished"]:
            check_kinds(path, info, {"accuracy": dict})
            check_kinds(path, info["accuracy"], dict.fromkeys(self._held_out, number))
            check_range(path, info["accuracy"], self._held_out, 0, 1)
        elif not 0 <= info["epoch"] * per_epoch < steps:
            raise CorruptFile(f"{path} is damaged: epoch {info['epoch']} is not within {steps} steps")

    @property
    def _batch(self) -> tuple[int, int]:
        """Images of a step, and steps of an epoch."""
        images = self.dataset.manifest["pools"]["base/train"]["shape"][0]
        batch = min(self.task.pretraining.batch, images)
        return batch, max(1, images // batch)

    @property
    def _held_out(self) -> list[str]:
        return [name for name in ("base/val", "base/test") if self.dataset.has(name)]

    def _load(self, tensors: dict[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.network.load_state_dict(part("network."))
        self.head.load_state_dict(part("head."))
        for i, parameter in enumerate(self.parameters):
            if f"momentum.{i}" in tensors:
                self.optimiser.state[parameter]["momentum_buffer"] = tensors[f"momentum.{i}"].to(self.device)

    def _save(self) -> None:
        tensors = {f"network.{k}": v for k, v in self.network.state_dict().items()}
        tensors |= {f"head.{k}": v for k, v in self.head.state_dict().items()}
        if not self.info["finished"]:
            for i, parameter in enumerate(self.parameters):
                if (buffer := self.optimiser.state[parameter].get("momentum_buffer")) is not None:
                    tensors[f"momentum.{i}"] = buffer
        self.info = CheckpointFolder(self.folder).save(tensors, self.info)

    def train(self, reporter: Reporter) -> None:
        spec = self.task.pretraining
        for name in ("base/train", *self._held_out):
            self.dataset.check_images(name)
        pool, (batch, per_epoch) = self.dataset.pool("base/train"), self._batch
        precision = Precision(self.info["bf16"], "")
        start, spent = time.perf_counter(), self.info["seconds"]
        title = f"pretraining {spec.backbone}, {self.kind} head, seed {self.seed}"
        done = self.info["epoch"] * per_epoch
        reporter.say(f"{title}: {self.info['precision']}")
        with reporter.stage(title, spec.steps, min(done, spec.steps)) as stage:
            while done < spec.steps:
                epoch = self.info["epoch"]
                order = np.random.Generator(np.random.PCG64(seed_of("order", self.seed, epoch))).permutation(len(pool))
                crops = torch.Generator().manual_seed(seed_of("crops", self.seed, epoch))
                devices = [self.device] if self.device.type == "cuda" else []
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(seed_of("dropout", self.seed, epoch))
                    rows = [order[i * batch : (i + 1) * batch] for i in range(min(per_epoch, spec.steps - done))]
                    images = batches(pool.images, rows, self.device, partial(self._augment, generator=crops))
                    with closing(images):  # its thread ends with the epoch, however that ends
                        for i, inputs in enumerate(images):
                            labels = torch.from_numpy(pool.labels[rows[i]]).to(self.device)
                            stage.advance(1, **self._step(inputs, labels, precision, done + i))
                done += per_epoch
                self.info |= {"epoch": epoch + 1, "seconds": spent + time.perf_counter() - start}
                if done < spec.steps:
                    self._save()
        self.network.eval()
        accuracy = {name: self._accuracy(self.dataset.pool(name), batch) for name in self._held_out}
        shown = ", ".join(f"{name} {100 * value:.2f}%" for name, value in accuracy.items())
        reporter.say(f"{title}: {shown}")
        self.info |= {"finished": True, "accuracy": accuracy, "seconds": spent + time.perf_counter() - start}
        self._save()

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        spec = self.task.pretraining
        return crop_and_flip(images, spec.crop_padding, spec.flip, generator) if images.dim() == 4 else images

    def _step(self, images: Tensor, labels: Tensor, precision: Precision, step: int) -> dict[str, float]:
        """One batch; the figures are read from the device only now and then, since that waits for it."""
        spec = self.task.pretraining
        for group in self.optimiser.param_groups:
            group["lr"] = spec.schedule.at(step, spec.steps)
        self.network.train()
        with precision.autocast(self.device):
            features = self.network(self.normalise(images))
        logits = self.head(features.float())
        loss = F.cross_entropy(logits, labels)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        if step % 10 and step != spec.steps - 1:
            return {}
        value = loss.item()
        if not np.isfinite(value):
            raise UserError(
                f"pretraining diverged: the loss is {value} at step {step + 1} of {spec.steps}; "
                f"lower pretraining.schedule.rate (now {spec.schedule.rate}) in the task file"
            )
        return {"loss": value, "accuracy": (logits.argmax(1) == labels).float().mean().item()}

    @torch.inference_mode()
    def _accuracy(self, pool: Pool, batch: int) -> float:
        hits = 0
        for start in range(0, len(pool), batch):
            rows = np.arange(start, min(start + batch, len(pool)))
            logits = self.head(self.network(self.normalise(gather(pool.images, rows, self.device))))
            hits += int((logits.argmax(1).cpu() == torch.from_numpy(pool.labels[rows])).sum())
        return hits / len(pool)


def make_normalise(spec: DataSpec, dataset: Dataset, device: torch.device) -> Normalise:
    """Raises :class:`UserError` where mean and std do not fit the number of channels."""
    channels = dataset.shape[-1] if len(dataset.shape) == 3 else 1
    if len(spec.mean) not in (1, channels):
        raise UserError(
            f"dataset.mean of {spec.name!r} has {len(spec.mean)} values, but its images have {channels} channels"
        )
    return Normalise(spec, channels, device)
