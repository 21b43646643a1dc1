"""What an accelerator would be asked, counted without one, and how long that would take on an H100 and an H200.

    python tests/benchmarks/launches.py [--quick] [--only WORDS] [--device cuda] [--markdown]

Shapes are the attractor paper's: 512 features, 5 novel beside 200 base classes, 5 shots, 25 + 25 queries; images of
84 x 84. The counts are those of ``tests/benchmarks/pretend.py``. A step of meta-training is all that a step is: forward
pass, query loss, backward pass and Adam. The second column is how many episodes, or images, there are at once.

The model, whose constants are assumptions and not measurements:

    time = max(launches * LAUNCH, flops / FLOPS, traffic / MEMORY) + waits * WAIT + crossing bytes / PCIE

since the host queues launches while the device computes, until it waits. LAUNCH and WAIT are taken from their lower to
their upper end, hence two times. Traffic counts each operation's tensors as if none stayed in the device's cache.

With ``--device``, on a machine that has it, a last column is the time measured there: the median of calls for a second.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from paper_shapes import D, Episodes, K, N
from pretend import DEVICE, Counts, accelerator
from solve_table import Row, evaluation, inputs, seconds, training
from tabulate import tabulate

from ifsl_bench.backbone.device import describe_device
from ifsl_bench.backbone.features import FeaturePool
from ifsl_bench.backbone.placement import place_of
from ifsl_bench.backbone.pretrain import pretrain
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.evaluation import evaluate
from ifsl_bench.episodic.loader import EpisodeLoader
from ifsl_bench.learners.attractor_method import AttractorMethod
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocol.episodes import Sampler
from ifsl_bench.protocol.task import EpisodeSpec
from ifsl_bench.protocol.task_files import find

LAUNCH = (5e-6, 8e-6)  # s of the host's time for one operation of PyTorch, from Python
WAIT = (10e-6, 20e-6)  # s until the host has a number and the device is busy again
PCIE = 64e9  # bytes/s one way, PCIe 5.0 x16 (NVIDIA's data sheets: 128 GB/s both ways)
FLOPS = 67e12  # a second in float32 without tensor cores, H100 and H200 SXM (NVIDIA's data sheets)
FREE = 70 * 10**9  # bytes of memory that the device is taken to have free
MEMORY = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, SXM (NVIDIA's data sheets)


@dataclass(frozen=True)
class Work:
    """A row: what to count.

    Attributes:
        prepare: makes what is needed, on a device; what it returns is counted, at its second call where that is quick.
        device: where.
        quick: whether ``--quick`` has it too.
        steps: of a training; prepare takes their number before the device, and a step is the difference of two numbers.
    """

    title: str
    at_once: int
    prepare: Callable[..., Callable[[], object]]
    device: torch.device = DEVICE
    quick: bool = True
    steps: tuple[int, int] | None = None


@dataclass
class Pool:
    """What pretraining asks of a pool of images."""

    images: np.ndarray
    labels: np.ndarray
    name: str = "base/train"
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Asked:
    """Of one step: launches, waits, bytes up, bytes down, operations and bytes of traffic."""

    launches: float
    waits: float
    up: float
    down: float
    flops: float
    traffic: float

    @staticmethod
    def of(once: Callable[[], object], counts: Counts) -> Asked:
        counts.clear()
        once()
        return Asked(*counts.total, counts.bytes_up, counts.bytes_down, counts.flops, counts.traffic)

    def seconds(self, memory: float) -> tuple[float, float]:
        """Predicted with the lower and with the upper constants."""
        busy, crossing = max(self.flops / FLOPS, self.traffic / memory), (self.up + self.down) / PCIE
        low, high = (
            max(self.launches * one, busy) + self.waits * wait + crossing
            for one, wait in zip(LAUNCH, WAIT, strict=True)
        )
        return low, high


def counted(work: Work) -> Asked:
    with accelerator(FREE) as counts:
        if work.steps is None:
            once = work.prepare(work.device)
            if work.at_once < 1000:
                once()  # with what is made on a first call alone
            return Asked.of(once, counts)
        few, many = (asdict(Asked.of(work.prepare(steps, work.device), counts)) for steps in work.steps)
        return Asked(**{key: (many[key] - few[key]) / (work.steps[1] - work.steps[0]) for key in few})


def measured(work: Work, device: torch.device) -> float:
    """Seconds on a real device; what the pretend one is not asked for is measured where it runs."""
    device = device if work.device == DEVICE else work.device
    if work.steps is None:
        return seconds(work.prepare(device), device, 1.0)
    few, many = (seconds(work.prepare(steps, device), device, 1.0) for steps in work.steps)
    return (many - few) / (work.steps[1] - work.steps[0])


def _method(name: str, episodes: Episodes, device: torch.device) -> Method:
    torch.manual_seed(0)
    return registry.method(name)(episodes.base().to(device), N).to(device)


def _simple(name: str, count: int, device: torch.device) -> Callable[[], object]:
    """Evaluation of a method without a search, from support and query to logits."""
    episodes = Episodes(count, 5)
    support, query, _ = inputs(episodes, device, torch.float32)
    method = _method(name, episodes, device).eval()

    def once() -> object:
        with torch.no_grad():
            return method(support, query).logits

    return once


def _loader(device: torch.device) -> EpisodeLoader:
    """Of pools in the shapes of mini-ImageNet's test side, 20 classes of 600 images, beside 200 base classes of 30."""
    g = torch.Generator().manual_seed(0)

    def pool(name: str, classes: int, each: int) -> FeaturePool:
        rows = classes * each
        features, logits = torch.randn(rows, D, generator=g), torch.randn(rows, K, generator=g)
        return FeaturePool(name, features.to(device), logits.to(device), np.arange(classes + 1) * each, 1)

    novel, base = pool("novel", 20, 600), pool("base", K, 30)
    shape = EpisodeSpec(ways=N, base_queries=25, novel_queries=5)
    return EpisodeLoader(Sampler(("s",), shape, 5, novel.starts, base.starts, device=device), novel, base)


def _load(count: int, device: torch.device) -> Callable[[], object]:
    return partial(_loader(device).batch, 0, count)


def _evaluate(name: str, count: int, device: torch.device) -> Callable[[], object]:
    """One batch of an evaluation as a whole: loader, method, hits and margins."""
    loader, method = _loader(device), _method(name, Episodes(1, 5), device)
    return lambda: evaluate(method, name, loader, range(count))


def pretraining(backbone: str, batch: int, steps: int, device: torch.device) -> Callable[[], object]:
    """So many steps of pretraining from the first, on random images."""
    g = np.random.default_rng(0)
    images = Pool(g.integers(0, 256, (steps * batch, 84, 84, 3), dtype=np.uint8), g.integers(0, 64, steps * batch))
    described = {"classes": list(range(64)), "shape": list(images.images.shape)}
    dataset: Any = SimpleNamespace(
        shape=(84, 84, 3), fingerprint="0", manifest={"pools": {"base/train": described}}, has=lambda name: False,
        check_images=lambda name: None, pool=lambda name: images,
    )  # fmt: skip
    task = find("mini-5shot")[0]
    spec = msgspec.structs.replace(task.pretraining, backbone=backbone, batch=batch, steps=steps)
    task = msgspec.structs.replace(task, pretraining=spec)

    def once() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pretrain(Home.locate(Path(folder)), task, dataset, "linear", 0, device, Reporter())

    return once


def works() -> Iterator[Work]:
    for learner in ("lr", "mlp"):
        slow = learner == "mlp"
        title = f"{learner.upper()}+A, meta-training"
        gradients = {"rbp": "RBP"} if slow else {"rbp": "RBP", "implicit": "exact"}  # no device is given MLP+A's exact
        for gradient, name in gradients.items():
            row = Row("", learner, 5, 0, gradient)
            few = AttractorMethod.few_episodes({"learner": learner, "gradient": gradient})
            auto = place_of("meta-training", DEVICE, forced=False, episodes=1, few=few).device
            if gradient == "rbp":
                yield Work(f"{title}, `--device auto`", 1, partial(training, row, 1), auto)
            for count in (1, 16, 64):
                yield Work(f"{title}, {name}", count, partial(training, row, count), quick=not slow)
        row = Row("", learner, 5, 0)
        for count in (256, 4096):
            quick = not slow and count == 256
            yield Work(f"{learner.upper()}+A, evaluation", count, partial(evaluation, row, count), quick=quick)
    for name in ("lwof", "imprint", "protonet"):
        yield Work(f"{name}, evaluation", 256, partial(_simple, name, 256))
    yield Work("imprint, evaluation with loader and hits", 256, partial(_evaluate, "imprint", 256))
    yield Work("the loader", 256, partial(_load, 256))
    for backbone in ("resnet10", "resnet18-gn"):
        steps = partial(pretraining, backbone, 8)
        yield Work(f"a step of pretraining {backbone}", 8, steps, quick=False, steps=(4, 24))


def rows(quick: bool, only: str, device: torch.device | None) -> Iterator[list[object]]:
    for work in works():
        if (quick and not work.quick) or only.lower() not in f"{work.title}, {work.at_once}".lower():
            continue
        asked = counted(work)
        line: list[object] = [work.title, work.at_once, asked.launches, asked.waits, asked.up / 1e6, asked.down / 1e6]
        line += [asked.flops / 1e9, asked.traffic / 1e9]
        for memory in MEMORY.values():
            low, high = asked.seconds(memory)
            line.append(f"{1e3 * low:,.2f} to {1e3 * high:,.2f}" if asked.launches else "")
        yield line + ([] if device is None else [1e3 * measured(work, device)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than seconds")
    parser.add_argument("--only", default="", help="rows that have these words, as in 'MLP+A, evaluation, 256'")
    parser.add_argument("--device", type=torch.device, help="cuda: measure there too")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    heads = ["work", "at once", "launches", "waits", "MB up", "MB down", "GFLOP", "GB traffic"]
    heads += [f"ms on an {name}" for name in MEMORY]
    heads += [f"ms measured on {describe_device(given.device)}"] if given.device else []
    form = ("", ",.0f", ",.0f", ",.1f", ".2f", ".2f", ",.1f", ",.2f", "", "", ",.2f")
    style = "github" if given.markdown else "simple"
    print(tabulate(rows(given.quick, given.only, given.device), heads, style, floatfmt=form, intfmt=","))


if __name__ == "__main__":
    main()
