"""NC-FSCIL's sessions: the neck is tuned towards the corners of a fixed simplex (Yang et al., ICLR 2023)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.method import Base, Method, Prediction, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.errors import UserError

LOSS_WEIGHT = 10.0  # of the loss
MOMENTUM, DECAY = 0.9, 5e-4
WARM_UP, FINAL_STEPS = 5, 5  # the first steps, whose rate rises, and the last ones, whose rate is the least
HIDDEN_LAYER_NAMES = (("layers.0", "layers.1"), ("layers.3", "layers.4"))  # linear map and layer norm of each

TensorByName = dict[str, Tensor]


class EtfNeck(Method):
    """In each session the neck g is tuned until its outputs point to the corners of a simplex that stays as it is.

    Class i, in the order of sessions, has corner e_i; a query's logits are cos(g(h), e_i). Before the first session g
    is the recipe's. A session minimises the mean of

        10/2 (e_y . g(x) / |g(x)| - 1)^2

    over the supports of the session, the mean feature of each novel class of earlier sessions, and of each base class:
    a memory of one mean a class. Yang, Yuan, Li, Lin, Torr & Tao, Neural Collapse Inspired Feature-Classifier Alignment
    for Few-Shot Class-Incremental Learning (ICLR 2023), with the schedule of the released code, a fact; that has no
    licence and was not run: SGD with momentum 0.9 and weight decay 5e-4, five steps of warm-up, a cosine from the rate
    to a hundredth of it, and five steps at a thousandth.

    Differences: a step sees all rows, theirs a shuffled batch of 64; each session has the same number of steps, theirs
    50 to 200, growing; on mini-ImageNet and CUB they count the means of earlier novel classes t times in session t.
    Hidden base classes are in no step.

    Options:
        steps: of a session; 0 leaves the neck as the recipe trained it.
        rate: of learning; 0.025 on mini-ImageNet, 0.05 on CUB and 0.25 on CIFAR-100 in their code.
    """

    name = "etf-neck"
    display: ClassVar = {"etf-neck": ("NC-FSCIL", "a neck tuned to a fixed simplex")}
    needs: ClassVar = ("corners", "neck")
    parallel_copies: ClassVar[bool] = True
    label_slots: ClassVar[bool] = True  # a class's corner is that of its label
    space: ClassVar[SearchSpace] = {"rate": Range(1e-3, 1.0, log=True)}

    def __init__(self, base: Base, ways: int, *, steps: int = 100, rate: float = 0.05) -> None:
        super().__init__(base, ways)
        if steps < 0:
            raise UserError(f"steps must be 0 or more, not {steps}")
        if not 0 < rate < math.inf:
            raise UserError(f"rate must be positive and finite, not {rate}")
        self.steps, self.rate = steps, rate
        numbers = sum(x.numel() for x in self.copy_neck_weights().values())
        self.class_bytes = 4 * base.weight.element_size() * numbers // ways  # values, gradients, momentum and a copy
        self.check_enough_corners(len(base.weight) + ways)

    @classmethod
    def example_extras(cls, classes: int, features: int) -> dict[str, Tensor]:
        wide, more = 2 * features, 5 * classes
        sizes = {"layers.0": (wide, features), "layers.1": (wide,), "layers.3": (wide, wide), "layers.4": (wide,),
                 "layers.6": (features, wide), "shortcut": (features, features)}  # fmt: skip
        neck = {f"neck.{name}.weight": torch.randn(*size) / size[-1] ** 0.5 for name, size in sizes.items()}
        neck |= {f"neck.{name}.bias": torch.zeros(wide) for layer in HIDDEN_LAYER_NAMES for name in layer}
        return {"corners": F.normalize(torch.randn(more, features), dim=-1), **neck}

    def copy_neck_weights(self, count: int = 1) -> TensorByName:
        """Return the weights of the recipe's neck, each [count, ...]."""
        named = {name.removeprefix("neck."): x for name, x in self.base.extras.items() if name.startswith("neck.")}
        return {name: x.expand(count, *x.shape) for name, x in named.items()}

    def check_enough_corners(self, classes: int) -> None:
        """Raise :class:`UserError` where the simplex has fewer corners than there are classes."""
        if classes > (corners := len(self.base.extras["corners"])):
            raise UserError(
                f"the simplex of the recipe has {corners} corners for {classes} classes; set a larger total for it"
            )

    def base_logits(self, query: Query) -> Tensor:
        return self.cosines_with_corners(self.copy_neck_weights(), query.features, len(self.base.weight))

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        episodes, novel = len(support.features), support.class_means(self.ways)  # [E, N, D]
        earlier = before["means"] if isinstance(before, dict) else novel[:, :0]
        weights = before["neck"] if isinstance(before, dict) else self.copy_neck_weights(episodes)
        means = torch.cat([self.base.prototypes.expand(episodes, -1, -1), earlier], 1)
        met = means.shape[1]
        self.check_enough_corners(met + self.ways)
        rows = torch.cat([means, support.features], 1)  # [E, R, D]
        of_means = torch.arange(met, device=rows.device).expand(episodes, -1)
        targets = self.base.extras["corners"][torch.cat([of_means, met + support.labels], 1)]  # [E, R, D]
        counted = F.pad(~support.hidden, (0, rows.shape[1] - support.hidden.shape[1]), value=True)
        weights = self.tune_neck_weights(weights, rows, targets, counted)
        return SessionOutput({"neck": weights, "means": torch.cat([earlier, novel], 1)})

    def tune_neck_weights(self, weights: TensorByName, rows: Tensor, targets: Tensor, counted: Tensor) -> TensorByName:
        """Return the weights of the neck, [E, ...] each, after the steps of a session.

        Args:
            weights: before, [E, ...] each.
            rows: features, [E, R, D].
            targets: the corner of each, [E, R, D].
            counted: [E, R] bool, the rows that are in the loss.
        """
        weights = {name: x.detach().clone() for name, x in weights.items()}
        speeds = {name: torch.zeros_like(x) for name, x in weights.items()}
        share = counted / counted.sum(1, keepdim=True)
        for step in range(self.steps):
            with torch.enable_grad():
                leaves = {name: x.requires_grad_() for name, x in weights.items()}
                cosines = (F.normalize(apply_neck(leaves, rows), dim=-1) * targets).sum(-1)
                loss = LOSS_WEIGHT / 2 * (share * (cosines - 1).square()).sum()
                gradients = torch.autograd.grad(loss, list(leaves.values()))
            rate = learning_rate_of_step(step + 1, self.steps, self.rate)
            for (name, x), gradient in zip(weights.items(), gradients, strict=True):
                x = x.detach()
                speeds[name].mul_(MOMENTUM).add_(gradient + DECAY * x)
                weights[name] = x - rate * speeds[name]
        return weights

    def answer(self, state: State, query: Query) -> Prediction:
        assert isinstance(state, dict)
        classes = len(self.base.weight) + state["means"].shape[1]
        return Prediction(self.cosines_with_corners(state["neck"], query.features, classes))

    def cosines_with_corners(self, weights: TensorByName, rows: Tensor, classes: int) -> Tensor:
        """Return cos(g(h), e_i) of the first corners, [E, R, classes].

        Args:
            weights: of the neck, [E, ...] each.
            rows: features, [E, R, D].
            classes: how many corners.
        """
        return F.normalize(apply_neck(weights, rows), dim=-1) @ self.base.extras["corners"][:classes].T


def apply_neck(weights: TensorByName, rows: Tensor) -> Tensor:
    """Return the neck's outputs: two hidden layers with layer norm, beside a linear map; [E, R, D].

    Args:
        weights: [E, ...] or [1, ...] each.
        rows: features, [E, R, D].
    """
    h = rows
    for linear, norm in HIDDEN_LAYER_NAMES:
        h = h @ weights[f"{linear}.weight"].mT + weights[f"{linear}.bias"].unsqueeze(1)
        h = F.layer_norm(h, h.shape[-1:]) * weights[f"{norm}.weight"].unsqueeze(1)
        h = F.leaky_relu(h + weights[f"{norm}.bias"].unsqueeze(1), 0.1)
    return h @ weights["layers.6.weight"].mT + rows @ weights["shortcut.weight"].mT


def learning_rate_of_step(step: int, steps: int, rate: float) -> float:
    """Return the learning rate of a step.

    Args:
        step: its number, from 1.
        steps: of the session.
        rate: the highest rate.
    """
    if step > steps - FINAL_STEPS:
        return 1e-3 * rate
    falling = 0.01 + 0.99 * (1 + math.cos(math.pi * step / (steps - FINAL_STEPS))) / 2
    rising = 0.1 + 0.9 * step / WARM_UP if step < WARM_UP else 1.0
    return rate * rising * falling
