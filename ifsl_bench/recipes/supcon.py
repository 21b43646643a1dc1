"""Supervised contrastive learning, the first phase of OrCo (Ahmed et al., CVPR 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.networks import LinearHead
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View
from ifsl_bench.recipes.losses import batch_accuracy, simclr_loss, supervised_contrastive_loss


class SupCon(Recipe):
    """``(1 - w) SupCon + w SimCLR`` behind a projector, and cross-entropy of a classifier on features it cannot change.

    The projector is dropped at test.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        temperature: tau of both contrastive losses.
        self_supervised: w, the share of the loss that knows no labels.
        hidden: features of the projector's hidden layer.
        width: features behind the projector.
    """

    views = (View(scale=(0.2, 1.0), jitter=0.4, grey=0.2),) * 2
    training_only = ("projector",)

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        temperature: float = 0.2,
        self_supervised: float = 0.1,
        hidden: int = 2048,
        width: int = 128,
    ) -> None:
        super().__init__(backbone, classes)
        self.temperature, self.self_supervised = temperature, self_supervised
        self.projector = nn.Sequential(nn.Linear(backbone.features, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.head = LinearHead(backbone.features, classes)

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        features = self.features(torch.cat(list(views)))
        projected = F.normalize(self.projector(features), dim=1).reshape(len(views), len(labels), -1)
        logits, of_view = self.head(features.detach()), labels.repeat(len(views))
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits, of_view)
        supervised = supervised_contrastive_loss(projected, labels, self.temperature)
        return {
            "supcon": (1 - self.self_supervised) * supervised,
            "simclr": self.self_supervised * simclr_loss(projected, self.temperature),
            "ce": F.cross_entropy(logits, of_view),
        }

    def classifier(self) -> LinearHead:
        return self.head
