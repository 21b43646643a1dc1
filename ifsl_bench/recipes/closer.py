"""CLOSER: classes that lie closer together, against the habit of pushing them apart (Oh et al., ECCV 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View
from ifsl_bench.recipes.losses import batch_accuracy, cosine_logits, simclr_loss


class Closer(Recipe):
    """Cosine cross-entropy and a contrastive loss over views, less the mean cosine of pairs of different classes.

    ``CE(T cos) + alpha SimCLR(tau) - beta mean cos(f_i, f_j)``, the features themselves being contrasted, without a
    projector. The published weights are alpha 0.1, beta 0.5 on mini-ImageNet and 0.1, 1 on CIFAR-100.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        alpha: weight of the contrastive loss.
        beta: weight of the mean cosine of pairs of different classes.
        temperature: T, which multiplies cosines; the contrastive loss divides by 1/T.
    """

    views = (View(scale=(0.2, 1.0), jitter=0.4, grey=0.2),) * 3

    def __init__(
        self, backbone: Backbone, classes: int, *, alpha: float = 0.1, beta: float = 0.5, temperature: float = 32.0
    ) -> None:
        super().__init__(backbone, classes)
        self.alpha, self.beta, self.temperature = alpha, beta, temperature
        self.weight = nn.Parameter(torch.randn(classes, backbone.features) / backbone.features**0.5)

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        features = self.features(torch.cat(list(views)))
        of_view = labels.repeat(len(views))
        logits = cosine_logits(features, self.weight, self.temperature)
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits, of_view)
        unit = F.normalize(features, dim=1)
        different = of_view[:, None] != of_view
        cosines = (unit @ unit.T)[different].sum() / different.sum().clamp_min(1)
        return {
            "ce": F.cross_entropy(logits, of_view),
            "contrast": self.alpha * simclr_loss(unit.reshape(len(views), len(labels), -1), 1 / self.temperature),
            "closeness": -self.beta * cosines,
        }
