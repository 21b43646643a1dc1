"""Several processes that pretrain together: who they are, what they tell each other, and how they end."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.torchrun import Launch

T = TypeVar("T")
LONGEST_WAIT = datetime.timedelta(days=7)  # for the first process, which may have images to read or a lock to wait for


@dataclass(frozen=True)
class World:
    """The processes that pretrain together, as one of them sees it; alone unless said otherwise.

    Attributes:
        rank: number of this process, from 0; the first one writes, prints and takes locks.
        size: number of processes.
        group: what adds up gradients: NCCL among CUDA devices; None for gloo, which everything else goes over.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This process's part of ``count`` things: all parts together are all of them, and differ by one at most."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def told(self, value: T) -> T:
        """Returns what the first process has; the others wait for it, and what they give is ignored."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        heard: T = box[0]
        return heard

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def total(self, figures: Tensor) -> Tensor:
        """Sums over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(figures, group=self.group)
        return figures

    def on(self, device: torch.device) -> World:
        """The same processes, each with the device that its tensors are on."""
        if self.size == 1 or device.type == "cpu":
            return self
        torch.cuda.set_device(device)
        group: Any = dist.new_group(backend="nccl")
        return replace(self, group=group)


ALONE = World()


def share_norms(network: Backbone, device: torch.device, world: World) -> Backbone:
    """The network, its batch norms over the images of all processes, as in one.

    Raises:
        UserError: it has batch norms, and is on the CPU, where PyTorch has none that several processes share.
    """
    if world.size == 1 or not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()):
        return network
    if device.type == "cpu":
        raise UserError(
            f"the backbone has batch norm, which {world.size} processes cannot share on the CPU; pretrain in one "
            "process, without torchrun, or with pretraining.backbone = 'resnet18-gn' in a task file of your own"
        )
    shared: Backbone = nn.SyncBatchNorm.convert_sync_batchnorm(network, world.group)
    return shared


def device_name(asked: str, launch: Launch | None) -> str:
    """The device of this process: of several on one machine, each takes the accelerator of its own number.

    Args:
        asked: "auto", "cpu", "cuda" or, for one process, "cuda:N".

    Raises:
        UserError: there are fewer accelerators than processes, or one was named for several.
    """
    if launch is None or asked == "cpu":
        return asked
    if asked.startswith("cuda:"):
        raise UserError(f"--device {asked} is one device for {launch.size} processes; --device cuda gives each its own")
    if asked == "auto" and not torch.cuda.is_available():
        return "cpu"
    there = torch.cuda.device_count()
    if asked in ("auto", "cuda") and launch.local_size > there:
        has, then = (f"{there} CUDA devices", f"start --nproc-per-node {there}") if there else (
            "no CUDA device", "add --device cpu"
        )  # fmt: skip
        raise UserError(f"torchrun started {launch.local_size} processes on a machine with {has}; {then}")
    return f"cuda:{launch.local_rank}" if asked in ("auto", "cuda") else asked


@contextmanager
def together(launch: Launch | None) -> Iterator[World]:
    """The processes that torchrun started, joined for as long as the block runs.

    An error ends all of them, and one of them says it: the one that it happened to, or the first that noticed.

    Raises:
        UserError: another process ended before its time.
        SystemExit: in a process that has nothing to say, since another one said it.
    """
    if launch is None:
        yield ALONE
        return
    common, *_ = next(rendezvous("env://"))
    # What processes that torchrun has replaced wrote there stays there.
    store = dist.PrefixStore(f"start {launch.restarts}", common)  # type: ignore[attr-defined]
    try:
        dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=LONGEST_WAIT)
        yield World(launch.rank, launch.size)
        dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        if not _speaks(store):
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)
        # gloo and NCCL close the connection to a process that ends.
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise UserError(
                f"another of the {launch.size} processes ended; the same command goes on from where it stopped"
            ) from error
        raise


def _speaks(store: Any) -> bool:
    """Returns whether this process is the first that has an error to tell."""
    try:
        return bool(store.add("errors", 1) == 1)
    except RuntimeError:  # the store has ended with the process that held it
        return False
