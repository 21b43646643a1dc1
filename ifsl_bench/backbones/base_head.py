"""The base classifier on features that do not change: trained to convergence, without a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbones.networks import CosineHead, LinearHead, make_head
from ifsl_bench.data.pools import Dataset
from ifsl_bench.utils.cosine import unit
from ifsl_bench.utils.errors import CorruptFile

MOST_STEPS = 1000
TOLERANCE = 1e-5  # of the largest entry of the gradient, in the coordinates of the solve
ROWS = 1 << 14  # that are multiplied at once
TEMPERATURE = 10.0  # of cosine similarities, where the solve begins


def fit_head(
    kind: str, features: np.ndarray, labels: np.ndarray, classes: int, decay: float, device: torch.device
) -> tuple[LinearHead | CosineHead, dict[str, Any]]:
    """Minimises cross-entropy by L-BFGS (SciPy's), from the class means.

    Of a linear classifier ``decay / 2 * |W|^2`` is added, as SGD with that weight decay has it: the problem is convex,
    and its minimum that of the schedule. It is solved for features that are centred and scaled by their standard
    deviation, which moves no minimum and shortens the way. A cosine classifier does not change with the length of its
    weights, so that decay is of its temperature s alone, ``decay / 2 * s^2``, without which s would grow where classes
    can be told apart; its problem is not convex.

    In double precision, since single precision ends the line search early.

    Args:
        kind: "linear" or "cosine".
        features: float32 [n, D].
        labels: int64 [n].

    Returns:
        The classifier, and what is recorded: steps, the largest entry of the gradient, whether it converged.
    """
    from scipy.optimize import minimize

    width = features.shape[1]
    rows, targets = torch.from_numpy(features.astype(np.float64)).to(device), torch.from_numpy(labels).to(device)
    mean, spread = rows.mean(0), rows.std(0).clamp_min(1e-6 * float(rows.std()) + 1e-12)
    if kind == "linear":
        rows = (rows - mean) / spread
        start = np.zeros((classes, width + 1))
        pull = (decay / spread.double() ** 2).cpu().numpy()  # [D], on W in the solve's coordinates
    else:
        rows = unit(rows)
        sums = rows.new_zeros(classes, width).index_add_(0, targets, rows)
        start = np.append(unit(sums).double().cpu().numpy().ravel(), TEMPERATURE)

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(flat).to(device).requires_grad_(True)
        total = 0.0
        for x, y in zip(rows.split(ROWS), targets.split(ROWS), strict=True):
            loss = F.cross_entropy(_logits(kind, v, x, classes), y, reduction="sum") / len(rows)
            loss.backward()
            total += float(loss.detach())
        assert v.grad is not None
        gradient = v.grad.double().cpu().numpy()
        if kind == "linear":
            w = flat.reshape(classes, width + 1)[:, :-1]
            total += 0.5 * float((pull * w**2).sum())
            gradient.reshape(classes, width + 1)[:, :-1] += pull * w
        else:
            total += 0.5 * decay * float(flat[-1]) ** 2
            gradient[-1] += decay * flat[-1]
        return total, gradient

    options = {"maxiter": MOST_STEPS, "maxfun": 2 * MOST_STEPS, "gtol": TOLERANCE, "ftol": 0.0, "maxcor": 20}
    fit = minimize(value, start.ravel(), jac=True, method="L-BFGS-B", options=options)
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
    return head, {"steps": int(fit.nit), "gradient": slope, "converged": slope <= TOLERANCE, "loss": float(fit.fun)}


def accuracies(
    head: LinearHead | CosineHead, dataset: Dataset, features: Callable[[str], np.ndarray]
) -> dict[str, float]:
    """The share of images labelled right, of each pool of base classes that was held out.

    Args:
        features: of a pool, float32 [n, D].
    """
    shares = {}
    for pool in filter(dataset.has, ("base/val", "base/test")):
        with torch.no_grad():
            answers = head(torch.from_numpy(np.array(features(pool)))).argmax(1).numpy()
        shares[pool] = float((answers == dataset.pool(pool).labels).mean())
    return shares


def head_of(state: Mapping[str, Tensor], kind: str, width: int, classes: int, folder: Path) -> LinearHead | CosineHead:
    """The classifier with these tensors; raises :class:`CorruptFile` where they do not fit."""
    head = make_head(kind, width, classes)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise CorruptFile(f"{folder}: the classifier does not fit the network: {error}") from error
    return head.requires_grad_(False)


def _logits(kind: str, v: Tensor, x: Tensor, classes: int) -> Tensor:
    """Logits from the solve's variables: [K (D + 1)], weights and biases; or [K D + 1], weights and one temperature."""
    if kind == "linear":
        w = v.reshape(classes, -1)
        return F.linear(x, w[:, :-1], w[:, -1])
    return v[-1] * F.linear(x, unit(v[:-1].reshape(classes, -1)))
