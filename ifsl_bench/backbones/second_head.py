"""The cosine head on the backbone of the linear one, for tasks in sessions: all rows of a task are on one backbone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ifsl_bench.backbones.base_head import TEMPERATURE, accuracies, fit_head, head_of
from ifsl_bench.backbones.networks import CosineHead, Included
from ifsl_bench.backbones.pretrained import Pretrained, in_percent, pretraining_key
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.checkpoint import CheckpointFolder, State
from ifsl_bench.utils.cosine import unit
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import get_or_create
from ifsl_bench.utils.progress import Reporter


def second_head(
    home: Paths,
    task: Task,
    dataset: Dataset,
    linear: Pretrained,
    features: Callable[[str], np.ndarray],
    seed: int,
    reporter: Reporter,
) -> Pretrained:
    """The cosine classifier on the features of the linear pretraining, from the cache or fitted.

    It minimises cross-entropy on base/train, see :func:`~ifsl_bench.backbones.base_head.fit_head`. Where base/train has
    but the means of its classes, these are the weights, and the temperature minimises cross-entropy on the images of
    base/val with even indices, which meta-training may use too.

    Args:
        features: of a pool, float32 [n, D].
        seed: of training.

    Raises:
        CorruptFile: features are not what was written.
        UserError: a file may not be read or written.
    """
    key = pretraining_key(task, dataset.fingerprint, "cosine", seed)
    folder = home.pretrained / key

    def cached() -> Pretrained | None:
        """The classifier that was fitted on these very weights; None where there is none."""
        state = CheckpointFolder(folder).load()
        return restored(state) if state and state.info.get("features_sha256") == linear.sha256 else None

    def restored(state: State) -> Pretrained:
        head = head_of(state.tensors, "cosine", linear.network.features, len(linear.head.weight), folder)
        return Pretrained(key, linear.network, head, linear.normalise, state.info, linear.mean)

    def fit() -> Pretrained:
        head, info = _fitted(task, dataset, linear, features)
        reporter.say(f"cosine head on the backbone of the linear one: {in_percent(info['accuracy'])}")
        tensors = {name: value.detach().cpu() for name, value in head.state_dict().items()}
        more = {"key": key, "features_sha256": linear.sha256, "features": linear.key}
        return restored(State(tensors, CheckpointFolder(folder).save(tensors, {**info, **more})))

    return get_or_create(folder, cached, fit, reporter.warn, "it is fitted again")


def _fitted(
    task: Task, dataset: Dataset, linear: Pretrained, features: Callable[[str], np.ndarray]
) -> tuple[CosineHead, dict[str, Any]]:
    start, network = time.perf_counter(), linear.network
    if isinstance(network, Included):
        solve: dict[str, Any] = {}
        head = _of_means(network, features("base/val"), dataset.pool("base/val").labels)
    else:
        labels = dataset.pool("base/train").labels.astype(np.int64)
        classes, decay = len(linear.head.weight), task.pretraining.weight_decay
        fitted, solve = fit_head("cosine", features("base/train"), labels, classes, decay, torch.device("cpu"))
        assert isinstance(fitted, CosineHead)
        head = fitted
    same = ("seed", "processes", "device", "bf16")
    return head, {
        **{name: linear.info[name] for name in same if name in linear.info},
        "finished": True,
        "epoch": 0,
        "seconds": linear.info["seconds"] + time.perf_counter() - start,
        "precision": f"{linear.info['precision']}; cosine head of means"
        if isinstance(network, Included)
        else f"{linear.info['precision']}; cosine head in float64, on the features of the linear one",
        "accuracy": accuracies(head, dataset, features),
        "solve": solve,
    }


def _of_means(network: Included, rows: np.ndarray, labels: np.ndarray) -> CosineHead:
    """The directions of the class means, with the temperature that suits the even images of each class [n, D], [n]."""
    from scipy.optimize import minimize_scalar

    means = unit(network.means.cpu())
    _, first = np.unique(labels, return_index=True)  # labels ascend
    even = torch.from_numpy((np.arange(len(labels)) - first[labels]) % 2 == 0)
    cosines = (unit(torch.from_numpy(np.array(rows))) @ means.T)[even].double()
    targets = torch.from_numpy(labels.astype(np.int64))[even]

    def loss(log_scale: float) -> float:
        return float(F.cross_entropy(np.exp(log_scale) * cosines, targets))

    best = minimize_scalar(loss, bracket=(np.log(TEMPERATURE / 3), np.log(3 * TEMPERATURE)))
    head = CosineHead(network.features, len(means))
    with torch.no_grad():
        head.weight.copy_(means)
        head.scale.fill_(float(np.exp(best.x)))
    return head
