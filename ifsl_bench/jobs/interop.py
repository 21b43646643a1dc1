"""The exchange with learn2learn: its data sets fill our pools, and our episodes are its tasks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ifsl_bench.backbone.images import Normalise
from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.prepare import prepare_objects
from ifsl_bench.episodic.prepared import PreparedTask, Workspace, workspace
from ifsl_bench.plugin.learn2learn import load
from ifsl_bench.protocol.task import Side
from ifsl_bench.protocol.task_files import find
from ifsl_bench.protocol.variants import make_change

Order = Literal["interleaved", "support-first"]
MOST_TASKS = (1 << 31) - 1  # learn2learn counts them in a C int


def from_learn2learn(
    datasets: Sequence[Any],
    *,
    name: str | None = None,
    force: bool = False,
    allow_partial: bool = False,
    work: Workspace | None = None,
) -> Dataset:
    """Prepares a data set from data sets of learn2learn or of PyTorch, already loaded::

        sides = [CIFARFS("data", mode=mode) for mode in ("train", "validation", "test")]
        dataset = ifsl_bench.from_learn2learn(sides, name="cifarfs")  # and tasks cifarfs-1shot, cifarfs-5shot

    *With a name* any labelled images make a data set of your own and the tasks NAME-1shot and NAME-5shot, as
    ``ifsl-bench data prepare NAME --from FOLDER`` does from files. The classes of train are the base classes, whose
    images are divided 80/10/10 into base/train, base/val and base/test, in the order they have within the class;
    validation becomes novel/val and test novel/test. The protocol is shared: there is no separate novel/train.

    An image is what ``data[i]`` returns, so transforms are applied; they must neither be random nor normalise. It may
    be Pillow's, a tensor or an array, [C, H, W], [H, W, C] or [H, W], of 1 or 3 channels, with whole numbers from 0 to
    255, or with 255ths from 0 to 1. All are of one size. Labels may be whatever a dict has as keys, and need not be
    consistent across the sides. Of an object with ``labels_to_indices`` (``MetaDataset``, ``FilteredMetaDataset``,
    ``UnionMetaDataset``) the images are those that it lists. Each is read twice, one at a time.

    *Without a name* the data set is made from the files that the objects were loaded from, which must still be there:
    those of ``learn2learn.vision.datasets.MiniImagenet`` make ``mini-imagenet-held-out``, those of ``TieredImagenet``
    make ``tiered-imagenet-2018``, as ``ifsl-bench data prepare`` does.

    Args:
        datasets: a list [train, validation, test]. Those of a known data set may be wrapped in a ``MetaDataset`` or
            ``Taskset``.
        name: of a data set of your own.
        force: build again even if the data set is prepared already.
        allow_partial: accept less than the data set should hold, or leave out classes with too few images; it is then
            marked partial.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: other objects, a content that is not what it should be, or a data set of that name that was made from
            something else.
    """
    work = work or workspace()
    return prepare_objects(work.home, datasets, name, force, work.reporter, allow_partial)


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
    change: Mapping[str, int | str] | None = None,
    work: Workspace | None = None,
) -> Tasksets:
    """A task's episodes as learn2learn's task data sets, for code written for learn2learn::

        tasks = ifsl_bench.to_learn2learn("glyphs-regular-5shot")
        X, y = tasks.train.sample()  # [S + Q, C, H, W] float32 and [S + Q] int64, of S support and Q query images

    Task i of ``train``, ``validation`` or ``test`` is our episode i of that side, with the same images: ``tasks.test``
    iterates over the episodes that all results are measured on, in their order. ``sample()`` draws one of them by
    Python's ``random``, as learn2learn does.

    *Support and query.* Which rows are which, the tasks know::

        X_support, y_support, X_query, y_query = tasks.test.split(X, y)

    Interleaved, support rows are at the even places 0, 2, ..., 2 (S - 1), sorted by class, and the query rows at all
    others, in our order. That is the split that learn2learn's examples of MAML and ANIL make
    (``support[np.arange(ways * shots) * 2] = True``), and no other code there: ``LightningMAML`` and ``LightningANIL``
    take rows for sorted by class, ``LightningPrototypicalNetworks`` and ``LightningMetaOptNet`` sort them by label, in
    no stable order, and all four take the first ``shots`` rows of each class for support. That mixes our support and
    query images; in a module of one's own, ``split`` takes the place of these lines.

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
        seed: the training seed, which the episodes of ``train`` depend on, and no others; a whole number from 0.
        num_tasks: tasks in ``train``; as many as meta-training has steps by default.
        order: of the rows of a task.
        transform: in place of the normalisation; takes an image [C, H, W], uint8, or a feature vector [D].
        change: as in :func:`ifsl_bench.run`.
        work: folders and progress display; see :func:`ifsl_bench.workspace`.

    Raises:
        UserError: learn2learn is not installed, an unknown task, data that have to be obtained first, a value that
            makes no sense, or more support than can be interleaved with the query.
    """
    learn2learn = load()
    from ifsl_bench.jobs.tasksets import EpisodeTasks, Images

    seed = _whole("seed", seed, 0)
    num_tasks = None if num_tasks is None else _whole("num_tasks", num_tasks, 1, MOST_TASKS)
    if transform is not None and not callable(transform):
        raise UserError(f"transform is a function of an image, not {transform!r}")
    # Tasks are made on the CPU, so that no worker of a DataLoader touches a GPU.
    work = replace(work or workspace(device="cpu"), device=torch.device("cpu"))
    named_tasks = find(task, make_change(change or {}), work.home)
    if len(named_tasks) != 1:
        raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
    prepared = work.prepared(named_tasks[0], "linear", seed)  # episodes do not depend on the head
    prepared.check_digest()
    spec = prepared.task
    places = _places(spec.name, spec.episode.ways * spec.shots, _queries(prepared), order)
    counts: dict[Side, int] = {
        "train": num_tasks or spec.meta_training.steps,
        "val": spec.evaluation.validation_episodes,
        "test": spec.evaluation.episodes,
    }
    normalise = Normalise(spec.dataset, prepared.dataset.shape[-1], work.device)
    convert = partial(_each, transform) if transform else partial(_normalised, normalise)

    def tasks(side: Side) -> Any:
        images = Images(prepared.dataset, spec.pools(side), convert)
        wrapped = learn2learn.data.MetaDataset(images, labels_to_indices=images.by_label())
        return EpisodeTasks(wrapped, prepared.episodes(side).sampler, places, counts[side])

    return Tasksets(tasks("train"), tasks("val"), tasks("test"))


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number, NumPy's too, as Python's: 1 and np.int64(1) are one seed."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least or (most is not None and number > most):
        limits = f"from {least}" + (f" to {most:,}" if most is not None else "")
        raise UserError(f"{name} must be a whole number {limits}, not {value!r}")
    return number


def _queries(prepared: PreparedTask) -> int:
    return prepared.task.episode.base_queries + prepared.task.episode.ways * prepared.task.episode.novel_queries


def _places(name: str, support: int, queries: int, order: Order) -> Tensor:
    """Orders the rows of a task: [S + Q] numbers, below S for support and from S for query rows."""
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
