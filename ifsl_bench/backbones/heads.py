"""Base classifiers on features that do not change: fitted to convergence, without a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbones.networks import CosineHead, LinearHead, PrecomputedFeatures, make_head
from ifsl_bench.backbones.pretrained import RECIPE_FIELDS, PretrainedBackbone, format_accuracies, make_pretraining_key
from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.checkpoint import CheckpointFolder, CheckpointState
from ifsl_bench.utils.cosine import normalise_with_epsilon
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import get_or_create
from ifsl_bench.utils.progress import Reporter

MAX_LBFGS_STEPS = 1000
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of the gradient, in the coordinates of the solve
ROWS_PER_BLOCK = 1 << 14  # that are multiplied at once
INITIAL_TEMPERATURE = 10.0  # of cosine similarities, where the solve begins


def fit_head_with_facts(
    kind: str, features: np.ndarray, labels: np.ndarray, classes: int, decay: float, device: torch.device
) -> tuple[LinearHead | CosineHead, dict[str, Any]]:
    """Minimise cross-entropy by L-BFGS (SciPy's), from the class means, in float64.

    Of a linear classifier ``decay / 2 * |W|^2`` is added, as SGD with that weight decay has it: the problem is convex,
    and SGD would end at the same minimum. It is solved for features that are centred and scaled by their standard
    deviation, which moves no minimum and shortens the way. A cosine classifier does not change with the length of its
    weights, so that decay is of its temperature s alone, ``decay / 2 * s^2``, without which s would grow where classes
    can be separated; its problem is not convex. Single precision would end the line search early.

    Args:
        kind: "linear" or "cosine".
        features: float32 [n, D].
        labels: int64 [n].
        classes: number K of classes.
        decay: weight decay.
        device: where to compute.

    Returns:
        The classifier on the CPU, and a record: steps, the largest entry of the gradient, whether it converged.
    """
    from scipy.optimize import minimize

    width = features.shape[1]
    rows, targets = torch.from_numpy(features.astype(np.float64)).to(device), torch.from_numpy(labels).to(device)
    mean, spread = rows.mean(0), rows.std(0).clamp_min(1e-6 * float(rows.std()) + 1e-12)
    if kind == "linear":
        rows = (rows - mean) / spread
        start = np.zeros((classes, width + 1))
        penalty = (decay / spread.double() ** 2).cpu().numpy()  # [D], on W in the solve's coordinates
    else:
        rows = normalise_with_epsilon(rows)
        sums = rows.new_zeros(classes, width).index_add_(0, targets, rows)
        start = np.append(normalise_with_epsilon(sums).double().cpu().numpy().ravel(), INITIAL_TEMPERATURE)

    def logits(v: Tensor, x: Tensor) -> Tensor:
        """Return logits from weights and biases [K (D + 1)], or from weights and one temperature [K D + 1]."""
        if kind == "linear":
            w = v.reshape(classes, -1)
            return F.linear(x, w[:, :-1], w[:, -1])
        return v[-1] * F.linear(x, normalise_with_epsilon(v[:-1].reshape(classes, -1)))

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(flat).to(device).requires_grad_(True)
        total = 0.0
        for x, y in zip(rows.split(ROWS_PER_BLOCK), targets.split(ROWS_PER_BLOCK), strict=True):
            loss = F.cross_entropy(logits(v, x), y, reduction="sum") / len(rows)
            loss.backward()
            total += float(loss.detach())
        assert v.grad is not None
        gradient = v.grad.double().cpu().numpy()
        if kind == "linear":
            w = flat.reshape(classes, width + 1)[:, :-1]
            total += 0.5 * float((penalty * w**2).sum())
            gradient.reshape(classes, width + 1)[:, :-1] += penalty * w
        else:
            total += 0.5 * decay * float(flat[-1]) ** 2
            gradient[-1] += decay * flat[-1]
        return total, gradient

    options = {
        "maxiter": MAX_LBFGS_STEPS,
        "maxfun": 2 * MAX_LBFGS_STEPS,
        "gtol": GRADIENT_TOLERANCE,
        "ftol": 0.0,
        "maxcor": 20,
    }
    fit = minimize(loss_and_gradient, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    best = torch.from_numpy(fit.x)
    head = make_head(kind, width, classes)
    with torch.no_grad():
        if isinstance(head, LinearHead):
            v = best.reshape(classes, width + 1)
            weight = v[:, :-1] / spread.double().cpu()
            head.weight.copy_(weight)
            head.bias.copy_(v[:, -1] - weight @ mean.double().cpu())
        else:
            head.weight.copy_(best[:-1].reshape(classes, width))
            head.scale.copy_(best[-1])
    slope = float(np.abs(fit.jac).max())
    return head, {
        "steps": int(fit.nit),
        "gradient": slope,
        "converged": slope <= GRADIENT_TOLERANCE,
        "loss": float(fit.fun),
    }


def measure_accuracies(
    head: LinearHead | CosineHead, dataset: Dataset, features: Callable[[str], np.ndarray]
) -> dict[str, float]:
    """Return the share of images labelled right in base/val and base/test, as far as the data set has them.

    Args:
        head: the classifier, on the CPU.
        dataset: has the labels.
        features: of a pool, float32 [n, D].
    """
    shares = {}
    for pool in filter(dataset.has_pool, ("base/val", "base/test")):
        with torch.no_grad():
            answers = head(torch.from_numpy(np.array(features(pool)))).argmax(1).numpy()
        shares[pool] = float((answers == dataset.pool(pool).labels).mean())
    return shares


def load_head(
    tensors: Mapping[str, Tensor], kind: str, width: int, classes: int, folder: Path
) -> LinearHead | CosineHead:
    """Make a frozen classifier of stored tensors.

    Args:
        tensors: its tensors, by name.
        kind: "linear" or "cosine".
        width: number D of features.
        classes: number K of classes.
        folder: where the tensors are from, for the error.

    Raises:
        CorruptFile: the tensors do not fit.
    """
    head = make_head(kind, width, classes)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise CorruptFile(f"{folder}: the classifier does not fit the network: {error}") from error
    return head.requires_grad_(False)


# -- the cosine head of tasks in sessions, whose rows are all on the backbone of the linear head -----------------------


def fit_cosine_head(
    home: Paths,
    task: Task,
    dataset: Dataset,
    linear: PretrainedBackbone,
    features: Callable[[str], np.ndarray],
    seed: int,
    reporter: Reporter,
) -> PretrainedBackbone:
    """Return the cosine classifier on the features of the linear pretraining, from the cache or fitted.

    The head minimises cross-entropy on base/train (:func:`fit_head_with_facts`). Where base/train has only the means of
    its classes, these are the weights, and the temperature minimises cross-entropy on the images of base/val with even
    indices, which meta-training may use too.

    Args:
        home: where it is kept.
        task: gives the weight decay.
        dataset: has the labels.
        linear: the pretraining with a linear head.
        features: of a pool, float32 [n, D].
        seed: of training.
        reporter: hears of the accuracy, and of damaged files.

    Raises:
        CorruptFile: features are not what was written.
        UserError: a file may not be read or written.
    """
    key = make_pretraining_key(task, dataset.fingerprint, "cosine", seed)
    folder = home.pretrained / key

    def read_cached() -> PretrainedBackbone | None:
        """Read the classifier that was fitted on these weights; None where there is none."""
        state = CheckpointFolder(folder).load()
        return restore(state) if state and state.metadata.get("features_sha256") == linear.sha256 else None

    def restore(state: CheckpointState) -> PretrainedBackbone:
        head = load_head(state.tensors, "cosine", linear.network.features, len(linear.base_classifier.weight), folder)
        return PretrainedBackbone(
            key, linear.network, head, linear.normalise_images, state.metadata, linear.base_feature_mean
        )

    def fit() -> PretrainedBackbone:
        start, precision = time.perf_counter(), linear.training_record["precision"]
        if isinstance(linear.network, PrecomputedFeatures):
            head: LinearHead | CosineHead
            solve: dict[str, Any] = {}
            head = _fit_class_mean_head(linear.network, features("base/val"), dataset.pool("base/val").labels)
            how = "cosine head of means"
        else:
            labels, decay = dataset.pool("base/train").labels.astype(np.int64), task.pretraining.weight_decay
            rows, classes = features("base/train"), len(linear.base_classifier.weight)
            head, solve = fit_head_with_facts("cosine", rows, labels, classes, decay, torch.device("cpu"))
            how = "cosine head in float64, on the features of the linear one"
        info: dict[str, Any] = {
            **{
                name: linear.training_record[name]
                for name in ("seed", "processes", "device", "bf16", *RECIPE_FIELDS)
                if name in linear.training_record
            },
            "finished": True,
            "epoch": 0,
            "seconds": linear.training_record["seconds"] + time.perf_counter() - start,
            "precision": f"{precision}; {how}",
            "accuracy": measure_accuracies(head, dataset, features),
            "solve": solve,
            "key": key,
            "features_sha256": linear.sha256,
            "features": linear.pretraining_key,
        }
        reporter.say(f"cosine head on the backbone of the linear one: {format_accuracies(info['accuracy'])}")
        tensors = {name: value.detach().cpu() for name, value in head.state_dict().items()}
        return restore(CheckpointState(tensors, CheckpointFolder(folder).write_tensors(tensors, info)))

    return get_or_create(folder, read_cached, fit, reporter.warn, "it is fitted again")


def _fit_class_mean_head(network: PrecomputedFeatures, rows: np.ndarray, labels: np.ndarray) -> CosineHead:
    """Return the directions of the class means, with the temperature that suits half of the images [n, D], [n]."""
    from scipy.optimize import minimize_scalar

    means = normalise_with_epsilon(network.means.cpu())
    _, first = np.unique(labels, return_index=True)  # labels ascend
    even = torch.from_numpy((np.arange(len(labels)) - first[labels]) % 2 == 0)
    cosines = (normalise_with_epsilon(torch.from_numpy(np.array(rows))) @ means.T)[even].double()
    targets = torch.from_numpy(labels.astype(np.int64))[even]

    def loss(log_scale: float) -> float:
        return float(F.cross_entropy(np.exp(log_scale) * cosines, targets))

    best = minimize_scalar(loss, bracket=(np.log(INITIAL_TEMPERATURE / 3), np.log(3 * INITIAL_TEMPERATURE)))
    head = CosineHead(network.features, len(means))
    with torch.no_grad():
        head.weight.copy_(means)
        head.scale.fill_(float(np.exp(best.x)))
    return head
