"""To and from learn2learn: its data sets fill our pools, and our episodes are its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ifsl_bench.api import workspace
from ifsl_bench.bench import Bench, Workspace
from ifsl_bench.data.pools import Dataset, Pool
from ifsl_bench.data.prepare import prepare_objects
from ifsl_bench.episodes import Sampler
from ifsl_bench.errors import UserError
from ifsl_bench.images import Normalise
from ifsl_bench.learn2learn import load
from ifsl_bench.task import Side
from ifsl_bench.task_files import find
from ifsl_bench.variants import make_change

Order = Literal["interleaved", "support-first"]


def from_learn2learn(
    datasets: Sequence[Any], *, force: bool = False, allow_partial: bool = False, work: Workspace | None = None
) -> Dataset:
    """Prepares a data set from data set objects of learn2learn, already loaded: what ``ifsl-bench data prepare`` does
    from their files, with the same pools and, for the same images, the same fingerprint.

    Known are ``learn2learn.vision.datasets.MiniImagenet``, which makes ``mini-imagenet-held-out``, and
    ``TieredImagenet``, which makes ``tiered-imagenet-2018``. What is read are the images as they were loaded; an
    object's ``transform`` is not applied.

    Args:
        datasets: three objects of one class, with the modes train, validation and test, in any order; each may be
            wrapped in a ``MetaDataset`` or ``Taskset``.
        force: build again even if the data set is prepared already.
        allow_partial: accept less than the data set should hold; it is then marked partial.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: other objects, or a content that is not what it should be.
    """
    work = work or workspace()
    return prepare_objects(work.home, datasets, force, work.reporter, allow_partial)


class Tasksets(NamedTuple):
    """A task's episodes, as learn2learn's ``get_tasksets`` has those of its benchmarks: three ``Taskset`` objects."""

    train: Any
    validation: Any
    test: Any


def to_learn2learn(
    task: str,
    *,
    seed: int = 0,
    num_tasks: int | None = None,
    order: Order = "interleaved",
    transform: Callable[[Tensor], Tensor] | None = None,
    change: Mapping[str, int] | None = None,
    work: Workspace | None = None,
) -> Tasksets:
    """A task's episodes as learn2learn's task data sets, for code written for learn2learn::

        tasks = ifsl_bench.to_learn2learn("glyphs-regular-5shot")
        X, y = tasks.train.sample()  # [S + Q, C, H, W] float32 and [S + Q] int64, of S support and Q query images

    Task i of ``train``, ``validation`` or ``test`` is our episode i of that side, with the same images: ``tasks.test``
    iterates over the episodes that all results are measured on, in their order. ``sample()`` draws one of them by
    Python's ``random``, as learn2learn does.

    *Support and query.* Interleaved, support rows are at the even places 0, 2, ..., 2 (S - 1), sorted by class, and the
    query rows at all others, in our order. That is the split that learn2learn's examples make (``fast_adapt``)::

        support = np.zeros(len(X), dtype=bool)
        support[np.arange(ways * shots) * 2] = True

    With ``order="support-first"`` the support set is ``X[:S]`` and the query set ``X[S:]``; in regular few-shot
    learning that is what ``learn2learn.data.partition_task(X, y, shots)`` finds too. It asks for equally many queries
    of each class, which base classes do not have.

    *Labels* are numbered as ``RemapLabels`` does: the N novel classes of a task are 0 to N - 1, anew in each task. The
    K base classes, of which there are queries alone, are N to N + K - 1 in every task (in our joint logits they come
    first). Where meta-training hides base classes, ``tasks.train.hidden(i)`` are the labels that are out of play in
    task i, a tensor; it is empty elsewhere.

    *Images* enter as they enter our backbones, normalised as the task says; meta-training's are not augmented. Features
    of one's own are X [S + Q, D].

    Args:
        task: a name or TOML file, as in :func:`ifsl_bench.run`.
        seed: the training seed, which the episodes of ``train`` depend on, and no others.
        num_tasks: tasks in ``train``; as many as meta-training has steps by default.
        order: of the rows of a task.
        transform: in place of the normalisation; takes an image [C, H, W], uint8, or a feature vector [D].
        change: as in :func:`ifsl_bench.run`.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: learn2learn is not installed, an unknown task, data that have to be obtained first, or more support
            than can be interleaved with the query.
    """
    learn2learn = load()
    work = work or workspace()
    found = find(task, make_change(change or {}), work.home)
    if len(found) != 1:
        raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
    if num_tasks is not None and num_tasks < 1:
        raise UserError(f"num_tasks must be at least 1, not {num_tasks}")
    bench = Bench(found[0], "linear", seed, 1, work)  # episodes do not depend on the head
    bench.check_digest()
    spec = bench.task
    places = _places(spec.name, spec.episode.ways * spec.shots, _queries(bench), order)
    counts: dict[Side, int] = {
        "train": num_tasks or spec.meta_training.steps,
        "val": spec.evaluation.validation_episodes,
        "test": spec.evaluation.episodes,
    }
    kind = _taskset_class(learn2learn)
    channels = bench.dataset.shape[-1]
    normalise = Normalise(spec.dataset, channels, torch.device("cpu"))
    convert = partial(_each, transform) if transform else partial(_normalised, normalise)

    def tasks(side: Side) -> Any:
        pools = [bench.dataset.pool(name) for name in spec.pools(side)]
        images = _Images(pools, convert)
        wrapped = learn2learn.data.MetaDataset(images, labels_to_indices=images.by_label())
        return kind(wrapped, bench.sampler(side), places, counts[side])

    return Tasksets(tasks("train"), tasks("val"), tasks("test"))


def _queries(bench: Bench) -> int:
    return bench.task.episode.base_queries + bench.task.episode.ways * bench.task.episode.novel_queries


def _places(name: str, support: int, queries: int, order: Order) -> Tensor:
    """Where the rows of a task come from: [S + Q] numbers, below S for support and from S for query rows."""
    if order == "support-first":
        return torch.arange(support + queries)
    if order != "interleaved":
        raise UserError(f"order is 'interleaved' or 'support-first', not {order!r}")
    if support > queries + 1:
        raise UserError(
            f"{support} support images of {name} cannot be interleaved with {queries} query images; "
            f"take order='support-first'"
        )
    at = torch.zeros(support + queries, dtype=torch.bool)
    at[2 * torch.arange(support)] = True
    places = torch.empty(support + queries, dtype=torch.int64)
    places[at], places[~at] = torch.arange(support), torch.arange(support, support + queries)
    return places


def _each(transform: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.stack([transform(image) for image in images])


def _normalised(normalise: Normalise, images: Tensor) -> Tensor:
    """[n, C, H, W] uint8 to float32; features [n, D] as they are."""
    return normalise(images.permute(0, 2, 3, 1)) if images.dim() == 4 else images


class _Images(TorchDataset[Any]):
    """The images of one side: those of the pool of novel classes, and those of base queries after them, if any.

    Labels are the novel pool's, and go on with the base pool's.
    """

    def __init__(self, pools: Sequence[Pool], convert: Callable[[Tensor], Tensor]) -> None:
        self.pools, self.convert = pools, convert
        self.labels = np.concatenate([pools[0].labels, *(p.labels + len(pools[0].classes) for p in pools[1:])])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.batch([range(len(self))[index]])[0], int(self.labels[index])

    def batch(self, rows: Sequence[int]) -> Tensor:
        """[n, C, H, W] as :attr:`convert` makes them, or features [n, D]."""
        first = len(self.pools[0])  # row of the first base image
        images = [self.pools[0].images[row] if row < first else self.pools[1].images[row - first] for row in rows]
        stacked = torch.from_numpy(np.stack(images))
        return self.convert(stacked.permute(0, 3, 1, 2) if stacked.dim() == 4 else stacked)

    def by_label(self) -> dict[int, list[int]]:
        """label -> images."""
        found: dict[int, list[int]] = {}
        row = 0
        for pool in self.pools:
            for count in np.diff(pool.starts).tolist():
                found[len(found)] = list(range(row, row + count))
                row += count
        return found


def _taskset_class(learn2learn: Any) -> Any:
    """The class of our tasks; made here, since its base class is imported only when it is used."""

    class Episodes(learn2learn.data.Taskset):
        """Episodes of one stream. Item i is episode i, whatever was asked for before."""

        def __init__(self, dataset: Any, sampler: Sampler, places: Tensor, count: int) -> None:
            super().__init__(dataset, num_tasks=count)
            self.sampler, self.places = sampler, places

        def __getitem__(self, i: int) -> list[Tensor]:
            drawn = self.sampler.sample(range(len(self))[i], 1)
            images: _Images = self.dataset.dataset
            ways, classes = drawn.classes.shape[1], drawn.hidden.shape[1]
            beyond = len(images.pools[0]) if len(images.pools) > 1 else 0  # else base queries are of the same pool
            query = drawn.query[0] + beyond * ~drawn.query_novel[0]
            rows = torch.cat([drawn.support[0], query]).cpu()
            of_query = drawn.query_labels[0].cpu()
            of_query = torch.where(of_query >= classes, of_query - classes, of_query + ways)
            of_support = torch.arange(ways).repeat_interleave(drawn.support.shape[1] // ways)
            return [images.batch(rows[self.places].tolist()), torch.cat([of_support, of_query])[self.places]]

        def hidden(self, i: int) -> Tensor:
            """Labels of the base classes that are out of play in task i."""
            drawn = self.sampler.sample(range(len(self))[i], 1)
            return drawn.hidden[0].nonzero().flatten().cpu() + drawn.classes.shape[1]

    return Episodes
