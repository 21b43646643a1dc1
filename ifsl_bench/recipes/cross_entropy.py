"""Cross-entropy, the recipe that all others are compared with, and what is usually added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.networks import CosineHead, LinearHead, make_head
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View
from ifsl_bench.recipes.losses import batch_accuracy, cosine_logits


class CrossEntropy(Recipe):
    """Cross-entropy of a linear or cosine classifier; without an option the training that the suite's weights have had.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        head: "linear", or "cosine" with a temperature.
        temperature: T, which multiplies cosines; None for one that is learned, from 10. TEEN trains with 32 on
            mini-ImageNet and 16 on CIFAR-100.
        margin: subtracted from the cosine to the image's own class (CosFace); below zero it is added, which gathers
            classes less.
        smoothing: the share of a label that is spread over all classes.
        mixup: a of Beta(a, a), from which the shares of two images in a mixed one are drawn (Zhang et al., 2018); 0 for
            plain images.
        cutmix: a of Beta(a, a), from which the share is drawn that stays of an image when a rectangle of another one
            covers the rest (Yun et al., 2019); 0 for plain images.
        jitter: by which colours vary, see :class:`ifsl_bench.View`.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        head: Literal["linear", "cosine"] = "linear",
        temperature: float | None = None,
        margin: float = 0.0,
        smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(backbone, classes)
        self.views = (View(jitter=jitter),)  # type: ignore[misc]
        if head == "linear" and (temperature is not None or margin):
            raise ValueError("temperature and margin are of cosines: set head=cosine, too")
        if mixup and cutmix:
            raise ValueError("mixup and cutmix exclude each other; set one of them")
        if min(mixup, cutmix) < 0 or not 0 <= smoothing < 1 or (temperature is not None and temperature <= 0):
            raise ValueError("mixup and cutmix are 0 or more, smoothing is from 0 to 1, a temperature is above 0")
        if not 0 <= jitter <= 1:
            raise ValueError("jitter is from 0 to 1")
        if margin and (mixup or cutmix):
            raise ValueError("a margin is of one label, and a mixed image has two; leave out margin, or mixing")
        self.head = make_head(head, backbone.features, classes)
        if temperature is not None:
            assert isinstance(self.head, CosineHead)
            self.head.scale = nn.Parameter(torch.tensor(float(temperature)), requires_grad=False)
        self.margin, self.smoothing, self.mixup, self.cutmix = margin, smoothing, mixup, cutmix

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        images = views[0]
        if self.mixup or self.cutmix:
            images, partners, share = self._mix_images(images, at.random)
            logits = self.head(self.features(images))
            terms = [F.cross_entropy(logits, y, label_smoothing=self.smoothing) for y in (labels, labels[partners])]
            value = share * terms[0] + (1 - share) * terms[1]
        else:
            features = self.features(images)
            if self.margin:
                assert isinstance(self.head, CosineHead)
                logits = self.head.scale * cosine_logits(features, self.head.weight, 1.0, labels, self.margin)
            else:
                logits = self.head(features)
            value = F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits, labels)
        return {"loss": value}

    def _mix_images(self, images: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor, float]:
        """Mix each image with another of the batch; return them, indices of the others, and the share that stays."""
        partners = torch.from_numpy(random.permutation(len(images))).to(images.device)
        if self.mixup:
            share = float(random.beta(self.mixup, self.mixup))
            return share * images + (1 - share) * images[partners], partners, share
        height, width = images.shape[2:]
        side = np.sqrt(1 - random.beta(self.cutmix, self.cutmix))
        centres, halves = random.random(2) * (height, width), side * np.array([height, width]) / 2
        top, left = np.clip(np.rint(centres - halves), 0, (height, width)).astype(int)
        bottom, right = np.clip(np.rint(centres + halves), 0, (height, width)).astype(int)
        images = images.clone()
        images[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
        return images, partners, 1 - (bottom - top) * (right - left) / (height * width)

    def classifier(self) -> LinearHead | None:
        return self.head if isinstance(self.head, LinearHead) else None
