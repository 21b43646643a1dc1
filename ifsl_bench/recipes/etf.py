"""NC-FSCIL: features are drawn to the corners of a fixed simplex for all classes (Yang et al., ICLR 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep
from ifsl_bench.recipes.losses import batch_accuracy

LOSS_WEIGHT = 10.0  # of the loss


def make_simplex(classes: int, features: int, generator: torch.Generator | None = None) -> Tensor:
    """Return a simplex equiangular tight frame [N, D]: N unit vectors with cosines of -1 / (N - 1) to each other.

    ``sqrt(N / (N - 1)) U (I - 1 1^T / N)`` with random orthonormal columns U [D, N] (Yang et al., Eq. 2), transposed.

    Args:
        classes: N, at most D.
        features: D.
        generator: of U; torch's own by default.

    Raises:
        ValueError: more classes than features.
    """
    if classes > features:
        raise ValueError(f"{classes} classes need as many features at least, and there are {features}")
    columns = torch.linalg.qr(torch.randn(features, classes, generator=generator, dtype=torch.float64))[0]
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return ((classes / (classes - 1)) ** 0.5 * columns @ centred).T.float()


class ProjectionNeck(nn.Module):
    """Two hidden layers of twice the features, with layer norm, beside a linear map; [B, D] to [B, D].

    Args:
        features: D.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        wide = 2 * features
        self.layers = nn.Sequential(
            nn.Linear(features, wide),
            nn.LayerNorm(wide),
            nn.LeakyReLU(0.1),
            nn.Linear(wide, wide),
            nn.LayerNorm(wide),
            nn.LeakyReLU(0.1),
            nn.Linear(wide, features, bias=False),
        )
        self.shortcut = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shortcut(x)


class Etf(Recipe):
    """Dot-regression loss, ``10 mean 1/2 (E_y . h - 1)^2`` with h of length one, to a fixed simplex E of N classes.

    A neck of three layers is between backbone and simplex. It stays at test; or features are the backbone's, and the
    neck is an extra for methods that tune it. The simplex is an extra always.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        total: N, the number of corners: base and novel classes, or K and some to spare; None for K.
        neck: "kept" between backbone and classifiers, or "apart" as an extra.
    """

    knows_classes = True
    corners: Tensor

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        total: int | None = None,
        neck: Literal["kept", "apart"] = "kept",
    ) -> None:
        super().__init__(backbone, classes)
        total = classes if total is None else total
        if total < classes:
            raise ValueError(f"total={total} is fewer than the {classes} base classes")
        self.neck, self.is_apart = ProjectionNeck(backbone.features), neck == "apart"
        self.register_buffer("corners", make_simplex(total, backbone.features))

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        cosines = F.linear(F.normalize(self.neck(self.features(views[0])), dim=1), self.corners)  # [B, N]
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(cosines[:, : self.classes], labels)
        own = cosines.gather(1, labels[:, None])
        return {"loss": LOSS_WEIGHT * 0.5 * (own - 1).square().mean()}

    def embed(self, images: Tensor) -> Tensor:
        features = self.features(images)
        return features if self.is_apart else self.neck(features)

    @classmethod
    def provides(cls, options: Mapping[str, Any]) -> Sequence[str]:
        return ("corners", "neck") if options.get("neck") == "apart" else ("corners",)

    def extras(self) -> dict[str, Tensor]:
        neck = {f"neck.{name}": x for name, x in self.neck.named_parameters()} if self.is_apart else {}
        return {"corners": self.corners, **neck}  # [N, D]
