"""SAVC: turned images as classes of their own, and contrast with a queue of keys (Song et al., CVPR 2023)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View, to_single_or_double
from ifsl_bench.recipes.losses import batch_accuracy, cosine_logits

N_ROTATIONS = 2  # m: each image is seen as it is and upside down
N_SMALL_CROPS = 4  # small crops of an image
COSINE_SCALE = 16.0  # of cosines


class Savc(Recipe):
    """Cosine cross-entropy over K m classes of turned images, and supervised contrast of crops with earlier keys.

    View 1 is classified. The key of view 3 comes from a momentum encoder; view 2 and four small crops are contrasted
    with it and with a queue of keys, of which those of the same class and turn are positive: ``log(1 + sum_n exp(s_n)
    exp(-s_p))``, meaned over positives p, s being cosines over tau. At test the features of both turns stand one behind
    the other, so that cosines are means over turns.

    The released code pairs half of the small crops with the key and the label of the image's other turn;
    ``crops="released"`` does the same.

    Args:
        backbone: images to features.
        classes: the number K of base classes.
        alpha: weight of the contrast of view 2.
        beta: weight of the contrast of small crops.
        temperature: tau.
        momentum: of the momentum encoder.
        queue: number of keys, as many as a step has at least.
        width: features of a key.
        crops: "right", or "released" as above.
    """

    views = (
        View(),
        View(scale=(0.2, 1.0), jitter=0.4, grey=0.2),
        View(scale=(0.2, 1.0), jitter=0.4, grey=0.2),
        *(View(scale=(0.05, 0.2), jitter=0.4, grey=0.2, side=0.56),) * N_SMALL_CROPS,
    )
    training_only = ("projector", "key_backbone", "key_projector", "keys", "key_labels", "next_key", "weight")
    keys: Tensor
    key_labels: Tensor
    next_key: Tensor

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        alpha: float = 0.2,
        beta: float = 0.8,
        temperature: float = 0.07,
        momentum: float = 0.995,
        queue: int = 8192,
        width: int = 128,
        crops: Literal["right", "released"] = "right",
    ) -> None:
        super().__init__(backbone, classes)
        self.alpha, self.beta, self.temperature, self.momentum = alpha, beta, temperature, momentum
        self.queue, self.crops, features = queue, crops, backbone.features
        self.weight = nn.Parameter(torch.randn(classes * N_ROTATIONS, features) / features**0.5)
        self.projector = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width))
        self.key_backbone = copy.deepcopy(backbone).requires_grad_(False)
        self.key_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.register_buffer("keys", F.normalize(torch.randn(queue, width), dim=1))
        self.register_buffer("key_labels", torch.full((queue,), -1))
        self.register_buffer("next_key", torch.zeros((), dtype=torch.int64))
        self.passes = N_ROTATIONS * sum(view.side**2 for view in self.views)  # type: ignore[misc]

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        images, query, key, *small = (_add_rotated(view) for view in views)  # [m B, ...] each, the plain ones first
        joint = torch.cat([labels * N_ROTATIONS + r for r in range(N_ROTATIONS)])
        logits = cosine_logits(self.features(images), self.weight, COSINE_SCALE)
        if at.is_logged:
            at.logged_values["accuracy"] = batch_accuracy(logits, joint)
        with torch.no_grad():
            with self.autocast():
                own = self.key_backbone(key)
            own = F.normalize(self.key_projector(to_single_or_double(own)), dim=1)
        of_query = F.normalize(self.projector(self.features(query)), dim=1)
        of_small = F.normalize(self.projector(self.features(torch.cat(small))), dim=1)
        of_crops = torch.arange(len(joint), device=joint.device).repeat(
            N_SMALL_CROPS
        )  # the key, and so the label, of each crop
        if self.crops == "released":  # the first crops are paired with the plain image, the others with the turned one
            images_of, batch = of_crops % len(labels), len(labels)
            of_crops = images_of + batch * (
                torch.arange(len(of_crops), device=joint.device) // (N_SMALL_CROPS // N_ROTATIONS * len(joint))
            )
        terms = {
            "ce": F.cross_entropy(logits, joint),
            "contrast": self.alpha * self._queue_contrast(of_query, own, joint),
            "crops": self.beta * self._queue_contrast(of_small, own[of_crops], joint[of_crops]),
        }
        self.pending = own, joint
        return terms

    def _queue_contrast(self, queries: Tensor, own: Tensor, labels: Tensor) -> Tensor:
        """Return the contrast of queries [n, w] with their own keys [n, w] and with the queue; labels [n]."""
        scores = torch.cat([(queries * own).sum(1, keepdim=True), queries @ self.keys.T], 1) / self.temperature
        positive = F.pad(labels[:, None] == self.key_labels, (1, 0), value=True)
        negatives = torch.where(positive, -torch.inf, scores).logsumexp(1, keepdim=True)
        of_pair = torch.where(positive, F.softplus(negatives - scores), 0.0)  # log(1 + sum of negatives / positive)
        return (of_pair.sum(1) / positive.sum(1)).mean()

    @torch.no_grad()
    def after_step(self, at: TrainingStep) -> None:
        """Replace the oldest keys by those of the step, and move the momentum encoder towards the trained one."""
        keys, labels = self.pending
        if len(keys) > self.queue:
            raise ValueError(f"queue={self.queue} is fewer than the {len(keys)} keys of a step")
        places = (self.next_key + torch.arange(len(keys), device=keys.device)) % self.queue
        self.keys[places], self.key_labels[places] = keys, labels
        self.next_key.copy_((self.next_key + len(keys)) % self.queue)
        pairs = ((self.key_backbone, self.backbone), (self.key_projector, self.projector))
        for slow, fast in pairs:
            for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                old.lerp_(new, 1 - self.momentum)

    def embed(self, images: Tensor) -> Tensor:
        units = F.normalize(self.features(_add_rotated(images)), dim=1) / N_ROTATIONS**0.5
        return torch.cat(units.chunk(N_ROTATIONS), 1)


def _add_rotated(images: Tensor) -> Tensor:
    """Return images [B, C, H, W] and the same upside down, [2 B, C, H, W]."""
    return torch.cat([images, torch.rot90(images, 2, (2, 3))])
