"""FACT: rows for classes to come, and features of mixed images that are drawn to them (Zhou et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, to_single_or_double
from ifsl_bench.recipes.losses import batch_accuracy, cosine_logits

SECOND_CHOICE_CLASSES = 3  # base classes that may have a virtual class as their second choice
MIXING_BETA = 0.5  # a of Beta(a, a), from which the share of one image in a mixed one is drawn, once a batch
MIXING_STAGE = 2  # stages of the backbone, behind which features are mixed


class Fact(Recipe):
    """Cosine cross-entropy over K base rows, and three terms with N - K virtual rows for classes to come.

    L2: with its own row left out, an image is of the virtual class that its class may choose and that is nearest. L3
    and L4: two images of different classes, mixed behind the second stage of the backbone, are of the nearest virtual
    class, and with that left out of the nearest base class. The sum is ``L1 + b (L2 + L3 + L4)``, b being 0.001 on
    CIFAR-100 and 0.01 on mini-ImageNet, where the three terms begin after 150 of 1,000 epochs.

    Virtual rows are trained by L3 and L4 alone. The released code multiplies logits by the mask of choices, so that
    where all chosen logits are negative a class wins that may not be chosen; ``mask="released"`` does the same.

    Args:
        backbone: images to features, with its ``stages``.
        classes: the number K of base classes.
        total: N, the number of base and novel classes.
        balance: b.
        temperature: T, which multiplies cosines.
        start: the share of the training after which L2 to L4 begin.
        mask: "written", where a virtual class that may not be chosen has no chance, or "released".
    """

    knows_classes = True
    passes = 2.0  # the second one begins behind the second stage
    training_only = ("mask",)
    mask: Tensor

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        total: int | None = None,
        balance: float = 0.01,
        temperature: float = 16.0,
        start: float = 0.15,
        mask: Literal["written", "released"] = "written",
    ) -> None:
        super().__init__(backbone, classes)
        total = classes + 1 if total is None else total
        if total <= classes:
            raise ValueError(f"total={total} leaves no virtual class beside the {classes} base classes")
        if len(backbone.stages) <= MIXING_STAGE:
            raise ValueError(
                f"{type(backbone).__qualname__} has {len(backbone.stages)} stages, and features are mixed "
                f"behind stage {MIXING_STAGE}; more are needed"
            )
        self.balance, self.temperature, self.start, self.masked_as = balance, temperature, start, mask
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(total, backbone.features)))
        picked = torch.rand(total - classes, classes).argsort(1)[:, :SECOND_CHOICE_CLASSES]
        allowed = torch.zeros(total - classes, classes, dtype=torch.bool).scatter_(1, picked, True)
        self.register_buffer("mask", allowed.T.contiguous())  # [K, N - K]

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        with self.autocast():
            inner = views[0]
            for stage in self.backbone.stages[:MIXING_STAGE]:
                inner = stage(inner)
        features = self._continue_after_mixing(inner)
        # Virtual rows are fixed here.
        rows = torch.cat([self.weight[: self.classes], self.weight[self.classes :].detach()])
        logits = cosine_logits(features, rows, self.temperature)
        base = logits[:, : self.classes]
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(base, labels)
        terms = {"ce": F.cross_entropy(base, labels)}
        if at.progress < self.start:
            return terms
        others = logits.scatter(1, labels[:, None], -torch.inf)
        virtual, allowed = logits[:, self.classes :], self.mask[labels]
        choice = virtual * allowed if self.masked_as == "released" else torch.where(allowed, virtual, -torch.inf)
        terms["second choice"] = self.balance * F.cross_entropy(others, self.classes + choice.argmax(1))
        partners = torch.from_numpy(at.random.permutation(len(labels))).to(labels.device)
        share = float(at.random.beta(MIXING_BETA, MIXING_BETA))
        mixed = self._continue_after_mixing(share * inner + (1 - share) * inner[partners])
        mixed = mixed[labels != labels[partners]]
        if not len(mixed):
            return terms
        logits = cosine_logits(mixed, self.weight, self.temperature)
        nearest = self.classes + logits[:, self.classes :].argmax(1)
        base_choice = logits[:, : self.classes].argmax(1)
        terms["virtual"] = self.balance * F.cross_entropy(logits, nearest)
        terms["back"] = self.balance * F.cross_entropy(logits.scatter(1, nearest[:, None], -torch.inf), base_choice)
        return terms

    @classmethod
    def provides(cls, options: Mapping[str, Any]) -> Sequence[str]:
        return ("virtual",)

    def extras(self) -> dict[str, Tensor]:
        return {"virtual": self.weight[self.classes :]}  # [N - K, D]

    def _continue_after_mixing(self, inner: Tensor) -> Tensor:
        """Continue from the mixing point to features, [B, D]."""
        with self.autocast():
            for stage in self.backbone.stages[MIXING_STAGE:]:
                inner = stage(inner)
        return to_single_or_double(inner)
