"""``--dry-run``: the stages of a run, what is cached, and a rough time measured here on random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from ifsl_bench.backbone.device import choose_precision
from ifsl_bench.backbone.features import bank_folder, is_computed
from ifsl_bench.backbone.networks import channels_last, make_backbone, make_head
from ifsl_bench.backbone.pretrain import pretrained_sha256, pretraining_key
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.data import registered
from ifsl_bench.data.counts import Count, Counts
from ifsl_bench.data.pools import Dataset, open_dataset
from ifsl_bench.data.preparing.prepare import dataset_folder, is_prepared, not_prepared
from ifsl_bench.data.subset import check_fewer, some_base_classes
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Method, Query, Support
from ifsl_bench.protocol.task import NO_BACKBONE, Side, Task
from ifsl_bench.running.api import stored_result
from ifsl_bench.running.job import Job
from ifsl_bench.running.workbench import Bench, Workspace

ENOUGH = 1.0  # seconds of timing after which an estimate is good enough
SOME = 64  # images of a step or forward pass that is timed


@dataclass(frozen=True)
class _Known:
    """What can be said of a data set before or after it is made."""

    fingerprint: str | None
    shape: tuple[int, ...]
    images: dict[str, int]
    classes: int  # base classes
    counts: Counts
    dataset: Dataset | None  # where it is prepared


@dataclass
class _Planner:
    work: Workspace
    rows: list[dict[str, str]] = field(default_factory=list)
    said: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, stage: str, cached: bool, seconds: Callable[[], float | None], key: tuple[str, ...]) -> None:
        """A row, unless an earlier job needs the same stage."""
        if (stage, *key) in self.said:
            return
        self.said.add((stage, *key))
        rough = 0.0 if cached else seconds()
        shown = "" if cached else "unknown" if rough is None else f"about {_round(rough)} s"
        self.rows.append({"stage": stage, "state": "cached" if cached else "to do", "rough time": shown})


def _round(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds < 100 else f"{10 * round(seconds / 10):.0f}"


def plan(jobs: Sequence[Job], work: Workspace, rerun: bool = False) -> list[dict[str, str]]:
    """Rows of stage, state ("cached" or "to do") and rough time, in the order of the run. Changes nothing on disk.

    Raises:
        UserError: data that have to be obtained first.
    """
    planner = _Planner(work)
    for job in jobs:
        if not rerun and stored_result(job, work) is not None:
            planner.add(f"result {job.label} on {job.task.name}, seed {job.seed}", True, lambda: None, ())
            continue
        for stage, cached, seconds, key in _stages(job, work):
            planner.add(stage, cached, seconds, key)
    return planner.rows


def _known(task: Task, work: Workspace) -> _Known:
    name = task.dataset.name
    if is_prepared(work.home, name):
        dataset = open_dataset(dataset_folder(work.home, name))
        if task.base_classes is not None:
            dataset = some_base_classes(dataset, task.base_classes)
        pools = dataset.manifest["pools"]
        images = {pool: entry["shape"][0] for pool, entry in pools.items()}
        counts = {pool: Count(len(entry["classes"]), images[pool]) for pool, entry in pools.items()}
        return _Known(dataset.fingerprint, dataset.shape, images, counts["base/train"].classes, counts, dataset)
    source = registered.dataset_source(name) if name in registry.names(registry.DATASETS) else None
    if source is None or source.needs_source:
        raise UserError(not_prepared(work.home, task.dataset))
    shape, known = source.outline() or ((), {})
    counts = dict(known)
    images = {pool: count.images for pool, count in counts.items()}
    classes = counts["base/train"].classes if counts else 0
    if task.base_classes is not None and classes:
        check_fewer(name, task.base_classes, classes)
        share = task.base_classes / classes
        images = {pool: round(n * share) if pool.startswith("base/") else n for pool, n in images.items()}
        classes = task.base_classes
    counts = {pool: Count(classes, images[pool]) if pool.startswith("base/") else c for pool, c in counts.items()}
    return _Known(task.dataset.fingerprint, shape, images, classes, counts, None)


def _check_episodes(task: Task, side: Side, known: _Known) -> None:
    """Raises :class:`UserError` where a side's episodes cannot be drawn, as far as the counts tell."""
    shape, who = task.episode, f"episodes of {task.name}"
    pool, base = task.pool(side, "novel"), task.pool(side, "base")
    if (count := known.counts.get(pool)) is None:
        return
    if count.classes < shape.ways:
        raise UserError(f"{who} need {shape.ways:,} novel classes, {pool} has {count.classes}")
    need, most = task.shots + shape.novel_queries, count.images // count.classes
    if most < need:
        raise UserError(f"{who} need {need:,} images of a novel class, {pool} has {most} of some")
    hidden = shape.ways if task.hides(side) else 0
    most = known.counts[base].images * (known.counts[base].classes - hidden) // known.counts[base].classes
    if task.base_parity(side):
        most //= 2
    if most < shape.base_queries:
        raise UserError(f"{who} need {shape.base_queries:,} base queries, {base} has {most} images for them")


def _stages(job: Job, work: Workspace) -> Iterator[tuple[str, bool, Callable[[], float | None], tuple[str, ...]]]:
    task, known = job.task, _known(job.task, work)
    for side in job.sides:  # before anything of that size is made
        _check_episodes(task, side, known)
        if known.dataset is not None:
            bench = Bench(task, job.method.head, job.seed, 1, work)
            bench.dataset = known.dataset  # as it is: a plan makes nothing anew
            bench.sampler(side)
    name = task.dataset.name
    source = registered.dataset_source(name) if name in registry.names(registry.DATASETS) else None
    yield f"data set {name}", known.dataset is not None, lambda: source.rough_seconds() if source else None, ()
    key = pretraining_key(task, known.fingerprint or "?", job.method.head, job.seed)
    title = f"pretraining {task.pretraining.backbone}, {job.method.head} head, seed {task.pretraining_seed(job.seed)}"
    yield title, pretrained_sha256(work.home, key) is not None, lambda: _pretraining_seconds(task, known, work), (key,)
    features = None
    if known.shape:
        features = make_backbone(task.pretraining.backbone, known.shape).features
        base = Base(
            torch.randn(known.classes, features), torch.zeros(known.classes), torch.randn(known.classes, features)
        )
        method = job.method(base.to(work.device), task.episode.ways, **job.settings()[0]).to(work.device)
    else:
        method = None
    trains = "train" in job.sides
    pools = ["base/train", *(pool for side in job.sides for pool in task.pools(side))]
    for pool in dict.fromkeys(pools):
        if task.pretraining.backbone != NO_BACKBONE:
            views = job.training.views if trains and pool in task.pools("train") else 1
            yield (
                f"features of {pool}" + (f", {views} views" if views > 1 else ""),
                is_computed(bank_folder(work.home, key, pool, task, views)),
                lambda pool=pool, views=views: _feature_seconds(task, known, work, known.images.get(pool, 0) * views),  # type: ignore[misc]
                (key,),
            )
    settings = job.settings()
    runs = len(settings)
    if trains:
        steps = job.plan.steps
        folders = [job.trained_folder(work.home, key, options) for options in settings]
        yield (
            f"meta-training {job.label} on {task.name}, seed {job.seed}: {steps:,} steps"
            + (f" x {runs}" if runs > 1 else ""),
            all(_finished(folder) for folder in folders),
            lambda: runs * steps * _step_seconds(job, known, method, work) if method is not None else None,
            (job.label,),
        )
    if runs > 1:
        tries = runs * task.evaluation.validation_episodes
        yield (
            f"choosing {', '.join(job.tuned)} of {job.label} on {task.name}, seed {job.seed}: {runs} settings"
            + ("" if trains else ", more if the best is at an end"),
            False,
            lambda: tries * _episode_seconds(job, known, method) if method is not None else None,
            (),
        )
    yield (
        f"evaluating {job.label} on {task.name}, seed {job.seed}: {job.episodes:,} episodes",
        False,
        lambda: job.episodes * _episode_seconds(job, known, method) if method is not None else None,
        (),
    )


def _finished(folder: Path) -> bool:
    try:
        info = CheckpointFolder(folder).info()
    except CorruptFile:
        return False
    return bool(info and info["finished"])


def _time(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Seconds of a call, the fastest of a few after one to warm up; of one that takes long, the first few."""
    took: list[float] = []
    while len(took) <= repeats and sum(took) < ENOUGH:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:] or took)


def _pretraining_seconds(task: Task, known: _Known, work: Workspace) -> float | None:
    if not known.shape:
        return None
    spec, device = task.pretraining, work.device
    whole = min(spec.batch, known.images["base/train"])
    batch = min(whole, SOME)
    network = channels_last(make_backbone(spec.backbone, known.shape), device)
    head = make_head("linear", network.features, known.classes).to(device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    images = _images(known.shape, batch, device)
    precision = choose_precision(device)

    def step() -> None:
        with precision.autocast(device):
            hidden = network(images)
        F.cross_entropy(head(hidden.float()), labels).backward()

    return spec.steps * whole / batch * _time(step, device)


def _images(shape: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.randn(batch, *shape, device=device)
    height, width, channels = shape
    return torch.randn(batch, height, width, channels, device=device).permute(0, 3, 1, 2)


def _feature_seconds(task: Task, known: _Known, work: Workspace, images: int) -> float | None:
    return images * _forward_seconds(task.pretraining.backbone, known.shape, work.device) if known.shape else None


@lru_cache  # the same for every pool
@torch.no_grad()
def _forward_seconds(backbone: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Of one image."""
    network = channels_last(make_backbone(backbone, shape).eval(), device)
    batch = _images(shape, SOME, device)
    return _time(lambda: network(batch), device) / SOME


def _episode(job: Job, known: _Known, method: Method, episodes: int) -> tuple[Support, Query]:
    """Random features in the shapes of the task."""
    task, weight = job.task, method.base.weight
    rows = task.episode.ways * task.shots
    queries = task.episode.base_queries + task.episode.ways * task.episode.novel_queries
    labels = torch.arange(task.episode.ways, device=weight.device).repeat_interleave(task.shots).expand(episodes, -1)
    hidden = torch.zeros(episodes, known.classes, dtype=torch.bool, device=weight.device)

    def rand(count: int) -> torch.Tensor:
        return torch.randn(episodes, count, weight.shape[1], device=weight.device)

    x, q = rand(rows), rand(queries)
    return Support(x, labels, hidden, x @ weight.T), Query(q, q @ weight.T)


def _step_seconds(job: Job, known: _Known, method: Method, work: Workspace) -> float:
    support, query = _episode(job, known, method, job.training.episodes_per_step)

    def step() -> None:
        method.train()
        method(support, query).logits.square().mean().backward()

    return 1.3 * _time(step, work.device, 5)


@torch.no_grad()
def _episode_seconds(job: Job, known: _Known, method: Method) -> float:
    support, query = _episode(job, known, method, 20)
    return _time(lambda: method.eval()(support, query), method.base.weight.device) / 20
