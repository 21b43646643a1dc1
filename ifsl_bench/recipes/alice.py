"""ALICE: an angular penalty, mixed classes and two views (Peng et al., ECCV 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View
from ifsl_bench.recipes.losses import batch_accuracy, cosine_logits

PROJECTOR_WIDTH = 2048  # features of the projector
MIXING_BETA = 20.0  # a of Beta(a, a), from which the share of an image in a mixed one is drawn


class Alice(Recipe):
    """Cosine cross-entropy with a margin behind a projector, on plain images and on images of mixed classes.

    An image that mixes classes i and j is of a class of its own, {i, j}; K (K - 1) / 2 of these stand beside the K base
    classes. The projector is dropped at test.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        scale: s, which multiplies cosines.
        margin: m, subtracted from the cosine to the image's own class.
        projector: whether the loss is behind a projector of two layers with 2,048 features.
        mixing: the number of random pairings of a batch, each of which gives a mixed image for each pair of different
            classes; 0 for none.
    """

    views = (View(scale=(0.2, 1.0), jitter=0.4, grey=0.2),) * 2
    training_only = ("projector", "weight")

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        scale: float = 30.0,
        margin: float = 0.4,
        projector: bool = True,
        mixing: int = 1,
    ) -> None:
        super().__init__(backbone, classes)
        if mixing < 0:
            raise ValueError("mixing is a number of pairings, 0 or more")
        self.scale, self.margin, self.mixing = scale, margin, mixing
        self.projector: nn.Module = nn.Identity()
        width = backbone.features
        if projector:
            layers = [nn.Linear(width, PROJECTOR_WIDTH), nn.BatchNorm1d(PROJECTOR_WIDTH), nn.ReLU()]
            self.projector = nn.Sequential(
                *layers, nn.Linear(PROJECTOR_WIDTH, PROJECTOR_WIDTH), nn.BatchNorm1d(PROJECTOR_WIDTH)
            )
            width = PROJECTOR_WIDTH
        mixed = classes * (classes - 1) // 2 if mixing else 0
        self.weight = nn.Parameter(torch.randn(classes + mixed, width) / width**0.5)
        self.passes = float(len(self.views) * (1 + mixing))  # type: ignore[misc]

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        images, targets = list(views), [labels] * len(views)
        for _ in range(self.mixing):
            for view in views:
                partners = torch.from_numpy(at.random.permutation(len(labels))).to(labels.device)
                apart = (labels != labels[partners]).nonzero()[:, 0]
                share = at.random.beta(MIXING_BETA, MIXING_BETA, len(labels))
                lam = torch.as_tensor(share, dtype=view.dtype, device=view.device)[apart, None, None, None]
                images.append(lam * view[apart] + (1 - lam) * view[partners[apart]])
                targets.append(self.classes + number_class_pairs(labels[apart], labels[partners[apart]], self.classes))
        logits_of, y = self.projector(self.features(torch.cat(images))), torch.cat(targets)
        logits = cosine_logits(logits_of, self.weight, self.scale, y, self.margin)
        plain = len(views) * len(labels)
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits[:plain, : self.classes], y[:plain])
        return {"loss": F.cross_entropy(logits, y)}


def number_class_pairs(first: Tensor, second: Tensor, classes: int) -> Tensor:
    """Return the number of each unordered pair of different classes, from 0 to K (K - 1) / 2 - 1.

    The pairs are counted in the order {0, 1}, {0, 2}, ..., {1, 2}, ...

    Args:
        first: int64 [n].
        second: int64 [n], another class of each.
        classes: the number K of classes.
    """
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    return low * (2 * classes - low - 1) // 2 + high - low - 1
