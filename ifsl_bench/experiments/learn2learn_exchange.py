"""The exchange with learn2learn: its data sets fill our pools, and our episodes are its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ifsl_bench.backbones.networks import PixelNormalisation
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.prepare import prepare_from_objects
from ifsl_bench.experiments.workspace import Workspace, workspace
from ifsl_bench.plugin.learn2learn import load_learn2learn
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.tasks.task import Side, Task
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.protocols.tasks.variants import make_task_changes
from ifsl_bench.utils.errors import UserError

RowOrder = Literal["interleaved", "support-first"]


def from_learn2learn(
    datasets: Sequence[Any],
    *,
    name: str | None = None,
    force: bool = False,
    allow_partial: bool = False,
    work: Workspace | None = None,
) -> Dataset:
    """Prepare a data set from data sets of learn2learn or of PyTorch that are already loaded.

    For example::

        sides = [CIFARFS("data", mode=mode) for mode in ("train", "validation", "test")]
        dataset = ifsl_bench.from_learn2learn(sides, name="cifarfs")  # and tasks cifarfs-1shot, cifarfs-5shot

    docs/python.md describes which class and image comes into which pool, and what an image may be.

    Args:
        datasets: a list [train, validation, test] of objects with ``len(data)`` and ``data[i]``, an image and a label.
            Those of a known data set may be wrapped in a ``MetaDataset`` or ``Taskset``.
        name: of a data set of your own. None: the known one that is made from the files which the objects were loaded
            from, ``MiniImagenet`` or ``TieredImagenet``.
        force: build again even if the data set is prepared already.
        allow_partial: accept less than the data set should hold, or leave out classes with too few images; it is then
            marked partial.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: other objects, a content that is not what it should be, or a data set of that name that was made from
            something else.

    Example:
        >>> sides = [CIFARFS("data", mode=mode) for mode in ("train", "validation", "test")]  # doctest: +SKIP
        >>> dataset = ifsl_bench.from_learn2learn(sides, name="cifarfs")  # doctest: +SKIP
    """
    work = work or workspace()
    return prepare_from_objects(work.home, datasets, name, force, work.reporter, allow_partial)


class Tasksets(NamedTuple):
    """A task's episodes, as learn2learn's ``get_tasksets`` returns its benchmarks: three ``Taskset`` objects."""

    train: Any
    validation: Any
    test: Any


def to_learn2learn(
    task: str,
    *,
    seed: int = 0,
    num_tasks: int | None = None,
    order: RowOrder = "interleaved",
    transform: Callable[[Tensor], Tensor] | None = None,
    change: Mapping[str, int | str] | None = None,
    work: Workspace | None = None,
) -> Tasksets:
    """Return a task's episodes as learn2learn's task data sets, for code written for learn2learn.

    For example::

        tasks = ifsl_bench.to_learn2learn("glyphs-regular-5shot")
        X, y = tasks.train.sample()  # [S + Q, C, H, W] float32 and [S + Q] int64, of S support and Q query images
        X_support, y_support, X_query, y_query = tasks.train.split(X, y)

    Task i of ``train``, ``validation`` or ``test`` is our episode i of that side, with the same images. The N novel
    classes of a task are labelled 0 to N - 1, the K base classes, of which there are queries alone, N to N + K - 1;
    ``tasks.train.hidden(i)`` are the labels of those that are out of play. Images [C, H, W] are normalised as for our
    backbones, and not augmented; features are [D]. docs/python.md lists what else needs ``split``.

    Args:
        task: a name or TOML file, as in :func:`ifsl_bench.run`.
        seed: the training seed, which the episodes of ``train`` depend on, and no others.
        num_tasks: tasks in ``train``; as many as meta-training has steps by default.
        order: of the rows of a task. "interleaved" has support at the even places 0, 2, ..., 2 (S - 1), sorted by
            class, as learn2learn's examples of MAML and ANIL have it; "support-first" has it in rows 0 to S - 1.
        transform: in place of the normalisation; takes an image [C, H, W], uint8, or a feature vector [D].
        change: as in :func:`ifsl_bench.run`.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: learn2learn is not installed, an unknown task, data that have to be obtained first, or more support
            than can be interleaved with the query.

    Example:
        >>> images, labels = ifsl_bench.to_learn2learn("glyphs-regular-5shot").train.sample()  # doctest: +SKIP
    """
    learn2learn = load_learn2learn()
    from ifsl_bench.experiments.tasksets import EpisodeTasks, SideImages

    # Tasks are made on the CPU, so that no worker of a DataLoader touches a GPU.
    work = replace(work or workspace(device="cpu"), device=torch.device("cpu"))
    prepared = work.open_task(load_task(task, work.home, make_task_changes(change or {})), "linear", int(seed))
    prepared.check_digest()
    spec = prepared.task
    places = _row_order(spec, order)
    counts: dict[Side, int] = {
        "train": int(num_tasks or spec.meta_training.steps),
        "val": spec.evaluation.validation_episodes,
        "test": spec.evaluation.episodes,
    }
    normalise = PixelNormalisation(spec.dataset, prepared.dataset.shape, work.device)
    convert = partial(_map_images, transform) if transform else partial(_normalise, normalise)

    def tasks(side: Side) -> Any:
        images = SideImages(prepared.dataset, spec.pools(side), convert)
        wrapped = learn2learn.data.MetaDataset(images, labels_to_indices=images.indices_by_label())
        sampler = prepared.sampler(side)  # without features, which no task asks for
        if not isinstance(sampler, EpisodeSampler):
            raise UserError(f"task {spec.name} is in sessions; take one in episodes")
        return EpisodeTasks(wrapped, sampler, places, counts[side])

    return Tasksets(tasks("train"), tasks("val"), tasks("test"))


def _row_order(task: Task, order: RowOrder) -> Tensor:
    """Orders the rows of an episode: [S + Q] numbers, below S for support and from S for query rows."""
    shape = task.episode
    support, queries = shape.ways * task.shots, shape.base_queries + shape.ways * shape.novel_queries
    if order == "support-first":
        return torch.arange(support + queries)
    if order != "interleaved":
        raise UserError(f"order is 'interleaved' or 'support-first', not {order!r}")
    if support > queries + 1:
        raise UserError(
            f"{support} support images of {task.name} cannot be interleaved with {queries} query images; "
            f"take order='support-first'"
        )
    at = torch.zeros(support + queries, dtype=torch.bool)
    at[2 * torch.arange(support)] = True
    places = torch.empty(support + queries, dtype=torch.int64)
    places[at], places[~at] = torch.arange(support), torch.arange(support, support + queries)
    return places


def _map_images(transform: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.stack([transform(image) for image in images])


def _normalise(normalise: PixelNormalisation, images: Tensor) -> Tensor:
    """[n, C, H, W] uint8 to float32; features [n, D] as they are."""
    return normalise(images.permute(0, 2, 3, 1)) if images.dim() == 4 else images
