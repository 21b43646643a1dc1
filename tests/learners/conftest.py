"""The stored episodes, and the attractors' centres as their paper computes them from meta-parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ifsl_bench.learners import Network, NetworkArgs, Regression, attention, fold, ridge
from ifsl_bench.plugin.method import Support

ORACLE = Path(__file__).parent.parent / "oracle"
WAYS, HIDDEN = 5, 40
DECAY = float(np.float32(1e-5))  # stored in single precision; without an attractor it was 1e-3, LR and MLP alike
DECAY_NONE = float(np.float32(1e-3))


@dataclass
class Episode:
    """One stored episode, as a batch of one."""

    stored: dict[str, np.ndarray]
    kind: str  # none, static, attn
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.meta = {
            key.split("/")[1]: self.tensor(key).requires_grad_() for key in self.stored if key.startswith("meta/")
        }
        self.weight = self.tensor("in/w_class_a").T  # [K, D]
        self.bias = self.tensor("in/b_class_a")
        self.features = self.tensor("in/x_support")[None]
        self.query = self.tensor("in/x_query")[None]
        labels = torch.as_tensor(self.stored["in/y_support"]).long()[None]
        self.labels = labels - (self.weight.shape[0] if int(labels.max()) >= WAYS else 0)
        self.rest = (self.features @ self.weight.T + self.bias).logsumexp(-1)

    def tensor(self, key: str) -> Tensor:
        return torch.as_tensor(self.stored[key]).to(self.dtype)

    def classes(self, key: str, suffix: str) -> Tensor:
        """A stored weight [D, N] and bias [N] as rows [1, N, D+1]."""
        w, b = self.tensor(f"{key}/w_class_b{suffix}"), self.tensor(f"{key}/b_class_b{suffix}")
        return torch.cat([w, b[None]]).T[None]

    def regression_point(self, key: str) -> Tensor:
        return self.classes(key, "")

    def network_point(self, key: str) -> Network:
        return Network(
            self.classes(key, ""), self.tensor(f"{key}/w_class_b3").T[None].contiguous(), self.classes(key, "2")
        )

    def memory(self, name: str) -> Tensor:
        hidden = torch.tanh(self.weight @ self.meta["w_kb"] + self.meta["b_kb"])
        return hidden @ self.meta[f"w_{name}"] + self.meta[f"b_{name}"]  # [K, .]

    def shares(self, tau: str, mean: bool = False) -> Tensor:
        hidden = torch.zeros(1, len(self.weight), dtype=torch.bool)
        support = Support(self.features, self.labels, hidden, self.features @ self.weight.T + self.bias)
        queries = self.features.mean(1, keepdim=True) if mean else support.class_means(WAYS)
        return attention(queries, self.weight, self.meta[tau])

    def regression(self) -> Regression:
        d = self.features.shape[2]
        if self.kind == "none":
            c, p = ridge(WAYS, d + 1, DECAY_NONE, self.features)
        elif self.kind == "static":
            c, p = fold(self.meta["attr"].expand(1, WAYS, -1), self.meta["log_gamma"], DECAY, WAYS)
        else:
            u = self.shares("tau_qq") @ self.memory("kb2") + self.meta["h_attend_bias"]
            c, p = fold(u, self.meta["log_gamma"], DECAY, WAYS)
        return Regression(self.features, self.labels, self.rest, c, p)

    def network(self) -> NetworkArgs:
        d = self.features.shape[2]
        rows = WAYS, HIDDEN, WAYS
        if self.kind == "none":
            sizes = (WAYS, HIDDEN + 1), (1, d + 1), (WAYS, d)
            parts = [ridge(m, size, DECAY_NONE, self.features) for m, size in sizes]
        else:
            if self.kind == "static":
                u1, u2 = self.meta["attr"].expand(1, WAYS, -1), self.meta["attr2"].expand(1, 1, -1)
                u3 = self.meta["attr3"].expand(1, WAYS, -1)
            else:
                shares, shares_2 = self.shares("tau_qq"), self.shares("tau_qq2", mean=True)
                outer, inner = self.memory("kb21"), self.memory("kb22")
                u1 = shares @ outer + self.meta["h_attend_bias"]
                u2 = shares_2 @ inner[:, : d + 1] + self.meta["h_attend_bias2"]
                u3 = shares @ inner[:, d + 1 :] + self.meta["h_attend_bias3"]
            g1, g2, g3 = (self.meta["log_gamma" + s] for s in ("", "2", "3"))
            centres = (u1, g1), (u2, g2), (u3[..., :-1], g3[:-1])  # the third's last entry faces a constant zero
            parts = [fold(u, g, DECAY, m) for (u, g), m in zip(centres, rows, strict=True)]
        (c1, p1), (c2, p2), (c3, p3) = parts
        return NetworkArgs(self.features, self.labels, self.rest, c1, p1, c3, p3, c2, p2)

    def joint(self, novel: Tensor) -> Tensor:
        """Novel logits [1, N, Q] beside the base classifier's: [Q, K+N]."""
        return torch.cat([self.query @ self.weight.T + self.bias, novel.mT], 2)[0]

    def query_loss(self, novel: Tensor) -> Tensor:
        labels = torch.as_tensor(self.stored["in/y_query"]).long()
        return torch.nn.functional.cross_entropy(self.joint(novel), labels)

    def worst(self, prefix: str) -> float:
        """The largest relative difference between the meta-parameters' gradients and the stored ones."""
        errors = []
        for name, parameter in self.meta.items():
            expected = self.tensor(f"{prefix}/{name}")
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            errors.append(float((gradient - expected).norm() / expected.norm().clamp_min(1e-12)))
        return max(errors)


@pytest.fixture(scope="session")
def episode() -> Callable[..., Episode]:
    def load(name: str, dtype: torch.dtype = torch.float64) -> Episode:
        with np.load(ORACLE / f"{name}_s5_nomask.npz") as file:
            arrays = {key: file[key] for key in file.files}
        return Episode(arrays, name.split("_")[-1], dtype)

    return load
