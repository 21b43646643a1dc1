"""Classes of rotated images: each base class becomes A classes, one for each turn of the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.networks import LinearHead
from ifsl_bench.backbones.recipe import Recipe, TrainingStep
from ifsl_bench.recipes.losses import batch_accuracy


class Rotation(Recipe):
    """Cross-entropy over A K classes, label y A + r for the image of class y turned r times (Lee et al., ICML 2020).

    The core of S3C and SAVC. With ``turns`` an image is embedded in all its turns at test, the unit features one behind
    the other: the cosine of two such rows is the mean over turns of the cosines, so that a nearest class mean answers
    by logits that are averaged over turns. A half-turn maps some letters on others.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        angles: A, 2 for half-turns or 4 for quarter-turns.
        turns: whether an image is embedded in all turns at test, A times the features.
    """

    training_only = ("head",)

    def __init__(self, backbone: Backbone, classes: int, *, angles: Literal[2, 4] = 4, turns: bool = True) -> None:
        super().__init__(backbone, classes)
        self.angles, self.turns = angles, turns
        self.head = LinearHead(backbone.features, angles * classes)
        self.passes = float(angles)  # type: ignore[misc]

    def rotate_images(self, images: Tensor) -> Tensor:
        """Return the images in all turns, [A B, C, H, W], the plain ones first."""
        if self.angles == 4 and images.shape[2] != images.shape[3]:  # a half-turn keeps any shape
            raise ValueError(
                f"images of {images.shape[2]} x {images.shape[3]} pixels cannot be turned: they are not square"
            )
        return torch.cat([torch.rot90(images, r * 4 // self.angles, (2, 3)) for r in range(self.angles)])

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        logits = self.head(self.features(self.rotate_images(views[0])))
        targets = torch.cat([labels * self.angles + r for r in range(self.angles)])
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits, targets)
        return {"loss": F.cross_entropy(logits, targets)}

    def embed(self, images: Tensor) -> Tensor:
        if not self.turns:
            return self.features(images)
        units = F.normalize(self.features(self.rotate_images(images)), dim=1) / self.angles**0.5
        return torch.cat(units.chunk(self.angles), 1)
